"""What a store decides below HBM: index, leases, residency, eviction, write-behind. No socket is here.

``state.py`` holds everything that can change, behind one lock, and with its parts makes every decision: what
is held and for how long (``index/leases.py``), who leaves, what is given back then, which slot is filled and
what the disk hears of uses (``residency.py``). Nobody does I/O or copies bytes while holding that lock.
``write_queue.py`` is what waits to be written, ``health.py`` knows whether the disk may be asked and notices
when it stops answering."""
