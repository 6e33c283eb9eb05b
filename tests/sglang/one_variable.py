"""What the plug-in does with SGLang's arguments: ``python -m tests.sglang.one_variable`` takes a JSON list of
cases, ``[[TIERSTORE, arguments], …]``, and prints the resolved arguments of each."""

from __future__ import annotations

import json
import os
import sys

RESULT = "RESULT "
SHOWN = [
    "page_size",
    "enable_hierarchical_cache",
    "hicache_mem_layout",
    "hicache_io_backend",
    "hicache_host_memory_mode",
    "hicache_storage_backend",
    "hicache_storage_backend_extra_config",
]


def main(cases: list[tuple[str, dict[str, object]]]) -> None:
    from sglang.srt.arg_groups.overrides import resolving_view
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import ServerArgs

    load_plugins()
    results = []
    for value, arguments in cases:
        os.environ["TIERSTORE"] = value
        made = ServerArgs(**arguments)
        made.resolve_once()
        made.resolve_once()
        view = resolving_view(made)
        results.append({name: getattr(view, name) for name in SHOWN})
    print(RESULT + json.dumps(results))  # noqa: T201


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
