"""Features of the engine together: rows that have every pair of values of ``matrix.AXES``.

Each row answers a prompt cold, and again from the store, as the command's options say. Tokens are those of an
engine without any of the features. What is refused is refused when the engine starts.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import combinations, product
from pathlib import Path

import numpy as np
import pytest

from tests.engine.matrix import (
    AXES,
    DOCUMENT,
    FAMILIES,
    PICTURED,
    REFUSED,
    Pair,
    Row,
    all_pairs,
    documented,
    spread,
)
from tests.engine.pictured import picture, write_draft, write_folder
from tests.portions import chosen
from tests.tierstore.cluster.hosts import Host
from tierstore import native
from tierstore.errors import TierStoreError
from tierstore.testing.clock import wait_until
from tierstore.testing.processes import DaemonProcess
from tierstore.types import Hint, Promise
from tierstore_connectors.bundled import StoreConnector
from tierstore_engine.build import load_model, open_model_of
from tierstore_engine.calibration import measure_ranges, write_ranges
from tierstore_engine.engine import Engine
from tierstore_engine.images import PromptImage, PromptImages
from tierstore_engine.opening import open_draft, open_engine
from tierstore_engine.options import ServeOptions
from tierstore_engine.outputs import Completion, RequestId
from tierstore_engine.pool_sizes import pages_wanted
from tierstore_engine.presets import preset
from tierstore_engine.sampling import SamplingParams

from .test_meeting import FixedPlanner
from .test_oracle import MAX_LOGIT_DIFF

TOKENS = 541  # longer than every preset's window
MEETING = 128  # where loading meets computing
ELSEWHERE = Hint(elsewhere=True)
# Four tokens are so likely that answers repeat themselves, which is what prompt lookup drafts from.
ANSWER = SamplingParams(
    max_new_tokens=24,
    temperature=1.0,
    seed=5,
    ignore_eos=True,
    keep_logits=True,
    logit_bias=dict.fromkeys((65, 66, 67, 68), 50.0),
)
MAX_QUANTISED_DIFF = 0.05  # a number at the border of two codes may move by a step
OTHER_EXPERTS = 4  # tokens of an answer whose experts such a step may change
TIERS = {"pool": "hbm", "host": "host", "disk": "disk"}
DRAFTS = {"none": None, "lookup": "prompt-lookup", "mtp": "mtp"}

ROWS = all_pairs()
NORMAL = spread(ROWS, 16)  # the other rows are for the soak


@dataclass
class Rig:
    """Starts the engines of one row."""

    row: Row
    folder: Path
    urls: tuple[str, str] | None  # of the daemons of the first and the second engine
    scales: str
    model: str
    draft: str  # a model that drafts for it
    engines: list[Engine]

    def options(self, place: int) -> ServeOptions:
        """Return the options of the first or the second engine."""
        row = self.row
        store: str | None = str(self.folder / f"store{place if row['handover'] == 'yes' else 0}")
        if self.urls is not None:
            store = self.urls[place]
        elif row["store"] == "pool":
            store = None
        return replace(
            self.plain(),
            store=store,
            no_prefix_cache=False,
            draft={**DRAFTS, "model": self.draft, "alike": self.model}[row["draft"]],
            plan=row["plan"],
            tensor_parallel=int(row["ranks"]),
            sequence_parallel=int(row["parts"]),
        )

    def plain(self) -> ServeOptions:
        """Return the options of an engine that computes the same model without any other feature."""
        static = self.row["kv"] == "static"
        return ServeOptions(
            model=self.model,
            device="cpu",
            no_prefix_cache=True,
            kv_dtype="int8" if static else self.row["kv"],
            kv_scales=self.scales if static else "dynamic",
            deterministic=self.row["deterministic"] == "yes",
            chunk_tokens=16,
            prefill_chunk=64,
            max_sequences=8,
            hbm_bytes=8 << 20,
            host_bytes=32 << 20,
            disk_bytes=64 << 20,
        )

    def start(self, options: ServeOptions) -> Engine:
        """Start an engine as ``tierstore-engine serve`` does."""
        opened, settings = open_model_of(options), options.settings()
        spec = opened.config.kv_spec(chunk_tokens=options.chunk_tokens)
        pages = pages_wanted(options, opened.device, spec, settings)
        draft = open_draft(options, pages)
        engine = open_engine(options, opened, draft, pages=pages, settings=settings)
        self.engines.append(engine)
        if options.plan == "both-ends" and isinstance(engine.connector, StoreConnector):
            engine.connector.store.planner = FixedPlanner(MEETING)
        return engine

    def end(self, engine: Engine) -> None:
        """Close an engine after seeing that no page of it is missing."""
        self.engines.remove(engine)
        if not engine.has_work:
            settle(engine)
            for group, pool in enumerate(engine.connector.pools):
                assert engine.connector.available(group=group) == pool.capacity
        engine.close()


def settle(engine: Engine) -> None:
    """Wait until everything that was saved is where it belongs."""
    if isinstance(engine.connector, StoreConnector):
        assert engine.connector.store.flush(60)


def images_in(engine: Engine) -> list[PromptImage]:
    """Return images within the first tokens of a prompt, if the model takes any."""
    vision = engine.vision
    if vision is None:
        return []
    return [vision.embed(vision.process(picture(start)), start) for start in (70, 300)]


def answers(
    engine: Engine, prompt: Sequence[int], n: int, *, parked: bool = False, promise: Promise | None = None
) -> list[Completion]:
    """Return ``n`` completions. With ``parked`` the last one loses its pages in the middle."""
    ids = [engine.add(prompt, ANSWER, promise=promise, images=images_in(engine))]
    assert ANSWER.seed is not None
    ids += [engine.fork(ids[0], seed=ANSWER.seed + number) for number in range(1, n)]
    found: dict[RequestId, Completion] = {}
    while len(found) < n:
        found.update((each.request_id, each.completion) for each in engine.step() if each.completion)
        if parked and engine.computed_tokens(ids[-1]) > len(prompt) + 3:
            engine._scheduler._park()
            engine._keeper.evict_idle()
            parked = False
    return [found[each] for each in ids]


def check_equal(found: Completion, expected: Completion, row: Row) -> None:
    """The tokens are the same. With quantised KV, logits may differ by a rounding that a draw is just at. In
    a mixture of experts another code can change the experts of a few tokens, whose logits then differ by
    more. Parts sum in another order than one rank, so there are more such tokens with them."""
    assert found.logits is not None
    assert expected.logits is not None
    quantised = row["kv"] != "auto"
    most = MAX_QUANTISED_DIFF if quantised else MAX_LOGIT_DIFF
    mixture = row["family"] not in PICTURED and preset(FAMILIES[row["family"]]).experts is not None
    others = 0
    if quantised and mixture:
        others = len(found.tokens) // 3 if row["parts"] == "2" else OTHER_EXPERTS
    for place, (token, wanted) in enumerate(zip(found.tokens, expected.tokens, strict=True)):
        difference = np.abs(found.logits[place] - expected.logits[place]).max()
        if row["deterministic"] == "yes":
            assert difference == 0
        elif difference > most:
            assert others > 0, difference
            others -= 1
        if token != wanted:
            assert quantised
            assert difference > 0
            return


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Host]]:
    pool = tmp_path_factory.mktemp("pool")
    hosts = [Host(f"fake://{pool}", "--host-bytes=64MiB", "--cluster-publish=all") for _ in range(2)]
    for host in hosts:
        host.wait_online()
    yield hosts
    for host in hosts:
        host.close()


@pytest.fixture(scope="module")
def calibrated(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Calibrates a preset, once."""

    @cache
    def make(name: str) -> Path:
        file = tmp_path_factory.mktemp("scales") / "scales.json"
        model = load_model(name, device="cpu")
        write_ranges(model.config, measure_ranges(model, list(range(250)) * 2), file)
        return file

    return make


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[str, str]]:
    """Returns the model of a family, and another one with its vocabulary. It makes their folders once, if
    they are no presets."""

    @cache
    def make(family: str) -> tuple[str, str]:
        if family not in PICTURED:
            return FAMILIES[family], "tiny"
        folder = tmp_path_factory.mktemp("models")
        model, draft = write_folder(FAMILIES[family], folder / "model"), write_draft(folder / "draft")
        return str(model), str(draft)

    return make


@pytest.fixture
def rig(
    request: pytest.FixtureRequest,
    row: Row,
    tmp_path: Path,
    calibrated: Callable[[str], Path],
    models: Callable[[str], tuple[str, str]],
) -> Iterator[Rig]:
    urls = None
    if row["store"] == "daemon":
        daemon: DaemonProcess = request.getfixturevalue("shared_daemon")
        urls = daemon.url, daemon.url
    if row["store"] == "other host":
        one, other = request.getfixturevalue("hosts")
        urls = one.url, other.url
    model, draft = models(row["family"])
    scales = str(calibrated(model)) if row["kv"] == "static" else "dynamic"
    rig = Rig(row, tmp_path, urls, scales, model, draft, [])
    yield rig
    for engine in list(rig.engines):
        rig.end(engine)


@pytest.mark.parametrize("row", chosen(ROWS, *NORMAL), ids=str)
def test_features_together(row: Row, rig: Rig) -> None:
    if row["deterministic"] == "yes" and native.DECODE is None:
        pytest.skip("--deterministic needs the compiled part")
    draw = random.Random(str(row))
    prompt, n = [draw.randrange(250) for _ in range(TOKENS)], int(row["n"])
    expected = answers(rig.start(rig.plain()), prompt, n)
    first = rig.start(rig.options(0))
    promise, handed = None, row["handover"] == "yes"
    if handed:
        asked = replace(ANSWER, max_new_tokens=1)
        request = first.add(prompt, asked, hint=ELSEWHERE, images=images_in(first))
        done = next(each for output in iter(first.step, None) for each in output if each.finished).completion
        assert done is not None
        assert done.request_id == request
        assert done.tokens == expected[0].tokens[:1]
        # Without a daemon no other engine can find the pages, and the engine says so.
        assert bool(done.submitted_tokens) == (rig.urls is not None)
        promise = Promise(done.submitted_tokens, 10.0) if done.submitted_tokens else None
    else:
        for found, wanted in zip(answers(first, prompt, n), expected, strict=True):
            check_equal(found, wanted, row)
    settle(first)
    second = again(rig, first, prompt)
    warm = answers(second, prompt, n, parked=row["parked"] == "yes", promise=promise)
    for found, wanted in zip(warm, expected, strict=True):
        check_equal(found, wanted, row)
    assert sum(each.metrics.preemptions for each in warm) == (row["parked"] == "yes")
    assert bool(second.stats().drafted_tokens) == (row["draft"] != "none")
    reused = warm[0].metrics.reused_by_tier
    if not handed:
        assert reused.get(TIERS.get(row["store"], "host"))
    assert bool(sum(reused.values())) == (not handed or rig.urls is not None)


def again(rig: Rig, first: Engine, prompt: Sequence[int]) -> Engine:
    """Return the engine that answers from the tier that the row is about."""
    kind = rig.row["store"]
    if rig.row["handover"] == "yes" or kind == "daemon":
        return rig.start(rig.options(1))
    if kind == "pool":
        return first
    if kind == "host":
        first._keeper.evict_idle()
        return first
    if kind == "disk":
        rig.end(first)
        return rig.start(rig.options(1))
    second = rig.start(rig.options(1))
    store = second.connector
    assert isinstance(store, StoreConnector)

    images = images_in(second)
    placed = PromptImages(prompt, images)
    wanted = store.store.prompt(placed.words, inputs=placed.inputs)

    def published() -> bool:
        with store.store.lookup(wanted, counted=False) as hit:
            return hit.tokens + hit.remote_tokens >= TOKENS // 64 * 64

    wait_until(published)
    return second


# -- refusals ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("pair", REFUSED, ids=lambda pair: "-".join(value for _, value in pair))
def test_refused_together(
    pair: Pair,
    tmp_path: Path,
    calibrated: Callable[[str], Path],
    models: Callable[[str], tuple[str, str]],
) -> None:
    values = dict(pair)
    if values.get("draft") == "mtp":
        values.setdefault("family", "latents")  # no other kind of model gets so far
    row = Row.of(**values, store="host")
    scales = str(tmp_path / "scales.json")
    if row["kv"] == "static" and row["family"] not in ("states", "crossed images"):
        scales = str(calibrated(models(row["family"])[0]))
    rig = Rig(row, tmp_path, None, scales, *models(row["family"]), [])
    sentence = re.escape(REFUSED[pair].sentence).replace(r"\{\}", ".*")
    with pytest.raises(TierStoreError, match=f"^{sentence}"):
        rig.start(rig.options(0))


def test_the_normal_rows_have_every_value() -> None:
    assert {item for row in NORMAL for item in row.items} == {item for row in ROWS for item in row.items}


def test_the_rows_have_every_pair() -> None:
    rows = all_pairs()
    assert all(row.works for row in rows)
    seen = {pair for row in rows for pair in row.pairs}
    for one, other in combinations(AXES, 2):
        for value, with_ in product(AXES[one], AXES[other]):
            pair = (one, value), (other, with_)
            assert (pair in seen) != (pair in REFUSED)


def test_the_document_has_the_table() -> None:
    text = DOCUMENT.read_text()
    assert documented(text) == text, "run python -m tests.engine.matrix"
