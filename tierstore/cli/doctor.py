"""``tierstore doctor``: is this machine fit for a store, and what should be changed?"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tierstore.cli import show

if TYPE_CHECKING:
    from tierstore.cli.checks import Check


def command(
    directory: Annotated[
        Path | None,
        typer.Argument(metavar="[DIR]", help="Where a store is, or will be", show_default=False),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Write one JSON document")] = False,
) -> None:
    """Check this machine, and say what to change.

    Python and packages, memory, limits, the GPU if there is one; with DIR its file system too. Each line is
    ok, warn (it works, and could be better) or fail (it will not work). Exit code 1 if one of them is fail.
    """
    from tierstore.cli.checks import Status, all_checks

    found = all_checks(directory)
    failed = any(check.status is Status.FAIL for check in found)
    if json:
        show.write_json({"failed": failed, "checks": [_to_json(check) for check in found]})
    else:
        _print(found)
    raise typer.Exit(1 if failed else 0)


def _to_json(check: Check) -> dict[str, object]:
    return {
        "name": check.name,
        "status": check.status.value,
        "found": check.found,
        "advice": check.advice or None,
        **check.figures,
    }


def _print(found: list[Check]) -> None:
    show.table(
        ("", "what", "found", "what to change"),
        [(check.status.value, check.name, check.found, check.advice) for check in found],
        left=4,
    )
