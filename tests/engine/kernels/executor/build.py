"""Compiling kernels for the executor, and keeping the results: a kernel takes one to two seconds."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path

import xxhash

from tests.compiled import BuildError, cache_dir, compile_once
from tests.engine.kernels.executor.toolchain import FLAGS, FUSED, RACES, TRAPS, compiler, cuda_include
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


def build_library(file: Path, names: Sequence[str], *, races: bool, fused: bool = False) -> Path:
    """A library with ``launch_0``, ``launch_1`` … for ``names``, which are instances of kernels in ``file``.

    Headers next to ``file`` hide the package's own of the same name. ``races``: for TSan. ``fused``: with
    fused multiply-adds, as on a GPU.
    """
    _check_conventions(file)
    stub = _STUB_HEAD.format(kernel=file.name)
    stub += "".join(_STUB_LAUNCH.format(index=index, name=name) for index, name in enumerate(names))
    flags = [*FLAGS, *(FUSED if fused else ()), *(RACES if races else TRAPS)]

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
    """Compile with the headers of ``folders`` and NVIDIA's."""
    headers = [*included, *COMPLETED.glob("*.*h"), *COMPLETED.glob("nv/*")]
    places = [*(f"-I{folder}" for folder in folders), f"-isystem{cuda_include()}"]
    return compile_once(result, sources, flags, compiler=compiler(), included=headers, places=places)


def _keep(name: str, content: bytes) -> Path:
    target = cache_dir() / xxhash.xxh3_128_hexdigest(content) / name
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=target.parent, delete=False) as scratch:
            scratch.write(content)
        os.replace(scratch.name, target)
    return target
