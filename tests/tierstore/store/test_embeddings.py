"""Embeddings beyond the conformance suite: new lives of a process and a daemon, packs, and commands."""

from __future__ import annotations

import asyncio
import itertools
import json

import pytest
from typer.testing import CliRunner

import tierstore
from tierstore import Identity, KVSpec, LayerGroup, LayerKind
from tierstore.cli import app
from tierstore.cli.operator import Operator
from tierstore.errors import SpecError, UsageError
from tierstore.packs import export_pack, import_pack, open_pack
from tierstore.testing.clock import wait_until
from tierstore.testing.embeddings import ROWS, SPEC, load, new_content, rows_of, save

_models = itertools.count()
KV = KVSpec.uniform(layers=2, kv_heads=1, head_dim=32, dtype="float32", chunk_tokens=16)


def identity(spec=SPEC):
    return Identity.of(spec, model=f"embeddings {next(_models)}")


def open_store(path, own, spec=SPEC):
    return tierstore.open(path, spec, identity=own, host_bytes=1 << 20, disk_bytes=64 << 20)


def test_they_outlive_the_process_that_saved_them(tmp_path):
    own, digests = identity(), [new_content() for _ in range(5)]
    for life in range(2):
        with open_store(tmp_path, own) as store:
            if not life:
                assert [save(store, digest) for digest in digests] == [5] * 5
                assert store.flush(30)
            store.check()
            for digest in digests:
                assert load(store, store.embedding(digest, ROWS)) == rows_of(digest, ROWS)


def test_they_outlive_kill_9_of_the_daemon(make_daemon):
    own, digest = identity(), new_content()
    daemon = make_daemon()
    for life in range(2):
        with tierstore.connect(daemon.url, SPEC, identity=own, lookup_s=10.0) as store:
            assert store.wait_connected(60)
            if not life:
                save(store, digest)
                assert store.flush(30)
                daemon.kill()
                daemon.start()
            else:
                assert load(store, store.embedding(digest, ROWS)) == rows_of(digest, ROWS)


def test_clients_of_a_daemon_share_them_beside_kv(shared_daemon):
    """Two engines, each with KV and embeddings; the statistics and the list tell them apart."""
    model, digest, tokens = f"embeddings {next(_models)}", new_content(), list(range(64))
    for life in range(2):
        with (
            tierstore.connect(
                shared_daemon.url, SPEC, identity=Identity.of(SPEC, model=model), lookup_s=10.0
            ) as images,
            tierstore.connect(
                shared_daemon.url, KV, identity=Identity.of(KV, model=model), lookup_s=10.0
            ) as store,
        ):
            assert images.wait_connected(30)
            assert store.wait_connected(30)
            if not life:
                save(images, digest)
                assert store.save(tokens, [bytes(KV.page_bytes)] * 4).wait(30) == 64
            assert load(images, images.embedding(digest, ROWS)) == rows_of(digest, ROWS)
            assert store.lookup(tokens).tokens == 64
            with Operator(shared_daemon.url) as operator:
                layers = {
                    each.layers: each.host_bytes
                    for each in operator.stats().service.layers
                    if each.model == model
                }
            assert layers == {"embedding": 5 * SPEC.page_bytes, "full attention": 4 * KV.page_bytes}


def test_a_list_of_a_directory_has_them(tmp_path):
    with open_store(tmp_path, identity()) as store:
        save(store, new_content())
        assert store.flush(30)
    done = CliRunner().invoke(app, ["ls", str(tmp_path), "--json"])
    assert done.exit_code == 0, done.output
    [found] = json.loads(done.output)["identities"]
    assert (found["layers"], found["pages"]) == ("embedding", 5)


def test_a_command_about_tokens_leaves_them_out(make_daemon, tmp_path):
    daemon, model = make_daemon(), f"embeddings {next(_models)}"
    tokens = tmp_path / "tokens"
    tokens.write_text(" ".join(map(str, range(64))))
    with (
        tierstore.connect(daemon.url, SPEC, identity=Identity.of(SPEC, model=model), lookup_s=10.0) as images,
        tierstore.connect(daemon.url, KV, identity=Identity.of(KV, model=model), lookup_s=10.0) as store,
    ):
        assert images.wait_connected(60)
        assert store.wait_connected(60)
        save(images, new_content())
        store.save(list(range(64)), [bytes(KV.page_bytes)] * 4).wait(30)
        command = ["why", str(tokens), "--connect", daemon.url, "--json"]
        done = CliRunner().invoke(app, command)
        assert done.exit_code == 0, done.output
        assert json.loads(done.output)["hit_tokens"] == 64, done.output


def test_packs_carry_them(tmp_path):
    own, digests = identity(), [new_content() for _ in range(3)]
    with open_store(None, own) as store:
        for digest in digests[:2]:
            save(store, digest)
        images = [store.embedding(digest, ROWS) for digest in digests]
        asyncio.run(export_pack(store, images, tmp_path / "p.tskv"))

    async def imported(store):
        async with open_pack(tmp_path / "p.tskv") as reader:
            return await import_pack(store, reader)

    with open_store(None, own) as store:
        asyncio.run(imported(store))
        found = [load(store, store.embedding(digest, ROWS)) for digest in digests]
        assert found == [rows_of(digests[0], ROWS), rows_of(digests[1], ROWS), []]


def test_the_spec_is_one_of_its_own():
    full = LayerGroup(LayerKind.FULL_ATTENTION, (0,), 1, 32)
    embedding = LayerGroup(LayerKind.EMBEDDING, (1,), 1, 32)
    with pytest.raises(SpecError, match=r"KVSpec\.embedding"):
        KVSpec((full, embedding), "float32", 16)
    with pytest.raises(SpecError):
        KVSpec.embedding(width=0, dtype="float32")
    assert KVSpec.parse(SPEC.describe()) == SPEC
    with open_store(None, identity(KV), KV) as store, pytest.raises(UsageError, match=r"KVSpec\.embedding"):
        store.embedding(bytes(32), 3)


def test_a_full_memory_keeps_what_is_used(tmp_path):
    """Embeddings leave by the same policy as KV: the one that is asked for again and again stays."""
    with tierstore.open(None, SPEC, identity=identity(), host_bytes=20 * SPEC.page_bytes) as store:
        used = new_content()
        save(store, used)
        for _ in range(12):
            save(store, new_content())
            assert load(store, store.embedding(used, ROWS)) == rows_of(used, ROWS)
        wait_until(lambda: store.stats().open_hits == 0)
        store.check()
