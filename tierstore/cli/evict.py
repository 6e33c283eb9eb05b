"""``tierstore evict``: evict pages from a tier of a daemon."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from tierstore.cli import show
from tierstore.cli.operator import ConnectOptions
from tierstore.command_line import with_options
from tierstore.errors import UsageError

_TIERS = ("host", "disk")
_MOST_PAGES = 1 << 40  # more than any tier has
_PATIENCE_S = 600.0  # shortly after its start, the daemon first reads the whole index of its disk


@with_options
def command(
    tier: Annotated[str, typer.Argument(metavar="TIER", help=f"{' or '.join(_TIERS)}", show_default=False)],
    pages: Annotated[
        int | None,
        typer.Option(
            "--pages",
            min=1,
            metavar="N",
            help="Evict at most N pages (default: all evictable)",
            show_default=False,
        ),
    ] = None,
    *,
    where: ConnectOptions,
) -> None:
    """Evict pages from a tier of a daemon.

    Pages leave in the order of the daemon's policy. Leased and pinned pages stay. A page that leaves the host
    tier can still be loaded from disk if the disk has it.
    """
    from rich.console import Console

    from tierstore.wire import messages

    if tier not in _TIERS:
        raise UsageError(f"a daemon has no tier {tier!r} (known: {', '.join(_TIERS)})")
    with where.operator() as operator, Console(file=sys.stderr).status("evicting"):
        wanted = messages.Evict(0, tier, -1 if pages is None else min(pages, _MOST_PAGES))
        evicted = operator.ask(wanted, messages.Evicted, wait_s=_PATIENCE_S)
    show.line(f"{evicted.pages:,} pages have left {tier}")
