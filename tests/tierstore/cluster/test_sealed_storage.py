"""Hosts with a disk key that share a bucket of a real S3 server: what the bucket shows, what an attacker can
do with it, and what a forget reaches."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import obstore
import pytest

import tierstore
from tests.forked import run
from tests.tierstore.cluster.hosts import IDENTITY, SPEC, Host, check, prompt, published
from tests.tierstore.cluster.seaweed import BUCKET
from tierstore.cluster import shared_keys
from tierstore.cluster.fetching import objects_of
from tierstore.cluster.forms import PlainForm
from tierstore.cluster.orders import Counted, PromptPages, ToDaemon, Vanished
from tierstore.cluster.s3 import Bucket, BucketError
from tierstore.cluster.s3_address import S3Address
from tierstore.cluster.shared_keys import SharedKeys
from tierstore.keys import Identity, Prompt
from tierstore.testing.clock import wait_until
from tierstore.testing.pages import pages_of
from tierstore.testing.processes import free_port
from tierstore.tiers.disk.keyring import Scope, make_master_key
from tierstore.wire.keys import generate

pytestmark = pytest.mark.usefixtures("credentials")

KEYS = "keys-of-pages"
ACME = Identity.of(SPEC, model="m", tenant="acme")
GLOBEX = Identity.of(SPEC, model="m", tenant="globex")


class Buckets:
    """The buckets of pages and of their keys, below one prefix."""

    def __init__(self, seaweed, prefix: str) -> None:
        self.prefix = prefix
        self.pages, self.keys = seaweed.bucket_store(), seaweed.bucket_store(KEYS)
        self.keys.put("ready", b"")  # SeaweedFS makes the bucket
        options = f"?endpoint={seaweed.endpoint}&refresh_s=0.2"
        self.url, self.keys_url = (f"s3://{name}/{prefix}{options}" for name in (BUCKET, KEYS))

    def paths(self, folder: str = "") -> list[str]:
        listed = obstore.list(self.pages, f"{self.prefix}/{folder}".rstrip("/"))
        return sorted(each["path"] for part in listed for each in part)

    def key_paths(self) -> list[str]:
        return sorted(each["path"] for part in obstore.list(self.keys, self.prefix) for each in part)

    def read(self, path: str) -> bytes:
        return bytes(obstore.get(self.pages, path).bytes())

    def content(self) -> bytes:
        """All bytes and names of both buckets."""
        keys = [bytes(obstore.get(self.keys, path).bytes()) for path in self.key_paths()]
        names = "".join(self.paths() + self.key_paths()).encode()
        return b"".join([*map(self.read, self.paths()), *keys, names])


@pytest.fixture
def buckets(seaweed, tmp_path):
    return Buckets(seaweed, f"{tmp_path.parent.name}/{tmp_path.name}")


@pytest.fixture
def start(buckets, tmp_path):
    """Start a host with the master key of this name, and a disk and a keyring of its own."""
    hosts = []

    def start_(master="master", *options):
        key = tmp_path / master
        if not key.exists():
            make_master_key(key)
        own = tmp_path / f"host{len(hosts)}"
        own.mkdir()
        options = (f"--disk={own}/pages", "--disk-bytes=64MiB", f"--disk-keyring={own}/ring", *options)
        sealing = (f"--disk-key={key}", f"--cluster-keys={buckets.keys_url}")
        hosts.append(Host(buckets.url, *options, *sealing))
        hosts[-1].wait_online()
        return hosts[-1]

    yield start_
    for host in hosts:
        host.close()


def forget(host, *what):
    code, said, error = run("tierstore.cli", "forget", "--connect", host.url, *what)
    assert code == 0, error
    return said


def fetches(host, tokens, identity=ACME) -> int:
    """Wait until other hosts seem to have the prompt, and return how many of its tokens come from them."""
    came = []
    wait_until(
        lambda: came.append(host.fetch_remote(tokens, identity=identity)) or came[-1][0] == len(tokens)
    )
    return came[-1][1]


def names_without_key(tokens, identity) -> list[bytes]:
    """Return the names that these pages have without a key, which everybody can compute."""
    made = Prompt(identity, tokens, chunk_tokens=SPEC.chunk_tokens)
    fields = {name: value for name, value in vars(identity).items() if isinstance(value, str)}
    joined = np.asarray(tokens, "<u4").tobytes()
    pages = PromptPages(fields, SPEC.page_bytes, SPEC.chunk_tokens, b"".join(made.keys), joined)
    return [bytes.fromhex(each.name[4:]) for each in objects_of(pages, PlainForm())]


def test_the_buckets_show_no_tokens_no_kv_and_no_name_that_can_be_guessed(start, buckets):
    one = start()
    for identity in (ACME, GLOBEX, IDENTITY):
        one.save(prompt(1), identity=identity)
    published(one, 24)
    other = start()
    assert [fetches(other, prompt(1), each) for each in (ACME, GLOBEX, IDENTITY)] == [128] * 3
    stranger = start("another-master")
    assert stranger.fetch_remote(prompt(1), identity=ACME) == (0, 0)
    content = buckets.content()
    tokens = np.asarray(prompt(1), "<u4")
    for at in range(len(tokens) - 4):
        assert tokens[at : at + 4].tobytes() not in content
    for page in pages_of(prompt(1), SPEC):
        kv = bytes(page)
        assert not any(kv[at : at + 24] in content for at in range(0, len(kv), 512))
    for identity in (ACME, GLOBEX, IDENTITY):
        for name in names_without_key(prompt(1), identity):
            assert name not in content
            assert name.hex().encode() not in content
    assert b"acme" not in content
    assert b"globex" not in content
    assert len(buckets.key_paths()) == 3


def test_pages_of_a_client_with_a_key_reach_other_hosts_and_count_against_its_quota(start, tmp_path):
    server, _ = generate(tmp_path / "server", "server")
    acme, _ = generate(tmp_path / "tenants", "acme")
    hosts = []
    for quota in ("64KiB", "32KiB"):  # pages of 8 KiB, which need slots of that size
        tcp = f"tcp://127.0.0.1:{free_port()}"
        access = (f"--server-key={server}", f"--tenants={tmp_path / 'tenants'}", f"--quotas=acme={quota}")
        hosts.append(start("master", f"--listen={tcp}", *access))
        hosts[-1].tcp = tcp
    one, other = hosts

    def connected(host):
        keys = {"keys": acme, "server_key": server.with_suffix(".key")}
        store = tierstore.connect(host.tcp, SPEC, identity=ACME, lookup_s=10, **keys)
        assert store.wait_connected(30)
        return store

    with connected(one) as store:
        store.save(prompt(1), pages_of(prompt(1), SPEC)).wait(10)
        store.lookup(prompt(1)).release()
    published(one, 8)
    with connected(other) as store:
        wait_until(lambda: store.lookup(prompt(1)).remote_tokens == 128)
        with store.lookup(prompt(1)) as hit:
            store.fetch_remote(hit, deadline_s=10).wait(30)
        assert check(store, prompt(1)) == 64
    assert other.stats().service.tenants["acme"].host_bytes == 32 << 10


def test_changed_swapped_cut_and_foreign_bundles_are_misses(start, buckets):
    one = start()
    saved = [(prompt(number, pages=2), ACME) for number in range(6)] + [(prompt(6, pages=2), GLOBEX)]
    paths: list[str] = []
    for number, (tokens, identity) in enumerate(saved, 1):
        one.save(tokens, identity=identity)
        published(one, 2 * number)
        paths += set(buckets.paths("bundles")) - set(paths)
    assert len(paths) == len(saved)
    size = SPEC.page_bytes + 128
    bundles = [buckets.read(path) for path in paths]
    heads = [data[: -2 * size] for data in bundles]
    pages = [(data[-2 * size : -size], data[-size:]) for data in bundles]
    (a, b), (globex, _) = pages[0], pages[6]
    attacks = {
        0: heads[0] + a[:1000] + bytes([a[1000] ^ 1]) + a[1001:] + b,
        1: heads[1] + pages[1][1] + pages[1][0],  # swapped
        2: heads[2] + pages[2][0][:128] + a[128:] + pages[2][1],  # the payload of another page
        3: heads[3] + globex + pages[3][1],  # a page of another tenant
        4: bundles[4][:-1],
        6: heads[6] + a + pages[6][1],
    }
    for at, data in attacks.items():
        obstore.put(buckets.pages, paths[at], data, use_multipart=False)
    victim = start("master", "--cluster-publish=none")
    came = [victim.fetch_remote(tokens, identity=identity) for tokens, identity in saved]
    # The head of a bundle that is cut off is wrong, so nobody asks for its pages.
    assert came == [(32, 0), (32, 0), (32, 0), (32, 0), (0, 0), (32, 32), (32, 0)]
    victim.has_counted("damaged_pages", 5)


def test_a_forget_reaches_the_bucket_and_other_hosts(start, buckets):
    one, other = start(), start()
    for identity in (ACME, GLOBEX):
        one.save(prompt(1), identity=identity)
    published(one, 16)
    assert [fetches(other, prompt(1), each) for each in (ACME, GLOBEX)] == [128, 128]
    copies = {path: buckets.read(path) for path in buckets.paths()}
    down = start()
    assert fetches(down, prompt(1)) == 128
    with down.store(ACME) as store:
        store.flush(30)
    down.end()
    receipt = json.loads(forget(one, "--tenant", "acme", "--json"))["receipt"]
    assert (receipt["keys"], receipt["shared_keys"]) == (1, 1)
    assert len(buckets.key_paths()) == 1, "when it returns, the key is gone"
    with one.store(ACME) as store:
        assert check(store, prompt(1)) == 0
    # The other host drops its own copies, and the bucket's bundles go.
    other.wait_for(lambda stats: stats.cluster.counts.get("forgets_elsewhere", 0) >= 1)
    with other.store(ACME) as store:
        assert check(store, prompt(1)) == 0
    with other.store(GLOBEX) as store:
        assert check(store, prompt(1)) == 128
    wait_until(lambda: len(buckets.paths("bundles")) == 1)
    # So does a host that was down.
    down.start()
    down.wait_for(lambda stats: stats.cluster.counts.get("forgets_elsewhere", 0) >= 1)
    with down.store(ACME) as store:
        assert check(store, prompt(1)) == 0
    # The copy of the bucket from before cannot be read by a new host with today's keys.
    for path, data in copies.items():
        obstore.put(buckets.pages, path, data, use_multipart=False)
    new = start()
    assert fetches(new, prompt(1), GLOBEX) == 128
    assert new.fetch_remote(prompt(1), identity=ACME) == (0, 0)
    # A tenant that comes back has a new key.
    one.save(prompt(2), identity=ACME)
    assert fetches(other, prompt(2)) == 128
    assert "0 keys in the shared store" in forget(one, "--tenant", "nobody")


def test_a_new_host_is_filled_with_the_keys(start, buckets, tmp_path):
    old = start()
    old.save(prompt(1), identity=ACME)
    old.save(prompt(2))
    published(old, 16)
    old.close()
    new = start()
    command = ["prefetch", "--from", buckets.url, "--connect", new.url]
    assert "fetched 0 pages" in run("tierstore.cli", *command)[1]
    sealed = [f"--disk-key={tmp_path}/master", f"--cluster-keys={buckets.keys_url}"]
    assert "fetched 16 pages" in run("tierstore.cli", *command, *sealed)[1]
    with new.store(ACME) as store:
        assert check(store, prompt(1)) == 128


def test_bundles_are_merged_under_their_key(start, buckets):
    one = start("master", "--cluster-publish=all")
    for pages in range(2, 13, 2):
        one.save(prompt(1, pages), identity=ACME, again=False)
        published(one, pages)
    one.wait_for(lambda stats: stats.cluster.counts.get("merged_objects", 0) >= 4)
    assert fetches(start(), prompt(1, 12)) == 192


@pytest.fixture
def keys(seaweed, buckets):
    opened = []

    def open_(url=buckets.keys_url, sharing_key=b"k" * 32):
        bucket = Bucket(S3Address.parse(url))
        opened.append(SharedKeys(bucket, sharing_key, ThreadPoolExecutor(2), said.append))
        opened[-1].refresh()
        return opened[-1]

    said: list[ToDaemon] = []
    open_.said = said
    return open_


def test_hosts_agree_on_one_key(keys):
    both = [keys(), keys()]
    scopes = [Scope(f"tenant {number}", "m") for number in range(20)]
    with ThreadPoolExecutor(2) as pool:
        made = pool.map(lambda each: [each.find_or_make(scope) for scope in scopes], both)
        first, second = ([(key.id, bytes(key.secret)) for key in each] for each in made)
    assert first == second
    assert len(set(first)) == 20


def test_keys_that_are_gone_replaced_or_exchanged_are_not_used(keys, buckets):
    scopes = [Scope(name, "m") for name in ("acme", "globex")]
    one, other = keys(), keys()
    made = [one.find_or_make(scope) for scope in scopes]
    other.refresh()
    assert [other.find(scope).id for scope in scopes] == [key.id for key in made]
    first, second = (one._path(scope) for scope in scopes)
    data = {
        path: bytes(obstore.get(buckets.keys, f"{buckets.prefix}/{path}").bytes()) for path in (first, second)
    }
    obstore.put(buckets.keys, f"{buckets.prefix}/{first}", data[second])
    obstore.delete(buckets.keys, f"{buckets.prefix}/{second}")
    other.refresh()
    assert [other.find(scope) for scope in scopes] == [None, None]
    vanished = [each for each in keys.said if isinstance(each, Vanished)]
    assert {(each.tenant, each.model) for each in vanished} == {scope.names for scope in scopes}
    assert other.gone == {key.id for key in made}
    # No new key before the daemon has forgotten the pages.
    assert other.find_or_make(scopes[1]) is None
    for each in vanished:
        other.resume(each.id)
    assert other.find_or_make(scopes[1]).id not in other.gone
    assert other.find_or_make(scopes[0]) is None, "the exchanged object is in the place of its key"
    assert Counted({"unreadable_keys": 1}) in keys.said


def test_keys_beyond_the_limit_are_not_made(keys, monkeypatch):
    monkeypatch.setattr(shared_keys, "MOST_KEYS", 2)
    one = keys()
    made = [one.find_or_make(Scope(name, "m")) for name in ("acme", "globex", "initech")]
    assert [key is not None for key in made] == [True, True, False]
    assert Counted({"keys_beyond_the_limit": 1}) in keys.said
    assert one.forget(1, lambda scope: scope.tenant == "acme") == 1
    one.resume(1)
    assert one.find_or_make(Scope("initech", "m")) is not None


def test_keys_end_when_the_bucket_does_not_answer(keys, monkeypatch):
    one = keys()
    scope = Scope("acme", "m")
    assert one.find_or_make(scope) is not None
    monkeypatch.setattr(one, "_limit_s", 0.0)
    assert (one.find(scope), one.find_or_make(scope)) == (None, None)


def test_a_bucket_that_keeps_versions_is_refused(keys, buckets, proxy, seaweed):
    one = keys(buckets.keys_url.replace(seaweed.endpoint, proxy.endpoint))
    proxy.fault = "versions"
    with pytest.raises(BucketError, match="keeps old versions"):
        one.find_or_make(Scope("acme", "m"))


def test_a_forget_without_an_answer_of_the_bucket_is_an_error(start, buckets, proxy, seaweed, tmp_path):
    buckets.keys_url = buckets.keys_url.replace(seaweed.endpoint, proxy.endpoint)
    host = start()
    host.save(prompt(1), identity=ACME)
    published(host, 8)
    proxy.fault = "status"
    code, _, error = run("tierstore.cli", "forget", "--connect", host.url, "--tenant", "acme")
    assert code == 1
    assert "forget again" in error
    assert error.count("\n") == 1
    with host.store(ACME) as store:
        assert check(store, prompt(1)) == 0, "this host has forgotten"
    proxy.fault = ""
    host.wait_online()
    assert "1 key in the shared store" in forget(host, "--tenant", "acme")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--cluster=mooncake://b:1", "--cluster-keys=s3://keys/x"], "needs an object store"),
        (["--cluster=s3://bucket/x"], "needs cluster_keys"),
        (["--cluster=s3://bucket/x", "--cluster-keys=s3://bucket/keys"], "give another bucket"),
        (["--cluster=s3://bucket/x", "--cluster-keys=s3://k:topsecret@keys/x"], "must have no credentials"),
        (["--cluster-keys=s3://keys/x"], "give cluster, or leave it out"),
    ],
)
def test_settings_that_cannot_be_are_one_line(tmp_path, options, message):
    make_master_key(tmp_path / "key")
    own = [f"--listen=ipc://{tmp_path}/s", f"--disk={tmp_path}/pages", f"--disk-key={tmp_path}/key"]
    code, _, said = run("tierstore.daemon", *own, *options)
    assert code != 0
    assert message in said
    assert "topsecret" not in said
    assert said.count("\n") == 1
    assert not (tmp_path / "pages").exists()
