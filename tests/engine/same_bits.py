"""Random requests under ``--deterministic``, each compared bit for bit with one cold step of its own.

A *world* is a model, a place for pages, and requests whose prompts share beginnings. Engines with other
settings serve them one after the other, and pages leave the faster tiers in between. So the place where a hit
ends, the tier that it comes from, the steps, the neighbours and preemption differ from request to request.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from tests.engine.test_oracle import finish
from tests.tiny_models import VOCAB
from tierstore.tiers.hbm import COMPLETED, PagePool
from tierstore_connectors.bundled import StoreConnector
from tierstore_engine.attention.base import Span
from tierstore_engine.build import build_engine, make_runner
from tierstore_engine.drafting import PromptLookupDrafter
from tierstore_engine.engine import Engine
from tierstore_engine.loaded import LoadedModel
from tierstore_engine.sampling import SamplingParams
from tierstore_engine.settings import EngineSettings
from tierstore_engine.step import Step

CHUNK = 16  # tokens a page
_TRUNK, _SUFFIX, _NEW = 120, 40, 40  # tokens, at most
_LONGEST = _TRUNK + _SUFFIX + _NEW


@dataclass
class Tally:
    """How often each thing happened, and the requests whose logits had other bits."""

    cases: int = 0
    happened: Counter[str] = field(default_factory=Counter)
    differing: list[str] = field(default_factory=list)

    def add(self, other: Tally) -> None:
        self.cases += other.cases
        self.happened += other.happened
        self.differing += other.differing


class Campaign:
    """Worlds, and what happened in them. With a ``file``, a line for each world: a later campaign with this
    file counts it, and need not play it again."""

    def __init__(self, file: Path | None) -> None:
        self.tally = Tally()
        self._file = file
        self._titles: set[str] = set()
        for line in file.read_text().splitlines() if file is not None and file.exists() else ():
            world = json.loads(line)
            self._count(world["title"], Tally(world["cases"], Counter(world["happened"]), world["differing"]))

    @property
    def worlds(self) -> int:
        return len(self._titles)

    def has_played(self, title: str) -> bool:
        return title in self._titles

    def add(self, title: str, tally: Tally) -> None:
        """Count the world ``title``."""
        self._count(title, tally)
        if self._file is not None:
            with self._file.open("a") as log:
                log.write(json.dumps({"title": title, **vars(tally)}) + "\n")

    def _count(self, title: str, tally: Tally) -> None:
        self._titles.add(title)
        self.tally.add(tally)


class World:
    """Requests to one model, ``crowds`` of them at a time. ``place`` is a store's directory or address; None
    keeps pages in the pool."""

    def __init__(
        self,
        model: LoadedModel,
        place: str | None,
        seed: int,
        *,
        crowds: Sequence[int] = (1, 5, 12, 24),
    ) -> None:
        self._model, self._place, self._chance = model, place, random.Random(seed)
        self._crowds = crowds
        self._name = f"seed {seed}, {model.config.dtype}, KV {model.config.kv.describe()}, {place}"
        self._trunks = [self._tokens(_TRUNK) for _ in range(3)]
        pages = -(-_LONGEST // CHUNK)
        self._pools = [PagePool(spec, pages) for spec in model.kv_spec(chunk_tokens=CHUNK).split()]
        self._runner, self._table = make_runner(model, self._pools, EngineSettings()), range(pages)

    def play(self, cases: int) -> Tally:
        """Serve at least ``cases`` requests."""
        tally = Tally()
        while tally.cases < cases:
            engine = self._engine()
            try:
                for _ in range(self._chance.randint(1, 5)):
                    self._serve(engine, tally)
                    self._evict(engine)
            finally:
                engine.close()
        return tally

    def _tokens(self, most: int) -> list[int]:
        return [self._chance.randrange(VOCAB) for _ in range(self._chance.randint(1, most))]

    def _engine(self) -> Engine:
        chance, config = self._chance, self._model.config
        sequences = chance.choice([1, 3, 8, 16])
        alone = 4 * sequences if not config.attends else 0
        return build_engine(
            self._model,
            pool_pages=alone or chance.choice([13, 16, 22, 40, 160]),
            store=self._place,
            chunk_tokens=CHUNK,
            host_bytes=chance.choice([1, 4]) << 20,
            disk_bytes=64 << 20,
            settings=EngineSettings(
                prefill_chunk=CHUNK * chance.choice([1, 2, 3, 8, 16]),
                max_sequences=sequences,
                plan=chance.choice(["load", "load", "both-ends", "one-way"]),
                checkpoint_tokens=chance.choice([None, CHUNK, 4 * CHUNK]),
            ),
            drafter=PromptLookupDrafter() if not config.states and chance.random() < 0.3 else None,
        )

    def _serve(self, engine: Engine, tally: Tally) -> None:
        prompts, most = {}, self._chance.choice([3, 3, 8, _NEW])
        for _ in range(self._chance.choice(self._crowds)):
            prompt = self._prompt()
            prompts[engine.add(prompt, self._params(most))] = prompt
        for number, completion in finish(engine).items():
            prompt, metrics = prompts[number], completion.metrics
            assert completion.logits is not None, completion.error
            right = self._cold([*prompt, *completion.tokens[:-1]], len(completion.tokens))
            tally.cases += 1
            tally.happened.update(f"from {tier}" for tier, held in metrics.reused_by_tier.items() if held)
            tally.happened["hit within a page"] += metrics.reused_tokens % CHUNK > 0
            tally.happened["preempted"] += metrics.preemptions > 0
            tally.happened["accepted a draft"] += metrics.accepted_tokens > 0
            tally.happened["beside others"] += len(prompts) > 1
            if completion.logits.tobytes() != right.tobytes():
                tally.differing.append(f"{self._name}: {metrics}")
        if self._chance.random() < 0.3:  # a prompt that goes on with an answer
            self._trunks[0] = [*prompt, *completion.tokens][:_TRUNK]

    def _prompt(self) -> list[int]:
        trunk = self._chance.choice(self._trunks)
        some = self._chance.randint(1, len(trunk))
        kept = self._chance.choice([len(trunk), some, min(some, CHUNK)])
        return [*trunk[:kept], *(self._tokens(_SUFFIX) if self._chance.random() < 0.7 else [])]

    def _params(self, most: int) -> SamplingParams:
        chance = self._chance
        return SamplingParams(
            max_new_tokens=chance.randint(1, most),
            temperature=chance.choice([0.0, 1.0]),
            seed=chance.randrange(1000),
            ignore_eos=True,
            keep_logits=True,
        )

    def _cold(self, tokens: Sequence[int], rows: int) -> npt.NDArray[np.float32]:
        """Return the logits of the last ``rows`` tokens, computed in one step without others."""
        span = Span((self._table,) * len(self._pools), 0, len(tokens))
        wanted = range(len(tokens) - rows, len(tokens))
        logits: npt.NDArray[np.float32] = self._runner.compute(
            Step((span,), tokens, wanted, COMPLETED, CHUNK)
        ).numpy()
        return logits

    def _evict(self, engine: Engine) -> None:
        """Let pages leave the faster tiers, so that later hits come from slower ones."""
        assert isinstance(engine.connector, StoreConnector)
        store, how = engine.connector.store, self._chance.random()
        if self._place is None or how < 0.2:
            return
        assert store.flush(60)
        store.evict("hbm", self._chance.choice([None, None, 3]))
        if how > 0.5:
            store.evict("host")


def place_of(chance: random.Random, directory: Path, daemon: str) -> str | None:
    """Return where a world keeps its pages: in a directory of its own, at the daemon, or in its pool."""
    return chance.choice([str(directory), str(directory), daemon, None])
