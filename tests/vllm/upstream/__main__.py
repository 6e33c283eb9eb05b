"""vLLM's own tests of its scheduler and connectors, with this connector in the place of the one they bring.

    pip download --no-deps --no-binary :all: --no-build-isolation vllm==0.32.0     # or a git checkout of the tag
    python -m tests.vllm.upstream VLLM_DIR [FILE …] [-- PYTEST_OPTION …]

``VLLM_DIR`` has vLLM's ``tests`` in it and is only read; the installed vLLM is what is tested. ``FILE`` is
relative to ``VLLM_DIR/tests/v1``; without any it is ``FILES`` below. ``docs/vllm.md`` lists what passes, and why
the others cannot.
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
    "core/test_priority_scheduler_random.py",
    "core/test_priority_preemption_bug.py",
    "core/test_prefix_replay.py",
    "core/test_swa_inflight_window_free.py",
    "core/test_worker_slot_overflow.py",
    "core/test_mamba_align_chunk_split.py",
    "kv_connector/unit/test_kv_load_failure_recovery.py",
    "kv_connector/unit/test_invalid_blocks_correctness.py",
    "kv_connector/unit/test_cache_pollution_prevention.py",
    "kv_connector/unit/test_error_propagation.py",
    "kv_connector/unit/test_remote_prefill_lifecycle.py",
    "kv_connector/unit/test_remote_decode_lifecycle.py",
    "kv_connector/unit/test_scheduler_kv_connector_override.py",
    "kv_connector/unit/test_kv_connector_lifecycle.py",
    "kv_connector/unit/test_output_aggregator.py",
)


def run(vllm: Path, files: list[str], options: list[str]) -> int:
    """The exit status of pytest over a copy of vLLM's tests."""
    with tempfile.TemporaryDirectory(prefix="tierstore-vllm-tests-") as made:
        root = Path(made)
        # Without vLLM's package, which would hide the one that is installed, and its conftest.py, which wants
        # all that vLLM's whole suite wants.
        shutil.copytree(vllm / "tests", root / "tests", ignore=lambda at, _: _unwanted(Path(at), vllm / "tests"))
        redirect = root / "models.json"
        redirect.write_text(json.dumps({"facebook/opt-125m": str(models.model(models.OPT, root))}))
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(root), str(_HERE)]),
            "VLLM_MODEL_REDIRECT_PATH": str(redirect),
            "HF_HUB_OFFLINE": "1",
            "TRANSFORMERS_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_HOST_IP": "127.0.0.1",
        }
        chosen = [f"tests/v1/{file}" for file in files or FILES]
        command = [sys.executable, "-m", "pytest", "-p", "substitute", "-p", "no:cacheprovider", "-q", *chosen]
        return subprocess.run([*command, *options], cwd=root, env=environment, check=False).returncode


def _unwanted(directory: Path, tests: Path) -> list[str]:
    return ["conftest.py"] if directory == tests else []


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m tests.vllm.upstream", description=__doc__.splitlines()[0])
    parser.add_argument("vllm", type=Path)
    parser.add_argument("files", nargs="*")
    arguments, rest = parser.parse_known_args()
    sys.exit(run(arguments.vllm.resolve(), arguments.files, rest))
