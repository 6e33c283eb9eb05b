"""One daemon for all engines of a host: a second engine finds the pages that the first engine has computed.

    python examples/daemon_and_engine.py

In production, start the daemon `tierstore serve` once per machine. This example starts and ends its own
daemon.
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
        process.terminate()  # the daemon then writes its unsaved pages to disk
        process.wait()


def ask(url: str) -> str:
    """Run one engine, which has its own model and page pool, and keeps pages in the daemon."""
    model = load_model("tiny", device="cpu")  # has random weights; a Hugging Face folder works as well
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
        second = ask(url)  # a new engine, which finds the first engine's pages in the daemon
    print("the same answer" if first == second else "DIFFERENT ANSWERS")


if __name__ == "__main__":
    main()
