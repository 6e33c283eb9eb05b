"""Decide how much of a hit to load: prepare the planner's input, and count and measure what is not loaded."""

from __future__ import annotations

from collections.abc import Sequence

from tierstore.backend import Backend
from tierstore.explanation import Explanation, Miss, MissReason, behind
from tierstore.groups import Group
from tierstore.index import Tier
from tierstore.planner import CLUSTER, Plan, Planner, TierPart
from tierstore.store.hbm import HbmTier
from tierstore.store.hit import Hit, HitPart, rank
from tierstore.store.lookup import Lookup
from tierstore.transfer import Transfer

_FETCH_S = 2.0  # longest time for a fetch from other hosts
_PROBE_BYTES = 8 << 20  # bytes read from an unused tier to measure its current speed
_PROBE_WAIT_S = 20.0  # longest wait for a read that measures


class Planning:
    """The planner of one store. Stores may share a planner."""

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
        for tier, rate in self._backend.rates().items():
            self.planner.report(tier, rate, now_s=now_s)
        length = hit.tokens + 1 if prompt_tokens is None else prompt_tokens
        return self.planner.plan(self._parts(hit), length, now_s=now_s, block=block)

    def explanation(self, lookup: Lookup, hit: Hit) -> Explanation:
        """Return why tokens of a prompt are missed. The explanation includes tokens that the plan would not
        load, tokens that other hosts have, and tokens that an engine always computes."""
        used = min(self.plan(hit, lookup.prompt_tokens, block=0).tokens, hit.tokens)
        misses: list[Miss] = []
        if used < hit.tokens:
            tiers = " and ".join(tier for tier in hit.by_tier if tier != Tier.HBM.label)
            misses.append(Miss(MissReason.DECLINED, used, hit.tokens - used, tier=tiers))
        at = hit.tokens
        if hit.remote_tokens:
            misses.append(Miss(MissReason.OTHER_HOST, at, hit.remote_tokens))
            at += hit.remote_tokens
        spans = lookup.misses
        if spans is None and at < lookup.limit:
            spans = [Miss(MissReason.LATE, at, lookup.limit - at, why="the daemon did not answer")]
        misses += behind(spans or (), at)
        at = misses[-1].end if misses else at
        if at < lookup.prompt_tokens:
            last = misses[-1] if misses and misses[-1].reason is MissReason.TAIL else None
            if last is not None:
                misses.pop()
                at = last.first
            misses.append(Miss(MissReason.TAIL, at, lookup.prompt_tokens - at))
        return Explanation(lookup.prompt_tokens, used, tuple(misses), dict(hit.by_tier)).check()

    def _parts(self, hit: Hit) -> list[TierPart]:
        """Return the parts of a load by tier, in the load's order. Chained pages are listed for each run of
        pages in one tier. A load with named pages is useful only as a whole, because these pages serve only
        the hit's end: all tokens count for the last tier."""
        if hit.parts and all(part.leading for part in hit.parts):
            return self._run_by_run(hit.by_runs(), sum(part.page_bytes for part in hit.parts))
        nbytes: dict[str, float] = {}
        for part in hit.parts:
            for tier, pages in part.page_runs():
                if tier != Tier.HBM.label:
                    nbytes[tier] = nbytes.get(tier, 0) + pages * part.page_bytes
        tiers = sorted(nbytes, key=rank) or [Tier.HBM.label]
        parts = [TierPart(tier, 0, nbytes[tier]) for tier in tiers[:-1]]
        return [*parts, TierPart(tiers[-1], hit.tokens, nbytes.get(tiers[-1], 0))]

    def _run_by_run(self, runs: Sequence[tuple[str, int]], page_bytes: int) -> list[TierPart]:
        token_bytes = page_bytes / self._chunk_tokens
        return [
            TierPart(tier, tokens, 0 if tier == Tier.HBM.label else tokens * token_bytes)
            for tier, tokens in runs
        ]

    def meeting_point(self, hit: Hit, front: int, back: int) -> int:
        """See :meth:`Store.meeting_point <tierstore.Store.meeting_point>`."""
        chain = _first_chain(hit)
        if chain is None:
            return back
        parts, start = [], 0
        for part in self._run_by_run(chain.by_runs(), chain.page_bytes):
            tokens = min(part.tokens, max(back - start, 0))
            if tokens:
                parts.append(TierPart(part.tier, tokens, part.nbytes * tokens / part.tokens))
            start += part.tokens
        return self.planner.meeting_point(parts, front, now_s=self._hbm.clock())

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
        """Make the backend load some pages from an unused tier, and record how long that takes."""
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
            fetched = backend.locate(lease, first, count, wait_s=_PROBE_WAIT_S)

            def arrived() -> None:
                located = fetched.wait()
                if located is not None:
                    now_s, nbytes = clock(), len(located.addresses) * part.page_bytes
                    self.planner.moved(tier, nbytes, now_s - began, now_s=now_s)
                    located.release()
                backend.release(lease)

            fetched.on_end(arrived)

        found.on_end(leased)

    def fetch_remote(self, hit: Hit, tokens: int | None, deadline_s: float | None) -> Transfer[int] | None:
        """See :meth:`Store.fetch_remote <tierstore.Store.fetch_remote>`."""
        remote = hit.remote_tokens if tokens is None else min(hit.remote_tokens, tokens - hit.tokens)
        if remote <= 0:
            return None
        length = hit.tokens + remote
        nbytes = sum(sum(end <= length for end in part.remote_ends) * part.page_bytes for part in hit.others)
        within_s = self.worth_fetching(hit.tokens, remote, nbytes)
        if within_s is None:
            return None
        return hit.fetch_remote(within_s if deadline_s is None else deadline_s, tokens=length)

    def worth_fetching(self, behind: int, tokens: int, nbytes: int) -> float | None:
        """See :meth:`Store.worth_fetching <tierstore.Store.worth_fetching>`."""
        prefill = self.planner.prefill()
        if prefill is None:
            return _FETCH_S
        computing_s = prefill.seconds(tokens, behind)
        rate = self._backend.rates().get(CLUSTER)
        slower = rate is not None and rate.seconds(nbytes) > computing_s
        return None if slower else min(computing_s, _FETCH_S)


def _first_chain(hit: Hit) -> HitPart | None:
    """Return the first part whose pages form a prefix; None if there is none."""
    return next((part for part in hit.parts if part.leading), None)
