"""From a model's name to an engine that runs it: the one place where the parts are put together.

Three steps, cheapest first, so that what can be refused is refused before gigabytes are read and before
anything is written: :func:`open_model` (configuration and tokenizer), :func:`load_model` (weights),
:func:`build_engine` (page pool and store).
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from tierstore.errors import UsageError
from tierstore.keys import Identity
from tierstore.spec import DEFAULT_CHUNK_TOKENS, KVSpec
from tierstore.store.base import DEFAULT_DISK_BYTES, DEFAULT_HOST_BYTES
from tierstore.units import format_size
from tierstore_connectors.bundled import open_connector
from tierstore_engine.attention.base import make_attention
from tierstore_engine.checkpoint import read_config
from tierstore_engine.config import DTYPES, ModelConfig
from tierstore_engine.engine import Engine
from tierstore_engine.errors import UnknownModelError
from tierstore_engine.model import Model
from tierstore_engine.presets import PRESETS, preset
from tierstore_engine.settings import EngineSettings
from tierstore_engine.tokenizer import ByteTokenizer, HFTokenizer, Tokenizer
from tierstore_engine.weights import ModelWeights, digest_weights, load_weights, random_weights, weights_bytes


@dataclass(frozen=True)
class OpenModel:
    """A model whose weights have not been read: ``folder`` is its checkpoint, None for a preset."""

    config: ModelConfig
    tokenizer: Tokenizer
    folder: Path | None
    device: str


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to run. Several engines may share one. ``digest`` stands for its weights' very bytes."""

    config: ModelConfig
    tokenizer: Tokenizer
    weights: ModelWeights
    digest: str
    device: str

    def kv_spec(self, *, chunk_tokens: int = DEFAULT_CHUNK_TOKENS) -> KVSpec:
        return self.config.kv_spec(chunk_tokens=chunk_tokens)

    def identity(self, spec: KVSpec) -> Identity:
        """Who this model's pages are: other weights, another shape or another RoPE are another identity."""
        rope = self.config.rope.describe()
        return Identity.of(spec, model=self.config.digest(), revision=self.digest, rope=rope)


def open_model(model: str, *, device: str = "auto", dtype: str | None = None) -> OpenModel:
    """The preset called ``model``, or the checkpoint folder at that path (write ``./demo`` for a folder that
    is called like a preset). ``dtype`` overrides the model's own.

    Raises :class:`UnknownModelError` where there is neither, :class:`ModelError` for a folder that cannot be
    run, :class:`UsageError` for an impossible device or dtype.
    """
    chosen = resolve_device(device)
    if dtype is not None and dtype not in DTYPES:
        raise UsageError(f"unknown dtype {dtype!r} (known: {', '.join(DTYPES)})")
    if model in PRESETS:
        return OpenModel(preset(model, dtype=dtype), ByteTokenizer(), None, chosen)
    folder = Path(model)
    if not folder.is_dir():
        raise UnknownModelError(
            f"no model {model!r}: neither a folder nor a preset (presets: {', '.join(PRESETS)})"
        )
    return OpenModel(read_config(folder, dtype=dtype), HFTokenizer(folder), folder, chosen)


def load_model(
    model: str | OpenModel, *, device: str = "auto", dtype: str | None = None, seed: int = 0
) -> LoadedModel:
    """The model with its weights, or with random ones made from ``seed`` for a preset. Raises what
    :func:`open_model` raises, and :class:`ModelError` for weights that do not fit the configuration."""
    source = open_model(model, device=device, dtype=dtype) if isinstance(model, str) else model
    _check_memory(source.config)
    if source.folder is None:
        weights = random_weights(source.config, seed=seed, device=source.device)
    else:
        weights = load_weights(source.config, source.folder, device=source.device)
    digest = digest_weights(source.config, weights)
    return LoadedModel(source.config, source.tokenizer, weights, digest, source.device)


def build_engine(
    model: LoadedModel,
    *,
    pool_pages: int,
    store: str | None = None,
    host_bytes: int = DEFAULT_HOST_BYTES,
    disk_bytes: int = DEFAULT_DISK_BYTES,
    chunk_tokens: int = DEFAULT_CHUNK_TOKENS,
    settings: EngineSettings | None = None,
) -> Engine:
    """An engine over a pool of ``pool_pages`` pages, and over the store at ``store`` (None: without one).

    Raises :class:`UsageError` for sizes that cannot work and
    :class:`~tierstore.errors.StoreUnavailableError` for a store that cannot be opened.
    """
    spec = model.kv_spec(chunk_tokens=chunk_tokens)
    settings = settings or EngineSettings()
    settings.check_chunk(chunk_tokens)
    check_pool(spec, pool_pages)
    connector = open_connector(
        spec,
        model.identity(spec),
        pool_pages=pool_pages,
        store=store,
        host_bytes=host_bytes,
        disk_bytes=disk_bytes,
        device=model.device,
    )
    attention = make_attention(connector.pool, model.config)
    runnable = Model(model.config, model.weights, attention, device=model.device)
    return Engine(runnable, model.tokenizer, connector, settings)


def pages_for_tokens(spec: KVSpec, tokens: int) -> int:
    """Pages that hold the KV of ``tokens`` tokens of one sequence."""
    return -(-tokens // spec.chunk_tokens)


def check_pool(spec: KVSpec, pool_pages: int) -> None:
    """Raises :class:`UsageError` for a pool without a page, or larger than this machine's memory."""
    if pool_pages < 1:
        raise UsageError(f"the page pool needs room for at least one page of {format_size(spec.page_bytes)}")
    wanted, memory = pool_pages * spec.page_bytes, _memory_bytes()
    if wanted > memory:
        raise UsageError(
            f"a page pool of {format_size(wanted)} ({pool_pages} pages of {format_size(spec.page_bytes)}) "
            f"does not fit this machine's memory of {format_size(memory)}"
        )


def resolve_device(device: str) -> str:
    """``auto`` and ``cpu`` are the CPU: it is the only device this version computes on."""
    if device in ("auto", "cpu"):
        return "cpu"
    if device == "cuda":
        raise UsageError("no CUDA backend in this version: use --device cpu")
    raise UsageError(f"unknown device {device!r} (known: auto, cpu, cuda)")


def _check_memory(config: ModelConfig) -> None:
    wanted, memory = weights_bytes(config), _memory_bytes()
    if wanted > memory:
        raise UsageError(
            f"the model's weights take {format_size(wanted)} as {config.dtype}, more than this machine's "
            f"memory of {format_size(memory)}"
        )


def _memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
