"""The curve by brute force, of whole traces: what the estimate has to come close to.

A trace is a list of prompts, each a list of numbers; equal numbers stand for equal prefixes.
"""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path

import xxhash

SLICE = Path(__file__).parents[2] / "data" / "mooncake" / "conversation_2000.jsonl.gz"


def mooncake() -> list[list[int]]:
    """The first 2,000 requests of a public trace of conversations."""
    with gzip.open(SLICE, "rt") as lines:
        return [json.loads(line)["hash_ids"] for line in lines]


def shared_beginnings(prompts=1500, *, systems=12, seed=0) -> list[list[int]]:
    """Conversations below system prompts of 1 to 100 pages, which are common to very different degrees."""
    generator = random.Random(seed)
    lengths = [generator.randint(1, 100) for _ in range(systems)]
    weights = [1 / (rank + 1) for rank in range(systems)]
    fresh = iter(range(1 << 40))
    conversations: list[list[int]] = []
    trace = []
    for _ in range(prompts):
        if conversations and generator.random() < 0.5:
            conversation = generator.choice(conversations[-300:])
        else:
            (system,) = generator.choices(range(systems), weights)
            conversation = [-1 - 1000 * system - page for page in range(lengths[system])]
            conversations.append(conversation)
        conversation += [next(fresh) for _ in range(generator.randint(1, 30))]
        trace.append(list(conversation))
    return trace


def long_documents(prompts=300, *, documents=40, pages=600, seed=0) -> list[list[int]]:
    """Questions about parts of documents of up to ``pages`` pages."""
    generator = random.Random(seed)
    return [
        [
            *range(document * pages, document * pages + generator.randint(1, pages)),
            *range(-1 - 20 * at - generator.randint(1, 19), -1 - 20 * at),
        ]
        for at, document in (
            (at, min(int(generator.expovariate(0.1)), documents - 1)) for at in range(prompts)
        )
    ]


def distances(trace, sizes=lambda page: 1) -> list[tuple[int, int | None]]:
    """For every page of every prompt, its size and the smallest cache that would have had it (None: none).
    The cache is a list of pages, the last used first, and of one prompt the last page leaves first."""
    used = 0
    last: dict[int, int] = {}
    tree = [0] * (2 * sum(map(len, trace)) + 2)
    held = 0
    found: list[tuple[int, int | None]] = []

    def add(at, size):
        while at < len(tree):
            tree[at] += size
            at += at & -at

    def up_to(at):
        total = 0
        while at:
            total += tree[at]
            at -= at & -at
        return total

    for prompt in trace:
        for page in prompt:
            before = last.get(page)
            older = held - up_to(before - 1) if before is not None else None
            found.append((sizes(page), older))
        for page in reversed(prompt):
            if page in last:
                add(last[page], -sizes(page))
            else:
                held += sizes(page)
            used += 1
            last[page] = used
            add(used, sizes(page))
    return found


def hit_rates(trace, capacities, sizes=lambda page: 1) -> list[float]:
    """The share of pages that caches of these sizes would have had."""
    found = distances(trace, sizes)
    return [
        sum(smallest is not None and smallest <= capacity for _, smallest in found) / len(found)
        for capacity in capacities
    ]


def keys_of(trace, salt=0) -> list[list[bytes]]:
    """Keys as a store has them."""
    known: dict[int, bytes] = {}
    for prompt in trace:
        for page in prompt:
            if page not in known:
                known[page] = xxhash.xxh3_128_digest(b"%d of %d" % (page, salt))
    return [[known[page] for page in prompt] for prompt in trace]
