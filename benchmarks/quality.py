"""Measure the error of each KV dtype over a long document, beside the bytes that it saves.

    python benchmarks/quality.py --model /models/Llama-3.1-8B --tokens 16384 --kv-dtypes fp8_e4m3,int8,k8v4

Every dtype computes the same tokens, chunk by chunk, each in pages of its own. The other dtypes are compared
with float KV on every token's logits. A trained model of 3 M parameters answered: ``int8`` needs 26 % of
float32's bytes and keeps 99.49 % of the likeliest tokens (docs/kv-dtypes.md).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
import typer

from tierstore.command_line import one_line_errors
from tierstore.errors import UsageError
from tierstore.tiers.hbm import COMPLETED, PagePool
from tierstore_engine.attention.base import Span
from tierstore_engine.build import load_model, make_runner, open_model
from tierstore_engine.kv_format import AUTO, KVFormat
from tierstore_engine.kv_scales import with_scales
from tierstore_engine.loaded import LoadedModel
from tierstore_engine.pool_sizes import pages_for_tokens
from tierstore_engine.settings import EngineSettings
from tierstore_engine.step import Step
from tierstore_tools import corpus, machine, report

CHUNK = 256


@dataclass(frozen=True)
class QualityRow:
    """One KV dtype beside float KV: root mean square and largest difference of a logit, share of tokens with
    the same likeliest successor, mean KL divergence in nats, perplexity."""

    kv_dtype: str
    bytes_per_token: float
    logit_error: float
    largest_logit_error: float
    top1_agreement: float
    divergence: float
    perplexity: float


class Sums:
    """The sums that make a row."""

    def __init__(self) -> None:
        self.squares = self.largest = self.divergence = self.surprise = 0.0
        self.agreed = self.logits = self.rows = self.scored = 0

    def add(self, logits: torch.Tensor, exact: torch.Tensor, following: torch.Tensor) -> None:
        """Add logits ``[tokens, vocab]`` and those of float KV. ``following`` are the document's next tokens;
        the last row may have none."""
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

    def row(self, kv_dtype: str, bytes_per_token: float) -> QualityRow:
        """Return the means."""
        return QualityRow(
            kv_dtype,
            bytes_per_token,
            math.sqrt(self.squares / self.logits),
            self.largest,
            self.agreed / self.rows,
            self.divergence / self.rows,
            math.exp(self.surprise / self.scored),
        )


def main(
    model: str = "demo",
    tokens: int = 16_384,
    kv_dtypes: str = "fp8_e4m3,fp8_e5m2,int8,int4,k8v4",
    kv_scales: str = "dynamic",
    prompt_file: Path | None = None,
    json: str | None = None,
) -> None:
    """Measure the error of each KV dtype over a long document. MODEL is a Hugging Face folder or a preset;
    KV_SCALES is dynamic, checkpoint, or a file that calibrate wrote."""
    report.require_targets(json)
    names = kv_dtypes.split(",")
    opened = open_model(model, device="cpu")
    configs = [
        with_scales(replace(opened.config, kv=KVFormat.parse(name)), kv_scales, opened.folder)
        for name in names
    ]
    if tokens > opened.config.max_positions:
        raise UsageError(f"the model allows {opened.config.max_positions} tokens, got {tokens}")
    text = None if prompt_file is None else prompt_file.read_text()
    document = corpus.long_prompt(opened.tokenizer.encode, tokens, text=text, question=corpus.QUESTION)
    loaded = load_model(opened)
    models = [loaded, *(replace(loaded, config=config) for config in configs)]
    with report.phases() as phases, phases.phase(f"{tokens:,} tokens with each KV dtype") as phase:
        sums = [Sums() for _ in models]
        for number, logits in enumerate(zip(*(logits_of(each, document) for each in models), strict=True)):
            start = number * CHUNK
            following = torch.tensor(document[start + 1 : start + 1 + len(logits[0])])
            for each, total in zip(logits, sums, strict=True):
                total.add(each, logits[0], following)
            phase.update((start + CHUNK) / len(document))
    rows = [
        each.row(name, config.kv_spec().token_bytes)
        for name, config, each in zip((AUTO, *names), models, sums, strict=True)
    ]
    columns = ("KV", "bytes/token", "of float", "Δlogit", "largest", "top-1", "KL", "perplexity")
    lines = [
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
    report.table("quality: logits beside those of float KV", columns, lines, to_stderr=json == "-")
    facts = {"machine": machine.describe(), "model": model, "tokens": tokens}
    report.write_json({**facts, "rows": [asdict(row) for row in rows]}, json)


def logits_of(model: LoadedModel, document: Sequence[int]) -> Iterator[torch.Tensor]:
    """Yield the logits of every token, chunk by chunk."""
    spec = model.kv_spec()
    pools = [PagePool(part, pages_for_tokens(spec, len(document))) for part in spec.split()]
    runner = make_runner(model, pools, EngineSettings())
    for start in range(0, len(document), CHUNK):
        stop = min(start + CHUNK, len(document))
        span = Span(tuple(range(pool.num_pages) for pool in pools), start, stop)
        part = document[start:stop]
        yield runner.compute(Step((span,), part, range(stop - start), COMPLETED, spec.chunk_tokens))


if __name__ == "__main__":
    with one_line_errors("quality"):
        typer.run(main)
