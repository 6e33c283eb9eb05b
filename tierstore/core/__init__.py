"""The decisions of a store below HBM: index, leases, residency, eviction, write-behind. This package has no
sockets.

``state.py`` holds all mutable state behind one lock. With its parts it makes every decision: which pages are
held and for how long (``index/leases.py``), which pages are evicted, which slot a page gets, and which uses
the disk records (``residency.py``). No code does I/O or copies pages while it holds that lock.
``write_queue.py`` holds the pages that wait to be written. ``health.py`` decides whether the disk may be used
and notices when it stops answering.
"""
