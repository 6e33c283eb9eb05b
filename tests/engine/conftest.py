"""Checkpoints of tiny models, what transformers computes with them, and engines."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch

import tierstore
from tests.engine.grouped import CHUNK, GroupedEngines
from tests.engine.stored import Stored
from tests.forked import Forked
from tests.tiny_models import VOCAB, reference_model, train_tokenizer
from tierstore.tiers.group_pools import bytes_for, open_group_pools
from tierstore.tiers.hbm import PagePool
from tierstore_connectors.bundled import NoStore, StoreConnector
from tierstore_engine import cli
from tierstore_engine.attention import make_attention
from tierstore_engine.build import load_model, make_runner
from tierstore_engine.drafting import Drafter
from tierstore_engine.engine import Engine
from tierstore_engine.loaded import LoadedModel
from tierstore_engine.model import Model
from tierstore_engine.ranks.others import Others
from tierstore_engine.settings import EngineSettings

PROMPT_TOKENS = 333
NEW_TOKENS = 64
STORED_CHUNK = CHUNK  # tokens a page of a stored engine


@dataclass(frozen=True)
class Oracle:
    """A checkpoint folder and the greedy continuation of ``prompt`` by transformers, with its logits."""

    folder: Path
    prompt: list[int]
    tokens: list[int]
    logits: torch.Tensor


@pytest.fixture(scope="session", autouse=True)
def forked_ranks() -> None:
    """Most of the time that a rank takes to start goes into imports."""

    def spawn(module: str, arguments: Sequence[str], pass_fds: Sequence[int]) -> Forked:
        return Forked(module, arguments, pass_fds=pass_fds)

    Others.spawn = staticmethod(spawn)  # type: ignore[method-assign,assignment]


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Makes the checkpoint folder of an architecture in ``ARCHITECTURES``, once."""

    @cache
    def make(name: str, *, sharded: bool = False) -> Path:
        folder = tmp_path_factory.mktemp(name)
        reference_model(name).save_pretrained(folder, max_shard_size="60KB" if sharded else "1GB")
        train_tokenizer().save(str(folder / "tokenizer.json"))
        return folder

    return make


@pytest.fixture(scope="session")
def oracles(checkpoints: Callable[..., Path]) -> Callable[[str], Oracle]:
    """Computes an architecture's :class:`Oracle`, once."""

    @cache
    def make(name: str) -> Oracle:
        model = reference_model(name)
        generator = torch.Generator().manual_seed(7)
        prompt = torch.randint(VOCAB, (PROMPT_TOKENS,), generator=generator).tolist()
        rows, tokens, past = [], [], None
        names = inspect.signature(model.forward).parameters  # another one from transformers 5.24 on
        name_of_past = "cache" if "cache" in names else "past_key_values"
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            for _ in range(NEW_TOKENS):
                out = model(ids, use_cache=True, **{name_of_past: past})
                past = out[name_of_past]
                rows.append(out.logits[0, -1].float())
                tokens.append(int(rows[-1].argmax()))
                ids = torch.tensor([[tokens[-1]]])
        return Oracle(checkpoints(name), prompt, tokens, torch.stack(rows))

    return make


@pytest.fixture(scope="session")
def loaded() -> Callable[..., LoadedModel]:
    """Loads a model on the CPU, wherever the tests run, once."""
    return cache(partial(load_model, device="cpu"))


@pytest.fixture(scope="session")
def tiny(loaded: Callable[..., LoadedModel]) -> LoadedModel:
    return loaded("tiny")


@pytest.fixture
def engine_of() -> Callable[..., Engine]:
    """Makes an engine without a store; when the test is over, none of its pages may be missing."""
    engines: list[Engine] = []

    def make(
        model: LoadedModel,
        *,
        pool_pages: int = 64,
        chunk_tokens: int = 16,
        drafter: Drafter | None = None,
        **settings: Any,
    ) -> Engine:
        spec = model.kv_spec(chunk_tokens=chunk_tokens)
        connector = NoStore(PagePool(spec, pool_pages), model.identity(spec))
        settings.setdefault("prefill_chunk", 128)
        runnable = Model(
            model.config, model.weights, [make_attention(connector.pool, model.config)], device="cpu"
        )
        engines.append(
            Engine(runnable, model.tokenizer, connector, EngineSettings(**settings), drafter=drafter)
        )
        return engines[-1]

    yield make
    for engine in engines:
        if not engine.has_work:
            assert engine.connector.available() == engine.connector.pool.num_pages
        engine.close()
        assert engine.connector.available() == engine.connector.pool.num_pages


@pytest.fixture
def stored_engine(tmp_path: Path) -> Iterator[Callable[..., Stored]]:
    """Makes an engine over a store; ``disk`` names its directory. Everything is checked when it is closed."""
    opened: list[Stored] = []

    def make(
        model: LoadedModel,
        *,
        disk: str | None = None,
        pool_pages: int = 64,
        host_bytes: int = 16 << 20,
        drafter: Drafter | None = None,
        **settings: Any,
    ) -> Stored:
        spec = model.kv_spec(chunk_tokens=STORED_CHUNK)
        parts = spec.split()
        pools: Sequence[PagePool] = [PagePool(spec, pool_pages)]
        if len(parts) > 1:
            pools = open_group_pools(parts, bytes_for(parts, [pool_pages] * len(parts)))
        path = None if disk is None else tmp_path / disk
        store = tierstore.open(
            path, spec, identity=model.identity(spec), pools=pools, host_bytes=host_bytes, disk_bytes=16 << 20
        )
        settings.setdefault("prefill_chunk", 64)
        settings.setdefault("plan", "load")  # these models compute faster than some disks load
        made = EngineSettings(**settings)
        runner = make_runner(model, pools, made)
        engine = Engine(runner, model.tokenizer, StoreConnector(store), made, drafter=drafter)
        opened.append(Stored(engine, store))
        return opened[-1]

    yield make
    for stored in opened:
        stored.close()


@pytest.fixture
def oracle(name: str, oracles: Callable[[str], Oracle]) -> Oracle:
    """The oracle of the architecture that the test calls ``name``."""
    return oracles(name)


@pytest.fixture
def model(oracle: Oracle, loaded: Callable[..., LoadedModel]) -> LoadedModel:
    """The model of ``oracle``."""
    return loaded(str(oracle.folder))


@pytest.fixture
def grouped(tmp_path: Path) -> Iterator[GroupedEngines]:
    engines = GroupedEngines(tmp_path)
    yield engines
    engines.close_all()


@pytest.fixture
def run_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    """Runs ``tierstore-engine`` in this process: exit code, stdout, stderr."""

    def call(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.argv", ["tierstore-engine", *arguments])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        out, err = capsys.readouterr()
        return int(ended.value.code or 0), out, err

    return call
