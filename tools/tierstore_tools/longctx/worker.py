"""The disk case in a process of its own: nothing of the store is in its memory, and the page cache is
dropped.

``python -m tierstore_tools.longctx.worker JOB RESULT``: JOB is a JSON :class:`WorkerJob`, RESULT the npz file
to write.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from tierstore.errors import TierStoreError
from tierstore_tools.limits import drop_page_cache

if TYPE_CHECKING:
    from tierstore_tools.longctx.session import LongContextAnswer


@dataclass(frozen=True)
class WorkerJob:
    """The process's options: ``store`` is the directory, the others are the parent's. ``threads`` are
    torch's: with another number the last bits of computed values may differ."""

    model: str
    device: str
    dtype: str | None
    kv_dtype: str
    kv_scales: str
    store: str
    prompt: list[int]
    chunk_tokens: int
    prefill_chunk: int
    ranks: int
    parts: int
    pool_pages: int
    host_bytes: int
    disk_bytes: int
    threads: int
    throttle: dict[str, float] = field(default_factory=dict)


def run_in_new_process(job: WorkerJob, scratch: Path) -> tuple[LongContextAnswer, list[bytes]]:
    """Return the answer, and the digests of the pages that came from disk. Raises :class:`TierStoreError`
    with the last line of the process's output if it failed."""
    job_file, result_file = scratch / "job.json", scratch / "result.npz"
    job_file.write_bytes(msgspec.json.encode(job))
    command = [sys.executable, "-m", "tierstore_tools.longctx.worker", str(job_file), str(result_file)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise TierStoreError(f"the new process of the disk case failed: {last}")
    return _read_result(result_file)


def _read_result(file: Path) -> tuple[LongContextAnswer, list[bytes]]:
    from tierstore_engine.outputs import RequestMetrics
    from tierstore_tools.longctx.session import LongContextAnswer

    with np.load(file) as result:
        metrics = msgspec.json.decode(result["metrics"].tobytes(), type=RequestMetrics)
        answer = LongContextAnswer(
            tuple(result["tokens"].tolist()),
            result["logits"],
            float(result["ttft_s"]),
            float(result["itl_s"]),
            metrics,
        )
        return answer, [row.tobytes() for row in result["digests"]]


def main(job_file: str, result_file: str) -> None:
    import torch

    from tierstore_engine.build import load_model
    from tierstore_tools.longctx.session import ask, open_engine, page_digests
    from tierstore_tools.longctx.settings import Sizes

    job = msgspec.json.decode(Path(job_file).read_bytes(), type=WorkerJob)
    torch.set_num_threads(job.threads)
    model = load_model(
        job.model,
        device=job.device,
        dtype=job.dtype,
        kv_dtype=job.kv_dtype,
        kv_scales=job.kv_scales,
        tensor_parallel=job.ranks,
        sequence_parallel=job.parts,
    )
    sizes = Sizes(job.pool_pages, job.host_bytes, job.disk_bytes)
    engine = open_engine(
        model,
        sizes,
        job.store,
        chunk_tokens=job.chunk_tokens,
        prefill_chunk=job.prefill_chunk,
        throttle=job.throttle,
    )
    drop_page_cache(Path(job.store))
    answer = ask(engine, job.prompt)
    digests = page_digests(engine, job.prompt)
    engine.close()
    np.savez(
        result_file,
        tokens=np.array(answer.tokens),
        logits=answer.logits,
        ttft_s=answer.ttft_s,
        itl_s=answer.itl_s,
        digests=np.frombuffer(b"".join(digests), np.uint8).reshape(-1, 16),
        metrics=np.frombuffer(msgspec.json.encode(answer.metrics), np.uint8),
    )


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except TierStoreError as error:
        sys.stderr.write(f"{error}\n")
        sys.stderr.flush()
        os._exit(1)
