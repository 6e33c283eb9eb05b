"""A daemon that starts on an index with 1.5 million records: 100 GB of pages of 64 KiB. (Here the pages are
small: what a start costs depends on the records.)"""

from __future__ import annotations

import subprocess
import sys
import time

import numpy as np
import pytest

import tierstore
from tierstore.keys import Identity, Prompt
from tierstore.spec import KVSpec
from tierstore.tiers.disk import INLINE, DiskTier, PageRecord, PageUse

SPEC = KVSpec.uniform(layers=1, kv_heads=1, head_dim=2, dtype="float16", chunk_tokens=16)
IDENTITY = Identity.of(SPEC, model="cold start")
CHUNKS = 500  # of a prompt
BATCH = 5000
DISK_BYTES = 16 << 30


def prompt_of(number):
    tokens = np.random.default_rng(number).integers(0, 1 << 17, CHUNKS * SPEC.chunk_tokens, np.uint32)
    return Prompt(IDENTITY, tokens, chunk_tokens=SPEC.chunk_tokens)


def payload_of(prompt, chunk):
    return prompt.keys[chunk] * (SPEC.page_bytes // 16)


def fill(directory, prompts):
    """As many prompts' records, as a store would have written them."""
    with DiskTier.open(directory, capacity_bytes=DISK_BYTES, page_bytes=SPEC.page_bytes) as disk:
        disk.wait_scanned()
        root = disk.serials.add_root(IDENTITY)
        batch = []
        for number in range(prompts):
            prompt = prompt_of(number)
            parent = root
            for chunk, tokens in enumerate(prompt.chunks()):
                payload = memoryview(payload_of(prompt, chunk))
                place = disk.reserve(payload.nbytes)
                assert place == INLINE
                record = PageRecord(
                    disk.serials.new(),
                    parent,
                    prompt.keys[chunk],
                    IDENTITY.digest,
                    tokens,
                    payload.nbytes,
                    place,
                )
                batch.append((record, payload))
                parent = record.serial
            if len(batch) >= BATCH or number == prompts - 1:
                disk.write(batch)
                disk.commit(batch, [], {record.serial: PageUse(1, 0.0, 0) for record, _ in batch})
                batch = []
        return disk.pages


def seconds_to_first_lookup(directory, disk, number):
    """From the daemon's start to the answer, compared."""
    prompt = prompt_of(number)
    url = f"ipc://{directory}/s"
    started = time.monotonic()
    options = [f"--listen={url}", "--host-bytes=64MiB", f"--disk={disk}", f"--disk-bytes={DISK_BYTES}"]
    options += [f"--page-bytes={SPEC.page_bytes}", "--log-level=warning"]
    daemon = subprocess.Popen([sys.executable, "-m", "tierstore.daemon", *options])
    try:
        with tierstore.connect(url, SPEC, identity=IDENTITY, lookup_s=30.0) as store:
            assert store.wait_connected(30)
            hit = store.lookup(prompt)
            took = time.monotonic() - started
            assert hit.by_tier == {"disk": len(prompt)}
            buffers = [bytearray(SPEC.page_bytes) for _ in range(CHUNKS)]
            assert store.load(hit, buffers).wait(30).tokens == len(prompt)
            assert buffers == [payload_of(prompt, chunk) for chunk in range(CHUNKS)]
    finally:
        daemon.kill()
        daemon.wait()
    return took


def test_the_first_lookup_is_answered_from_records_of_an_earlier_life(short_directory, tmp_path):
    assert fill(tmp_path / "disk", 4) == 4 * CHUNKS
    seconds_to_first_lookup(short_directory, tmp_path / "disk", 2)


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_a_cold_start_on_one_and_a_half_million_records(short_directory, tmp_path):
    prompts = 3000
    assert fill(tmp_path / "disk", prompts) == prompts * CHUNKS == 1_500_000
    took = [seconds_to_first_lookup(short_directory, tmp_path / "disk", number) for number in (7, 2900, 1500)]
    assert min(took) < 2, took
