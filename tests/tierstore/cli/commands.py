"""Helpers for tests of the command line: commands in processes or terminals, and models to save."""

from __future__ import annotations

import os
import pty
import random
import signal
import subprocess
import sys

import tierstore
from tests import forked
from tests.daemons import SPEC
from tierstore.keys import Identity
from tierstore.spec import KVSpec, LayerGroup, LayerKind

PAGES = 20
TOKENS = list(range(PAGES * SPEC.chunk_tokens))


def command(*arguments):
    return [sys.executable, "-m", "tierstore.cli", *map(str, arguments)]


def run(*arguments):
    """(exit code, stdout, stderr)."""
    return forked.run("tierstore.cli", *arguments)


class Reporting(forked.Forked):
    """A command whose stderr is a pipe, ``said``."""

    def __init__(self, *arguments):
        said, its_stderr = os.pipe()
        super().__init__("tierstore.cli", [str(argument) for argument in arguments], (0, 1, its_stderr))
        os.close(its_stderr)
        self.said = os.fdopen(said)

    def close(self):
        self.kill()
        self.wait()
        self.said.close()


class Terminal:
    """A command on a terminal of its own."""

    def __init__(self, *arguments, columns=120):
        self.fd, there = pty.openpty()
        environment = os.environ | {"TERM": "xterm", "COLUMNS": str(columns), "LINES": "40"}
        self.process = subprocess.Popen(
            command(*arguments),
            stdin=there,
            stdout=there,
            stderr=there,
            env=environment,
            preexec_fn=lambda: signal.signal(
                signal.SIGINT, signal.SIG_DFL
            ),  # tests in the background ignore it
        )
        os.close(there)

    def wait_for(self, text):
        """All that is written up to ``text``. Raises :class:`OSError` when the command ends before."""
        seen = b""
        while text not in seen:
            seen += os.read(self.fd, 65536)
        return seen

    def has_ended(self):
        self.wait_for(b"\x1b[?1049l")  # the screen is what it was
        assert self.process.wait() == 0

    def end(self):
        self.process.kill()
        self.process.wait(10)
        os.close(self.fd)


# The window is not first in the order of layers, nor of kinds: a command has to find the order out.
GROUPS = KVSpec(
    (
        LayerGroup(LayerKind.MLA_LATENT, (5, 6), head_dim=32),
        LayerGroup(LayerKind.SLIDING_WINDOW, (4,), kv_heads=1, head_dim=32, window=64),
        LayerGroup(LayerKind.FULL_ATTENTION, (0, 1, 2, 3), kv_heads=1, head_dim=32),
    ),
    "float32",
    SPEC.chunk_tokens,
)
GROUPS_IDENTITY = Identity.of(GROUPS, model="groups")


def connect_groups(url):
    store = tierstore.connect(url, GROUPS, identity=GROUPS_IDENTITY, lookup_s=5.0)
    assert store.wait_connected(30)
    return store


def group_pages(group):
    """What :func:`save_groups` saves of ``TOKENS``."""
    chance = random.Random(group.number)
    return [chance.randbytes(group.page_bytes) for _ in range(PAGES)]


def save_groups(url):
    with connect_groups(url) as store:
        for group in store.groups:
            assert store.save(TOKENS, group_pages(group), group=group.number).wait(30) == len(TOKENS)
        assert store.flush(30)


def load_groups(url):
    """How many of ``TOKENS`` there are, every byte of their pages compared."""
    with connect_groups(url) as store, store.lookup(TOKENS) as hit:
        into = [[bytearray(group.page_bytes) for _ in hit.chunks(group.number)] for group in store.groups]
        tokens = store.load(hit, into).wait(30).tokens if hit.tokens else 0
        for group, got in zip(store.groups, into, strict=True):
            expected = group_pages(group)
            for chunk, page in zip(hit.chunks(group.number), got, strict=True):
                assert chunk not in group.chunks(tokens) or page == expected[chunk]
    return tokens
