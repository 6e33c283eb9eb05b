"""Compiled files for tests, kept between runs and shared by all processes."""

from __future__ import annotations

import fcntl
import os
import subprocess
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import xxhash

# Read before any test gives the engine a cache of its own: what is compiled is named by its content.
_CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tierstore" / "executor"


class BuildError(RuntimeError):
    """Text that does not compile, or a kernel that breaks the executor's conventions."""


def cache_dir() -> Path:
    """Return the folder of compiled files. Anything in it may be deleted."""
    return _CACHE


def compile_once(
    result: str,
    sources: Sequence[Path],
    flags: Sequence[str],
    *,
    compiler: str,
    included: Sequence[Path] = (),
    places: Sequence[str] = (),
) -> Path:
    """Compile ``sources`` unless that was done before. Return the file, called ``result``.

    Its folder is named after the compiler, ``flags`` and the content of all files. ``places`` are flags that
    say where ``included`` are, which does not matter. Raises :class:`BuildError`.

    Example::

        compile_once("part.so", [folder / "part.c"], ["-O2", "-shared", "-fPIC"], compiler="cc")
    """
    key = _digest([compiler, _version(compiler), *flags], [*sources, *included])
    target = cache_dir() / key / result
    target.parent.mkdir(parents=True, exist_ok=True)
    with (target.parent / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # no other thread or process compiles the same
        if target.exists():
            return target
        with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
            made = Path(scratch) / result
            command = [compiler, *flags, *places, *map(str, sources), "-o", str(made)]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                raise BuildError(f"{' '.join(command)}\n{done.stderr[:6000]}")
            os.replace(made, target)
    return target


@cache
def _version(compiler: str) -> str:
    return subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True).stdout


def _digest(texts: Sequence[str], files: Sequence[Path]) -> str:
    digest = xxhash.xxh3_128("\0".join(texts).encode())
    for file in sorted(files):
        digest.update(f"\0{file.name}\0".encode() + file.read_bytes())
    return digest.hexdigest()
