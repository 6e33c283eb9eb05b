"""Whatever happens to the daemon, or inside the connector: every request completes, with the output of an
engine that has no cache, and the engine lives."""

from __future__ import annotations

import contextlib
import itertools
import random
import time
from pathlib import Path

import pytest

from tests.vllm import breakable, models, stalling
from tests.vllm.engines import Ask, Engine, connector_options
from tests.vllm.harness import asks, same, wait_hit, wait_stored
from tests.vllm.models import prompt
from tierstore.testing.clock import wait_until
from tierstore_tools.vllm.daemon import ServeProcess

pytestmark = pytest.mark.timeout(900)
_ROOT = Path(__file__).parents[2]
_PROMPTS = [prompt(901), prompt(500, seed=3), prompt(640) + prompt(200, seed=5)]


@pytest.fixture(scope="module")
def reference(model):
    """The answers to ``_PROMPTS`` of an engine without a connector, one by one and all at once."""
    with Engine(model(models.LLAMA)) as engine:
        one_by_one = []
        for ask in asks(_PROMPTS):
            engine.reset_prefix_cache()
            one_by_one.append(engine.ask(ask))
        return one_by_one


def all_same(engine, reference):
    """Ask everything, with nothing in vLLM's own cache; the tokens that came from the store."""
    external = 0
    for ask, expected in zip(asks(_PROMPTS), reference, strict=True):
        engine.reset_prefix_cache()
        answers = engine.ask(ask)
        assert same(answers, expected)
        external += answers.external_hit_tokens
    return external


def test_a_daemon_that_is_absent_comes_dies_and_comes_back(model, reference, tmp_path):
    daemon = ServeProcess(tmp_path)
    with (
        contextlib.closing(daemon),
        Engine(model(models.LLAMA), connector=connector_options(daemon.url)) as engine,
    ):
        assert all_same(engine, reference) == 0
        assert not engine.metrics().get("vllm:tierstore_errors")
        daemon.start()
        wait_hit(engine, Ask(_PROMPTS[0]), 896)
        # On a busy machine a lookup may be late, or computing may be the faster way.
        wait_until(lambda: all_same(engine, reference) >= 896)
        daemon.kill()
        assert all_same(engine, reference) == 0
        daemon.start()
        wait_hit(engine, Ask(_PROMPTS[0]), 896)
        # From disk, and what has been saved since.
        wait_until(lambda: all_same(engine, reference) > 896)


def test_a_daemon_that_hangs_costs_a_moment_and_is_asked_again_when_it_goes_on(model, reference, daemon):
    with Engine(model(models.LLAMA), connector=connector_options(daemon.url)) as engine:
        all_same(engine, reference)
        wait_hit(engine, Ask(_PROMPTS[0]), 896)
        daemon.hang()
        for _ in range(3):
            assert all_same(engine, reference) == 0
        daemon.go_on()
        assert wait_hit(engine, Ask(_PROMPTS[0]), 896)
        # In the middle of things, too: nothing that had begun may keep a request waiting.
        for _ in range(3):
            engine.reset_prefix_cache()
            engine.begin(asks(_PROMPTS))
            daemon.hang()
            answers = engine.finish()
            daemon.go_on()
            assert [answer.finish for answer in answers.answers] == ["length"] * len(_PROMPTS)
        assert all_same(engine, reference) >= 0


@pytest.mark.parametrize("rounds", [12, pytest.param(600, marks=pytest.mark.soak)])
def test_a_daemon_that_is_killed_at_random_moments(model, reference, daemon, rounds):
    chance = random.Random(rounds)
    with Engine(model(models.LLAMA), connector=connector_options(daemon.url)) as engine:
        for _ in range(rounds):
            at = chance.randrange(len(_PROMPTS))
            engine.reset_prefix_cache()
            engine.begin(asks([_PROMPTS[at]]))
            if chance.random() < 0.7:
                # A busy wait of a random length: the moment is to be anywhere in the request's life.
                for _ in range(chance.randrange(200_000)):
                    pass
                daemon.kill()
            assert same(engine.finish(), reference[at])
            if daemon.process is None:
                daemon.start()
        assert not engine.metrics().get("vllm:tierstore_errors")


def test_an_arena_that_is_full(model, reference, make_daemon):
    daemon = make_daemon(host_bytes=2 << 20, disk=False)  # 16 pages, and one prompt has 14
    with Engine(model(models.LLAMA), connector=connector_options(daemon.url)) as engine:
        for _ in range(3):
            all_same(engine, reference)
            engine.reset_prefix_cache()
            answers = engine.ask(*asks(_PROMPTS))
            assert [answer.finish for answer in answers.answers] == ["length"] * len(_PROMPTS)
        assert not engine.metrics().get("vllm:tierstore_errors")


def test_a_disk_that_answers_nothing(model, reference, make_daemon, tmp_path):
    """Reads first, then a read that a request waits for, then writes. It costs what is on the disk."""
    switch = tmp_path / "stall"
    struck = switch.with_suffix(".struck")
    daemon = make_daemon(program=(str(stalling.__file__), str(switch)))
    connector = connector_options(daemon.url, prefetch_s=0.3)
    with Engine(model(models.LLAMA), connector=connector) as engine:
        all_same(engine, reference)
        wait_hit(engine, Ask(_PROMPTS[0]), 896)
        daemon.wait_written()
        daemon.restart()  # nothing is in memory now

        switch.touch()
        wait_asked(engine, daemon)
        assert all_same(engine, reference) == 0
        assert struck.exists()
        switch.unlink()
        wait_hit(engine, Ask(_PROMPTS[0]), 896)

        daemon.wait_written()
        daemon.restart()
        wait_asked(engine, daemon)
        engine.reset_prefix_cache()
        engine.begin(asks([_PROMPTS[0]]))
        switch.touch()
        assert same(engine.finish(), reference[0])

        struck.unlink()
        for seed in range(70, 74):
            engine.ask(Ask(prompt(300, seed=seed)))
        assert all_same(engine, reference) >= 0
        assert struck.exists()
        switch.unlink()
        wait_hit(engine, Ask(_PROMPTS[0]), 896)
        daemon.wait_written()
        assert not engine.metrics().get("vllm:tierstore_errors")


def wait_asked(engine, daemon):
    """Until the connector asks the daemon, which has just begun. (The engine's own count lags behind by a
    step: it may still grow by a lookup of the daemon's before.)"""
    for seed in range(1000, 1100):
        engine.ask(Ask(prompt(100, seed=seed), max_tokens=1))
        if daemon.stats().service.requests.get("FindHit"):
            return
        time.sleep(0.05)
    raise AssertionError("the daemon was not asked")


def test_pages_damaged_on_disk_are_computed_again(model, reference, daemon):
    with Engine(model(models.LLAMA), connector=connector_options(daemon.url)) as engine:
        assert all_same(engine, reference) >= 0
        wait_hit(engine, Ask(_PROMPTS[0]), 896)
        daemon.wait_written()
        daemon.end()
        damaged = _damage(daemon.disk)
        daemon.start()
        engine.reset_prefix_cache()
        for _ in range(3):
            external = all_same(engine, reference)
        assert damaged
        assert daemon.stats().store.counters["damaged_pages"] > 0
        assert external > 0  # what was damaged has been computed, and saved again


def _damage(directory):
    """Change a byte in every 300 KB of the files that hold payloads."""
    damaged = 0
    for file in sorted(Path(directory).rglob("*")):
        if file.is_file() and file.suffix != ".mdb" and file.stat().st_size > 1 << 20:
            with file.open("r+b") as handle:
                for offset in range(150_000, min(file.stat().st_size, 64 << 20), 300_000):
                    handle.seek(offset)
                    byte = handle.read(1)
                    handle.seek(offset)
                    handle.write(bytes([byte[0] ^ 0x5A]))
                    damaged += 1
    return damaged


@pytest.fixture
def broken(daemon, tmp_path, model):
    """``broken(…)``: an engine whose connector raises where ``switch`` says."""
    switch = tmp_path / "break"
    switch.write_text("")
    connector = connector_options(daemon.url) | {"kv_connector_module_path": "tests.vllm.breakable"}
    connector["kv_load_failure_policy"] = "fail"  # vLLM's default: no request may fail for it
    environment = {"TIERSTORE_BREAK": str(switch), "PYTHONPATH": str(_ROOT)}
    return switch, lambda: Engine(model(models.LLAMA), connector=connector, environment=environment)


def test_errors_in_every_method_become_misses(reference, daemon, broken):
    switch, start = broken
    with start() as engine:
        all_same(engine, reference)
        wait_stored(daemon, 20)
        fresh = itertools.count(100)
        for method, place in breakable.SERVING.items():
            for times in ("", ":1", ":2"):
                switch.write_text(f"{method}{times}\n")
                all_same(engine, reference)
                engine.ask(Ask(prompt(200, seed=next(fresh))))  # something to save
                switch.write_text("")
                wait_hit(engine, Ask(_PROMPTS[0]), 896)
            assert f"tierstore: {place} failed" in engine.log, method
        assert engine.metrics()["vllm:tierstore_errors"] >= len(breakable.SERVING) * 3


@pytest.mark.parametrize("method", breakable.STARTING)
def test_errors_at_the_start_cost_the_cache(reference, broken, method):
    switch, start = broken
    switch.write_text(f"{method}\n")
    with start() as engine:
        assert all_same(engine, reference) == 0
        assert f"tierstore: {breakable.STARTING[method]} failed" in engine.log


def test_errors_at_a_reset_and_at_the_end(reference, broken):
    switch, start = broken
    with start() as engine:
        all_same(engine, reference)
        for method, place in breakable.RESETTING.items():
            switch.write_text(f"{method}\n")
            assert not engine.reset_prefix_cache(
                connector=True
            )  # it has not been forgotten: the caller knows
            all_same(engine, reference)
            assert f"tierstore: {place} failed" in engine.log
        switch.write_text("")
        assert engine.reset_prefix_cache(connector=True)
        assert engine.ask(Ask(_PROMPTS[0])).external_hit_tokens == 0
        switch.write_text("\n".join(breakable.ENDING))
        engine.close()
        for place in breakable.ENDING.values():
            assert f"tierstore: {place} failed" in engine.log
