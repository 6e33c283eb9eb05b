"""One daemon for all engines of a host. An engine computes and ends, and the next engine finds its pages.

    python examples/daemon_and_engine.py

In production the daemon is `tierstore serve`, started once per machine. Here it runs as long as the example.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tierstore_engine import SamplingParams, build_engine, load_model

PROMPT = Path(__file__).read_text() * 2


@contextmanager
def daemon(directory: str) -> Iterator[str]:
    """Run a daemon with 256 MiB of host memory and 1 GiB of disk. Yield its address."""
    url = f"ipc://{directory}/tierstore.sock"
    sizes = ["--host-bytes", "256MiB", "--disk", f"{directory}/kv", "--disk-bytes", "1GiB"]
    process = subprocess.Popen(
        [sys.executable, "-m", "tierstore.cli", "serve", "--listen", url, *sizes, "--log-level", "warning"]
    )
    try:
        while not Path(directory, "tierstore.sock").exists():
            if process.poll() is not None:
                raise SystemExit("the daemon did not start")
            time.sleep(0.05)
        yield url
    finally:
        process.terminate()  # the daemon writes the rest to disk
        process.wait()


def ask(url: str) -> str:
    """Run one engine: it has its own model and page pool, and uses the daemon for everything below."""
    model = load_model("tiny", device="cpu")  # or a Hugging Face folder; this one has random weights
    engine = build_engine(model, pool_pages=128, store=url)
    try:
        [completion] = engine.generate([PROMPT], SamplingParams(max_new_tokens=16))
    finally:
        engine.close()
    metrics = completion.metrics
    print(f"prompt {metrics.prompt_tokens} tokens, reused {dict(metrics.reused_by_tier)}")
    return completion.text


def main() -> None:
    with tempfile.TemporaryDirectory() as directory, daemon(directory) as url:
        first = ask(url)
        second = ask(url)  # another engine: only the daemon's pages are left of the first
    print("the same answer" if first == second else "DIFFERENT ANSWERS")


if __name__ == "__main__":
    main()
