"""What one run of the vLLM benchmark does."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ANSWER_TOKENS = 8
THROUGHPUT_REQUESTS = 8
THROUGHPUT_ANSWER_TOKENS = 32
MAX_LOGPROB_DIFF = 1e-4  # float32; other dtypes are held to equal tokens only


@dataclass(frozen=True)
class VllmBench:
    """``model`` is a directory, or one of ``models.KINDS``, which are made; ``directory`` is where that and a
    daemon's disk are. ``store`` is the address of a daemon that runs (None: one of the benchmark's own, which
    can be restarted). ``rounds`` prompts are asked cold and from each tier. For the overhead, engines with
    and without the connector are started ``starts`` times, and asked ``pairs`` prompts of ``overhead_tokens``
    and as many batches of such prompts each time. 0 ``rounds`` or ``starts``: that part is left out. With
    ``disk_bytes_per_s``, ``pairs`` prompts are asked that a disk of that speed holds.
    ``options`` are further arguments of ``vllm.LLM``."""

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
