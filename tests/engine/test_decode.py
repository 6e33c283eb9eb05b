"""The compiled part of decode steps against the same in float64: products of few rows, attention in place."""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.compiled import compile_once
from tests.engine.test_attention import config_of as plain_config
from tierstore import native
from tierstore.tiers.hbm import PagePool
from tierstore_engine.attention import make_attention
from tierstore_engine.attention.base import Attention, BatchLayout, Span
from tierstore_engine.attention.in_place import MOST_TOKENS
from tierstore_engine.config import ModelConfig
from tierstore_engine.kv_format import KVFormat
from tierstore_engine.products import FEW_ROWS, multiply, same_bits

CHUNK = 8
PAGES = 48
COMPILER = shutil.which("cc")
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="no C compiler")
EACH = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=25)


@pytest.fixture(scope="session")
def portable() -> ctypes.CDLL | None:
    """The library as processors without AVX2 run it."""
    if COMPILER is None:
        return None
    flags = ["-O2", "-std=gnu11", "-Wall", "-Wextra", "-Werror", "-DPORTABLE", "-shared", "-fPIC"]
    source = native.DECODE_FILE.with_name("decode.c")
    library = native.load_decode(compile_once("_decode.so", [source], flags, compiler="cc"))
    assert library is not None
    return library


@pytest.fixture(params=["wide", pytest.param("portable", marks=needs_compiler), "torch"])
def library(
    request: pytest.FixtureRequest, portable: ctypes.CDLL | None, monkeypatch: pytest.MonkeyPatch
) -> str:
    """Each way to compute: compiled for this processor and for any, and torch's."""
    if request.param == "wide" and native.DECODE is None:
        pytest.skip("tierstore was built without a C compiler")
    monkeypatch.setattr(
        native, "DECODE", {"wide": native.DECODE, "portable": portable, "torch": None}[request.param]
    )
    return str(request.param)


@pytest.fixture
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


# -- products --------------------------------------------------------------------------------------------


@EACH
@given(
    rows=st.integers(1, FEW_ROWS + 6),
    products=st.integers(1, 70),
    columns=st.integers(1, 70),
    biased=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 99),
)
def test_products(
    library: str, rows: int, products: int, columns: int, biased: bool, dtype: torch.dtype, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    x, weight, bias = (
        torch.randn(shape, generator=generator).to(dtype)
        for shape in ((rows, columns), (products, columns), (products,))
    )
    out = multiply(x, weight, bias if biased else None)
    exact = x.double() @ weight.double().T + (bias.double() if biased else 0)
    assert out.dtype is dtype
    close = {"atol": 1e-5, "rtol": 1e-5} if dtype is torch.float32 else {"atol": 2e-2, "rtol": 1e-2}
    torch.testing.assert_close(out.double(), exact, **close)


def test_a_rows_product_does_not_depend_on_the_others_or_the_threads(threads: None) -> None:
    if native.DECODE is None:
        pytest.skip("tierstore was built without a C compiler")
    x, weight = torch.randn(FEW_ROWS, 300), torch.randn(2048, 300)  # large enough for several threads
    with same_bits():
        whole = multiply(x, weight)
    assert torch.equal(whole, torch.cat([multiply(row[None], weight) for row in x]))
    torch.set_num_threads(1)
    with same_bits():
        assert torch.equal(whole, multiply(x, weight))


def test_calls_at_the_same_time_share_the_threads_that_help(threads: None) -> None:
    """Some calls find the threads busy. A child of a fork has to start its own, also while they work."""
    if native.DECODE is None:
        pytest.skip("tierstore was built without a C compiler")
    x, weights = torch.randn(1, 300), [torch.randn(1024, 300) for _ in range(4)]
    right = [multiply(x, weight) for weight in weights]

    def compute(at: int) -> bool:
        return all(torch.equal(multiply(x, weights[at]), right[at]) for _ in range(100))

    with ThreadPoolExecutor(4) as callers:
        done = [callers.submit(compute, at) for at in range(4)]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of forks beside threads
            child = os.fork()
        if child == 0:
            signal.alarm(30)
            out = torch.empty(right[0].shape)
            decode, sizes = native.DECODE, (1024, 300, native.DECODE_FORMATS["float32"])
            decode.tierstore_multiply(x.data_ptr(), len(x), weights[0].data_ptr(), *sizes, out.data_ptr(), 3)
            helped = len(os.listdir("/proc/self/task")) == 3
            os._exit(0 if helped and torch.equal(out, right[0]) else 1)
        assert os.waitpid(child, 0)[1] == 0
        assert all(each.result() for each in done)


@EACH
@given(
    cuts=st.lists(st.integers(1, 150), min_size=2, max_size=4),
    products=st.integers(1, 60),
    columns=st.sampled_from([1, 7, 64, 101, 512, 513, 600, 1031]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    threads=st.integers(1, 3),
    seed=st.integers(0, 99),
)
def test_rows_have_the_same_bits_in_every_product(
    library: str, cuts: list[int], products: int, columns: int, dtype: torch.dtype, threads: int, seed: int
) -> None:
    if native.DECODE is None:
        pytest.skip("tierstore was built without a C compiler")
    generator = torch.Generator().manual_seed(seed)
    x, weight = (torch.randn(rows, columns, generator=generator).to(dtype) for rows in (sum(cuts), products))
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    with same_bits():
        parts = torch.cat([multiply(part, weight) for part in x.split(cuts)])
        whole = multiply(x, weight)
    assert torch.get_num_threads() == threads
    torch.set_num_threads(before)
    assert torch.equal(whole, parts)
    assert torch.equal(whole[-1], multiply(x[-1:], weight)[0])  # as in a decode step
    exact = x.double() @ weight.double().T
    close = {"atol": 1e-4, "rtol": 1e-5} if dtype is torch.float32 else {"atol": 5e-2, "rtol": 1e-2}
    torch.testing.assert_close(whole.double(), exact, **close)


def test_no_product_is_left_to_torch_where_bits_must_be_the_same() -> None:
    with same_bits(), pytest.raises(RuntimeError, match="float64"):
        multiply(torch.ones(2, 8).double(), torch.ones(3, 8).double())


def test_a_part_of_a_matrix_with_gaps_between_its_rows() -> None:
    x, weight = torch.randn(2, 30), torch.randn(20, 40)
    torch.testing.assert_close(multiply(x, weight[:, :30]), x @ weight[:, :30].T)


@pytest.mark.parametrize("rows", [1, 200])
def test_a_bias_with_gaps_between_its_numbers(library: str, rows: int) -> None:
    """200 rows are a product that is left to torch or oneDNN."""
    x, weight, bias = torch.randn(rows, 32), torch.randn(16, 32), torch.randn(32)[::2]
    torch.testing.assert_close(multiply(x, weight, bias), x @ weight.T + bias, atol=1e-4, rtol=1e-4)


# -- attention -------------------------------------------------------------------------------------------


def config_of(heads: int, kv_heads: int, head_dim: int, **fields: object) -> ModelConfig:
    return replace(plain_config(heads, kv_heads, head_dim), **fields)  # type: ignore[arg-type]


class Written:
    """Sequences of random keys and values in the pages of a pool, and attention over them."""

    def __init__(self, config: ModelConfig, lengths: list[int], seed: int = 0, *, pages: int = PAGES) -> None:
        self.config = config
        self.generator = torch.Generator().manual_seed(seed)
        self.pool = PagePool(config.kv_spec(chunk_tokens=CHUNK), pages)
        self.pool.array[:] = (
            0xFF  # not a number, in every format with floats: only written tokens may be read
        )
        free = torch.randperm(pages, generator=self.generator).tolist()
        self.tables = [[free.pop() for _ in range(-(-length // CHUNK))] for length in lengths]
        self.attention = make_attention(self.pool, config)
        dtype = getattr(torch, config.dtype)
        self.keys, self.values = [], []
        for table, length in zip(self.tables, lengths, strict=True):
            shape = (2, length, config.kv_heads, config.head_dim)
            keys, values = torch.randn(shape, generator=self.generator).to(dtype)
            layout = BatchLayout.of([Span((table,), 0, length)], chunk_tokens=CHUNK, device="cpu")
            self.attention.write(1, keys, values, layout)
            self.keys.append(keys)
            self.values.append(values)

    def attend(
        self, news: list[int], attention: Attention | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Attend with the last ``news`` tokens of each sequence. Return outputs and lse, and both exactly."""
        spans, queries, outs, lses = [], [], [], []
        for table, keys, values, new in zip(self.tables, self.keys, self.values, news, strict=True):
            spans.append(Span((table,), len(keys) - new, len(keys)))
            shape = (new, self.config.heads, self.config.head_dim)
            queries.append(torch.randn(shape, generator=self.generator).to(keys.dtype))
            out, lse = exact(self.config, queries[-1], keys, values)
            outs.append(out)
            lses.append(lse)
        batch = BatchLayout.of(spans, chunk_tokens=CHUNK, device="cpu")
        found = (attention or self.attention).attend_with_lse(1, torch.cat(queries), batch)
        return *found, torch.cat(outs), torch.cat(lses)


def exact(
    config: ModelConfig, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    groups, window, length = config.heads // config.kv_heads, config.window(1), len(keys)
    wide = [each.double().repeat_interleave(groups, 1) for each in (keys, values)]
    scale = config.score_scale or config.head_dim**-0.5
    scores = torch.einsum("qhd,khd->hqk", queries.double(), wide[0]) * scale
    if config.score_cap is not None:
        scores = config.score_cap * torch.tanh(scores / config.score_cap)
    positions = torch.arange(length - len(queries), length)[:, None]
    others = torch.arange(length)[None, :]
    hidden = others > positions
    if window is not None:
        hidden |= others <= positions - window
    scores = scores.masked_fill(hidden, -torch.inf)
    out = torch.einsum("hqk,khd->qhd", scores.softmax(-1), wide[1])
    return out, scores.logsumexp(-1).T


shapes = st.sampled_from([(1, 1, 8), (2, 2, 8), (4, 2, 16), (6, 1, 4), (4, 2, 24), (9, 3, 64), (40, 1, 20)])
sequences = st.lists(st.tuples(st.integers(1, 70), st.integers(1, MOST_TOKENS + 4)), min_size=1, max_size=4)


@EACH
@given(
    shape=shapes,
    sequences=sequences,
    window=st.none() | st.integers(1, 40),
    cap=st.none() | st.just(2.0),
    dtype=st.sampled_from(["float32", "bfloat16"]),
    seed=st.integers(0, 99),
)
def test_attention(
    library: str,
    shape: tuple[int, int, int],
    sequences: list[tuple[int, int]],
    window: int | None,
    cap: float | None,
    dtype: str,
    seed: int,
) -> None:
    config = config_of(*shape, dtype=dtype, windows=(window, window), score_cap=cap)
    written = Written(config, [length for length, _ in sequences], seed)
    out, lse, exact_out, exact_lse = written.attend([min(new, length) for length, new in sequences])
    close = {"atol": 1e-5, "rtol": 1e-5} if dtype == "float32" else {"atol": 2e-2, "rtol": 1e-2}
    torch.testing.assert_close(out.double(), exact_out, **close)
    torch.testing.assert_close(lse.double(), exact_lse, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("spread", [1e-3, 30.0, 1e4], ids=["flat", "sharp", "one-hot"])
def test_scores_of_any_size(library: str, spread: float) -> None:
    written = Written(config_of(4, 2, 16, score_scale=spread), [61, 3])
    out, lse, exact_out, exact_lse = written.attend([1, 2])
    torch.testing.assert_close(out.double(), exact_out, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(lse.double(), exact_lse, atol=1e-4, rtol=1e-5)


def test_layers_with_different_windows(library: str) -> None:
    """A batch is prepared once for all layers that see the same, and again for the others."""
    written = Written(config_of(4, 2, 16, windows=(5, None)), [61, 30])
    spans = [Span((table,), 0, len(keys)) for table, keys in zip(written.tables, written.keys, strict=True)]
    for span, keys, values in zip(spans, written.keys, written.values, strict=True):
        layout = BatchLayout.of([span], chunk_tokens=CHUNK, device="cpu")
        written.attention.write(0, keys, values, layout)
    queries = torch.randn(2, 4, 16)
    ends = [Span(span.tables, span.stop - 1, span.stop) for span in spans]
    batch = BatchLayout.of(ends, chunk_tokens=CHUNK, device="cpu")
    for layer, windows in ((0, (None, 5)), (1, (None, None)), (0, (None, 5))):
        config = replace(written.config, windows=windows)
        pairs = zip(queries, written.keys, written.values, strict=True)
        expected = torch.cat([exact(config, query[None], keys, values)[0] for query, keys, values in pairs])
        found = written.attention.attend(layer, queries, batch)
        torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=1e-5)


def test_a_long_past_loses_no_digits(library: str) -> None:
    """One float32 sum over all of these tokens would be wrong by 60 units in the last place."""
    tokens = 40_000
    config = config_of(2, 1, 16, score_scale=1e-3)
    written = Written(config, [tokens], pages=tokens // CHUNK)
    written.values[0] = written.values[0] * 0.1 + 1  # all of one sign: rounding does not cancel
    layout = BatchLayout.of([Span((written.tables[0],), 0, tokens)], chunk_tokens=CHUNK, device="cpu")
    written.attention.write(1, written.keys[0], written.values[0], layout)
    out, lse, exact_out, exact_lse = written.attend([1])
    torch.testing.assert_close(out.double(), exact_out, atol=0, rtol=2e-6)
    torch.testing.assert_close(lse.double(), exact_lse, atol=0, rtol=1e-6)


RANGES = (((3.0, 4.0),) * 2,) * 2
KV = ("int8", "fp8_e4m3", "fp8_e5m2", "int4", "k8v4", "int4/fp8_e5m2")


@pytest.mark.parametrize("kv", KV)
@pytest.mark.parametrize("ranges", [(), RANGES], ids=["dynamic", "static"])
def test_quantised_pages_as_torch_reads_them(monkeypatch: pytest.MonkeyPatch, ranges: tuple, kv: str) -> None:
    """In place or gathered, the same codes and scales give the same result up to rounding."""
    form = replace(KVFormat.parse(kv), ranges=ranges)
    written = Written(config_of(4, 2, 18, kv=form), [61, 8, 17])
    assert (written.attention._in_place is None) == (native.DECODE is None)
    state = written.generator.get_state()
    in_place = written.attend([1, 3, 1])
    monkeypatch.setattr(native, "DECODE", None)
    gathered = make_attention(written.pool, written.config)
    written.generator.set_state(state)
    by_torch = written.attend([1, 3, 1], gathered)
    torch.testing.assert_close(in_place[0], by_torch[0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(in_place[1], by_torch[1], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kv", ["auto", *KV])
def test_a_rows_attention_does_not_depend_on_the_others_or_the_threads(threads: None, kv: str) -> None:
    config = config_of(6, 3, 64, kv=KVFormat.parse(kv))
    written = Written(config, [70, 33, 8])
    state = written.generator.get_state()
    whole = written.attend([4, 1, 2])[0]
    torch.set_num_threads(1)
    written.generator.set_state(state)
    assert torch.equal(whole, written.attend([4, 1, 2])[0])
    single = Written(config, [70, 33, 8])
    single.tables, single.keys, single.values = single.tables[:1], single.keys[:1], single.values[:1]
    single.generator.set_state(state)
    assert torch.equal(whole[:4], single.attend([4])[0])


def test_a_file_of_another_version_is_not_used(tmp_path: Path) -> None:
    other = tmp_path / "_decode.so"
    other.write_bytes(b"not a library")
    assert native.load_decode(other) is None
