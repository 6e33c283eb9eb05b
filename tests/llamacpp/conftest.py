"""A real llama-server and a real ``llama_cpp`` with small models, over a real daemon. Without them all of
this is skipped; ``make test-llamacpp`` has an environment with both."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tests.llamacpp.programs import LLAMA_SERVER, LlamaServerProcess, ProxyProcess
from tierstore_tools.vllm.daemon import ServeProcess

_HERE = Path(__file__).parent
_NEEDED = ("llama_cpp", "gguf", "httpx", "starlette", "uvicorn")
MISSING = LLAMA_SERVER is None or any(importlib.util.find_spec(name) is None for name in _NEEDED)


def pytest_collection_modifyitems(items):
    for item in items:
        if _HERE in item.path.parents:
            item.add_marker(pytest.mark.filterwarnings("default"))
            if MISSING:
                item.add_marker(pytest.mark.skip(reason="no llama.cpp here; make test-llamacpp"))


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    """Paths of tiny models: ``models(seed=1, windows=True)``."""
    from tests.llamacpp.tiny import write_tiny

    folder = tmp_path_factory.mktemp("models")

    def model(**kind):
        name = "-".join(f"{key}{value}" for key, value in sorted(kind.items())) or "tiny"
        path = folder / f"{name}.gguf"
        return path if path.exists() else write_tiny(path, **kind)

    return model


@pytest.fixture
def daemon(tmp_path):
    process = ServeProcess(tmp_path, host_bytes=128 << 20).start()
    yield process
    process.close()


@pytest.fixture
def server():
    """Starts llama-servers: ``server(model, "-c", "4096")``."""
    running = []

    def start(model, *options):
        running.append(LlamaServerProcess(model, *options))
        return running[-1]

    yield start
    for each in running:
        each.close()


@pytest.fixture
def proxy():
    """Starts proxies: ``proxy(server, daemon)``."""
    running = []

    def start(server, daemon, *options):
        running.append(ProxyProcess(server.url, daemon.url, *options))
        return running[-1]

    yield start
    for each in running:
        each.close()
