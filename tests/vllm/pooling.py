"""An engine that pools: ``python -m tests.vllm.pooling JOB`` embeds one prompt again and again, each time
with vLLM's own cache emptied, until some of it comes from the store. It writes the vectors and the tokens
that came from there as JSON."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.vllm.engines import ONE_THREAD
from tierstore_tools.vllm.engine import ENVIRONMENT

_RESULT = "RESULT "
_HITS = "vllm:external_prefix_cache_hits_total"
_MOST_TIMES = 50


def embed(model: Path, tokens: list[int], pooling: str, connector: dict | None) -> tuple[list, int, str]:
    """The vectors, the tokens that came from the store, and what the engine wrote."""
    job = {"model": str(model), "tokens": tokens, "pooling": pooling, "connector": connector}
    more = {**ONE_THREAD, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.vllm.pooling", json.dumps(job)],
        env={**ENVIRONMENT, **os.environ, **more},
        capture_output=True,
        text=True,
        check=False,
    )
    said = done.stdout + done.stderr
    assert done.returncode == 0, said[-4000:]
    line = next(line for line in done.stdout.splitlines() if line.startswith(_RESULT))
    vectors, hits = json.loads(line.removeprefix(_RESULT))
    return vectors, hits, said


def main(job: dict) -> None:
    from prometheus_client import REGISTRY
    from vllm import LLM
    from vllm.config import PoolerConfig

    llm = LLM(
        model=job["model"],
        runner="pooling",
        convert="embed",
        pooler_config=PoolerConfig(pooling_type=job["pooling"]),
        kv_transfer_config=job["connector"],
        dtype="float32",
        enforce_eager=True,
        block_size=32,
        num_gpu_blocks_override=256,
        max_model_len=1024,
        disable_log_stats=False,
    )
    vectors: list = []
    hits = 0
    while not hits and len(vectors) < _MOST_TIMES:
        (output,) = llm.embed([{"prompt_token_ids": job["tokens"]}], use_tqdm=False)
        vectors.append(output.outputs.embedding)
        llm.reset_prefix_cache()
        hits = int(REGISTRY.get_sample_value(_HITS, {"model_name": job["model"], "engine": "0"}) or 0)
    sys.stdout.write(f"{_RESULT}{json.dumps([vectors, hits])}\n")
    sys.stdout.flush()
    llm.llm_engine.engine_core.shutdown()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
