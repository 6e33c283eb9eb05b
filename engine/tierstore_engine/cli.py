"""``tierstore-engine``: the bundled engine from the command line.

Exit codes: 0 done, 1 the run failed, 2 bad usage. An error is one line on stderr.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tierstore.command_line import one_line_errors
from tierstore.errors import UsageError
from tierstore.units import parse_size

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def main() -> None:
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
    hbm_bytes: Annotated[str | None, typer.Option(help="Page pool; default: what the prompt needs")] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Tokens to generate at most")] = 128,
    temperature: Annotated[float, typer.Option(help="0 is greedy")] = 0.0,
    top_k: Annotated[int, typer.Option(help="Choose among that many tokens; 0 is off")] = 0,
    top_p: Annotated[float, typer.Option(help="Choose among the likeliest that add up to this")] = 1.0,
    min_p: Annotated[float, typer.Option(help="Leave out what is less likely than this × the best")] = 0.0,
    seed: Annotated[int | None, typer.Option(help="Of the sampler; default: a new one each time")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="End before this text; may be repeated")] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on after end-of-sequence")] = False,
    prefill_chunk: Annotated[int, typer.Option(help="Prompt tokens computed per step")] = 1024,
    device: Annotated[str, typer.Option(help="auto|cpu|cuda")] = "auto",
    dtype: Annotated[str | None, typer.Option(help="float32|bfloat16|float16; default: the model's")] = None,
    json: Annotated[bool, typer.Option("--json", help="One JSON document instead of text")] = False,
) -> None:
    """Continue a prompt: the text on stdout as it comes, one line about the run on stderr."""
    with one_line_errors("tierstore-engine"):
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
            hbm_bytes=None if hbm_bytes is None else parse_size(hbm_bytes),
            prefill_chunk=prefill_chunk,
            device=device,
            dtype=dtype,
            json=json,
        )
        run(request)


def _read_prompt(file: Path | None, text: str | None) -> str:
    if file is None and text is None:
        raise UsageError("no prompt: give --prompt-file, --prompt or both")
    try:
        before = file.read_text(encoding="utf-8") if file is not None else ""
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read the prompt from {file}: {error}") from error
    return before + (text or "")
