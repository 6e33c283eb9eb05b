"""Weights that stay in their file give the logits of weights in memory, and take the memory of few layers."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.engine.test_gguf import file as file  # a fixture
from tests.engine.test_gguf import source as source
from tests.engine.test_quantised import CASES, quantise_folder
from tierstore import native
from tierstore.errors import UsageError
from tierstore.testing.clock import wait_until
from tierstore_engine.build import build_engine, load_model, open_model
from tierstore_engine.errors import ModelError
from tierstore_engine.loaded import LoadedModel
from tierstore_engine.sampling import SamplingParams
from tierstore_engine.settings import EngineSettings
from tierstore_engine.weights_on_disk import MappedFile, WeightStream

PARAMS = SamplingParams(max_new_tokens=6, ignore_eos=True, keep_logits=True)
MODELS = [
    "llama3",
    "llama-linear-mqa-biased",
    "gemma3",
    "deepseek-v3",
    "qwen3-next",
    "mixtral",
    "jamba",
    "zamba2",
]
LEFT_OUT = "leave out --weights-on-disk"


def logits_of(
    model: LoadedModel, prompts: list[list[int]]
) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    settings = EngineSettings(prefill_chunk=64, max_sequences=4)
    engine = build_engine(model, pool_pages=64, chunk_tokens=16, settings=settings)
    try:
        found = [each.logits for each in engine.generate(prompts, PARAMS)]
    finally:
        engine.close()
    return np.stack([each for each in found if each is not None])


def check_equal(place: str) -> None:
    here, there = load_model(place, device="cpu"), load_model(place, device="cpu", weights_on_disk=True)
    assert there.weights.stream is not None
    prompts = [list(range(3, 80)), list(range(5, 30))]
    expected, found = logits_of(here, prompts), logits_of(there, prompts)
    if native.DECODE is not None:
        assert np.array_equal(expected, found)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", MODELS)
def test_logits(name: str, checkpoints: Callable[..., Path]) -> None:
    check_equal(str(checkpoints(name)))


def test_several_files(checkpoints: Callable[..., Path]) -> None:
    check_equal(str(checkpoints("llama3", sharded=True)))


@pytest.mark.parametrize("case", ["fp8 channel", "fp8 experts and latents", "fp8 delta"])
def test_quantised_weights(case: str, checkpoints: Callable[..., Path], tmp_path: Path) -> None:
    quantise_folder(CASES[case], checkpoints(CASES[case].family), tmp_path / "model")
    check_equal(str(tmp_path / "model"))


def test_gguf(file: Path) -> None:
    check_equal(str(file))


@pytest.mark.parametrize("case", ["gptq", "awq"])
def test_rearranged_weights_are_refused(case: str, checkpoints: Callable[..., Path], tmp_path: Path) -> None:
    quantise_folder(CASES[case], checkpoints("llama3"), tmp_path / "model")
    with pytest.raises(ModelError, match=LEFT_OUT):
        load_model(str(tmp_path / "model"), device="cpu", weights_on_disk=True)


def test_what_is_refused(checkpoints: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="a preset has no file"):
        open_model("tiny", weights_on_disk=True)
    llama = str(checkpoints("llama3"))
    with pytest.raises(UsageError, match="--expand-weights makes others"):
        open_model(llama, weights_on_disk=True, expand_weights=True)
    monkeypatch.setattr("tierstore_engine.build.resolve_device", lambda *_: "cuda")
    with pytest.raises(UsageError, match="give --device cpu"):
        open_model(llama, weights_on_disk=True)


def resident(mapped: MappedFile) -> int:
    """The bytes of a mapping that are in this process's memory."""
    start = f"{mapped.bytes.data_ptr():x}-"
    lines = Path("/proc/self/smaps").read_text().splitlines()
    at = next(number for number, line in enumerate(lines) if line.startswith(start))
    rss = next(line for line in lines[at:] if line.startswith("Rss:"))
    return int(rss.split()[1]) * 1024


def test_layers_leave_memory(tmp_path: Path) -> None:
    """At any time the layer that is computed may be in memory, and nothing of the others."""
    layers, nbytes = 6, 4 << 20
    path = tmp_path / "weights"
    with path.open("wb") as out:
        out.truncate(layers * nbytes)
    mapped = MappedFile(path)
    parts = [[mapped.bytes[n * nbytes : (n + 1) * nbytes]] for n in range(layers)]
    stream = WeightStream(parts, [mapped])
    for _ in range(2):
        for number, [part] in enumerate(parts):
            stream.begin(number)
            assert resident(mapped) == 0
            assert int(part.sum()) == 0
            assert resident(mapped) == nbytes
    stream.release()
    assert resident(mapped) == 0


def cached(file: Path, at: int) -> bool:
    """Whether the page cache has this byte of a file."""
    fd = os.open(file, os.O_RDONLY)
    try:
        return os.preadv(fd, [bytearray(1)], at, os.RWF_NOWAIT) == 1
    except BlockingIOError:
        return False
    finally:
        os.close(fd)


def test_the_next_layer_is_read_ahead(tmp_path: Path) -> None:
    layers, nbytes = 3, 4 << 20
    path = tmp_path / "weights"
    path.write_bytes(bytes(layers * nbytes))
    with path.open("rb") as written:
        os.fsync(written.fileno())
    mapped = MappedFile(path)
    mapped.drop(0, layers * nbytes)
    if cached(path, nbytes):
        pytest.skip("this file system keeps files in memory")
    stream = WeightStream([[mapped.bytes[n * nbytes : (n + 1) * nbytes]] for n in range(layers)], [mapped])
    for layer in (1, 2, 0):
        stream.begin((layer - 1) % layers)
        wait_until(lambda layer=layer: cached(path, layer * nbytes + nbytes // 2))
    assert not cached(path, nbytes + nbytes // 2)  # two layers behind


def test_a_layer_that_is_not_in_a_file() -> None:
    with pytest.raises(ValueError, match="in no file"):
        WeightStream([[torch.zeros(3)]], [])


def test_loading_reads_no_weights_into_memory(tmp_path: Path, checkpoints: Callable[..., Path]) -> None:
    """The digest is of all bytes, and they have left memory after it."""
    model = load_model(str(checkpoints("llama3")), device="cpu", weights_on_disk=True)
    assert model.weights.stream is not None
    [mapped] = model.weights.stream.files
    assert resident(mapped) <= 2 * 4096  # the ends that share a page with other tensors
