"""The verbs that move pages between the daemon and its clients: through the arena, or in frames."""

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
from tierstore.daemon.sessions import PageFrames, Reply, Session, checked_wait, then
from tierstore.errors import StoreClosedError
from tierstore.types import Hint, Reuse
from tierstore.wire import messages as p

_WINDOW_BYTES = 2 * p.MAX_FETCH_BYTES  # of pages on their way to one client over TCP


def prefetch(session: Session, m: p.Prefetch) -> Reply | Awaitable[Reply]:
    wait_s = checked_wait(m.wait_s)
    lease = session.lease(m.lease)
    if m.first < 0:
        raise Refusal("usage", f"there is no page {m.first}")
    if lease is None:
        return p.Prefetched(m.id, 0)
    brought = session.backend.prefetch(lease, first=m.first, wait_s=wait_s)
    return then(brought, lambda pages: p.Prefetched(m.id, pages))


def load(session: Session, m: p.Load) -> Reply | Awaitable[Reply]:
    wait_s = checked_wait(m.wait_s)
    lease, count = session.pages_asked_for(m)
    if lease is None:
        return p.Located(m.id, b"")

    def answer(there: Located | None) -> p.Located:
        if there is None:
            return p.Located(m.id, b"")
        checksums = array.array("Q", there.checksums).tobytes()
        return p.Located(m.id, _offsets(session, there.addresses), checksums)

    return then(session.backend.locate(lease, m.first, count, wait_s=wait_s), answer)


async def fetch(session: Session, m: p.Fetch) -> Reply:
    wait_s = checked_wait(m.wait_s)
    lease, count = session.pages_asked_for(m)
    if lease is None:
        return p.Fetched(m.id, 0, b"")
    page_bytes = lease.page_bytes
    if count > 1 and count * page_bytes > p.MAX_FETCH_BYTES:
        raise Refusal("usage", f"{count} pages of {page_bytes} bytes are more than {p.MAX_FETCH_BYTES}")
    ends = time.monotonic() + wait_s
    nbytes = count * page_bytes
    if not await _room_to_send(session, nbytes, wait_s):
        return p.Fetched(m.id, 0, b"")
    session.sending_bytes += nbytes
    pages = 0
    try:
        left = max(ends - time.monotonic(), 0.0)
        sending = await session.backend.reading.send(lease, m.first, count, wait_s=left)
        pages = len(sending.frames)
    finally:
        session.note_sent(nbytes - pages * page_bytes)
    answer = p.Fetched(m.id, pages, array.array("Q", sending.checksums).tobytes())

    def sent() -> None:
        session.note_sent(pages * page_bytes)
        sending.release()

    if not pages:
        sending.release()
        return answer
    return PageFrames(answer, sending.frames, sent)


async def _room_to_send(session: Session, nbytes: int, wait_s: float) -> bool:
    """Wait until the client has read enough of what is on its way to it. A client that does not read costs no
    more than the window."""
    loop = asyncio.get_running_loop()
    ends = loop.time() + wait_s
    while session.sending_bytes and session.sending_bytes + nbytes > _WINDOW_BYTES:
        sent = loop.create_future()
        with session.waiting():
            session.sent.append(sent)
            await asyncio.wait({sent}, timeout=max(ends - loop.time(), 0))
        if not sent.done():
            session.sent.remove(sent)
            return False
    return not session.client.ended


def suspect(session: Session, m: p.Suspect) -> None:
    lease = session.lease(m.lease)
    if lease is not None and m.page in range(lease.pages):
        session.backend.suspect(lease, m.page)


def reserve(session: Session, m: p.Reserve) -> Reply | Awaitable[Reply]:
    view = session.view(m.prompt)
    if m.first < 0 or m.count < 0 or m.first + m.count > view.num_chunks:
        raise Refusal(
            "usage",
            f"chunks {m.first} … {m.first} + {m.count} do not lie within a prompt of {view.num_chunks}",
        )
    hint = None
    if m.hint is not None:
        reuse = cast("Reuse | None", m.hint.reuse)
        hint = Hint(m.hint.ttl_s, reuse, m.hint.priority, m.hint.elsewhere)

    def answer(reservation: Reservation | None) -> p.Reserved:
        told = _reserved(session, m.id, reservation)
        elsewhere = hint is not None and hint.elsewhere
        cluster = session.cluster
        if cluster is None or not cluster.publishes(view, elsewhere=elsewhere):
            return told
        chunks = view.shared(range(m.first, min(m.first + m.count, view.whole_chunks)))
        if told.reservation:
            session.sharing[told.reservation] = view.window(chunks)[0], len(chunks)
        elif elsewhere:  # it is here already, as far as it is
            missing = set(session.backend.lookups.missing(view, len(chunks) * view.chunk_tokens).wait())
            held = [chunk for chunk in chunks if chunk not in missing]
            cluster.committed(view.window(held)[0], len(held))
        return told

    hints = SaveHints(hint, m.session or None)
    return then(session.backend.reserve(view, m.first, m.count, hints=hints), answer)


def _reserved(session: Session, number: int, reservation: Reservation | None) -> p.Reserved:
    if reservation is None:
        raise StoreClosedError("the store is closed")
    handle = reservation.handle
    path, known = (handle.number, handle.chunks) if handle is not None else (0, 0)
    positions = array.array("I", reservation.positions).tobytes()
    offsets = _offsets(session, reservation.addresses or ())
    return p.Reserved(number, reservation.number, positions, offsets, reservation.stored_tokens, path, known)


def _offsets(session: Session, addresses: Sequence[int]) -> bytes:
    """Return where in the arena these addresses are."""
    start = np.uint64(session.backend.core.arena_address)
    offsets: npt.NDArray[np.uint64] = np.array(addresses, np.uint64) - start
    return offsets.tobytes()


def write(session: Session, m: p.Write, frames: Sequence[memoryview]) -> Reply | Awaitable[Reply]:
    reservation = session.client.reservation(m.reservation)
    pages = reservation.pages[m.first : m.first + len(frames)] if m.first >= 0 else []
    nbytes = sum(frame.nbytes for frame in frames)
    if not frames or len(pages) != len(frames):
        raise Refusal("usage", f"{len(frames)} frames are not pages {m.first} … of this reservation")
    if any(frame.nbytes != reservation.page_bytes for frame in frames):
        raise Refusal("usage", f"a page of this reservation has {reservation.page_bytes} bytes")
    if len(frames) > 1 and nbytes > p.MAX_FETCH_BYTES:
        raise Refusal("usage", f"{nbytes} bytes are more than the {p.MAX_FETCH_BYTES} of one Write")
    return then(session.backend.write(reservation, m.first, frames), lambda _: p.Written(m.id))


def commit(session: Session, m: p.Commit) -> Reply | Awaitable[Reply]:
    reservation = session.client.reservation(m.reservation)
    if len(m.done) % 4 or len(m.checksums) != 2 * len(m.done):
        raise Refusal("usage", f"{len(m.done)} bytes of positions, {len(m.checksums)} of checksums")
    done = dict(zip(array.array("I", m.done), array.array("Q", m.checksums), strict=True))
    unknown = done.keys() - set(reservation.positions)
    if unknown or len(done) != len(m.done) // 4:
        raise Refusal("usage", "positions that were not reserved, or twice")
    if reservation.copying:
        raise Refusal("usage", "pages of this reservation are still being written")
    sharing = session.sharing.pop(m.reservation, None)

    def answer(pages: int) -> p.Committed:
        if sharing is not None and (cluster := session.cluster) is not None:
            cluster.committed(*sharing)
        return p.Committed(m.id, pages)

    return then(session.backend.commit(reservation, done), answer)


def abort(session: Session, m: p.Abort) -> None:
    reservation = session.client.reservations.get(m.reservation)
    if reservation is not None:
        session.backend.abort(reservation)
    session.sharing.pop(m.reservation, None)
