"""Opaque pages are found by their keys and whole: equal tokens under another key are another page. In the
tree, on disk after a restart, and where the client refers to a prompt it remembers."""

from __future__ import annotations

import pytest

import tierstore
from tierstore.errors import SpecError
from tierstore.index import Index, Tier
from tierstore.keys import Identity, PageKey, Prompt, encode_tokens
from tierstore.policy import POLICIES
from tierstore.spec import KVSpec

CHUNK = 16
SPEC = KVSpec.opaque(1000, chunk_tokens=CHUNK)
TOKENS = list(range(3 * CHUNK))


def keys(letter, count=3):
    return [PageKey(bytes([ord(letter), at]) * 8) for at in range(count)]


def prompt(identity, letters, tokens=TOKENS):
    return Prompt.with_keys(identity, encode_tokens(tokens), letters, chunk_tokens=CHUNK)


def pages(value):
    return [bytes([value + at]) * 1000 for at in range(3)]


def contents(store, hit):
    buffers = [bytearray(1000) for _ in range(hit.num_pages)]
    loaded = store.load(hit, buffers).wait(30)
    return [bytes(each) for each in buffers[: loaded.tokens // CHUNK]]


def check(store, identity):
    """Store a prompt under keys A, look for it under A, B, and keys that part from A after a chunk."""
    a, b = prompt(identity, keys("a")), prompt(identity, keys("b"))
    parting = prompt(identity, [*keys("a", 1), *keys("b")[1:]])
    yield store.save(a, pages(1)).wait(30) == 48
    yield store.lookup(a).tokens == 48
    yield store.lookup(b).tokens == 0
    yield store.lookup(a, max_tokens=40).tokens == 32  # never inside a page
    yield store.lookup(parting).tokens == 16
    yield store.save(b, pages(50)).wait(30) == 48
    yield contents(store, store.lookup(a)) == pages(1)
    yield contents(store, store.lookup(b)) == pages(50)
    yield contents(store, store.lookup(parting)) == pages(1)[:1]
    tokens_only = Prompt(identity, TOKENS, chunk_tokens=CHUNK)
    yield store.lookup(tokens_only).tokens == 0
    yield store.lookup(store.prompt(TOKENS)).tokens == 0


def connect(url, identity):
    store = tierstore.connect(url, SPEC, identity=identity, lookup_s=5.0)
    assert store.wait_connected(30)
    return store


def test_a_connected_store(shared_daemon):
    identity = Identity.of(SPEC, model="isolation, connected")
    with connect(shared_daemon.url, identity) as store:
        assert all(check(store, identity))


def test_an_embedded_store(tmp_path):
    identity = Identity.of(SPEC, model="isolation, embedded")
    with tierstore.open(tmp_path, SPEC, identity=identity, host_bytes=1 << 20, disk_bytes=64 << 20) as store:
        assert all(check(store, identity))
        assert store.flush(30)
    with tierstore.open(tmp_path, SPEC, identity=identity, host_bytes=1 << 20, disk_bytes=64 << 20) as store:
        a, c = prompt(identity, keys("a")), prompt(identity, keys("c"))
        assert store.lookup(c).tokens == 0  # equal tokens on disk, found by their likeness otherwise
        assert contents(store, store.lookup(a)) == pages(1)


def test_after_a_restart_of_the_daemon(make_daemon):
    identity = Identity.of(SPEC, model="isolation, restarted")
    daemon = make_daemon()
    with connect(daemon.url, identity) as store:
        assert store.save(prompt(identity, keys("a")), pages(1)).wait(30) == 48
        assert store.flush(30)
    daemon.end()
    daemon.start()
    with connect(daemon.url, identity) as store:
        assert store.lookup(prompt(identity, keys("b"))).tokens == 0
        assert store.lookup(prompt(identity, keys("a")), max_tokens=20).tokens == 16
        assert contents(store, store.lookup(prompt(identity, keys("a")))) == pages(1)


def test_a_prompt_of_the_same_tokens_is_not_referred_to_by_another_ones_path(shared_daemon):
    """The client remembers prompts by their tokens. 40 chunks, of which the second half has other keys."""
    identity = Identity.of(SPEC, model="isolation, paths")
    tokens = list(range(40 * CHUNK))
    ours = prompt(identity, keys("a", 40), tokens)
    theirs = prompt(identity, [*keys("a", 20), *keys("b", 40)[20:]], tokens)
    with connect(shared_daemon.url, identity) as store:
        assert store.save(ours, [bytes([at]) * 1000 for at in range(40)]).wait(30) == 640
        for _ in range(3):
            assert store.lookup(ours).tokens == 640
            assert store.lookup(theirs).tokens == 320
            assert store.lookup(prompt(identity, keys("b", 40), tokens)).tokens == 0


def test_in_the_tree_itself():
    index = Index([POLICIES["lru"]() for _ in Tier])
    identity = Identity.of(SPEC, model="m")
    root = index.tree.root(identity, 1000)
    page = root
    for at, key in enumerate(keys("a")):
        page = index.add(page, key, encode_tokens(TOKENS[at * CHUNK : (at + 1) * CHUNK]))
        index.add_copy(page, Tier.HOST, at, ready=True)
    assert index.tree.match(root, prompt(identity, keys("a")), 47).tokens == 32
    assert index.tree.match(root, prompt(identity, keys("b")), 48).tokens == 0


def test_an_opaque_page_has_a_size_and_nothing_else():
    assert (SPEC.page_bytes, SPEC.num_layers, SPEC.chunk_tokens) == (1000, 1, 16)
    assert Identity.of(SPEC, model="m").whole_pages
    assert not Identity.of(
        KVSpec.uniform(layers=1, kv_heads=1, head_dim=8, dtype="float32"), model="m"
    ).whole_pages
    with pytest.raises(SpecError, match="no tiles"):
        SPEC.tile(0, 0, 0)
    with pytest.raises(SpecError, match="state_bytes"):
        KVSpec.opaque(0, chunk_tokens=16)
