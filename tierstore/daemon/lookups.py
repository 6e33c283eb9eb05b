"""Handlers of lookups, for pages on this host and on other hosts."""

from __future__ import annotations

import array
from collections.abc import Awaitable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

from tierstore.backend import GroupLease, HitLease, Lease
from tierstore.core.clients import LocalLease, Refusal
from tierstore.core.hits import HitView
from tierstore.core.prompts import NamedView, PromptView
from tierstore.daemon.client_connections import ClientConnection, PageFrames, Reply, checked_wait, then
from tierstore.errors import StoreClosedError
from tierstore.groups import search
from tierstore.planner import TierRate
from tierstore.stats import DECLINED
from tierstore.transfer import Transfer, TransferState
from tierstore.wire import messages as p

if TYPE_CHECKING:  # the module is imported only by daemons with a cluster
    from tierstore.cluster.supervisor import Cluster

Rates: TypeAlias = dict[str, tuple[float, float, float]]


def find_hit(connection: ClientConnection, m: p.FindHit) -> Reply | Awaitable[Reply]:
    wait_s = _begin(connection, m)
    view = connection.hit_view(m)
    hit = connection.backend.find_hit(view, patience_s=wait_s)
    rates = _on_wire(connection.backend.rates())
    cluster = connection.cluster
    if cluster is None:
        return then(hit, partial(_hit_found, m.id, rates))
    return _find_hit_elsewhere(cluster, connection, view, hit, m, rates)


def lookup(connection: ClientConnection, m: p.Find) -> Reply | Awaitable[Reply]:
    wait_s = _begin(connection, m)
    view = connection.view(m.prompt)
    if m.max_tokens < 0:
        raise Refusal("usage", f"max_tokens must not be negative, got {m.max_tokens}")
    if m.expect and m.expect_s:
        if m.expect < 0 or not 0 <= m.expect_s <= p.MOST_EXPECT_S:
            between = f"expect_s must lie between 0 and {p.MOST_EXPECT_S:.0f}"
            raise Refusal("usage", f"{m.expect} tokens expected within {m.expect_s} s: {between}")
        expected = connection.backend.expect(view, tokens=m.expect, wait_s=m.expect_s)
        if not expected.done:
            connection.service.promised_lookups += 1
            return _find_later(connection, view, m, wait_s, expected)
    return _find(connection, view, m, wait_s)


def unexpect(connection: ClientConnection, m: p.Unexpect) -> None:
    expected = connection.expected.get(m.lookup)
    if expected is not None:
        expected.cancel()


async def fetch_remote(connection: ClientConnection, m: p.FetchRemote) -> Reply:
    wait_s = checked_wait(m.wait_s)
    view = connection.view(m.prompt)
    if m.first < 0 or m.count < 0:
        raise Refusal("usage", f"first and count must not be negative, got {m.first} and {m.count}")
    cluster = connection.cluster
    return p.FetchedRemote(
        m.id, await cluster.fetch_remote(view, m.first, m.count, wait_s) if cluster is not None else 0
    )


def _begin(connection: ClientConnection, m: p.Find | p.FindHit) -> float:
    """Handle the fields that all lookups have. Return the seconds that the lookup may wait."""
    connection.release(m.released)
    declined = {why: count for why, count in m.declined.items() if why in DECLINED and count > 0}
    if declined:
        connection.backend.declined(declined)
    return checked_wait(m.wait_s)


async def _find_later(
    connection: ClientConnection, view: PromptView, m: p.Find, wait_s: float, expected: Transfer[None]
) -> Reply:
    """Wait until the promised pages of a prompt are stored or late, and then look the prompt up."""
    with ExitStack() as ending:
        if (cluster := connection.cluster) is not None:
            missing = connection.backend.lookups.missing(view, m.expect).wait()
            if missing:
                wanted, first = view.slice(missing)
                count = m.expect // view.chunk_tokens - first
                ending.callback(cluster.expect(wanted, first, count, m.expect_s))
        connection.expected[m.id] = expected
        ending.callback(connection.expected.pop, m.id, None)
        await expected
    connection.service.broken_promises += expected.state is TransferState.EXPIRED
    reply = _find(connection, view, m, wait_s)
    return reply if reply is None or isinstance(reply, p.Message | PageFrames) else await reply


def _find(
    connection: ClientConnection, view: PromptView, m: p.Find, wait_s: float
) -> Reply | Awaitable[Reply]:
    if m.expect and not m.max_tokens:  # a request that only waits for promised pages is not a miss
        return p.Found(m.id, 0, 0, 0, [], 0, 0)
    lease = connection.backend.find(view, patience_s=wait_s, max_tokens=m.max_tokens, counted=m.counted)
    rates = _on_wire(connection.backend.rates())
    cluster = connection.cluster
    if cluster is None:
        return then(lease, partial(_found, m.id, rates))
    return _look_further(cluster, view, lease, m, rates)


async def _look_further(
    cluster: Cluster, view: PromptView, lease: Transfer[Lease | None], m: p.Find, rates: Rates
) -> Reply:
    """Answer a lookup. The answer also contains which of the missing named pages other hosts have."""
    answer = _found(m.id, rates, await lease)
    if isinstance(view, NamedView):
        here = set(array.array("I", answer.positions))
        lacking = [at for at in range(view.whole_chunks) if at not in here]
        there = await cluster.look_for(view.part(lacking), m.gain)
        if there:
            answer.remote_positions = array.array("I", [lacking[at] for at in there]).tobytes()
            answer.rates = {**answer.rates, **_on_wire(cluster.rates())}
    else:
        cluster.used(view, answer.tokens // view.chunk_tokens)
    return answer


async def _find_hit_elsewhere(
    cluster: Cluster,
    connection: ClientConnection,
    view: HitView,
    hit: Transfer[HitLease | None],
    m: p.FindHit,
    rates: Rates,
) -> Reply:
    """Answer with the hit. The answer also contains how much longer it would be with pages of other hosts."""
    answer = _hit_found(m.id, rates, await hit)
    chunk_tokens, lookups = view.chunk_tokens, connection.backend.lookups
    reach = view.num_tokens
    held = [lookups.held(chain, view.num_tokens) // chunk_tokens for chain in view.chains]
    for chain, here, chunks in zip(view.chains, view.here, held, strict=True):
        cluster.used(chain, chunks)
        more = 0
        if chunks < min(chain.whole_chunks, view.num_tokens // chunk_tokens):
            more = await cluster.look(chain, chunks)
        reach = min(reach, max(here, (chunks + more) * chunk_tokens))
    reach -= reach % chunk_tokens
    if reach <= answer.tokens:
        return answer
    remote: dict[int, set[int]] = {}
    looking = search({at: group.rule for at, group in enumerate(view.named)}, reach, chunk_tokens)
    try:
        wanted = next(looking)
        while True:
            there = {}
            for at, ends in wanted.items():
                group = view.named[at]
                asked = [end for end in ends if end not in group.here]
                pages = view.pages(group, asked)
                lacking = await lookups.missing(pages, patience_s=m.wait_s)
                far = await cluster.look_for(pages.part(lacking), reach - answer.tokens)
                remote[at] = {asked[lacking[place]] for place in far}
                nowhere = {asked[place] for place in lacking} - remote[at]
                there[at] = [end for end in ends if end not in nowhere]
            wanted = looking.send(there)
    except StopIteration as end:
        length = int(end.value)
    if length <= answer.tokens:
        return answer
    answer.remote_tokens = length - answer.tokens
    for group_found, chunks in zip(answer.chains, held, strict=True):
        ends = range((chunks + 1) * chunk_tokens, length + 1, chunk_tokens)
        group_found.remote_ends = array.array("I", ends).tobytes()
    for at, group in enumerate(view.named):
        needed = remote.get(at, set()).intersection(group.rule.ends(length, chunk_tokens))
        answer.named[at].remote_ends = array.array("I", sorted(needed)).tobytes()
    answer.rates = {**answer.rates, **_on_wire(cluster.rates())}
    return answer


def _found(number: int, rates: Rates, lease: Lease | None) -> p.Found:
    if lease is None:
        raise StoreClosedError("the store is closed")
    if not isinstance(lease, LocalLease) or not lease.number:
        return p.Found(number, 0, 0, 0, [], 0, 0)
    path, known = (lease.handle.number, lease.handle.chunks) if lease.handle is not None else (0, 0)
    positions = array.array("I", lease.positions).tobytes()
    runs = list(lease.runs)
    return p.Found(number, lease.tokens, lease.tail_tokens, lease.number, runs, path, known, positions, rates)


def _hit_found(number: int, rates: Rates, hit: HitLease | None) -> p.HitFound:
    if hit is None:
        raise StoreClosedError("the store is closed")
    chains, named = map(_group_found, hit.chains), map(_group_found, hit.named)
    misses = list(hit.misses)
    return p.HitFound(number, hit.tokens, hit.branch, list(chains), list(named), rates=rates, misses=misses)


def _group_found(group: GroupLease) -> p.GroupFound:
    lease = group.lease
    path, known = (lease.handle.number, lease.handle.chunks) if lease.handle is not None else (0, 0)
    return p.GroupFound(lease.number, lease.tokens, list(lease.runs), path, known)


def _on_wire(rates: Mapping[str, TierRate]) -> Rates:
    return {tier: (way.bytes_per_s, way.latency_s, way.backlog_s) for tier, way in rates.items()}
