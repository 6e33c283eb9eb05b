"""``tierstore disk-key``: make and replace the master key of an encrypted disk tier."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tierstore.cli import show

app = typer.Typer(help="Make and replace the key of an encrypted disk tier.", no_args_is_help=True)

_KEY = "FILE|command:CMD"


@app.command()
def new(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="File for the new key", show_default=False)],
) -> None:
    """Make a master key for --disk-key in FILE.

    Only you can read FILE. Keep a copy of the key elsewhere. Without the key, no page on disk can be read.
    """
    from tierstore.tiers.disk.keyring import make_master_key

    make_master_key(file)
    show.line(f"give {file} as --disk-key, and keep a copy elsewhere")


@app.command()
def rotate(
    old: Annotated[
        str,
        typer.Argument(
            metavar=_KEY, help="The current master key, as given to --disk-key", show_default=False
        ),
    ],
    newer: Annotated[
        str,
        typer.Argument(
            metavar=_KEY, help="The new master key, from `tierstore disk-key new`", show_default=False
        ),
    ],
    keyring: Annotated[
        Path | None,
        typer.Option(
            "--keyring",
            metavar="FILE",
            help="The keyring (default: the current key's FILE.ring)",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Replace the master key. No page changes.

    The data keys stay the same, in a keyring that the new key opens.

    Stop the store first. Afterwards, start it with the new key, and with --disk-keyring if the keyring is not
    beside the new key. Finally, destroy the old key and all copies of the old keyring."""
    from tierstore.errors import UsageError
    from tierstore.tiers.disk.keyring import Keyring, keyring_path, read_master_key

    path = keyring_path(old, keyring)
    if not path.is_file():
        raise UsageError(f"there is no keyring {path}: give --keyring")
    before, after = read_master_key(old), read_master_key(newer)
    ring = Keyring.open(path, before)
    if ring.locked:
        ring.close()
        raise UsageError(f"{old} does not open {path}: give the key that made it")
    ring.rotate(after)
    show.line(f"{newer} opens the keyring {path} now: give --disk-key {newer} --disk-keyring {path}")
