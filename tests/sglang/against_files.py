"""SGLang's own file storage and a tierstore daemon, side by side: 16 prompts of 2,000 tokens, the engine and
the daemon restarted in between, then every page damaged. Prints a line of JSON for each.

    PYTHONPATH=tests/sglang/cpu python -m tests.sglang.against_files FOLDER
"""

from __future__ import annotations

import json
import os
import pathlib
import random
import signal
import statistics
import subprocess
import sys
import time
from typing import Any

from tests.sglang.engine import write_model

PROMPTS, TOKENS = 16, 2000
_RESULT = "RESULT "
_SETTINGS = {
    "backend_name": "tierstore",
    "module_path": "tierstore_connectors.sglang.backend",
    "class_name": "TierStoreHiCache",
    "interface_v1": 1,
    "hicache_storage_pass_prefix_keys": True,
}


def answers(folder: pathlib.Path, kind: str) -> list[dict[str, Any]]:
    """What a new engine answers: tokens, seconds to the first one, and how many tokens were stored."""
    environment = {
        **os.environ,
        "SGLANG_USE_CPU_ENGINE": "1",
        "SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR": str(folder / "files"),
    }
    done = subprocess.run(
        [sys.executable, "-m", "tests.sglang.against_files", str(folder), kind],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith(_RESULT)]
    if not lines:
        raise SystemExit(f"the engine gave no answer:\n{done.stderr[-3000:]}")
    result: list[dict[str, Any]] = json.loads(lines[0].removeprefix(_RESULT))
    return result


def engine(folder: pathlib.Path, kind: str) -> None:
    """One engine over this storage."""
    import sglang

    ours = kind == "tierstore"
    extra = {**_SETTINGS, "store": f"ipc://{folder}/s"} if ours else {}
    running = sglang.Engine(
        model_path=str(folder / "model"),
        device="cpu",
        dtype="bfloat16",
        attention_backend="torch_native",
        sampling_backend="pytorch",
        grammar_backend="none",
        skip_tokenizer_init=True,
        disable_cuda_graph=True,
        disable_overlap_schedule=True,
        mem_fraction_static=0.3,
        max_total_tokens=4096,
        page_size=64,
        random_seed=1,
        log_level="error",
        enable_hierarchical_cache=True,
        hicache_ratio=2.0,
        hicache_io_backend="direct",
        hicache_mem_layout="page_first_direct",
        hicache_write_policy="write_through",
        hicache_storage_prefetch_policy="wait_complete",
        hicache_storage_backend="dynamic" if ours else "file",
        hicache_storage_backend_extra_config=json.dumps({**extra, "prefetch_threshold": 64}),
    )
    told = []
    for number in range(PROMPTS):
        prompt = random.Random(number).choices(range(5, 500), k=TOKENS)
        began = time.monotonic()
        answer = running.generate(
            input_ids=prompt, sampling_params={"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}
        )
        details = answer["meta_info"].get("cached_tokens_details") or {}
        told.append(
            {
                "tokens": answer["output_ids"],
                "seconds": time.monotonic() - began,
                "stored": details.get("storage", 0),
            }
        )
        time.sleep(0.2)  # SGLang saves behind the answer
    time.sleep(2)
    print(_RESULT + json.dumps(told), flush=True)  # noqa: T201
    running.shutdown()


def daemon(folder: pathlib.Path) -> subprocess.Popen[bytes]:
    serve = ["--host-bytes", "64MiB", "--disk", str(folder / "disk"), "--disk-bytes", "512MiB"]
    command = [sys.executable, "-m", "tierstore.cli", "serve", "--listen", f"ipc://{folder}/s", *serve]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    while not (folder / "s").exists():
        time.sleep(0.05)
    return process


def damage(files: list[pathlib.Path]) -> None:
    """Change a byte in every KiB."""
    for file in files:
        data = bytearray(file.read_bytes())
        data[100::1024] = bytes(each ^ 0xFF for each in data[100::1024])
        file.write_bytes(data)


def compare(folder: pathlib.Path, kind: str) -> dict[str, Any]:
    place = folder / ("files" if kind == "file" else "disk")
    runs = []
    for step in ("cold", "warm", "damaged"):
        if step == "damaged":
            files = [each for each in place.rglob("*") if each.is_file()]
            damage([each for each in files if each.suffix == ".bin" or "extents" in each.parts])
        process = daemon(folder) if kind == "tierstore" else None
        runs.append(answers(folder, kind))
        if process is not None:
            time.sleep(1)
            process.send_signal(signal.SIGKILL)
            process.wait()
            (folder / "s").unlink(missing_ok=True)
        if step == "cold":
            nbytes = sum(each.stat().st_blocks * 512 for each in place.rglob("*") if each.is_file())
    cold, warm, damaged = runs

    def wrong(run: list[dict[str, Any]]) -> int:
        return sum(one["tokens"] != other["tokens"] for one, other in zip(cold, run, strict=True))

    return {
        "storage": kind,
        "disk_bytes": nbytes,
        "cold_s": statistics.median(each["seconds"] for each in cold),
        "warm_s": statistics.median(each["seconds"] for each in warm),
        "warm_stored_tokens": sum(each["stored"] for each in warm),
        "warm_wrong": wrong(warm),
        "damaged_stored_tokens": sum(each["stored"] for each in damaged),
        "damaged_wrong": wrong(damaged),
    }


if __name__ == "__main__":
    _folder = pathlib.Path(sys.argv[1])
    if len(sys.argv) > 2:
        engine(_folder, sys.argv[2])
    else:
        (_folder / "model").mkdir(parents=True)
        (_folder / "files").mkdir()
        write_model(str(_folder / "model"))
        for _kind in ("tierstore", "file"):
            print(json.dumps(compare(_folder, _kind)), flush=True)  # noqa: T201
