"""The daemon's KV events are what vLLM's own classes read."""

from __future__ import annotations

import msgspec
import pytest

from tierstore.core.change_log import Followed, PageRemoved, Stored
from tierstore.daemon.events import AllBlocksCleared, EventBlocks
from tierstore.index import Tier
from tierstore.keys import Identity
from tierstore.spec import KVSpec

kv_events = pytest.importorskip("vllm.distributed.kv_events")


def test_vllm_reads_what_the_daemon_writes():
    identity = Identity.of(KVSpec.uniform(layers=1, kv_heads=1, head_dim=32, dtype="float16"), model="m")
    blocks = EventBlocks()
    blocks.add(identity.digest, Followed(identity, 1))
    first, second = bytes(15) + b"\1", bytes(15) + b"\2"
    changes = [
        Stored(Tier.HOST, identity.digest, first, b"", b"\7\0\0\0"),
        Stored(Tier.HOST, identity.digest, second, first, b"\x08\0\0\0"),
        PageRemoved(Tier.DISK, identity.digest, second),
    ]
    batch = msgspec.msgpack.encode((12.5, [AllBlocksCleared(), *blocks.events(changes)], 0))
    read = msgspec.msgpack.decode(batch, type=kv_events.KVEventBatch)
    assert read.ts == 12.5
    assert read.events == [
        kv_events.AllBlocksCleared(),
        kv_events.BlockStored(
            block_hashes=[1, 2],
            parent_block_hash=None,
            token_ids=[7, 8],
            block_size=1,
            lora_id=None,
            medium=kv_events.MEDIUM_CPU,
            lora_name=None,
            group_idx=0,
            locality="LOCAL",
        ),
        kv_events.BlockRemoved(block_hashes=[2], medium="STORAGE", group_idx=0, locality="LOCAL"),
    ]
