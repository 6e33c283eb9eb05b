"""Start loads: check the caller's arguments, decide how much to load, and begin the load."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tierstore.backend import SaveHints
from tierstore.errors import UsageError
from tierstore.mover import Mover
from tierstore.store.buffers import Buffers, PageTarget
from tierstore.store.destinations import IntoBuffers, IntoHbm, IntoTarget
from tierstore.store.hit import Hit, HitPart
from tierstore.store.load import Load, Lower
from tierstore.store.lookup import Finder
from tierstore.store.planning import Planning
from tierstore.transfer import Transfer
from tierstore.types import Hint, Loaded

_ELSEWHERE = Hint(elsewhere=True)


class Loader:
    """Starts the loads of one store."""

    def __init__(self, finder: Finder, mover: Mover, planning: Planning) -> None:
        self._hbm = finder.hbm
        self._backend = finder.backend
        self._groups = finder.groups
        self._named = finder.named
        self._mover = mover
        self._planning = planning

    def all_of(self, hit: Hit, into: Sequence[Any] | None, deadline_s: float | None) -> Transfer[Loaded]:
        """See :meth:`Store.load <tierstore.Store.load>`."""
        if into is None:
            if not self._hbm.pools:
                raise UsageError("this store has no page pool: give buffers to load into")
            stop, deadline_s = self._planned(hit, deadline_s)
            self._offer(hit)
            return Load(self._lower, hit, deadline_s, IntoHbm, stop=stop).start()
        buffers = self._buffers(hit, into)

        def make(load: Load, part: HitPart, positions: range) -> IntoBuffers:
            return IntoBuffers(load, part, positions, buffers[part.group])

        stop, deadline_s = self._planned(hit, deadline_s)
        self._offer(hit)
        return Load(self._lower, hit, deadline_s, make, stop=stop).start()

    def into_hbm(
        self, hit: Hit, first: int, stop: int, *, deadline_s: float | None, last: bool
    ) -> Transfer[Loaded]:
        """See :meth:`Store.load_part <tierstore.Store.load_part>`."""
        self._hbm.pool(0)
        if not 0 <= first <= stop <= hit.num_pages:
            raise UsageError(f"pages {first} … {stop} must lie within the hit's {hit.num_pages} pages")
        if stop == hit.num_pages:
            self._offer(hit)
        load = Load(self._lower, hit, deadline_s, IntoHbm, first=first, stop=stop, keeps_hit=not last)
        return load.start()

    def into_target(
        self, hit: Hit, target: PageTarget, first: int, stop: int, *, deadline_s: float | None, keep: bool
    ) -> Transfer[Loaded]:
        """See :meth:`Store.load_to <tierstore.Store.load_to>`."""
        if self._hbm.pools or len(hit.parts) > 1 or not 0 <= first <= stop <= hit.num_pages:
            raise UsageError(
                f"pages {first} … {stop} of a hit of {hit.num_pages} pages cannot be loaded into a target: "
                "this needs a store without pools and a hit of one layer group"
            )

        def make(load: Load, part: HitPart, positions: range) -> IntoTarget:
            return IntoTarget(load, part, positions, target)

        return Load(self._lower, hit, deadline_s, make, first=first, stop=stop, keeps_hit=keep).start()

    def offer(self, hit: Hit) -> None:
        """See :meth:`Store.offer <tierstore.Store.offer>`."""
        for part in hit.parts if self._backend.remote else ():
            if (unseen := part.to_tell()) is not None:
                self._backend.reserve(*unseen, 0, hints=SaveHints(_ELSEWHERE))

    def _offer(self, hit: Hit) -> None:
        """Report the use of named pages, because the daemon does not know which of the requested pages are
        used."""
        if self._named:
            self.offer(hit)

    @property
    def _lower(self) -> Lower:
        planner = self._planning.planner
        return Lower(self._hbm, self._backend, self._mover, planner, self._groups, self._named)

    def _planned(self, hit: Hit, deadline_s: float | None) -> tuple[int | None, float | None]:
        """Return how many of a hit's chunks are worth loading (None: all), and the deadline. If the caller
        gives a deadline, the whole hit is loaded."""
        of_caller = any(part.of_caller for part in hit.parts)  # hits of named pages are not planned
        if deadline_s is not None or of_caller or self._planning.planner.prefill() is None:
            return None, deadline_s
        planned = self._planning.plan(hit, None, block=0)
        self._planning.decline(hit, planned)
        return min(-(-planned.tokens // hit.chunk_tokens), hit.num_pages), planned.deadline_s

    def _buffers(self, hit: Hit, into: Sequence[Any]) -> dict[int, Buffers]:
        """Return the buffers by layer group. Raise :class:`UsageError` if their number does not match the
        hit."""
        several = len(self._groups) > 1
        if several and len(into) != len(self._groups):
            raise UsageError(
                f"the model has {len(self._groups)} layer groups, but there are buffers for {len(into)}: "
                "give len(hit.chunks(group)) buffers for each group"
            )
        buffers = {}
        for group, each in zip(self._groups, into if several else [into], strict=True):
            buffers[group.number] = Buffers(each, group.page_bytes, writable=True)
            needed = len(hit.chunks(group.number))
            if len(each) != needed:
                of_group = f" of group {group.number}" if several else ""
                raise UsageError(
                    f"the hit has {needed} pages{of_group}: give as many buffers, not {len(each)}"
                )
        return buffers
