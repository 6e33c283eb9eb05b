"""Ten minutes of requests while the daemon is killed, stopped and started at random: ``make soak-vllm``, or
with another length ``SOAK_S=120 pytest -m soak tests/vllm/test_soak.py``."""

from __future__ import annotations

import os
import random
import threading
import time
from dataclasses import replace

import pytest

from tests.vllm import models
from tests.vllm.engines import Ask, Engine, connector_options
from tests.vllm.harness import same
from tests.vllm.models import prompt
from tests.vllm.test_images import Engine as ImageEngine

_SOAK_S = float(os.environ.get("SOAK_S", "600"))
_TRUNKS, _BRANCHES = 4, 6
_PAUSE_S = 4.0  # at most, between two misfortunes
_SHOWN = ("loads", "failed_loads", "late_lookups", "fenced_saves", "errors")


def workload(chance):
    """Prompts that share beginnings of any length, as conversations do."""
    made = []
    for trunk in range(_TRUNKS):
        tokens = prompt(chance.randrange(200, 1200), seed=trunk)
        for branch in range(_BRANCHES):
            kept = tokens[: chance.randrange(len(tokens))]
            made.append([*kept, *prompt(chance.randrange(1, 300), seed=100 * trunk + branch + 50)])
    return made


class Misfortune(threading.Thread):
    """Kills and hangs a daemon, and sets it right again, until it is told to stop."""

    def __init__(self, daemon, seed):
        super().__init__()
        self._daemon = daemon
        self._chance = random.Random(seed)
        self._stopping = threading.Event()
        self.kills = self.hangs = 0
        self.error = None

    def run(self):
        try:
            while not self._stopping.wait(self._chance.random() * _PAUSE_S):
                if self._chance.random() < 0.7:
                    self._daemon.kill()
                    self.kills += 1
                    self._stopping.wait(self._chance.random())
                    self._daemon.start()
                else:
                    self._daemon.hang()
                    self.hangs += 1
                    self._stopping.wait(self._chance.random())
                    self._daemon.go_on()
        except BaseException as error:  # noqa: BLE001  # raised by stop
            self.error = error

    def stop(self):
        self._stopping.set()
        self.join()
        if self.error is not None:
            raise self.error


@pytest.mark.soak
@pytest.mark.timeout(2 * _SOAK_S + 1200)
@pytest.mark.parametrize("kind", [models.LLAMA, models.GEMMA])
def test_requests_flow_while_the_daemon_comes_and_goes(model, make_daemon, kind):
    chance = random.Random(kind)
    prompts = workload(chance)
    with Engine(model(kind)) as engine:
        expected = []
        for tokens in prompts:
            expected.append(engine.ask(Ask(tokens)))
            engine.reset_prefix_cache()
    # Room for a third of the pages in memory, so that the disk has its part.
    daemon = make_daemon(host_bytes=4 << 20)
    asked = found = hits = steps = 0
    slowest = 0.0
    with Engine(model(kind), connector=connector_options(daemon.url)) as engine:
        misfortune = Misfortune(daemon, seed=kind)
        misfortune.start()
        try:
            ends = time.monotonic() + _SOAK_S / 2
            while time.monotonic() < ends:
                chosen = chance.sample(range(len(prompts)), chance.randrange(1, 5))
                answered = engine.ask(*(Ask(prompts[at]) for at in chosen))
                for at, answer in zip(chosen, answered.answers, strict=True):
                    assert same(replace(answered, answers=[answer]), expected[at], tolerance=1e-4)
                asked += len(chosen)
                found += answered.external_hit_tokens
                hits += answered.external_hit_tokens > 0
                steps += answered.steps
                slowest = max(slowest, answered.wall_s)
                if chance.random() < 0.7:
                    engine.reset_prefix_cache()
        finally:
            misfortune.stop()
        metrics = engine.metrics()
    print(  # noqa: T201  # what pytest shows with -s, and when it fails
        f"{kind}: {asked} requests in {steps} steps, the slowest batch {slowest:.1f} s; {found} tokens from "
        f"the store in {hits} batches; {misfortune.kills} kills, {misfortune.hangs} hangs; "
        + ", ".join(f"{name} {metrics.get(f'vllm:tierstore_{name}', 0):.0f}" for name in _SHOWN)
    )
    assert found > 0
    assert misfortune.kills > 0


@pytest.mark.soak
@pytest.mark.timeout(2400)
def test_500_images_while_the_daemon_comes_and_goes(model, make_daemon):
    """More images than vLLM's own cache holds. The daemon has room for some of them."""
    chance = random.Random(0)
    asks = [[chance.randrange(200), None, None] for _ in range(500)]
    place = model(models.LLAVA)
    alone = ImageEngine(place, asks)
    alone.end()
    daemon = make_daemon(host_bytes=2 << 20, disk_bytes=8 << 20, options=("--page-bytes=64KiB",))
    misfortune = Misfortune(daemon, seed=0)
    misfortune.start()
    store = {"store": daemon.url, "lookup_s": 0.5, "load_s": 2.0}
    try:
        engine = ImageEngine(
            place,
            asks,
            ec_transfer_config={
                "ec_connector": "TierStoreECConnector",
                "ec_connector_module_path": "tierstore_connectors.vllm",
                "ec_role": "ec_both",
                "ec_connector_extra_config": store,
            },
        )
        engine.end()
    finally:
        misfortune.stop()
    saved = alone.found[-1][1] - engine.found[-1][1]
    print(f"{saved} images less were encoded; {misfortune.kills} kills, {misfortune.hangs} hangs")  # noqa: T201
    assert [found[2:] for found in engine.found] == [found[2:] for found in alone.found], "bit for bit"
    assert saved > 0
    assert misfortune.kills > 0
