"""Hosts of one machine: daemons in processes of their own that share a shared store."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

import numpy as np

import tierstore
from tierstore.cli.operator import Operator
from tierstore.keys import Identity
from tierstore.spec import KVSpec
from tierstore.testing.clock import wait_until
from tierstore.testing.pages import pages_of
from tierstore.testing.processes import DaemonProcess, Process

SPEC = KVSpec.uniform(layers=2, kv_heads=1, head_dim=32, dtype="float32", chunk_tokens=16)  # 8 KiB pages
IDENTITY = Identity.of(SPEC, model="m")


class Host:
    """A daemon over the shared store at ``url``, run by the interpreter ``python``."""

    def __init__(
        self, url: str, *options: str, prefix: tuple[str, ...] = (), python: str = sys.executable
    ) -> None:
        self.directory = tempfile.mkdtemp(prefix="ts")
        self.url = f"ipc://{self.directory}/s"
        self.prefix = [*prefix, python]
        self.options = [f"--listen={self.url}", "--host-bytes=8MiB", "--log-level=warning"]
        self.options += [f"--cluster={url}", "--cluster-min-tokens=16", "--cluster-look-s=1", *options]
        self.process: Process | None = None
        self.start()

    def start(self) -> None:
        if self.prefix == [sys.executable]:
            self.process = DaemonProcess.spawn("tierstore.daemon", self.options)
        else:
            self.process = subprocess.Popen([*self.prefix, "-m", "tierstore.daemon", *self.options])

    def stats(self):
        with Operator(self.url) as operator:
            return operator.stats()

    def counts(self):
        return self.stats().cluster.counts

    def has_counted(self, name, count):
        """Wait until the count ``name`` is reached, and check that it is not exceeded. Pages may be used
        before their agent has reported them."""
        stats = self.wait_for(lambda stats: stats.cluster.counts.get(name, 0) >= count)
        assert stats.cluster.counts[name] == count

    def wait_for(self, condition):
        """Until ``condition(stats)`` holds: those stats."""
        seen = []

        def holds() -> bool:
            with suppress(tierstore.errors.TierStoreError):
                seen[:] = [self.stats()]
                return condition(seen[0])
            return False

        wait_until(holds)
        return seen[0]

    def wait_online(self):
        """Until both agents speak to the shared store."""
        return self.wait_for(lambda stats: stats.cluster.online and not stats.cluster.trouble)

    def agents(self) -> list[int]:
        """The pids of its agents."""
        assert self.process is not None
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        found = []
        for child in children:
            with suppress(FileNotFoundError):  # it has just ended
                if b"tierstore.cluster.agent" in Path(f"/proc/{child}/cmdline").read_bytes():
                    found.append(int(child))
        return found

    def store(self, identity=IDENTITY, **options):
        store = tierstore.connect(self.url, SPEC, identity=identity, lookup_s=10, **options)
        assert store.wait_connected(30)
        return store

    def save(self, tokens, *, identity=IDENTITY, again=True) -> None:
        """And look it up, so that it is worth publishing."""
        with self.store(identity) as store:
            store.save(tokens, pages_of(tokens, SPEC)).wait(10)
            if again:
                store.lookup(tokens).release()

    def fetch_remote(self, tokens, *, identity=IDENTITY, deadline_s=10.0):
        """(tokens that other hosts seemed to have, tokens found after they have been brought). What is found
        then is loaded, and is the right bytes."""
        with self.store(identity) as store:
            with store.lookup(tokens) as hit:
                remote = hit.remote_tokens
                fetching = store.fetch_remote(hit, deadline_s=deadline_s)
                if fetching is not None:
                    fetching.wait(60)
            return remote, check(store, tokens)

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait(10)
            self.process = None

    def end(self) -> int:
        assert self.process is not None
        self.process.terminate()
        code = self.process.wait(30)
        self.process = None
        return code

    def close(self) -> None:
        self.kill()
        shutil.rmtree(self.directory, ignore_errors=True)


def published(host, pages):
    """Wait until so many pages are in the shared store."""
    return host.wait_for(lambda stats: stats.cluster.counts.get("published_pages", 0) >= pages)


def check(store, tokens) -> int:
    """Load what is held of ``tokens``: every byte is right. How many tokens."""
    hit = store.lookup(tokens)
    buffers = [bytearray(SPEC.page_bytes) for _ in range(hit.num_pages)]
    loaded = store.load(hit, buffers).wait(30)
    whole = loaded.tokens // SPEC.chunk_tokens
    expected = pages_of(tokens, SPEC)[:whole]
    assert [bytes(buffer) for buffer in buffers[:whole]] == [bytes(page) for page in expected]
    return loaded.tokens


def prompt(number: int, pages: int = 8) -> np.ndarray:
    return np.arange(pages * 16) + number * 100_000


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def show(stats) -> str:
    return json.dumps(stats.cluster.counts)
