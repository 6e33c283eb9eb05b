"""Policies that listen to hints."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tierstore.policy.base import Number, PageFacts, Policy, Reuse

_BAND = 2.0**40  # more than any worth within one
_PRIORITIES = 256


def band(facts: PageFacts) -> Number:
    """What a hint adds to a page's worth: what was said of its reuse decides, then its priority, then
    whatever
    this is added to."""
    if isinstance(facts.reuse, int) and not facts.reuse and not facts.priority:
        return 0.0  # nothing is known of nearly all pages
    return (np.multiply(facts.reuse, float(_PRIORITIES)) + facts.priority) * _BAND


def reconciled(reuse: Sequence[int]) -> list[int]:
    """What was said of the pages of one prompt, each on its own, without its contradictions: whenever a page
    is
    used, so are all before it. So some leading pages are worth keeping and those after them are not: as many
    that fewest of what was said is wrong. (One wrong "likely" would keep all pages before it.)"""
    ahead = most = split = 0
    for position, said in enumerate(reuse, 1):
        ahead += (said > 0) - (said < 0)
        if ahead >= most:
            most, split = ahead, position
    keep = [max(said, Reuse.UNKNOWN) for said in reuse[:split]]
    for position in range(split - 2, -1, -1):
        keep[position] = max(keep[position], keep[position + 1])
    return keep + [min(said, Reuse.UNKNOWN) for said in reuse[split:]]


class Hinted(Policy):
    """What is done leaves first, then what is unlikely to be used, and what is likely to last; each least
    recently used first."""

    name = "hinted"

    def score(self, facts: PageFacts) -> Number:
        return band(facts) + facts.last_use


class Priority(Policy):
    """Pages whose time to live is over leave first (and those that are done), then those of the lowest
    priority, least recently used first. What is likely or not does not count."""

    name = "priority"

    def score(self, facts: PageFacts) -> Number:
        over = np.equal(facts.reuse, Reuse.DONE)
        return (facts.priority - over * float(_PRIORITIES)) * _BAND + facts.last_use
