"""A disk cache of compiled kernels, because compiling a model's kernels takes seconds each time.

A cubin's file name has a digest of everything that went into it (the text of all kernel files, the instance,
the architecture, NVRTC's version), and a digest of its content. A cached file is therefore never out of date,
no upgrade has to clear the cache, and a damaged file is detected and compiled again. Files are renamed into
place, so any number of processes may share the folder. If the cache is not writable, kernels are compiled
each time.
"""

from __future__ import annotations

import logging
import os
import re
import tempfile
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import xxhash

from tierstore_engine.errors import KernelError
from tierstore_engine.kernels import KERNEL_DIR
from tierstore_engine.kernels.catalog import Instance
from tierstore_engine.kernels.nvrtc import Nvrtc
from tierstore_engine.kernels.toolkit import find_toolkit

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Cubin:
    """A kernel for one architecture. ``symbol`` is the kernel's name in the image."""

    image: bytes
    symbol: str


class CubinCache:
    """The kernels of this package, compiled on demand and kept in ``folder`` (default: the user's cache).

    ``newest`` is the major CUDA version of the driver that will load them, if known. ``sources`` is the
    folder of the ``.cu`` files, which include this package's headers.
    """

    def __init__(
        self, folder: Path | None = None, *, newest: int | None = None, sources: Path = KERNEL_DIR
    ) -> None:
        self._sources = sources
        self._newest = newest
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        self._folder = folder or Path(base) / "tierstore" / "cubins"
        self.compiled = 0
        """Number of kernels compiled so far."""

    def get(self, instance: Instance, arch: str) -> Cubin:
        """Return a kernel. Raises :class:`KernelError` if the kernel is not cached and cannot be compiled."""
        stem = f"{_slug(instance.name)}-{arch}-{self._key(instance, arch)}"
        image = self._read(stem)
        if image is None:
            source = (self._sources / instance.file).read_text()
            image = self._nvrtc.compile(source, instance.name, arch=arch, includes=[str(KERNEL_DIR)]).cubin
            self.compiled += 1
            self._write(stem, image)
        return Cubin(image, _symbol(image))

    @cached_property
    def _nvrtc(self) -> Nvrtc:
        return Nvrtc(find_toolkit(newest=self._newest))

    def _key(self, instance: Instance, arch: str) -> str:
        parts = [source_digest(self._sources), instance.file, instance.name, arch, repr(self._nvrtc.version)]
        return xxhash.xxh3_128_hexdigest("\0".join(parts).encode())

    def _read(self, stem: str) -> bytes | None:
        for file in self._folder.glob(f"{stem}-*.cubin"):
            try:
                image = file.read_bytes()
            except OSError as error:
                log.warning("kernel cache: cannot read %s (%s), compiling again", file, error)
                continue
            if file.name == _file_name(stem, image):
                return image
            log.warning("kernel cache: %s is damaged, compiling again", file)
        return None

    def _write(self, stem: str, image: bytes) -> None:
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            for damaged in self._folder.glob(f"{stem}-*.cubin"):
                damaged.unlink(missing_ok=True)
            with tempfile.NamedTemporaryFile(dir=self._folder, delete=False) as scratch:
                scratch.write(image)
            os.replace(scratch.name, self._folder / _file_name(stem, image))
        except OSError as error:
            log.warning("kernel cache: cannot write to %s (%s)", self._folder, error)


def source_digest(sources: Path = KERNEL_DIR) -> str:
    """Return a hex digest of all kernel files. Any change of their text changes the digest."""
    digest = xxhash.xxh3_128()
    for file in sorted((*sources.glob("*.cu"), *KERNEL_DIR.glob("*.cuh"))):
        digest.update(f"{file.name}\0".encode() + file.read_bytes() + b"\0")
    return digest.hexdigest()


def _file_name(stem: str, image: bytes) -> str:
    return f"{stem}-{xxhash.xxh3_128_hexdigest(image)}.cubin"


def _slug(name: str) -> str:
    return re.sub(r"\W+", "_", name).strip("_")


def _symbol(image: bytes) -> str:
    """Return the name of the one kernel in a cubin. A cubin is an ELF file with the code in the section
    ``.text.<name>``."""
    names = set(re.findall(rb"\0\.text\.(\w+)\0", image))
    if len(names) != 1:
        raise KernelError(f"a compiled kernel should have one entry, this one has {sorted(names)}")
    return bytes(names.pop()).decode()
