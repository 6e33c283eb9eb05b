"""What an engine talks to: one :class:`Store`, its own HBM pages over one backend, for all layer groups of a
model.

How a page travels, and which file moves it::

    save   HBM page or caller's buffer ──mover──▶ host slot ──writer──▶ disk
           save.py                                          core/write_behind.py
    load   disk ──mover──▶ host slot ──mover──▶ HBM page or caller's buffer
           core/loads.py              load.py, destinations.py

``lookup.py`` finds the longest hit that all groups can serve, ``hit.py`` is that hit. ``hbm.py`` is what the
store decides itself: which pages of the engine's pools are found, who holds them, and who leaves. Everything
below it is a :class:`~tierstore.backend.Backend`'s.

Three rules keep bytes and bookkeeping together:

* a copy is ``ready`` only after its last byte is in place, and only ready copies are matched;
* whoever reads or fills a copy holds a lease on it, and a leased copy's place is never reused;
* a disk copy is ready only after its commit, and its place is reused only after the commit that removed it.
"""

from tierstore.store.hit import Hit
from tierstore.store.store import Store, lookup_all

__all__ = ["Hit", "Store", "lookup_all"]
