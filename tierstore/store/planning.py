"""How much of a hit to load: what a plan is made of, and what is done about what it does not use."""

from __future__ import annotations

from collections.abc import Sequence

from tierstore.backend import Backend
from tierstore.groups import Group
from tierstore.index import Tier
from tierstore.planner import CLUSTER, Part, Plan, Planner
from tierstore.store.hbm import HbmTier
from tierstore.store.hit import Hit, rank
from tierstore.store.hit import Part as HitPart
from tierstore.transfer import Transfer

_BRING_S = 2.0  # that pages of other hosts are waited for
_PROBE_BYTES = 8 << 20  # of a declined tier, read to see how fast it is by now
_PROBE_WAIT_S = 20.0


class Planning:
    """The planner of one store, which may be shared with others."""

    def __init__(
        self, hbm: HbmTier, backend: Backend, groups: Sequence[Group], chunk_tokens: int, lookup_s: float
    ) -> None:
        self.planner = Planner()
        self._hbm = hbm
        self._backend = backend
        self._groups = groups
        self._chunk_tokens = chunk_tokens
        self._lookup_s = lookup_s

    def plan(self, hit: Hit, prompt_tokens: int | None, *, block: int) -> Plan:
        """See :meth:`Store.plan <tierstore.Store.plan>`."""
        now_s = self._hbm.clock()
        for tier, way in self._backend.ways().items():
            self.planner.told(tier, way, now_s=now_s)
        length = hit.tokens + 1 if prompt_tokens is None else prompt_tokens
        return self.planner.plan(self._parts(hit), length, now_s=now_s, block=block)

    def _parts(self, hit: Hit) -> list[Part]:
        """What a load brings, in its order. Chained pages count run by run. With named pages it is all or
        nothing, since these serve the hit's end only: all tokens are the last tier's."""
        if hit.parts and all(part.leading for part in hit.parts):
            return self._run_by_run(hit.by_runs(), sum(part.page_bytes for part in hit.parts))
        nbytes: dict[str, float] = {}
        for part in hit.parts:
            for tier, pages in part.page_runs():
                if tier != Tier.HBM.label:
                    nbytes[tier] = nbytes.get(tier, 0) + pages * part.page_bytes
        tiers = sorted(nbytes, key=rank) or [Tier.HBM.label]
        parts = [Part(tier, 0, nbytes[tier]) for tier in tiers[:-1]]
        return [*parts, Part(tiers[-1], hit.tokens, nbytes.get(tiers[-1], 0))]

    def _run_by_run(self, runs: Sequence[tuple[str, int]], page_bytes: int) -> list[Part]:
        token_bytes = page_bytes / self._chunk_tokens
        return [
            Part(tier, tokens, 0 if tier == Tier.HBM.label else tokens * token_bytes) for tier, tokens in runs
        ]

    def meet(self, hit: Hit, front: int, back: int) -> int:
        """See :meth:`Store.meet <tierstore.Store.meet>`."""
        chain = _first_chain(hit)
        if chain is None:
            return back
        parts, start = [], 0
        for part in self._run_by_run(chain.by_runs(), chain.page_bytes):
            tokens = min(part.tokens, max(back - start, 0))
            if tokens:
                parts.append(Part(part.tier, tokens, part.nbytes * tokens / part.tokens))
            start += part.tokens
        return self.planner.meet(parts, front, now_s=self._hbm.clock())

    def decline(self, hit: Hit, planned: Plan) -> None:
        """See :meth:`Store.decline <tierstore.Store.decline>`."""
        declined = {f"{tier} slower": tokens for tier, tokens in planned.declined.items()}
        if declined:
            self._hbm.declined(declined)
            self._backend.declined(declined)
        chain = _first_chain(hit)
        for tier in planned.declined if chain is not None else ():
            if tier != Tier.HBM.label and self.planner.take_probe(tier, self._hbm.clock()):
                assert chain is not None
                self._probe(chain, tier)

    def _probe(self, part: HitPart, tier: str) -> None:
        """Have the backend bring some pages of a declined tier, and note how long that took."""
        backend, clock = self._backend, self._hbm.clock
        found = backend.find(part.request, patience_s=self._lookup_s)

        def leased() -> None:
            lease = found.wait()
            if lease is None or not lease.tokens:
                return
            first = 0
            while first < lease.pages and lease.run_at(first)[0] != tier:
                first += lease.run_at(first)[1]
            count = min(lease.pages - first, max(_PROBE_BYTES // part.page_bytes, 1))
            if count <= 0:
                backend.release(lease)
                return
            began = clock()
            brought = backend.locate(lease, first, count, wait_s=_PROBE_WAIT_S)

            def came() -> None:
                located = brought.wait()
                if located is not None:
                    now_s, nbytes = clock(), len(located.addresses) * part.page_bytes
                    self.planner.moved(tier, nbytes, now_s - began, now_s=now_s)
                    located.release()
                backend.release(lease)

            brought.on_end(came)

        found.on_end(leased)

    def bring(self, hit: Hit, tokens: int | None, deadline_s: float | None) -> Transfer[int] | None:
        """See :meth:`Store.bring <tierstore.Store.bring>`."""
        remote = hit.remote_tokens if tokens is None else min(hit.remote_tokens, tokens - hit.tokens)
        if remote <= 0:
            return None
        length = hit.tokens + remote
        nbytes = sum(sum(end <= length for end in part.remote_ends) * part.page_bytes for part in hit.others)
        within_s = self.worth_bringing(hit.tokens, remote, nbytes)
        if within_s is None:
            return None
        return hit.bring(within_s if deadline_s is None else deadline_s, tokens=length)

    def worth_bringing(self, behind: int, tokens: int, nbytes: int) -> float | None:
        """See :meth:`Store.worth_bringing <tierstore.Store.worth_bringing>`."""
        prefill = self.planner.prefill()
        if prefill is None:
            return _BRING_S
        computing_s = prefill.seconds(tokens, behind)
        way = self._backend.ways().get(CLUSTER)
        slower = way is not None and way.seconds(nbytes) > computing_s
        return None if slower else min(computing_s, _BRING_S)


def _first_chain(hit: Hit) -> HitPart | None:
    """The part that a load brings from the front on."""
    return next((part for part in hit.parts if part.leading), None)
