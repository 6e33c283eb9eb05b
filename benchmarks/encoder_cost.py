"""Simulate what the worth of embeddings saves in eviction (``LayerGroup.worth``).

    python benchmarks/encoder_cost.py

Chats fill the host tier with KV and embeddings, and the default policy evicts, with the worth and without it.
An image comes behind 200 tokens of its chat, so another chat about the same image reuses its embedding but no
KV. Images have a popularity (Zipf). A turn whose KV was evicted computes it, and it needs the embedding only
if the hit ends before the image's end. Only the bookkeeping is simulated, with the store's index and policy.
In mix ``chats``, four of ten chats have an image, with 2 to 12 turns of 500 tokens (median). In mix
``questions``, nine of ten have one, with 1 to 3 turns of 100 tokens.

Work is given in *tokens*: the KV of a token is 1, and a row of an embedding takes as many as its bytes and
the operations for a byte say (:func:`tierstore.sizing.embedding_worth`). Work that no cache can spare (new
text, and the first use of an image) is left out.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import accumulate

import typer

from tierstore.command_line import one_line_errors
from tierstore.errors import UsageError
from tierstore.index import Index, Page, Tier
from tierstore.keys import Identity, PageKey
from tierstore.policy import FrequencyAgedLRU
from tierstore.spec import MOST_WORTH, KVSpec
from tierstore.units import format_size, parse_size
from tierstore_tools import machine, report

CHUNK = 64  # tokens or rows of a page
IMAGES = 3000
OPEN_CHATS = 200
BEFORE = 200  # tokens before an image


@dataclass(frozen=True)
class VisionModel:
    """Bytes of a token's KV and of a row, rows of an image, and operations for a byte of a row by those for a
    byte of KV."""

    token_bytes: int
    row_bytes: int
    rows: int
    ratio: float

    @property
    def worth(self) -> int:
        return min(max(round(math.log2(self.ratio)), 0), MOST_WORTH)

    @property
    def image_work(self) -> float:
        """The work of an image in tokens."""
        return self.rows * self.row_bytes * self.ratio / self.token_bytes


MODELS = {
    "gemma-3-4b": VisionModel(139_264, 5120, 256, 90.3),
    "gemma-3-27b": VisionModel(507_904, 10_752, 256, 19.7),
    "qwen2.5-vl-7b": VisionModel(57_344, 7168, 1024, 3.3),
}


@dataclass(frozen=True)
class Mix:
    """The share of chats with an image, the range of their turns, and the median tokens of a turn."""

    images: float
    turns: tuple[int, int]
    tokens: int


MIXES = {"chats": Mix(0.4, (2, 12), 500), "questions": Mix(0.9, (1, 3), 100)}


@dataclass(slots=True)
class Chat:
    """A chat of ``tokens`` tokens, of which ``saved`` were in its last turn."""

    number: int
    image: int | None
    turns: int
    tokens: int
    saved: int = 0


def chats(mix: Mix, rows: int, seed: int) -> Iterator[Chat]:
    """Yield the chat of each turn, with the length of its prompt."""
    draw = random.Random(seed)
    popularity = list(accumulate(1 / rank for rank in range(1, IMAGES + 1)))
    under_way: list[Chat] = []
    for number in itertools.count():
        image = draw.choices(range(IMAGES), cum_weights=popularity)[0] if draw.random() < mix.images else None
        begun = 0 if image is None else BEFORE + rows
        under_way.append(Chat(number, image, draw.randint(*mix.turns), begun))
        while len(under_way) >= OPEN_CHATS:
            # Chats with a recent turn continue sooner than others.
            chat = under_way.pop(-1 - min(int(draw.expovariate(1 / 60)), OPEN_CHATS - 1))
            chat.tokens += round(draw.lognormvariate(0, 0.7) * mix.tokens)
            yield chat
            chat.turns -= 1
            chat.saved = chat.tokens // CHUNK * CHUNK
            if chat.turns:
                under_way.append(chat)


class Host:
    """A host tier of ``capacity`` bytes, with the store's index and default policy."""

    def __init__(self, capacity: int) -> None:
        self._index = Index([FrequencyAgedLRU() for _ in Tier])
        self._free = capacity

    def root(self, spec: KVSpec) -> Page:
        """Return the page before all pages of a layout."""
        return self._index.tree.root(Identity.of(spec, model="m"), spec.page_bytes)

    def serve(self, root: Page, names: list[bytes]) -> int:
        """Look up a chain of pages, and save the missing ones. Return how many were held."""
        pages = self._index.tree.descend(root, [PageKey(name) for name in names], b"".join(names), 16)
        held = len(pages)
        self._index.touch(pages, hit=True)
        for name in names[held:]:
            pages.append(self._save(pages[-1] if pages else root, name))
        self._index.touch(pages[held:], hit=False)
        self._evict()
        return held

    def serve_embedding(self, root: Page, names: list[bytes]) -> bool:
        """Look up an embedding, and save it if a page is missing. Return whether it was held."""
        known = [root.children.get(PageKey(name)) for name in names]
        held = None not in known
        pages = [page or self._save(root, name) for page, name in zip(known, names, strict=True)]
        self._index.touch_named({page: at for at, page in enumerate(pages)}, hit=held)
        self._evict()
        return held

    def _save(self, parent: Page, name: bytes) -> Page:
        page = self._index.add(parent, PageKey(name), name)
        self._index.add_copy(page, Tier.HOST, 0, ready=True)
        self._free -= page.nbytes
        return page

    def _evict(self) -> None:
        while self._free < 0:
            victim = self._index.victim(Tier.HOST)
            assert victim is not None, "no page may leave"
            self._free += victim.nbytes
            self._index.drop_copy(victim, Tier.HOST)


@dataclass(frozen=True)
class CostRow:
    """The mean work of a turn that a larger cache would have spared, and the share of it that is images."""

    mix: str
    model: str
    capacity_bytes: int
    worth: int
    work_tokens: float
    image_share: float


def simulate(mix: str, name: str, capacity: int, worth: int, count: int, seed: int) -> CostRow:
    """Serve ``count`` turns. The first fifth is not counted."""
    model, host = MODELS[name], Host(capacity)
    text = host.root(KVSpec.opaque(CHUNK * model.token_bytes, chunk_tokens=CHUNK))
    spec = KVSpec.embedding(width=model.row_bytes, dtype="int8", rows=CHUNK, worth=worth)
    embeddings = host.root(spec)
    seen, work, images = set[int](), 0.0, 0.0
    for at, chat in enumerate(itertools.islice(chats(MIXES[mix], model.rows, seed), count)):
        names = [b"%8d%8d" % (chat.number, page) for page in range(chat.tokens // CHUNK)]
        held = host.serve(text, names) * CHUNK
        again = max(chat.saved - held, 0)
        image = 0.0
        if chat.image is not None and held < BEFORE + model.rows:
            rows = [b"image%5d%6d" % (chat.image, page) for page in range(model.rows // CHUNK)]
            if not host.serve_embedding(embeddings, rows) and chat.image in seen:
                image = model.image_work
            seen.add(chat.image)
        if at >= count // 5:
            work += again + image
            images += image
    counted = count - count // 5
    return CostRow(mix, name, capacity, worth, work / counted, images / work if work else 0.0)


def main(capacities: str = "16GiB,64GiB", turns: int = 8000, seed: int = 1, json: str | None = None) -> None:
    """Simulate the default policy without and with the worth of embeddings, at each of CAPACITIES."""
    report.require_targets(json)
    if turns < 100:
        raise UsageError(f"--turns must be at least 100, got {turns}")
    rows, lines = [], []
    sizes = [parse_size(capacity) for capacity in capacities.split(",")]
    for mix, (name, model), capacity in itertools.product(MIXES, MODELS.items(), sizes):
        pair = [simulate(mix, name, capacity, worth, turns, seed) for worth in (0, model.worth)]
        rows += pair
        less = 1 - pair[1].work_tokens / pair[0].work_tokens if pair[0].work_tokens else 0.0
        shown = (f"{each.work_tokens:,.0f} ({each.image_share:.0%})" for each in pair)
        lines.append((mix, name, format_size(capacity), *shown, f"{less:.1%}"))
    title = f"tokens of work a turn that were computed before (images), {turns:,} turns"
    columns = ("mix", "model", "capacity", "without", "with worth", "less")
    report.table(title, columns, lines, to_stderr=json == "-")
    document = {"machine": machine.describe(), "turns": turns, "seed": seed}
    report.write_json({**document, "rows": [asdict(row) for row in rows]}, json)


if __name__ == "__main__":
    with one_line_errors("encoder_cost"):
        typer.run(main)
