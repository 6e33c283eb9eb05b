"""Everything that can only be known on a GPU, in one JSON document, in as many calls as it takes.

``python -m tierstore_tools.gpu.check [--json FILE] [--budget-s SECONDS] [--only STEP,…] [--fresh]``, by
``make gpu-check`` in an environment of its own or by ``make gpu-check-here`` with the interpreter at hand,
from the root of the repository. Each step is a process of its own with a limit: one that crashes or hangs
costs itself only. The document is written anew after every step, and a benchmark writes its rows one by one.
What does not fit into the budget is ``not run``; the next call goes on there: steps that are ``ok`` in the
document already stay as they are, those that failed come last.

In the order of what would make the rest pointless: first what the tests without a GPU assume of the hardware
(``golden``), then the engine on the device, the benchmarks, the suite of the kernels, and compute-sanitizer.

At the end it says of each line that must hold on a GPU (``lines.py``) whether it does, and ends with 1 where
one does not or a step failed.

Without a CUDA device each step and line is ``not measured`` and it ends with 0: nothing was found to be
wrong, and nothing is claimed. Where there is one that cannot be used (torch does not see it, CuPy or NVRTC is
missing) it says that and ends with 1.

Nothing but the standard library is imported here before :func:`missing` has looked: an interpreter without
one of the packages gets one line that names them all, not a traceback for the first.
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
# Module and package: without these nothing can be asked; the others are needed once there is a device.
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
_TAIL = 4000  # characters of a step's output that are kept
_KERNEL_TESTS = "tests/engine/kernels"
# These need no device and take long: what they say is the same on every machine.
_ON_THE_CPU_ONLY = ("test_compile.py", "test_executor.py", "test_planted_bugs.py", "test_races.py")
_TOOLKIT_BIN = "/usr/local/cuda/bin"  # often not on the path
_SANITIZER = "compute-sanitizer"


class UnusableDeviceError(Exception):
    """There is a device, and something keeps it from being used."""


def missing(needed: Mapping[str, str]) -> list[str]:
    """The packages, of modules → packages, that this interpreter lacks."""
    return [package for module, package in needed.items() if importlib.util.find_spec(module) is None]


def how_to_bring(packages: Sequence[str]) -> str:
    """One line for people."""
    names = " ".join(packages)
    return (
        f"this interpreter lacks {', '.join(packages)}: pip install {names}, or, where there is no index, "
        f"carry the wheels (elsewhere: pip download --no-deps -d wheels {names}; here: pip install "
        "--no-index --no-deps --target site wheels/*.whl, with site on PYTHONPATH); see docs/cuda.md"
    )


@dataclass(frozen=True, slots=True)
class CheckStep:
    """A command. ``result`` says that it is given the name of a JSON file to write to, as its last
    argument."""

    name: str
    command: tuple[str, ...]
    limit_s: float
    result: bool = False
    needs: str | None = None  # a program, without which the step is left out


def steps(python: str) -> list[CheckStep]:
    """All of them, in their order."""

    def tests(name: str, *arguments: str, limit_s: float) -> CheckStep:
        # Elsewhere warnings are errors. Here a new one of torch's must not cost what can be run once.
        quiet = ("-q", "-p", "no:cacheprovider", "-W", "default")
        return CheckStep(name, (python, "-m", "pytest", *quiet, *arguments), limit_s)

    def bench(name: str, limit_s: float) -> CheckStep:
        return CheckStep(name, (python, "-m", "tierstore_tools.gpu.bench", name), limit_s, result=True)

    def sanitized(tool: str, limit_s: float) -> CheckStep:
        # Every tensor an allocation of its own: in torch's cache memcheck would not see where one ends.
        sanitizer = find_program(_SANITIZER) or _SANITIZER
        environment = ("env", "PYTORCH_NO_CUDA_MEMORY_CACHING=1")
        command = (*environment, sanitizer, "--tool", tool, "--error-exitcode", "9")
        # Every kernel but the copy of pages.
        files = ("golden", "merge", "rope_write", "decode", "prefill", "latents", "states")
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
    """Its path, looked for where CUDA's toolkit is installed, too."""
    return shutil.which(name) or shutil.which(name, path=_TOOLKIT_BIN)


def describe() -> dict[str, Any] | None:
    """The device, its driver, versions; None without a device. Raises :class:`UnusableDeviceError` for one
    that cannot be used."""
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
    """Run the steps that ``document["steps"]`` does not have as ``ok``, those that failed before last, and
    put the outcome of each there. True when none failed."""
    ends = clock() + budget_s
    before: dict[str, str] = {outcome["step"]: outcome["state"] for outcome in document.get("steps", ())}
    outcomes: list[dict[str, Any]] = document.setdefault("steps", [])
    todo = [step for step in wanted if before.get(step.name) != "ok"]
    for step in sorted(todo, key=lambda step: before.get(step.name, "").startswith("failed")):
        left = ends - clock()
        if step.needs is not None and find_program(step.needs) is None:
            outcome: dict[str, Any] = {"state": f"not run: {step.needs} is not installed"}
        elif left <= 0:
            outcome = {"state": "not run: the time was over"}
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
    """None for a file whose writer was ended in the middle of it."""
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


def go_on_with(path: Path, machine: dict[str, Any]) -> dict[str, Any]:
    """The document of an earlier call on the same device, or a new one. Of a step that was cut off, its rows
    are kept until it has been run again."""
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
        "--json", type=Path, default=Path("gpu-check.json"), help="the document; gone on with"
    )
    parser.add_argument("--budget-s", type=float, default=560.0, help="what this call may take")
    parser.add_argument("--only", default="", help="steps, comma-separated")
    parser.add_argument("--fresh", action="store_true", help="begin anew, whatever the document has")
    given = parser.parse_args(arguments)
    wanted = steps(sys.executable)
    if given.only:
        names = given.only.split(",")
        unknown = set(names) - {step.name for step in wanted}
        if unknown:
            known = ", ".join(step.name for step in wanted)
            parser.error(f"no step {', '.join(sorted(unknown))} (there are: {known})")
        wanted = [step for step in wanted if step.name in names]

    def write(told: dict[str, Any]) -> None:
        # A call that is killed leaves the last document whole.
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
    document = go_on_with(given.json, machine)
    write(document)
    well = run(wanted, document, budget_s=given.budget_s, write=write)
    document["lines"] = lines.judged(document["steps"])
    write(document)
    print(lines.shown(document["lines"]), end="")  # noqa: T201
    hold = not any(line["state"].startswith("does not hold") for line in document["lines"])
    return 0 if well and hold else 1


if __name__ == "__main__":
    raise SystemExit(main())
