"""``tierstore-proxy``: from the command line.

Exit codes: 0 ended, 1 the run failed, 2 bad usage. An error is one line on stderr.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tierstore.command_line import make_app, one_line_errors, version_option

app = make_app()


def main() -> None:
    """Run the command line, and end the process."""
    with one_line_errors("tierstore-proxy", extra="proxy"):
        app()


@app.command()
def serve(
    prefill: Annotated[
        list[str] | None, typer.Option(metavar="URL", help="Engine that computes prompts; may be repeated")
    ] = None,
    decode: Annotated[
        list[str] | None, typer.Option(metavar="URL", help="Engine that generates answers; may be repeated")
    ] = None,
    daemon: Annotated[
        list[str] | None,
        typer.Option(
            metavar="URL", help="tierstore daemon of each --decode engine in the same order, or one for all"
        ),
    ] = None,
    selector: Annotated[
        str | None, typer.Option(metavar="URL", help="Dynamo's selector, asked instead of daemons")
    ] = None,
    identity: Annotated[
        str | None, typer.Option(metavar="HEX", help="Identity of the pages, as `tierstore ls` shows it")
    ] = None,
    keys: Annotated[
        str | None, typer.Option(metavar="FILE", help="Client's .secret file, for daemons at tcp://")
    ] = None,
    server_key: Annotated[
        str | None, typer.Option(metavar="FILE", help="Public .key file of these daemons")
    ] = None,
    listen: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT", help="Address to listen at; other than loopback needs a key [127.0.0.1:8100]"
        ),
    ] = None,
    api_key: Annotated[
        str | None,
        typer.Option(
            help="Key that clients must send; it is sent on to the engines", envvar="TIERSTORE_API_KEY"
        ),
    ] = None,
    min_prefill_tokens: Annotated[
        int | None, typer.Option(help="Prompts with fewer tokens to compute skip prefill engines [128]")
    ] = None,
    prefill_s: Annotated[
        float | None,
        typer.Option(
            help="Time limit of a prefill, in seconds; then the decode engine computes the prompt [30]"
        ),
    ] = None,
    look_s: Annotated[
        float | None, typer.Option(help="Time limit of a question to a daemon or selector, in seconds [.05]")
    ] = None,
    max_body_bytes: Annotated[
        str | None, typer.Option(help="Largest request body; larger ones get 413 [4MiB]")
    ] = None,
    max_answer_bytes: Annotated[
        str | None, typer.Option(help="Largest answer; the rest is cut off [256MiB]")
    ] = None,
    max_requests: Annotated[
        int | None, typer.Option(help="Running requests at most; more get 429 [1024]")
    ] = None,
    max_queued_tokens: Annotated[
        int | None, typer.Option(help="Prompt tokens of these requests at most [16000000]")
    ] = None,
    request_s: Annotated[
        float | None, typer.Option(help="Time limit of one request, in seconds; then it gets 504 [600]")
    ] = None,
    drain_s: Annotated[
        float | None, typer.Option(help="Seconds that SIGTERM waits for running requests [30]")
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="TOML file with these options: prefill = [URL, …], prefill_s = 9"),
    ] = None,
    version: Annotated[bool, version_option("tierstore-proxy")] = False,
) -> None:
    """Serve one address for engines that prefill and engines that decode, until SIGTERM.

    If no decode engine holds a prompt, a prefill engine computes it first and saves its pages in the store.
    Without --prefill, a request goes to the engine that holds its prompt. See docs/handover.md.
    """
    flags = {name: value for name, value in locals().items() if name not in ("config", "version")}
    from tierstore_proxy.run import run
    from tierstore_proxy.settings import ProxySettings

    run(ProxySettings.load(flags, file=config))


if __name__ == "__main__":
    main()
