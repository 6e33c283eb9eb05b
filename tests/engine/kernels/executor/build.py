"""Compiling kernels for the executor, and keeping the results: a kernel takes one to two seconds."""

from __future__ import annotations

import fcntl
import os
import re
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import xxhash

from tests.engine.kernels.executor.toolchain import (
    FLAGS,
    FUSED,
    TRAPS,
    cache_dir,
    compiler,
    compiler_version,
    cuda_include,
)
from tierstore_engine.kernels import KERNEL_DIR

COMPLETED = Path(__file__).parent

_STUB_HEAD = """
#include "executor.h"
alignas(1024) unsigned char smem[machine::MAX_SHARED_BYTES];
#include <{kernel}>
"""
_STUB_LAUNCH = """
extern "C" int launch_{index}(const unsigned* g, const unsigned* t, unsigned bytes, unsigned long long seed,
                              void** arguments, int count, char* message, size_t message_bytes) {{
  machine::Launch launch{{{{g[0], g[1], g[2]}}, {{t[0], t[1], t[2]}}, bytes, seed, smem}};
  return machine::launch(&::{name}, launch, arguments, count, message, message_bytes);
}}
"""


class BuildError(RuntimeError):
    """A kernel that g++ does not compile, or that breaks the executor's conventions."""


def build_library(file: Path, names: Sequence[str], *, races: bool, fused: bool = False) -> Path:
    """A library with ``launch_0``, ``launch_1`` … for ``names``, which are instances of kernels in ``file``.

    Headers next to ``file`` hide the package's own of the same name. ``races``: for TSan. ``fused``: with
    fused multiply-adds, as on a GPU.
    """
    _check_conventions(file)
    stub = _STUB_HEAD.format(kernel=file.name)
    stub += "".join(_STUB_LAUNCH.format(index=index, name=name) for index, name in enumerate(names))
    flags = [*FLAGS, *(FUSED if fused else ()), *(("-fsanitize=thread",) if races else TRAPS)]

    # Without sanitizers in either case: TSan must not see fibers being switched.
    machine_flags = [*FLAGS, *(["-DEXECUTOR_TSAN"] if races else [])]
    machine = _compile("machine.o", [COMPLETED / "machine.cc"], [*machine_flags, "-c"])
    # Parsing NVIDIA's headers takes as long as compiling a kernel.
    parsed = _compile("executor.h.gch", [COMPLETED / "executor.h"], [*flags, "-x", "c++-header"])
    source = _keep("kernel.cc", stub.encode())
    return _compile(
        "kernel.so",
        [source, machine],
        [*flags, "-shared"],
        folders=[parsed.parent, COMPLETED, file.parent, KERNEL_DIR],
        included=[file, *file.parent.glob("*.cuh"), *KERNEL_DIR.glob("*.cuh")],
    )


def build_plain(file: Path) -> Path:
    """A library of ``file``, which is no kernel but includes NVIDIA's headers."""
    return _compile("library.so", [file], [*FLAGS, "-shared"])


def _check_conventions(file: Path) -> None:
    code = re.sub(r"//.*", "", file.read_text())
    if re.search(r"\basm\b", code):
        raise BuildError(f"{file.name}: inline PTX belongs in ptx.cuh")
    # A static __shared__ array would silently become a local variable of each thread.
    for line in re.findall(r".*__shared__.*", code):
        if line.strip() != "extern __shared__ __align__(16) unsigned char smem[];":
            raise BuildError(f"{file.name}: dynamic shared memory called smem only, not {line.strip()!r}")


def _compile(
    result: str,
    sources: Sequence[Path],
    flags: Sequence[str],
    *,
    folders: Sequence[Path] = (COMPLETED,),
    included: Sequence[Path] = (),
) -> Path:
    """The file ``result``, in a folder named after the content of all that goes into it, wherever that
    was."""
    key = _digest(
        [compiler(), compiler_version(), *flags],
        [*sources, *included, *COMPLETED.glob("*.*h"), *COMPLETED.glob("nv/*")],
    )
    target = cache_dir() / key / result
    target.parent.mkdir(parents=True, exist_ok=True)
    with _alone(target.parent):
        if target.exists():
            return target
        include = [*(f"-I{folder}" for folder in folders), f"-isystem{cuda_include()}"]
        with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
            made = Path(scratch) / result
            command = [compiler(), *flags, *include, *map(str, sources), "-o", str(made)]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                raise BuildError(f"{' '.join(command)}\n{done.stderr[:6000]}")
            os.replace(made, target)
    return target


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Nobody else, in this process or another one, compiles into ``folder`` meanwhile."""
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _keep(name: str, content: bytes) -> Path:
    target = cache_dir() / xxhash.xxh3_128_hexdigest(content) / name
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=target.parent, delete=False) as scratch:
            scratch.write(content)
        os.replace(scratch.name, target)
    return target


def _digest(texts: Sequence[str], files: Sequence[Path]) -> str:
    digest = xxhash.xxh3_128("\0".join(texts).encode())
    for file in sorted(files):
        digest.update(f"\0{file.name}\0".encode() + file.read_bytes())
    return digest.hexdigest()
