"""``tierstore doctor``: is this machine fit for a store, and what should be changed?"""

from __future__ import annotations

from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tierstore.cli import show
from tierstore.cli.operator import Connect
from tierstore.errors import UsageError

if TYPE_CHECKING:
    from tierstore.cli.checks import Check


def command(
    directory: Annotated[
        Path | None,
        typer.Argument(metavar="[DIR]", help="Where a store is, or will be", show_default=False),
    ] = None,
    vllm: Annotated[
        bool, typer.Option("--vllm", help="Check vLLM, its connector and the daemon as well")
    ] = False,
    connect: Connect = None,
    kv_transfer_config: Annotated[
        str | None,
        typer.Option(metavar="JSON", help="What you start vLLM with, to be checked", show_default=False),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Write one JSON document")] = False,
) -> None:
    """Check this machine, and say what to change.

    Python and packages, memory, limits, the GPU if there is one; with DIR its file system too; with --vllm
    also vLLM in this environment, and the daemon it will ask. Each line is ok, warn (it works, and could be
    better) or fail (it will not work). Exit code 1 if one of them is fail.
    """
    from tierstore.cli.checks import Status, all_checks, vllm_checks, vllm_flags

    found = all_checks(directory)
    if vllm:
        with show.waiting("looking at vLLM"):
            found += vllm_checks(connect, kv_transfer_config)
    elif connect is not None or kv_transfer_config is not None:
        raise UsageError("--connect and --kv-transfer-config go with --vllm")
    failed = any(check.status is Status.FAIL for check in found)
    if json:
        document: dict[str, object] = {"failed": failed, "checks": [_to_json(check) for check in found]}
        if vllm:
            document["kv_transfer_config"] = vllm_flags(connect)
        show.write_json(document)
    else:
        _print(found)
        if vllm:  # on a line of its own, to be copied
            show.line("")
            show.line(f"vllm serve MODEL --kv-transfer-config '{dumps(vllm_flags(connect))}'")
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
