"""vLLM's own tests of its scheduler and connectors, with this connector in the place of the one they bring.

    python -m tests.vllm.upstream VLLM_DIR [FILE …] [PYTEST_OPTION …]

``VLLM_DIR`` is a checkout or an unpacked source distribution of the vLLM that is installed; it is only read.
``FILE`` is relative to ``VLLM_DIR/tests/v1``; without any it is ``FILES`` below. ``docs/vllm.md`` says what
passes, and why the others cannot.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.vllm import models

_HERE = Path(__file__).parent
FILES = (
    "core/test_scheduler.py",
    "core/test_async_scheduler.py",
    "core/test_deferred_block_free.py",
    "core/test_priority_preemption_bug.py",
    "core/test_prefix_replay.py",
    "core/test_swa_inflight_window_free.py",
    "core/test_worker_slot_overflow.py",
    "kv_connector/unit/test_kv_load_failure_recovery.py",
    "kv_connector/unit/test_invalid_blocks_correctness.py",
    "kv_connector/unit/test_cache_pollution_prevention.py",
    "kv_connector/unit/test_error_propagation.py",
)
_MODELS = ("facebook/opt-125m", "facebook/opt-350m")  # any model without images will do
_OPTIONS = ("-p", "substitute", "-p", "no:cacheprovider", "-q", "-rsfEx")


def run(vllm: Path, files: list[str], options: list[str]) -> int:
    """The exit status of pytest over a copy of vLLM's tests."""
    with tempfile.TemporaryDirectory(prefix="tierstore-vllm-tests-") as made:
        root = Path(made)
        # Without vLLM's package, which would hide the one that is installed, and without the first
        # conftest.py, which wants all that vLLM's whole suite wants.
        shutil.copytree(vllm / "tests", root / "tests")
        (root / "tests" / "conftest.py").unlink(missing_ok=True)
        redirect = root / "models.json"
        made_here = str(models.model(models.OPT, root))
        redirect.write_text(json.dumps(dict.fromkeys(_MODELS, made_here)))
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(root), str(_HERE), os.environ.get("PYTHONPATH", "")]),
            "VLLM_MODEL_REDIRECT_PATH": str(redirect),
            "HF_HUB_OFFLINE": "1",
            "TRANSFORMERS_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_HOST_IP": "127.0.0.1",
        }
        chosen = [f"tests/v1/{file}" for file in files or FILES]
        command = [sys.executable, "-m", "pytest", *_OPTIONS, *chosen, *options]
        return subprocess.run(command, cwd=root, env=environment, check=False).returncode


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m tests.vllm.upstream")
    parser.add_argument("vllm", type=Path)
    parser.add_argument("files", nargs="*")
    arguments, rest = parser.parse_known_args()
    sys.exit(run(arguments.vllm.resolve(), arguments.files, rest))
