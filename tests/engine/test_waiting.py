"""Nothing of a step waits for its device but the one wait for its tokens.

What would wait is what looks at a number on the device: ``.item()``, a condition, a shape that depends on
the data, a copy to the host. torch's ``meta`` device has no numbers at all, so there each of these raises,
and what goes through waits for nothing on a GPU either. (That what goes *to* the device is pinned first is in
``moving.py``, and on a GPU ``test_on_gpu.py`` lets torch itself watch.)
"""

from __future__ import annotations

import pytest
import torch

from tierstore.tiers.hbm import COMPLETED
from tierstore_engine.attention.base import Span
from tierstore_engine.attention.cuda import CudaAttention
from tierstore_engine.attention.gathered import EVERYWHERE, NOWHERE, LibraryRanges
from tierstore_engine.kernels.catalog import Instance
from tierstore_engine.kernels.launcher import Kernel, Launcher
from tierstore_engine.model import Model
from tierstore_engine.presets import preset
from tierstore_engine.sampling import Draw, SamplingParams, sample
from tierstore_engine.step import Step
from tierstore_engine.weight_memory import allocate

from .test_cuda_attention import memory_kind
from .test_graphs import GROUPED

CHUNK = 16
DECODING, ANOTHER = Span(([3, 1, 7],), 40, 41), Span(([2],), 5, 6)
CHUNK_OF_PREFILL = Span(([4, 5, 6, 8],), 16, 50)
BEHIND_A_LONG_PAST = Span((list(range(16)),), 250, 256)


class Nowhere(Launcher):
    """Notes what is launched."""

    def __init__(self) -> None:
        self.launches: list[str] = []

    def load(self, instance: Instance) -> Kernel:
        return lambda grid, arguments: self.launches.append(instance.name.split("<")[0])


def run(spans: tuple[Span, ...], library: LibraryRanges = NOWHERE) -> tuple[torch.Tensor, list[str]]:
    """The logits of the newest token of each span, and the kernels of one layer."""
    tiny = preset("tiny", dtype="float16")
    launcher = Nowhere()
    spec = tiny.kv_spec(chunk_tokens=CHUNK)
    pool = torch.empty((16, spec.page_bytes), dtype=torch.uint8, device="meta")
    attention = CudaAttention(pool, spec, tiny, launcher)
    attention.library_at = library
    model = Model(tiny, allocate(tiny, "meta"), [attention], device="meta")
    counts = [span.tokens for span in spans]
    rows = [sum(counts[: place + 1]) - 1 for place in range(len(spans))]
    logits = model.compute(Step(spans, [0] * sum(counts), rows, COMPLETED, CHUNK))
    first, *others = launcher.launches
    assert first == "add_norm"
    per_layer, rest = divmod(len(others), tiny.layers)
    assert rest == 0
    return logits, others[:per_layer]


@pytest.mark.parametrize(
    ("spans", "library", "launched"),
    [
        ((DECODING, ANOTHER), NOWHERE, ["rope_write", "decode", "combine_splits"]),
        ((CHUNK_OF_PREFILL,), NOWHERE, ["rope_write", "prefill"]),
        ((BEHIND_A_LONG_PAST,), NOWHERE, ["rope_write", "prefill", "combine_chunks"]),
        ((DECODING, CHUNK_OF_PREFILL), NOWHERE, ["rope_write", "prefill", "decode", "combine_splits"]),
        ((DECODING, CHUNK_OF_PREFILL), EVERYWHERE, ["rope_write", "decode", "combine_splits"]),
    ],
    ids=["decoding", "prefill", "split", "both", "library"],
)
def test_a_step_looks_at_nothing_on_its_device(
    spans: tuple[Span, ...], library: LibraryRanges, launched: list[str]
) -> None:
    logits, launches = run(spans, library)
    assert logits.shape == (len(spans), preset("tiny", dtype="float16").vocab_size)
    assert [name.removesuffix("_mma").removesuffix("_simt") for name in launches] == [
        *launched,
        *("add_norm", "silu_mul", "add_norm"),
    ]
    sampled = sample(logits, [Draw(SamplingParams(temperature=1.0, top_p=0.9), 0.5)] * len(spans))
    assert sampled.tokens.shape == (len(spans),)


@pytest.mark.parametrize("kind", GROUPED)
def test_nor_does_one_over_other_layer_groups(kind: str) -> None:
    """Windows, latents, states of both kinds: decoding and prefill in one step."""
    config, launcher = GROUPED[kind], Nowhere()
    memories = []
    for spec in config.kv_spec(chunk_tokens=CHUNK).split():
        pool = torch.empty((16, spec.page_bytes), dtype=torch.uint8, device="meta")
        memories.append(memory_kind(spec, config)(pool, spec, config, launcher))
    spans = tuple(
        Span(tuple(span.tables[0] for _ in memories), span.start, span.stop)
        for span in (DECODING, CHUNK_OF_PREFILL, ANOTHER)
    )
    model = Model(config, allocate(config, "meta"), memories, device="meta")
    tokens = sum(span.tokens for span in spans)
    logits = model.compute(Step(spans, [0] * tokens, [0, 34, 35], COMPLETED, CHUNK))
    assert logits.shape == (3, config.vocab_size)
    assert {
        "windows": "decode_simt",
        "latents": "decode_mla",
        "delta": "delta_rule",
        "mamba2": "mamba2_rule",
        "mamba2 alone": "mamba2_rule",
    }[kind] in launcher.launches


def test_what_looks_is_noticed() -> None:
    """The test above must be able to fail."""
    logits, _ = run((DECODING,))
    for look in (
        lambda: logits.max().item(),
        lambda: bool(logits[0, 0] > 0),
        lambda: logits.argmax(-1).tolist(),
        lambda: logits[logits > 0].sum().item(),
        lambda: logits.cpu(),
    ):
        with pytest.raises((RuntimeError, NotImplementedError), match="meta"):
            look()
