from __future__ import annotations

import pytest

from tests.tierstore.tiers.disk.shelf import Shelf


@pytest.fixture
def path(tmp_path):
    """Where a store may be made."""
    return tmp_path / "store"


@pytest.fixture
def open_shelf(path):
    """Opens shelves that are checked and closed at the end of the test."""
    shelves = []

    def open_shelf(where=path, **options):
        shelves.append(Shelf(where, **options))
        return shelves[-1]

    yield open_shelf
    for shelf in shelves:
        shelf.close()
