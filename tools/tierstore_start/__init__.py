"""The entry points of the command-line programs and of the engines' plug-ins.

The programs set a SIGTERM handler before they import anything else. The kernel ignores SIGTERM for process 1
of a container until the process has a handler, and importing a program's modules takes seconds on a busy
machine. So this package imports only the standard library, and sets a handler first. Until a server installs
its own handler, which shuts down in order, the process exits at once. The data on disk withstands that.

vLLM and SGLang load the plug-ins in each of their processes. Without the variable ``TIERSTORE`` a plug-in
imports nothing and does nothing.
"""

from __future__ import annotations

import os
import signal
import sys

_ENDED_BY_SIGTERM = 128 + int(signal.SIGTERM)


def _end_on_sigterm(*, server: bool) -> None:
    """Exit at SIGTERM: with 0 if the program is a ``server``, which normally ends this way, otherwise with
    143."""
    code = 0 if server else _ENDED_BY_SIGTERM
    signal.signal(signal.SIGTERM, lambda *_: os._exit(code))


def tierstore() -> None:
    """Run ``tierstore``. Its command ``llama`` is a proxy, which the store's own package does not know."""
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
    """Give vLLM's engines the store that ``TIERSTORE`` names."""
    _plug_in("vllm")


def sglang_plugin() -> None:
    """Give SGLang's engines the store that ``TIERSTORE`` names."""
    _plug_in("sglang")


def _plug_in(engine: str) -> None:
    if os.environ.get("TIERSTORE", "") in ("", "off"):
        return
    try:
        from importlib import import_module

        import_module(f"tierstore_connectors.{engine}.plugin").install()
    except Exception as error:  # noqa: BLE001  # the engine must start; vLLM does not catch the error
        sys.stderr.write(f"tierstore: runs without the cache: {error!r}\n")
