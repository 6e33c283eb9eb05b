"""What a store decides below HBM: index, leases, residency, eviction, write-behind. No socket is here.

``state.py`` holds everything that can change, behind one lock, and with its parts makes every decision: what
is held and for how long (``leases.py``), who leaves and where there is room (``room.py``), what is given back
then (``holdings.py``), which slot is filled (``fills.py``), what the disk hears of uses (``uses.py``). Nobody
does I/O or copies bytes while holding that lock. ``write_queue.py`` is what waits to be written,
``health.py`` knows whether the disk may be asked, ``lookout.py`` notices when it stops answering.
"""
