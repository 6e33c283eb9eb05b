"""What an engine talks to: one :class:`Store`, its own HBM pages over one backend; or a
:class:`GroupedStore`, one for each layer group of its model.

How a page travels, and which file moves it::

    save   HBM page or caller's buffer ──mover──▶ host slot ──writer──▶ disk
           save.py                                          core/write_behind.py
    load   disk ──mover──▶ host slot ──mover──▶ HBM page or caller's buffer
           core/loads.py              load.py

``hbm.py`` is what the store decides itself: which pages of the engine's pool are found, who holds them, and
who leaves. Everything below it is a :class:`~tierstore.backend.Backend`'s.

Three rules keep bytes and bookkeeping together:

* a copy is ``ready`` only after its last byte is in place, and only ready copies are matched;
* whoever reads or fills a copy holds a lease on it, and a leased copy's place is never reused;
* a disk copy is ready only after its commit, and its place is reused only after the commit that removed it.
"""

from tierstore.store.grouped import GroupedHit, GroupedPrompt, GroupedStore
from tierstore.store.hit import Hit
from tierstore.store.store import Store, lookup_all

__all__ = ["GroupedHit", "GroupedPrompt", "GroupedStore", "Hit", "Store", "lookup_all"]
