"""Everything that can only be known on a GPU, in one run and one JSON document.

``python -m tierstore_tools.gpu.check [--json FILE] [--budget-s SECONDS] [--only STEP,…]``, or ``make
gpu-check``, from the root of the repository. Each step is a process of its own with a limit: one that crashes
or hangs costs itself only. The document is written anew after every step. What does not fit into the budget
is ``not run``.

In the order of what would make the rest pointless: first what the tests without a GPU assume of the hardware
(``golden``), then the engine on the device, the benchmarks, the whole suite of the kernels, and
compute-sanitizer.

At the end it says of each line that must hold on a GPU (``lines.py``) whether it does, and ends with 1 where
one does not or a step failed.

Without a CUDA device each line is ``not measured`` and it ends with 0: nothing was found to be wrong, and
nothing is claimed. Where there is one that cannot be used (torch does not see it, CuPy or NVRTC is missing)
it says that and ends with 1.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tierstore.errors import TierStoreError, UsageError
from tierstore_tools.gpu import lines

NO_DEVICE = "no CUDA device"
DRIVER = Path("/proc/driver/nvidia/version")
_TAIL = 4000  # characters of a step's output that are kept
_KERNEL_TESTS = "tests/engine/kernels"
_SANITIZER = "compute-sanitizer"


@dataclass(frozen=True, slots=True)
class Step:
    """A command. ``result`` says that it is given the name of a JSON file to write to, as its last
    argument."""

    name: str
    command: tuple[str, ...]
    limit_s: float
    result: bool = False
    needs: str | None = None  # a program without which the step is left out


def steps(python: str) -> list[Step]:
    def tests(name: str, *arguments: str, limit_s: float) -> Step:
        return Step(name, (python, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments), limit_s)

    def bench(name: str, limit_s: float) -> Step:
        return Step(name, (python, "-m", "tierstore_tools.gpu.bench", name), limit_s, result=True)

    def sanitized(tool: str) -> Step:
        # Every tensor an allocation of its own: in torch's cache memcheck would not see where one ends.
        command = (
            "env",
            "PYTORCH_NO_CUDA_MEMORY_CACHING=1",
            _SANITIZER,
            "--tool",
            tool,
            "--error-exitcode",
            "9",
        )
        files = ("golden", "merge", "rope_write", "decode", "prefill")  # every kernel but the copy of pages
        where = [f"{_KERNEL_TESTS}/test_{name}.py" for name in files]
        chosen = (python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "not any_")
        return Step(f"sanitizer {tool}", (*command, *chosen, *where), 240, needs=_SANITIZER)

    longctx = ("-m", "tierstore_tools.cli", "longctx", "--model", "llama-3-8b", "--tokens", "100000")
    return [
        tests("golden", f"{_KERNEL_TESTS}/test_golden.py", limit_s=120),
        tests("engine", "tests/engine/test_on_gpu.py", limit_s=180),
        bench("decode", 120),
        bench("transfers", 120),
        bench("prefill", 120),
        Step(
            "longctx",
            (python, *longctx, "--device", "cuda", "--store", tempfile.gettempdir(), "--json"),
            300,
            result=True,
        ),
        tests("kernels", _KERNEL_TESTS, "tests/engine/test_cuda_attention.py", limit_s=400),
        sanitized("memcheck"),
        sanitized("racecheck"),
        sanitized("synccheck"),
    ]


def describe() -> dict[str, Any] | None:
    """The device, its driver, versions; None without a device. Raises :class:`TierStoreError` for one that
    cannot be used."""
    import torch

    if not torch.cuda.is_available():
        if DRIVER.exists():
            built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"
            raise UsageError(
                f"NVIDIA's driver {_driver_version()} is loaded, but torch {torch.__version__}, {built}, "
                "sees no device: install a torch for this driver"
            )
        return None
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
    wanted: Sequence[Step],
    document: dict[str, Any],
    *,
    budget_s: float,
    write: Callable[[dict[str, Any]], None],
    clock: Callable[[], float] = time.monotonic,
) -> bool:
    """Run the steps, one outcome each in ``document["steps"]``. True when none failed."""
    ends = clock() + budget_s
    outcomes: list[dict[str, Any]] = document.setdefault("steps", [])
    for step in wanted:
        left = ends - clock()
        if step.needs is not None and shutil.which(step.needs) is None:
            outcome: dict[str, Any] = {"state": f"not run: {step.needs} is not installed"}
        elif left <= 0:
            outcome = {"state": "not run: the time was over"}
        else:
            outcome = _run_one(step, min(step.limit_s, left))
        outcomes.append({"step": step.name, **outcome})
        print(f"{step.name}: {outcome['state']}", flush=True)  # noqa: T201
        write(document)
    return not any(outcome["state"].startswith("failed") for outcome in outcomes)


def _run_one(step: Step, limit_s: float) -> dict[str, Any]:
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


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="gpu-check", description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, default=Path("gpu-check.json"))
    parser.add_argument("--budget-s", type=float, default=3600.0)
    parser.add_argument("--only", default="", help="steps, comma-separated")
    given = parser.parse_args(arguments)
    wanted = steps(sys.executable)
    if given.only:
        names = given.only.split(",")
        unknown = set(names) - {step.name for step in wanted}
        if unknown:
            known = ", ".join(step.name for step in wanted)
            parser.error(f"no step {', '.join(sorted(unknown))} (there are: {known})")
        wanted = [step for step in wanted if step.name in names]
    document: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "machine": None,
    }

    def write(told: dict[str, Any]) -> None:
        given.json.write_text(json.dumps(told, indent=2) + "\n")

    try:
        machine = document["machine"] = describe()
    except TierStoreError as error:
        unusable = lines.not_measured("the device cannot be used")
        write(document | {"state": f"failed: {error}", "lines": unusable})
        print(f"failed: {error}")  # noqa: T201
        return 1
    if machine is None:
        nothing = lines.not_measured(NO_DEVICE)
        write(document | {"state": f"not measured: {NO_DEVICE}", "lines": nothing})
        print(lines.shown(nothing), end="")  # noqa: T201
        return 0
    write(document)
    well = run(wanted, document, budget_s=given.budget_s, write=write)
    document["lines"] = lines.judged(document["steps"])
    write(document)
    print(lines.shown(document["lines"]), end="")  # noqa: T201
    hold = not any(line["state"].startswith("does not hold") for line in document["lines"])
    return 0 if well and hold else 1


if __name__ == "__main__":
    raise SystemExit(main())
