"""The store: one index, one mover, one policy over a stack of tiers.

How a page travels, and which file decides or moves::

    save   HBM page or caller's buffer ──mover──▶ host slot ──writer──▶ disk
           save.py                                          write_behind.py
    load   disk ──mover──▶ host slot ──mover──▶ HBM page or caller's buffer
           load.py (a prefetch is a load that ends in the host tier)

(``load_job.py`` is what all loads have in common, ``destinations.py`` where they go, ``write_queue.py`` what
waits to be written. ``health.py`` knows whether the disk may be asked, ``lookout.py`` notices when it stops
answering.)

``state.py`` holds everything that can change, behind one lock, and with its parts makes every decision: what
is held and for how long (``leases.py``), who leaves and where there is room (``room.py``), what is given back
then (``holdings.py``), which slot is filled (``fills.py``), which page of the pool is shared
(``hbm_cache.py``), what the disk hears of uses (``uses.py``). Nobody does I/O or copies bytes while holding
that lock; the jobs in ``load.py``, ``save.py`` and ``write_behind.py`` ask the state what to do, do it
outside the lock, and report back.

Three rules keep bytes and bookkeeping together:

* a copy is ``ready`` only after its last byte is in place, and only ready copies are matched;
* whoever reads or fills a copy holds a lease on it, and a leased copy's place is never reused;
* a disk copy is ready only after its commit, and its place is reused only after the commit that removed it.
"""

from tierstore.store.base import Hit, Store
from tierstore.store.load import Loaded

__all__ = ["Hit", "Loaded", "Store"]
