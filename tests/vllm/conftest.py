"""A real vLLM on a CPU, real models (small, random) and a real daemon. Without vLLM all of this is skipped;
``make test-vllm`` has an environment with it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.serving import make_daemon
from tests.vllm import models
from tierstore_tools.vllm import engine

__all__ = ["make_daemon"]

_HERE = Path(__file__).parent
_TEST_S = 1200  # an engine starts in 10 s on an idle machine of two cores, and in a minute on a busy one


def pytest_collection_modifyitems(items):
    """Test modules must be importable without vLLM: they import it (if they must) in the test."""
    missing = engine.missing()
    for item in items:
        if _HERE in item.path.parents:
            item.add_marker(pytest.mark.filterwarnings("default"))  # vLLM's imports warn, and are not ours
            if item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(_TEST_S))
            if missing is not None:
                item.add_marker(pytest.mark.skip(reason=f"{missing}; make test-vllm"))


@pytest.fixture(scope="session")
def model(request, tmp_path_factory):
    """``model(models.LLAMA)``: the directory of a model."""
    kept = request.config.pluginmanager.hasplugin("cacheprovider")  # not with -p no:cacheprovider
    cache = request.config.cache.mkdir("vllm-models") if kept else tmp_path_factory.mktemp("vllm-models")
    return lambda kind: models.model(kind, cache)


@pytest.fixture
def daemon(make_daemon):
    """A running daemon: 64 MiB of host memory, 1 GiB of disk."""
    return make_daemon()
