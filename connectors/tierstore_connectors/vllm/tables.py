"""Which blocks a request has: what vLLM's scheduler says when asked, or what it has said step by step (in
0.29 the whole tables of requests that have got blocks, up to 0.28 the blocks that they have got)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

Table = Sequence[Sequence[int]]  # block numbers, by KV cache group


class Tables:
    """The block tables of the requests in a step. Belongs to the scheduler's thread."""

    def __init__(self) -> None:
        self._ask: Callable[[str], Table | None] | None = None
        self._so_far: dict[str, Sequence[list[int]]] = {}

    def take(self, output: Any) -> None:
        """``output`` is vLLM's ``SchedulerOutput`` of the step that begins."""
        state = vars(output).get("kv_connector_block_state")
        if state is not None:
            told = vars(state).get("block_ids")
            if told is None:
                self._ask = state.get_block_ids
            else:
                self._so_far.update(told)
            return
        for new in output.scheduled_new_reqs:
            self._so_far[new.req_id] = [list(blocks) for blocks in new.block_ids]
        cached = output.scheduled_cached_reqs
        for request, tables in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if tables is None:
                continue
            if request in cached.resumed_req_ids or request not in self._so_far:
                self._so_far[request] = [list(blocks) for blocks in tables]
            else:
                for known, more in zip(self._so_far[request], tables, strict=True):
                    known.extend(more)

    def of(self, request: str) -> Table:
        """Of a request that is scheduled in this step."""
        table = self._ask(request) if self._ask is not None else self._so_far.get(request)
        assert table is not None, "a request that is scheduled has blocks"
        return table

    def forget(self, request: str) -> None:
        """It has finished."""
        self._so_far.pop(request, None)
