"""Handlers of requests that move pages between the daemon and its clients, through the arena or as frames."""

from __future__ import annotations

import array
import asyncio
import time
from collections.abc import Awaitable, Sequence
from typing import cast

import numpy as np
import numpy.typing as npt

from tierstore.backend import Located, Reservation, SaveHints
from tierstore.core.clients import Refusal
from tierstore.daemon.client_connections import ClientConnection, PageFrames, Reply, checked_wait, then
from tierstore.errors import StoreClosedError
from tierstore.types import Hint, Reuse
from tierstore.wire import messages as p

_SENDING_BYTES = 2 * p.MAX_FETCH_BYTES  # limit of unsent pages for one TCP client


def prefetch(connection: ClientConnection, m: p.Prefetch) -> Reply | Awaitable[Reply]:
    wait_s = checked_wait(m.wait_s)
    lease = connection.lease(m.lease)
    if m.first < 0:
        raise Refusal("usage", f"first must not be negative, got {m.first}")
    if lease is None:
        return p.Prefetched(m.id, 0)
    fetched = connection.backend.prefetch(lease, first=m.first, wait_s=wait_s)
    return then(fetched, lambda pages: p.Prefetched(m.id, pages))


def load(connection: ClientConnection, m: p.Locate) -> Reply | Awaitable[Reply]:
    wait_s = checked_wait(m.wait_s)
    lease, count = connection.pages_asked_for(m)
    if lease is None:
        return p.Offsets(m.id, b"")

    def answer(there: Located | None) -> p.Offsets:
        if there is None:
            return p.Offsets(m.id, b"")
        checksums = array.array("Q", there.checksums).tobytes()
        return p.Offsets(m.id, _offsets(connection, there.addresses), checksums)

    return then(connection.backend.locate(lease, m.first, count, wait_s=wait_s), answer)


async def fetch(connection: ClientConnection, m: p.Fetch) -> Reply:
    wait_s = checked_wait(m.wait_s)
    lease, count = connection.pages_asked_for(m)
    if lease is None:
        return p.Fetched(m.id, 0, b"")
    page_bytes = lease.page_bytes
    if count > 1 and count * page_bytes > p.MAX_FETCH_BYTES:
        raise Refusal(
            "usage", f"{count} pages of {page_bytes} bytes exceed the limit of {p.MAX_FETCH_BYTES} bytes"
        )
    ends = time.monotonic() + wait_s
    nbytes = count * page_bytes
    if not await _room_to_send(connection, nbytes, wait_s):
        return p.Fetched(m.id, 0, b"")
    connection.sending_bytes += nbytes
    pages = 0
    try:
        left = max(ends - time.monotonic(), 0.0)
        sending = await connection.backend.reading.send(lease, m.first, count, wait_s=left)
        pages = len(sending.frames)
    finally:
        connection.note_sent(nbytes - pages * page_bytes)
    answer = p.Fetched(m.id, pages, array.array("Q", sending.checksums).tobytes())

    def sent() -> None:
        connection.note_sent(pages * page_bytes)
        sending.release()

    if not pages:
        sending.release()
        return answer
    return PageFrames(answer, sending.frames, sent)


async def _room_to_send(connection: ClientConnection, nbytes: int, wait_s: float) -> bool:
    """Wait until a client has read so much that ``nbytes`` more do not exceed the limit of unsent pages.
    Return False after ``wait_s`` seconds, or if the client is gone."""
    loop = asyncio.get_running_loop()
    ends = loop.time() + wait_s
    while connection.sending_bytes and connection.sending_bytes + nbytes > _SENDING_BYTES:
        sent = loop.create_future()
        with connection.waiting():
            connection.sent.append(sent)
            await asyncio.wait({sent}, timeout=max(ends - loop.time(), 0))
        if not sent.done():
            connection.sent.remove(sent)
            return False
    return not connection.client.ended


def report_damage(connection: ClientConnection, m: p.ReportDamage) -> None:
    lease = connection.lease(m.lease)
    if lease is not None and m.page in range(lease.pages):
        connection.backend.report_damage(lease, m.page)


def reserve(connection: ClientConnection, m: p.Reserve) -> Reply | Awaitable[Reply]:
    view = connection.view(m.prompt)
    if m.first < 0 or m.count < 0 or m.first + m.count > view.num_chunks:
        raise Refusal(
            "usage",
            f"chunks {m.first} … {m.first} + {m.count} must lie within the prompt's {view.num_chunks} chunks",
        )
    hint = None
    if m.hint is not None:
        reuse = cast("Reuse | None", m.hint.reuse)
        hint = Hint(m.hint.ttl_s, reuse, m.hint.priority, m.hint.elsewhere)

    def answer(reservation: Reservation | None) -> p.Reserved:
        told = _reserved(connection, m.id, reservation)
        elsewhere = hint is not None and hint.elsewhere
        cluster = connection.cluster
        if cluster is None or not cluster.publishes(view, elsewhere=elsewhere):
            return told
        chunks = view.shared(range(m.first, min(m.first + m.count, view.whole_chunks)))
        if told.reservation:
            connection.sharing[told.reservation] = view.slice(chunks)[0], len(chunks)
        elif elsewhere:  # nothing was reserved: each page is stored already, or is not stored at all
            missing = set(connection.backend.lookups.missing(view, len(chunks) * view.chunk_tokens).wait())
            held = [chunk for chunk in chunks if chunk not in missing]
            cluster.committed(view.slice(held)[0], len(held))
        return told

    hints = SaveHints(hint, m.session or None)
    return then(connection.backend.reserve(view, m.first, m.count, hints=hints), answer)


def _reserved(connection: ClientConnection, number: int, reservation: Reservation | None) -> p.Reserved:
    if reservation is None:
        raise StoreClosedError("the store is closed")
    handle = reservation.handle
    path, known = (handle.number, handle.chunks) if handle is not None else (0, 0)
    positions = array.array("I", reservation.positions).tobytes()
    offsets = _offsets(connection, reservation.addresses or ())
    return p.Reserved(number, reservation.number, positions, offsets, reservation.stored_tokens, path, known)


def _offsets(connection: ClientConnection, addresses: Sequence[int]) -> bytes:
    """Return the offsets of these addresses in the arena."""
    start = np.uint64(connection.backend.core.arena_address)
    offsets: npt.NDArray[np.uint64] = np.array(addresses, np.uint64) - start
    return offsets.tobytes()


def write(connection: ClientConnection, m: p.Write, frames: Sequence[memoryview]) -> Reply | Awaitable[Reply]:
    reservation = connection.client.reservation(m.reservation)
    pages = reservation.pages[m.first : m.first + len(frames)] if m.first >= 0 else []
    nbytes = sum(frame.nbytes for frame in frames)
    if not frames or len(pages) != len(frames):
        raise Refusal("usage", f"{len(frames)} frames do not fit the reservation from page {m.first} on")
    if any(frame.nbytes != reservation.page_bytes for frame in frames):
        raise Refusal("usage", f"pages of this reservation must have {reservation.page_bytes} bytes")
    if len(frames) > 1 and nbytes > p.MAX_FETCH_BYTES:
        raise Refusal("usage", f"{nbytes} bytes exceed the limit of {p.MAX_FETCH_BYTES} bytes for one Write")
    return then(connection.backend.write(reservation, m.first, frames), lambda _: p.Written(m.id))


def commit(connection: ClientConnection, m: p.Commit) -> Reply | Awaitable[Reply]:
    reservation = connection.client.reservation(m.reservation)
    if len(m.done) % 4 or len(m.checksums) != 2 * len(m.done):
        raise Refusal(
            "usage", f"{len(m.done)} bytes of positions do not match {len(m.checksums)} bytes of checksums"
        )
    done = dict(zip(array.array("I", m.done), array.array("Q", m.checksums), strict=True))
    unknown = done.keys() - set(reservation.positions)
    if unknown or len(done) != len(m.done) // 4:
        raise Refusal("usage", "some positions were not reserved, or occur twice")
    if reservation.copying:
        raise Refusal("usage", "pages of this reservation are still being written")
    sharing = connection.sharing.pop(m.reservation, None)

    def answer(pages: int) -> p.Committed:
        if sharing is not None and (cluster := connection.cluster) is not None:
            cluster.committed(*sharing)
        return p.Committed(m.id, pages)

    return then(connection.backend.commit(reservation, done), answer)


def abort(connection: ClientConnection, m: p.Abort) -> None:
    reservation = connection.client.reservations.get(m.reservation)
    if reservation is not None:
        connection.backend.abort(reservation)
    connection.sharing.pop(m.reservation, None)
