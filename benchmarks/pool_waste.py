"""Simulate what a page pool wastes with Llama 3.2 Vision, whose kinds of memory have three sizes.

    python benchmarks/pool_waste.py --memory 64GiB

Self attention keeps 128 KiB for a token, cross attention 32 KiB for a row of an image, and the row itself
(the embedding) takes 8 KiB. Requests arrive as fast as the memory admits them. Each takes pages for its
prompt and its images, decodes a token per step, and leaves. Only the bookkeeping is simulated. *Waste* is the
share of the taken memory that holds nothing that a request needs.

- ``one slot``: each token and each row has a slot for all layers, as in a cache without layer groups.
- ``one page size``: each kind has pages of its own, all as large as those of self attention.
- ``two-level``: the allocator of the engine's pools (:mod:`tierstore.tiers.two_level`).

Embeddings are left out unless ``--embeddings``: the bundled engine keeps them outside the pool. Mix ``image
only`` has 43 tokens and 6,193 rows a request, without an answer. Mix ``chat`` has prompts of 1,000 tokens
(median, lognormal) and answers of 300 (mean, exponential). Half of them have an image of 1 to 4 tiles.
"""

from __future__ import annotations

import random
import statistics
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass

import typer

from tierstore.command_line import one_line_errors
from tierstore.errors import UsageError
from tierstore.sizing import PRESETS, embedding_size, group_sizes
from tierstore.tiers.large_pages import LargePages
from tierstore.tiers.two_level import books_of, check, checked_cut
from tierstore.units import parse_size
from tierstore_tools import machine, report

MODEL = "llama-3.2-11b-vision"
CHUNK = 64  # tokens or rows of a page
TILE_ROWS = 1601


@dataclass(slots=True, eq=False)
class Request:
    """A request with ``tokens`` tokens of ``total``, and images of ``rows`` rows."""

    tokens: int
    total: int
    rows: int


def image_only(_: random.Random) -> Request:
    return Request(43, 43, 6193)


def chat(draw: random.Random) -> Request:
    prompt = max(round(draw.lognormvariate(0, 1) * 1000), 16)
    rows = TILE_ROWS * draw.randint(1, 4) if draw.random() < 0.5 else 0
    return Request(prompt, prompt + max(round(draw.expovariate(1 / 300)), 1), rows)


MIXES: Mapping[str, Callable[[random.Random], Request]] = {"image only": image_only, "chat": chat}


class Pool(ABC):
    """A memory of ``nbytes`` that gives pages to requests. ``sizes`` are the bytes of a token in self
    attention, and of a row in each other kind."""

    def __init__(self, sizes: list[int], nbytes: int) -> None:
        self.sizes = sizes
        self.nbytes = nbytes
        self.taken_bytes = 0

    @abstractmethod
    def take(self, request: Request) -> bool:
        """Give a request all pages that it needs now. Return False, and change nothing for others, without
        room."""

    @abstractmethod
    def free(self, request: Request) -> None:
        """Take back all pages of a request."""

    def counts(self, request: Request) -> list[int]:
        """Return the tokens or rows of a request in each kind."""
        return [request.tokens, *[request.rows] * (len(self.sizes) - 1)]

    def needed(self, request: Request) -> int:
        return sum(size * count for size, count in zip(self.sizes, self.counts(request), strict=True))


class CountedPool(Pool):
    """A pool whose pages have one size, so that they are only counted."""

    def __init__(self, sizes: list[int], nbytes: int) -> None:
        super().__init__(sizes, nbytes)
        self._held: dict[Request, int] = {}

    def take(self, request: Request) -> bool:
        wanted = self.wanted(request)
        more = wanted - self._held.get(request, 0)
        if self.taken_bytes + more > self.nbytes:
            return False
        self._held[request] = wanted
        self.taken_bytes += more
        return True

    def free(self, request: Request) -> None:
        self.taken_bytes -= self._held.pop(request, 0)

    @abstractmethod
    def wanted(self, request: Request) -> int:
        """Return the bytes of a request's pages."""


class OneSlot(CountedPool):
    def wanted(self, request: Request) -> int:
        return -(-(request.tokens + request.rows) // CHUNK) * CHUNK * sum(self.sizes)


class OnePageSize(CountedPool):
    def wanted(self, request: Request) -> int:
        return sum(-(-count // CHUNK) for count in self.counts(request)) * CHUNK * max(self.sizes)


class TwoLevel(Pool):
    def __init__(self, sizes: list[int], nbytes: int) -> None:
        super().__init__(sizes, nbytes)
        pages = [CHUNK * size for size in sizes]
        cut = checked_cut(pages, nbytes)
        self._kinds = books_of(pages, cut, LargePages(cut.large_bytes, nbytes // cut.large_bytes))
        self._held: dict[Request, list[list[int]]] = {}

    def take(self, request: Request) -> bool:
        held = self._held.setdefault(request, [[] for _ in self._kinds])
        for kind, pages, count in zip(self._kinds, held, self.counts(request), strict=True):
            more = kind.allocate(-(-count // CHUNK) - len(pages), near=pages)
            if more is None:
                return False
            pages += more
        self._note()
        return True

    def free(self, request: Request) -> None:
        for kind, pages in zip(self._kinds, self._held.pop(request, [[] for _ in self._kinds]), strict=True):
            kind.free(pages)
        self._note()

    def _note(self) -> None:
        if not self._held:
            check(self._kinds)
        large = self._kinds[0].large_pages.large_bytes
        self.taken_bytes = large * sum(kind.taken for kind in self._kinds)


POOLS: Mapping[str, type[Pool]] = {"one slot": OneSlot, "one page size": OnePageSize, "two-level": TwoLevel}


@dataclass(frozen=True)
class Waste:
    """Means over the steps: requests at a time, and the wasted share of what is taken."""

    mix: str
    kinds: int
    pool: str
    requests: float
    waste: float


def main(
    memory: str = "64GiB", steps: int = 500, seed: int = 1, embeddings: bool = False, json: str | None = None
) -> None:
    """Simulate what page pools waste with Llama 3.2 Vision, in MEMORY, over STEPS steps."""
    report.require_targets(json)
    if steps < 10:
        raise UsageError(f"--steps must be at least 10, got {steps}")
    sizes = list(kind_sizes())[: 3 if embeddings else 2]
    found = [simulate(mix, pool, sizes, parse_size(memory), steps, seed) for mix in MIXES for pool in POOLS]
    lines = [(each.mix, each.pool, f"{each.requests:.0f}", f"{each.waste:.1%}") for each in found]
    title = f"{MODEL}, {memory}, {len(sizes)} kinds"
    report.table(title, ("mix", "pool", "requests", "waste"), lines, to_stderr=json == "-")
    document = {"machine": machine.describe(), "memory": memory, "steps": steps, "seed": seed}
    report.write_json({**document, "rows": [asdict(each) for each in found]}, json)


def kind_sizes() -> Iterator[int]:
    """Yield the bytes of a token in self attention, and of a row in cross attention and as an embedding."""
    for group in group_sizes(PRESETS[MODEL]):
        yield int(group.token_bytes or group.row_bytes)
    embedding = embedding_size(PRESETS[MODEL])
    assert embedding is not None
    yield embedding.row_bytes


def simulate(mix: str, pool: str, sizes: list[int], nbytes: int, steps: int, seed: int) -> Waste:
    """Serve ``steps`` steps. The first fifth is not counted. Raise :class:`UsageError` if no request fits."""
    draw, memory = random.Random(seed), POOLS[pool](sizes, nbytes)
    running: list[Request] = []
    waiting = MIXES[mix](draw)
    counts, shares = list[int](), list[float]()
    for step in range(steps):
        while memory.take(waiting):
            running.append(waiting)
            waiting = MIXES[mix](draw)
        memory.free(waiting)
        if not running:
            raise UsageError(f"--memory has no room for a request of mix {mix!r}")
        if step >= steps // 5:
            counts.append(len(running))
            shares.append(1 - sum(map(memory.needed, running)) / memory.taken_bytes)
        for request in list(running):
            request.tokens += 1
            if request.tokens > request.total or not memory.take(request):  # it ends, or gives way
                running.remove(request)
                memory.free(request)
    return Waste(mix, len(sizes), pool, statistics.fmean(counts), statistics.fmean(shares))


if __name__ == "__main__":
    with one_line_errors("pool_waste"):
        typer.run(main)
