"""Conformance suites and test helpers for authors of stores, backends, connectors and tiers.

``store.py`` is the conformance suite for stores (with ``store_machine.py`` and ``embeddings.py``),
``backend.py`` the one for backends. ``faulty_io.py`` makes file operations of the disk tier fail, hang or
return wrong data, and logs them. ``clock.py`` has a clock that tests advance, and ``wait_until``.
``pages.py`` makes page bytes that identify their tokens.
"""
