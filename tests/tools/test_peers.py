"""``tierstore-bench peers``: our own daemon and what else is there, and what is left out or refused."""

from __future__ import annotations

import json
import sys

import numpy as np
import pytest
from typer.testing import CliRunner

from tests.forked import run
from tierstore_tools.cli import app
from tierstore_tools.peers import client, command, daemons, measure
from tierstore_tools.peers.client import Shape
from tierstore_tools.peers.daemons import CachePeer
from tierstore_tools.peers.measure import Ratio


def bench(*arguments):
    return run("tierstore_tools.cli", "peers", *arguments)


def test_ours_is_measured_and_others_are_left_out_by_name(tmp_path):
    """Pythons without their packages stand for machines on which the peers cannot be had."""
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -S -I "$@"\n')
    bare.chmod(0o755)
    code, out, err = bench(
        *("--page-bytes", "64KiB", "--total", "1MiB", "--rounds", 2, "--lookup-tokens", 512),
        *(f"--{name}-python={bare}" for name in ("lmcache", "redis", "mooncake")),
        *("--settle", 1, "--json", tmp_path / "out.json"),
    )
    assert code == 0, err
    document = json.loads((tmp_path / "out.json").read_text())
    assert set(document["left_out"]) == {"lmcache", "redis", "mooncake"}
    assert "left out: lmcache: lmcache is not installed" in " ".join(out.split())
    (row,) = document["moves"]
    assert (row["peer"], row["page_bytes"]) == ("tierstore", 65536)
    assert (row["saved_bytes"], row["wrong"]) == (2 << 20, 0)
    assert row["save_ours"] == row["load_ours"] == {"median": 1, "low": 1, "high": 1}
    assert row["save_gb_per_s"]["low"] <= row["save_gb_per_s"]["median"] <= row["save_gb_per_s"]["high"]
    assert row["memory_bytes"] > 1 << 20
    (lookup,) = document["lookups"]
    assert (lookup["tokens"], lookup["found"]) == (512, 1)
    (kill,) = document["kills"]
    assert (kill["left"], kill["wrong"]) == (1, 0)
    assert document["memcpy_gb_per_s"]["65536"]["low"] > 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--page-bytes", "100KiB"], "multiple of 16KiB"),
        (["--page-bytes", "1MiB", "--total", "2MiB"], "a quarter of --total"),
        (["--lmcache-python", "/nowhere/python"], "cannot be run"),
        (["--json", "/nowhere/out.json"], "no such directory"),
    ],
)
def test_bad_usage_is_a_line(arguments, said):
    code, out, err = bench(*arguments)
    assert (code, out) == (2, "")
    assert said in " ".join(err.split())


def test_a_peer_that_does_not_start_says_why(tmp_path, monkeypatch):
    broken = tmp_path / "bin"
    broken.mkdir()
    for name in ("mooncake_master", "python"):
        (broken / name).write_text("#!/bin/sh\necho no library for this >&2\nexit 1\n")
        (broken / name).chmod(0o755)
    assert "no library for this" in measure.try_out(CachePeer("mooncake", broken / "python"), tmp_path)


class _Kept(client.PeerClient):
    """A peer that is a dictionary."""

    kept: dict[int, bytes]

    def save(self, prompt):
        self.kept = {prompt: self.source.tobytes()}

    def lookup(self, prompt):
        return self.shape.tokens if prompt in self.kept else 0

    def load(self, prompt):
        self.target[:] = np.frombuffer(self.kept[prompt], np.uint32)


def test_every_byte_counts():
    peer = _Kept(Shape("", 4096, 4))
    peer.fill(7)
    peer.save(7)
    peer.load(7)
    assert peer.right(7)
    assert not peer.right(8), "another prompt has other bytes"
    for at in (0, peer.target.size // 2, peer.target.size - 1):
        peer.load(7)
        peer.target[at] ^= 1
        assert not peer.right(7)
    peer.clear()
    assert not peer.right(7)


def test_prompts_share_no_chunk():
    peer = _Kept(Shape("", 4096, 8))
    chunks = {bytes(chunk) for n in range(5) for chunk in peer.tokens(n).reshape(-1, client.CHUNK_TOKENS)}
    assert len(chunks) == 5 * 8
    assert len({*peer.names(0), *peer.names(1)}) == 16


def test_a_ratio_is_a_median_and_its_range():
    assert Ratio.of([3.0, 1.0, 2.0]) == Ratio(2.0, 1.0, 3.0)


def test_a_round_that_lost_a_page_has_no_speed(monkeypatch):
    class Client:
        """Loads three rounds whole, right, and at once; the second one lost its pages."""

        pid = 1
        shared_bytes = 0

        def ask(self, command, prompt):
            whole = prompt != 1
            seconds = 1.0 if whole else 1e-9
            return measure._Answer(seconds, 0.5, tokens=256 if whole else 0, right=whole)

    class Processes(daemons.PeerDaemon):
        def pids(self):
            return []

    monkeypatch.setattr(measure, "shared_bytes", lambda pids: 0)
    shape = Shape("", 1 << 20, 4)
    peer = measure._Running(CachePeer("redis", sys.executable), shape, Processes(), Client(), 0)
    ours = measure._Running(CachePeer("tierstore", sys.executable), shape, Processes(), Client(), 0)
    for number in range(3):
        peer.move(number)
        ours.move(0)
    row = measure._move_row(peer, ours)
    assert row.wrong == 1
    assert row.load_gb_per_s.high == row.load_gb_per_s.low == pytest.approx(4 * 2**20 / 1e9)
    assert command._gb_per_s(row.load_gb_per_s, row.wrong).endswith("1 failed")
    lost = measure._Running(CachePeer("redis", sys.executable), shape, Processes(), Client(), 0)
    lost.move(1)
    assert command._gb_per_s(measure._move_row(lost, lost).load_gb_per_s, lost.wrong) == "failed"


def test_a_python_may_be_named_by_a_relative_path(tmp_path, monkeypatch):
    (tmp_path / "venv").mkdir()
    (tmp_path / "venv" / "python").symlink_to(sys.executable)
    monkeypatch.chdir(tmp_path)
    seen = []
    monkeypatch.setattr(command, "run", lambda plan, peers, json: seen.extend(peers))
    done = CliRunner().invoke(app, ["peers", "--lmcache-python", "venv/python"])
    assert done.exit_code == 0, done.output
    assert [peer.python for peer in seen if peer.name == "lmcache"] == [tmp_path / "venv" / "python"]


def test_our_version_is_that_of_the_package():
    assert daemons.version(CachePeer("tierstore", sys.executable)) == "0.1.0"
