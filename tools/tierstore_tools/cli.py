"""``tierstore-bench``: the benchmarks from the command line.

Exit codes: 0 done, 1 the run failed, 2 bad usage. An error is one line on stderr. ``--json`` takes a file;
without one (or with ``-``) the document goes to stdout and the table to stderr.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from tierstore.arguments import json_object
from tierstore.command_line import make_app, one_line_errors, version_option
from tierstore.errors import UsageError
from tierstore.units import parse_size

app = make_app()

JsonOption = Annotated[
    str | None, typer.Option("--json", help="Write one JSON document: a file, or - for stdout")
]


def main() -> None:
    """Run the command line; ``--json`` without a value means stdout."""
    arguments = sys.argv[1:]
    for at, argument in enumerate(arguments):
        if argument == "--json" and (at + 1 == len(arguments) or arguments[at + 1].startswith("--")):
            arguments.insert(at + 1, "-")
            break
    with one_line_errors("tierstore-bench"):
        app(arguments, standalone_mode=True)


@app.callback()
def _commands(version: Annotated[bool, version_option("tierstore-bench")] = False) -> None:
    """What each tier is worth, measured beside this machine's own limits."""


@app.command()
def tiers(
    page_bytes: Annotated[str, typer.Option(help="Page sizes, comma-separated")] = "128KiB,1MiB,8MiB",
    total: Annotated[str, typer.Option(help="Bytes moved per measurement")] = "256MiB",
    rounds: Annotated[int, typer.Option(min=1, help="Repetitions; medians are reported")] = 5,
    directory: Annotated[Path, typer.Option("--dir", help="Where the disk is measured")] = Path(),
    store: Annotated[
        str | None,
        typer.Option(help="Measure the daemon at this address instead: all that its host tier holds leaves"),
    ] = None,
    json: JsonOption = None,
) -> None:
    """put/get GB/s and µs of each tier by page size beside the limit."""
    from tierstore_tools import tiers_command

    sizes = [parse_size(size) for size in page_bytes.split(",")]
    nbytes = parse_size(total)
    if store is None:
        _make_writable(directory)
    tiers_command.run(directory, sizes, total_bytes=nbytes, rounds=rounds, store=store, json=json)


@app.command()
def packs(
    total: Annotated[str, typer.Option(help="Bytes of pages in the pack")] = "1GiB",
    rounds: Annotated[int, typer.Option(min=1, help="Repetitions; medians are reported")] = 5,
    directory: Annotated[Path, typer.Option("--dir", help="Where the files are")] = Path(),
    json: JsonOption = None,
) -> None:
    """Export and import of a pack beside plain writing and reading of a file."""
    from tierstore_tools import packs as measured

    _make_writable(directory)
    measured.run(directory, parse_size(total), rounds=rounds, json=json)


@app.command()
def codec(
    model: Annotated[str, typer.Option(help="A Hugging Face folder, or a preset")] = "deep",
    tokens: Annotated[int, typer.Option(min=1, help="Length of the document")] = 4096,
    dtype: Annotated[str | None, typer.Option(help="float32|bfloat16|float16; default: the model's")] = None,
    prompt_file: Annotated[
        Path | None, typer.Option(help="Text to use instead of the standard library's sources")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Repetitions; medians are reported")] = 5,
    store: Annotated[
        Path | None, typer.Option(help="Measure hits from disk as well, in stores under this directory")
    ] = None,
    hit_tokens: Annotated[int, typer.Option(min=1, help="Length of the prompt that hits")] = 100_000,
    json: JsonOption = None,
) -> None:
    """Codecs over a model's KV pages: bytes, GB/s of encoding and decoding, beside general ones."""
    from tierstore_tools import codecs

    if store is not None:
        _make_writable(store)
    text = None if prompt_file is None else _read_text(prompt_file)
    codecs.run(
        model,
        tokens,
        dtype=dtype,
        text=text,
        rounds=rounds,
        json=json,
        store=store,
        hit_tokens=hit_tokens,
    )


@app.command()
def longctx(
    model: Annotated[str, typer.Option(help="A Hugging Face folder, or a preset")] = "demo",
    tokens: Annotated[int, typer.Option(min=2, help="Length of the prompt")] = 100_000,
    prompt_file: Annotated[
        Path | None, typer.Option(help="Text to use instead of the standard library's sources")
    ] = None,
    store: Annotated[Path, typer.Option(help="Directory in which the store is made (and removed)")] = Path(),
    device: Annotated[str, typer.Option(help="auto|cpu|cuda")] = "auto",
    dtype: Annotated[str | None, typer.Option(help="float32|bfloat16|float16; default: the model's")] = None,
    kv_dtype: Annotated[str, typer.Option(help="auto|fp8_e4m3|fp8_e5m2|int8|int4|k8v4, or K/V")] = "auto",
    kv_scales: Annotated[str, typer.Option(help="dynamic|checkpoint, or a file of calibrate")] = "dynamic",
    chunk_tokens: Annotated[int, typer.Option(help="Tokens of a page")] = 64,
    prefill_chunk: Annotated[int, typer.Option(help="Prompt tokens computed per step")] = 2048,
    sweep: Annotated[str | None, typer.Option(help="Prompt lengths to compare as well: 1000,4000,…")] = None,
    throttle: Annotated[str | None, typer.Option(help="Slow tiers down: disk=200MB/s,host=…")] = None,
    json: JsonOption = None,
    plot: Annotated[Path | None, typer.Option(help="Write a PNG")] = None,
) -> None:
    """A 100K-token prompt, cold and from every tier: TTFT, bytes, limits, and whether the answers agree."""
    from tierstore_tools.longctx import command
    from tierstore_tools.longctx.settings import LongContext
    from tierstore_tools.throttle import parse_throttle

    _make_writable(store)
    command.run(
        LongContext(
            model=model,
            tokens=tokens,
            directory=store.absolute(),
            device=device,
            dtype=dtype,
            kv_dtype=kv_dtype,
            kv_scales=kv_scales,
            prompt_text=None if prompt_file is None else _read_text(prompt_file),
            chunk_tokens=chunk_tokens,
            prefill_chunk=prefill_chunk,
            throttle=parse_throttle(throttle) if throttle else {},
            sweep=_lengths("--sweep", sweep) if sweep else (),
        ),
        json=json,
        plot=plot,
    )


@app.command()
def quality(
    model: Annotated[str, typer.Option(help="A Hugging Face folder, or a preset")] = "demo",
    tokens: Annotated[int, typer.Option(min=2, help="Length of the document")] = 16_384,
    kv_dtypes: Annotated[
        str, typer.Option(help="To compare with float KV, comma-separated")
    ] = "fp8_e4m3,fp8_e5m2,int8,int4,k8v4",
    kv_scales: Annotated[str, typer.Option(help="dynamic|checkpoint, or a file of calibrate")] = "dynamic",
    prompt_file: Annotated[
        Path | None, typer.Option(help="Text to use instead of the standard library's sources")
    ] = None,
    dtype: Annotated[str | None, typer.Option(help="float32|bfloat16|float16; default: the model's")] = None,
    json: JsonOption = None,
) -> None:
    """What a KV dtype costs over a long document: logit error, top-1 agreement, perplexity; and its bytes."""
    from tierstore_tools import quality as bench

    bench.run(
        bench.Quality(
            model=model,
            tokens=tokens,
            kv_dtypes=tuple(kv_dtypes.split(",")),
            dtype=dtype,
            text=None if prompt_file is None else _read_text(prompt_file),
            kv_scales=kv_scales,
        ),
        json=json,
    )


@app.command()
def planner(
    model: Annotated[str, typer.Option(help="A Hugging Face folder, or a preset")] = "demo",
    tokens: Annotated[str, typer.Option(help="Lengths of the prompt, comma-separated")] = "1000,4000,16000",
    speeds: Annotated[str, typer.Option(help="Of the tier, as multiples of prefill speed")] = "0.1,1,10",
    shares: Annotated[str, typer.Option(help="Of the prompt that is held, in percent")] = "100",
    rounds: Annotated[int, typer.Option(min=1, help="Repetitions; medians are reported")] = 5,
    prefill_chunk: Annotated[int, typer.Option(help="Prompt tokens computed per step")] = 256,
    json: JsonOption = None,
    plot: Annotated[Path | None, typer.Option(help="Write a PNG")] = None,
) -> None:
    """TTFT by prompt length of each plan: compute only, load only, planned one way, from both ends."""
    from tierstore_tools import planner as bench

    sweep = bench.Sweep(
        model=model,
        tokens=_lengths("--tokens", tokens),
        speeds=_numbers("--speeds", speeds),
        shares=tuple(share / 100 for share in _numbers("--shares", shares)),
        rounds=rounds,
        prefill_chunk=prefill_chunk,
    )
    bench.run(sweep, json=json, plot=plot)


@app.command()
def faults(
    runs: Annotated[int, typer.Option(min=1, help="Runs of each fault")] = 40,
    seed: Annotated[int, typer.Option(help="Does the same again")] = 0,
    directory: Annotated[Path | None, typer.Option("--dir", help="Where; default: a temporary one")] = None,
    json: JsonOption = None,
) -> None:
    """Crashes, lying disks and kill -9: wrong pages served, durable pages lost, time to recover."""
    import tempfile

    from tierstore_tools.faults import command

    directory = Path(tempfile.gettempdir()) if directory is None else directory
    _make_writable(directory)
    command.run(directory.absolute(), runs=runs, seed=seed, json=json)


@app.command()
def churn(
    capacity: Annotated[str, typer.Option(help="Cap of the store")] = "1GiB",
    times: Annotated[float, typer.Option(min=0.1, help="Bytes written, in capacities")] = 20.0,
    seed: Annotated[int, typer.Option(help="Does the same again")] = 0,
    directory: Annotated[Path | None, typer.Option("--dir", help="Where; default: a temporary one")] = None,
    json: JsonOption = None,
) -> None:
    """A day of traffic of mixed page sizes: how much of the cap is used, and whether writing slows down."""
    import tempfile

    from tierstore_tools import churn as bench

    directory = Path(tempfile.gettempdir()) if directory is None else directory
    _make_writable(directory)
    bench.run(directory, capacity_bytes=parse_size(capacity), times=times, seed=seed, json=json)


@app.command()
def chunks(
    trace: Annotated[Path, typer.Argument(help="A trace with block ids, as replay reads")],
    tokens: Annotated[str, typer.Option(help="Tokens per chunk, comma-separated")] = "16,32,64,128,256",
    requests: Annotated[int, typer.Option(min=1, help="Of the trace, the first so many")] = 200,
    model: Annotated[str, typer.Option(help="Whose pages are copied: see tierstore size")] = "llama-3-8b",
    json: JsonOption = None,
) -> None:
    """What the size of a chunk does to hits, waste, bytes per copy and lookup time."""
    from tierstore_tools import chunks as bench

    bench.run(trace, _lengths("--tokens", tokens), requests=requests, model=model, json=json)


@app.command()
def curve(
    tokens: Annotated[
        str | None,
        typer.Option(
            help="Lengths of prompts, comma-separated; default: 1000,10000,100000, or none beside a trace"
        ),
    ] = None,
    trace: Annotated[
        Path | None, typer.Option(help="And the first prompts of this trace, which replay reads, too")
    ] = None,
    seconds: Annotated[float, typer.Option(min=0.1, help="For each length")] = 5.0,
    json: JsonOption = None,
) -> None:
    """What the estimate of other capacities costs the lookups that it is made from."""
    from tierstore_tools import curve as bench

    if tokens is None and trace is None:
        tokens = "1000,10000,100000"
    lengths = [] if tokens is None else _lengths("--tokens", tokens)
    bench.run(lengths, trace=trace, seconds=seconds, json=json)


@app.command()
def vllm(
    model: Annotated[str, typer.Option(help="A Hugging Face folder, or tiny or small: made here")] = "small",
    tokens: Annotated[int, typer.Option(min=64, help="Length of the prompts")] = 4000,
    store: Annotated[str | None, typer.Option(help="A daemon's address; default: one of its own")] = None,
    dtype: Annotated[str | None, typer.Option(help="float32|bfloat16|float16; default: the model's")] = None,
    rounds: Annotated[
        int, typer.Option(min=0, help="Prompts asked cold and from each tier; 0: only the overhead")
    ] = 5,
    starts: Annotated[
        int, typer.Option(min=0, help="Of engines with and without the connector; 0: no overhead")
    ] = 1,
    pairs: Annotated[int, typer.Option(min=1, help="Prompts and batches of each start")] = 20,
    overhead_tokens: Annotated[int, typer.Option(min=64, help="Length of those prompts")] = 512,
    host_bytes: Annotated[str, typer.Option(help="Arena of its own daemon")] = "2GiB",
    disk_bytes: Annotated[str, typer.Option(help="Disk cap of its own daemon")] = "8GiB",
    throttle: Annotated[
        str | None,
        typer.Option(help="disk=20MB/s: hits on a disk that slow, too, beside no connector"),
    ] = None,
    options: Annotated[
        str, typer.Option(metavar="JSON", help='More arguments of vllm.LLM: {"tensor_parallel_size": 2}')
    ] = "{}",
    directory: Annotated[Path | None, typer.Option("--dir", help="Where; default: a temporary one")] = None,
    json: JsonOption = None,
) -> None:
    """A real vLLM: TTFT cold, from host memory and from disk after a restart; what a cold one costs."""
    import tempfile

    from tierstore_tools.throttle import parse_throttle
    from tierstore_tools.vllm import command
    from tierstore_tools.vllm.settings import VllmBench

    rates = {} if throttle is None else parse_throttle(throttle)
    if set(rates) - {"disk"}:
        raise UsageError("--throttle of vllm is of the disk alone, as disk=20MB/s")
    if directory is not None:
        _make_writable(directory)
    with tempfile.TemporaryDirectory(prefix="tierstore-bench-", dir=directory) as scratch:
        command.run(
            VllmBench(
                model=model,
                tokens=tokens,
                directory=Path(scratch),
                store=store,
                dtype=dtype,
                rounds=rounds,
                starts=starts,
                pairs=pairs,
                overhead_tokens=overhead_tokens,
                host_bytes=parse_size(host_bytes),
                disk_bytes=parse_size(disk_bytes),
                disk_bytes_per_s=rates.get("disk"),
                options=json_object("--options", options),
            ),
            json=json,
        )


@app.command()
def replay(
    trace: Annotated[
        Path, typer.Option(help="Mooncake or Bailian JSONL, WEKA session(s), or CSV of lengths")
    ],
    policy: Annotated[
        str,
        typer.Option(
            help="Comma-separated, of lru, default, gdsf, hinted, priority, belady, fifo, lfu, s3fifo, "
            "sieve, 2q"
        ),
    ] = "lru,default,belady",
    capacity: Annotated[
        str | None, typer.Option(help="3Mtokens,8GiB,5859blocks,10%; default 1,5,10,25,50%")
    ] = None,
    model: Annotated[str | None, typer.Option(help="Whose bytes: a preset or a Hugging Face folder")] = None,
    hints: Annotated[str, typer.Option(help="none|oracle:P|inferred")] = "none",
    format_name: Annotated[str, typer.Option("--format", help="auto|mooncake|bailian|weka|csv")] = "auto",
    block_tokens: Annotated[
        int | None, typer.Option(min=1, help="Tokens per id, if not the format's")
    ] = None,
    session_gap_s: Annotated[float, typer.Option(min=0, help="Between the starts of WEKA sessions")] = 0.0,
    hbm: Annotated[str | None, typer.Option(help="Replay through tiers: capacity of HBM")] = None,
    host: Annotated[str | None, typer.Option(help="… of the host tier")] = None,
    disk: Annotated[str | None, typer.Option(help="… of the disk tier")] = None,
    tiers: Annotated[Path | None, typer.Option(help="GB/s, from tierstore-bench tiers --json")] = None,
    host_gb_per_s: Annotated[float | None, typer.Option(help="Host to HBM")] = None,
    disk_read_gb_per_s: Annotated[float | None, typer.Option(help="Disk to host")] = None,
    disk_write_gb_per_s: Annotated[float | None, typer.Option(help="Host to disk")] = None,
    longctx: Annotated[Path | None, typer.Option(help="Speed of prefill, from longctx --json")] = None,
    prefill_tokens_per_s: Annotated[float | None, typer.Option(help="Speed of prefill")] = None,
    prefetch: Annotated[
        str, typer.Option(help="both|off|on: read ahead in the gaps of conversations")
    ] = "both",
    jobs: Annotated[int | None, typer.Option(min=1, help="Processes; default: as many as help")] = None,
    json: JsonOption = None,
    plot: Annotated[Path | None, typer.Option(help="Write a PNG")] = None,
) -> None:
    """Hit rates of policies and capacities on a trace of real requests; with --hbm, --host or --disk also
    what each tier gives, what is moved, and the time to first token."""
    from tierstore_tools.replay import command, policies
    from tierstore_tools.replay import hints as hint_sources
    from tierstore_tools.replay.capacity import parse_capacities, parse_capacity
    from tierstore_tools.replay.machine import Tiers, parse_prefetch

    hbm_size, host_size, disk_size = (text and parse_capacity(text) for text in (hbm, host, disk))
    through_tiers = any((hbm_size, host_size, disk_size))
    if capacity is None and not through_tiers:
        capacity = command.DEFAULT_CAPACITY
    command.run(
        command.Replay(
            trace=trace,
            policies=policies.parse_policies(policy),
            capacities=parse_capacities(capacity) if capacity else (),
            hints=hint_sources.parse_hints(hints),
            format_name=format_name,
            block_tokens=block_tokens,
            session_gap_s=session_gap_s,
            spec=None if model is None else command.spec_of(model),
            tiers=Tiers(
                hbm=hbm_size or None,
                host=host_size or None,
                disk=disk_size or None,
                bandwidths_file=tiers,
                host_gb_per_s=host_gb_per_s,
                disk_read_gb_per_s=disk_read_gb_per_s,
                disk_write_gb_per_s=disk_write_gb_per_s,
                prefill_file=longctx,
                prefill_tokens_per_s=prefill_tokens_per_s,
                prefetch=parse_prefetch(prefetch),
            )
            if through_tiers
            else None,
            jobs=jobs,
        ),
        json=json,
        plot=plot,
    )


@app.command()
def routing(
    model: Annotated[str, typer.Option(help="A Hugging Face folder, or a preset")] = "demo",
    engines: Annotated[int, typer.Option(min=1, help="Each with a daemon of its own")] = 3,
    sessions: Annotated[int, typer.Option(min=1, help="Conversations")] = 30,
    turns: Annotated[int, typer.Option(min=1, help="Of each")] = 4,
    first: Annotated[int, typer.Option(min=1, help="Tokens of a session's first turn")] = 3000,
    more: Annotated[int, typer.Option(min=1, help="Tokens that each later one adds")] = 1500,
    room: Annotated[float, typer.Option(help="Of all daemons, in multiples of what all sessions take")] = 1.2,
    at_once: Annotated[int, typer.Option(min=1, help="Requests under way")] = 2,
    seed: Annotated[int, typer.Option(help="Of the order in which turns come")] = 1,
    routers: Annotated[str, typer.Option(help="round-robin, sticky, dynamo")] = "round-robin,sticky,dynamo",
    json: JsonOption = None,
) -> None:
    """Sessions over several engines: hits and TTFT by round robin, and by a router that follows KV events."""
    from tierstore_tools.routing import Workload, run

    workload = Workload(model, engines, sessions, turns, first, more, room, at_once, seed)
    run(workload, routers=routers, json=json)


@app.command()
def scenarios(
    scenario: Annotated[str, typer.Argument(help="batch|longctx|online|stream|all, or several with commas")],
    targets: Annotated[
        str | None,
        typer.Option(
            help="ours, ours+store, vllm, vllm+store, transformers; default: all that can be had, or none "
            "beside --url"
        ),
    ] = None,
    url: Annotated[
        list[str] | None, typer.Option(help="An OpenAI endpoint that runs already; may be repeated")
    ] = None,
    model: Annotated[
        str, typer.Option(help="A Hugging Face folder, or a random Llama made here: small-text, tiny-text")
    ] = "small-text",
    vllm_python: Annotated[Path | None, typer.Option(help="The Python of an environment with vLLM")] = None,
    tokens: Annotated[int, typer.Option(min=256, help="Of the longest prompt, its answer included")] = 4096,
    pool_tokens: Annotated[int, typer.Option(min=256, help="Of KV that each server has room for")] = 16_384,
    threads: Annotated[
        int | None, typer.Option(min=1, help="That each computes with; default: one core is the clients'")
    ] = None,
    requests: Annotated[int, typer.Option(min=1, help="batch: requests")] = 24,
    answer: Annotated[int, typer.Option(min=1, help="Tokens of an answer")] = 32,
    rate: Annotated[str, typer.Option(help="online: requests a second, comma-separated")] = "0.5,1",
    seconds: Annotated[float, typer.Option(min=0.1, help="online: for each rate")] = 30.0,
    trace: Annotated[
        Path | None, typer.Option(help="online: and the arrivals of this trace, which replay reads, too")
    ] = None,
    block_tokens: Annotated[int, typer.Option(min=1, help="That a block of the trace stands for")] = 64,
    slo_ttft: Annotated[float, typer.Option(min=0, help="online: seconds to the first token, at most")] = 1.0,
    slo_itl: Annotated[float, typer.Option(min=0, help="online: seconds per later token, at most")] = 0.1,
    rounds: Annotated[int, typer.Option(min=1, help="longctx, stream: medians of so many")] = 3,
    slow_readers: Annotated[int, typer.Option(min=1, help="stream: beside 4 quick ones")] = 28,
    request_s: Annotated[float, typer.Option(min=0.1, help="Seconds for one request at most")] = 180.0,
    host_bytes: Annotated[str, typer.Option(help="Arena of a store's daemon")] = "2GiB",
    disk_bytes: Annotated[str, typer.Option(help="Disk cap of a store's daemon")] = "8GiB",
    seed: Annotated[int, typer.Option(help="Asks the same again")] = 0,
    directory: Annotated[Path | None, typer.Option("--dir", help="Where; default: a temporary one")] = None,
    json: JsonOption = None,
    plot: Annotated[Path | None, typer.Option(help="Write a PNG")] = None,
) -> None:
    """What clients see of OpenAI servers: ours with and without a store, vLLM, a transformers loop, a URL."""
    import os
    import tempfile

    from tierstore_tools.scenarios import command, settings
    from tierstore_tools.scenarios import targets as servers
    from tierstore_tools.scenarios.runs import Slo

    if directory is not None:
        _make_writable(directory)
    urls = tuple(url or ())
    if targets is None:
        targets = "" if urls else ",".join(servers.KNOWN)
    with tempfile.TemporaryDirectory(prefix="tierstore-bench-", dir=directory) as scratch:
        command.run(
            settings.Scenarios(
                scenarios=settings.SCENARIOS if scenario == "all" else tuple(scenario.split(",")),
                targets=tuple(filter(None, targets.split(","))),
                urls=urls,
                model=model,
                vllm=vllm_python,
                room=servers.Room(
                    pool_tokens,
                    tokens,
                    threads or max(len(os.sched_getaffinity(0)) - 1, 1),
                    parse_size(host_bytes),
                    parse_size(disk_bytes),
                ),
                requests=requests,
                answer_tokens=answer,
                rates_per_s=_numbers("--rate", rate),
                seconds=seconds,
                trace=trace,
                block_tokens=block_tokens,
                slo=Slo(slo_ttft, slo_itl),
                rounds=rounds,
                slow_readers=slow_readers,
                request_s=request_s,
                seed=seed,
                directory=Path(scratch),
            ),
            json=json,
            plot=plot,
        )


@app.command()
def scheduling(
    trace: Annotated[
        Path | None, typer.Option(help="Of requests, as replay reads it, for the conversation workload")
    ] = None,
    workloads: Annotated[
        str | None, typer.Option(help="conversation,tree,simulated; default: those possible")
    ] = None,
    model: Annotated[str, typer.Option(help="A Hugging Face folder, or a preset")] = "tiny",
    requests: Annotated[int, typer.Option(min=2, help="Of each workload at most")] = 2000,
    scale: Annotated[int, typer.Option(min=1, help="The trace's lengths are divided by it")] = 16,
    load: Annotated[float, typer.Option(help="Share of what the engine can do that comes in")] = 0.8,
    pool_tokens: Annotated[int, typer.Option(min=1024, help="Of the engine's page pool")] = 65_536,
    host_bytes: Annotated[str, typer.Option(help="Capacity of the host tier")] = "64MiB",
    overtake_s: Annotated[float, typer.Option(help="Of cache: what a request waits longer at most")] = 10.0,
    rounds: Annotated[int, typer.Option(min=1, help="Repetitions; medians are reported")] = 3,
    clock: Annotated[str, typer.Option(help="wall, or cpu: processor time, idle times left out")] = "wall",
    seed: Annotated[int, typer.Option(help="Of what is made up")] = 1,
    simulated_tokens_per_s: Annotated[
        float, typer.Option(min=1, help="Prefill of the simulator, which has the trace's full lengths")
    ] = 8000.0,
    simulated_cache: Annotated[int, typer.Option(min=0, help="Tokens that it holds")] = 3_000_000,
    simulated_overtake_s: Annotated[float, typer.Option(help="Its --overtake-s")] = 60.0,
    json: JsonOption = None,
) -> None:
    """TTFT, hit rate and throughput of scheduling by cache, beside first come, first served."""
    from tierstore_tools import scheduling as bench

    if workloads is None:
        workloads = "tree" if trace is None else "conversation,tree,simulated"
    bench.run(
        bench.Bench(
            model=model,
            workloads=tuple(workloads.split(",")),
            trace=trace,
            requests=requests,
            scale=scale,
            load=load,
            pool_tokens=pool_tokens,
            host_bytes=parse_size(host_bytes),
            overtake_s=overtake_s,
            rounds=rounds,
            clock=clock,
            seed=seed,
            simulated_tokens_per_s=simulated_tokens_per_s,
            simulated_cache_tokens=simulated_cache,
            simulated_overtake_s=simulated_overtake_s,
        ),
        json=json,
    )


@app.command()
def peers(
    page_bytes: Annotated[str, typer.Option(help="Page sizes, comma-separated")] = "1MiB,8MiB",
    total: Annotated[str, typer.Option(help="Of pages: what each save and load moves")] = "256MiB",
    rounds: Annotated[int, typer.Option(min=1, help="Over all peers; medians and ranges are reported")] = 3,
    lookup_tokens: Annotated[int, typer.Option(min=256, help="Of the prompt that is looked up")] = 100_000,
    settle: Annotated[float, typer.Option(min=0, help="Seconds from the last save to kill -9")] = 5.0,
    lmcache_python: Annotated[Path | None, typer.Option(help="Of an environment with LMCache")] = None,
    redis_python: Annotated[
        Path | None, typer.Option(help="… with redis-py (redis-server: from PATH)")
    ] = None,
    mooncake_python: Annotated[Path | None, typer.Option(help="… with Mooncake's transfer engine")] = None,
    directory: Annotated[Path | None, typer.Option("--dir", help="Where; default: a temporary one")] = None,
    json: JsonOption = None,
) -> None:
    """Our daemon beside LMCache's, Redis and Mooncake: save, load, lookup, what they cost, what stays."""
    import sys
    import tempfile

    from tierstore_tools.peers import command
    from tierstore_tools.peers.daemons import Peer
    from tierstore_tools.peers.measure import Plan

    if directory is not None:
        _make_writable(directory)
    sizes = tuple(parse_size(size) for size in page_bytes.split(","))
    total_bytes = parse_size(total)
    for size in sizes:
        if size % (16 << 10) or not 0 < 4 * size <= total_bytes:
            raise UsageError(
                f"a page size is a multiple of 16KiB, and at most a quarter of --total: not {size}"
            )
    here = Path(sys.executable)
    with tempfile.TemporaryDirectory(prefix="tierstore-bench-", dir=directory) as scratch:
        plan = Plan(sizes, total_bytes, rounds, lookup_tokens, settle, Path(scratch))
        theirs = {"lmcache": lmcache_python, "redis": redis_python, "mooncake": mooncake_python}
        command.run(
            plan,
            [Peer("tierstore", here), *(Peer(name, python or here) for name, python in theirs.items())],
            json=json,
        )


@app.command()
def cluster_plan(
    hosts: Annotated[str, typer.Option(help="Numbers of hosts")] = "10,100,1000",
    requests_per_s: Annotated[float, typer.Option(help="To each host")] = 2.0,
    tokens: Annotated[int, typer.Option(min=64, help="Of a prompt")] = 8000,
    page_bytes: Annotated[str, typer.Option(help="Of 64 tokens")] = "8MiB",
    asking: Annotated[float, typer.Option(help="Share of requests that ask the pool")] = 0.5,
    found: Annotated[float, typer.Option(help="Share of these that find something")] = 0.3,
    published: Annotated[float, typer.Option(help="Prompts published for each that asks")] = 0.2,
    link: Annotated[str, typer.Option(help="Bytes a second of a host's link")] = "3GB/s",
    master_call_us: Annotated[float, typer.Option(help="That the master takes for a call")] = 13.0,
    master_name_us: Annotated[float, typer.Option(help="And for each name")] = 0.14,
    host_s_per_gb: Annotated[float, typer.Option(help="Core-seconds of the host")] = 1.4,
    lender_s_per_gb: Annotated[float, typer.Option(help="Core-seconds of the lender")] = 0.5,
    json: JsonOption = None,
) -> None:
    """Where a pool shared by many hosts saturates: a simulation from measured costs."""
    from tierstore_tools.cluster_plan import Costs, Traffic, run

    rate = parse_size(link.removesuffix("/s"))
    traffic = Traffic(
        requests_per_s, tokens, 64, parse_size(page_bytes), asking, found, published, float(rate)
    )
    costs = Costs(master_call_us * 1e-6, master_name_us * 1e-6, host_s_per_gb * 1e-9, lender_s_per_gb * 1e-9)
    run([int(count) for count in _numbers("--hosts", hosts)], traffic, costs, json=json)


@app.command()
def pool(
    models: Annotated[str, typer.Option(help="Models of `tierstore size`, comma-separated")] = (
        "gemma-3-27b,gpt-oss-120b,qwen3-next-80b-a3b,llama-3-8b"
    ),
    hbm_bytes: Annotated[str, typer.Option(help="The pool's memory")] = "64GiB",
    longest: Annotated[int, typer.Option(min=1024, help="Tokens that a request may have")] = 32_768,
    chunk_tokens: Annotated[int, typer.Option(min=1, help="Of a page")] = 64,
    steps: Annotated[int, typer.Option(min=10, help="Of the simulation")] = 2000,
    pools: Annotated[
        str, typer.Option("--pool", help="Which are compared: two-level, one-size, contiguous")
    ] = "two-level,one-size,contiguous",
    seed: Annotated[int, typer.Option(help="Of the made-up requests")] = 1,
    json: JsonOption = None,
    plot: Annotated[Path | None, typer.Option(help="Write a PNG")] = None,
) -> None:
    """What a page pool wastes with layers of several kinds, beside one page size and contiguous buffers."""
    from tierstore.sizing import PRESETS
    from tierstore_tools import pool as bench

    names = models.split(",")
    unknown = [name for name in names if name not in PRESETS]
    if unknown:
        raise UsageError(f"no model {unknown[0]!r} (known: {', '.join(PRESETS)})")
    bench.run(
        {name: PRESETS[name] for name in names},
        nbytes=parse_size(hbm_bytes),
        longest=longest,
        chunk_tokens=chunk_tokens,
        steps=steps,
        seed=seed,
        policies=pools.split(","),
        json=json,
        plot=plot,
    )


@app.command()
def handover(
    model: Annotated[
        str, typer.Option(help="A Hugging Face folder, or a random Llama made here: small-text, tiny-text")
    ] = "small-text",
    tokens: Annotated[int, typer.Option(help="Of the prompts that arrive")] = 4000,
    answer: Annotated[int, typer.Option(min=2, help="Tokens generated for each")] = 32,
    streams: Annotated[int, typer.Option(min=1, help="That decode all the time")] = 4,
    rate: Annotated[float, typer.Option(min=0.001, help="Prompts a second")] = 0.2,
    seconds: Annotated[float, typer.Option(min=1, help="Of each arrangement, in each round")] = 30.0,
    rounds: Annotated[int, typer.Option(min=1, help="In which all arrangements have their turn")] = 3,
    prefill_chunk: Annotated[int, typer.Option(min=64, help="Prompt tokens computed per step")] = 1024,
    chunks: Annotated[str, typer.Option(help="Others, with which single hand-overs are taken apart")] = "256",
    pairs: Annotated[int, typer.Option(min=1, help="Such hand-overs of each kind")] = 5,
    seed: Annotated[int, typer.Option(help="Asks the same again")] = 1,
    directory: Annotated[Path | None, typer.Option("--dir", help="Where; default: a temporary one")] = None,
    json: JsonOption = None,
) -> None:
    """Prefill and decode together and apart: TTFT, inter-token latency and throughput of mixed traffic."""
    import tempfile

    from tierstore_tools.handover import Traffic, run

    if directory is not None:
        _make_writable(directory)
    traffic = Traffic(
        model=model,
        tokens=tokens,
        answer=answer,
        streams=streams,
        rate_per_s=rate,
        seconds=seconds,
        rounds=rounds,
        prefill_chunk=prefill_chunk,
        chunks=_lengths("--chunks", chunks),
        pairs=pairs,
        seed=seed,
    )
    with tempfile.TemporaryDirectory(prefix="tierstore-bench-", dir=directory) as scratch:
        run(traffic, Path(scratch), json=json)


@app.command()
def handover_plan(
    costs: Annotated[Path, typer.Option(help="Measured by tierstore-bench handover --json")],
    engines: Annotated[str, typer.Option(help="Numbers of engines")] = "2,4,8,16,32,64",
    tokens: Annotated[int, typer.Option(min=1, help="Of a prompt")] = 4000,
    answer: Annotated[str, typer.Option(help="Tokens generated, comma-separated")] = "32,128,512",
    ttft_s: Annotated[float, typer.Option(help="99 % of the first tokens are to come within this")] = 10.0,
    itl_s: Annotated[float, typer.Option(help="… and of the later ones")] = 0.2,
    json: JsonOption = None,
) -> None:
    """From which traffic on prefill and decode pay apart: a simulation from measured costs."""
    from tierstore_tools.handover_plan import Requests, read_costs, run

    numbers, answers = _lengths("--engines", engines), _lengths("--answer", answer)
    run(numbers, answers, Requests(tokens, answers[0], ttft_s, itl_s), read_costs(costs), json=json)


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read {path}: {error}") from error


def _numbers(option: str, text: str) -> tuple[float, ...]:
    try:
        numbers = tuple(float(number) for number in text.split(","))
    except ValueError:
        numbers = ()
    if not numbers or not all(0 < number < 1e9 for number in numbers):
        raise UsageError(f"{option} is numbers above 0 with commas between them, not {text!r}")
    return numbers


def _lengths(option: str, text: str) -> tuple[int, ...]:
    try:
        return tuple(int(length) for length in text.split(","))
    except ValueError as error:
        raise UsageError(f"{option} takes numbers of tokens, as in 1000,4000,16000, not {text!r}") from error


def _make_writable(directory: Path) -> None:
    """Make a directory where it is not there yet. Raises :class:`UsageError`."""
    import os

    try:
        directory.mkdir(exist_ok=True)
    except OSError as error:
        raise UsageError(f"cannot make {directory}: {error.strerror}; choose another one") from error
    if not os.access(directory, os.W_OK):
        raise UsageError(f"{directory} cannot be written to: choose another one")


if __name__ == "__main__":
    main()
