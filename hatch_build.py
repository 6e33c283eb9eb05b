"""Builds the optional compiled parts (tierstore/native/*.c) into the wheel or the editable installation.

Without a C compiler, or if it fails, tierstore is installed without them. It works the same, but slower, and
``tierstore doctor`` reports that.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

_FLAGS = ["-O3", "-std=gnu11", "-shared", "-fPIC", "-pthread"]
_LIBRARIES = ["-lm"]


class NativeHook(BuildHookInterface):
    """Compiles the parts before the wheel or the editable installation is put together."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        folder = Path(self.root, "tierstore", "native")
        for name in ("pages", "codec", "decode"):
            library = folder / f"_{name}.so"
            problem = _compile(folder / f"{name}.c", library)
            if problem is not None:
                library.unlink(missing_ok=True)  # an older one would not match the source
                self.app.display_warning(f"tierstore is built without its compiled part {name}.c: {problem}")
                continue
            build_data["artifacts"].append(f"/tierstore/native/{library.name}")
        if not build_data["artifacts"]:
            return
        build_data["pure_python"] = False
        build_data["tag"] = "py3-none-" + sysconfig.get_platform().replace("-", "_").replace(".", "_")


def _compile(source: Path, library: Path) -> str | None:
    """Compile ``source``. Return the error, or None."""
    compiler = shlex.split(os.environ.get("CC", "cc"))
    built = library.with_suffix(f".{os.getpid()}")  # a process that uses the old file keeps it
    try:
        command = [*compiler, *_FLAGS, "-o", str(built), str(source), *_LIBRARIES]
        subprocess.run(command, check=True, capture_output=True, text=True)
        built.replace(library)
    except (OSError, subprocess.CalledProcessError) as error:
        built.unlink(missing_ok=True)
        return str(getattr(error, "stderr", None) or error)
    return None
