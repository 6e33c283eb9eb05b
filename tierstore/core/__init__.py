"""The decisions of a store below HBM: index, leases, residency, eviction, write-behind. This package has no
sockets.

``state.py`` holds all mutable state behind one lock. The state makes every decision, together with its parts
``index/leases.py`` (which pages are held and for how long) and ``residency.py`` (which pages are evicted,
which slot a page gets, which uses the disk records). No code does I/O or copies pages while it holds the
state's lock. ``write_queue.py`` holds the pages that wait to be written. ``health.py`` decides whether the
disk may be used and notices when the disk stops answering.
"""
