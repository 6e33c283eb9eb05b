"""The conformance suites of stores for embeddings and for cross attention. Use them like
:class:`~tierstore.testing.store.StoreTests`::

    class TestMine(EmbeddingTests):
        @pytest.fixture
        def open_store(self):
            ...
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tierstore import Identity, KVSpec, LayerGroup, LayerKind, Prompt, Store, UsageError
from tierstore.explanation import MissReason
from tierstore.groups import Past
from tierstore.keys import PromptInput
from tierstore.testing.clock import wait_until
from tierstore.testing.layouts import CHUNK, FULL, WINDOW, Layout
from tierstore.testing.store import OpenStore, StoreFixtures, new_identity

EMBEDDING = Layout("embedding", KVSpec.embedding(width=128, dtype="float32", rows=16))
"""An embedding whose pages have 8 KiB: 16 rows of 128 numbers."""

_CROSS = LayerGroup(LayerKind.CROSS_ATTENTION, (5, 6), 1, 32)
CROSSED = (
    Layout("full+cross", KVSpec((FULL, _CROSS), "float32", CHUNK)),
    Layout("full+window+cross", KVSpec((FULL, WINDOW, _CROSS), "float32", CHUNK)),
)
"""Models with cross attention, whose pages have 8 KiB for 16 tokens or 16 rows."""

SPEC = EMBEDDING.spec
ROWS = 70  # four full pages, and a fifth page with six rows
PAGES = CROSS_PAGES = 5
_WAIT_S = 30.0
_inputs = itertools.count()


def content(number: int) -> bytes:
    """Return the digest of input ``number``, which stands for an image, for example."""
    return hashlib.sha256(f"input {number}".encode()).digest()


def new_content() -> bytes:
    """Return the digest of an input that no test has used."""
    return content(1000 + next(_inputs))


def rows_of(digest: bytes, rows: int) -> list[bytes]:
    """Return the pages of an input's embedding. The last one is padded with zeros."""
    row_bytes = SPEC.page_bytes // SPEC.chunk_tokens
    values = np.random.default_rng(list(digest)).integers(0, 256, (rows, row_bytes))
    padded = np.zeros((-(-rows // SPEC.chunk_tokens), SPEC.page_bytes), np.uint8)
    padded.reshape(-1, row_bytes)[:rows] = values
    return [page.tobytes() for page in padded]


def save(store: Store, digest: bytes, rows: int = ROWS, *, pages: slice = slice(None)) -> int:
    """Save pages of an input's embedding. Return the number of stored pages."""
    kept = range(-(-rows // SPEC.chunk_tokens))[pages]
    data = rows_of(digest, rows)[pages]
    saved = store.save(store.embedding(digest, rows), data, first=kept.start).wait(_WAIT_S)
    return saved // SPEC.chunk_tokens


def load(store: Store, image: Prompt, *, deadline_s: float | None = None) -> list[bytes]:
    """Load an input's embedding from the store. Return the loaded pages."""
    hit = store.lookup(image)
    into = [bytearray(SPEC.page_bytes) for _ in range(hit.num_pages)]
    loaded = store.load(hit, into, deadline_s=deadline_s).wait(_WAIT_S)
    return [bytes(page) for page in into[: loaded.tokens // SPEC.chunk_tokens]]


class EmbeddingTests(StoreFixtures):
    """The requirements for embeddings in every store."""

    @pytest.fixture
    def images(self, open_store: OpenStore) -> Store:
        return open_store(EMBEDDING, identity=new_identity(SPEC))

    def test_an_embedding_comes_back_byte_for_byte(self, images: Store) -> None:
        digest = new_content()
        assert save(images, digest) == PAGES
        image = images.embedding(digest, ROWS)
        with images.lookup(image) as hit:
            assert (hit.tokens, hit.branch, hit.num_pages) == (len(image), len(image), PAGES)
            assert hit.by_tier == {"host": len(image)}
            assert hit.chunks(0) == range(PAGES)
        assert load(images, image) == rows_of(digest, ROWS)

    @pytest.mark.parametrize("rows", [1, 15, 16, 17, 32])
    def test_an_embedding_has_any_number_of_rows(self, images: Store, rows: int) -> None:
        digest = new_content()
        save(images, digest, rows)
        assert load(images, images.embedding(digest, rows)) == rows_of(digest, rows)

    @pytest.mark.parametrize("lacking", [0, 2, 4])
    def test_it_is_all_or_nothing(self, images: Store, lacking: int) -> None:
        digest = new_content()
        image = images.embedding(digest, ROWS)
        save(images, digest, pages=slice(lacking))
        save(images, digest, pages=slice(lacking + 1, PAGES))
        with images.lookup(image) as hit:
            assert (hit.tokens, hit.num_pages, dict(hit.by_tier)) == (0, 0, {})
        assert load(images, image) == []
        assert save(images, digest) == PAGES
        assert load(images, image) == rows_of(digest, ROWS)

    def test_nothing_else_is_found(self, open_store: OpenStore) -> None:
        """Look up another input, and the same input with other rows, processor, weights or tenant."""
        identity, digest = new_identity(SPEC), new_content()
        images = open_store(EMBEDDING, identity=identity)
        save(images, digest)
        others = [
            Identity.of(SPEC, model=f"{identity.model} with another processor"),
            Identity.of(SPEC, model=identity.model, revision="other weights"),
            Identity.of(SPEC, model=identity.model, tenant="b"),
        ]
        for image in (
            images.embedding(new_content(), ROWS),
            images.embedding(digest, ROWS - 1),
            images.embedding(digest, 16),
            *(Prompt.of_input(each, digest, ROWS, chunk_tokens=SPEC.chunk_tokens) for each in others),
        ):
            with images.lookup(image) as hit:
                assert hit.tokens == 0

    def test_a_second_save_keeps_one_copy(self, images: Store) -> None:
        digest = new_content()
        save(images, digest)
        used = images.stats().tiers["host"].used_bytes
        assert save(images, digest) == PAGES
        assert images.stats().tiers["host"].used_bytes == used

    def test_a_load_ends_at_its_deadline_with_all_or_nothing(self, images: Store) -> None:
        digest, rows = new_content(), 100 * SPEC.chunk_tokens
        save(images, digest, rows)
        whole = rows_of(digest, rows)
        for deadline_s in (0.0, 0.0005, 0.002, _WAIT_S):
            found = load(images, images.embedding(digest, rows), deadline_s=deadline_s)
            assert found == whole if found or deadline_s == _WAIT_S else True

    def test_it_comes_back_from_disk(self, images: Store) -> None:
        if not self.has_disk:
            pytest.skip("this store has no disk tier")
        digest = new_content()
        image = images.embedding(digest, ROWS)
        save(images, digest)
        assert images.flush(_WAIT_S)
        images.evict("host")
        with images.lookup(image) as hit:
            assert hit.by_tier == {"disk": len(image)}
            assert hit.prefetch(deadline_s=_WAIT_S).wait(_WAIT_S) == len(image)
        assert load(images, image) == rows_of(digest, ROWS)

    def test_a_full_memory_evicts_the_oldest(self, open_store: OpenStore) -> None:
        images = open_store(EMBEDDING, identity=new_identity(SPEC), host_chunks=12, disk=False)
        digests = [new_content() for _ in range(6)]
        for digest in digests:
            save(images, digest)
        found = [load(images, images.embedding(digest, ROWS)) for digest in digests]
        assert found[-1] == rows_of(digests[-1], ROWS)
        assert found[0] == []
        assert all(pages in ([], rows_of(each, ROWS)) for pages, each in zip(found, digests, strict=True))

    def test_a_pin_keeps_it(self, images: Store) -> None:
        digest = new_content()
        image = images.embedding(digest, ROWS)
        save(images, digest)
        assert images.pin(image) == len(image)
        assert images.flush(_WAIT_S)
        for tier in images.stats().tiers:
            images.evict(tier)
        assert load(images, image) == rows_of(digest, ROWS)
        assert images.unpin(image) == len(image)

    def test_a_miss_has_one_reason(self, images: Store) -> None:
        explained = images.explain(images.embedding(new_content(), ROWS), timeout_s=_WAIT_S)
        [miss] = explained.misses
        tokens = PAGES * SPEC.chunk_tokens
        assert (miss.reason, miss.first, miss.tokens) == (MissReason.NEVER_SAVED, 0, tokens)

    def test_it_stays_in_hbm(self, open_store: OpenStore) -> None:
        pools = EMBEDDING.pools(16)
        images = open_store(EMBEDDING, identity=new_identity(SPEC), pools=pools)
        digest = new_content()
        image = images.embedding(digest, ROWS)
        owned = images.allocate_hbm(PAGES)
        assert owned is not None
        EMBEDDING.write_hbm(images, 0, owned, rows_of(digest, ROWS))
        assert images.save_hbm(image, owned).wait(_WAIT_S) == len(image)
        images.release_hbm(owned)
        with images.lookup(image) as hit:
            assert hit.by_tier == {"hbm": len(image)}
        wait_until(lambda: images.evict("hbm") == 0 and images.stats().tiers["hbm"].pages == 0)
        loaded = images.load(images.lookup(image)).wait(_WAIT_S)
        assert loaded.tokens == len(image)
        assert [pools[0].array[page].tobytes() for page in loaded.pages] == rows_of(digest, ROWS)
        images.release_hbm(loaded.pages)

    def test_what_makes_no_sense_is_one_line(self, images: Store, open_store: OpenStore) -> None:
        def wrong(act: object, message: str) -> None:
            with pytest.raises(UsageError, match=message):
                act()  # type: ignore[operator]

        wrong(lambda: images.lookup([1, 2, 3]), "use Store.embedding")
        wrong(lambda: images.prompt([1, 2, 3]), "use Store.embedding")
        wrong(lambda: images.embedding(b"short", 3), "32 bytes")
        wrong(lambda: images.embedding(content(1), 0), "rows must be at least 1")
        wrong(lambda: images.embedding(content(1), 3).extend([1]), "does not grow")

    def test_any_order_of_saves_and_evictions_agrees_with_a_dictionary(self, open_store: OpenStore) -> None:
        images = open_store(EMBEDDING, identity=new_identity(SPEC), disk=False)

        @settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
        @given(
            st.lists(
                st.tuples(st.sampled_from(["save", "look", "evict"]), st.integers(0, 5), st.integers(1, 6)),
                max_size=15,
            )
        )
        def try_out(steps: Sequence[tuple[str, int, int]]) -> None:
            images.evict("host")
            first = next(_inputs) * 10
            saved: dict[int, bool] = {}
            for what, number, pages in steps:
                digest, rows = content(first + number), ROWS + number
                if what == "save":
                    save(images, digest, rows)
                    saved[number] = True
                elif what == "evict":
                    images.evict("host", pages)
                    saved = dict.fromkeys(saved, False)  # each of them may have lost a page
                else:
                    found = load(images, images.embedding(digest, rows))
                    assert found in ([], rows_of(digest, rows))
                    assert found or not saved.get(number)

        try_out()


class CrossAttentionTests(StoreFixtures):
    """The requirements for cross-attention layers in every store."""

    @pytest.fixture(params=CROSSED, ids=str)
    def crossed(self, request: pytest.FixtureRequest) -> Layout:
        layout = request.param
        assert isinstance(layout, Layout)
        return layout

    def test_a_hit_has_the_pages_of_the_inputs_before_its_end(
        self, open_store: OpenStore, crossed: Layout
    ) -> None:
        store = open_store(crossed, identity=new_identity(crossed.spec))
        prompt, tokens = prompt_with(store, new_content(), new_content())
        save_crossed(store, crossed, prompt, tokens)
        assert load_crossed(store, prompt, tokens) == len(tokens)
        assert load_crossed(store, prompt, tokens, 32) == 32
        with store.lookup(prompt, max_tokens=16) as hit:  # the hit ends before the first input
            assert hit.tokens == 16
            assert not hit.chunks(crossed.groups[-1].number)

    def test_a_missing_page_ends_the_hit_where_its_input_begins(
        self, open_store: OpenStore, crossed: Layout
    ) -> None:
        store = open_store(crossed, identity=new_identity(crossed.spec))
        prompt, tokens = prompt_with(store, new_content(), new_content())
        save_crossed(store, crossed, prompt, tokens, inputs=slice(CROSS_PAGES + 1))
        with store.lookup(prompt) as hit:
            assert (hit.tokens, hit.branch) == (32, len(tokens))
        assert load_crossed(store, prompt, tokens) == 32
        save_crossed(store, crossed, prompt, tokens)
        assert load_crossed(store, prompt, tokens) == len(tokens)

    def test_an_input_is_found_at_another_place_of_another_prompt(
        self, open_store: OpenStore, crossed: Layout
    ) -> None:
        store = open_store(crossed, identity=new_identity(crossed.spec))
        one, other = new_content(), new_content()
        prompt, tokens = prompt_with(store, one, other)
        save_crossed(store, crossed, prompt, tokens)
        group = crossed.groups[-1]
        again = store.prompt(
            [7] * 40, inputs=[PromptInput(9, new_content(), ROWS), PromptInput(20, one, ROWS)]
        )
        for number, pages in ((0, 0), (1, CROSS_PAGES)):
            with store.lookup(again.pages_of_input(group.number, number)) as hit:
                assert hit.tokens == pages * CHUNK
        with store.lookup(again) as hit:
            assert hit.tokens == 0
        for shorter in (PromptInput(9, one, ROWS - 1), PromptInput(9, one[::-1], ROWS)):
            with store.lookup(
                store.prompt([7] * 40, inputs=[shorter]).pages_of_input(group.number, 0)
            ) as hit:
                assert hit.tokens == 0
        assert store.prompt([1] * 20, inputs=[]).inputs == ()

    def test_a_prompt_without_inputs_has_no_pages_of_them(
        self, open_store: OpenStore, crossed: Layout
    ) -> None:
        store = open_store(crossed, identity=new_identity(crossed.spec))
        tokens = list(range(40))
        save_crossed(store, crossed, store.prompt(tokens), tokens)
        assert load_crossed(store, store.prompt(tokens), tokens) == len(tokens)
        with pytest.raises(UsageError, match="must lie within the prompt's 0 chunks"):
            store.save(store.prompt(tokens), [bytes(8192)], group=crossed.groups[-1].number)

    def test_inputs_that_do_not_fit_are_refused(self, open_store: OpenStore, images: Store) -> None:
        store = open_store(CROSSED[0], identity=new_identity(CROSSED[0].spec))
        for inputs, why in (
            ([(5, ROWS), (5, ROWS)], "ascending tokens of the prompt"),
            ([(20, ROWS)], "ascending tokens"),
            ([(5, 0)], "rows must be at least 1"),
        ):
            with pytest.raises(UsageError, match=why):
                store.prompt([1] * 20, inputs=[PromptInput(at, new_content(), rows) for at, rows in inputs])
        with pytest.raises(UsageError, match="has no cross-attention layers"):
            Prompt(images.identity, [1] * 20, chunk_tokens=CHUNK).place([PromptInput(5, new_content(), ROWS)])


def prompt_with(store: Store, one: bytes, other: bytes) -> tuple[Prompt, list[int]]:
    """Return a prompt of 55 tokens, with inputs at tokens 20 and 40, and its list of tokens."""
    tokens = [int.from_bytes(one[:3], "big"), *range(54)]
    return store.prompt(tokens, inputs=[PromptInput(20, one, ROWS), PromptInput(40, other, ROWS)]), tokens


def cross_pages(prompt: Prompt) -> list[bytes]:
    """Return the pages of all inputs of a prompt. A page has 8 KiB."""
    return [page for each in prompt.inputs for page in rows_of(each.content, each.rows)]


def save_crossed(
    store: Store, layout: Layout, prompt: Prompt, tokens: list[int], *, inputs: slice = slice(None)
) -> None:
    """Save all pages of a prompt's tokens, and the slice ``inputs`` of the pages of its inputs."""
    for group in layout.groups:
        crosses = group.rule.past is Past.CROSS
        data = cross_pages(prompt)[inputs] if crosses else layout.pages_of(tokens, group.number)
        assert store.save(prompt, data, group=group.number).wait(_WAIT_S) == (
            len(data) * CHUNK if crosses else len(tokens)
        )


def load_crossed(store: Store, prompt: Prompt, tokens: list[int], limit: int | None = None) -> int:
    """Load a prompt's hit and check the loaded pages of its inputs. Return the number of loaded tokens."""
    hit = store.lookup(prompt, max_tokens=limit)
    into = [[bytearray(group.page_bytes) for _ in hit.chunks(group.number)] for group in store.groups]
    loaded = store.load(hit, into).wait(_WAIT_S)
    begun = sum(each.start < loaded.tokens for each in prompt.inputs)
    assert [bytes(page) for page in into[-1]] == cross_pages(prompt)[: begun * CROSS_PAGES]
    return loaded.tokens
