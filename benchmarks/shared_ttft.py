"""Measure the TTFT of an engine for prompts that other engines have saved, and for prompts that it computes.

    python benchmarks/shared_ttft.py --tp --vllm-python .venv-vllm/bin/python \\
        --sglang-python .venv-sglang/bin/python --s3 's3://BUCKET/PREFIX?refresh_s=0.2'

Every engine first saves prompts of its own over one daemon, alone on the machine. Then each engine in turn
computes one prompt, and loads one prompt of each other engine. ``--tp`` adds vLLM with two ranks. With
``--s3`` the daemon publishes all pages there, and the bundled engine also loads the prompts from a new daemon
that fetches them. Use a new prefix for each run. Without the other interpreters only the bundled engine runs.

The default model has random weights, and most of its computation is not attention. SGLang's attention on a
CPU computes the whole prompt again in each step, so a loaded prompt saves no attention there. docs/sharing.md
has results.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeAlias

import typer

from tierstore.cli.operator import Operator
from tierstore.cluster.s3 import Bucket
from tierstore.cluster.s3_address import S3Address
from tierstore.command_line import one_line_errors
from tierstore.errors import TierStoreError
from tierstore.testing.clock import wait_until
from tierstore.testing.processes import DaemonProcess
from tierstore.units import GIB
from tierstore_engine.build import build_engine, load_model, open_model
from tierstore_engine.pool_sizes import pages_for_tokens
from tierstore_engine.sampling import SamplingParams
from tierstore_engine.settings import EngineSettings
from tierstore_tools import machine, report
from tierstore_tools.sglang import SglangEngine, storage_options
from tierstore_tools.vllm import models
from tierstore_tools.vllm.asks import Ask, prompt
from tierstore_tools.vllm.engine import VllmEngine, connector_options

CHUNK = 64
_STAND_INS = Path(__file__).parents[1] / "tests" / "sglang" / "cpu"
_PUBLISHED_S = 600.0
_PATIENT = {"share_engines": True, "lookup_s": 20.0, "load_s": 60.0}

Answer: TypeAlias = "Callable[[list[int]], tuple[float, int]]"
"""A function that answers a prompt with one token. It returns the TTFT in seconds, and the loaded tokens."""


@dataclass(frozen=True)
class Pair:
    """Medians of the TTFT in seconds. ``ratio`` is the median of computed / loaded over the rounds."""

    loader: str
    saver: str
    source: str
    loaded_s: float
    computed_s: float
    ratio: float


@dataclass(frozen=True)
class Setting:
    model: Path
    tokens: int
    rounds: int
    vllm_python: str
    sglang_python: str

    @contextmanager
    def engine(self, name: str, url: str) -> Iterator[Answer]:
        """Run an engine over the daemon at ``url``."""
        with ExitStack() as ending:
            if name == "bundled":
                yield self._bundled(url, ending)
                return
            if name == "SGLang":
                options = storage_options(url, **_PATIENT)
                running = SglangEngine(self.model, stand_ins=_STAND_INS, python=self.sglang_python, **options)
            else:
                ranks = int(name.partition("TP=")[2] or 1)
                sizes = "2x1" if ranks == 1 else "1x1"
                extra = {**_PATIENT, "chunk_tokens": CHUNK, "share_sizes": sizes, "prefetch_s": 60.0}
                threads = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "2"}
                running = VllmEngine(
                    self.model,
                    connector=connector_options(url, **extra),
                    python=self.vllm_python,
                    environment=threads if ranks == 1 else None,
                    tensor_parallel_size=ranks,
                    block_size=32,
                    num_gpu_blocks_override=2048,
                    max_model_len=8192,
                    max_num_batched_tokens=8192,
                )
            ending.enter_context(running)

            def answer(tokens: list[int]) -> tuple[float, int]:
                answers = running.ask(Ask(tokens, max_tokens=1))
                return answers.answers[0].ttft_s, answers.external_hit_tokens

            yield answer

    def _bundled(self, url: str, ending: ExitStack) -> Answer:
        model = load_model(open_model(str(self.model), device="cpu"))
        pages = 8 * self.rounds * pages_for_tokens(model.kv_spec(), self.tokens + 8)
        settings = EngineSettings(plan="load")
        engine = build_engine(
            model, pool_pages=pages, store=url, chunk_tokens=CHUNK, settings=settings, share_engines=True
        )
        ending.callback(engine.close)

        def answer(tokens: list[int]) -> tuple[float, int]:
            [done] = engine.generate([tokens], SamplingParams(max_new_tokens=1, ignore_eos=True))
            return done.metrics.ttft_s, done.metrics.reused_tokens

        return answer


def main(
    vllm_python: str = "",
    sglang_python: str = "",
    model: str = "",
    tokens: int = 4096,
    rounds: int = 3,
    tp: bool = False,
    s3: str = "",
    json: str | None = None,
) -> None:
    """Measure the engines whose interpreters are given, and the bundled one."""
    report.require_targets(json)
    names = ["bundled", *(["vLLM"] if vllm_python else []), *(["SGLang"] if sglang_python else [])]
    names += ["vLLM TP=2"] if vllm_python and tp else []
    with tempfile.TemporaryDirectory(prefix="ts") as folder, ExitStack() as ending:
        path = Path(model) if model else models.make("wide", Path(folder) / "wide")
        setting = Setting(path, tokens // CHUNK * CHUNK, rounds, vllm_python, sglang_python)
        daemon = _daemon(Path(folder) / "one", s3, "all", ending)
        for at, name in enumerate(names):
            _save(setting, name, at, daemon)
        rows = [row for name in names for row in _load(setting, name, names, daemon.url)]
        if s3:
            parts = sum(2 if "TP" in name else 1 for name in names)
            whole = 2 * parts * rounds * setting.tokens // CHUNK  # each engine saved and computed prompts
            fresh = _published(daemon, whole, Path(folder) / "two", s3, ending)
            rows += _load(setting, "bundled", names, fresh.url, source="S3")
    report.table(
        f"TTFT of {setting.tokens:,} tokens, medians of {rounds}",
        ("engine", "pages of", "from", "loaded, s", "computed, s", "ratio"),
        [
            (
                row.loader,
                row.saver,
                row.source,
                f"{row.loaded_s:.3f}",
                f"{row.computed_s:.2f}",
                f"{row.ratio:.0f}",
            )
            for row in rows
        ],
        to_stderr=json == "-",
    )
    report.write_json({"machine": machine.describe(), "rows": [asdict(row) for row in rows]}, json)


def _seed(saver: int, turn: int) -> int:
    return 20 * saver + turn


def _save(setting: Setting, name: str, at: int, daemon: DaemonProcess) -> None:
    """Have an engine compute and save its prompts."""
    pages = _pages(daemon)
    with setting.engine(name, daemon.url) as answer:
        for turn in range(setting.rounds):
            answer(prompt(setting.tokens + 4, seed=_seed(at, turn)))
        whole = setting.rounds * setting.tokens // CHUNK * (2 if "TP" in name else 1)
        ends = time.monotonic() + _PUBLISHED_S
        while _pages(daemon) < pages + whole:
            if time.monotonic() > ends:
                raise TierStoreError(f"{name} saved {_pages(daemon) - pages} of {whole} pages")
            time.sleep(0.05)


def _load(
    setting: Setting, name: str, names: Sequence[str], url: str, *, source: str = "daemon"
) -> list[Pair]:
    """Have an engine load the prompts of the others, and compute one in each round."""
    savers = [each for each in names if each != name and ("TP" not in each or name.startswith("vLLM"))]
    savers += [name] if source == "S3" else []
    first = 240 if source == "daemon" else 160
    computed: list[float] = []
    loaded: dict[str, list[float]] = {each: [] for each in savers}
    with setting.engine(name, url) as answer:
        answer(prompt(3 * CHUNK, seed=249))
        for turn in range(setting.rounds):
            alone = prompt(setting.tokens + 4, seed=first - 10 * names.index(name) - turn)
            computed.append(answer(alone)[0])
            for saver in savers:
                wanted = prompt(setting.tokens + 4, seed=_seed(names.index(saver), turn))
                seconds, tokens = answer(wanted)
                if tokens < setting.tokens:
                    raise TierStoreError(f"{name} loaded {tokens} of {setting.tokens} tokens of {saver}")
                loaded[saver].append(seconds)
    return [
        Pair(
            name,
            saver,
            source,
            statistics.median(times),
            statistics.median(computed),
            statistics.median(one / other for one, other in zip(computed, times, strict=True)),
        )
        for saver, times in loaded.items()
    ]


def _daemon(folder: Path, s3: str, publish: str, ending: ExitStack) -> DaemonProcess:
    folder.mkdir()
    shared = (f"--cluster={s3}", f"--cluster-publish={publish}", "--cluster-min-tokens=64") if s3 else ()
    daemon = DaemonProcess(folder, *shared, host_bytes=GIB, disk=False)
    daemon.start()
    ending.callback(daemon.kill)
    wait_until((folder / "s.arena").exists)
    return daemon


def _published(daemon: DaemonProcess, pages: int, folder: Path, s3: str, ending: ExitStack) -> DaemonProcess:
    """Return a new daemon that knows the ``pages`` pages which ``daemon`` publishes."""
    wait_until(lambda: _counts(daemon).get("published_pages", 0) >= pages)
    fresh = _daemon(folder, s3, "none", ending)
    bundles = sum(1 for _ in Bucket(S3Address.parse(s3)).list("bundles"))
    wait_until(lambda: _counts(fresh).get("read_heads", 0) >= 2 * bundles)  # by both agents
    return fresh


def _counts(daemon: DaemonProcess) -> Mapping[str, int]:
    with Operator(daemon.url) as operator:
        cluster = operator.stats().cluster
    return cluster.counts if cluster is not None else {}


def _pages(daemon: DaemonProcess) -> int:
    with Operator(daemon.url) as operator:
        return operator.stats().store.pages


if __name__ == "__main__":
    with one_line_errors("shared_ttft"):
        typer.run(main)
