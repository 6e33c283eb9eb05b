from __future__ import annotations

import pytest

import tierstore
from tierstore.errors import UsageError
from tierstore_tools.throttle import Throttle, parse_throttle

SPEC = tierstore.KVSpec.uniform(layers=2, kv_heads=1, head_dim=64, dtype="float16", chunk_tokens=16)


def test_rates_by_tier_are_read():
    assert parse_throttle("disk=200MB/s,host=2GiB/s") == {"disk": 200e6, "host": 2.0**31}


@pytest.mark.parametrize("text", ["", "disk", "disk=fast", "hbm=1MB/s", "disk=0MB/s", "disk=1..2MB/s"])
def test_other_text_is_refused(text):
    with pytest.raises(UsageError, match="--throttle"):
        parse_throttle(text)


def test_a_throttled_tier_gives_the_same_bytes_and_the_planner_notices():
    with tierstore.open(None, SPEC, host_bytes=1 << 20) as store:
        tokens = list(range(64))
        pages = [bytes([number]) * SPEC.page_bytes for number in range(4)]
        store.save(tokens, pages).wait()
        rate = 1e6
        Throttle(store.backend, {"host": rate})
        buffers = [bytearray(SPEC.page_bytes) for _ in pages]
        assert store.load(store.lookup(tokens), buffers).wait(30).tokens == 64
        assert [bytes(each) for each in buffers] == pages
        way = store.planner.rates(store._hbm.clock())["host"]
        assert way.bytes_per_s <= rate
