"""Faults while a store is running: single calls, or all from one on, that fail, fall short, lie or hang."""

from __future__ import annotations

import errno
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from tests.campaigns.prompts import (
    WAIT_S,
    Evict,
    Held,
    Life,
    Load,
    Player,
    Reopen,
    Save,
    load,
    prompt_tokens,
    save,
)
from tests.campaigns.scripts import Scene
from tests.campaigns.verdict import Verdict, check, judge, lost_pages
from tierstore.errors import TierStoreError
from tierstore.stats import StoreStats
from tierstore.testing.faulty_io import (
    Effect,
    Fail,
    Fault,
    FaultyIO,
    FlipBit,
    IoCall,
    Misdirect,
    Short,
    Stall,
)

ERRORS: Mapping[str, int] = {
    "disk full": errno.ENOSPC,
    "I/O error": errno.EIO,
    "read-only": errno.EROFS,
    "device gone": errno.ENODEV,
}
DISTURBANCES = (*ERRORS, "short transfer", "flipped transfer", "misdirected transfer")

_WRITES = ("pwritev", "allocate", "sync", "truncate", "unlink", "sync_directory", "open")
_ALL = (*_WRITES, "preadv", "size", "forget")
_DEADLINE_S = 0.02


def short_scene(life: Life) -> Scene:
    """What is disturbed: few calls, of every kind."""
    steps = (
        Save(0, 40),
        Save(1, 64),
        Load(0),
        Evict(2),
        Save(2, 64),
        Load(1),
        Reopen(0),
        Load(2),
        Save(4, 48),
        Load(4),
    )
    return Scene("disturbed", [life], steps)


@dataclass(frozen=True, slots=True)
class Moment:
    """The ``count``-th call (from 1) of a kind. (Among all calls, the n-th would be another one each time:
    threads see to that.)"""

    kind: str
    count: int


class _When:
    """True of the calls on which an effect falls."""

    def __init__(self, moment: Moment, effect: Effect, lasting: bool) -> None:
        self._moment = moment
        self._lasting = lasting
        # A full or read-only disk can still be read.
        only_writes = isinstance(effect, Fail) and effect.code in (errno.ENOSPC, errno.EROFS)
        self._kinds = _WRITES if only_writes else _ALL if isinstance(effect, Fail) else (moment.kind,)
        self._seen = 0

    def __call__(self, call: IoCall) -> bool:
        self._seen += call.kind == self._moment.kind
        if self._lasting:
            return self._seen >= self._moment.count and call.kind in self._kinds
        return call.kind == self._moment.kind and self._seen == self._moment.count


def moments_of(directory: Path, scene: Scene) -> list[Moment]:
    """The calls that a scene makes when nothing goes wrong."""
    io = FaultyIO()
    player = Player(directory, scene.lives, io)
    for step in scene.steps:
        player.play(step)
    player.store.close()
    counts = Counter[str]()
    moments = []
    for call in io.calls:
        counts[call.kind] += 1
        moments.append(Moment(call.kind, counts[call.kind]))
    return moments


def effects_on(kind: str) -> Iterator[tuple[str, Effect]]:
    """What can go wrong with a call of this kind: (disturbance, effect)."""
    for name, code in ERRORS.items():
        reading_full = code in (errno.ENOSPC, errno.EROFS) and kind not in _WRITES
        if kind in _ALL and not reading_full:
            yield name, Fail(code)
    if kind in ("preadv", "pwritev"):
        yield "short transfer", Short()
        yield "flipped transfer", FlipBit(12_345)
        yield "misdirected transfer", Misdirect(8192)


def disturb(directory: Path, scene: Scene, effect: Effect, moment: Moment, *, lasting: bool) -> Verdict:
    """Play ``scene`` with ``effect`` on one call; ``lasting``: on every call of its sort from there on.

    The store may refuse to open while the fault lasts, and may say that it has dropped or evicted pages.
    Nothing it serves may be wrong, and when the disk is in order again everything it acknowledged must be
    there, unless it has counted a decision (an eviction, a damaged page) that says otherwise.
    """
    io = FaultyIO()
    io.set(Fault(_When(moment, effect, lasting), effect))
    lying = not isinstance(effect, Fail | Short)
    verdict = Verdict()
    try:
        player = Player(directory, scene.lives, io)
    except TierStoreError:
        io.clear()
        player = Player(directory, scene.lives, io)
    must: Held = {}
    for step in scene.steps:
        decisions = 0 if isinstance(step, Reopen) else _decisions(player.store.stats(), damage=lying)
        try:
            player.play(step)
        except TierStoreError:
            io.clear()
            player.play(Reopen(0))
            decisions = 0
        after = player.store.stats()
        if isinstance(step, Evict) or _decisions(after, damage=lying) > decisions:
            must = dict(player.held)
        elif after.disk_writable:
            verdict.lost_pages += _missing(must, player.held, scene)
            must = dict(player.held)
        else:  # what is not found now has to be found when the disk is back
            must = {name: max(must.get(name, 0), player.held.get(name, 0)) for name in {*must, *player.held}}
    io.clear()
    if not lying:
        check(player.store, verdict)
    player.store.close()
    verdict.wrong_pages += player.wrong_pages
    promised = {} if lying else must
    verdict.add(judge(directory, scene.lives, player.prompts, promised, undamaged=not lying))
    return verdict


def _decisions(stats: StoreStats, *, damage: bool) -> int:
    """How many pages the store says it has let go: evicted, or with ``damage`` also damaged ones."""
    counters = stats.counters
    evicted, damaged = counters["evicted_pages"], counters["damaged_pages"]
    assert isinstance(evicted, Mapping)
    assert isinstance(damaged, int)
    return evicted["disk"] + (damaged if damage else 0)


def _missing(must: Held, held: Held, scene: Scene) -> int:
    """Pages in ``must`` that are not in ``held``."""
    return sum(
        lost_pages(tokens, held.get(name, 0), scene.lives[name[0]].spec) for name, tokens in must.items()
    )


def stall(directory: Path, life: Life, kind: str) -> Verdict:
    """One call of ``kind`` hangs while a store is used. Nobody may wait for it but those who asked for the
    disk without a deadline; when it comes back, so does the store."""
    verdict = Verdict()
    io = FaultyIO()
    effect = Stall()
    store = replace(life, mover_threads=4).open(directory, io)
    prompts = {(0, 0): 40, (0, 2): 64}
    save(store, 0, 40)
    _must(store.flush(WAIT_S), "the first save does not flush", verdict)
    store.evict("host")
    io.set(Fault(lambda call: call.kind == kind, effect, times=1))
    if kind == "preadv":
        with store.lookup(prompt_tokens(0, 40, life.spec)) as hit:
            prefetch = hit.prefetch()  # without a deadline: this one waits
            _must(effect.entered.wait(WAIT_S), "the disk was not read", verdict)
            answer = load(store, 0, 40, deadline_s=_DEADLINE_S)
            _must(answer.served_tokens == 0, f"served from a stalled disk: {answer}", verdict)
            save(store, 2, 64)  # the disk may still be written
            _must(load(store, 2, 64).served_tokens == 64, "a save behind a stalled read is lost", verdict)
            effect.release()
            _must(prefetch.wait(WAIT_S) == 40, "the read that had stalled did not end", verdict)
    else:
        save(store, 2, 64)
        _must(effect.entered.wait(WAIT_S), "the disk was not written", verdict)
        _must(not store.flush(_DEADLINE_S), "acknowledged on a stalled disk", verdict)
        for number, tokens in ((0, 40), (2, 64)):
            answer = load(store, number, tokens)
            verdict.wrong_pages += answer.wrong_pages
            _must(
                answer.served_tokens == tokens,
                f"a stalled write keeps pages from being served: {answer}",
                verdict,
            )
        effect.release()
    _must(store.flush(WAIT_S), "the store does not flush after a stall", verdict)
    check(store, verdict)
    store.close()
    verdict.add(judge(directory, [life], prompts, prompts))
    return verdict


def _must(true: bool, what: str, verdict: Verdict) -> None:
    if not true:
        verdict.problems.append(what)
