"""A daemon that is absent, killed, stopped, full or on a full disk: every request completes with the right
answer. Few requests here, 500 of each kind in the soak: ``pytest -m soak tests/transformers``."""

from __future__ import annotations

import random
import time

import pytest
import torch

from tests.tiny_models import reference_model
from tests.transformers import full_disk
from tests.transformers.asking import ask, loaded, prompt, same

FEW, MANY = 3, 500
ROUNDS = [FEW, pytest.param(MANY, marks=[pytest.mark.soak, pytest.mark.timeout(3600)])]
KINDS = ["llama3", "gemma3", "qwen3-next"]


class Asked:
    """Prompts that share beginnings, with the answers of a model without a store."""

    def __init__(self, model, prompts=8):
        chance = random.Random(3)
        self.model = model
        self.pairs = []
        for number in range(prompts):
            begin = prompt(120, seed=number % 3)[:, : chance.randrange(40, 120)]
            ids = torch.cat([begin, prompt(chance.randrange(5, 40), seed=100 + number)], 1)
            self.pairs.append((ids, ask(model, ids, new=3)))

    def check(self, number, cache):
        ids, expected = self.pairs[number % len(self.pairs)]
        assert same(ask(self.model, ids, cache, new=3), expected)


@pytest.mark.parametrize("rounds", ROUNDS)
def test_a_daemon_that_is_killed(rounds, make_cache, make_daemon):
    """In the middle of requests: from a hook that runs within a forward pass."""
    daemon = make_daemon()
    for name in KINDS:
        asked = Asked(reference_model(name))
        cache = make_cache(asked.model, daemon.url, lookup_s=0.2)
        chance = random.Random(rounds)
        for number in range(-(-rounds // len(KINDS))):
            after = chance.randrange(1, 5)

            def kill(*_, after=[after]):  # noqa: B006  # counts down
                after[0] -= 1
                if after[0] == 0:
                    daemon.kill()

            handle = asked.model.model.layers[1].register_forward_pre_hook(kill)
            try:
                asked.check(number, cache)
            finally:
                handle.remove()
            daemon.kill()
            asked.check(number + 1, cache)
            daemon.start()
            asked.check(number + 2, cache)
        assert cache._store._store.wait_connected(60)
        deadline = time.monotonic() + 60
        cache.reset()
        while not loaded(cache):  # the breaker asks again after some seconds
            asked.check(0, make_cache(asked.model, daemon.url, lookup_s=0.2))
            assert time.monotonic() < deadline


@pytest.mark.parametrize("rounds", ROUNDS)
def test_a_daemon_that_is_stopped(rounds, make_cache, make_daemon):
    daemon = make_daemon()
    asked = Asked(reference_model("gemma3"))
    cache = make_cache(asked.model, daemon.url, lookup_s=0.2)
    asked.check(0, cache)
    assert cache.flush(60)
    daemon.hang()
    try:
        began = time.monotonic()
        for number in range(rounds):
            asked.check(number, cache)
            cache.reset()
        hung = time.monotonic() - began
    finally:
        daemon.go_on()
    assert cache.errors.counts["late lookups"] >= 1
    # The breaker: most requests do not wait for an answer.
    assert hung < 30 + rounds * 1.5
    for number in range(3):
        asked.check(number, cache)


@pytest.mark.parametrize("rounds", ROUNDS)
def test_a_daemon_that_is_full(rounds, make_cache, make_daemon):
    daemon = make_daemon(host_bytes=1 << 20, disk=False)
    for name in KINDS:
        asked = Asked(reference_model(name))
        cache = make_cache(asked.model, daemon.url)
        for number in range(-(-rounds // len(KINDS))):
            asked.check(number, cache)
            cache.reset()


@pytest.mark.parametrize("rounds", ROUNDS)
def test_a_full_disk(rounds, make_cache, make_daemon, tmp_path):
    switch = tmp_path / "full"
    daemon = make_daemon(host_bytes=1 << 20, program=(str(full_disk.__file__), str(switch)))
    asked = Asked(reference_model("gemma3"))
    cache = make_cache(asked.model, daemon.url)
    asked.check(0, cache)
    daemon.wait_written()
    switch.touch()
    for number in range(rounds):
        asked.check(number, cache)
        cache.reset()
    assert switch.with_suffix(".struck").exists()
    switch.unlink()
    asked.check(0, cache)


def test_a_daemon_that_is_absent_and_comes(make_cache, make_daemon):
    daemon = make_daemon()
    daemon.kill()
    asked = Asked(reference_model("llama3"), prompts=2)
    cache = make_cache(asked.model, daemon.url, lookup_s=0.1)
    asked.check(0, cache)
    assert loaded(cache) == 0
    daemon.start()
    assert cache._store._store.wait_connected(60)
    deadline = time.monotonic() + 60
    while not loaded(cache):
        cache.reset()
        asked.check(0, cache)
        assert time.monotonic() < deadline


def test_errors_in_the_store_are_misses(llama, make_cache, monkeypatch, caplog):
    """Each of the store's methods raises. Lookups come last: after two failures the store is left alone for
    a moment."""
    asked = Asked(llama)
    cache = make_cache(llama)
    asked.check(0, cache)
    assert cache.flush(60)
    for name, place in (("load", "loading"), ("save", "saving"), ("lookup", "looking up")):

        def broken(*_, name=name, **__):
            raise RuntimeError(name)

        with monkeypatch.context() as patched:
            patched.setattr(type(cache._store._store), name, broken)
            for number in (5, 6, 7) if name == "save" else (0, 1, 0):
                asked.check(number, cache)
                cache.reset()
        assert len([line for line in caplog.messages if place in line]) == 1
    cache.errors.counts.clear()  # they were wanted
    loaded(cache)
    deadline = time.monotonic() + 60
    while not loaded(cache):
        cache.reset()
        asked.check(0, cache)
        assert time.monotonic() < deadline
