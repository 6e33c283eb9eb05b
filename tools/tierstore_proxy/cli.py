"""``tierstore-proxy``: from the command line.

Exit codes: 0 ended, 1 the run failed, 2 bad usage. An error is one line on stderr.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tierstore.command_line import one_line_errors

app = typer.Typer(
    add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None
)


def main() -> None:
    """Run the command line, and end the process."""
    with one_line_errors("tierstore-proxy", extra="proxy"):
        app()


@app.command()
def serve(
    prefill: Annotated[
        list[str] | None, typer.Option(metavar="URL", help="An engine that computes prompts; may be repeated")
    ] = None,
    decode: Annotated[
        list[str] | None, typer.Option(metavar="URL", help="An engine that continues them; may be repeated")
    ] = None,
    daemon: Annotated[
        list[str] | None,
        typer.Option(
            metavar="URL", help="The tierstore daemon of each decode engine, in their order, or one for all"
        ),
    ] = None,
    selector: Annotated[
        str | None, typer.Option(metavar="URL", help="Dynamo's selector, which is asked in their place")
    ] = None,
    identity: Annotated[
        str | None, typer.Option(metavar="HEX", help="Whose pages to ask for, as `tierstore ls` shows it")
    ] = None,
    keys: Annotated[
        str | None, typer.Option(metavar="FILE", help="Your .secret file, for daemons at tcp://")
    ] = None,
    server_key: Annotated[str | None, typer.Option(metavar="FILE", help="Their .key file")] = None,
    listen: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="Beyond loopback a key is needed [127.0.0.1:8100]")
    ] = None,
    api_key: Annotated[
        str | None,
        typer.Option(help="Clients must send it; engines are sent it, too", envvar="TIERSTORE_API_KEY"),
    ] = None,
    min_prefill_tokens: Annotated[
        int | None, typer.Option(help="Prompts that lack fewer go to a decode engine at once [128]")
    ] = None,
    prefill_s: Annotated[
        float | None, typer.Option(help="Seconds for a prefill; then decode goes on alone [30]")
    ] = None,
    look_s: Annotated[
        float | None, typer.Option(help="Seconds for a daemon, a selector, and token ids [.05]")
    ] = None,
    max_body_bytes: Annotated[
        str | None, typer.Option(help="Of a request; larger ones get 413 [4MiB]")
    ] = None,
    max_answer_bytes: Annotated[
        str | None, typer.Option(help="Of an answer; larger ones are cut off [256MiB]")
    ] = None,
    max_requests: Annotated[
        int | None, typer.Option(help="Under way at a time; others get 429 [1024]")
    ] = None,
    max_queued_tokens: Annotated[int | None, typer.Option(help="Prompt tokens of those [16000000]")] = None,
    request_s: Annotated[
        float | None, typer.Option(help="Seconds for one request; then it gets 504 [600]")
    ] = None,
    drain_s: Annotated[
        float | None, typer.Option(help="Seconds that SIGTERM waits for requests [30]")
    ] = None,
    config: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The same as TOML: prefill = [URL, …], prefill_s = 9")
    ] = None,
) -> None:
    """One address for engines that compute prompts and engines that continue them, until SIGTERM.

    A prompt that no decode engine holds is computed by a prefill engine first, which leaves its pages in the
    store. Without --prefill requests go to where their prompts are held. See docs/handover.md.
    """
    flags = {name: value for name, value in locals().items() if name != "config"}
    from tierstore_proxy.run import run
    from tierstore_proxy.settings import ProxySettings

    run(ProxySettings.load(flags, file=config))


if __name__ == "__main__":
    main()
