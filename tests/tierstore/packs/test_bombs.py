"""A pack whose index declares millions of entries is refused before it takes memory."""

from __future__ import annotations

import asyncio
import hashlib
import struct
import subprocess
import sys

import msgspec
import pytest

import tierstore
from tierstore import KVSpec
from tierstore.packs import export_pack
from tierstore.packs import format as pack_format
from tierstore.packs.signing import Signer

SPEC = KVSpec.uniform(layers=1, kv_heads=1, head_dim=32, dtype="float16", chunk_tokens=32)
ENTRIES = 8 << 20
MOST_BYTES = 250 << 20  # an interpreter with everything loaded takes a third of it

VERIFY = """
import re, sys
from tierstore.cli import main
sys.argv = ["tierstore", "pack", "verify", sys.argv[1]]
try:
    main()
finally:
    peak = re.search(r"VmHWM:\\s+(\\d+) kB", open("/proc/self/status").read())
    sys.stdout.write(str(int(peak[1]) << 10))
"""


@pytest.fixture(scope="module")
def index(tmp_path_factory):
    """Head and decoded index of a good pack."""
    path = tmp_path_factory.mktemp("pack") / "good.tskv"
    with tierstore.open(None, SPEC, host_bytes=4 << 20) as store:
        store.save(list(range(64)), [bytes(SPEC.page_bytes)] * 2).wait(30)
        asyncio.run(export_pack(store, [store.prompt(list(range(64)))], path, signer=Signer()))
    data = path.read_bytes()
    head = pack_format.Head.decode(data)
    at = pack_format.HEAD.size
    return head, msgspec.msgpack.decode(data[at : at + head.index_bytes])


@pytest.mark.parametrize("field", ["following", "following: maps", "prompts", "identity", "keys"])
def test_an_index_of_millions_of_entries_takes_little_memory(index, tmp_path, field):
    head, fields = index
    good = {name: msgspec.msgpack.encode(fields[name]) for name in ("identity", "prompts")}
    count = struct.pack(">I", ENTRIES)
    if field == "following":
        good["following"] = b"\xdd" + count + b"\x80" * ENTRIES
    elif field == "following: maps":
        several = struct.pack(">I", ENTRIES // 4)
        good["following"] = (
            b"\x91\xdf"
            + several
            + b"".join(b"\xa4%04x\xa0" % (number % 65536) for number in range(ENTRIES // 4))
        )
    elif field == "prompts":
        good["prompts"] = b"\xdd" + count + b"\x82\xa6tokens\xc4\x00\xa4keys\xc4\x00" * (ENTRIES // 8)
    elif field == "identity":
        good["identity"] = b"\xdf" + count + b"\xa1a\xa0" * ENTRIES
    else:
        good["prompts"] = b"\x91\x82\xa6tokens\xdd" + count + b"\x80" * ENTRIES
    packed = bytes([0x80 + len(good)])
    for name, value in good.items():
        packed += msgspec.msgpack.encode(name) + value
    sizes = (len(packed), head.page_bytes, head.pages, bytes(32))
    data = pack_format.HEAD.pack(pack_format.MAGIC, 2, 0, *sizes) + packed
    data += hashlib.sha256(b"tskv head" + data).digest() + bytes(64)
    path = tmp_path / "bomb.tskv"
    path.write_bytes(data + bytes(-len(data) % pack_format.ALIGNMENT))
    done = subprocess.run(
        [sys.executable, "-c", VERIFY, str(path)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 1, done.stderr
    assert done.stderr.count("\n") == 1, done.stderr
    assert "its index cannot be read" in done.stderr
    assert int(done.stdout) < MOST_BYTES + len(data)
