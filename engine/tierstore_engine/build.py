"""From a model's name to an engine that runs it: the one place where the parts are put together.

Three steps, cheapest first, so that what can be refused is refused before gigabytes are read and before
anything is written: :func:`open_model` (configuration and tokenizer), :func:`load_model` (weights),
:func:`build_engine` (page pool and store).
"""

from __future__ import annotations

import os
import re
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from tierstore import DEFAULT_DISK_BYTES, DEFAULT_HOST_BYTES
from tierstore.codec import NONE
from tierstore.errors import UsageError
from tierstore.keys import Identity
from tierstore.spec import DEFAULT_CHUNK_TOKENS, KVSpec, LayerKind
from tierstore.tiers.cuda import CudaDevice
from tierstore.tiers.device import Device
from tierstore.tiers.device_pool import DevicePool, pages_that_fit
from tierstore.tiers.group_pools import bytes_for
from tierstore.tiers.hbm import PagePool
from tierstore.units import format_size
from tierstore_connectors.bundled import open_connector
from tierstore_connectors.common.handover import BOTH, Role
from tierstore_engine.attention import make_attention
from tierstore_engine.attention.base import pages_on_device
from tierstore_engine.checkpoint import read_config
from tierstore_engine.config import DTYPES, ModelConfig
from tierstore_engine.delta import CpuDeltaStates
from tierstore_engine.draft_model import DraftModel
from tierstore_engine.drafting import Drafter
from tierstore_engine.engine import Engine
from tierstore_engine.errors import UnknownModelError
from tierstore_engine.kernels.catalog import KERNEL_DTYPES
from tierstore_engine.kv_format import AUTO, KVFormat
from tierstore_engine.kv_scales import DYNAMIC, with_scales
from tierstore_engine.mamba2 import CpuMamba2States
from tierstore_engine.model import Memory, Model
from tierstore_engine.presets import PRESETS, preset
from tierstore_engine.settings import EngineSettings
from tierstore_engine.step import Runner
from tierstore_engine.tokenizer import ByteTokenizer, HFTokenizer, Tokenizer
from tierstore_engine.weights import (
    ModelWeights,
    check_tensors,
    digest_weights,
    load_weights,
    random_weights,
    weights_bytes,
)


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
        """Who this model's pages are: other weights, shape, RoPE or KV format are another identity."""
        config = self.config
        return Identity.of(
            spec,
            model=config.digest(),
            revision=self.digest,
            rope=config.rope.describe(),
            codec=config.kv.describe(),
        )


def open_model(
    model: str,
    *,
    device: str = "auto",
    dtype: str | None = None,
    kv_dtype: str = AUTO,
    kv_scales: str = DYNAMIC,
) -> OpenModel:
    """The preset called ``model``, or the checkpoint folder at that path (write ``./demo`` for a folder that
    is called like a preset). ``dtype`` overrides the model's own, ``kv_dtype`` (of
    :meth:`~tierstore_engine.kv_format.KVFormat.parse`) says how its KV is kept, and ``kv_scales`` where the
    scales come from (:func:`~tierstore_engine.kv_scales.with_scales`).

    Raises :class:`UnknownModelError` where there is neither, :class:`ModelError` for a folder that cannot be
    run, :class:`UsageError` for an impossible device or dtype.
    """
    kv = KVFormat.parse(kv_dtype)
    if dtype is not None and dtype not in DTYPES:
        raise UsageError(f"unknown dtype {dtype!r} (known: {', '.join(DTYPES)})")
    check_device(device)
    if model in PRESETS:
        config = with_scales(replace(preset(model, dtype=dtype), kv=kv), kv_scales, None)
        return OpenModel(config, ByteTokenizer(), None, resolve_device(device, config.dtype))
    folder = Path(model)
    if not folder.is_dir():
        raise UnknownModelError(
            f"no model {model!r}: neither a folder nor a preset (presets: {', '.join(PRESETS)})"
        )
    config = with_scales(replace(read_config(folder, dtype=dtype), kv=kv), kv_scales, folder)
    tokenizer = HFTokenizer(folder)
    check_tensors(config, folder)
    return OpenModel(config, tokenizer, folder, resolve_device(device, config.dtype))


def load_model(
    model: str | OpenModel,
    *,
    device: str = "auto",
    dtype: str | None = None,
    kv_dtype: str = AUTO,
    kv_scales: str = DYNAMIC,
    seed: int = 0,
) -> LoadedModel:
    """The model with its weights, or with random ones made from ``seed`` for a preset. Raises what
    :func:`open_model` raises, and :class:`ModelError` for weights that do not fit the configuration."""
    if isinstance(model, str):
        model = open_model(model, device=device, dtype=dtype, kv_dtype=kv_dtype, kv_scales=kv_scales)
    source = model
    _check_memory(source.config, source.device)
    if source.folder is None:
        weights = random_weights(source.config, seed=seed, device=source.device)
    else:
        weights = load_weights(source.config, source.folder, device=source.device)
    digest = digest_weights(source.config, weights)
    return LoadedModel(source.config, source.tokenizer, weights, digest, source.device)


def build_engine(
    model: LoadedModel,
    *,
    pool_pages: int | None,
    most_pool_bytes: int | None = None,
    store: str | None = None,
    host_bytes: int = DEFAULT_HOST_BYTES,
    disk_bytes: int = DEFAULT_DISK_BYTES,
    disk_codec: str = NONE,
    chunk_tokens: int = DEFAULT_CHUNK_TOKENS,
    settings: EngineSettings | None = None,
    drafter: Drafter | None = None,
    model_name: str = "",
    role: Role = BOTH,
) -> Engine:
    """An engine over a pool of ``pool_pages`` pages (None, on a GPU only: what its free memory holds), which
    :meth:`Engine.resize_pool` may make ``most_pool_bytes`` large (None: on a CPU its first size, on a GPU it
    keeps that), and over the store at ``store`` (None: without one). ``model_name`` is what people call the
    model; ``role`` is what it does with pages that it shares with other engines.

    Raises :class:`UsageError` for sizes that cannot work and
    :class:`~tierstore.errors.StoreUnavailableError` for a store that cannot be opened.
    """
    spec = model.kv_spec(chunk_tokens=chunk_tokens)
    settings = settings or EngineSettings()
    settings.check_chunk(chunk_tokens)
    if model.device != "cpu":
        torch.cuda.empty_cache()  # the pool's size goes by what is free, and so is what torch only keeps
    pages = _fitting_pages(spec, model.device, settings) if pool_pages is None else pool_pages
    check_pool(spec, pages, model.device, nbytes=pool_bytes(spec, pages, settings))
    connector = open_connector(
        spec,
        model.identity(spec),
        pool_pages=group_pages(spec, pages, settings),
        most_bytes=most_pool_bytes,
        store=store,
        host_bytes=host_bytes,
        disk_bytes=disk_bytes,
        disk_codec=disk_codec,
        device=model.device,
        model_name=model_name,
        role=role,
    )
    runner = make_runner(model, connector.pools, settings)
    return Engine(runner, model.tokenizer, connector, settings, drafter=drafter)


def build_draft_model(
    draft: LoadedModel,
    model: LoadedModel,
    *,
    pool_pages: int,
    tokens: int,
    store: str | None = None,
    host_bytes: int = DEFAULT_HOST_BYTES,
    disk_bytes: int = DEFAULT_DISK_BYTES,
    disk_codec: str = NONE,
    chunk_tokens: int = DEFAULT_CHUNK_TOKENS,
    settings: EngineSettings | None = None,
) -> DraftModel:
    """``draft`` as the drafter of an engine of ``model``, over pages of its own: in the daemon at ``store``
    under its own identity, or in the directory beside ``store`` that ends with ``-draft``.

    Raises :class:`UsageError` for models whose tokens are not the same, and what :func:`build_engine` does.
    """
    if draft.config.vocab_size != model.config.vocab_size:
        raise UsageError(
            f"a draft model has the model's own tokens: it has {draft.config.vocab_size} of them, the model "
            f"{model.config.vocab_size}"
        )
    settings, spec = settings or EngineSettings(), draft.kv_spec(chunk_tokens=chunk_tokens)
    check_pool(spec, pool_pages, draft.device)
    connector = open_connector(
        spec,
        draft.identity(spec),
        pool_pages=pool_pages,
        store=store if store is None or "://" in store else f"{store.rstrip('/')}-draft",
        host_bytes=host_bytes,
        disk_bytes=disk_bytes,
        disk_codec=disk_codec,
        device=draft.device,
    )
    return DraftModel(
        make_runner(draft, [connector.pool], settings), connector, tokens=tokens, settings=settings
    )


def make_runner(model: LoadedModel, pools: Sequence[PagePool], settings: EngineSettings) -> Runner:
    """The model over a pool for each of its layer groups, on their device."""
    memories = [make_memory(pool, model.config) for pool in pools]
    runnable = Model(model.config, model.weights, memories, device=model.device)
    on_device = [pool for pool in pools if isinstance(pool, DevicePool)]
    if on_device:
        from tierstore_engine.device import CudaRunner

        return CudaRunner(runnable, memories, on_device, settings)
    return runnable


def group_pages(spec: KVSpec, pages: int, settings: EngineSettings) -> list[int]:
    """Pages of each layer group's pool, where the first one's has ``pages``: beside it, windows are as large
    as the sequences that go on at a time need and a quarter of what all tokens would take, states two for
    each sequence that can be held, and as many again to be found."""
    tokens = pages * spec.chunk_tokens
    counts = [pages]
    for part in spec.split()[1:]:
        [group] = part.groups
        if group.window is None:
            counts.append(4 * min(pages, settings.max_sequences))
        else:
            most = min(tokens, group.window + settings.prefill_chunk + 2 * spec.chunk_tokens)
            counts.append(min(pages // 4 + 2 * pages_for_tokens(spec, most) + 2, 2 * pages + 2))
    return counts


def make_memory(pool: PagePool, config: ModelConfig) -> Memory:
    """What the layer group of ``pool`` remembers by. Raises what
    :func:`~tierstore_engine.attention.make_attention` does."""
    [group] = pool.spec.groups
    if group.kind is not LayerKind.RECURRENT_STATE:
        return make_attention(pool, config)
    if pool.device == "cpu":
        return (CpuDeltaStates if config.mamba is None else CpuMamba2States)(pool, config)
    from tierstore_engine.attention.cuda_states import CudaDeltaStates, CudaMamba2States
    from tierstore_engine.kernels.cupy_launcher import CupyLauncher

    launcher = CupyLauncher(pool.device)  # first: it says what is missing
    kind = CudaDeltaStates if config.mamba is None else CudaMamba2States
    return kind(pages_on_device(pool), pool.spec, config, launcher)


def pages_for_tokens(spec: KVSpec, tokens: int) -> int:
    """Pages that hold the KV of ``tokens`` tokens of one sequence."""
    return -(-tokens // spec.chunk_tokens)


def check_pool(spec: KVSpec, pool_pages: int, device: str, *, nbytes: int | None = None) -> None:
    """Raises :class:`UsageError` for a pool without a page, or larger than this machine's memory. (A GPU says
    what it has room for when the pool is made.)"""
    if pool_pages < 1:
        raise UsageError(f"the page pool needs room for at least one page of {format_size(spec.page_bytes)}")
    wanted, memory = nbytes or pool_pages * spec.page_bytes, _memory_bytes()
    if device == "cpu" and wanted > memory:
        raise UsageError(
            f"a page pool of {format_size(wanted)} ({pool_pages} pages of {format_size(spec.page_bytes)}) "
            f"does not fit this machine's memory of {format_size(memory)}"
        )


def check_device(device: str) -> None:
    """Raises :class:`UsageError` for a device that there is not."""
    if device in ("auto", "cpu"):
        return
    if not re.fullmatch(r"cuda(:\d{1,3})?", device, re.ASCII):
        raise UsageError(f"unknown device {device!r} (known: auto, cpu, cuda, cuda:N)")
    if not torch.cuda.is_available():
        built = "sees none" if torch.version.cuda else "was built without CUDA"
        raise UsageError(f"no CUDA device: torch {torch.__version__} {built}; use --device cpu")
    count = torch.cuda.device_count()
    if _device_index(device) >= count:
        raise UsageError(f"no device {device}: torch sees {count} (the last is cuda:{count - 1})")


def resolve_device(device: str, dtype: str) -> str:
    """What ``auto`` is for a model of ``dtype``: a GPU where there is one that computes such models."""
    check_device(device)
    if device != "auto":
        return device
    return "cuda" if torch.cuda.is_available() and dtype in KERNEL_DTYPES else "cpu"


def _fitting_pages(spec: KVSpec, device: str, settings: EngineSettings) -> int:
    if device == "cpu":
        raise UsageError("say how many pages the pool has: this machine's memory is not the pool's alone")
    return fitting_pages(spec, CudaDevice(_device_index(device)), settings)


def fitting_pages(spec: KVSpec, device: Device, settings: EngineSettings) -> int:
    """:func:`pages_within` what a pool may take of the device's free memory."""
    first = spec.split()[0]
    return pages_within(spec, pages_that_fit(first, device) * first.page_bytes, settings)


def pages_within(spec: KVSpec, nbytes: int, settings: EngineSettings) -> int:
    """Pages of the first layer group's pool, so that all groups' together (:func:`group_pages`) take at most
    ``nbytes``; 0 where there is no room for one."""
    most = nbytes // spec.split()[0].page_bytes
    return max(bisect_right(range(most + 1), nbytes, key=lambda n: pool_bytes(spec, n, settings)) - 1, 0)


def pool_bytes(spec: KVSpec, pages: int, settings: EngineSettings) -> int:
    """The memory of all groups' pools, where the first one's has ``pages``."""
    return bytes_for(spec.split(), group_pages(spec, pages, settings))


def _device_index(device: str) -> int:
    """1 of ``cuda:1``; ``cuda`` is the first."""
    return torch.device(device).index or 0


def _check_memory(config: ModelConfig, device: str) -> None:
    wanted = weights_bytes(config)
    memory = _memory_bytes() if device == "cpu" else torch.cuda.mem_get_info(_device_index(device))[0]
    if wanted > memory:
        raise UsageError(
            f"the model's weights take {format_size(wanted)} as {config.dtype}, more than the "
            f"{'memory of this machine' if device == 'cpu' else 'free memory of its GPU'}, "
            f"{format_size(memory)}"
        )


def _memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
