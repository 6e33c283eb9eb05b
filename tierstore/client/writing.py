"""Saving to a daemon: reserved slots in its arena, or pages as frames behind a message.

A failed request is not repeated. If the client does not know whether a save was committed, the next save of
the same pages finds them stored or saves them again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeVar

import numpy as np

from tierstore.backend import NO_HINTS, LookupRequest, PrefixHandle, Reservation, SaveHints
from tierstore.client.channel import numbers
from tierstore.client.handshake import DaemonLink
from tierstore.client.state import RemoteState, handle_in, in_full, pages_of, prompt_part
from tierstore.transfer import Transfer
from tierstore.wire import messages
from tierstore.wire.messages import Message

A = TypeVar("A", bound=Message)
R = TypeVar("R")

_SAVE_S = 5.0  # least time limit of a request: saves are not urgent, and the machine may be busy


class RemoteWriting:
    """The saves of one client. Thread-safe."""

    def __init__(self, state: RemoteState) -> None:
        self._state = state
        self._connection = state.connection

    def reserve(
        self,
        request: LookupRequest,
        first: int,
        count: int,
        *,
        hints: SaveHints = NO_HINTS,
        handle: PrefixHandle | None = None,
    ) -> Transfer[Reservation | None]:
        link = self._state.link_for(request.identity, saving=True)
        if link is None:
            return Transfer.completed(None)
        hint = hints.hint
        part = None
        if hint is not None:
            # As a float, because a message cannot contain integers above 64 bits.
            ttl_s = None if hint.ttl_s is None else float(hint.ttl_s)
            part = messages.HintPart(ttl_s, hint.reuse, hint.priority, hint.elsewhere)

        def message(handle: PrefixHandle | None) -> messages.Reserve:
            # Chunks from ``first`` on are described in full, even if the daemon knows some of them.
            if handle is None or handle.owner is not link:
                handle = request.handle_of(link, first)
            elif handle.chunks > first:
                handle = replace(handle, chunks=first)
            prompt = prompt_part(link, request, handle)
            return messages.Reserve(0, prompt, first, count, part, hints.session or "")

        def reserved(answer: messages.Reserved | None, _: object) -> Reservation | None:
            return self._reserved(link, answer, count, request.page_bytes)

        whole = in_full(partial(message, None), request)
        return self._call(link, message(handle), messages.Reserved, reserved, otherwise=whole)

    def _call(
        self,
        link: DaemonLink,
        message: Message,
        expected: type[A],
        then: Callable[[A | None, Sequence[memoryview]], R],
        *,
        frames: Sequence[memoryview] = (),
        otherwise: Callable[[], Message] | None = None,
    ) -> Transfer[R]:
        """Send a request of a save, even if the daemon hangs."""
        return self._connection.call(
            link,
            message,
            expected,
            then,
            patience_s=max(_SAVE_S, self._connection.patience_s),
            frames=frames,
            otherwise=otherwise,
            though_silent=True,
        )

    def _reserved(
        self, link: DaemonLink, answer: messages.Reserved | None, count: int, page_bytes: int
    ) -> Reservation | None:
        if answer is None:
            return None
        positions = numbers(answer.positions, "<u4").tolist()
        offsets = numbers(answer.offsets, "<u8").tolist()
        mapped = link.arena.memory if link.arena is not None else None
        sound = (
            len(set(positions)) == len(positions) == len(offsets)
            and bool(positions) == bool(answer.reservation)
            and all(position < count for position in positions)
        )
        if link.arena is not None:
            limit = mapped.nbytes - page_bytes if mapped is not None else -1
            sound = sound and all(offset <= limit for offset in offsets)
        if not sound:  # writing to these offsets could overwrite other data
            if answer.reservation:
                self._connection.send(link, messages.Abort(answer.reservation))
            return None
        addresses = [mapped.address + offset for offset in offsets] if mapped is not None else None

        def usable() -> bool:
            return link.current if link.arena is None else link.arena.memory is not None

        handle = handle_in(link, answer.path, answer.known)
        reserved = Reservation(answer.reservation, positions, addresses, answer.stored_tokens, handle)
        reserved.owner, reserved.memory, reserved.usable = link, mapped, usable
        return reserved

    def write(self, reservation: Reservation, first: int, frames: Sequence[memoryview]) -> Transfer[bool]:
        link = reservation.owner
        assert isinstance(link, DaemonLink), "the reservation is of another backend"
        message = messages.Write(0, reservation.number, first)
        return self._call(
            link, message, messages.Written, lambda answer, _: answer is not None, frames=frames
        )

    def commit(self, reservation: Reservation, checksums: dict[int, int]) -> Transfer[int]:
        link = reservation.owner
        assert isinstance(link, DaemonLink), "the reservation is of another backend"
        done = np.array(list(checksums), "<u4").tobytes()
        hashes = np.array(list(checksums.values()), "<u8").tobytes()
        message = messages.Commit(0, reservation.number, done, hashes)
        return self._call(link, message, messages.Committed, pages_of)

    def abort(self, reservation: Reservation) -> None:
        if reservation.number and isinstance(reservation.owner, DaemonLink):
            self._connection.send(reservation.owner, messages.Abort(reservation.number))
