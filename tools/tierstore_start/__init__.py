"""The entry points of the command-line programs and of the engines' plug-ins.

A program sets a SIGTERM handler before it imports its modules. The kernel ignores SIGTERM for process 1 of a
container until the process has a handler, and importing the modules takes seconds on a busy machine. So this
package imports only the standard library. The handler ends the process at once, which does not damage data on
disk. A server later replaces it by a handler that shuts down in order.

vLLM and SGLang load the plug-ins in each of their processes. Without the environment variable ``TIERSTORE``,
a plug-in imports nothing and does nothing.
"""

from __future__ import annotations

import os
import signal
import sys

_ENDED_BY_SIGTERM = 128 + int(signal.SIGTERM)


def _end_on_sigterm(*, server: bool) -> None:
    """Make SIGTERM end the process, with exit code 0 for a ``server``, which normally ends by SIGTERM,
    otherwise with 143."""
    code = 0 if server else _ENDED_BY_SIGTERM
    signal.signal(signal.SIGTERM, lambda *_: os._exit(code))


def tierstore() -> None:
    """Run ``tierstore``, with the proxy command ``llama``, which is in the package ``tierstore_proxy``."""
    _end_on_sigterm(server=sys.argv[1:2] in (["serve"], ["llama"]))
    from tierstore.cli import app, main
    from tierstore_proxy.llama import cli as llama

    app.command("llama")(llama.command)
    main()


def engine() -> None:
    """Run ``tierstore-engine``."""
    _end_on_sigterm(server=sys.argv[1:2] == ["serve"])
    from tierstore_engine.cli import main

    main()


def bench() -> None:
    """Run ``tierstore-bench``."""
    _end_on_sigterm(server=False)
    from tierstore_tools.cli import main

    main()


def proxy() -> None:
    """Run ``tierstore-proxy``."""
    _end_on_sigterm(server=True)
    from tierstore_proxy.cli import main

    main()


def vllm_plugin() -> None:
    """Make vLLM use the store that the variable ``TIERSTORE`` names."""
    _plug_in("vllm")


def sglang_plugin() -> None:
    """Make SGLang use the store that the variable ``TIERSTORE`` names."""
    _plug_in("sglang")


def _plug_in(engine: str) -> None:
    if os.environ.get("TIERSTORE", "") in ("", "off"):
        return
    try:
        from importlib import import_module

        import_module(f"tierstore_connectors.{engine}.plugin").install()
    except Exception as error:  # noqa: BLE001  # vLLM would not catch the error, and the engine must start
        sys.stderr.write(f"tierstore: runs without the cache: {error!r}\n")
