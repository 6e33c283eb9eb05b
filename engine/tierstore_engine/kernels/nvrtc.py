"""NVRTC, NVIDIA's run-time compiler, called directly. It needs no driver, no GPU and no nvcc.

Only the necessary part of its C interface is used, through ctypes. Compiling therefore needs one library
only, and neither CuPy nor cuda-python.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from tierstore_engine.errors import KernelError
from tierstore_engine.kernels.toolkit import Toolkit


@dataclass(frozen=True, slots=True)
class Compiled:
    """A cubin with the requested kernel. ``lowered_name`` is its symbol. The counts come from the report of
    ptxas: registers per thread, bytes spilled to local memory, and bytes kept there."""

    cubin: bytes
    lowered_name: str
    registers: int
    spill_bytes: int
    stack_bytes: int


class Nvrtc:
    """The compiler of ``toolkit``. Raises :class:`KernelError` if the library cannot be loaded."""

    def __init__(self, toolkit: Toolkit) -> None:
        self._toolkit = toolkit
        try:
            # NVRTC opens its companion library by name only, which works if the library is already loaded.
            for companion in sorted(toolkit.library.parent.glob("libnvrtc-builtins.so*")):
                ctypes.CDLL(str(companion))
            self._library = ctypes.CDLL(str(toolkit.library))
        except OSError as error:
            raise KernelError(f"cannot load NVRTC at {toolkit.library}: {error}") from error

    @cached_property
    def version(self) -> tuple[int, int]:
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._call("nvrtcVersion", ctypes.byref(major), ctypes.byref(minor))
        return major.value, minor.value

    def compile(self, source: str, name: str, *, arch: str, includes: Sequence[str]) -> Compiled:
        """Compile ``source`` for ``arch`` (such as ``sm_90``) and keep the kernel ``name``, a C++ expression
        such as ``prefill<__half, 128, 64, 32, 4, 2>``. Raises :class:`KernelError` with the compiler's
        log."""
        folders = [*includes, str(self._toolkit.include)]
        options = [
            f"-arch={arch}",
            "-std=c++17",
            "--ptxas-options=-v",
            *(f"-I{folder}" for folder in folders),
        ]
        program = ctypes.c_void_p()
        self._call("nvrtcCreateProgram", ctypes.byref(program), source.encode(), b"kernel.cu", 0, None, None)
        try:
            self._call("nvrtcAddNameExpression", program, name.encode())
            array = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
            status = self._library.nvrtcCompileProgram(program, len(options), array)
            log = self._buffer("nvrtcGetProgramLogSize", "nvrtcGetProgramLog", program).rstrip(b"\0").decode()
            if status:
                raise KernelError(
                    f"NVRTC cannot compile {name} for {arch} ({self._describe(status)}):\n{log}"
                )
            lowered = ctypes.c_char_p()
            self._call("nvrtcGetLoweredName", program, name.encode(), ctypes.byref(lowered))
            cubin = self._buffer("nvrtcGetCUBINSize", "nvrtcGetCUBIN", program)
            assert lowered.value is not None
            return Compiled(cubin, lowered.value.decode(), *_resources(log))
        finally:
            self._call("nvrtcDestroyProgram", ctypes.byref(program))

    def _buffer(self, size_function: str, function: str, program: ctypes.c_void_p) -> bytes:
        size = ctypes.c_size_t()
        self._call(size_function, program, ctypes.byref(size))
        buffer = ctypes.create_string_buffer(size.value)
        self._call(function, program, buffer)
        return buffer.raw

    def _call(self, function: str, *arguments: object) -> None:
        entry: Callable[..., int] = self._library[function]
        status = entry(*arguments)
        if status:
            raise KernelError(f"{function} failed: {self._describe(status)}")

    def _describe(self, status: int) -> str:
        describe = self._library["nvrtcGetErrorString"]
        describe.restype = ctypes.c_char_p
        return bytes(describe(status)).decode()


def _resources(log: str) -> tuple[int, int, int]:
    """Return registers, spilled bytes and stack bytes from ptxas' verbose log."""
    registers = re.search(r"Used (\d+) registers", log)
    memory = re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", log)
    if registers is None or memory is None:
        raise KernelError(f"NVRTC's log has no register count:\n{log}")
    return int(registers[1]), int(memory[2]) + int(memory[3]), int(memory[1])
