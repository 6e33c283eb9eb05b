"""Helpers for authors of stores, connectors, tiers and tests.

``store.py`` is the conformance suite for stores (with ``store_machine.py`` and ``embeddings.py``),
``backend.py`` the one for backends. ``faulty_io.py`` makes any call of the disk tier slow, flaky, full or
wrong, and counts calls. ``clock.py`` has a clock that tests advance, and ``wait_until``. ``pages.py`` makes
page bytes that identify their tokens.
"""
