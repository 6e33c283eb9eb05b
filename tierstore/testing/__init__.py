"""For whoever writes a store, a connector, a tier or a test.

``store.py`` is the conformance suite for stores. ``faulty_io.py`` makes any call of the disk tier slow,
flaky, full or wrong, and counts calls. ``clock.py`` has a clock moved by hand, and ``wait_until``.
``pages.py`` makes page bytes that tell whose they are.
"""
