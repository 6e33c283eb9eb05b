"""``tierstore-bench quality``: what a KV dtype costs, over a long document, beside the bytes that it saves.

Every dtype computes the same tokens of the document, chunk by chunk, each over pages of its own; the float KV
is computed beside it and is what the others are compared with. Every token's logits count.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace

import torch

from tierstore.errors import UsageError
from tierstore.tiers.hbm import COMPLETED, PagePool
from tierstore_engine.attention.base import Span
from tierstore_engine.build import LoadedModel, load_model, make_runner, open_model, pages_for_tokens
from tierstore_engine.kv_format import AUTO, KVFormat
from tierstore_engine.kv_scales import DYNAMIC, with_scales
from tierstore_engine.settings import EngineSettings
from tierstore_engine.step import Step
from tierstore_tools import corpus, machine, report


@dataclass(frozen=True)
class Quality:
    """``kv_dtypes`` are compared with the model's own; ``text`` replaces the standard library."""

    model: str
    tokens: int
    kv_dtypes: tuple[str, ...]
    dtype: str | None = None
    text: str | None = None
    kv_scales: str = DYNAMIC
    chunk: int = 256


@dataclass(frozen=True)
class Row:
    """One KV dtype against float KV: the root mean square and the largest difference of a logit, the share of
    tokens whose likeliest successor is the same, the mean KL divergence in nats, the perplexity."""

    kv_dtype: str
    bytes_per_token: float
    logit_error: float
    largest_logit_error: float
    top1_agreement: float
    divergence: float
    perplexity: float


class _Sums:
    """What a row is made of, while it grows."""

    def __init__(self) -> None:
        self.squares = self.largest = self.divergence = self.surprise = 0.0
        self.agreed = self.logits = self.rows = self.scored = 0

    def add(self, logits: torch.Tensor, exact: torch.Tensor, following: torch.Tensor) -> None:
        """Logits ``[tokens, vocab]`` and those of float KV; ``following`` are the tokens that came, of all
        rows but perhaps the last."""
        difference = logits - exact
        self.squares += float(difference.double().square().sum())
        self.largest = max(self.largest, float(difference.abs().max()))
        self.agreed += int((logits.argmax(-1) == exact.argmax(-1)).sum())
        ours, theirs = logits.double().log_softmax(-1), exact.double().log_softmax(-1)
        self.divergence += float((theirs.exp() * (theirs - ours)).sum())
        self.surprise -= float(ours[: len(following)].gather(1, following.unsqueeze(1)).sum())
        self.logits += logits.numel()
        self.rows += len(logits)
        self.scored += len(following)

    def row(self, kv_dtype: str, bytes_per_token: float) -> Row:
        return Row(
            kv_dtype,
            bytes_per_token,
            logit_error=math.sqrt(self.squares / self.logits),
            largest_logit_error=self.largest,
            top1_agreement=self.agreed / self.rows,
            divergence=self.divergence / self.rows,
            perplexity=math.exp(self.surprise / self.scored),
        )


def run(settings: Quality, *, json: str | None) -> None:
    report.require_targets(json)
    opened = open_model(settings.model, device="cpu", dtype=settings.dtype)
    configs = [
        with_scales(replace(opened.config, kv=KVFormat.parse(name)), settings.kv_scales, opened.folder)
        for name in settings.kv_dtypes
    ]
    if settings.tokens > opened.config.max_positions:
        raise UsageError(f"the model allows {opened.config.max_positions} tokens, not {settings.tokens}")
    document = corpus.long_prompt(
        opened.tokenizer.encode, settings.tokens, text=settings.text, question=corpus.QUESTION
    )
    with report.phases() as phases:
        with phases.phase("loading the model", measurable=False):
            model = load_model(opened)
        models = [model, *(replace(model, config=config) for config in configs)]
        with phases.phase(f"{settings.tokens:,} tokens with each KV dtype") as phase:
            sums = _compare(models, document, settings.chunk, phase)
    rows = [
        each.row(name, model.kv_spec().token_bytes)
        for name, model, each in zip((AUTO, *settings.kv_dtypes), models, sums, strict=True)
    ]
    described = machine.describe("cpu")
    _show(rows, to_stderr=json == "-")
    document_rows = [asdict(row) for row in rows]
    facts = {"model": settings.model, "dtype": opened.config.dtype, "tokens": settings.tokens}
    report.write_json({"machine": described, **facts, "rows": document_rows}, json)


def _compare(
    models: Sequence[LoadedModel], document: Sequence[int], chunk: int, phase: report.Phase
) -> list[_Sums]:
    sums = [_Sums() for _ in models]
    sources = [_logits(model, document, chunk) for model in models]
    for number, logits in enumerate(zip(*sources, strict=True)):
        start = number * chunk
        following = torch.tensor(document[start + 1 : start + 1 + len(logits[0])])
        for each, total in zip(logits, sums, strict=True):
            total.add(each, logits[0], following)
        phase.update((start + chunk) / len(document))
    return sums


def _logits(model: LoadedModel, document: Sequence[int], chunk: int) -> Iterator[torch.Tensor]:
    """Of every token, chunk by chunk."""
    spec = model.kv_spec()
    pools = [PagePool(part, pages_for_tokens(spec, len(document))) for part in spec.split()]
    runner = make_runner(model, pools, EngineSettings())
    for start in range(0, len(document), chunk):
        stop = min(start + chunk, len(document))
        span = Span(tuple(range(pool.num_pages) for pool in pools), start, stop)
        yield runner.compute(
            Step((span,), document[start:stop], range(stop - start), COMPLETED, spec.chunk_tokens)
        )


def _show(rows: Sequence[Row], *, to_stderr: bool) -> None:
    columns = ("KV", "bytes/token", "of float", "Δlogit", "largest", "top-1", "KL", "perplexity")
    shown = [
        (
            "float" if row.kv_dtype == AUTO else row.kv_dtype,
            f"{row.bytes_per_token:,.0f}",
            f"{100 * row.bytes_per_token / rows[0].bytes_per_token:.1f} %",
            f"{row.logit_error:.2g}",
            f"{row.largest_logit_error:.2g}",
            f"{100 * row.top1_agreement:.2f} %",
            f"{row.divergence:.2g}",
            f"{row.perplexity:.3f}",
        )
        for row in rows
    ]
    report.table("quality: logits against those of float KV", columns, shown, to_stderr=to_stderr)
