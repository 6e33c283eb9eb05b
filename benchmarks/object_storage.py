"""Measure prompts whose pages come from an object store, beside computing them, and filling a new host.

    weed mini -dir=/tmp/weed -bucket=pages      # or any S3, with its credentials in the environment
    python benchmarks/object_storage.py --url 's3://pages/bench?endpoint=http://127.0.0.1:8333&refresh_s=0.2'

One host computes prompts of ``--tokens`` tokens and publishes them. For each, an engine of a second host
fetches the pages, and an engine without a store computes them, taking turns. Both generate one token, and its
time is the TTFT. Then the daemon of a third host is filled with all of these pages. Use a new prefix for each
run.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import typer

from tierstore.cli.operator import Operator
from tierstore.cluster.bundle_store import BundleStore
from tierstore.cluster.fetching import DaemonStores
from tierstore.cluster.s3 import Bucket
from tierstore.cluster.s3_address import S3Address
from tierstore.cluster.shared_store import SharedStoreOptions
from tierstore.cluster.warm_up import Warmer
from tierstore.command_line import one_line_errors
from tierstore.errors import UsageError
from tierstore.stats import ClusterStats
from tierstore.testing.clock import wait_until
from tierstore.testing.processes import DaemonProcess
from tierstore.units import GIB, format_size
from tierstore_engine.build import build_engine, load_model, open_model
from tierstore_engine.engine import Engine
from tierstore_engine.pool_sizes import pages_for_tokens
from tierstore_engine.sampling import SamplingParams
from tierstore_tools import machine, report

_ONE = SamplingParams(max_new_tokens=1, ignore_eos=True)


def main(
    url: str = typer.Option(..., help="s3://BUCKET/PREFIX, a prefix that is new"),
    model: str = "demo",
    tokens: int = 4000,
    rounds: int = 5,
    host_bytes: int = GIB,
    json: str | None = None,
) -> None:
    """Measure MODEL on three hosts of this machine that share the bucket at URL."""
    report.require_targets(json)
    if min(tokens, rounds) < 1:
        raise UsageError("--tokens and --rounds must be at least 1")
    with ExitStack() as ending:
        loaded = load_model(open_model(model, device="cpu"))
        pages = (rounds + 1) * pages_for_tokens(loaded.kv_spec(), tokens + 2)
        daemons = [_daemon(url, host_bytes, publish, ending) for publish in ("all", "none")]
        stores = [*(daemon.url for daemon in daemons), None]
        engines = [build_engine(loaded, pool_pages=pages, store=store) for store in stores]
        for engine in engines:
            ending.callback(engine.close)
        # The first round is not counted: it also measures the speed of computing and of fetching.
        taken = [_round(url, number, tokens, daemons, engines) for number in range(rounds + 1)][1:]
        document = {
            "machine": machine.describe(),
            "model": model,
            "tokens": tokens,
            "page_bytes": loaded.kv_spec().page_bytes,
            "rounds": taken,
            "fetched_ttft_s": statistics.median(each["fetched_ttft_s"] for each in taken),
            "computed_ttft_s": statistics.median(each["computed_ttft_s"] for each in taken),
            "warm_up": _warm_up(url, host_bytes, ending),
        }
    warm = document["warm_up"]
    typer.echo(
        f"{tokens:,} tokens: TTFT {document['fetched_ttft_s'] * 1e3:.0f} ms from the object store, "
        f"{document['computed_ttft_s'] * 1e3:.0f} ms computed (medians of {rounds}). A new host was filled "
        f"with {format_size(warm['bytes'])} in {warm['seconds']:.2f} s",
        err=json == "-",
    )
    report.write_json(document, json)


def _daemon(url: str, host_bytes: int, publish: str, ending: ExitStack) -> DaemonProcess:
    directory = ending.enter_context(tempfile.TemporaryDirectory(prefix="ts"))
    options = (f"--cluster={url}", f"--cluster-publish={publish}", "--cluster-min-tokens=64")
    daemon = DaemonProcess(Path(directory), *options, host_bytes=host_bytes, disk=False).start()
    ending.callback(daemon.kill)
    wait_until((Path(directory) / "s.arena").exists)
    wait_until(lambda: _cluster(daemon).online)
    return daemon


def _cluster(daemon: DaemonProcess) -> ClusterStats:
    with Operator(daemon.url) as operator:
        cluster = operator.stats().cluster
    assert cluster is not None, "it was given --cluster"
    return cluster


def _round(
    url: str, number: int, tokens: int, daemons: list[DaemonProcess], engines: list[Engine]
) -> dict[str, Any]:
    """Publish a prompt, and measure it on the other host and without a store."""
    prompt = [(7 * at + 131 * number + at // 97) % 250 for at in range(tokens)]
    first, second, alone = engines
    first.generate([prompt], _ONE)
    whole = tokens // first.connector.pool.spec.chunk_tokens * (number + 1)
    wait_until(lambda: _cluster(daemons[0]).counts.get("published_pages", 0) >= whole)
    before = _cluster(daemons[1]).counts.get("fetched_pages", 0)
    bundles = sum(1 for _ in Bucket(S3Address.parse(url)).list("bundles"))
    wait_until(lambda: _cluster(daemons[1]).counts.get("read_heads", 0) >= 2 * bundles)  # by both agents
    taken = {}
    for name, engine in [("fetched", second), ("computed", alone)][:: 1 if number % 2 else -1]:
        began = time.perf_counter()
        [completion] = engine.generate([prompt], _ONE)
        taken[f"{name}_ttft_s"] = time.perf_counter() - began
        taken[f"{name}_reused_tokens"] = completion.metrics.reused_tokens
    return {**taken, "fetched_pages": _cluster(daemons[1]).counts.get("fetched_pages", 0) - before}


def _warm_up(url: str, host_bytes: int, ending: ExitStack) -> dict[str, Any]:
    daemon = _daemon(url, host_bytes, "none", ending)
    began = time.perf_counter()
    stores = DaemonStores(daemon.url)
    ending.callback(stores.close)
    done = Warmer(BundleStore(SharedStoreOptions(url), watch=False), stores).run(host_bytes)
    return {
        "seconds": time.perf_counter() - began,
        "pages": done.fetched_pages,
        "bytes": done.fetched_bytes,
    }


if __name__ == "__main__":
    with one_line_errors("object_storage"):
        typer.run(main)
