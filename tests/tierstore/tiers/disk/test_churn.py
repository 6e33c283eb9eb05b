"""Traffic of several models through a full disk: the space is used, the right pages stay, the cap holds.

What a small cap costs: the index has at least 256 KiB and room for as much again as its trees (up to 2 MiB)
to rewrite them, and one slab of each size class may be half empty. At 192 MiB that is 2 to 3 % of the cap, at
1 GiB 1 %. Pages below 64 KiB cost more: each has half a KiB and more of the index.
"""

from __future__ import annotations

import statistics
from collections import OrderedDict

import pytest

from tierstore.units import KIB, MIB
from tierstore_tools.churn_day import ChurnTraffic, Day, Tenth

CAPACITY = 192 * MIB
SIZES = [64 * KIB, 160 * KIB, 512 * KIB, 1 * MIB]
TIMES = 3


@pytest.fixture(scope="module")
def requests():
    return []


@pytest.fixture(scope="module")
def day(tmp_path_factory, requests):
    with Day(
        tmp_path_factory.mktemp("churn") / "store",
        capacity_bytes=CAPACITY,
        times=TIMES,
        page_sizes=SIZES,
        seed=1,
        seen=requests.append,
    ) as day:
        day.run(lambda done, tenth: None)
        yield day


def test_the_space_is_used(day):
    samples = [sample for tenth in day.tenths for sample in tenth.utilisation]
    assert len(samples) > 20
    assert statistics.mean(samples) >= 0.95
    assert min(samples) >= 0.90
    assert sum(day.evening.utilisation) / len(day.evening.utilisation) < 0.75, "that was not filling up"


def test_the_cap_holds(day):
    assert day.most_taken_bytes <= CAPACITY


def test_nothing_is_dropped_for_want_of_room(day):
    assert day.dropped_pages <= day.written_pages // 1000


def test_moving_costs_less_than_it_gains(day):
    written = sum(tenth.written_bytes for tenth in day.tenths)
    moved = sum(tenth.moved_bytes for tenth in day.tenths)
    assert moved <= written / 3


def test_the_pages_that_stay_are_those_that_an_ideal_lru_keeps(day, requests):
    wanted = sum(tenth.lookup_tokens for tenth in (day.evening, *day.tenths))
    hits = sum(tenth.hit_tokens for tenth in (day.evening, *day.tenths))
    assert hits / wanted == pytest.approx(_ideal_hit_rate(requests, day.mean_bytes), abs=0.02)


def _ideal_hit_rate(requests, capacity_bytes):
    """Of an LRU that keeps this many bytes, wherever they lie; a prompt's deepest pages leave first."""
    kept: OrderedDict[bytes, int] = OrderedDict()
    used = wanted = hits = 0
    for request in requests:
        keys = request.prompt.keys
        found = next((at for at, key in enumerate(keys) if key not in kept), len(keys))
        wanted += len(keys)
        hits += found
        for key in reversed(keys):
            used += request.page_bytes if key not in kept else 0
            kept[key] = request.page_bytes
            kept.move_to_end(key)
        while used > capacity_bytes:
            used -= kept.popitem(last=False)[1]
    return hits / wanted


def test_traffic_is_the_same_for_the_same_seed():
    def first(seed):
        traffic = ChurnTraffic(SIZES, seed=seed, recent_bytes=64 * MIB, prompt_bytes=2 * MIB)
        return [traffic.next(at / 50).prompt.keys for at in range(50)]

    assert first(3) == first(3)
    assert first(3) != first(4)


def test_a_tenth_in_which_nothing_happened_has_figures_too():
    assert (Tenth().gb_per_s, Tenth().write_amplification, Tenth().hit_rate) == (0.0, 1.0, 0.0)
