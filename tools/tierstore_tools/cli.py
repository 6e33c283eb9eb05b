"""``tierstore-bench``: the benchmarks on the command line.

Exit codes: 0 done, 1 the run failed, 2 bad usage. An error is one line on stderr. ``--json`` takes a file;
without one (or with ``-``) the document goes to stdout and the table to stderr.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer

from tierstore.arguments import json_object
from tierstore.command_line import make_app, one_line_errors, version_option
from tierstore.errors import UsageError
from tierstore.units import parse_size

app = make_app()
plan = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Simulations from measured costs.")
app.add_typer(plan, name="plan")


def _python(help: str) -> Any:
    """Return an option that takes a Python. Its path is made absolute. A virtual environment's symlink is not
    resolved, because the Python that it points to does not have the environment's packages."""
    return typer.Option(help=help, metavar="PATH", parser=lambda text: Path(text).absolute())


JsonOption = Annotated[
    str | None, typer.Option("--json", help="Write one JSON document: a file, or - for stdout")
]
PlotOption = Annotated[Path | None, typer.Option(help="Write a PNG")]
DirectoryOption = Annotated[
    Path | None, typer.Option("--dir", help="Directory for files; default: a temporary one")
]
SeedOption = Annotated[int, typer.Option(help="Seed; equal seeds make equal loads")]
DtypeOption = Annotated[str | None, typer.Option(help="float32|bfloat16|float16; default: the model's own")]


def main() -> None:
    """Run the command line. ``--json`` without a value means stdout."""
    arguments = sys.argv[1:]
    for at, argument in enumerate(arguments):
        if argument == "--json" and (at + 1 == len(arguments) or arguments[at + 1].startswith("--")):
            arguments.insert(at + 1, "-")
            break
    with one_line_errors("tierstore-bench"):
        app(arguments, standalone_mode=True)


@app.callback()
def _commands(version: Annotated[bool, version_option("tierstore-bench")] = False) -> None:
    """Measure each tier beside the limits of this machine."""


@app.command()
def tiers(
    page_bytes: Annotated[str, typer.Option(help="Page sizes, comma-separated")] = "128KiB,1MiB,8MiB",
    total: Annotated[str, typer.Option(help="Bytes moved per measurement")] = "256MiB",
    rounds: Annotated[int, typer.Option(min=1, help="Repetitions; medians are reported")] = 5,
    directory: Annotated[Path, typer.Option("--dir", help="Directory on the disk to measure")] = Path(),
    json: JsonOption = None,
) -> None:
    """Measure GB/s and µs of each tier by page size.

    The machine's own limits are shown beside them.
    """
    from tierstore_tools import tiers as bench

    sizes = [parse_size(size) for size in page_bytes.split(",")]
    nbytes = parse_size(total)
    bench.command(_writable(directory), sizes, total_bytes=nbytes, rounds=rounds, json=json)


@app.command()
def longctx(
    model: Annotated[str, typer.Option(help="A Hugging Face folder, or a preset")] = "demo",
    tokens: Annotated[int, typer.Option(min=2, help="Length of the prompt")] = 100_000,
    prompt_file: Annotated[
        Path | None, typer.Option(help="Text to use instead of the standard library's sources")
    ] = None,
    store: Annotated[
        Path, typer.Option(help="Directory in which the store is made, and removed afterwards")
    ] = Path(),
    device: Annotated[str, typer.Option(help="auto|cpu|cuda")] = "auto",
    dtype: DtypeOption = None,
    kv_dtype: Annotated[str, typer.Option(help="auto|fp8_e4m3|fp8_e5m2|int8|int4|k8v4, or K/V")] = "auto",
    kv_scales: Annotated[
        str, typer.Option(help="dynamic|checkpoint, or a file that calibrate wrote")
    ] = "dynamic",
    chunk_tokens: Annotated[int, typer.Option(help="Tokens of a page")] = 64,
    prefill_chunk: Annotated[int, typer.Option(help="Prompt tokens computed per step")] = 2048,
    ranks: Annotated[int, typer.Option(min=1, help="On CPUs: processes that share the heads")] = 1,
    parts: Annotated[
        int, typer.Option(min=1, help="On CPUs: parts of the tokens, with --ranks processes each")
    ] = 1,
    sweep: Annotated[str | None, typer.Option(help="More prompt lengths to compare: 1000,4000,…")] = None,
    beyond: Annotated[
        str | None,
        typer.Option(help="Instead: decode contexts of 1,4,… times --tokens with memory for --tokens only"),
    ] = None,
    throttle: Annotated[str | None, typer.Option(help="Slow down tiers: disk=200MB/s,host=…")] = None,
    json: JsonOption = None,
    plot: PlotOption = None,
) -> None:
    """Measure the TTFT of a long prompt, cold and from each tier.

    It also measures bytes and limits, and compares the answers.
    """
    if beyond is not None:
        from tierstore_tools.longctx import beyond as bench

        if prompt_file or kv_dtype != "auto" or sweep or throttle or plot or ranks * parts != 1:
            raise UsageError(
                "--beyond takes --model, --tokens, --store, --dtype, --chunk-tokens and --json only"
            )
        bench.run(
            model,
            _lengths("--beyond", beyond),
            tokens=tokens,
            directory=_writable(store),
            dtype=dtype,
            chunk_tokens=chunk_tokens,
            json=json,
        )
        return
    from tierstore_tools.longctx import command
    from tierstore_tools.longctx.settings import LongContext
    from tierstore_tools.throttle import parse_throttle

    command.run(
        LongContext(
            model=model,
            tokens=tokens,
            directory=_writable(store),
            device=device,
            dtype=dtype,
            kv_dtype=kv_dtype,
            kv_scales=kv_scales,
            prompt_text=None if prompt_file is None else _read_text(prompt_file),
            chunk_tokens=chunk_tokens,
            prefill_chunk=prefill_chunk,
            ranks=ranks,
            parts=parts,
            throttle=parse_throttle(throttle) if throttle else {},
            sweep=_lengths("--sweep", sweep) if sweep else (),
        ),
        json=json,
        plot=plot,
    )


@app.command()
def faults(
    runs: Annotated[int, typer.Option(min=1, help="Runs of each fault")] = 40,
    seed: SeedOption = 0,
    directory: DirectoryOption = None,
    json: JsonOption = None,
) -> None:
    """Crash stores and count wrong and lost pages.

    The faults are crashes, lying disks and kill -9. It also measures the time to recover. Needs a checkout.
    """
    checkout = Path(__file__).resolve().parents[2]
    if not (checkout / "tests" / "campaigns" / "command.py").exists():
        raise UsageError("faults runs tests/campaigns: start it from a checkout (pip install -e .)")
    if str(checkout) not in sys.path:
        sys.path.insert(0, str(checkout))
    command = import_module("tests.campaigns.command")
    command.run(_writable(directory), runs=runs, seed=seed, json=json)


@app.command()
def churn(
    capacity: Annotated[str, typer.Option(help="Capacity of the store")] = "1GiB",
    times: Annotated[float, typer.Option(min=0.1, help="Bytes to write, in capacities")] = 20.0,
    seed: SeedOption = 0,
    directory: DirectoryOption = None,
    json: JsonOption = None,
) -> None:
    """Simulate a day of traffic with mixed page sizes.

    It measures the utilisation of the disk cap and the write speed.
    """
    from tierstore_tools import churn as bench

    bench.run(_writable(directory), capacity_bytes=parse_size(capacity), times=times, seed=seed, json=json)


@app.command()
def vllm(
    model: Annotated[
        str, typer.Option(help="A Hugging Face folder, or a random model: tiny, small")
    ] = "small",
    tokens: Annotated[int, typer.Option(min=64, help="Length of the prompts")] = 4000,
    store: Annotated[str | None, typer.Option(help="Address of a running daemon; default: start one")] = None,
    dtype: DtypeOption = None,
    rounds: Annotated[
        int, typer.Option(min=0, help="Prompts asked cold and from each tier; 0: only the overhead")
    ] = 5,
    starts: Annotated[
        int, typer.Option(min=0, help="Starts of engines with and without the connector; 0: no overhead")
    ] = 1,
    pairs: Annotated[int, typer.Option(min=1, help="Prompts and batches of each start")] = 20,
    overhead_tokens: Annotated[int, typer.Option(min=64, help="Length of these prompts")] = 512,
    host_bytes: Annotated[str, typer.Option(help="Arena of the started daemon")] = "2GiB",
    disk_bytes: Annotated[str, typer.Option(help="Disk cap of the started daemon")] = "8GiB",
    throttle: Annotated[
        str | None, typer.Option(help="disk=20MB/s: also measure hits from a disk of this speed")
    ] = None,
    options: Annotated[
        str, typer.Option(metavar="JSON", help='More arguments of vllm.LLM: {"tensor_parallel_size": 2}')
    ] = "{}",
    directory: DirectoryOption = None,
    json: JsonOption = None,
) -> None:
    """Measure a real vLLM with the connector.

    It measures the TTFT cold, from host memory and from disk after a restart, and the cost of the connector.
    """
    from tierstore_tools.throttle import parse_throttle
    from tierstore_tools.vllm import command
    from tierstore_tools.vllm.settings import VllmBench

    rates = {} if throttle is None else parse_throttle(throttle)
    if set(rates) - {"disk"}:
        raise UsageError(f"--throttle of vllm slows down the disk only (disk=20MB/s), got {throttle!r}")
    with _scratch(directory) as scratch:
        command.run(
            VllmBench(
                model=model,
                tokens=tokens,
                directory=scratch,
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
            help="Comma-separated: lru, default, gdsf, hinted, priority, belady, fifo, lfu, s3fifo, sieve, 2q"
        ),
    ] = "lru,default,belady",
    capacity: Annotated[
        str | None, typer.Option(help="3Mtokens,8GiB,5859blocks,10%; default 1,5,10,25,50%")
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Model whose page size counts: a preset or a Hugging Face folder")
    ] = None,
    hints: Annotated[str, typer.Option(help="none|oracle:P|inferred")] = "none",
    format_name: Annotated[str, typer.Option("--format", help="auto|mooncake|bailian|weka|csv")] = "auto",
    block_tokens: Annotated[
        int | None, typer.Option(min=1, help="Tokens per block id; default: the format's")
    ] = None,
    session_gap_s: Annotated[
        float, typer.Option(min=0, help="Seconds between starts of WEKA sessions")
    ] = 0.0,
    hbm: Annotated[str | None, typer.Option(help="Replay through tiers: capacity of HBM")] = None,
    host: Annotated[str | None, typer.Option(help="Capacity of the host tier")] = None,
    disk: Annotated[str | None, typer.Option(help="Capacity of the disk tier")] = None,
    tiers: Annotated[Path | None, typer.Option(help="GB/s, from tierstore-bench tiers --json")] = None,
    host_gb_per_s: Annotated[float | None, typer.Option(help="Host to HBM")] = None,
    disk_read_gb_per_s: Annotated[float | None, typer.Option(help="Disk to host")] = None,
    disk_write_gb_per_s: Annotated[float | None, typer.Option(help="Host to disk")] = None,
    longctx: Annotated[Path | None, typer.Option(help="Prefill speed, from longctx --json")] = None,
    prefill_tokens_per_s: Annotated[float | None, typer.Option(help="Prefill speed")] = None,
    prefetch: Annotated[
        str, typer.Option(help="both|off|on: read ahead in the pauses of conversations")
    ] = "both",
    jobs: Annotated[int | None, typer.Option(min=1, help="Processes; default: one per core and case")] = None,
    json: JsonOption = None,
    plot: PlotOption = None,
) -> None:
    """Replay a trace: hit rates of policies and capacities.

    With --hbm, --host or --disk it also reports the hits of each tier, the bytes moved, and the time to first
    token.
    """
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
def scenarios(
    scenario: Annotated[str, typer.Argument(help="batch|longctx|online|stream|all, or several with commas")],
    targets: Annotated[
        str | None,
        typer.Option(
            help="ours, ours+store, vllm, vllm+store, transformers; default: all that are installed, or none "
            "beside --url"
        ),
    ] = None,
    url: Annotated[list[str] | None, typer.Option(help="A running OpenAI endpoint; may be repeated")] = None,
    model: Annotated[
        str, typer.Option(help="A Hugging Face folder, or a random Llama: small-text, tiny-text")
    ] = "small-text",
    vllm_python: Annotated[Path | None, _python("The Python of an environment with vLLM")] = None,
    tokens: Annotated[int, typer.Option(min=256, help="Longest prompt, its answer included")] = 4096,
    pool_tokens: Annotated[int, typer.Option(min=256, help="KV capacity of each server, in tokens")] = 16_384,
    threads: Annotated[
        int | None, typer.Option(min=1, help="Threads of each server; default: one core less than there are")
    ] = None,
    requests: Annotated[int, typer.Option(min=1, help="batch: requests")] = 24,
    answer: Annotated[int, typer.Option(min=1, help="Tokens of an answer")] = 32,
    rate: Annotated[str, typer.Option(help="online: requests a second, comma-separated")] = "0.5,1",
    seconds: Annotated[float, typer.Option(min=0.1, help="online: duration of each rate")] = 30.0,
    trace: Annotated[
        Path | None, typer.Option(help="online: also the arrivals of this trace (formats as in replay)")
    ] = None,
    block_tokens: Annotated[int, typer.Option(min=1, help="Tokens for each block of the trace")] = 64,
    slo_ttft: Annotated[float, typer.Option(min=0, help="online: limit of TTFT in seconds")] = 1.0,
    slo_itl: Annotated[float, typer.Option(min=0, help="online: limit of seconds per later token")] = 0.1,
    rounds: Annotated[int, typer.Option(min=1, help="longctx, stream: rounds; medians are reported")] = 3,
    slow_readers: Annotated[int, typer.Option(min=1, help="stream: slow readers beside 4 quick ones")] = 28,
    request_s: Annotated[float, typer.Option(min=0.1, help="Timeout of one request in seconds")] = 180.0,
    host_bytes: Annotated[str, typer.Option(help="Arena of a store's daemon")] = "2GiB",
    disk_bytes: Annotated[str, typer.Option(help="Disk cap of a store's daemon")] = "8GiB",
    seed: SeedOption = 0,
    directory: DirectoryOption = None,
    json: JsonOption = None,
    plot: PlotOption = None,
) -> None:
    """Compare OpenAI servers from their clients' view.

    The servers are ours with and without a store, vLLM, and a loop around transformers. The scenario batch
    sends all questions about some documents at once. The scenario longctx repeats a long prompt, also after
    restarts. In online, conversations arrive by Poisson or by a trace. In stream, some clients read quickly
    while others read slowly or send long prompts.
    """
    from tierstore_tools.scenarios import command, settings
    from tierstore_tools.scenarios import targets as servers
    from tierstore_tools.scenarios.runs import Slo

    urls = tuple(url or ())
    if targets is None:
        targets = "" if urls else ",".join(servers.KNOWN)
    with _scratch(directory) as scratch:
        command.run(
            settings.Scenarios(
                scenarios=settings.SCENARIOS if scenario == "all" else tuple(scenario.split(",")),
                targets=tuple(filter(None, targets.split(","))),
                urls=urls,
                model=model,
                vllm=vllm_python,
                room=servers.ServerRoom(
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
                directory=scratch,
            ),
            json=json,
            plot=plot,
        )


@app.command()
def peers(
    page_bytes: Annotated[str, typer.Option(help="Page sizes, comma-separated")] = "1MiB,8MiB",
    total: Annotated[str, typer.Option(help="Bytes of each save and load")] = "256MiB",
    rounds: Annotated[int, typer.Option(min=1, help="Rounds; medians and ranges are reported")] = 3,
    lookup_tokens: Annotated[int, typer.Option(min=256, help="Length of the prompt to look up")] = 100_000,
    settle: Annotated[float, typer.Option(min=0, help="Seconds from the last save to kill -9")] = 5.0,
    lmcache_python: Annotated[Path | None, _python("The Python of an environment with LMCache")] = None,
    redis_python: Annotated[
        Path | None, _python("… with redis-py (redis-server itself must be in PATH)")
    ] = None,
    mooncake_python: Annotated[Path | None, _python("… with Mooncake's transfer engine")] = None,
    directory: DirectoryOption = None,
    json: JsonOption = None,
) -> None:
    """Compare the daemon with LMCache, Redis and Mooncake.

    It measures saves, loads, lookups, their cost, and the pages lost after kill -9.
    """
    from tierstore_tools.peers import command
    from tierstore_tools.peers.daemons import CachePeer
    from tierstore_tools.peers.measure import PeerPlan

    sizes = tuple(parse_size(size) for size in page_bytes.split(","))
    total_bytes = parse_size(total)
    for size in sizes:
        if size % (16 << 10) or not 0 < 4 * size <= total_bytes:
            raise UsageError(
                f"a page size must be a multiple of 16KiB and at most a quarter of --total, got {size}"
            )
    here = Path(sys.executable)
    theirs = {"lmcache": lmcache_python, "redis": redis_python, "mooncake": mooncake_python}
    with _scratch(directory) as scratch:
        command.run(
            PeerPlan(sizes, total_bytes, rounds, lookup_tokens, settle, scratch),
            [
                CachePeer("tierstore", here),
                *(CachePeer(name, python or here) for name, python in theirs.items()),
            ],
            json=json,
        )


@plan.command("cluster")
def plan_cluster(
    hosts: Annotated[str, typer.Option(help="Numbers of hosts, comma-separated")] = "10,100,1000",
    requests_per_s: Annotated[float, typer.Option(help="Requests per second to each host")] = 2.0,
    tokens: Annotated[int, typer.Option(min=64, help="Length of a prompt")] = 8000,
    page_bytes: Annotated[str, typer.Option(help="Bytes of a page of 64 tokens")] = "8MiB",
    asking: Annotated[float, typer.Option(help="Share of requests that ask the shared store")] = 0.5,
    found: Annotated[float, typer.Option(help="Share of these that find pages")] = 0.3,
    published: Annotated[float, typer.Option(help="Published prompts per request that asks")] = 0.2,
    link: Annotated[str, typer.Option(help="Speed of a host's link")] = "3GB/s",
    master_call_us: Annotated[float, typer.Option(help="The master's time per call")] = 13.0,
    master_name_us: Annotated[float, typer.Option(help="The master's time per name in a call")] = 0.14,
    host_s_per_gb: Annotated[float, typer.Option(help="Core-seconds of the host per GB")] = 1.4,
    lender_s_per_gb: Annotated[float, typer.Option(help="Core-seconds of the lender per GB")] = 0.5,
    json: JsonOption = None,
) -> None:
    """Find where a store that many hosts share saturates."""
    from tierstore_tools.plan import ClusterCosts, ClusterTraffic, run_cluster

    rate = parse_size(link.removesuffix("/s"))
    traffic = ClusterTraffic(
        requests_per_s, tokens, 64, parse_size(page_bytes), asking, found, published, float(rate)
    )
    costs = ClusterCosts(
        master_call_us * 1e-6, master_name_us * 1e-6, host_s_per_gb * 1e-9, lender_s_per_gb * 1e-9
    )
    run_cluster(_lengths("--hosts", hosts), traffic, costs, json=json)


@plan.command("handover")
def plan_handover(
    engines: Annotated[str, typer.Option(help="Numbers of engines, comma-separated")] = "2,4,8,16,32,64",
    tokens: Annotated[int, typer.Option(min=1, help="Length of a prompt")] = 4000,
    answer: Annotated[str, typer.Option(help="Generated tokens, comma-separated")] = "32,128,512",
    ttft_s: Annotated[float, typer.Option(help="Limit of p99 of the time to first token")] = 5.0,
    itl_s: Annotated[float, typer.Option(help="Limit of p99 of the time between tokens")] = 0.2,
    step_ms: Annotated[float, typer.Option(help="Time of an engine's step")] = 3.2,
    sequence_ms: Annotated[float, typer.Option(help="… and of each decoding sequence in it")] = 5.1,
    token_us: Annotated[float, typer.Option(help="… and of each prompt token in it")] = 341.0,
    prefill_chunk: Annotated[int, typer.Option(min=1, help="Most prompt tokens of a step")] = 1024,
    handover_ms: Annotated[float, typer.Option(help="Time from prefill to the first decoded token")] = 59.0,
    json: JsonOption = None,
) -> None:
    """Find the traffic at which separate prefill engines pay off.

    With separate prefill engines, other engines decode. The default costs were measured with a tiny model on
    two CPU cores.
    """
    from tierstore_tools.plan import HandoverCosts, HandoverRequests, run_handover

    numbers, answers = _lengths("--engines", engines), _lengths("--answer", answer)
    costs = HandoverCosts(
        step_ms * 1e-3, sequence_ms * 1e-3, token_us * 1e-6, prefill_chunk, handover_ms * 1e-3
    )
    run_handover(numbers, answers, HandoverRequests(tokens, answers[0], ttft_s, itl_s), costs, json=json)


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
        raise UsageError(f"{option} takes numbers above 0 with commas between them, got {text!r}")
    return numbers


def _lengths(option: str, text: str) -> tuple[int, ...]:
    try:
        return tuple(int(length) for length in text.split(","))
    except ValueError as error:
        raise UsageError(f"{option} takes whole numbers, as in 1000,4000,16000, got {text!r}") from error


@contextmanager
def _scratch(directory: Path | None) -> Iterator[Path]:
    """Yield a new directory, and remove it afterwards. Raises :class:`UsageError`."""
    with tempfile.TemporaryDirectory(prefix="tierstore-bench-", dir=_writable(directory)) as scratch:
        yield Path(scratch)


def _writable(directory: Path | None) -> Path:
    """Return the absolute path of ``directory`` (None: the system's temporary directory), which is made if it
    does not exist. Raises :class:`UsageError`."""
    directory = Path(tempfile.gettempdir()) if directory is None else directory
    try:
        directory.mkdir(exist_ok=True)
    except OSError as error:
        raise UsageError(f"cannot make {directory}: {error.strerror}; choose another one") from error
    if not os.access(directory, os.W_OK):
        raise UsageError(f"cannot write to {directory}; choose another one")
    return directory.absolute()


if __name__ == "__main__":
    main()
