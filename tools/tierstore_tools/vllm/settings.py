"""The options of one run of the vLLM benchmark."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ANSWER_TOKENS = 8
THROUGHPUT_REQUESTS = 8
THROUGHPUT_ANSWER_TOKENS = 32
MAX_LOGPROB_DIFF = 1e-4  # for float32; other dtypes need equal tokens only


@dataclass(frozen=True)
class VllmBench:
    """``model`` is a directory, or one of ``models.KINDS``, which is made in ``directory`` beside a daemon's
    disk. ``store`` is the address of a running daemon (None: the benchmark starts one, and can restart it).

    ``rounds`` prompts are asked cold and from each tier. For the overhead, engines with and without the
    connector are started ``starts`` times. Each start asks ``pairs`` prompts of ``overhead_tokens`` and as
    many batches of such prompts. 0 ``rounds`` or ``starts`` skip that part. With ``disk_bytes_per_s``,
    ``pairs`` prompts are also asked from a disk of that speed. ``options`` are more arguments of
    ``vllm.LLM``."""

    model: str
    tokens: int
    directory: Path
    store: str | None = None
    dtype: str | None = None
    rounds: int = 5
    starts: int = 1
    pairs: int = 20
    overhead_tokens: int = 512
    host_bytes: int = 2 << 30
    disk_bytes: int = 8 << 30
    disk_bytes_per_s: float | None = None
    options: dict[str, Any] = field(default_factory=dict)
