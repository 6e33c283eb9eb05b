"""Clients of one daemon that behave like engines until they are killed: what the chaos test sets going.

Each is a process of its own (forked from one that has imported this module already, so that a life costs
milliseconds) and does at random what an engine does. It compares every byte that it is handed with what the
tokens must give, and tells the test on a pipe what it has done. A sentence that was said is heard even when
its speaker is killed in the next moment.
"""

from __future__ import annotations

import json
import random
import traceback
from collections import Counter
from dataclasses import dataclass, field
from multiprocessing.connection import Connection

import tierstore
from tests.campaigns.prompts import matches, page_count, pages, prompt_tokens, small_pages
from tierstore import Hit, Store, open_pools
from tierstore.groups import Group
from tierstore.keys import Identity
from tierstore.spec import KVSpec, LayerGroup, LayerKind
from tierstore.tiers.group_pools import bytes_for
from tierstore.types import GroupPages
from tierstore.wire import messages


def _several_groups() -> KVSpec:
    """Attention, a window and latents: pages of three sizes, two of them chained and one named."""
    full = LayerGroup(LayerKind.FULL_ATTENTION, (0, 1, 2, 3), kv_heads=1, head_dim=32)
    window = LayerGroup(LayerKind.SLIDING_WINDOW, (4,), kv_heads=1, head_dim=32, window=64)
    latent = LayerGroup(LayerKind.MLA_LATENT, (5, 6), head_dim=32)
    return KVSpec((full, window, latent), "float32", 16)


MODELS = (
    small_pages(layers=8),  # 32 KiB: above what the index holds itself, so they go to the extents
    _several_groups(),
    small_pages(layers=2),  # 8 KiB: in the index
)
CHUNK = 16  # tokens, of all of them
MOST_PAGES = 12  # of one prompt
LOOKUP_S = 5.0  # a busy machine is not a hung daemon
FOREVER_S = 120.0

_HELD_HITS = 3  # that a client sits on, for its death to give back
_DEADLINES_S = (None, None, 0.0, 0.002, 0.02, 5.0)
_ACTIONS = {"load": 10, "save": 5, "durable": 2, "lookup": 2, "prefetch": 2, "hold": 1, "pin": 1, "evict": 1}
_HBM_ACTIONS = {"load_hbm": 5, "save_hbm": 3}


@dataclass(frozen=True)
class Life:
    """What one client is to be."""

    url: str
    model: int  # of MODELS
    prompts: int  # how many different ones there are
    disk_may_evict: bool
    hbm_pages: int = 0
    seed: str = ""


@dataclass(frozen=True)
class Done:
    """A client did something, in a session that was there before and afterwards."""

    action: str
    pages: int  # that were loaded and compared


@dataclass(frozen=True)
class Durable:
    """A flush has said that these tokens of a prompt are on disk, and nothing was ever dropped from there."""

    model: int
    number: int
    tokens: int


@dataclass(frozen=True)
class Failed:
    """A client has seen what may not be."""

    how: str


@dataclass(frozen=True)
class Ended:
    """A client was asked to end, and has."""


Fact = Done | Durable | Failed | Ended


def connect(life: Life) -> Store:
    spec = MODELS[life.model]
    parts = spec.split()
    pools = open_pools(spec, bytes_for(parts, [life.hbm_pages] * len(parts))) if life.hbm_pages else None
    identity = Identity.of(spec, model=f"chaos {life.model}")
    return tierstore.connect(life.url, spec, identity=identity, pools=pools, lookup_s=LOOKUP_S)


def daemon_stats(store: Store) -> dict | None:
    """All that the daemon tells of itself; None while it is away."""
    session = store.backend.connection.link
    if session is None:
        return None
    call = store.backend.connection.call
    answer = call(session, messages.Stats(0), messages.StatsAnswer, lambda answer, _: answer).wait()
    return None if answer is None else json.loads(answer.json)


def load_and_compare(store: Store, hit: Hit, number: int, *, deadline_s=None, cancel=False) -> int:
    """Load a hit of prompt ``number`` into buffers; the tokens that came, every byte of them compared."""
    buffers = [
        [bytearray(b"\xee") * group.page_bytes for _ in hit.chunks(group.number)] for group in store.groups
    ]
    into = buffers if len(store.groups) > 1 else buffers[0]
    transfer = store.load(hit, into, deadline_s=deadline_s)
    cancelled = cancel and transfer.cancel()
    tokens = transfer.wait(FOREVER_S).tokens
    assert tokens <= hit.tokens, f"{tokens} tokens came of a hit of {hit.tokens}"
    assert not cancelled or tokens == 0, "a cancelled load brought something"
    for group, got in zip(store.groups, buffers, strict=True):
        compare(group, number, tokens, hit.chunks(group.number).start, got)
    return tokens


def compare(group: Group, number: int, tokens: int, first: int, got: list) -> None:
    """What a hit of so many tokens needs of a group. ``got`` are the bytes of chunks ``first …``."""
    for chunk in group.chunks(tokens):
        end = min((chunk + 1) * CHUNK, tokens)
        right = matches(bytes(got[chunk - first]), number, end, group.spec)
        assert right, f"wrong bytes: chunk {chunk} of prompt {number}, group {group.number}"


@dataclass
class Client:
    life: Life
    store: Store
    chance: random.Random
    held: list[tuple[int, Hit]] = field(default_factory=list)
    pinned: list[list[int]] = field(default_factory=list)  # prompts
    compared: int = 0  # pages, by the present action

    @property
    def spec(self) -> KVSpec:
        return self.store.spec

    def act(self) -> Done | Durable | None:
        """Do one thing. None when the daemon was away before or afterwards."""
        actions = {**_ACTIONS, **(_HBM_ACTIONS if self.store.pool is not None else {})}
        [action] = self.chance.choices(list(actions), list(actions.values()))
        session = self.store.backend.connection.link
        number = self.chance.randrange(self.life.prompts)
        tokens = self.chance.randint(1, MOST_PAGES * CHUNK)
        self.compared = 0
        said = getattr(self, f"_{action}")(number, prompt_tokens(number, tokens, self.spec))
        if session is None or self.store.backend.connection.link is not session:
            return said
        return said or Done(action, self.compared)

    def _lookup(self, number, prompt):
        with self.store.lookup(prompt) as hit:
            assert hit.tokens <= len(prompt)

    def _load(self, number, prompt):
        hit = self.store.lookup(prompt)
        deadline_s, cancel = self.chance.choice(_DEADLINES_S), self.chance.random() < 0.15
        self._count(load_and_compare(self.store, hit, number, deadline_s=deadline_s, cancel=cancel))

    def _hold(self, number, prompt):
        """Keep a hit for later; load one of those that were kept, whatever has become of it."""
        self.held.append((number, self.store.lookup(prompt)))
        if len(self.held) > _HELD_HITS:
            number, hit = self.held.pop(self.chance.randrange(len(self.held)))
            self._count(load_and_compare(self.store, hit, number))

    def _prefetch(self, number, prompt):
        with self.store.lookup(prompt) as hit:
            transfer = hit.prefetch(deadline_s=self.chance.choice(_DEADLINES_S))
            if self.chance.random() < 0.3:
                transfer.cancel()
            assert transfer.wait(FOREVER_S) <= hit.tokens

    def _save(self, number, prompt):
        for transfer in self._start_saves(number, prompt):
            if self.chance.random() < 0.2:
                transfer.cancel()
            if self.chance.random() < 0.7:
                assert transfer.wait(FOREVER_S) <= len(prompt)

    def _start_saves(self, number, prompt):
        """Save all pages of a prompt, of every group."""
        named = self.store.prompt(prompt)
        return [
            self.store.save(named, pages(number, len(prompt), group.spec), group=group.number)
            for group in self.store.groups
        ]

    def _durable(self, number, prompt):
        """Save, flush, and say so if it can be relied on."""
        session = self.store.backend.connection.link
        saved = min([save.wait(FOREVER_S) for save in self._start_saves(number, prompt)])
        flushed = self.store.flush(FOREVER_S)
        stats = daemon_stats(self.store)
        if saved < len(prompt) or not flushed or stats is None:
            return None
        if session is None or self.store.backend.connection.link is not session:
            return None  # the save and the flush may have been different daemons'
        counters = stats["store"]["counters"]
        dropped = counters["disk_dropped_pages"] + counters["disk_write_errors"]
        if dropped or counters["evicted_pages"]["disk"]:
            return None
        return Durable(self.life.model, number, len(prompt) // CHUNK * CHUNK)

    def _pin(self, number, prompt):
        if self.pinned:
            self.store.unpin(self.pinned.pop())
        else:
            self.store.pin(prompt)
            self.pinned.append(prompt)

    def _evict(self, number, prompt):
        tiers = ["host", *(["disk"] if self.life.disk_may_evict else [])]
        self.store.evict(self.chance.choice(tiers), self.chance.randint(1, 20))

    def _load_hbm(self, number, prompt):
        transfer = self.store.load(self.store.lookup(prompt), deadline_s=self.chance.choice(_DEADLINES_S))
        if self.chance.random() < 0.15:
            transfer.cancel()
        loaded = transfer.wait(FOREVER_S)
        parts = loaded.groups or (GroupPages(0, loaded.pages),)
        for group, part in zip(self.store.groups, parts, strict=True):
            array = self.store.pools[group.number].array
            got = [array[page].tobytes() for page in part.pages]
            compare(group, number, loaded.tokens, part.first, got)
            self.store.release_hbm(part.pages, group=group.number)
        self._count(loaded.tokens)

    def _save_hbm(self, number, prompt):
        named = self.store.prompt(prompt)
        for group in self.store.groups:
            filled = pages(number, len(prompt), group.spec)
            own = self.store.allocate_hbm(len(filled), group=group.number)
            if own is None:
                return
            for page, data in zip(own, filled, strict=True):
                memoryview(self.store.pools[group.number].array[page]).cast("B")[:] = data
            transfer = self.store.save_hbm(named, own, group=group.number)
            if self.chance.random() < 0.5:
                transfer.wait(FOREVER_S)
            self.store.release_hbm(own, group=group.number)

    def _count(self, tokens: int) -> None:
        self.compared += page_count(tokens, self.spec)

    def end(self) -> None:
        for _, hit in self.held:
            hit.release()
        self.store.check()
        self.store.close()
        stats = self.store.stats()
        assert stats.failed_tasks == stats.open_hits == stats.pending_saves == 0, stats


def live(life: Life, facts: Connection, ending: Connection) -> None:
    """Act until ``ending`` says something."""
    try:
        client = Client(life, connect(life), random.Random(life.seed))
        while not ending.poll(0):
            if client.chance.random() < 0.9:  # now and then it does not care whether there is a daemon
                assert client.store.wait_connected(FOREVER_S), "no daemon"
            fact = client.act()
            if fact is not None:
                facts.send(fact)
        client.end()
        facts.send(Ended())
    except BaseException:  # noqa: BLE001  # whatever it is, the test fails with it
        facts.send(Failed(traceback.format_exc()))


@dataclass
class Tally:
    """What all clients have said, and what had to be there."""

    actions: Counter[str] = field(default_factory=Counter)
    pages: int = 0
    durable: dict[tuple[int, int], int] = field(default_factory=dict)  # model, prompt → tokens

    def hear(self, fact: Fact) -> None:
        if isinstance(fact, Failed):
            raise AssertionError(f"a client failed:\n{fact.how}")
        if isinstance(fact, Done):
            self.actions[fact.action] += 1
            self.pages += fact.pages
        elif isinstance(fact, Durable):
            self.actions["durable"] += 1
            prompt = (fact.model, fact.number)
            self.durable[prompt] = max(self.durable.get(prompt, 0), fact.tokens)
