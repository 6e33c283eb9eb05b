"""The store of an engine: a :class:`Store` over one backend, with the engine's own HBM pages, for all layer
groups of a model.

These files move the bytes of a page::

    save   HBM page or caller's buffer ──mover──▶ host slot ──writer──▶ disk
           save.py                                          core/write_behind.py
    load   disk ──mover──▶ host slot ──mover──▶ HBM page or caller's buffer
           core/loads.py              load.py, destinations.py

``lookup.py`` finds the longest hit that all groups support, and ``hit.py`` has the class of that hit.
``hbm.py`` manages the engine's pools: which of their pages lookups can find, what holds them, and which pages
are evicted. Everything below HBM belongs to a :class:`~tierstore.backend.Backend`.

Three rules keep bytes and bookkeeping consistent:

* A copy becomes ``ready`` only after its last byte is written, and lookups match only ready copies.
* A reader or writer of a copy holds a lease on it, and the place of a leased copy is never reused.
* A disk copy becomes ready only after its commit. Its place is reused only after the commit that removes it.
"""

from tierstore.store.hit import Hit
from tierstore.store.store import Store, lookup_all

__all__ = ["Hit", "Store", "lookup_all"]
