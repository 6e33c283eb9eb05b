"""``tierstore doctor --llamacpp``: checks a running llama-server, the proxy's packages, and the daemon.

A separate process checks llama-server with the code of the connector, because this package must not import
the connectors.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterator
from urllib.parse import urlsplit

from tierstore.cli.checks.check import Check, fail, installed, ok, warn
from tierstore.cli.checks.engine import checks as daemon_checks
from tierstore.daemon.settings import default_listen
from tierstore.errors import UsageError
from tierstore.extras import install

DEFAULT_URL = "http://127.0.0.1:8080"
TRIED_BINDING = "0.3.36"
_PACKAGES = ("httpx", "starlette", "uvicorn")
_LOOK_S = 30.0

# If this code fails, its last line on stderr is the reason.
_PROBE = """
import json, sys
from tierstore.errors import UsageError
from tierstore_connectors.llamacpp.server import LlamaProcess
try:
    process = LlamaProcess.listening_at(sys.argv[1], int(sys.argv[2]))
    process.require_supported()
    print(json.dumps({"pid": process.pid, "slots": str(process.slot_folder)}))
except UsageError as error:
    sys.exit(str(error))
"""


def checks(url: str | None, server: str | None) -> Iterator[Check]:
    """Check llama-server at ``server`` (None: its default address), the packages, and the daemon at ``url``
    (None: this user's daemon). Raise :class:`UsageError` for a malformed address."""
    parts = urlsplit(server or DEFAULT_URL)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise UsageError(f"--llama-server must be http://HOST:PORT, got {server!r}")
    yield _packages()
    yield _binding()
    yield _server(parts.hostname, parts.port or 80)
    yield from daemon_checks(url or default_listen())


def _packages() -> Check:
    missing = [name for name in _PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        return fail("tierstore llama", f"without {', '.join(missing)}", f"the proxy needs {install('proxy')}")
    return ok("tierstore llama", "its packages are installed")


def _binding() -> Check:
    name = "llama-cpp-python"
    version = installed("llama_cpp_python")
    if version is None:
        return ok(name, "not installed here; only TierStoreLlamaCache needs it")
    if version != TRIED_BINDING:
        return warn(name, version, f"tested with {TRIED_BINDING}: test it first")
    return ok(name, version)


def _server(host: str, port: int) -> Check:
    name = "llama-server"
    try:
        done = subprocess.run(
            [sys.executable, "-c", _PROBE, host, str(port)], capture_output=True, text=True, timeout=_LOOK_S
        )
    except subprocess.TimeoutExpired:
        return fail(name, f"no result in {_LOOK_S:.0f} s", "check for hanging processes")
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no reason printed"])[-1]
        advice = "start llama-server with --slot-save-path, or give its address with --llama-server"
        return fail(name, reason[:300], advice)
    found = json.loads(done.stdout)
    return ok(name, f"process {found['pid']} saves slots in {found['slots']}")
