"""What cannot be had here is skipped, with one line that says why."""

from __future__ import annotations

import importlib.util

import pytest

from tests.cluster.dynamo import Indexer, Selector


def _start(kind):
    if importlib.util.find_spec("dynamo") is None:
        pytest.skip("Dynamo is not installed; make test-cluster")
    return kind()


@pytest.fixture
def indexer():
    process = _start(Indexer)
    yield process
    process.end()


@pytest.fixture
def selector():
    process = _start(Selector)
    yield process
    process.end()
