"""Reasons of missed tokens add up, in counters and in the log."""

from __future__ import annotations

import logging
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierstore.errors import StoreClosedError
from tierstore.explanation import Explanation, Miss, MissReason
from tierstore_connectors.common.counters import ConnectorCounters
from tierstore_connectors.common.explaining import MissReporter, missed
from tierstore_connectors.common.guard import ErrorLog

LOG = logging.getLogger("tests.explaining")
EVICTED = Miss(MissReason.EVICTED, 64, 36, tier="host")


@given(
    spans=st.lists(st.integers(1, 50), max_size=5),
    hit=st.integers(0, 100),
    share=st.floats(0, 1),
    computes=st.booleans(),
)
def test_misses_and_reused_tokens_are_exactly_the_prompt(spans, hit, share, computes):
    misses, at = [], hit
    for tokens in spans:
        misses.append(Miss(MissReason.EVICTED, at, tokens, tier="host"))
        at += tokens
    reused = round(share * at)
    found = missed(Explanation(at, hit, tuple(misses)), reused, computes=computes)
    Explanation(at, reused, found).check()
    if reused < hit:
        assert found[0].reason is (MissReason.DECLINED if computes else MissReason.LATE)


@pytest.fixture
def counters():
    return ConnectorCounters()


@pytest.fixture
def errors():
    return ErrorLog(LOG)


@pytest.fixture
def reporter(counters, errors):
    made = MissReporter(LOG, counters, errors)
    yield made
    made.close()


def ended(reporter):
    """Wait for everything that was asked for."""
    reporter._thread.shutdown(wait=True)


def test_a_request_is_counted_and_logged_once(reporter, counters, caplog):
    caplog.set_level(logging.INFO, LOG.name)
    reporter.explain("a", 110, 80, lambda: Explanation(100, 64, (EVICTED,)))
    ended(reporter)
    assert counters.take() == {"missed_tokens:evicted": 20, "missed_tokens:tail": 10}
    assert [record.getMessage() for record in caplog.records] == [
        "tierstore: request a: 110 tokens, 80 reused; missed: 20 from token 80 on: evicted from host; "
        "10 from token 100 on: less than a chunk, or computed in any case"
    ]


def test_a_tail_alone_is_not_worth_a_line(reporter, counters, caplog):
    caplog.set_level(logging.INFO, LOG.name)
    reporter.report("a", 110, 100, [])
    assert counters.take() == {"missed_tokens:tail": 10}
    assert not caplog.records


def test_a_line_has_a_limit(reporter, caplog):
    caplog.set_level(logging.INFO, LOG.name)
    reporter.report("a", 20, 0, [Miss(MissReason.EVICTED, at, 1, age_s=float(at)) for at in range(20)])
    assert caplog.records[0].getMessage().endswith("; and 14 more")
    assert caplog.records[0].getMessage().count("evicted") == 6


def test_requests_beyond_the_limit_are_counted_as_unexplained(reporter, counters):
    go_on = threading.Event()
    names = set()

    def slow():
        names.add(threading.current_thread().name)
        assert go_on.wait(30)
        return Explanation(100, 64, (EVICTED,))

    for number in range(18):
        reporter.explain(f"request {number}", 100, 64, slow)
    assert counters.take() == {"missed_tokens:unexplained": 2 * 36}  # at once: nothing has waited
    go_on.set()
    ended(reporter)
    assert counters.take() == {"missed_tokens:evicted": 16 * 36}
    assert names == {"tierstore-explain_0"}


def test_an_error_is_counted_and_ends_nothing(reporter, counters, errors):
    def fails(error):
        raise error

    reporter.explain("closed", 100, 64, lambda: fails(StoreClosedError("the connection was replaced")))
    reporter.explain("broken", 50, 0, lambda: fails(ValueError("broken")))
    reporter.explain("right", 100, 64, lambda: Explanation(100, 64, (EVICTED,)))
    ended(reporter)
    assert counters.take() == {"missed_tokens:unexplained": 36 + 50, "missed_tokens:evicted": 36}
    assert errors.counts == {"explaining missed tokens": 1}
