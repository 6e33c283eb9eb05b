"""A bucket of a real S3 server that does everything wrong that one can: misses and one line, never wrong
bytes, nothing beyond the limits."""

from __future__ import annotations

import ctypes
import random
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
import xxhash

from tests.tierstore.cluster.seaweed import BUCKET, KEY, SECRET
from tests.tierstore.cluster.test_bundles import names
from tierstore.cluster import bundle_store
from tierstore.cluster.agent import PublishQueue
from tierstore.cluster.bundle_store import BundleStore
from tierstore.cluster.objects import HEADER_BYTES, PageObject, name_digest
from tierstore.cluster.orders import Counted, Origin, PromptPages, Publish, ToDaemon, Trouble
from tierstore.cluster.shared_store import SharedStoreOptions
from tierstore.errors import SharedStoreError, UsageError
from tierstore.testing.clock import wait_until

PAGE = 10_000
pytestmark = pytest.mark.usefixtures("credentials")


def content(name: str) -> bytes:
    """A page behind its header."""
    page = random.Random(name).randbytes(PAGE - HEADER_BYTES)
    described = PageObject(bytes(32), len(page), 4, 0, name_digest(name) + bytes(12))
    return described.header(xxhash.xxh3_64_intdigest(page)) + page


@dataclass
class Agent:
    """What an agent does with a bucket, and what it says to the daemon."""

    store: BundleStore = field(init=False)
    said: list[ToDaemon] = field(default_factory=list)

    def open(self, url: str, *, watch: bool = False, most_bytes: int = 1 << 30, days: float = 0) -> Agent:
        options = SharedStoreOptions(
            url, most_bytes=most_bytes, lifetime_s=days * 86400, tell=self.said.append
        )
        self.store = BundleStore(options, watch=watch)
        return self

    def put(self, line: int, first: int = 0, count: int = 4) -> list[bool]:
        wanted = names(line, first, count)
        buffers = [(ctypes.c_char * PAGE).from_buffer_copy(content(name)) for name in wanted]
        tokens = 16 * (first + count)
        pages = PromptPages({"model": "m", "layout": "x"}, PAGE - 128, 4, bytes(tokens), bytes(tokens))
        parent = names(line, first - 1, 1)[0] if first else ""
        of = [(ctypes.addressof(buffer), PAGE) for buffer in buffers]
        return self.store.put(wanted, of, Origin(pages, count, parent))

    def get(self, line: int, first: int = 0, count: int = 4) -> int:
        """How many pages came. The memory of the others is as it was."""
        wanted = names(line, first, count)
        buffers = [(ctypes.c_char * PAGE).from_buffer_copy(b"x" * PAGE) for _ in wanted]
        sizes = self.store.get(wanted, [(ctypes.addressof(buffer), PAGE) for buffer in buffers])
        for name, buffer, size in zip(wanted, buffers, sizes, strict=True):
            assert (size, bytes(buffer)) in ((PAGE, content(name)), (0, b"x" * PAGE))
        return sum(size == PAGE for size in sizes)

    def counted(self, event: str) -> int:
        return sum(each.counts.get(event, 0) for each in self.said if isinstance(each, Counted))

    @property
    def troubles(self) -> list[str]:
        return [each.message for each in self.said if isinstance(each, Trouble)]


@pytest.fixture
def prefix(request):
    return f"{request.node.name}-{random.SystemRandom().getrandbits(32):x}".replace("[", "-").replace("]", "")


@pytest.fixture
def url(seaweed, prefix):
    return f"s3://{BUCKET}/{prefix}?endpoint={seaweed.endpoint}&refresh_s=0.1"


@pytest.fixture
def through(proxy, prefix):
    return f"s3://{BUCKET}/{prefix}?endpoint={proxy.endpoint}&refresh_s=0.1"


def objects(seaweed, prefix) -> dict[str, int]:
    listed = [each for part in seaweed.bucket_store().list(prefix) for each in part]
    return {each["path"]: each["size"] for each in listed}


def test_pages_of_one_host_are_those_of_another(url, seaweed, prefix):
    one = Agent().open(url)
    assert one.put(1) == [True] * 4
    assert one.put(1, first=4) == [True] * 4
    other = Agent().open(url, watch=True)
    assert other.store.exists(names(1, 0, 9)) == [True] * 8 + [False]
    assert other.get(1, 2, 9) == 6
    one.put(2)
    wait_until(lambda: other.get(2) == 4)
    # The same pages are the same object, whoever writes them.
    before = objects(seaweed, prefix)
    assert other.put(1) == [True] * 4
    assert {path for path in objects(seaweed, prefix) if "/bundles/" in path} <= before.keys()
    assert one.said == []


def test_the_address_comes_before_the_environment(url, monkeypatch):
    for name in ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    assert Agent().open(url).put(1) == [True] * 4


def test_consecutive_pages_are_one_request(through, proxy):
    agent = Agent().open(through)
    agent.put(1, count=20)
    agent.put(2, count=20)
    proxy.seen.clear()
    assert agent.get(1, 3, 10) == 10
    assert len(proxy.seen) == 1
    assert agent.store.exists(names(1, 0, 20)) == [True] * 20
    assert len(proxy.seen) == 1, "a lookup asks no server"


@pytest.mark.parametrize("fault", ["status", "skewed", "half", "cut", "longer", "hang"])
def test_a_server_that_fails_is_a_miss_and_one_line(through, proxy, fault, monkeypatch):
    monkeypatch.setattr(bundle_store, "_AGAIN_S", (0.05, 0.1))
    monkeypatch.setattr(bundle_store, "_PATIENT_READ_S", 1.0)
    agent = Agent().open(through)
    agent.put(1)
    agent.put(2)
    proxy.fault = fault
    assert agent.get(1) == 0
    if fault in ("half", "longer"):
        assert (agent.counted("damaged_objects"), agent.troubles) == (1, [])
    else:
        [said] = agent.troubles
        assert "\n" not in said
        assert SECRET not in said
        assert {"status": "SlowDown", "skewed": "clock"}.get(fault, "does not answer") in said
        with pytest.raises(SharedStoreError):
            agent.store.exists(names(1, 0, 1))
        before = len(proxy.seen)
        assert agent.put(3) == [False] * 4
        assert agent.get(2) == 0
        assert len(proxy.seen) == before, "a server that fails is left alone for a while"
    proxy.fault = ""
    wait_until(lambda: agent.get(2) == 4)
    assert agent.troubles[-1:] in ([], [""])


def test_bytes_that_change_on_their_way_are_left_to_the_header(through, proxy):
    """They have the right length: the agent compares them, and removes the bundle."""
    agent = Agent().open(through)
    agent.put(1)
    proxy.fault = "flip"
    with pytest.raises(AssertionError):
        agent.get(1)
    proxy.fault = ""
    agent.store.remove(names(1, 2, 1)[0])
    assert agent.get(1) == 0
    assert Agent().open(through).get(1) == 0


@pytest.mark.parametrize("harm", ["half", "other", "version", "foreign", "empty"])
def test_an_object_that_is_none_is_not_there(url, seaweed, prefix, harm):
    one = Agent().open(url)
    one.put(1)
    one.put(2)
    first, second = sorted(path for path in objects(seaweed, prefix) if "/bundles/" in path)
    bucket = seaweed.bucket_store()
    data, other = bytes(bucket.get(first).bytes()), bytes(bucket.get(second).bytes())
    harmed = {
        "half": data[: len(data) // 2],
        "other": other,
        "version": b"tsbndl2\0" + data[8:],
        "foreign": random.randbytes(len(data)),
        "empty": b"",
    }
    bucket.put(first, harmed[harm])
    reader = Agent().open(url)
    assert sorted((reader.get(1), reader.get(2))) == [0, 4]
    assert reader.counted("damaged_objects") == (harm != "empty")
    assert sum(reader.store.exists(names(1, 0, 4)) + reader.store.exists(names(2, 0, 4))) == 4
    # It is written again, and then it is there.
    writer = Agent().open(url)
    assert writer.put(1) == writer.put(2) == [True] * 4
    assert (Agent().open(url).get(1), Agent().open(url).get(2)) == (4, 4)


def test_what_another_host_has_deleted_is_a_miss(url, seaweed, prefix):
    one = Agent().open(url)
    one.put(1)
    seaweed.bucket_store().delete(list(objects(seaweed, prefix)))
    assert one.get(1) == 0
    assert one.store.exists(names(1, 0, 4)) == [False] * 4
    assert one.troubles == []
    assert one.put(1) == [True] * 4
    assert one.get(1) == 4


def test_nothing_is_kept_beyond_the_limit(url, seaweed, prefix, monkeypatch):
    """Written for minutes, the bucket never has more; what was used stays."""
    limit = 10 * 4 * PAGE
    agent = Agent().open(url, most_bytes=limit)
    agent.put(0)
    for line in range(1, 40):
        agent.store.used(names(0, 0, 4))
        assert agent.put(line) == [True] * 4
        assert sum(objects(seaweed, prefix).values()) <= limit
    assert agent.get(0) == 4
    assert agent.get(39) == 4
    assert agent.get(1) == 0
    assert agent.counted("deleted_objects") >= 30
    assert Agent().open(url, most_bytes=3 * PAGE).put(50) == [False] * 4, "larger than the limit"


def test_what_is_older_than_its_lifetime_goes(url, seaweed, prefix):
    one = Agent().open(url)
    one.put(1)
    # The clock of the server is a day ahead of its old object, as far as the index knows.
    keeper = Agent().open(url, days=2)
    keeper.store.index.note_time(keeper.store.index.now + 86400)
    keeper.store._refresh()
    assert keeper.get(1) == 4
    keeper.store.index.note_time(keeper.store.index.now + 86400)
    keeper.store._refresh()
    assert keeper.get(1) == 0
    assert keeper.counted("expired_objects") == 1
    assert objects(seaweed, prefix) == {}


def test_uses_of_all_hosts_count(url):
    one, other = Agent().open(url, watch=True), Agent().open(url)
    one.put(1)
    one.put(2)
    for _ in range(5):
        one.store.used(names(2, 0, 2))
    other.store._refresh()
    first, second = (other.store.index.find(names(line, 0, 1))[0].bundle for line in (1, 2))
    wait_until(lambda: other.store._read_uses().get(second.name, 0) > 5)
    assert [each.name for each in other.store.index.by_use(other.store.uses())] == [second.name, first.name]


def test_damaged_uses_do_not_count(url, seaweed, prefix):
    seaweed.bucket_store().put(f"{prefix}/uses/1", b"\xc1 no msgpack")
    seaweed.bucket_store().put(f"{prefix}/uses/2", bytes(1 << 20))
    agent = Agent().open(url)
    assert agent.store.uses() == {}
    assert agent.counted("damaged_objects") == 1


def test_wrong_buckets_and_credentials_are_one_line(seaweed, monkeypatch, tmp_path):
    def said(url: str) -> str:
        with pytest.raises((SharedStoreError, UsageError)) as raised:
            Agent().open(url)
        message = str(raised.value)
        assert "\n" not in message
        assert SECRET not in message
        return message

    end = f"?endpoint={seaweed.endpoint}"
    assert "NoSuchBucket: create the bucket" in said(f"s3://nobodys{end}")
    assert "does not answer" in said(f"s3://{BUCKET}?endpoint=http://127.0.0.1:9")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "a wrong one")
    assert "SignatureDoesNotMatch" in said(f"s3://{BUCKET}{end}")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    assert "this host has no credentials" in said(f"s3://{BUCKET}{end}")
    # A profile has them.
    file = tmp_path / "credentials"
    file.write_text(f"[work]\naws_access_key_id = {KEY}\naws_secret_access_key = {SECRET}\n")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
    monkeypatch.setenv("AWS_PROFILE", "home")
    assert "has no profile 'home'" in said(f"s3://{BUCKET}{end}")
    monkeypatch.setenv("AWS_PROFILE", "work")
    assert Agent().open(f"s3://{BUCKET}/profile{end}").put(1) == [True] * 4


class OddListing(BaseHTTPRequestHandler):
    """Lists a bundle, and an object that the client of S3 does not accept. A listing of one folder has that
    object's folder only."""

    odd = "a//b"

    def do_GET(self):
        if "list-type" not in self.path:
            self.send_error(404)  # the bundle has left since
            return
        bundle = f"{'0' * 40}</Key><Size>1</Size><LastModified>2026-01-01T00:00:00.000Z</LastModified>"
        entries = [f"<Contents><Key>kv/bundles/{bundle}</Contents>"]
        if "delimiter" in self.path:
            folder = self.odd[: self.odd.index("/") + 1]
            entries.append(f"<CommonPrefixes><Prefix>kv/bundles/{folder}</Prefix></CommonPrefixes>")
        else:
            entries.append(entries[0].replace("0" * 40, self.odd))
        listing = f"<ListBucketResult><IsTruncated>false</IsTruncated>{''.join(entries)}</ListBucketResult>"
        self.send_response(200)
        self.send_header("Content-Length", str(len(listing)))
        self.end_headers()
        self.wfile.write(listing.encode())

    def log_message(self, *_):
        pass


@pytest.mark.parametrize("odd", ["a//b", "/b"])
def test_an_object_of_an_odd_name_is_skipped_or_one_line(monkeypatch, odd):
    """It ends each listing, except one of its parent folder. There, the object ``/b`` ends it, too."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    monkeypatch.setattr(OddListing, "odd", odd)
    with HTTPServer(("127.0.0.1", 0), OddListing) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"s3://{BUCKET}/kv?endpoint=http://127.0.0.1:{server.server_port}"
        if odd == "a//b":
            assert len(Agent().open(url).store.index) == 1
        else:
            with pytest.raises(SharedStoreError, match="an object whose name this program cannot read"):
                Agent().open(url)
        server.shutdown()


@pytest.mark.soak  # a server takes 10 s to come back
def test_a_server_that_is_killed_and_comes_back(tmp_path, prefix, monkeypatch):
    """In the middle of writes: what was acknowledged is there, nothing is wrong."""
    pytest.importorskip("obstore")
    from tests.tierstore.cluster.seaweed import SeaweedServer

    monkeypatch.setattr(bundle_store, "_AGAIN_S", (0.05, 0.1))
    server = SeaweedServer(tmp_path)
    server.start()
    try:
        agent = Agent().open(f"s3://{BUCKET}/{prefix}?endpoint={server.endpoint}")
        stored: list[int] = []
        stop = threading.Event()

        def write() -> None:
            line = 0
            while not stop.is_set():
                line += 1
                if all(agent.put(line)):
                    stored.append(line)

        writer = threading.Thread(target=write)
        writer.start()
        wait_until(lambda: len(stored) > 5)
        server.kill()
        wait_until(lambda: "does not answer" in " ".join(agent.troubles))
        before = len(stored)
        server.start()
        wait_until(lambda: len(stored) > before)
        stop.set()
        writer.join()
        assert agent.troubles[-1] == ""
        reader = Agent().open(f"s3://{BUCKET}/{prefix}?endpoint={server.endpoint}")
        there = [line for line in stored if reader.get(line) == 4]
        assert set(stored[before:]) <= set(there)
        assert len(there) >= before - 1
    finally:
        server.kill()


def test_without_a_listing_nothing_is_written(through, proxy, seaweed, prefix):
    """Nobody knows then how much there is."""
    proxy.fault, proxy.methods = "status", ("GET",)
    agent = Agent().open(through, watch=True)
    wait_until(lambda: not agent.store._pausing)
    assert agent.put(1) == [False] * 4
    assert objects(seaweed, prefix) == {}
    proxy.fault = ""
    wait_until(lambda: agent.put(1) == [True] * 4)


def test_prompts_that_are_used_most_are_published_first():
    """And one prompt's pages are queued once, up to a limit."""
    queue = PublishQueue(10)

    def add(line: int, count: int = 4) -> int:
        pages = PromptPages({"model": "m", "layout": "x"}, PAGE, 4, bytes(16), bytes(16))
        return queue.add(Publish(pages, count), names(line, 0, count), set(names(line, 0, count)))

    assert (add(1), add(2), add(2), add(3)) == (0, 0, 0, 4), "the third does not fit"
    first = queue.take()
    assert first.names == set(names(2, 0, 4))
    assert add(2, count=6) == 0, "two more pages of it"
    assert add(3) == 4, "what is being published counts"
    queue.done(first)
    assert add(3) == 0
    assert [queue.take().names for _ in range(3)] == [
        set(names(1, 0, 4)),
        set(names(2, 4, 2)),
        set(names(3, 0, 4)),
    ]


def steps(agent: Agent, line: int, count: int) -> None:
    """Publish a prompt as the steps of a long answer do: each two pages."""
    for step in range(count):
        assert agent.put(line, first=2 * step, count=2) == [True] * 2


def bundles(seaweed, prefix) -> list[str]:
    return [path for path in objects(seaweed, prefix) if "/bundles/" in path]


def test_small_bundles_become_a_large_one(url, seaweed, prefix, monkeypatch):
    agent = Agent().open(url)
    steps(agent, 1, 6)
    steps(agent, 2, 3)  # too few to be worth it
    other = Agent().open(url)
    agent.store.compact()
    assert len(bundles(seaweed, prefix)) == 10
    assert agent.counted("merged_objects") == 6
    agent.store.compact()
    assert len(bundles(seaweed, prefix)) == 10, "hosts may still read the small ones"
    monkeypatch.setattr(bundle_store, "_SUPERSEDED_S", -10.0)
    late = Agent().open(url)
    late.store.compact()
    assert len(bundles(seaweed, prefix)) == 4
    assert late.counted("superseded_objects") == 6
    for each in (agent, late, Agent().open(url)):
        assert (each.get(1, 0, 12), each.get(2, 0, 6)) == (12, 6)
    [merged] = {place.bundle for place in late.store.index.find(names(1, 0, 12))}
    origin = late.store.origin(merged)
    assert (origin.count, origin.parent, len(origin.pages.keys)) == (12, "", 12 * 16)
    assert other.get(1, 0, 12) == 0  # it has not listed since, and finds them after its next listing
    late.store.compact()
    assert len(bundles(seaweed, prefix)) == 4


def test_a_merge_does_not_lengthen_the_life_of_pages(url, seaweed, prefix):
    agent = Agent().open(url, days=2)
    steps(agent, 1, 5)
    agent.store._refresh()  # now it knows the server's times
    first = agent.store.index.find(names(1, 0, 1))[0].bundle
    agent.store.index._stored[first.name].written_at -= 0.9 * 86400
    agent.store.compact()
    assert agent.counted("merged_objects") == 5
    assert Agent().open(url, days=1).get(1, 0, 10) == 10
    late = Agent().open(url, days=0.8)
    late.store._refresh()  # the head was read by then
    assert late.counted("expired_objects") == 1
    assert len(bundles(seaweed, prefix)) == 5, "the parts are new, as far as the bucket knows"
    early = Agent().open(url, days=1.7)
    early.store.index._stored[first.name].written_at -= 0.9 * 86400
    early.store.compact()
    assert early.counted("merged_objects") == 4, "without what will end soon"


@pytest.mark.parametrize("step", ["read", "write", "delete"])
def test_a_host_that_dies_within_a_merge_loses_nothing(url, seaweed, prefix, monkeypatch, step):
    """What a process leaves behind that is killed before this request is what is in the bucket then."""
    monkeypatch.setattr(bundle_store, "_SUPERSEDED_S", -10.0)
    agent = Agent().open(url)
    steps(agent, 1, 5)
    if step == "delete":
        agent.store.compact()

    def die(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as dying:
        dying.setattr(agent.store.bucket, step, die)
        with pytest.raises(KeyboardInterrupt):
            agent.store.compact()
    assert Agent().open(url).get(1, 0, 10) == 10
    another = Agent().open(url)
    another.store.compact()
    another.store.compact()
    assert len(bundles(seaweed, prefix)) == 1
    assert Agent().open(url).get(1, 0, 10) == 10


def test_a_damaged_bundle_is_not_merged(url, seaweed, prefix):
    agent = Agent().open(url)
    steps(agent, 1, 5)
    [place] = agent.store.index.find(names(1, 4, 1))
    path = f"bundles/{place.bundle.name}"
    data = bytearray(agent.store.bucket.read(path, 0, 1 << 20))
    data[-1] ^= 1
    agent.store.bucket.write(path, bytes(data))
    agent.store.compact()
    assert (agent.counted("damaged_objects"), agent.counted("merged_objects")) == (1, 0)
    assert len(bundles(seaweed, prefix)) == 4
    assert agent.store.exists(names(1, 0, 10)) == [True] * 4 + [False] * 2 + [True] * 4


def test_a_merge_of_a_bundle_that_another_host_has_deleted(url):
    """It is no trouble of the bucket: other pages stay a hit."""
    agent, other = Agent().open(url), Agent().open(url)
    steps(agent, 1, 5)
    other.store._refresh()
    other.store.remove(names(1, 9, 1)[0])
    agent.store.compact()
    assert (agent.counted("merged_objects"), agent.troubles) == (0, [])
    assert agent.store.exists(names(1, 0, 10)) == [True] * 8 + [False] * 2
    agent.store.compact()
    assert agent.counted("merged_objects") == 4


def test_a_merge_while_a_prompt_is_written_stays_within_the_limit(url, seaweed, prefix, monkeypatch):
    agent = Agent().open(url, most_bytes=2 * 10 * PAGE + 8_000)
    steps(agent, 1, 5)
    write, sizes = agent.store.bucket.write, []

    def write_later(path: str, data: bytes) -> None:
        monkeypatch.setattr(agent.store.bucket, "write", write)
        assert agent.put(2) == [True] * 4
        write(path, data)
        sizes.append(sum(objects(seaweed, prefix).values()))

    monkeypatch.setattr(agent.store.bucket, "write", write_later)
    agent.store.compact()
    assert sizes[0] <= 2 * 10 * PAGE + 8_000


def test_a_merge_never_exceeds_the_limit(url, seaweed, prefix):
    agent = Agent().open(url, most_bytes=120_000)
    steps(agent, 1, 5)
    agent.store.compact()
    assert len(bundles(seaweed, prefix)) == 5
    assert agent.said == []
