"""Run all checks that need a GPU, and write one JSON document. Several calls may share the work.

``python -m tierstore_tools.gpu.check [--json FILE] [--budget-s SECONDS] [--only STEP,…] [--fresh]``, from the
root of the repository. ``make gpu-check`` runs it in an environment of its own, ``make gpu-check-here`` with
the current interpreter. Each step is a process with a time limit. A step that crashes or hangs does not end
the others. The document is written after every step, and a benchmark writes its rows one by one. Steps for
which the budget has no time left are ``not run``. The next call continues: steps that are ``ok`` in the
document are kept, failed steps come last.

The order of the steps: the hardware properties that the tests without a GPU assume (``golden``), the engine
on the device, the benchmarks, the kernels' tests, and compute-sanitizer.

At the end it prints for each line of ``lines.py`` whether it holds on this GPU. The exit code is 1 if a line
does not hold or a step failed.

Without a CUDA device each step and line is ``not measured``, and the exit code is 0. If there is a device
that cannot be used (torch does not see it, CuPy or NVRTC is missing), the check prints the reason and exits
with 1.

Only the standard library is imported before :func:`missing` has run. An interpreter that lacks packages
therefore prints one line with all of their names, and no traceback.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tierstore_tools.gpu import lines

NO_DEVICE = "no CUDA device"
DRIVER = Path("/proc/driver/nvidia/version")
# Module → package. The packages of the first dictionary are always needed, those of the second only with a
# device.
NEEDED = {"torch": "torch", "numpy": "numpy", "cupy": "cupy-cuda13x"}
NEEDED |= {"lmdb": "lmdb", "msgspec": "msgspec", "zmq": "pyzmq"}
NEEDED_ON_A_DEVICE = {
    "xxhash": "xxhash",
    "typer": "typer",
    "rich": "rich",
    "prometheus_client": "prometheus-client",
    "aiofiles": "aiofiles",
    "safetensors": "safetensors",
    "tokenizers": "tokenizers",
    "pytest": "pytest",
    "pytest_timeout": "pytest-timeout",
    "hypothesis": "hypothesis",
}
_TAIL = 4000  # kept characters of a step's output
_KERNEL_TESTS = "tests/engine/kernels"
# The left-out tests are slow and need no device: their result is the same on every machine.
_ON_THE_CPU_ONLY = ("test_compile.py", "test_executor.py", "test_planted_bugs.py", "test_races.py")
_TOOLKIT_BIN = "/usr/local/cuda/bin"  # the folder of CUDA's programs, which is often not on the path
_SANITIZER = "compute-sanitizer"


class UnusableDeviceError(Exception):
    """Raised if the machine has a CUDA device that cannot be used."""


def missing(needed: Mapping[str, str]) -> list[str]:
    """Return the packages of ``needed`` (module → package) that this interpreter lacks."""
    return [package for module, package in needed.items() if importlib.util.find_spec(module) is None]


def how_to_bring(packages: Sequence[str]) -> str:
    """Return one line that explains how to install ``packages``."""
    names = " ".join(packages)
    return (
        f"this interpreter lacks {', '.join(packages)}: pip install {names}. Without an index: "
        f"pip download --no-deps -d wheels {names} on another machine, then here pip install --no-index "
        "--no-deps --target site wheels/*.whl, with site on PYTHONPATH; see docs/cuda.md"
    )


@dataclass(frozen=True, slots=True)
class CheckStep:
    """A command. If ``result`` is set, the process writes a JSON file, and its last argument is the file's
    name."""

    name: str
    command: tuple[str, ...]
    limit_s: float
    result: bool = False
    needs: str | None = None  # a program; the step is skipped if it is not installed


def steps(python: str) -> list[CheckStep]:
    """Return all steps in their order."""

    def tests(name: str, *arguments: str, limit_s: float) -> CheckStep:
        # In the normal test suite a warning is an error. Here it is not, because this check is rarely run,
        # and a new warning of torch must not fail it.
        quiet = ("-q", "-p", "no:cacheprovider", "-W", "default")
        return CheckStep(name, (python, "-m", "pytest", *quiet, *arguments), limit_s)

    def bench(name: str, limit_s: float) -> CheckStep:
        return CheckStep(name, (python, "-m", "tierstore_tools.gpu.bench", name), limit_s, result=True)

    def sanitized(tool: str, limit_s: float) -> CheckStep:
        # Every tensor gets an allocation of its own: memcheck cannot see tensors in torch's cache.
        sanitizer = find_program(_SANITIZER) or _SANITIZER
        environment = ("env", "PYTORCH_NO_CUDA_MEMORY_CACHING=1")
        command = (*environment, sanitizer, "--tool", tool, "--error-exitcode", "9")
        # All kernels except the copy of pages.
        files = ("golden", "merge", "rope_write", "decode", "prefill", "latents", "states", "packed")
        where = [f"{_KERNEL_TESTS}/test_{name}.py" for name in files]
        plain = tests(f"sanitizer {tool}", "-k", "not any_", *where, limit_s=limit_s)
        return CheckStep(plain.name, (*command, *plain.command), limit_s, needs=_SANITIZER)

    longctx = ("-m", "tierstore_tools.cli", "longctx", "--model", "llama-3-8b", "--tokens", "100000")
    left_out = [f"--ignore={_KERNEL_TESTS}/{name}" for name in _ON_THE_CPU_ONLY]
    return [
        tests("golden", f"{_KERNEL_TESTS}/test_golden.py", limit_s=120),
        tests("engine", "tests/engine/test_on_gpu.py", limit_s=180),
        bench("decode", 120),
        bench("transfers", 120),
        bench("prefill", 120),
        bench("kinds", 120),
        bench("weights", 120),
        bench("push-down", 240),
        CheckStep(
            "longctx",
            (python, *longctx, "--device", "cuda", "--store", tempfile.gettempdir(), "--json"),
            300,
            result=True,
        ),
        tests("kernels", _KERNEL_TESTS, "tests/engine/test_cuda_attention.py", *left_out, limit_s=400),
        sanitized("memcheck", 240),
        sanitized("racecheck", 300),
        sanitized("synccheck", 180),
    ]


def find_program(name: str) -> str | None:
    """Return the path of a program, also from CUDA's toolkit; None if it is not installed."""
    return shutil.which(name) or shutil.which(name, path=_TOOLKIT_BIN)


def describe() -> dict[str, Any] | None:
    """Return the device, its driver and versions; None without a device. Raises :class:`UnusableDeviceError`
    if it cannot be used."""
    import torch

    if not torch.cuda.is_available():
        if DRIVER.exists():
            built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"
            raise UnusableDeviceError(
                f"NVIDIA's driver {_driver_version()} is loaded, but torch {torch.__version__}, {built}, "
                "sees no device: install a torch for this driver"
            )
        return None
    if lacking := missing(NEEDED_ON_A_DEVICE):
        raise UnusableDeviceError(how_to_bring(lacking))
    from tierstore.errors import TierStoreError

    try:
        return _describe_device()
    except TierStoreError as error:
        raise UnusableDeviceError(str(error)) from error


def _describe_device() -> dict[str, Any]:
    import torch

    from tierstore_engine.kernels.cupy_launcher import import_cupy
    from tierstore_engine.kernels.nvrtc import Nvrtc
    from tierstore_engine.kernels.toolkit import find_toolkit
    from tierstore_tools import machine

    cupy = import_cupy()
    properties = torch.cuda.get_device_properties(0)
    driver = cupy.cuda.runtime.driverGetVersion()
    return {
        **machine.describe("cuda"),
        "gpu": properties.name,
        "gpu_memory_bytes": properties.total_memory,
        "multiprocessors": properties.multi_processor_count,
        "compute_capability": f"{properties.major}.{properties.minor}",
        "driver_cuda": f"{driver // 1000}.{driver % 1000 // 10}",
        "driver": _driver_version(),
        "torch_cuda": torch.version.cuda,
        "cupy": cupy.__version__,
        "nvrtc": ".".join(map(str, Nvrtc(find_toolkit(newest=driver // 1000)).version)),
    }


def run(
    wanted: Sequence[CheckStep],
    document: dict[str, Any],
    *,
    budget_s: float,
    write: Callable[[dict[str, Any]], None],
    clock: Callable[[], float] = time.monotonic,
) -> bool:
    """Run the steps that are not ``ok`` in ``document["steps"]``, earlier failures last, and store each
    outcome there. Return whether no step failed."""
    ends = clock() + budget_s
    before: dict[str, str] = {outcome["step"]: outcome["state"] for outcome in document.get("steps", ())}
    outcomes: list[dict[str, Any]] = document.setdefault("steps", [])
    todo = [step for step in wanted if before.get(step.name) != "ok"]
    for step in sorted(todo, key=lambda step: before.get(step.name, "").startswith("failed")):
        left = ends - clock()
        if step.needs is not None and find_program(step.needs) is None:
            outcome: dict[str, Any] = {"state": f"not run: {step.needs} is not installed"}
        elif left <= 0:
            outcome = {"state": "not run: the budget was used up"}
        else:
            outcome = _run_one(step, min(step.limit_s, left))
        outcomes[:] = [each for each in outcomes if each["step"] != step.name]
        outcomes.append({"step": step.name, **outcome})
        print(f"{step.name}: {outcome['state']}", flush=True)  # noqa: T201
        write(document)
    return not any(outcome["state"].startswith("failed") for outcome in outcomes)


def _run_one(step: CheckStep, limit_s: float) -> dict[str, Any]:
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="tierstore-gpu-") as folder:
        result, log = Path(folder) / "result.json", Path(folder) / "log"
        command = (*step.command, str(result)) if step.result else step.command
        environment = os.environ | {"TIERSTORE_KERNEL_DEVICE": "cuda"}
        with log.open("w") as output:
            process = subprocess.Popen(
                command, stdout=output, stderr=subprocess.STDOUT, env=environment, start_new_session=True
            )
            try:
                code = process.wait(limit_s)
                state = "ok" if code == 0 else f"failed: exit code {code}"
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, 9)
                process.wait()
                state = f"failed: not done after {limit_s:.0f} s"
        outcome: dict[str, Any] = {"state": state, "seconds": round(time.monotonic() - began, 1)}
        if result.exists():
            outcome["result"] = _read(result)
        if state != "ok" or not step.result:
            outcome["output"] = log.read_text(errors="replace")[-_TAIL:]
        return outcome


def _read(result: Path) -> Any:
    """Return the parsed file; None if its writer was killed before the file was complete."""
    try:
        return json.loads(result.read_text())
    except ValueError:
        return None


def _driver_version() -> str:
    try:
        line = DRIVER.read_text().splitlines()[0]
    except OSError:
        return "unknown"
    return next((word for word in line.split() if word.count(".") == 2), line)


def continued(path: Path, machine: dict[str, Any]) -> dict[str, Any]:
    """Return the document of an earlier call on the same device, or a new one. The rows of an interrupted
    step are kept until the step runs again."""
    began = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    new: dict[str, Any] = {"date": began, "machine": machine}
    try:
        earlier = json.loads(path.read_text())
    except (OSError, ValueError):
        return new
    same = (
        isinstance(earlier, dict)
        and isinstance(earlier.get("machine"), dict)
        and all(
            earlier["machine"].get(name) == machine.get(name)
            for name in ("gpu", "driver", "tierstore", "torch")
        )
    )
    return new | {"date": earlier["date"], "steps": earlier.get("steps", [])} if same else new


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="gpu-check", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--json", type=Path, default=Path("gpu-check.json"), help="the document to write or continue"
    )
    parser.add_argument("--budget-s", type=float, default=560.0, help="seconds that this call may take")
    parser.add_argument("--only", default="", help="steps, comma-separated")
    parser.add_argument("--fresh", action="store_true", help="ignore the earlier document")
    given = parser.parse_args(arguments)
    wanted = steps(sys.executable)
    if given.only:
        names = given.only.split(",")
        unknown = set(names) - {step.name for step in wanted}
        if unknown:
            known = ", ".join(step.name for step in wanted)
            parser.error(f"unknown step {', '.join(sorted(unknown))} (known: {known})")
        wanted = [step for step in wanted if step.name in names]

    def write(told: dict[str, Any]) -> None:
        # The document is written to another file first, so that a call that is killed keeps the last
        # document.
        written = given.json.with_name(given.json.name + ".part")
        written.write_text(json.dumps(told, indent=2) + "\n")
        written.replace(given.json)

    if lacking := missing(NEEDED):
        print(f"gpu-check: {how_to_bring(lacking)}")  # noqa: T201
        return 1
    try:
        machine = describe()
    except UnusableDeviceError as error:
        unusable = lines.not_measured("the device cannot be used")
        write({"machine": None, "state": f"failed: {error}", "lines": unusable})
        print(f"failed: {error}")  # noqa: T201
        return 1
    if machine is None:
        nothing = lines.not_measured(NO_DEVICE)
        state = f"not measured: {NO_DEVICE}"
        unmeasured = [{"step": step.name, "state": state} for step in wanted]
        write({"machine": None, "state": state, "steps": unmeasured, "lines": nothing})
        told = "".join(f"{step.name}: {state}\n" for step in wanted) + lines.shown(nothing)
        print(told, end="")  # noqa: T201
        return 0
    if given.fresh:
        given.json.unlink(missing_ok=True)
    document = continued(given.json, machine)
    write(document)
    well = run(wanted, document, budget_s=given.budget_s, write=write)
    document["lines"] = lines.judged(document["steps"])
    write(document)
    print(lines.shown(document["lines"]), end="")  # noqa: T201
    hold = not any(line["state"].startswith("does not hold") for line in document["lines"])
    return 0 if well and hold else 1


if __name__ == "__main__":
    raise SystemExit(main())
