"""``tierstore llama``: from the command line."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tierstore.command_line import one_line_errors
from tierstore.units import parse_size

_URL = typer.Option("--url", metavar="URL", help="llama-server, on this host")
_STORE = typer.Option(
    metavar="URL", help="The daemon's address: ipc://PATH or tcp://HOST:PORT (default: this user's daemon)"
)


def command(
    url: Annotated[str, _URL] = "http://127.0.0.1:8080",
    listen: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Address to listen at; other than loopback needs a key")
    ] = "127.0.0.1:8090",
    store: Annotated[str | None, _STORE] = None,
    namespace: Annotated[
        str, typer.Option(metavar="TEXT", help="Keeps pages apart from those of other namespaces")
    ] = "",
    api_key: Annotated[
        str | None,
        typer.Option(
            metavar="KEY",
            envvar="LLAMA_API_KEY",
            help="llama-server's own --api-key, which clients must send",
            show_default=False,
        ),
    ] = None,
    save: Annotated[
        bool, typer.Option("--save/--no-save", help="Save slots after answers, or only restore prompts")
    ] = True,
    least_tokens: Annotated[
        int, typer.Option(metavar="N", min=1, help="Fewer new tokens are neither restored nor saved")
    ] = 128,
    chunk_tokens: Annotated[int, typer.Option(metavar="N", min=1, help="Tokens of a page")] = 64,
    lookup_s: Annotated[
        float, typer.Option(metavar="SECONDS", help="Longest wait for the daemon's answer")
    ] = 0.5,
    load_s: Annotated[float, typer.Option(metavar="SECONDS", help="Longest time of a load")] = 10.0,
    max_body_bytes: Annotated[
        str, typer.Option(metavar="SIZE", help="Largest request body; larger ones get 413")
    ] = "64MiB",
    keys: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Your .secret file, for tcp://", show_default=False),
    ] = None,
    server_key: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="The daemon's .key file, for tcp://", show_default=False),
    ] = None,
) -> None:
    """Serve a llama-server with prompts from the store, until SIGTERM.

    Before a request, the longest held prefix of its prompt is restored into a free slot. After the answer,
    the new part is saved. Clients only need the other address. llama-server needs --slot-save-path DIR. See
    docs/llamacpp.md.
    """
    from tierstore.daemon.settings import default_listen
    from tierstore_connectors.llamacpp.blocks import BlockSettings

    with one_line_errors("tierstore", extra="proxy"):
        from tierstore_proxy.llama.app import run
        from tierstore_proxy.llama.settings import LlamaSettings

    blocks = BlockSettings(
        store or default_listen(),
        namespace=namespace,
        chunk_tokens=chunk_tokens,
        least_tokens=least_tokens,
        lookup_s=lookup_s,
        load_s=load_s,
        keys=_text(keys),
        server_key=_text(server_key),
    )
    run(
        LlamaSettings(
            url,
            blocks,
            listen=listen,
            api_key=api_key,
            save=save,
            max_body_bytes=parse_size(max_body_bytes),
        )
    )


def _text(path: Path | None) -> str:
    return "" if path is None else str(path)
