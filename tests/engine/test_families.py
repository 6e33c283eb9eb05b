"""Every family's logits against transformers' own, over pages that are given back as soon as no token can see
them, and over copies of pages. Nothing here but the model, its pools and its tables."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.portions import SOAK
from tests.tiny_models import GROUPED, LLAMA_LIKE, STATES, VARIANTS, VOCAB, reference_model
from tierstore.errors import UsageError
from tierstore.groups import GroupRule, Past
from tierstore.tiers.hbm import COMPLETED, PagePool
from tierstore_engine import build
from tierstore_engine.attention.base import NO_PAGE, Span
from tierstore_engine.build import make_runner
from tierstore_engine.loaded import LoadedModel
from tierstore_engine.settings import EngineSettings
from tierstore_engine.step import PartialStep, Step

CHUNK = 16
TOKENS = 230  # more than four windows, and more than four attention chunks
MAX_LOGIT_DIFF = 1e-4
ONE_GROUP = ("mixtral", "qwen2-moe", "qwen3-moe", "qwen3-yarn", "deepseek-v2", "deepseek-v3")
FAMILIES = (*ONE_GROUP, *GROUPED, *VARIANTS, *STATES, *LLAMA_LIKE)
CUTS = {
    "whole": (TOKENS,),
    "pages": (*range(CHUNK, TOKENS, CHUNK), TOKENS),
    "odd": (1, 2, 9, 38, 40, 97, 98, 161, 200, TOKENS),
    "decoding": (101, *range(102, 170), TOKENS),
}


class Pages:
    """A pool for each layer group, of a model."""

    def __init__(self, model: LoadedModel, num_pages: int = 40) -> None:
        self.specs = model.kv_spec(chunk_tokens=CHUNK).split()
        self.pools = [PagePool(spec, num_pages) for spec in self.specs]
        self.rules = [GroupRule.of(spec.groups[0]) for spec in self.specs]
        self.runner = make_runner(model, self.pools, EngineSettings())
        for pool in self.pools:
            self.spoil(pool, range(num_pages))

    @staticmethod
    def spoil(pool: PagePool, pages: Sequence[int]) -> None:
        """Nothing that anybody should read."""
        pool.array[list(pages)] = 0xFF  # as a number of any width: not a number

    def allocate(self, group: int) -> int:
        taken = self.pools[group].allocate(1)
        assert taken is not None
        return taken[0]

    def free(self, group: int, page: int) -> None:
        self.spoil(self.pools[group], [page])
        self.pools[group].free([page])


class Sequence_:
    """A sequence's tables. What no later token can see is given back after each step."""

    def __init__(self, pages: Pages, tokens: Sequence[int]) -> None:
        self.pages = pages
        self.tokens = tokens
        self.length = 0
        self.tables: list[list[int]] = [[] for _ in pages.pools]

    def span(self, stop: int) -> Span:
        for group, (table, rule) in enumerate(zip(self.tables, self.pages.rules, strict=True)):
            needed = 1 if rule.past is Past.STATE else -(-stop // CHUNK)
            while len(table) < needed:
                table.append(self.pages.allocate(group))
        return Span(tuple(list(table) for table in self.tables), self.length, stop)

    def computed(self, stop: int) -> None:
        self.length = stop
        for group, (table, rule) in enumerate(zip(self.tables, self.pages.rules, strict=True)):
            if rule.past in (Past.WINDOW, Past.CHUNK):
                kept = set(rule.pages(stop, CHUNK)) | {stop // CHUNK}
                for chunk, page in enumerate(table):
                    if chunk not in kept and page != NO_PAGE:
                        self.pages.free(group, page)
                        table[chunk] = NO_PAGE

    def resumed(self) -> Sequence_:
        """Another one that goes on from copies of what is left of the pages, with this one's given back."""
        other = Sequence_(self.pages, self.tokens)
        other.length = self.length
        for group, table in enumerate(self.tables):
            pool = self.pages.pools[group]
            for page in table:
                other.tables[group].append(NO_PAGE if page == NO_PAGE else self.pages.allocate(group))
                if page != NO_PAGE:
                    pool.copy_pages([(other.tables[group][-1], page)])
            for page in table:
                if page != NO_PAGE:
                    self.pages.free(group, page)
        return other


def compute(pages: Pages, work: Sequence[tuple[Sequence_, int]]) -> list[torch.Tensor]:
    """One step: each sequence up to a length. Logits of all of its new tokens."""
    spans = tuple(sequence.span(stop) for sequence, stop in work)
    tokens = [
        token
        for (one, _), span in zip(work, spans, strict=True)
        for token in one.tokens[span.start : span.stop]
    ]
    logits = pages.runner.compute(Step(spans, tokens, range(len(tokens)), COMPLETED, CHUNK))
    for sequence, stop in work:
        sequence.computed(stop)
    return list(torch.split(logits, [span.tokens for span in spans]))


@cache
def prompt(seed: int = 7, length: int = TOKENS) -> list[int]:
    return torch.randint(VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@cache
def expected(name: str, seed: int = 7, length: int = TOKENS) -> torch.Tensor:
    with torch.inference_mode():
        return reference_model(name)(torch.tensor([prompt(seed, length)]), use_cache=False).logits[0]


@pytest.fixture
def model(
    request: pytest.FixtureRequest, checkpoints: Callable[..., Path], loaded: Callable[..., LoadedModel]
) -> LoadedModel:
    return loaded(str(checkpoints(request.param)))


def close(found: torch.Tensor, right: torch.Tensor) -> None:
    assert found.shape == right.shape
    assert right.std() > 0.3  # these logits say something
    assert (found - right).abs().max() <= MAX_LOGIT_DIFF


def _whole_grid() -> list[Any]:
    """All families with all cuts. The suite tries one cut of those that are like Llama."""
    return [
        pytest.param(name, name, cuts, marks=() if name not in LLAMA_LIKE or cuts == "odd" else SOAK)
        for name in FAMILIES
        for cuts in CUTS
    ]


@pytest.mark.parametrize(("name", "model", "cuts"), _whole_grid(), indirect=["model"])
def test_logits_however_the_prompt_is_cut(name: str, model: LoadedModel, cuts: str) -> None:
    pages = Pages(model)
    one = Sequence_(pages, prompt())
    found = [compute(pages, [(one, stop)])[0] for stop in CUTS[cuts]]
    close(torch.cat(found), expected(name))
    if any(rule.past is Past.WINDOW for rule in pages.rules):
        assert NO_PAGE in one.tables[1]


@pytest.mark.parametrize(("name", "model"), [(name, name) for name in FAMILIES], indirect=["model"])
def test_one_in_a_batch_and_from_copied_pages(name: str, model: LoadedModel) -> None:
    """Two sequences in the same steps. After every third step one goes on from copies of its pages, as after
    a preemption or a hit."""
    pages = Pages(model, 60)
    one, other = Sequence_(pages, prompt()), Sequence_(pages, prompt(8))
    found: tuple[list[torch.Tensor], ...] = ([], [])
    stops = [(1, 33), (18, 34), (70, 35), (71, 120), (131, 121), (TOKENS, TOKENS)]
    for step, (stop, late) in enumerate(stops):
        for logits, computed in zip(found, compute(pages, [(one, stop), (other, late)]), strict=True):
            logits.append(computed)
        if step % 3 == 1:
            one = one.resumed()
    close(torch.cat(found[0]), expected(name))
    close(torch.cat(found[1]), expected(name, 8))


class Arriving:
    """A fence over pages whose layers arrive one by one."""

    pending = True
    layers = 0

    def wait(self, layer: int) -> None:
        assert layer < self.layers

    def arrived(self, layer: int) -> bool:
        return layer < self.layers


@pytest.mark.parametrize(
    ("name", "model"), [(name, name) for name in ("falcon-h1", "zamba2", "zamba2-plain")], indirect=["model"]
)
def test_layers_that_arrive_one_by_one(name: str, model: LoadedModel) -> None:
    """Those that are computed in one go wait for each other. Another step is computed in between."""
    pages, fence = Pages(model), Arriving()
    one, other = Sequence_(pages, prompt()), Sequence_(pages, prompt(8))
    before = compute(pages, [(one, 100)])[0]
    tokens = one.tokens[100:TOKENS]
    partial = PartialStep(Step((one.span(TOKENS),), tokens, range(len(tokens)), fence, CHUNK))
    stops, logits = [], None
    for fence.layers in range(1, model.config.layers + 1):
        stop = partial.arrived(model.config)
        if stop > partial.layers:
            logits = pages.runner.advance(partial, range(partial.layers, stop))
            partial.layers = stop
            stops.append(stop)
            compute(pages, [(other, 10 * len(stops))])
    assert len(stops) == model.config.layers - len(model.config.joined)
    assert logits is not None
    close(torch.cat((before, logits)), expected(name))


@pytest.mark.parametrize("name", ["jamba", "lfm2", "mamba"])
def test_states_without_kernels_are_refused_on_a_gpu(
    name: str, checkpoints: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "resolve_device", lambda device, dtype: "cuda")
    with pytest.raises(UsageError, match="Mamba-1 or a short convolution are computed on the CPU only"):
        build.open_model(str(checkpoints(name)))


@pytest.mark.parametrize("model", ["gemma3", "llama4"], indirect=True)
def test_a_missing_page_that_is_needed_is_noticed(model: LoadedModel) -> None:
    pages = Pages(model)
    one = Sequence_(pages, prompt())
    compute(pages, [(one, 100)])
    one.tables[1][99 // CHUNK] = NO_PAGE
    with pytest.raises((IndexError, RuntimeError)):
        compute(pages, [(one, 101)])


@pytest.mark.parametrize(
    ("name", "bits", "most"),
    [
        ("gemma3", "int8", 0.1),
        ("gemma3", "fp8_e4m3", 0.1),
        ("granite-hybrid", "int8", 0.1),
        ("zamba2", "int8", 0.1),
        ("qwen3-next", "k8v4", 0.1),
        ("deepseek-v3", "int8", 0.1),
        ("deepseek-v3", "fp8_e4m3", 0.3),  # a latent's scale is for more numbers
    ],
)
def test_quantised_pages_of_every_kind(
    name: str, bits: str, most: float, checkpoints: Callable[..., Path], loaded: Callable[..., LoadedModel]
) -> None:
    """Away from float pages by what rounding costs, and no further. States are never rounded."""
    pages = Pages(loaded(str(checkpoints(name)), kv_dtype=bits))
    one = Sequence_(pages, prompt())
    found = torch.cat([compute(pages, [(one, stop)])[0] for stop in CUTS["pages"]])
    assert any(NO_PAGE in table for table in one.tables) == (name == "gemma3")
    error = (found - expected(name)).abs()
    assert error.max() > MAX_LOGIT_DIFF
    assert error.mean() < most * expected(name).std()
