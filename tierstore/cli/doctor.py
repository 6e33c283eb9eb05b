"""``tierstore doctor``: check whether this machine is fit for a store, and say what to change."""

from __future__ import annotations

from functools import partial
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tierstore.cli import show
from tierstore.cli.operator import Connect
from tierstore.errors import UsageError
from tierstore.units import parse_size

if TYPE_CHECKING:
    from tierstore.cli.checks import Check

_COMMANDS = {
    "kv_transfer_config": "vllm serve MODEL --kv-transfer-config",
    "extra_config": "python -m sglang.launch_server --model-path MODEL --page-size 64 "
    "--enable-hierarchical-cache --hicache-storage-backend dynamic --hicache-storage-backend-extra-config",
}


def command(
    directory: Annotated[
        Path | None,
        typer.Argument(
            metavar="[DIR]", help="Directory of the store; it need not exist yet", show_default=False
        ),
    ] = None,
    host_bytes: Annotated[
        str, typer.Option(metavar="SIZE", help="Host memory that a store or daemon would take")
    ] = "8GiB",
    vllm: Annotated[
        bool, typer.Option("--vllm", help="Also check vLLM, its connector and the daemon")
    ] = False,
    sglang: Annotated[
        bool, typer.Option("--sglang", help="Also check SGLang, its storage backend and the daemon")
    ] = False,
    transformers: Annotated[
        bool, typer.Option("--transformers", help="Also check transformers and its cache over a store")
    ] = False,
    llamacpp: Annotated[
        bool, typer.Option("--llamacpp", help="Also check llama-server, its proxy and the daemon")
    ] = False,
    cluster: Annotated[
        str | None,
        typer.Option(
            metavar="URL", help="Also check the shared store at mooncake://… or s3://…", show_default=False
        ),
    ] = None,
    connect: Connect = None,
    kv_transfer_config: Annotated[
        str | None,
        typer.Option(metavar="JSON", help="vLLM's --kv-transfer-config to check", show_default=False),
    ] = None,
    extra_config: Annotated[
        str | None,
        typer.Option(
            metavar="JSON",
            help="SGLang's --hicache-storage-backend-extra-config to check",
            show_default=False,
        ),
    ] = None,
    llama_server: Annotated[
        str | None,
        typer.Option(
            metavar="URL", help="llama-server to check [default: http://127.0.0.1:8080]", show_default=False
        ),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Write one JSON document")] = False,
) -> None:
    """Check this machine, and say what to change.

    The checks cover Python and its packages, limits, the GPU, memory, and what the options add. Each line is
    ok, warn (works, but could be better) or fail (will not work). The exit code is 1 if a check fails.
    """
    from tierstore.cli.checks import Status, all_checks
    from tierstore.cli.checks import cluster as cluster_checks
    from tierstore.cli.checks import llamacpp as llamacpp_checks
    from tierstore.cli.checks import sglang as sglang_checks
    from tierstore.cli.checks import transformers as transformers_checks
    from tierstore.cli.checks import vllm as vllm_checks

    if connect is not None and not (vllm or sglang or transformers or llamacpp):
        raise UsageError("--connect needs --vllm, --sglang, --transformers or --llamacpp")
    if llama_server is not None and not llamacpp:
        raise UsageError("--llama-server needs --llamacpp")
    if kv_transfer_config is not None and not vllm:
        raise UsageError("--kv-transfer-config needs --vllm")
    if extra_config is not None and not sglang:
        raise UsageError("--extra-config needs --sglang")

    found = all_checks(directory, parse_size(host_bytes))
    engines = (
        (vllm, "looking at vLLM", partial(vllm_checks.checks, connect, kv_transfer_config)),
        (sglang, "looking at SGLang", partial(sglang_checks.checks, connect, extra_config)),
        (transformers, "trying transformers", partial(transformers_checks.checks, connect)),
        (llamacpp, "looking at llama-server", partial(llamacpp_checks.checks, connect, llama_server)),
    )
    for asked, doing, checks in engines:
        if asked:
            with show.waiting(doing):
                found += checks()
    if cluster is not None:
        found += cluster_checks.checks(cluster)
    proposed = {}
    if vllm:
        proposed["kv_transfer_config"] = vllm_checks.proposed(connect)
    if sglang:
        proposed["extra_config"] = sglang_checks.proposed(connect)
    failed = any(check.status is Status.FAIL for check in found)
    if json:
        show.write_json({"failed": failed, "checks": [_to_json(check) for check in found], **proposed})
    else:
        _print(found)
        for name, config in proposed.items():  # on a line of its own, so that it can be copied
            show.line("")
            show.line(f"{_COMMANDS[name]} '{dumps(config)}'")
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
