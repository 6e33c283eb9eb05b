"""Quantised KV: what is lost, that history leaves no trace in a page, and that formats never meet."""

from __future__ import annotations

import shutil
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from safetensors.torch import load_file, save_file

from tests.engine.stored import Stored
from tierstore.errors import SpecError, UsageError
from tierstore.spec import KVSpec
from tierstore.tiers.hbm import PagePool
from tierstore_engine.attention import cpu, make_attention
from tierstore_engine.attention.base import Attention, BatchLayout, Span
from tierstore_engine.attention.pages import kv_pages
from tierstore_engine.build import build_engine, load_model, open_model
from tierstore_engine.calibration import measure_ranges, write_ranges
from tierstore_engine.config import ModelConfig
from tierstore_engine.errors import ModelError
from tierstore_engine.kv_format import CODES, KVFormat, quantise
from tierstore_engine.loaded import LoadedModel
from tierstore_engine.sampling import SamplingParams

from .test_attention import CHUNK, config_of, plain

PAGES = 32
FORMATS = [*CODES, "int8/int4", "fp8_e4m3/int4", "int4/fp8_e5m2"]

formats = st.sampled_from(FORMATS)
codes = st.sampled_from(list(CODES))
numbers = st.floats(-(2.0**60), 2.0**60, width=32) | st.floats(-8, 8, width=32)
vectors = arrays(np.float32, (3, 8), elements=numbers)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "BLOCK_TOKENS", 8)


@given(name=codes, values=vectors)
def test_the_error_of_a_number_is_within_the_codes_bound(name: str, values: np.ndarray) -> None:
    code, exact = CODES[name], torch.from_numpy(values)
    packed, scales = quantise(exact, code)
    back = code.decode(packed).double() * scales.double().unsqueeze(-1)
    bound = code.relative * exact.abs().double() + code.absolute * scales.double().unsqueeze(-1)
    assert packed.shape == (3, 8 * code.bits // 8)
    # What a float32 division rounds is beside the bound.
    assert ((back - exact.double()).abs() <= bound + 2.0**-23 * exact.abs().double()).all()
    # A scale is no larger than it has to be, but for a bfloat16's rounding.
    least = exact.abs().amax(-1) / code.largest
    assert (scales.float() <= (least * (1 + 2.0**-7)).clamp(min=2.0**-125)).all()


@pytest.mark.parametrize("name", CODES)
def test_every_number_of_a_code_is_itself(name: str) -> None:
    code = CODES[name]
    every = torch.arange(256, dtype=torch.uint8).unsqueeze(1)
    values = code.decode(every)
    known = (values.abs() <= code.largest).all(1)  # the others are no results: NaN, infinity, -128 and -8
    assert torch.equal(code.decode(code.encode(values[known])), values[known])
    assert known.sum() == {"fp8_e4m3": 254, "fp8_e5m2": 248, "int8": 255, "int4": 225}[name]


@pytest.mark.parametrize("name", CODES)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), struct.unpack("f", b"\xff\xff\xff\x7f")[0]])
def test_what_is_no_number_does_not_become_one(name: str, bad: float) -> None:
    """A model that computes nonsense is not made to look as if it had not."""
    packed, scales = quantise(torch.tensor([[1.0, bad], [1.0, 2.0]]), CODES[name])
    back = CODES[name].decode(packed) * scales.float().unsqueeze(-1)
    assert not back[0].isfinite().all()
    assert back[1].isfinite().all()


def test_zeros_stay_zeros() -> None:
    for code in CODES.values():
        packed, scales = quantise(torch.zeros(2, 8), code)
        assert torch.equal(code.decode(packed) * scales.float().unsqueeze(-1), torch.zeros(2, 8))


# -- attention ----------------------------------------------------------------------------------------


def attention_over(config: ModelConfig) -> tuple[Attention, PagePool]:
    pool = PagePool(config.kv_spec(chunk_tokens=CHUNK), PAGES)
    return make_attention(pool, config), pool


def write(attention: Attention, k: torch.Tensor, v: torch.Tensor, table: list[int], start: int) -> None:
    span = Span((table,), start, start + len(k))
    attention.write(1, k, v, BatchLayout.of([span], chunk_tokens=CHUNK, device="cpu"))


def kept(vectors: torch.Tensor, name: str) -> torch.Tensor:
    packed, scales = quantise(vectors, CODES[name])
    return CODES[name].decode(packed) * scales.float().unsqueeze(-1)


@given(
    name=formats,
    past=st.integers(0, 40),
    new=st.integers(1, 20),
    window=st.none() | st.integers(1, 30),
    dtype=st.sampled_from(["float32", "bfloat16"]),
    seed=st.integers(0, 99),
)
@settings(max_examples=80)
def test_attention_over_codes(
    name: str, past: int, new: int, window: int | None, dtype: str, seed: int
) -> None:
    """On every way through it (decode, chunk, behind a past, window) it is attention over what the codes
    stand for, and its distance from attention over the exact numbers is bounded:
    scores move by ``d = scale × max |q|·|Δk|``, weights by ``e^2d - 1`` in all, values by their own error.
    """
    config = replace(config_of(4, 2, 16, window), kv=KVFormat.parse(name), dtype=dtype)
    attention, _ = attention_over(config)
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(new, 4, 16, generator=generator).to(getattr(torch, dtype))
    k, v = torch.randn(2, past + new, 2, 16, generator=generator).to(getattr(torch, dtype)).float()
    table = torch.randperm(PAGES, generator=generator)[: -(-(past + new) // CHUNK)].tolist()
    if past:
        write(attention, k[:past], v[:past], table, 0)
    write(attention, k[past:], v[past:], table, past)
    batch = BatchLayout.of([Span((table,), past, past + new)], chunk_tokens=CHUNK, device="cpu")
    out = attention.attend(1, q, batch).double()

    kept_k, kept_v = (kept(k, config.kv.keys), kept(v, config.kv.values))
    rounding = 1e-5 if dtype == "float32" else 2e-2
    torch.testing.assert_close(out, plain(q, kept_k, kept_v, window), atol=rounding, rtol=rounding)

    moved = (q.double().abs().flatten(0, 1) @ (kept_k - k).double().abs().flatten(0, 1).T).max() / 16**0.5
    bound = (2 * moved).expm1() * v.abs().max() + (kept_v - v).abs().max()
    assert (out - plain(q, k, v, window)).abs().max() <= bound + rounding


@given(name=formats, static=st.booleans(), data=st.data(), seed=st.integers(0, 99))
@settings(max_examples=60)
def test_how_tokens_came_leaves_no_trace_in_pages(
    name: str, static: bool, data: st.DataObject, seed: int
) -> None:
    """One by one, in chunks, after drafts that were rejected, or all at once: the same bytes."""
    kv = replace(KVFormat.parse(name), ranges=RANGES if static else ())
    config = replace(config_of(4, 2, 16), kv=kv)
    generator = torch.Generator().manual_seed(seed)
    k, v = torch.randn(2, 23, 2, 16, generator=generator)
    table = list(range(6))
    attention, pool = attention_over(config)
    write(attention, k, v, table, 0)
    other, by_steps = attention_over(config)
    done = 0
    while done < len(k):
        if rejected := data.draw(st.integers(0, 24 - done - 1)):
            drafts = 1000 * torch.randn(2, rejected, 2, 16, generator=generator)
            write(other, drafts[0], drafts[1], table, done)
        step = data.draw(st.integers(1, len(k) - done))
        write(other, k[done : done + step], v[done : done + step], table, done)
        done += step
    for array in (pool.array, by_steps.array):
        assert array[5].any()
    span = BatchLayout.of([Span((table,), 22, 23)], chunk_tokens=CHUNK, device="cpu")
    q = torch.randn(1, 4, 16, generator=generator)
    assert torch.equal(attention.attend(1, q, span), other.attend(1, q, span))
    assert np.array_equal(pool.array[:5], by_steps.array[:5])  # the sixth has room that a draft was in


# -- static scales ------------------------------------------------------------------------------------

RANGES = (((1.0, 2.0), (0.5, 4.0)),) * 2


@given(name=codes, seed=st.integers(0, 99))
@settings(max_examples=20)
def test_static_scales_cut_off_and_keep_the_bound_below(name: str, seed: int) -> None:
    kv = KVFormat(name, name, RANGES)
    config = replace(config_of(2, 2, 16), kv=kv)
    attention, pool = attention_over(config)
    k, v = 2 * torch.randn(2, 3 * CHUNK, 2, 16, generator=torch.Generator().manual_seed(seed))
    write(attention, k, v, [4, 2, 7], 0)
    out = torch.empty(2, 2, 3 * CHUNK, 16)
    pages = kv_pages(torch.from_numpy(pool.array), pool.spec, config, gathered=3)
    pages.gather(1, torch.tensor([4, 2, 7]), out)
    code = CODES[name]
    for plane, written in enumerate((k, v)):
        for head, largest in enumerate(RANGES[1][plane]):
            exact = written[:, head].clamp(-largest, largest)
            bound = code.relative * exact.abs() + code.absolute * largest / code.largest + 1e-6
            assert ((out[plane, head] - exact).abs() <= bound).all()
    assert pool.spec.page_bytes == 2 * 2 * 2 * CHUNK * 16 * code.bits // 8  # no scales in it


def test_calibration(tmp_path: Path, run_command: Callable[..., tuple[int, str, str]]) -> None:
    """What was seen is in the file, and other ranges are another identity."""
    file = tmp_path / "scales.json"
    text = "What a model sees when it is calibrated. " * 20
    assert run_command("calibrate", "--model", "tiny", "--prompt", text, str(file))[0] == 0
    model = load_model("tiny", kv_dtype="int8", kv_scales=str(file), device="cpu")
    [keys, values], _ = model.config.kv.ranges
    assert all(0.5 < each < 50 for each in (*keys, *values))
    dynamic = load_model("tiny", kv_dtype="int8", device="cpu")
    file.write_text(file.read_text().replace(str(keys[0]), str(keys[0] + 1)))
    other = load_model("tiny", kv_dtype="int8", kv_scales=str(file), device="cpu")
    assert other.config.kv.ranges[0][0][0] == keys[0] + 1
    assert len({each.identity(each.kv_spec()).digest for each in (model, dynamic, other)}) == 3
    options = ("--model", "tiny", "--prompt", text, "--kv-dtype", "fp8_e4m3", "--max-new-tokens", "3")
    code, _, err = run_command("generate", *options, "--kv-scales", str(file))
    assert (code, err.count("\n")) == (0, 1)


@pytest.mark.parametrize(
    "name", ["tiny-gemma3", "tiny-llama4", "tiny-deepseek", "tiny-qwen3-next", "tiny-nemotron-h"]
)
def test_calibration_of_layer_groups(
    name: str, loaded: Callable[..., LoadedModel], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The ranges are those of what each layer writes, also of tokens that have left a window."""
    model, tokens = loaded(name), [number * 37 % 250 for number in range(700)]
    seen: dict[tuple[int, int], torch.Tensor] = {}
    write_plainly = cpu.CpuAttention.write

    def write(
        self: cpu.CpuAttention,
        layer: int,
        keys: torch.Tensor,
        values: torch.Tensor | None,
        batch: BatchLayout,
    ) -> None:
        for plane, new in enumerate((keys,) if values is None else (keys, values)):
            largest = new.abs().amax((0, 2))
            seen[layer, plane] = torch.maximum(seen.get((layer, plane), largest), largest)
        write_plainly(self, layer, keys, values, batch)

    monkeypatch.setattr(cpu.CpuAttention, "write", write)
    ranges = measure_ranges(model, tokens)
    monkeypatch.undo()
    assert {(layer, plane) for layer, planes in enumerate(ranges) for plane in range(len(planes))} == set(
        seen
    )
    for (layer, plane), largest in seen.items():
        assert ranges[layer][plane] == tuple(largest.tolist())

    file = tmp_path / "scales.json"
    write_ranges(model.config, ranges, file)
    static = load_model(name, kv_dtype="int8", kv_scales=str(file), device="cpu")
    assert static.config.kv.ranges == ranges
    float_bytes, static_bytes = (each.kv_spec().split()[0].page_bytes for each in (model, static))
    assert static_bytes * 4 == float_bytes  # float32, and no scales in it
    params = SamplingParams(max_new_tokens=4, ignore_eos=True, keep_logits=True)
    cold, warm = (build_engine(each, pool_pages=64, prefix_cache=True) for each in (model, static))
    [exact] = cold.generate([tokens], params)
    for reused in (False, True):
        [found] = warm.generate([tokens], params)
        assert bool(found.metrics.reused_tokens) is reused
        assert exact.logits is not None
        assert found.logits is not None
        assert abs(found.logits[0] - exact.logits[0]).max() < 0.3 * exact.logits[0].std()
    cold.close()
    warm.close()


@pytest.mark.parametrize("name", ["self_attn.k_scale", "self_attn.k_proj.k_scale", "self_attn.attn.k_scale"])
def test_scales_of_a_checkpoint(name: str, checkpoints: Callable[..., Path], tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(checkpoints("qwen3"), folder)
    with pytest.raises(ModelError, match="no scale of one number"):
        open_model(str(folder), kv_dtype="fp8_e4m3", kv_scales="checkpoint")
    tensors = load_file(folder / "model.safetensors")
    for layer in range(3):
        for plane in "kv":
            key = f"model.layers.{layer}.{name.replace('k_', f'{plane}_')}"
            tensors[key] = torch.tensor(0.25 + layer).reshape([1] * (layer % 2))
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    kv = open_model(str(folder), kv_dtype="fp8_e4m3", kv_scales="checkpoint").config.kv
    assert kv.ranges == tuple((((0.25 + layer) * 448,) * 2,) * 2 for layer in range(3))
    assert kv.static_scales(1, 0).tolist() == [1.25, 1.25]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (None, "cannot read"),
        ("not json", "not written by calibrate"),
        ('{"model": "other", "ranges": []}', "another model"),
        ('{"model": "MODEL", "ranges": [[[1, 1], [1, 1]]]}', "does not have a range for each"),
        ('{"model": "MODEL", "ranges": [[[1, 1], [1, 1]], [[1, 1], [1, 0]]]}', "a range that is not between"),
    ],
)
def test_files_that_are_no_calibration(text: str | None, says: str, tmp_path: Path) -> None:
    file = tmp_path / "scales.json"
    if text is not None:
        file.write_text(text.replace("MODEL", open_model("tiny").config.digest()))
    with pytest.raises(UsageError, match=says):
        open_model("tiny", kv_dtype="int8", kv_scales=str(file))


def test_scales_that_nothing_needs() -> None:
    with pytest.raises(UsageError, match="needs a --kv-dtype"):
        open_model("tiny", kv_scales="scales.json")
    with pytest.raises(UsageError, match="a preset has no checkpoint"):
        open_model("tiny", kv_dtype="int8", kv_scales="checkpoint")


# -- layout and identity ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FORMATS)
def test_a_layers_scales_are_behind_its_tiles(name: str) -> None:
    config = replace(config_of(4, 2, 16), kv=KVFormat.parse(name))
    attention, pool = attention_over(config)
    spec = pool.spec
    ranges = []
    for layer in range(config.layers):
        tiles, scales = (
            [where(layer, plane, head) for plane in (0, 1) for head in (0, 1)]
            for where in (spec.tile, spec.scales)
        )
        assert (tiles[0].start, scales[-1].stop) == (spec.layer(layer).start, spec.layer(layer).stop)
        ranges += tiles + scales
    assert [each.start for each in ranges] == [0, *(each.stop for each in ranges[:-1])]
    assert ranges[-1].stop == spec.page_bytes
    assert KVSpec.parse(spec.describe()) == spec

    k, v = torch.randn(2, CHUNK, 2, 16)
    write(attention, k, v, [3], 0)
    for plane, (written, code) in enumerate(zip((k, v), config.kv.codes, strict=True)):
        for head in (0, 1):
            packed, scales = quantise(written[:, head], code)
            tile, scale = spec.tile(1, plane, head), spec.scales(1, plane, head)
            assert pool.array[3, tile.start : tile.stop].tobytes() == packed.numpy().tobytes()
            held = torch.from_numpy(pool.array[3, scale.start : scale.stop]).view(torch.bfloat16)
            assert torch.equal(held, scales)


def test_no_two_formats_have_one_identity(loaded: Callable[..., LoadedModel]) -> None:
    models = [loaded("tiny", kv_dtype=name) for name in ("auto", *FORMATS)]
    assert len({model.identity(model.kv_spec()).digest for model in models}) == len(models)
    assert loaded("tiny", kv_dtype="k8v4").config == loaded("tiny", kv_dtype="int8/int4").config


def test_pages_of_another_format_are_not_found(
    loaded: Callable[..., LoadedModel], stored_engine: Callable[..., Stored]
) -> None:
    params = SamplingParams(max_new_tokens=4, ignore_eos=True)
    prompt = [[number % 256 for number in range(100)]]
    for name in ("auto", "int8", "fp8_e4m3", "k8v4"):
        for reused in (0, 96):
            stored = stored_engine(loaded("tiny", kv_dtype=name), disk="store")
            [completion] = stored.engine.generate(prompt, params)
            assert stored.store.flush(30)
            stored.close()
            assert completion.metrics.reused_tokens == reused


@pytest.mark.parametrize("name", ["int3", "int8/", "int8/int4/int4", "auto/int8", "float32", ""])
def test_what_is_no_format(name: str) -> None:
    with pytest.raises(UsageError, match="unknown KV dtype"):
        open_model("tiny", kv_dtype=name)


def test_vectors_that_fill_no_bytes() -> None:
    with pytest.raises(SpecError, match="do not fill whole bytes"):
        KVSpec.uniform(layers=1, kv_heads=1, head_dim=7, dtype="int4")
    with pytest.raises(SpecError, match="odd byte"):
        KVSpec.uniform(
            layers=1, kv_heads=1, head_dim=2, dtype="int8", value_dtype="int4", scaled=True, chunk_tokens=1
        )
