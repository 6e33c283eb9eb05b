"""Compare the CPU time of the default path with that of an earlier commit, in alternating runs.

    python benchmarks/cost_unused.py --before 5f6666e6^

Each run is a process of its own over one of the two trees. It saves, finds and loads prompts of 64 pages of
64 KiB in an embedded store, without shared engines or other hosts. For each operation, it counts the calls of
Python functions in the calling thread, and measures the CPU time of all threads. The results are the calls in
both trees, those in modules of shared engines and object storage, and the median ratio of the CPU times.
docs/sharing.md has results.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import typer

from tierstore.command_line import one_line_errors

_RUN = """
import json, sys, time
import tierstore
from tierstore.spec import KVSpec

spec = KVSpec.uniform(layers=2, kv_heads=2, head_dim=32, dtype="float32", chunk_tokens=64)
pages = [bytes([at]) * spec.page_bytes for at in range(64)]
prompts = [[number * 5000 + at for at in range(64 * 64)] for number in range(int(%r))]
with tierstore.open(None, spec, host_bytes=1 << 30) as store:
    into = [bytearray(spec.page_bytes) for _ in pages]
    def save(): [store.save(each, pages).wait() for each in prompts]
    def load(): [store.load(store.lookup(each), into).wait() for each in prompts]
    def miss(): [store.lookup(each[1:]).release() for each in prompts]
    took = {}
    for name, work in (("put", save), ("get", load), ("miss", miss)):
        began = time.process_time()
        work()
        took[name] = (time.process_time() - began) / len(prompts)
    calls, unused = {}, {}
    def counted(frame, event, _):
        if event == "call":
            calls[name] = calls.get(name, 0) + 1
            if any(part in frame.f_code.co_filename for part in ("shar", "cluster")):
                unused[name] = unused.get(name, 0) + 1
    last = prompts[-1]
    for name, work in (
        ("put", lambda: store.save([7, *last[1:]], pages).wait()),
        ("get", lambda: store.load(store.lookup(last), into).wait()),
        ("miss", lambda: store.lookup(last[1:]).release()),
    ):
        sys.setprofile(counted)
        work()
        sys.setprofile(None)
print(json.dumps({"took": took, "calls": calls, "unused": unused}))
"""


def main(before: str = typer.Option(..., help="commit"), pairs: int = 10, prompts: int = 60) -> None:
    """Compare this tree with the commit BEFORE."""
    here = Path(__file__).parents[1]
    with tempfile.TemporaryDirectory() as folder:
        there = Path(folder) / "before"
        subprocess.run(
            ["git", "-C", here, "worktree", "add", "--detach", "--quiet", there, before], check=True
        )
        try:
            for source in (there / "tierstore" / "native").glob("*.c"):
                target = source.with_name(f"_{source.stem}.so")
                flags = ["-O3", "-std=gnu11", "-Wno-psabi", "-shared", "-fPIC", "-pthread"]
                subprocess.run(["gcc", *flags, "-o", target, source, "-lm"], check=True)
            ratios: dict[str, list[float]] = {}
            for pair in range(pairs):
                trees = (here, there) if pair % 2 else (there, here)
                found = {tree: _run(tree, prompts) for tree in trees}
                now, then = found[here], found[there]
                for name, seconds in now["took"].items():
                    ratios.setdefault(name, []).append(seconds / then["took"][name])
        finally:
            subprocess.run(["git", "-C", here, "worktree", "remove", "--force", there], check=True)
    for name, each in ratios.items():
        line = (
            f"{name}: {then['calls'][name]} calls before, {now['calls'][name]} now, "
            f"{now['unused'].get(name, 0)} of them for sharing; CPU time × {statistics.median(each):.2f} "
            f"(from {min(each):.2f} to {max(each):.2f})"
        )
        print(line)  # noqa: T201


def _run(tree: Path, prompts: int) -> dict[str, dict[str, float]]:
    done = subprocess.run(
        [sys.executable, "-c", _RUN % prompts],
        env={**os.environ, "PYTHONPATH": str(tree)},
        cwd="/",
        capture_output=True,
        text=True,
        check=True,
    )
    found: dict[str, dict[str, float]] = json.loads(done.stdout)
    return found


if __name__ == "__main__":
    with one_line_errors("cost_unused"):
        typer.run(main)
