"""Handlers of requests that register and list identities, and that pin, evict, forget and count pages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable
from dataclasses import asdict, replace
from functools import partial

import msgspec

from tierstore.backend import Registration
from tierstore.core.clients import Refusal
from tierstore.core.core import Core
from tierstore.daemon.client_connections import ClientConnection, Reply, checked_wait, then
from tierstore.daemon.stats import LayersStats, TenantStats, version
from tierstore.errors import SpecError
from tierstore.index import LABELS, Tier
from tierstore.keys import Identity, nested_tenant, outer_tenant
from tierstore.spec import check_page, layers_label
from tierstore.wire import messages as p

_MOST_MODELS = 16  # in the statistics of layers
_MOST_PAGE_BYTES = 1 << 30
_MOST_CHUNK_TOKENS = 1 << 16


def register(connection: ClientConnection, m: p.Register) -> p.Registered:
    named = len(m.model_name) + sum(len(name) + len(value) for name, value in m.identity.items())
    if named > p.MAX_IDENTITY_BYTES:
        raise Refusal("usage", f"an identity may have at most {p.MAX_IDENTITY_BYTES} bytes")
    if not 1 <= m.page_bytes <= _MOST_PAGE_BYTES or not 1 <= m.chunk_tokens <= _MOST_CHUNK_TOKENS:
        raise Refusal("usage", f"unsupported page size: {m.page_bytes} bytes for {m.chunk_tokens} tokens")
    try:
        check_page(m.page_bytes, m.chunk_tokens)
    except SpecError as error:
        raise Refusal("usage", str(error)) from error
    try:
        identity = Identity(**m.identity)
    except TypeError as error:
        raise Refusal("usage", f"not an identity: {error}") from error
    if connection.tenant:
        identity = replace(identity, tenant=nested_tenant(connection.tenant, identity.tenant))
    elif identity.tenant.startswith("[") and outer_tenant(identity.tenant) is None:
        raise Refusal("usage", 'a tenant whose name begins with \'[\' must be nested: ["TENANT","NAME"]')
    registration = Registration(identity, m.page_bytes, m.chunk_tokens, m.model_name)
    number = connection.backend.assign_number(registration)
    return p.Registered(m.id, number, connection.backend.core.forgetting.latest(registration))


async def identities(connection: ClientConnection, m: p.Identities) -> p.IdentitiesAnswer:
    known = dict(connection.backend.core.registered)
    disk = connection.backend.core.disk

    def listed() -> p.IdentitiesAnswer:
        if disk is not None:
            known.update((identity.digest, identity) for identity in disk.identities())
        answer = p.IdentitiesAnswer(m.id, [])
        nbytes = 0
        for digest in sorted(digest for digest in known if digest > m.after):
            identity = _seen_by(connection, known[digest])
            if identity is None:
                continue
            if nbytes > p.MAX_LIST_BYTES:
                break
            fields = asdict(identity)
            nbytes += sum(len(name) + len(value.encode()) + 6 for name, value in fields.items())
            answer.identities.append(fields)
            answer.more = digest
        else:
            answer.more = b""
        return answer

    with connection.waiting():
        return await connection.aside(listed)


def _seen_by(connection: ClientConnection, identity: Identity) -> Identity | None:
    """Return an identity as the client would register it; None if it belongs to another tenant."""
    nested = identity.tenant.startswith("[")
    if not connection.tenant:
        return None if nested else identity
    if not nested:
        return None
    outer, inner = msgspec.json.decode(identity.tenant, type=tuple[str, str])
    return replace(identity, tenant=inner) if outer == connection.tenant else None


def pin(connection: ClientConnection, m: p.Pin) -> Reply | Awaitable[Reply]:
    view = connection.view(m.prompt)

    def pinned(tokens: int | Refusal) -> p.Pinned:
        if isinstance(tokens, Refusal):
            raise tokens
        return p.Pinned(m.id, tokens)

    most = None if m.max_tokens < 0 else m.max_tokens
    return then(connection.backend.lookups.pin(view, undo=m.undo, max_tokens=most), pinned)


def unpin(connection: ClientConnection, m: p.Unpin) -> p.Unpinned:
    if connection.tenant:
        raise Refusal("denied", "a client with a tenant must unpin each prompt separately")
    core = connection.backend.core
    with core.state.lock:
        return p.Unpinned(m.id, core.pins.lift(m.tenant))


async def evict(connection: ClientConnection, m: p.Evict) -> p.Evicted:
    if connection.tenant:
        raise Refusal("denied", "a client with a tenant may not evict other tenants' pages")
    if m.tier not in LABELS:
        raise Refusal("usage", f"unknown tier {m.tier!r}")
    if m.tier == Tier.HBM.label:
        return p.Evicted(m.id, 0)
    wanted = None if m.pages < 0 else m.pages
    return p.Evicted(m.id, await connection.aside(partial(connection.backend.evict, m.tier, wanted)))


async def forget(connection: ClientConnection, m: p.Forget) -> p.Forgotten:
    """Forget pages. A client with a tenant can forget only this tenant's pages."""
    forgetting = connection.backend.core.forgetting
    what = connection.backend.forgettable(tenant=m.tenant, model=m.model, session=m.session)
    cluster = connection.service.cluster
    if cluster is None or not cluster.sealed or what.session is not None:
        return p.Forgotten(m.id, await connection.aside(partial(forgetting.forget, what)))
    scopes = await connection.aside(partial(forgetting.scopes, what))
    here = connection.aside(partial(forgetting.forget, what))
    return p.Forgotten(m.id, await cluster.forget(what, scopes, here))


async def flush(connection: ClientConnection, m: p.Flush) -> p.Flushed:
    wait_s = checked_wait(m.wait_s)
    with connection.waiting():
        return p.Flushed(m.id, await connection.aside(partial(connection.backend.flush, wait_s)))


def missed_requests(connection: ClientConnection, m: p.MissedRequests) -> p.MissedRequestsAnswer:
    if m.most < 0:
        raise Refusal("usage", f"most must not be negative, got {m.most}")
    core = connection.backend.core
    with core.state.lock:
        requests = core.misses.recent(connection.tenant or None)
    return p.MissedRequestsAnswer(m.id, requests[: m.most])


async def stats(connection: ClientConnection, m: p.Stats) -> p.StatsAnswer:
    """Return the daemon's statistics. A client with a tenant gets only those of its tenant."""
    if not connection.tenant:
        return p.StatsAnswer(m.id, await connection.aside(connection.service.stats_json))
    core = connection.backend.core
    with core.state.lock:
        tenants = {connection.tenant: tenant_stats(core, connection.tenant)}
    clients = [
        each.stats() for each in connection.service.connections.values() if each.tenant == connection.tenant
    ]
    view = {"version": version(), "service": {"tenants": tenants, "clients": clients}}
    return p.StatsAnswer(m.id, msgspec.json.encode(view))


def tenant_stats(core: Core, tenant: str) -> TenantStats:
    """Return the statistics of a tenant. The caller holds ``core.state.lock``."""
    return TenantStats(
        lookup_tokens=core.lookup_tokens[tenant],
        hit_tokens={label: core.hit_tokens[tenant, label] for label in LABELS},
        host_bytes=core.quotas.used_bytes(tenant),
        quota_bytes=core.quotas.quotas.get(tenant),
        pinned_pages=core.pins.pages(tenant),
        pinned_bytes=core.pins.pinned_bytes[tenant],
    )


def layers_stats(core: Core) -> tuple[LayersStats, ...]:
    """Return the bytes in host memory by layer group, for the models with most bytes. The caller holds
    ``core.state.lock``."""
    models: dict[str, Counter[str]] = {}
    for digest, nbytes in core.state.residency.host_bytes.items():
        identity = core.state.identities.get(digest)
        if nbytes and identity is not None:
            model = core.state.names.get(digest, identity.model)
            models.setdefault(model, Counter())[layers_label(identity.layout)] += nbytes
    largest = sorted(models.items(), key=lambda each: -each[1].total())[:_MOST_MODELS]
    return tuple(
        LayersStats(model, layers, nbytes)
        for model, kinds in largest
        for layers, nbytes in kinds.most_common()
    )
