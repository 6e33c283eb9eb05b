"""Who continues whom, where a trace does not say: a prompt that begins with all whole blocks of an earlier
one, the latest if there are several, is the next turn of its conversation. Knows only the past."""

from __future__ import annotations

from tierstore_tools.replay.trace import Request


class Conversations:
    """Names the conversation of each request, in the order they come."""

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._ends: dict[int, str] = {}  # last whole block of a conversation's latest prompt → its name
        self._count = 0

    def of(self, request: Request) -> str:
        """The request's own session, else the one that it continues, else a new one."""
        if request.session is not None:
            return request.session
        name = None
        for block in reversed(request.blocks):
            name = self._ends.pop(block, None)
            if name is not None:
                break
        if name is None:
            name = f"#{self._count}"
            self._count += 1
        whole = min(request.input_tokens // self._block_tokens, len(request.blocks))
        if whole:
            self._ends[request.blocks[whole - 1]] = name
        return name
