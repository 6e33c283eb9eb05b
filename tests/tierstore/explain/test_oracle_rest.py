"""Planted causes that need more than a store: damage, speed, other hosts, a daemon that does not answer."""

from __future__ import annotations

import random
import signal
import time

import pytest

from tests.small_store import SPEC, pages_of
from tests.tierstore.cluster.hosts import Host, published
from tests.tierstore.store.grouped_model import CHUNK, GEMMA, HYBRID, Engine
from tests.tierstore.tiers.disk.test_damage import overwrite
from tierstore import Identity, KVSpec, LayerGroup, LayerKind
from tierstore.explanation import MissReason as R
from tierstore.testing.clock import wait_until
from tierstore.testing.opening import connect_store, open_store
from tierstore.testing.store import new_identity

TIMES = 8
_MIB = 1 << 20


def prompts(seed=0, chunks=6):
    draw = random.Random(seed)
    for _ in range(TIMES):
        yield [draw.randrange(1 << 17) for _ in range(chunks * SPEC.chunk_tokens)]


def spans(explanation):
    return [(miss.reason, miss.first, miss.tokens) for miss in explanation.misses]


def test_damaged_on_disk(tmp_path):
    """The page that was changed is damaged. Those behind it cannot be found any more, for the same reason."""
    with open_store(
        tmp_path / "kv",
        SPEC,
        identity=new_identity(),
        host_bytes=_MIB,
        disk_bytes=32 * _MIB,
        inline_bytes=0,
    ) as store:
        for number, tokens in enumerate(prompts()):
            store.save(tokens, pages_of(tokens)).wait(30)
            assert store.flush(30)
            store.evict("host")
            chunk = number % 6
            file = tmp_path / "kv" / "extents" / "000000"
            page = pages_of(tokens)[chunk]
            overwrite(file, file.read_bytes().index(page) + 100, bytes([page[100] ^ 1]))
            hit = store.lookup(tokens)
            assert hit.tokens == len(tokens)
            buffers = [bytearray(SPEC.page_bytes) for _ in range(hit.num_pages)]
            before = chunk * SPEC.chunk_tokens
            assert store.load(hit, buffers).wait(30).tokens == before
            explanation = store.explain(tokens)
            assert spans(explanation) == [(R.DAMAGED, before, len(tokens) - before)]


def test_computing_is_faster(tmp_path):
    with open_store(
        tmp_path / "kv", SPEC, identity=new_identity(), host_bytes=_MIB, disk_bytes=32 * _MIB
    ) as store:
        for tokens in prompts():
            store.save(tokens, pages_of(tokens)).wait(30)
            assert store.flush(30)
            store.evict("host")
            store.computed(100_000, 0, 1e-6)
            store.planner.moved("disk", 1e3, 10.0, now_s=time.monotonic())
            explanation = store.explain(tokens)
            assert spans(explanation) == [(R.DECLINED, 0, len(tokens))]
            assert explanation.misses[0].tier == "disk"
            assert explanation.by_tier == {"disk": len(tokens)}


def test_two_causes_at_once(tmp_path):
    """The end of a prompt was evicted, another prompt diverges before it, and the rest is new."""
    with open_store(None, SPEC, identity=new_identity(), host_bytes=8 * _MIB, disk_bytes=_MIB) as store:
        for number, tokens in enumerate(prompts(chunks=10)):
            store.save(tokens, pages_of(tokens)).wait(30)
            store.evict("host", 3)
            held = 7 * SPEC.chunk_tokens
            longer = [*tokens, *range(900_000, 900_040)]
            assert spans(store.explain(longer)) == [(R.EVICTED, held, 48), (R.NEVER_SAVED, 160, 40)]
            at = 5 + number
            other = [*tokens[:at], 1_000_000, *tokens[at + 1 :]]
            explanation = store.explain(other)
            assert spans(explanation) == [(R.DIVERGED, at, 160 - at)]
            store.evict("host")


def test_another_identity_and_a_new_end(tmp_path):
    """Over a restart, so that the other identity is only known from the disk."""
    first = Identity.of(SPEC, model="m", revision="1")
    second = Identity.of(SPEC, model="m", revision="2")

    def open_(identity):
        return open_store(tmp_path / "kv", SPEC, identity=identity, host_bytes=_MIB, disk_bytes=32 * _MIB)

    for tokens in list(prompts())[:4]:
        with open_(first) as store:
            store.save(tokens, pages_of(tokens)).wait(30)
            assert store.flush(30)
        with open_(second) as store:
            explanation = store.explain([*tokens, 1, 2, 3])
            assert spans(explanation) == [(R.OTHER_IDENTITY, 0, 96), (R.NEVER_SAVED, 96, 3)]
            assert explanation.misses[0].fields == ("revision",)


@pytest.mark.parametrize("model", [GEMMA, HYBRID], ids=["windows", "states"])
def test_a_save_point_is_superseded(model, tmp_path):
    with Engine(model, tmp_path, pages=400, checkpoint_tokens=16 * CHUNK) as engine:
        for number, tokens in enumerate(prompts(chunks=12)):
            session, first, second = f"s{number}", 5 * CHUNK, 11 * CHUNK
            for before, end in ((0, first), (first, second)):
                prompt = engine.store.prompt(tokens[:end])
                with engine.store.lookup(prompt, max_tokens=end - 1) as hit:
                    assert hit.tokens == before
                engine.save_to(tokens[:end], end, prompt=prompt, session=session)
            engine.store.flush(30)
            asked = [*tokens[: first + 5], *range(500_000, 500_040)]
            explanation = engine.store.explain(asked)
            group = explanation.misses[0]
            assert (group.reason, group.cause, group.first) == (R.GROUP, R.SUPERSEDED, 0)
            assert group.group == 1
            assert group.end == first
            engine.store.evict("host")
            engine.store.evict("disk")
            engine.store.evict("hbm")


def test_another_host_has_it(tmp_path):
    directory = tmp_path / "pool"
    directory.mkdir()
    hosts = [Host(f"fake://{directory}") for _ in range(2)]
    try:
        for host in hosts:
            host.wait_online()
        for number in range(3):
            tokens = list(range(10_000 * number, 10_000 * number + 128))
            hosts[0].save(tokens)
            published(hosts[0], 8 * (number + 1))
            with hosts[1].store() as store:
                wait_until(lambda tokens=tokens, store=store: store.lookup(tokens).remote_tokens == 128)
                assert spans(store.explain([*tokens, 7])) == [(R.OTHER_HOST, 0, 128), (R.NEVER_SAVED, 128, 1)]
    finally:
        for host in hosts:
            host.close()


def test_a_daemon_that_does_not_answer(make_daemon):
    daemon = make_daemon(disk=False)
    with connect_store(daemon.url, SPEC, identity=new_identity(), lookup_s=5.0) as store:
        assert store.wait_connected(30)
        tokens = next(prompts())
        store.save(tokens, pages_of(tokens)).wait(30)
        assert spans(store.explain(tokens)) == []
        daemon.signal(signal.SIGSTOP)
        try:
            explanation = store.explain(tokens, timeout_s=0.5)
        finally:
            daemon.signal(signal.SIGCONT)
        assert spans(explanation) == [(R.LATE, 0, len(tokens))]
        assert "did not answer" in str(explanation)


def test_a_page_that_is_being_saved(make_daemon):
    """Another client has reserved room for it, and has not committed it."""
    daemon = make_daemon(disk=False)
    identity = new_identity()
    with (
        connect_store(daemon.url, SPEC, identity=identity, lookup_s=5.0) as store,
        connect_store(daemon.url, SPEC, identity=identity, lookup_s=5.0) as saver,
    ):
        assert store.wait_connected(30)
        assert saver.wait_connected(30)
        for tokens in prompts():
            request = saver._finder.single(tokens)[1]
            reservation = saver.backend.reserve(request, 0, 6).wait(30)
            assert reservation is not None
            explanation = store.explain(tokens)
            assert spans(explanation) == [(R.LATE, 0, len(tokens))]
            assert explanation.misses[0].why == "the page is being saved"
            saver.backend.abort(reservation)
            wait_until(lambda tokens=tokens: store.explain(tokens).misses[0].reason is R.NEVER_SAVED)


def test_one_of_two_groups_that_need_every_token_lacks_pages(tmp_path):
    spec = KVSpec(
        (
            LayerGroup(LayerKind.FULL_ATTENTION, (0,), 1, 32),
            LayerGroup(LayerKind.FULL_ATTENTION, (1,), 2, 32),
        ),
        "float32",
        SPEC.chunk_tokens,
    )
    with open_store(None, spec, identity=new_identity(spec), host_bytes=8 * _MIB, disk_bytes=_MIB) as store:
        for number, tokens in enumerate(prompts(chunks=8)):
            short = (number % 7 + 1) * SPEC.chunk_tokens
            for group in store.groups:
                count = 8 if group.number == 0 else short // SPEC.chunk_tokens
                store.save(tokens, [bytes(group.page_bytes)] * count, group=group.number).wait(30)
            explanation = store.explain([*tokens, 1, 2, 3])
            assert explanation.hit_tokens == short
            assert spans(explanation) == [
                (R.GROUP, short, len(tokens) - short),
                (R.NEVER_SAVED, len(tokens), 3),
            ]
            assert (explanation.misses[0].group, explanation.misses[0].cause) == (1, R.NEVER_SAVED)


def test_a_long_prompt_that_was_evicted(tmp_path):
    """Only its first pages are examined one by one."""
    tokens = list(range(2000 * SPEC.chunk_tokens + 5))
    with open_store(
        None, SPEC, identity=new_identity(), host_bytes=2100 * SPEC.page_bytes, disk_bytes=_MIB
    ) as store:
        page = bytes(SPEC.page_bytes)
        assert store.save(tokens, [page] * 2001).wait(60) == len(tokens)
        assert store.evict("host") == 2001
        assert spans(store.explain([*tokens[:-5], 1])) == [
            (R.EVICTED, 0, len(tokens) - 5),
            (R.NEVER_SAVED, len(tokens) - 5, 1),
        ]
        assert spans(store.explain(tokens)) == [(R.EVICTED, 0, len(tokens))]
