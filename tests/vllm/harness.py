"""What these tests ask again and again: answers that nothing was reused for, and answers that must equal
them."""

from __future__ import annotations

import time

from tests.vllm.engines import Ask, connector_options, greatest_difference

EXACT = 1e-5  # between log-probabilities, of which float32 keeps seven digits


def patient(url, **extra):
    """``connector_options`` for where a hit is expected: a slow machine is not a daemon that hangs."""
    return connector_options(url, lookup_s=20.0, prefetch_s=60.0, load_s=60.0, **extra)


def wait_stored(daemon, pages, timeout_s=60.0):
    """Until the daemon holds ``pages`` pages."""
    ends = time.monotonic() + timeout_s
    while daemon.stats().store.pages < pages:
        assert time.monotonic() < ends, f"{daemon.stats().store.pages} of {pages} pages were stored"
        time.sleep(0.02)


def wait_hit(engine, ask, tokens, timeout_s=60.0):
    """Ask until ``tokens`` come from the store (saves take a moment, and so does a daemon that comes
    back)."""
    ends = time.monotonic() + timeout_s
    while True:
        engine.reset_prefix_cache()
        answers = engine.ask(ask)
        if answers.external_hit_tokens == tokens:
            return answers
        assert time.monotonic() < ends, (
            f"{answers.external_hit_tokens} tokens came from the store, not {tokens}"
        )


def same(answers, reference, tolerance=EXACT):
    """Whether all are finished and equal those of ``reference``."""
    for mine, theirs in zip(answers.answers, reference.answers, strict=True):
        assert mine.finish == "length", mine.finish
        difference = greatest_difference(mine, theirs)
        assert difference <= tolerance, f"log-probabilities differ by {difference}"
    return True


def asks(prompts, max_tokens=8):
    return [Ask(tokens, max_tokens) for tokens in prompts]
