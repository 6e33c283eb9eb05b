"""Hints on their way through the bundled engine's connector."""

from __future__ import annotations

import pytest

import tierstore
from tierstore import Hint
from tierstore.keys import Identity
from tierstore.policy import Reuse
from tierstore.spec import KVSpec
from tierstore.tiers.hbm import PagePool
from tierstore_connectors.bundled import NoStore, StoreConnector

SPEC = KVSpec.uniform(layers=2, kv_heads=1, head_dim=32, dtype="float32", chunk_tokens=16)
IDENTITY = Identity.of(SPEC, model="m")


@pytest.fixture
def connector():
    pool = PagePool(SPEC, 4)
    connector = StoreConnector(tierstore.open(None, SPEC, identity=IDENTITY, pools=pool, host_bytes=1 << 20))
    yield connector
    connector.close()


def hints(connector):
    return [page.hint.reuse for page in connector.store._hbm.index.tree.walk()]


def test_a_hint_and_a_session_reach_the_store(connector):
    prompt = connector.prompt(range(16))
    pages = connector.allocate(1)
    connector.save(prompt, pages, first=0, hint=Hint(reuse="likely"), session="s").wait(10)
    assert hints(connector) == [Reuse.LIKELY]
    connector.finish("s")
    assert hints(connector) == [Reuse.DONE]
    connector.release(pages)


def test_without_a_store_nobody_minds():
    connector = NoStore(PagePool(SPEC, 4), IDENTITY)
    prompt = connector.prompt(range(16))
    assert connector.save(prompt, [0], first=0, hint=Hint(reuse="done"), session="s").wait() == 0
    connector.finish("s")
