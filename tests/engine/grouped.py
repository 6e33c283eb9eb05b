"""Engines of models with several layer groups, over a store or without one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tierstore
from tierstore.tiers.group_pools import bytes_for, open_group_pools
from tierstore_connectors.base import Connector
from tierstore_connectors.bundled import NoStore, StoreConnector
from tierstore_engine.build import make_runner
from tierstore_engine.drafting import Drafter
from tierstore_engine.engine import Engine
from tierstore_engine.loaded import LoadedModel
from tierstore_engine.model import Model
from tierstore_engine.predictor import PredictorDrafter
from tierstore_engine.settings import EngineSettings

CHUNK = 16  # tokens a page
CHECKPOINT = 4 * CHUNK


class GroupedEngines:
    """Makes engines. When one is closed, every page is where it belongs."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._open: list[Engine] = []

    def make(
        self,
        model: LoadedModel,
        *,
        stored: bool = True,
        disk: str | None = None,
        pages: int = 64,
        drafter: Drafter | None = None,
        **settings: Any,
    ) -> Engine:
        """``disk`` names the directory of the engine's store, ``stored`` says whether it has one. A model
        with a predictor drafts."""
        spec = model.kv_spec(chunk_tokens=CHUNK)
        parts = spec.split()
        pools = open_group_pools(parts, bytes_for(parts, [pages] * len(parts)))
        connector: Connector = NoStore(pools, model.identity(spec))
        if stored:
            store = tierstore.open(
                self._folder / disk if disk else None,
                spec,
                identity=model.identity(spec),
                pools=pools,
                host_bytes=16 << 20,
                disk_bytes=16 << 20,
                checkpoint_tokens=CHECKPOINT,
            )
            connector = StoreConnector(store)
        # These models compute faster than some disks load.
        values = {"prefill_chunk": 64, "plan": "load", "checkpoint_tokens": CHECKPOINT, **settings}
        made = EngineSettings(**values)
        runner = make_runner(model, pools, made)
        if model.config.predictor:
            assert isinstance(runner, Model)
            drafter = PredictorDrafter(runner, chunk_tokens=CHUNK)
        self._open.append(Engine(runner, model.tokenizer, connector, made, drafter=drafter))
        return self._open[-1]

    def close(self, engine: Engine) -> None:
        self._open.remove(engine)
        connector = engine.connector
        if not engine.has_work:
            if isinstance(connector, StoreConnector):
                assert connector.store.flush(60)
                connector.store.check()
            for group, pool in enumerate(connector.pools):
                assert connector.available(group=group) == pool.capacity
        engine.close()

    def close_all(self) -> None:
        for engine in list(self._open):
            self.close(engine)


def forget(engine: Engine) -> None:
    """What is in the page pools has to come from below them."""
    assert isinstance(engine.connector, StoreConnector)
    assert engine.connector.store.flush(60)
    for group, pool in enumerate(engine.connector.pools):
        engine.connector.evict(pool.num_pages, group=group)
