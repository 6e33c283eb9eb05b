"""A model over several ranks computes what it computes alone. The ranks are threads here, with sums of their
own; ``test_ranks.py`` has processes."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise, product
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from tests.engine.test_quantised import CASES, quantise_folder
from tests.portions import chosen
from tests.tiny_models import ARCHITECTURES, GROUPED, LLAMA_LIKE, STATES, VARIANTS, VOCAB
from tierstore.errors import TierStoreError, UsageError
from tierstore.tiers.hbm import COMPLETED, PagePool
from tierstore_engine.attention.base import Span
from tierstore_engine.build import load_model, open_model, pools_of_one_sequence
from tierstore_engine.checkpoint import Checkpoint
from tierstore_engine.layer_weights import AttentionWeights, MLPWeights
from tierstore_engine.loaded import LoadedModel, OpenModel, make_memory
from tierstore_engine.model import Model
from tierstore_engine.presets import preset
from tierstore_engine.ranks.share import Share, config_of, read_share
from tierstore_engine.step import Step
from tierstore_engine.weight_slots import slots
from tierstore_engine.weights import WeightsDigest, meta_weights

FAMILIES = (*ARCHITECTURES, *GROUPED, *VARIANTS, *STATES, *LLAMA_LIKE)
CASES_OF_RANKS = tuple(product(FAMILIES, (2, 3, 4), ("auto", "int8")))
NORMAL = (
    ("llama3", 2, "auto"),
    ("llama3", 3, "int8"),
    ("llama2", 4, "auto"),
    ("qwen2-moe", 3, "auto"),
    ("deepseek-v3", 2, "auto"),
    ("gemma3", 4, "int8"),
    ("gpt-oss", 2, "auto"),
    ("qwen3-next", 2, "auto"),
    ("falcon-h1", 2, "auto"),
    ("olmo2", 2, "auto"),
)
PROMPT, LATER = 100, 3
MOST = {"auto": 1e-5, "int8": 0.05}
"""Difference of logits. A quantised number at the border of two codes may move by a step."""


class Threads:
    """Ranks that are threads of one process."""

    def __init__(self, count: int) -> None:
        self._parts: list[torch.Tensor] = [torch.empty(0)] * count
        self._barrier = threading.Barrier(count, timeout=60)
        self.count = count
        self.wires: dict[tuple[int, int], queue.Queue[torch.Tensor]] = {
            pair: queue.Queue() for pair in product(range(count), repeat=2)
        }

    def rank(self, number: int) -> OneThread:
        return OneThread(self, number)

    def exchange(self, number: int, part: torch.Tensor) -> Sequence[torch.Tensor]:
        self._barrier.wait()  # the parts before have been read
        self._parts[number] = part
        self._barrier.wait()
        return self._parts

    def give_up(self) -> None:
        self._barrier.abort()


class OneThread:
    def __init__(self, ranks: Threads, number: int) -> None:
        self._ranks = ranks
        self._number = number
        self.share = Share(number, ranks.count)
        self.sent_bytes = 0.0

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack(tuple(self._ranks.exchange(self._number, x.clone()))).sum(0)

    def columns(self, part: torch.Tensor, total: int) -> torch.Tensor:
        parts = self._ranks.exchange(self._number, part)
        return torch.cat(tuple(parts), dim=1) if self._number == 0 else part

    def exchange(self, to: Mapping[int, torch.Tensor], of: Mapping[int, torch.Tensor]) -> Arriving:
        for rank, tensor in to.items():
            if tensor.nbytes:
                self.sent_bytes += tensor.nbytes
                self._ranks.wires[self._number, rank].put(tensor.clone())
        return Arriving(
            [(self._ranks.wires[rank, self._number], tensor) for rank, tensor in of.items() if tensor.nbytes]
        )

    def meet(self, number: float) -> list[float]:
        return [float(each) for each in self._ranks.exchange(self._number, torch.tensor(number))]


class Arriving:
    """Tensors that other threads send."""

    def __init__(self, awaited: Sequence[tuple[queue.Queue[torch.Tensor], torch.Tensor]]) -> None:
        self._awaited = awaited

    def wait(self) -> None:
        for wire, tensor in self._awaited:
            found = wire.get(timeout=60)
            assert found.shape == tensor.shape
            assert found.dtype == tensor.dtype
            tensor.copy_(found)


def steps(pools: Sequence[PagePool], states: frozenset[int]) -> list[Step]:
    """Return a prompt in two steps, and then tokens one by one."""
    tables = tuple(range(1) if group in states else range(pool.num_pages) for group, pool in enumerate(pools))
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(VOCAB, (PROMPT + LATER,), generator=generator).tolist()
    cuts = [0, 61, *range(PROMPT, PROMPT + LATER + 1)]
    return [
        Step(
            (Span(tables, start, stop),),
            tokens[start:stop],
            range(stop - start) if start else range(0),
            COMPLETED,
            pools[0].spec.chunk_tokens,
        )
        for start, stop in pairwise(cuts)
    ]


def alone(model: LoadedModel) -> list[torch.Tensor]:
    pools = pools_of_one_sequence(model, PROMPT + LATER)
    memories = [make_memory(pool, model.config) for pool in pools]
    whole = Model(model.config, model.weights, memories, device="cpu")
    return [whole.compute(step) for step in steps(pools, model.config.states)]


def together(opened: OpenModel, pools: Sequence[PagePool], digest: str) -> list[torch.Tensor]:
    """Return what the ranks compute over common pages."""
    ranks = Threads(opened.ranks)

    def play(rank: int) -> list[torch.Tensor]:
        try:
            share = Share(rank, opened.ranks)
            whole = WeightsDigest() if share.first else None
            weights = read_share(opened.config, opened.source, share, seed=0, digest=whole)
            assert whole is None or whole.hexdigest() == digest
            own = config_of(opened.config, share)
            memories = [make_memory(pool, own) for pool in pools]
            part = Model(own, weights, memories, device="cpu", ranks=ranks.rank(rank))
            return [part.compute(step) for step in steps(pools, opened.config.states)]
        except BaseException:
            ranks.give_up()
            raise

    with ThreadPoolExecutor(opened.ranks) as pool:
        of_rank_0, *_ = pool.map(play, range(opened.ranks))
        return of_rank_0


@pytest.mark.parametrize(("name", "count", "kv_dtype"), chosen(CASES_OF_RANKS, *NORMAL))
def test_ranks_compute_what_one_computes(
    name: str, count: int, kv_dtype: str, checkpoints: Callable[..., Path]
) -> None:
    """Four ranks are more than the KV heads of these models."""
    folder = str(checkpoints(name))
    try:
        opened = open_model(folder, device="cpu", kv_dtype=kv_dtype, tensor_parallel=count)
    except TierStoreError as error:
        pytest.skip(str(error))  # it has fewer heads than ranks, or no KV that could be quantised
    model = load_model(folder, device="cpu", kv_dtype=kv_dtype)
    pools = pools_of_one_sequence(model, PROMPT + LATER)
    found = together(opened, pools, model.digest)
    for mine, expected in zip(found, alone(model), strict=True):
        scale = max(float(expected.abs().max()), 1.0) if len(expected) else 1.0
        torch.testing.assert_close(mine, expected, rtol=0, atol=MOST[kv_dtype] * scale)


def test_each_rank_holds_about_its_part(checkpoints: Callable[..., Path]) -> None:
    opened = open_model(str(checkpoints("llama3")), device="cpu", tensor_parallel=2)
    weights = read_share(opened.config, opened.source, Share(1, 2), seed=0)
    [layer, *_] = weights.layers
    assert isinstance(layer.mixer, AttentionWeights)
    assert isinstance(layer.mlp, MLPWeights)
    heads = opened.config.heads // 2 * opened.config.head_dim
    assert layer.mixer.o.shape == (opened.config.hidden_size, heads)
    assert layer.mlp.down.shape == (opened.config.hidden_size, opened.config.intermediate_size // 2)
    for part in (layer.mixer.o, layer.mixer.qkv, layer.mlp.down, layer.mlp.gate_up):
        assert isinstance(part, torch.Tensor)
        assert part.untyped_storage().nbytes() == part.nbytes  # a view would keep the whole matrix in memory


def test_a_rank_reads_only_its_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of experts, which are most of this model, those of one rank in four."""
    small = preset("tiny-moe")
    assert small.experts is not None
    config = replace(small, experts=replace(small.experts, count=8, width=8192))
    tensors = {
        slot.name: torch.ones(tuple(slot.tensor.shape)) for slot in slots(config, meta_weights(config))
    }
    file = tmp_path / "model.safetensors"
    save_file(tensors, file)
    (tmp_path / "config.json").write_text("{}")
    read: list[int] = []
    close = Checkpoint.close

    def noted(self: Checkpoint) -> None:
        read.append(resident_bytes(file))
        close(self)

    monkeypatch.setattr(Checkpoint, "close", noted)
    read_share(config, tmp_path, Share(1, 4), seed=0)
    read_share(config, tmp_path, Share(0, 4), seed=0, digest=WeightsDigest())
    part, whole = read
    assert whole > 0.95 * file.stat().st_size
    assert part < 0.4 * whole


def resident_bytes(file: Path) -> int:
    """Return the bytes of a file that this process has mapped and touched."""
    total, counted = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, *rest = line.split()
        if not name.endswith(":"):
            counted = line.endswith(str(file))
        elif name == "Rss:" and counted:
            total += int(rest[0]) << 10
    return total


@given(heads=st.integers(1, 64), kv_heads=st.integers(1, 16), count=st.integers(1, 8))
def test_ranks_share_all_heads(heads: int, kv_heads: int, count: int) -> None:
    """Each query head has one rank, and its rank has its KV head."""
    heads *= kv_heads
    queries: list[int] = []
    for rank in range(count):
        mine, kv = Share(rank, count).heads(heads, kv_heads)
        queries += mine
        assert {query // (heads // kv_heads) for query in mine} <= set(kv)
        assert len(mine) % len(kv) == 0
    assert queries == list(range(heads))


REFUSED = {
    "--deterministic": {"deterministic": True},
    "--adapter": {"adapters": ["a=/nowhere"]},
    "so give at most 4": {"tensor_parallel": 5},
    "at least 1": {"tensor_parallel": 0},
    "only recurrent states": {"model": "tiny-mamba2"},
    "^--sequence-parallel does not work with --adapter$": {
        "adapters": ["a=/nowhere"],
        "tensor_parallel": 1,
        "sequence_parallel": 2,
    },
    "^--sequence-parallel must be at least 1, got -1$": {"sequence_parallel": -1},
}


@pytest.mark.parametrize("sentence", REFUSED)
def test_refused_at_the_start(sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        open_model(**{"model": "tiny", "device": "cpu", "tensor_parallel": 2, **REFUSED[sentence]})


def test_quantised_weights_are_divided_when_expanded(
    checkpoints: Callable[..., Path], tmp_path: Path
) -> None:
    quantise_folder(CASES["gptq"], checkpoints("llama3"), tmp_path / "model")
    folder = str(tmp_path / "model")
    with pytest.raises(
        UsageError, match=r"^--tensor-parallel does not divide weights in .*: add --expand-weights$"
    ):
        open_model(folder, device="cpu", tensor_parallel=2)
    opened = open_model(folder, device="cpu", tensor_parallel=2, expand_weights=True)
    model = load_model(folder, device="cpu", expand_weights=True)
    pools = pools_of_one_sequence(model, PROMPT + LATER)
    for mine, expected in zip(together(opened, pools, model.digest), alone(model), strict=True):
        torch.testing.assert_close(mine, expected, rtol=0, atol=1e-4)
