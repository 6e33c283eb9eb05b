"""The simulator and a real store decide alike: the same requests, the same hits, under every policy."""

from __future__ import annotations

from dataclasses import replace

import pytest

import tierstore
from tests.tools.replay.traces import conversation
from tierstore.keys import Identity, Prompt
from tierstore.policy import POLICIES
from tierstore.spec import KVSpec
from tierstore.store import Store
from tierstore_tools.replay.simulator import Cache, SimulatedMemory, Simulator

# A block of the trace is a page of one token, whose id it is.
SPEC = KVSpec.uniform(layers=1, kv_heads=1, head_dim=512, dtype="float32", chunk_tokens=1)
IDENTITY = Identity.of(SPEC, model="replayed")
PAGE = bytes(SPEC.page_bytes)


def as_stored(requests):
    """The requests with the keys of their pages for block ids: what is done by key is then done alike."""
    for request in requests:
        prompt = Prompt(IDENTITY, request.blocks, chunk_tokens=1)
        yield prompt, replace(request, blocks=[int.from_bytes(key[:8], "big") for key in prompt.keys])


def serve(store: Store, prompt: Prompt) -> int:
    """What an engine does with a prompt: look it up, load the hit, save the rest. Returns the hit's
    tokens."""
    with store.lookup(prompt) as hit:
        missing = len(prompt) - hit.tokens
        store.save(prompt, [PAGE] * missing, first=hit.tokens).wait(30)
        return hit.tokens


@pytest.mark.parametrize("policy", POLICIES)
def test_the_store_finds_what_the_simulator_says(policy):
    capacity = 300
    requests = conversation()[:400]
    simulator = Simulator(policy, capacity)
    with tierstore.open(
        None, SPEC, identity=IDENTITY, host_bytes=capacity * SPEC.page_bytes, policy=policy
    ) as store:
        for number, (prompt, request) in enumerate(as_stored(requests)):
            assert serve(store, prompt) == simulator.step(request), f"request {number}"
        evicted = store.stats().counters["evicted_pages"]["host"]
        store.check()
    assert evicted == simulator.result.evicted_blocks > capacity
    assert simulator.result.hit_blocks > 0


def test_a_store_with_a_disk_finds_what_the_simulator_says_of_each_tier(tmp_path):
    """The disk keeps everything, and what a load brings back from there stays in memory."""
    capacity, requests = 300, conversation()[:150]
    memory = SimulatedMemory()
    host = Cache("default", capacity, memory)
    disk = Cache("default", 100_000, memory)
    in_memory = on_disk = 0
    with tierstore.open(
        tmp_path,
        SPEC,
        identity=IDENTITY,
        host_bytes=capacity * SPEC.page_bytes,
        disk_bytes=64 << 20,
        policy="default",
    ) as store:
        for number, (prompt, request) in enumerate(as_stored(requests)):
            with store.lookup(prompt) as hit:
                found = (hit.by_tier.get("host", 0), hit.by_tier.get("disk", 0))
                buffers = [bytearray(SPEC.page_bytes) for _ in range(hit.num_pages)]
                assert store.load(hit, buffers).wait(30).tokens == hit.tokens
                missing = len(prompt) - hit.tokens
                assert store.save(prompt, [PAGE] * missing, first=hit.tokens).wait(30) == missing
            assert store.flush(30)
            blocks = request.blocks
            assert found == (held := host.held(blocks), disk.held(blocks) - held), f"request {number}"
            in_memory, on_disk = in_memory + found[0], on_disk + found[1]
            _replay(host, disk, memory, blocks)
        store.check()
    assert min(in_memory, on_disk) > 30


def _replay(host: Cache, disk: Cache, memory: SimulatedMemory, blocks) -> None:
    held, hit = host.held(blocks), disk.held(blocks)
    memory.use(blocks[:hit])
    for tier, found in ((host, held), (disk, hit)):
        tier.hold(blocks[:found])
    host.store(blocks[:hit], held)  # the load
    host.store(blocks, hit)
    disk.store(blocks, hit)
    memory.saved(blocks[hit:])
    for tier in (host, disk):
        tier.release(blocks)
