"""``tierstore-engine``: the bundled engine from the command line.

Exit codes: 0 done, 1 the run failed, 2 bad usage. An error is one line on stderr.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tierstore.command_line import one_line_errors
from tierstore.errors import UsageError
from tierstore.types import HANDOVER_S
from tierstore.units import parse_size

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

_DISK_CODEC = "How an embedded store keeps pages on disk: none, lossless or zstd"


def main() -> None:
    """Run the command line, and end the process."""
    with one_line_errors("tierstore-engine"):
        app()


@app.callback()
def _commands() -> None:
    """The bundled paged-attention engine over a tiered KV-cache store."""


@app.command()
def generate(
    model: Annotated[str, typer.Option(help="A Hugging Face folder, or tiny|demo|qwen2.5-0.5b|llama-3-8b")],
    prompt_file: Annotated[Path | None, typer.Option(help="Read the prompt from a file")] = None,
    prompt: Annotated[str | None, typer.Option(help="The prompt, or what follows the file's text")] = None,
    store: Annotated[str | None, typer.Option(help="Store directory; without one nothing is kept")] = None,
    host_bytes: Annotated[str, typer.Option(help="Capacity of the store's host tier")] = "1GiB",
    disk_bytes: Annotated[str, typer.Option(help="Capacity of the store's disk tier")] = "10GiB",
    disk_codec: Annotated[str, typer.Option(metavar="NAME", help=_DISK_CODEC)] = "none",
    hbm_bytes: Annotated[str | None, typer.Option(help="Page pool; default: what the prompt needs")] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Tokens to generate at most")] = 128,
    temperature: Annotated[float, typer.Option(help="0 is greedy")] = 0.0,
    top_k: Annotated[int, typer.Option(help="Choose among that many tokens; 0 is off")] = 0,
    top_p: Annotated[float, typer.Option(help="Choose among the likeliest that add up to this")] = 1.0,
    min_p: Annotated[float, typer.Option(help="Leave out what is less likely than this × the best")] = 0.0,
    seed: Annotated[int | None, typer.Option(help="Of the sampler; default: a new one each time")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="End before this text; may be repeated")] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on after end-of-sequence")] = False,
    chunk_tokens: Annotated[
        int, typer.Option(help="Tokens of a page (docs/sizing.md says what that does)")
    ] = 64,
    prefill_chunk: Annotated[int, typer.Option(help="Prompt tokens computed per step")] = 1024,
    plan: Annotated[
        str, typer.Option(help="Of a hit: both-ends|one-way (whichever is faster)|load|compute")
    ] = "both-ends",
    device: Annotated[str, typer.Option(help="auto|cpu|cuda|cuda:N")] = "auto",
    dtype: Annotated[str | None, typer.Option(help="float32|bfloat16|float16; default: the model's")] = None,
    kv_dtype: Annotated[
        str,
        typer.Option(help="auto|fp8_e4m3|fp8_e5m2|int8|int4|k8v4, or two as K/V; auto: the model's dtype"),
    ] = "auto",
    kv_scales: Annotated[
        str, typer.Option(help="dynamic|checkpoint, or a file that calibrate wrote: scales of a quantised KV")
    ] = "dynamic",
    json: Annotated[bool, typer.Option("--json", help="One JSON document instead of text")] = False,
) -> None:
    """Continue a prompt: the text on stdout as it comes, one line about the run on stderr."""
    # Only here: torch takes seconds to import, and --help should not.
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
    model: Annotated[str, typer.Option(help="A Hugging Face folder, or tiny|demo|qwen2.5-0.5b|llama-3-8b")],
    host: Annotated[str, typer.Option(help="Listen at; beyond loopback a key is needed")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0 is any free one")] = 8000,
    served_model_name: Annotated[
        str | None, typer.Option(help="What clients call the model; default: the folder's or preset's name")
    ] = None,
    api_key: Annotated[
        str | None, typer.Option(help="Clients must send it", envvar="TIERSTORE_API_KEY", show_envvar=True)
    ] = None,
    operator_key: Annotated[
        str | None,
        typer.Option(
            help="For POST /pool, which clients' key is not",
            envvar="TIERSTORE_OPERATOR_KEY",
            show_envvar=True,
        ),
    ] = None,
    chat_template: Annotated[Path | None, typer.Option(help="Jinja; default: the model's own")] = None,
    store: Annotated[
        str | None, typer.Option(help="Store directory, or a daemon's address; without one nothing is kept")
    ] = None,
    kv_role: Annotated[
        str, typer.Option(help="With a daemon: kv_both|kv_producer (saves only)|kv_consumer (loads only)")
    ] = "kv_both",
    host_bytes: Annotated[str, typer.Option(help="Capacity of the store's host tier")] = "1GiB",
    disk_bytes: Annotated[str, typer.Option(help="Capacity of the store's disk tier")] = "10GiB",
    disk_codec: Annotated[str, typer.Option(metavar="NAME", help=_DISK_CODEC)] = "none",
    hbm_bytes: Annotated[
        str | None, typer.Option(help="Page pool; default: a GPU's free memory, or 65,536 tokens on a CPU")
    ] = None,
    most_hbm_bytes: Annotated[
        str | None,
        typer.Option(help="What POST /pool may make of it; default: on a CPU as large as it begins"),
    ] = None,
    draft: Annotated[str | None, typer.Option(help="Speculative decoding: prompt-lookup, or a model")] = None,
    draft_tokens: Annotated[int, typer.Option(help="Drafted per step at most")] = 5,
    chunk_tokens: Annotated[
        int, typer.Option(help="Tokens of a page (docs/sizing.md says what that does)")
    ] = 64,
    prefill_chunk: Annotated[int, typer.Option(help="Prompt tokens computed per step")] = 1024,
    plan: Annotated[
        str, typer.Option(help="Of a hit: both-ends|one-way (whichever is faster)|load|compute")
    ] = "both-ends",
    max_sequences: Annotated[int, typer.Option(help="Computed at a time")] = 32,
    schedule: Annotated[
        str, typer.Option(help="Whose prompt first: cache (least left to compute)|fcfs (oldest)")
    ] = "cache",
    overtake_s: Annotated[
        float,
        typer.Option(help="Seconds that a request waits longer by cache than by fcfs (docs/serving.md)"),
    ] = 10.0,
    ttft_slo_s: Annotated[
        float | None,
        typer.Option(help="Refuse what cannot have its first token within these seconds", show_default=False),
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Of one continuation at most")] = 4096,
    max_requests: Annotated[int, typer.Option(help="Worked on or waiting at a time; others get 429")] = 512,
    max_queued_tokens: Annotated[int, typer.Option(help="Prompt tokens of those")] = 4_000_000,
    max_body_bytes: Annotated[str, typer.Option(help="Of a request; larger ones get 413")] = "4MiB",
    request_s: Annotated[float, typer.Option(help="Seconds for one request; then it gets 504")] = 600.0,
    drain_s: Annotated[float, typer.Option(help="Seconds that SIGTERM waits for requests")] = 30.0,
    handover_s: Annotated[
        float, typer.Option(help="Seconds that an engine which goes on with a prompt may wait for its pages")
    ] = HANDOVER_S,
    device: Annotated[str, typer.Option(help="auto|cpu|cuda")] = "auto",
    dtype: Annotated[str | None, typer.Option(help="float32|bfloat16|float16; default: the model's")] = None,
    kv_dtype: Annotated[
        str,
        typer.Option(help="auto|fp8_e4m3|fp8_e5m2|int8|int4|k8v4, or two as K/V; auto: the model's dtype"),
    ] = "auto",
    kv_scales: Annotated[
        str, typer.Option(help="dynamic|checkpoint, or a file that calibrate wrote: scales of a quantised KV")
    ] = "dynamic",
) -> None:
    """Serve OpenAI's API over HTTP, until SIGTERM."""
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
def calibrate(
    out: Annotated[Path, typer.Argument(help="The file to write, for --kv-scales")],
    model: Annotated[str, typer.Option(help="A Hugging Face folder, or tiny|demo|qwen2.5-0.5b|llama-3-8b")],
    prompt_file: Annotated[Path | None, typer.Option(help="Text like that which will be served")] = None,
    prompt: Annotated[str | None, typer.Option(help="The text, or what follows the file's")] = None,
    dtype: Annotated[str | None, typer.Option(help="float32|bfloat16|float16; default: the model's")] = None,
) -> None:
    """Run a text on the CPU and write the largest keys and values of each layer and head: static scales."""
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
