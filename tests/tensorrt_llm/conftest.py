"""TensorRT-LLM's connector over a real daemon. TensorRT-LLM needs a GPU, so a stand-in with its classes and a
small executor take its place: **nothing here has been run on TensorRT-LLM**."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

if importlib.util.find_spec("tensorrt_llm") is None:
    sys.path.insert(0, str(Path(__file__).parent / "cpu"))

from tests.tensorrt_llm.arguments import write_model
from tests.tensorrt_llm.executor import Executor
from tierstore_tools.vllm.daemon import ServeProcess


@pytest.fixture
def daemon(tmp_path, monkeypatch):
    """A daemon with a disk, which engines find by the variable."""
    process = ServeProcess(tmp_path, host_bytes=64 << 20).start()
    monkeypatch.setenv("TIERSTORE", process.url)
    monkeypatch.setenv("TENSORRT_LLM_TIERSTORE", '{"lookup_s": 5, "load_s": 30}')  # also on a busy machine
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    yield process
    process.close()


@pytest.fixture
def model(tmp_path):
    return write_model(tmp_path / "model")


@pytest.fixture
def engine(daemon, model):
    """``engine(…)``: a new engine, as after a restart."""

    def start(folder=model, **values):
        return Executor(folder, **values)

    return start


@pytest.fixture
def plain(daemon, model, monkeypatch):
    """``plain(*prompts, …)``: what an engine generates that has never had a daemon."""

    def generate(*prompts, **values):
        with monkeypatch.context() as patched:
            patched.setenv("TIERSTORE", "ipc:///tmp/tierstore-no-daemon/s")
            here = Executor(model, blocks=64)
        return here.generate(*prompts, **values)

    return generate
