"""Chaos: a daemon and the engines around it are killed with SIGKILL, over and over, under load.

Four clients over ``ipc://`` and one over TCP, of three models: pages in the extents, pages in the index, and
pages of several layer groups. A kill comes after a random number of things that the clients
have done, and another few random milliseconds; whoever was killed is there again at once.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from multiprocessing import connection
from pathlib import Path

import pytest

from tests.e2e import chaos
from tests.portions import chosen
from tierstore.testing.clock import wait_until
from tierstore.testing.processes import DaemonProcess, free_port
from tierstore.units import MIB

HOST_PAGES = 96
CLIENTS = 5
RSS_BOUND = 8 * MIB  # of growth, see Campaign.steady: 2 MiB were seen in the long form
WAIT_S = 60.0  # for what takes a second
WARM_UP = 50  # things done
STEADY = 50


@dataclass(frozen=True)
class Case:
    """``roomy``: the disk holds every prompt there is, so what was flushed must be there in the end. Else it
    holds a part of them, and is evicted from all the time."""

    name: str
    disk_bytes: int
    prompts: int  # of each model
    roomy: bool
    disk_codec: str = "none"


ROOMY = Case("roomy", 96 * MIB, prompts=40, roomy=True)  # 30 MiB of pages
TIGHT = Case("tight", 6 * MIB, prompts=80, roomy=False)  # 60 MiB of pages
ENCODED = replace(ROOMY, name="encoded", disk_codec="lossless")
CRAMPED = replace(TIGHT, name="cramped", disk_codec="lossless")


class Engine:
    """One client process at a time, and what it says."""

    def __init__(self, life: chaos.Life, context) -> None:
        self.facts, facts = context.Pipe(duplex=False)
        ending, self.ending = context.Pipe(duplex=False)
        self.life = life
        self.process = context.Process(target=chaos.live, args=(life, facts, ending), daemon=True)
        self.process.start()
        facts.close()
        ending.close()

    def kill(self) -> None:
        self.process.kill()
        self.process.join(WAIT_S)

    def rest(self):
        """What it has said and was not heard yet, to the end."""
        with contextlib.suppress(EOFError):
            while True:
                yield self.facts.recv()

    def close(self) -> None:
        self.process.close()
        self.facts.close()
        self.ending.close()


class Campaign:
    """Everything that runs, and what is counted of it."""

    def __init__(self, case: Case, directory: str, seed: int) -> None:
        self.case = case
        self.seed = seed
        self.chance = random.Random(seed)
        self.tally = chaos.Tally()
        self.kills = {"daemon": 0, "client": 0}
        self.disk = Path(directory, "disk")
        self.most_disk_bytes = 0
        self.grown_bytes = 0
        self.tcp = f"tcp://127.0.0.1:{free_port()}"
        self.daemon = DaemonProcess(
            directory,
            f"--disk={self.disk}",
            f"--disk-bytes={case.disk_bytes}",
            f"--disk-codec={case.disk_codec}",
            f"--page-bytes={chaos.MODELS[0].page_bytes}",
            "--lease-s=5",
            listen=(self.tcp,),
            host_bytes=HOST_PAGES * chaos.MODELS[0].page_bytes,
            disk=False,
        )
        self.context = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload([chaos.__name__])
        self.engines: list[Engine] = []
        self.monitors = [chaos.connect(self._life(model)) for model in range(len(chaos.MODELS))]
        self.monitor = self.monitors[0]

    def __enter__(self) -> Campaign:
        self.daemon.start()
        self._await_daemon()
        self.engines = [Engine(self._life(place), self.context) for place in range(CLIENTS)]
        return self

    def __exit__(self, *_) -> None:
        self.daemon.kill()
        for monitor in self.monitors:
            monitor.close()
        for engine in self.engines:
            engine.kill()
            engine.close()

    def _life(self, place: int) -> chaos.Life:
        return chaos.Life(
            url=self.tcp if place == CLIENTS - 1 else self.daemon.url,
            model=place % len(chaos.MODELS),
            prompts=self.case.prompts,
            disk_may_evict=not self.case.roomy,
            hbm_pages=30 if place == 1 else 0,
            seed=f"{self.seed} {place} {self.kills}",
        )

    def _await_daemon(self) -> None:
        assert self.monitor.wait_connected(WAIT_S), "the daemon does not come up"

    # -- listening -----------------------------------------------------------------------------------

    def listen(self, things: int) -> None:
        """Until the clients have done that many things."""
        target = self.done + things
        ends = time.monotonic() + WAIT_S
        while self.done < target:
            assert time.monotonic() < ends, f"only {self.done} of {target} things done in {WAIT_S} s"
            self._hear(0.2)

    def linger(self, seconds: float) -> None:
        ends = time.monotonic() + seconds
        while (left := ends - time.monotonic()) > 0:
            self._hear(left)

    @property
    def done(self) -> int:
        return sum(self.tally.actions.values())

    def _hear(self, seconds: float) -> None:
        pipes = {engine.facts: engine for engine in self.engines}
        for pipe in connection.wait(pipes, seconds):
            try:
                self.tally.hear(pipe.recv())
            except EOFError:
                raise AssertionError(f"a client ended by itself: {pipes[pipe].process}") from None
        self._look_at_disk()

    def _look_at_disk(self) -> None:
        taken = 0
        for root, _, names in os.walk(self.disk):
            for path in (root, *(os.path.join(root, name) for name in names)):
                with contextlib.suppress(FileNotFoundError):
                    taken += os.lstat(path).st_blocks * 512
        self.most_disk_bytes = max(self.most_disk_bytes, taken)
        assert taken <= self.case.disk_bytes, f"the directory takes {taken} of {self.case.disk_bytes} bytes"

    # -- killing -------------------------------------------------------------------------------------

    def kill_daemon(self) -> None:
        self._nothing_failed()
        self.daemon.kill()
        self.kills["daemon"] += 1
        self._look_at_disk()
        self.daemon.start()

    def kill_client(self) -> None:
        place = self.chance.randrange(CLIENTS)
        engine = self.engines[place]
        engine.kill()
        self.kills["client"] += 1
        for fact in engine.rest():
            self.tally.hear(fact)
        engine.close()
        self.engines[place] = Engine(self._life(place), self.context)

    def rage(self, daemons: int, clients: int) -> None:
        """That many kills, in any order."""
        order = [self.kill_daemon] * daemons + [self.kill_client] * clients
        self.chance.shuffle(order)
        for kill in order:
            self.listen(self.chance.randint(0, 40))
            self.linger(self.chance.uniform(0, 0.01))
            kill()

    def _nothing_failed(self) -> None:
        stats = chaos.daemon_stats(self.monitor)
        if stats is None:
            return  # it has been killed before it was up
        counters = stats["store"]["counters"]
        assert stats["service"]["failed_requests"] == 0, stats
        assert stats["store"]["failed_tasks"] == 0, stats
        assert counters["damaged_pages"] == 0, stats
        assert not self.case.roomy or counters["evicted_pages"]["disk"] == 0, stats

    # -- judging -------------------------------------------------------------------------------------

    def steady(self, clients: int) -> None:
        """One daemon's memory (the arena and mapped files aside) does not grow while clients come and go."""
        self.listen(WARM_UP)
        self._await_daemon()
        before = anonymous_bytes(self.daemon.process.pid)
        self.rage(0, clients)
        self.listen(STEADY)
        self.grown_bytes = anonymous_bytes(self.daemon.process.pid) - before
        assert self.grown_bytes < RSS_BOUND, f"the daemon has grown by {self.grown_bytes} bytes"

    def end_clients(self) -> None:
        """Some end, the others are killed."""
        for engine in self.engines[::2]:
            engine.ending.send("end")
        for engine in self.engines[1::2]:
            engine.kill()
        for engine in self.engines:
            last = None
            for last in engine.rest():
                self.tally.hear(last)
            engine.process.join(WAIT_S)
            assert engine.process.exitcode == (0 if isinstance(last, chaos.Ended) else -signal.SIGKILL)
        while self.engines:
            self.engines.pop().close()

    def nothing_leaked(self) -> None:
        """Of the clients that are gone nothing is left, and the monitor holds nothing."""

        def gone() -> bool:
            stats = chaos.daemon_stats(self.monitor)
            assert stats is not None, "the daemon is away"
            service = stats["service"]
            released = service["leases"] == stats["store"]["pending_writes"] == 0  # leases: one-way messages
            return released and service["connections"] == len(self.monitors)

        wait_until(gone)
        assert self.monitor.flush(WAIT_S)
        self._nothing_failed()
        stats = chaos.daemon_stats(self.monitor)
        service, host = stats["service"], stats["store"]["tiers"]["host"]
        held = ("leases", "reservations", "reserved_bytes", "sending_bytes")
        assert {name: service[name] for name in held} == dict.fromkeys(held, 0)
        assert stats["store"]["open_hits"] == stats["store"]["pending_saves"] == host["leased_pages"] == 0
        assert host["used_bytes"] <= host["capacity_bytes"]
        assert stats["server"]["arena_connections"] == len(self.monitors)
        assert stats["server"]["malformed"] == 0

    def everything_promised_is_served(self) -> None:
        """By the next daemon, from disk."""
        dead = [monitor.backend.connection.link for monitor in self.monitors]
        self.kill_daemon()
        for (model, monitor), before in zip(enumerate(self.monitors), dead, strict=True):
            connected = monitor.backend.connection
            wait_until(lambda: connected.link not in (None, before))  # noqa: B023
            for number in range(self.case.prompts):
                tokens = chaos.prompt_tokens(number, chaos.MOST_PAGES * chaos.CHUNK, monitor.spec)
                with monitor.lookup(tokens) as hit:
                    came = chaos.load_and_compare(monitor, hit, number, deadline_s=chaos.FOREVER_S)
                self.tally.pages += chaos.page_count(came, monitor.spec)
                promised = self.tally.durable.get((model, number), 0) if self.case.roomy else 0
                what = f"{came} of {promised} tokens of model {model}'s prompt {number} came, of {hit}"
                assert came >= promised, (what, monitor.stats(), chaos.daemon_stats(monitor))

    def fsck(self) -> None:
        self.daemon.end()
        command = [sys.executable, "-m", "tierstore.cli", "fsck", str(self.disk), "--json"]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=WAIT_S)
        assert done.returncode == 0, done.stdout + done.stderr

    def report(self) -> str:
        promised = sum(self.tally.durable.values())
        return (
            f"{self.case.name}, seed {self.seed}: {self.kills}, {dict(self.tally.actions)}, "
            f"{self.tally.pages} pages compared, {promised} tokens promised, "
            f"directory at most {self.most_disk_bytes} of {self.case.disk_bytes} bytes, "
            f"daemon grew by {self.grown_bytes} bytes"
        )


def anonymous_bytes(pid: int) -> int:
    """What a process has in memory that is no file's and not shared."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no RssAnon")


def run(case: Case, seed: int, *, daemons: int, clients: int) -> None:
    directory = tempfile.mkdtemp(prefix="ts")  # short enough for a unix socket
    began = time.monotonic()
    campaign = Campaign(case, directory, seed)
    steady = clients // 4
    try:
        with campaign:
            campaign.rage(daemons - 1, clients - steady)
            campaign.steady(steady)
            campaign.end_clients()
            campaign.nothing_leaked()
            campaign.everything_promised_is_served()
            campaign.nothing_leaked()
            campaign.fsck()
        assert campaign.kills == {"daemon": daemons, "client": clients}
        assert campaign.tally.pages > 0
        assert not case.roomy or campaign.tally.durable
    finally:
        sys.stdout.write(f"{campaign.report()}, {time.monotonic() - began:.1f} s\n")
        shutil.rmtree(directory, ignore_errors=True)


@pytest.mark.parametrize("case", chosen([ROOMY, TIGHT, ENCODED], TIGHT, ENCODED), ids=lambda case: case.name)
def test_killed_now_and_then(case):
    run(case, random.SystemRandom().getrandbits(32), daemons=1, clients=5)


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("case", [ROOMY, TIGHT, ENCODED, CRAMPED], ids=lambda case: case.name)
def test_killed_all_the_time(case):
    run(case, random.SystemRandom().getrandbits(32), daemons=50, clients=200)
