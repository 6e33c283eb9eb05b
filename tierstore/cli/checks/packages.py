"""Checks of Python, the required packages, and the compiled part of tierstore."""

from __future__ import annotations

import platform
import re
import sys
from collections.abc import Iterator
from importlib import metadata

from tierstore import native
from tierstore.cli.checks.check import Check, fail, installed, numbers, ok, warn
from tierstore.extras import install

_LEAST_PYTHON = (3, 10)
_REQUIREMENT = re.compile(r"([A-Za-z0-9_.-]+)\s*(?:>=\s*([0-9.]+))?")


def checks() -> Iterator[Check]:
    version = platform.python_version()
    if sys.version_info < _LEAST_PYTHON:  # pip can be forced to install on an older Python
        yield fail("python", version, "install Python 3.10 or newer")
    else:
        yield ok("python", version)
    for line in metadata.requires("tierstore") or ():
        if ";" not in line:  # a requirement of an extra has a marker after ";"
            yield _package(line)
    yield _compiled_part()
    yield _torch()


def _package(requirement: str) -> Check:
    match = _REQUIREMENT.match(requirement)
    assert match is not None, f"no requirement: {requirement}"
    name, least = match.group(1), match.group(2) or "0"
    found = installed(name)
    if found is None:
        return fail(name, "not installed", f"pip install '{name}>={least}'")
    if numbers(found) < numbers(least):
        return fail(name, f"{found}, below {least}", f"pip install -U '{name}>={least}'")
    return ok(name, found)


def _compiled_part() -> Check:
    parts = {"pages.c": native.LIBRARY, "codec.c": native.CODEC, "decode.c": native.DECODE}
    missing = [name for name, part in parts.items() if part is None]
    if missing:
        advice = (
            "copies, codecs and the bundled engine are slower without this part. Install a C compiler (gcc), "
            "then: pip install --force-reinstall "
            "--no-deps tierstore (in a checkout: pip install --force-reinstall --no-deps -e .)"
        )
        return warn("compiled part", f"not built: {', '.join(missing)}", advice)
    return ok("compiled part", "built")


def _torch() -> Check:
    found = installed("torch")
    return ok("torch", found or f"not installed. Only the bundled engine needs it: {install('engine')}")
