"""The benchmarks for a GPU: their arithmetic, and all of their code with tiny shapes on the executor."""

from __future__ import annotations

import contextlib
import copy
import json
import math
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.device import FakeDevice
from tests.engine.kernels.executor import missing_tools
from tests.engine.kernels.executor.launcher import ExecutorLauncher
from tests.engine.test_decode import config_of
from tierstore.spec import KVSpec, LayerGroup, LayerKind
from tierstore.tiers.device_overflow import DeviceOverflowPool
from tierstore.tiers.device_pool import DevicePool
from tierstore.tiers.hbm import PagePool
from tierstore_engine.attention.base import Attention
from tierstore_engine.attention.cuda import CudaAttention
from tierstore_engine.attention.push_down import PushDownAttention
from tierstore_engine.config import DeltaConfig, Mamba2Config, ModelConfig
from tierstore_tools.gpu import arithmetic, check, decode, kinds, lines, prefill, push_down, weights
from tierstore_tools.gpu.arithmetic import LLAMA_3_8B, Heads
from tierstore_tools.gpu.decode import DecodeCase
from tierstore_tools.gpu.kinds import KindCase
from tierstore_tools.gpu.prefill import PrefillCase
from tierstore_tools.gpu.push_down import PushDownCase
from tierstore_tools.gpu.transfers import SlowdownRow, TransferBench, TransferRow
from tierstore_tools.longctx.cases import LongContextResult, LongContextRow

TINY = Heads(4, 2, 16)
executed = pytest.mark.skipif(
    missing_tools() is not None, reason=f"kernels cannot be executed: {missing_tools()}"
)


def on_the_cpu(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def test_bytes_and_flops() -> None:
    assert LLAMA_3_8B.token_bytes == 4096
    assert arithmetic.decode_bytes(LLAMA_3_8B, batch=64, context=128 << 10) == 32 << 30
    assert arithmetic.copy_bytes(10) == 20
    assert arithmetic.pages_for(100_000, 64) == 1563


@pytest.mark.parametrize(("tokens", "past"), [(1, 0), (5, 0), (3, 7), (1, 9)])
def test_flops_by_counting(tokens: int, past: int) -> None:
    pairs = sum(1 for query in range(tokens) for key in range(past + tokens) if key <= past + query)
    assert arithmetic.attention_flops(Heads(3, 1, 8), tokens, past) == pairs * 3 * (2 * 8 + 2 * 8)


def test_a_100k_hit_is_12_8_gb() -> None:
    pages = arithmetic.pages_for(100_000, 64)
    assert pages * 64 * 32 * LLAMA_3_8B.token_bytes == pytest.approx(13.1e9, rel=0.01)


@executed
def test_decode_rows() -> None:
    cases = (DecodeCase(2, 64), DecodeCase(1, 150, layers=3))
    rows = list(
        decode.run(
            ExecutorLauncher(),
            "cpu",
            on_the_cpu,
            cases=cases,
            shape=TINY,
            page_tokens=16,
            copy_nbytes=1 << 16,
        )
    )
    for row, case in zip(rows, cases, strict=True):
        assert row.kv_bytes == case.batch * case.context * 2 * 2 * 16 * 2
        assert row.largest_difference < 0.03  # beside torch, in bfloat16
        assert row.best_torch_s is not None
        assert row.fraction == pytest.approx(row.kv_gb_per_s / row.copy_gb_per_s)
        assert row.kv_gb_per_s == pytest.approx(row.kv_bytes / row.kernel_s / 1e9)


@executed
def test_prefill_rows() -> None:
    cases = (PrefillCase(40), PrefillCase(20, 50), PrefillCase(20, 50, layers=3))
    rows = list(prefill.run(ExecutorLauncher(), "cpu", on_the_cpu, cases=cases, shape=TINY, page_tokens=16))
    for row, case in zip(rows, cases, strict=True):
        assert (row.tokens, row.past, row.layers) == (case.tokens, case.past, case.layers)
        assert row.largest_difference < 0.05
        assert row.fraction == pytest.approx(row.flash_s / row.kernel_s)
        assert row.kernel_tflop_per_s == pytest.approx(row.flops / row.kernel_s / 1e12)


@executed
def test_rows_of_quantised_weights() -> None:
    forms = ("Q4_K", "Q6_K", "Q8_0", "uint4", "fp8_e4m3")
    cases = [weights.WeightCase(form, tokens) for form, tokens in zip(forms, (1, 16, 17, 1, 2), strict=True)]
    rows = list(
        weights.run(ExecutorLauncher(), "cpu", on_the_cpu, cases=cases, shape=(20, 256), copy_nbytes=1024)
    )
    assert [(row.form, row.tokens) for row in rows] == [(case.form, case.tokens) for case in cases]
    assert [row.nbytes for row in rows] == [20 * 144, 20 * 210, 20 * 8 * 34, 20 * (128 + 4), 20 * (256 + 4)]
    assert all(row.fraction > 0 for row in rows)


def test_rows_of_other_kinds() -> None:
    states = DeltaConfig(1, 2, 8, 8, 4), Mamba2Config(2, 8, 8, 1, 4)
    shapes = kinds.Shapes(4, 40, 32, Heads(4, 2, 16), 20, Heads(4, 2, 16), *states)
    cases = [KindCase(name, 2, 70) for name in kinds.PROBLEMS]
    rows = list(
        kinds.run(
            *(ExecutorLauncher(), "cpu", on_the_cpu),
            cases=cases,
            shapes=shapes,
            page_tokens=16,
            copy_nbytes=1 << 16,
        )
    )
    assert [row.name for row in rows] == ["latents", "window", "capped", "delta", "mamba2"]
    state = 32 * 3 * 2 + 2 * 8 * 8 * 4  # the inputs of 32 channels' convolution, and two matrices
    attention = [2 * 70 * 80, 2 * 20 * 128, 2 * 70 * 128]
    assert [row.nbytes for row in rows] == [*attention, 2 * 2 * state, 2 * 2 * state]
    for row in rows:
        assert row.fraction == pytest.approx(row.gb_per_s / row.copy_gb_per_s)
        assert row.gb_per_s == pytest.approx(row.nbytes / row.kernel_s / 1e9)


@executed
def test_transfer_rows() -> None:
    spec = KVSpec((LayerGroup(LayerKind.FULL_ATTENTION, (0, 1), 2, 16),), "float16", 16)
    device = FakeDevice(2)
    pool = DevicePool(spec, 4, device, layered_bytes=0)
    bench = TransferBench(pool, 3)
    bench._host.view(0, 3 * spec.page_bytes)[:] = bytes([1, 2, 3]) * spec.page_bytes
    rows = list(bench.rows(repetitions=1))
    assert [row.case for row in rows] == ["load", "save", "both"]
    assert [row.nbytes for row in rows] == [3 * spec.page_bytes, 3 * spec.page_bytes, 6 * spec.page_bytes]
    assert all(row.fraction == pytest.approx(row.plain_s / row.seconds) for row in rows)
    # A load and a save turn the pages around twice. (Both at once read pages that are being written.)
    bench.load()
    bench.save()
    assert bench._back.view(0, bench.nbytes) == bench._host.view(0, bench.nbytes)
    done: list[int] = []
    slowdown = bench.slowdown(
        lambda: device.launch(pool.compute, lambda: done.append(1)), lambda: device.finish(pool.compute)
    )
    assert len(done) == 600
    assert math.isclose(slowdown.slowdown, slowdown.while_loading_s / slowdown.alone_s - 1)
    bench.close()
    assert device.registered == 0


@executed
def test_rows_of_push_down_attention() -> None:
    """The outputs are those with all pages on the device, and a smaller memory shortens the sequence."""
    config = config_of(4, 2, 64, dtype="bfloat16")
    page = 4096 * -(-config.kv_spec(chunk_tokens=16).page_bytes // 4096)

    def attend(pool: PagePool, config: ModelConfig) -> Attention:
        device = CudaAttention(torch.from_numpy(pool.array), pool.spec, config, ExecutorLauncher())
        return PushDownAttention(pool, config, device) if isinstance(pool, DeviceOverflowPool) else device

    def rows(device_pages: int, host_pages: int) -> push_down.PushDownRow:
        device = FakeDevice(1)  # copies are done at once, because torch's operations are
        room = device_pages * page, host_pages * page
        bench = push_down.PushDownBench(
            device, config, attend, lambda stream: contextlib.nullcontext(), "cpu", *room, chunk_tokens=16
        )
        [row] = bench.rows([PushDownCase(16 * 16, 16 * 4)])
        assert device.registered == 0
        return row

    row = rows(17, 24)
    assert (row.wanted, row.tokens) == (256, 256)
    assert row.host_bytes == 13 * config.kv_spec(chunk_tokens=16).page_bytes  # the new token took a slot
    assert row.resident_s is not None
    assert row.largest_difference is not None
    assert row.largest_difference < 0.01
    assert row.fraction == pytest.approx(row.host_bytes / row.step_s / 1e9 / row.link_gb_per_s)
    row = rows(4, 12)
    assert (row.wanted, row.tokens, row.resident_s, row.largest_difference) == (256, 128, None, None)


# -- the run of everything ----------------------------------------------------------------------------------

PYTHON = sys.executable


def script(name: str, code: str, **settings: Any) -> check.CheckStep:
    return check.CheckStep(name, (PYTHON, "-c", code), settings.pop("limit_s", 30), **settings)


def run(steps: list[check.CheckStep], **settings: Any) -> tuple[bool, dict[str, dict[str, Any]], int]:
    """Whether all went well, the outcomes by step, and how often the document was written."""
    document: dict[str, Any] = {}
    written: list[int] = []
    settings.setdefault("budget_s", 60)
    well = check.run(steps, document, write=lambda told: written.append(len(told["steps"])), **settings)
    assert written == list(range(1, len(steps) + 1))
    return well, {outcome["step"]: outcome for outcome in document["steps"]}, len(written)


def test_a_step_that_fails_costs_itself_only() -> None:
    well, outcomes, _ = run(
        [
            script("bad", "print('why'); raise SystemExit(3)"),
            script("slow", "import time; time.sleep(60)", limit_s=0.5),
            script("rows", "import sys; open(sys.argv[1], 'w').write('[1, 2]')", result=True),
            script("torn", "import sys; open(sys.argv[1], 'w').write('[1,')", result=True),
            script("tool", "", needs="a-program-that-is-not-there"),
            script("where", "import os; print(os.environ['TIERSTORE_KERNEL_DEVICE'])"),
        ]
    )
    assert not well
    assert outcomes["bad"]["state"] == "failed: exit code 3"
    assert outcomes["bad"]["output"] == "why\n"
    assert outcomes["slow"]["state"] == "failed: not done after 0 s"
    assert (outcomes["rows"]["state"], outcomes["rows"]["result"]) == ("ok", [1, 2])
    assert outcomes["torn"]["result"] is None
    assert outcomes["tool"]["state"] == "not run: a-program-that-is-not-there is not installed"
    assert outcomes["where"]["output"] == "cuda\n"


def test_what_does_not_fit_is_not_run() -> None:
    times = iter([0.0, 1.0, 11.0])
    well, outcomes, _ = run(
        [script("first", ""), script("second", "")], budget_s=10, clock=lambda: next(times)
    )
    assert well
    assert outcomes["second"]["state"] == "not run: the budget was used up"


def test_steps_exist() -> None:
    root = Path(__file__).parents[3]
    for step in check.steps(PYTHON):
        for argument in step.command:
            assert not argument.startswith("tests/") or (root / argument).exists(), argument
    assert check.steps(PYTHON)[0].name == "golden"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "check.json"
    assert check.main(["--json", str(target)]) == 0
    steps = [f"{step.name}: not measured: no CUDA device" for step in check.steps(PYTHON)]
    assert capsys.readouterr().out.splitlines() == [
        *steps,
        "1. decode: not measured: no CUDA device",
        "2. prefill: not measured: no CUDA device",
        "3. transfers: not measured: no CUDA device",
        "4. longctx: not measured: no CUDA device",
    ]
    document = json.loads(target.read_text())
    assert document["state"] == "not measured: no CUDA device"
    assert document["machine"] is None
    told = [(line["line"], line["state"]) for line in document["lines"]]
    assert told == [(each.name, "not measured: no CUDA device") for each in lines.LINES]
    assert not any("figures" in line for line in document["lines"])


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_cannot_be_used(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = tmp_path / "version"
    driver.write_text("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.82.07  Release Build\n")
    monkeypatch.setattr(check, "DRIVER", driver)
    target = tmp_path / "check.json"
    assert check.main(["--json", str(target)]) == 1
    [line] = capsys.readouterr().out.splitlines()
    assert line.startswith(f"failed: NVIDIA's driver 580.82.07 is loaded, but torch {torch.__version__}, ")
    document = json.loads(target.read_text())
    assert document["state"] == line
    assert {line["state"] for line in document["lines"]} == {"not measured: the device cannot be used"}


def test_a_gpu_without_cupy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setitem(sys.modules, "cupy", None)
    assert check.main(["--json", str(tmp_path / "check.json")]) == 1
    [line] = capsys.readouterr().out.splitlines()
    assert line.startswith(
        "gpu-check: this interpreter lacks cupy-cuda13x: pip install cupy-cuda13x. Without"
    )


NOT_IN_EVERY_IMAGE = (
    *("xxhash", "typer", "rich", "prometheus_client", "aiofiles", "psutil", "safetensors", "tokenizers"),
    *("pytest", "pytest_timeout", "hypothesis", "matplotlib", "transformers", "starlette", "uvicorn"),
)


def check_here(tmp_path: Path, *, without: tuple[str, ...]) -> subprocess.CompletedProcess[str]:
    """The command in an interpreter that lacks some packages."""
    code = (
        f"import sys; sys.modules.update(dict.fromkeys({without!r}))\n"
        "from tierstore_tools.gpu import check\n"
        f"sys.exit(check.main(['--json', {str(tmp_path / 'check.json')!r}]))"
    )
    return subprocess.run([PYTHON, "-c", code], capture_output=True, text=True, check=False)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_torch_cupy_numpy_and_three_wheels_are_enough_to_say_that_there_is_no_gpu(tmp_path: Path) -> None:
    pytest.importorskip("cupy")
    done = check_here(tmp_path, without=NOT_IN_EVERY_IMAGE)
    assert (done.returncode, done.stderr) == (0, "")
    told = done.stdout.splitlines()
    assert len(told) == len(check.steps(PYTHON)) + len(lines.LINES)
    assert all(line.endswith(": not measured: no CUDA device") for line in told)
    document = json.loads((tmp_path / "check.json").read_text())
    assert len(document["steps"]) == len(check.steps(PYTHON))


def test_without_the_wheels_one_line_names_them(tmp_path: Path) -> None:
    done = check_here(tmp_path, without=("lmdb", "msgspec", "zmq", *NOT_IN_EVERY_IMAGE))
    [line] = done.stdout.splitlines()
    assert (done.returncode, done.stderr) == (1, "")
    assert "lmdb, msgspec, pyzmq: pip install lmdb msgspec pyzmq. Without" in line
    assert not (tmp_path / "check.json").exists()


def test_a_device_needs_more_packages(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("cupy")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    assert check.main(["--json", str(tmp_path / "check.json")]) == 1
    [line] = capsys.readouterr().out.splitlines()
    assert line.startswith("failed: this interpreter lacks tokenizers: pip install tokenizers")


def test_a_further_call_goes_on_where_the_last_one_ended(tmp_path: Path) -> None:
    marks = tmp_path / "marks"
    marks.mkdir()

    def marked(name: str, code: str = "") -> check.CheckStep:
        return script(name, f"open({str(marks / name)!r}, 'a').write('x'); {code}")

    steps = [marked("fails", "raise SystemExit(1)"), marked("first"), marked("second")]
    document: dict[str, Any] = {}
    times = iter([0.0, 1.0, 2.0, 11.0])
    target = tmp_path / "check.json"
    machine = {"gpu": "one", "driver": "1", "torch": "2", "tierstore": "0"}

    def write(told: dict[str, Any]) -> None:
        target.write_text(json.dumps(told))

    document = check.continued(target, machine)
    assert not check.run(steps, document, budget_s=10, write=write, clock=lambda: next(times))
    document = check.continued(target, machine)
    assert [step["state"] for step in document["steps"]] == [
        "failed: exit code 1",
        "ok",
        "not run: the budget was used up",
    ]
    assert not check.run(steps, document, budget_s=60, write=write)
    assert [step["step"] for step in document["steps"]] == ["first", "second", "fails"]  # what failed is last
    assert {path.name: path.read_text() for path in marks.iterdir()} == {
        "fails": "xx",
        "first": "x",
        "second": "x",
    }
    assert "steps" not in check.continued(target, machine | {"gpu": "another"})


def test_the_suite_of_the_kernels_leaves_out_what_needs_no_device() -> None:
    (kernels,) = (step for step in check.steps(PYTHON) if step.name == "kernels")
    ignored = [argument for argument in kernels.command if argument.startswith("--ignore=")]
    assert all((Path(__file__).parents[3] / path.removeprefix("--ignore=")).is_file() for path in ignored)
    assert len(ignored) == 4


def test_unknown_steps_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        check.main(["--only", "golden,nothing"])
    assert "unknown step nothing (known: golden, engine" in capsys.readouterr().err


# -- the lines that must hold -------------------------------------------------------------------------------

DECODE = [
    # Too little KV for the first figure.
    {"kv_bytes": 16e6, "fraction": 0.2, "kernel_s": 1.0, "best_torch_s": 1.0, "largest_difference": 0.02},
    {"kv_bytes": 2e9, "fraction": 0.85, "kernel_s": 1.0, "best_torch_s": None, "largest_difference": 0.0},
    {"batch": 64, "context": 131072, "state": "not measured: needs 70 GiB of memory"},
]
PREFILL = [
    {"fraction": 0.9, "library_overhead": 0.03, "largest_difference": 0.01},
    {"fraction": 1.2, "library_overhead": -0.01, "largest_difference": 0.02},
]
TRANSFERS = [
    {"case": "load", "fraction": 0.9},
    {"case": "save", "fraction": 0.1},
    {"case": "both", "fraction": 0.85},
    {"alone_s": 1.0, "while_loading_s": 1.03, "slowdown": 0.03},
    {"refused_batches": 0},
]
LONGCTX = {
    "rows": [
        {"case": "cold", "identical": True},
        {"case": "hbm", "identical": True, "pages_identical": True},
        {"case": "host", "identical": True, "pages_identical": True, "speedup": 20.0},
        {"case": "disk", "identical": True, "pages_identical": True, "limit_fraction": 0.9},
    ],
    "save_overhead": 0.02,
}
RESULTS = {"decode": DECODE, "prefill": PREFILL, "transfers": TRANSFERS, "longctx": LONGCTX}


def states(results: dict[str, Any]) -> dict[str, str]:
    """Of each line."""
    steps = [{"step": name, "state": "ok", "result": result} for name, result in results.items()]
    return {line["line"]: line["state"] for line in lines.judged(json.loads(json.dumps(steps)))}


def test_lines_that_hold() -> None:
    assert states(RESULTS) == dict.fromkeys(RESULTS, "holds")


@pytest.mark.parametrize(
    ("name", "change", "told"),
    [
        (
            "decode",
            lambda r: r[1].update(fraction=0.849),
            "fraction of the copy's speed, from 1 GB of KV on 0.849",
        ),
        ("decode", lambda r: r[0].update(best_torch_s=0.99), "as fast as torch's attention 0.99"),
        ("decode", lambda r: r[1].update(fraction=math.nan), "from 1 GB of KV on nan"),
        ("decode", lambda r: r[1].update(largest_difference=0.03), "largest difference from torch 0.03"),
        ("decode", lambda r: r[0].update(largest_difference=math.nan), "difference from torch nan"),
        ("prefill", lambda r: r[1].update(largest_difference=0.03), "largest difference from torch 0.03"),
        ("prefill", lambda r: r[0].update(fraction=0.89), "fraction of flash attention's speed 0.89"),
        ("prefill", lambda r: r[1].update(library_overhead=0.031), "added by gathering 0.031"),
        ("transfers", lambda r: r[0].update(fraction=0.899), "fraction of one plain copy, loading 0.899"),
        ("transfers", lambda r: r[2].update(fraction=0.84), "both directions 0.84"),
        ("transfers", lambda r: r[3].update(slowdown=0.04), "decoding slower while loading 0.04"),
        ("longctx", lambda r: r["rows"][2].update(speedup=19.9), "times faster from host memory 19.9"),
        ("longctx", lambda r: r["rows"][3].update(limit_fraction=0.8), "fraction of the disk's limit 0.8"),
        ("longctx", lambda r: r["rows"][1].update(identical=False), "answers other than cold 1"),
        ("longctx", lambda r: r["rows"][3].update(pages_identical=False), "with other page bytes 1"),
        ("longctx", lambda r: r.update(save_overhead=0.021), "added by saving 0.021"),
    ],
)
def test_lines_that_do_not_hold(name: str, change: Callable[[Any], None], told: str) -> None:
    results = copy.deepcopy(RESULTS)
    change(results[name])
    found = states(results)
    assert found.pop(name).startswith("does not hold: ")
    assert told in states(results)[name]
    assert set(found.values()) == {"holds"}


@pytest.mark.parametrize(
    ("name", "missing"),
    [
        ("decode", lambda r: r.pop(1)),
        ("prefill", lambda r: r.clear()),
        ("transfers", lambda r: r.pop(2)),
        ("transfers", lambda r: r.pop(3)),
        ("longctx", lambda r: r["rows"].pop(2)),
        ("longctx", lambda r: r["rows"][3].update(limit_fraction=None)),
        ("longctx", lambda r: r.pop("save_overhead")),
    ],
)
def test_half_of_a_line_is_not_measured(name: str, missing: Callable[[Any], None]) -> None:
    results = copy.deepcopy(RESULTS)
    missing(results[name])
    assert states(results)[name].startswith(f"not measured: the result of {name} is incomplete (")


def test_lines_without_their_steps() -> None:
    steps = [
        {"step": "decode", "state": "not run: the budget was used up"},
        {"step": "golden", "state": "ok"},
    ]
    told = {line["line"]: line["state"] for line in lines.judged(steps)}
    assert told["decode"] == "not measured: step decode: not run: the budget was used up"
    assert told["prefill"] == "not measured: step prefill: not requested"


@executed
def test_rows_are_what_the_lines_read() -> None:
    """The names in the rows that the benchmarks write."""
    tiny = {"shape": TINY, "page_tokens": 16}
    decoded = decode.run(
        ExecutorLauncher(), "cpu", on_the_cpu, cases=(DecodeCase(1, 20),), copy_nbytes=1 << 12, **tiny
    )
    (row,) = map(asdict, decoded)
    assert row.keys() >= DECODE[0].keys()
    (row,) = map(asdict, prefill.run(ExecutorLauncher(), "cpu", on_the_cpu, cases=(PrefillCase(20),), **tiny))
    assert row.keys() >= PREFILL[0].keys()
    assert {field.name for field in fields(TransferRow)} >= TRANSFERS[0].keys()
    assert {field.name for field in fields(SlowdownRow)} >= {"slowdown"}
    assert {field.name for field in fields(LongContextRow)} >= {
        name for row in LONGCTX["rows"] for name in row
    }
    assert {field.name for field in fields(LongContextResult)} >= LONGCTX.keys()
