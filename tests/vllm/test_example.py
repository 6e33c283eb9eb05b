"""``examples/vllm_offline.py``, twice, over one daemon."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

from tests.vllm import models

EXAMPLE = Path(__file__).parents[2] / "examples" / "vllm_offline.py"
OPTIONS = {
    "skip_tokenizer_init": True,
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 2048,
    "block_size": 32,
    "num_gpu_blocks_override": 256,
}
SMALL_MACHINE = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_NO_USAGE_STATS": "1",
}


def test_the_second_process_reuses_what_the_first_computed(daemon, model):
    command = [sys.executable, EXAMPLE, model(models.LLAMA), daemon.url, json.dumps(OPTIONS)]
    asked = []
    for _ in range(2):
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, env=os.environ | SMALL_MACHINE
        )
        assert done.returncode == 0, done.stderr
        asked.append(re.findall(r"^asked (\d+) tokens, reused (\d+): (.*)$", done.stdout, re.M))
    (first, again), (warm, warmer) = asked
    assert (first[1], first[0]) == ("0", "1003")
    assert int(again[1]) >= 960  # of vLLM's own cache
    assert int(warm[1]) >= 960
    assert (warm[2], warmer[2]) == (first[2], again[2])
