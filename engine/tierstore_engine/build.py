"""Build an engine from a model's name. Only this module puts the engine's parts together.

There are three steps, cheapest first, so that invalid input is refused before gigabytes are read and before
anything is written: :func:`open_model` (configuration and tokenizer), :func:`load_model` (weights),
:func:`build_engine` (page pool and store).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from tierstore import DEFAULT_DISK_BYTES, DEFAULT_HOST_BYTES
from tierstore.codec import NONE
from tierstore.errors import UsageError
from tierstore.machine import memory_bytes
from tierstore.spec import DEFAULT_CHUNK_TOKENS, KVSpec
from tierstore.tiers.cuda import CudaDevice
from tierstore.tiers.device_overflow import DeviceOverflowPool
from tierstore.tiers.device_pool import DevicePool
from tierstore.tiers.hbm import PagePool
from tierstore.tiers.overflow import Overflow
from tierstore.units import format_size
from tierstore_connectors.bundled import open_connector
from tierstore_connectors.common.handover import BOTH, Role
from tierstore_engine.adapters import read_adapters
from tierstore_engine.checkpoint import read_config
from tierstore_engine.config import DTYPES, ModelConfig
from tierstore_engine.deterministic import with_same_bits
from tierstore_engine.draft_model import DraftModel
from tierstore_engine.drafting import Drafter
from tierstore_engine.engine import Engine
from tierstore_engine.errors import RankLostError, UnknownModelError
from tierstore_engine.gguf_file import config_from_gguf
from tierstore_engine.kernels.catalog import KERNEL_DTYPES
from tierstore_engine.kv_format import AUTO, KVFormat
from tierstore_engine.kv_scales import DYNAMIC, with_scales
from tierstore_engine.layer_weights import ModelWeights
from tierstore_engine.loaded import LoadedModel, OpenModel, make_memory
from tierstore_engine.model import Model
from tierstore_engine.options import MTP, EngineOptions
from tierstore_engine.pool_sizes import (
    check_pool,
    check_resident,
    fitting_pages,
    group_pages,
    pages_for_tokens,
    pool_bytes,
)
from tierstore_engine.predictor import PredictorDrafter, with_predictor
from tierstore_engine.presets import PRESETS, preset
from tierstore_engine.ranks.member import read_weights
from tierstore_engine.ranks.share import Share, check_ranks, divides_attention, kv_heads_of
from tierstore_engine.ranks.shared import SharedWeights
from tierstore_engine.settings import EngineSettings
from tierstore_engine.step import Runner
from tierstore_engine.tokenizer import ByteTokenizer, HFTokenizer, has_vocabulary
from tierstore_engine.vision import Vision
from tierstore_engine.vocabularies import vocabulary_of_gguf
from tierstore_engine.weights import (
    WeightsDigest,
    check_tensors,
    open_weights,
    states_of,
    weights_bytes,
)

_HEADS, _TOKENS = "--tensor-parallel", "--sequence-parallel"


def open_model(
    model: str,
    *,
    device: str = "auto",
    dtype: str | None = None,
    kv_dtype: str = AUTO,
    kv_scales: str = DYNAMIC,
    expand_weights: bool = False,
    weights_on_disk: bool = False,
    tokenizer: str | None = None,
    adapters: Sequence[str] = (),
    deterministic: bool = False,
    tensor_parallel: int = 1,
    sequence_parallel: int = 1,
    predictor: bool = False,
) -> OpenModel:
    """Return the preset called ``model``, or the checkpoint folder or GGUF file at that path (write
    ``./demo`` for a folder with a preset's name). ``tokenizer`` is the folder of the tokenizer and of the
    chat template (None: where the weights are, or the vocabulary in a GGUF file).

    ``dtype`` overrides the dtype that the model's files name. ``kv_dtype`` is the format of the model's KV
    (:meth:`~tierstore_engine.kv_format.KVFormat.parse`), and ``kv_scales`` the source of the scales
    (:func:`~tierstore_engine.kv_scales.with_scales`). Quantised weights stay quantised in memory unless
    ``expand_weights`` is set. With ``weights_on_disk``, weights stay in their files. ``adapters`` are LoRA
    adapters, each as ``NAME=DIR``. With ``deterministic``, a token's numbers have the same bits in every step
    (:mod:`~tierstore_engine.deterministic`). ``tensor_parallel`` is the number of processes that share the
    heads and weights, and ``sequence_parallel`` that of the parts of each sequence's tokens
    (:mod:`~tierstore_engine.ranks`). With ``predictor``, a layer of the checkpoint drafts tokens
    (:mod:`~tierstore_engine.predictor`).

    Raises :class:`UnknownModelError` if there is neither preset nor folder, :class:`ModelError` for an
    unsupported folder, :class:`UsageError` for an impossible device or dtype.
    """
    kv = KVFormat.parse(kv_dtype)
    if dtype is not None and dtype not in DTYPES:
        raise UsageError(f"unknown dtype {dtype!r} (known: {', '.join(DTYPES)})")
    check_device(device)
    for option, count in ((_HEADS, tensor_parallel), (_TOKENS, sequence_parallel)):
        if count < 1:
            raise UsageError(f"{option} must be at least 1, got {count}")
        if count > 1 and adapters:
            raise UsageError(f"{option} does not work with --adapter")
    if weights_on_disk and (model in PRESETS or expand_weights):
        why = "a preset has no file" if model in PRESETS else "--expand-weights makes others of them"
        raise UsageError(f"weights cannot stay on disk: {why}")
    if model in PRESETS:
        config = with_scales(replace(preset(model, dtype=dtype), kv=kv), kv_scales, None)
        where = resolve_device(device, config.dtype)
        if predictor:
            config = with_predictor(config, None, where)
        if deterministic:
            config = with_same_bits(config, where)
        bare = OpenModel(config, ByteTokenizer(), None, where, adapters=read_adapters(config, adapters))
        return _divided(bare, tensor_parallel, sequence_parallel)
    source = Path(model)
    if not source.exists():
        raise UnknownModelError(
            f"no model {model!r}: neither a folder nor a preset (presets: {', '.join(PRESETS)}) nor a file"
        )
    gguf = source.is_file()
    read = config_from_gguf(source, dtype=dtype) if gguf else read_config(source, dtype=dtype)
    config = with_scales(replace(read, kv=kv), kv_scales, source)
    where = resolve_device(device, config.dtype)
    if adapters and config.cross is not None:
        raise UsageError("--adapter does not work with cross attention")
    if predictor:
        config = with_predictor(config, source, where)
    if deterministic:
        config = with_same_bits(config, where)
    folder = Path(tokenizer) if tokenizer is not None else source.parent if gguf else source
    inside = gguf and tokenizer is None and not has_vocabulary(folder)
    words = HFTokenizer(vocabulary_of_gguf(source) if inside else folder)
    check_tensors(config, source)
    opened = OpenModel(
        config,
        words,
        folder,
        where,
        source,
        expand_weights,
        weights_on_disk,
        read_adapters(config, adapters),
    )
    if opened.device != "cpu":
        _check_gpu(opened)
    return _divided(opened, tensor_parallel, sequence_parallel)


def _divided(opened: OpenModel, heads: int, parts: int) -> OpenModel:
    """Return the model for ``heads × parts`` ranks. Raises :class:`UsageError` if it cannot be divided."""
    if heads * parts == 1:
        return opened
    option = _HEADS if heads > 1 else _TOKENS
    refused = {
        "--deterministic": bool(opened.config.arithmetic),
        "--draft mtp": bool(opened.config.predictor),
        "--weights-on-disk": opened.on_disk,
        "cross attention": opened.config.cross is not None,
    }
    for what, given in refused.items():
        if given:
            raise UsageError(f"{option} does not work with {what}")
    if parts > 1 and not opened.config.attends:
        raise UsageError(f"{_TOKENS} divides keys and values: this model has only recurrent states")
    if heads > 1:
        _check_heads(opened, heads)
    if opened.device != "cpu":
        _check_gpus(opened, option, heads, parts)
    return replace(opened, heads=heads, parts=parts)


def _check_heads(opened: OpenModel, heads: int) -> None:
    """Raise :class:`UsageError` for a model whose weights and heads cannot be divided."""
    if form := _packed_form(opened):
        raise UsageError(f"{_HEADS} does not divide weights in {form}: add --expand-weights")
    check_ranks(opened.config, heads)


def _check_gpus(opened: OpenModel, option: str, heads: int, parts: int) -> None:
    """Raise :class:`UsageError` if a model cannot be divided over GPUs, or if the machine has too few
    GPUs."""
    config = opened.config
    if config.states or (heads > 1 and not divides_attention(config)):
        what = "recurrent states" if config.states else "a norm over all heads together"
        raise UsageError(f"{option} on GPUs does not work with {what}: give --device cpu")
    if parts > 1 and any(config.window(layer) is not None for layer in range(config.layers)):
        raise UsageError(
            f"{_TOKENS} on GPUs does not work with windows or attention chunks: give --device cpu"
        )
    first, count, ranks = _device_index(opened.device), torch.cuda.device_count(), heads * parts
    if first + ranks > count:
        given = " ".join(f"{name} {n}" for name, n in ((_HEADS, heads), (_TOKENS, parts)) if n > 1)
        raise UsageError(
            f"{given} needs a GPU for each of {ranks} processes, from cuda:{first} on, and torch sees "
            f"{count}: give fewer, or --device cpu"
        )


def _packed_form(opened: OpenModel) -> str | None:
    """Return the format of weights that stay quantised in memory. Return None if there are no such
    weights."""
    if opened.source is None or opened.expand:
        return None
    with open_weights(opened.source) as stored:
        return stored.quantised


def _check_gpu(opened: OpenModel) -> None:
    """Raise :class:`UsageError` for a model that is computed on the CPU only."""
    if opened.on_disk:
        raise UsageError("weights can stay on disk on the CPU only: give --device cpu")
    if opened.config.short_conv is not None or opened.config.mamba1 is not None:
        raise UsageError(
            "layers with Mamba-1 or a short convolution are computed on the CPU only: give --device cpu"
        )
    if opened.config.cross is not None:
        raise UsageError("cross attention is computed on the CPU only: give --device cpu")
    if opened.config.kv.quantised and opened.config.latent is not None:
        raise UsageError(
            "quantised latents are computed on the CPU only: give --device cpu, or leave --kv-dtype out"
        )
    if opened.config.arithmetic and (form := _packed_form(opened)):
        raise UsageError(f"--deterministic takes no weights in {form} on a GPU: add --expand-weights")


def open_model_of(options: EngineOptions) -> OpenModel:
    """Return the model of a command's options. Raises :class:`UsageError` for options that do not fit
    together, and the errors of :func:`open_model`."""
    options.check()
    return open_model(
        options.model,
        device=options.device,
        kv_dtype=options.kv_dtype,
        kv_scales=options.kv_scales,
        adapters=options.adapter or (),
        deterministic=options.deterministic,
        tensor_parallel=options.tensor_parallel,
        sequence_parallel=options.sequence_parallel,
        predictor=options.draft == MTP,
        **options.reading(),
    )


def load_model(
    model: str | OpenModel,
    *,
    device: str = "auto",
    dtype: str | None = None,
    kv_dtype: str = AUTO,
    kv_scales: str = DYNAMIC,
    expand_weights: bool = False,
    weights_on_disk: bool = False,
    tokenizer: str | None = None,
    adapters: Sequence[str] = (),
    deterministic: bool = False,
    tensor_parallel: int = 1,
    sequence_parallel: int = 1,
    predictor: bool = False,
    seed: int = 0,
) -> LoadedModel:
    """Return the model with its weights, or with random weights from ``seed`` for a preset. Raises the errors
    of :func:`open_model`, and :class:`ModelError` for weights that do not match the configuration."""
    if isinstance(model, str):
        model = open_model(
            model,
            device=device,
            dtype=dtype,
            kv_dtype=kv_dtype,
            kv_scales=kv_scales,
            expand_weights=expand_weights,
            weights_on_disk=weights_on_disk,
            tokenizer=tokenizer,
            adapters=adapters,
            deterministic=deterministic,
            tensor_parallel=tensor_parallel,
            sequence_parallel=sequence_parallel,
            predictor=predictor,
        )
    source = model
    if not source.on_disk:
        _check_memory(source)
    digest, files = WeightsDigest(), states_of(source.source)
    weights, shared = _read_weights(source, seed, digest)
    return LoadedModel(
        source.config,
        source.tokenizer,
        weights,
        digest.hexdigest(),
        source.device,
        source.adapters,
        source.source,
        divided=source if source.ranks > 1 else None,
        seed=seed,
        files=files,
        shared=shared,
    )


def _read_weights(
    source: OpenModel, seed: int, digest: WeightsDigest
) -> tuple[ModelWeights, SharedWeights | None]:
    """Return the weights of this process, and the memory that other ranks may map. Add all weights to
    ``digest``."""
    if _shares_weights(source):
        shared = SharedWeights(source.config)
        shared.fill(source.source, seed=seed, digest=digest)
        return shared.weights, shared
    return read_weights(source, Share(0, source.heads), seed=seed, digest=digest), None


def _shares_weights(source: OpenModel) -> bool:
    """Return whether all ranks have the same weights, which one memory holds for all."""
    return source.device == "cpu" and source.parts > 1 and source.heads == 1 and _packed_form(source) is None


def build_engine(
    model: LoadedModel,
    *,
    pool_pages: int | None,
    most_pool_bytes: int | None = None,
    overflow: Overflow | None = None,
    store: str | None = None,
    prefix_cache: bool = True,
    host_bytes: int = DEFAULT_HOST_BYTES,
    disk_bytes: int = DEFAULT_DISK_BYTES,
    disk_codec: str = NONE,
    chunk_tokens: int = DEFAULT_CHUNK_TOKENS,
    settings: EngineSettings | None = None,
    drafter: Drafter | None = None,
    predicted_tokens: int = 5,
    model_name: str = "",
    role: Role = BOTH,
    share_engines: bool = False,
) -> Engine:
    """Build an engine over a page pool and a store.

    - ``pool_pages``: the pool's size. None means the free memory, and is possible on a GPU only.
    - ``most_pool_bytes``: the largest size for :meth:`Engine.resize_pool`. None means the first size on a
      CPU; on a GPU the pool then cannot be resized.
    - ``overflow``: where the pages are stored that do not fit into the pool. The pages in the pool are in
      memory.
    - ``store``: the store's directory or address. None keeps pages only in the pool.
    - ``prefix_cache``: whether requests reuse pages of earlier requests.
    - ``predicted_tokens``: the largest number of tokens that a model with a predictor drafts in a step.
    - ``model_name``: the name under which the model is shown.
    - ``role``: whether the engine loads and saves pages that it shares with other engines.
    - ``share_engines``: share pages with other engines (:mod:`tierstore_connectors.common.sharing`).

    Raises :class:`UsageError` for impossible sizes and :class:`~tierstore.errors.StoreUnavailableError` for a
    store that cannot be opened.
    """
    spec = model.kv_spec(chunk_tokens=chunk_tokens)
    settings = settings or EngineSettings()
    settings.check_chunk(chunk_tokens)
    divided = model.divided
    identity = model.shared_identity(spec) if share_engines else model.identity(spec)
    if model.device != "cpu":
        # the pool's size follows from the free memory, which includes torch's cache after this call
        torch.cuda.empty_cache()
        if divided is not None and pool_pages is None:
            raise UsageError(f"{_option(divided)} on GPUs needs a size of the page pool: give --hbm-bytes")
    pages = _fitting_pages(spec, model.device, settings) if pool_pages is None else pool_pages
    check_pool(spec, pages, model.device, nbytes=pool_bytes(spec, pages, settings))
    if overflow is not None:
        if divided is not None:
            raise UsageError(f"{_option(divided)} does not work with --overflow")
        if model.config.arithmetic and model.device != "cpu":
            raise UsageError("--deterministic does not work with --overflow on a GPU")
        overflow.pages(spec.split()[0], pages)  # this refuses models for which it does not work at any size
        check_resident(spec, pages, settings)
    connector = open_connector(
        spec,
        identity,
        pool_pages=group_pages(spec, pages, settings),
        most_bytes=most_pool_bytes,
        overflow=overflow,
        store=store,
        prefix_cache=prefix_cache,
        host_bytes=host_bytes,
        disk_bytes=disk_bytes,
        disk_codec=disk_codec,
        device=model.device,
        shared_parts=divided.parts if divided is not None else 0,
        device_heads=_device_heads(divided) if divided is not None and model.device != "cpu" else (),
        model_name=model_name,
        role=role,
    )
    try:
        runner = make_runner(model, connector.pools, settings)
    except RankLostError:
        connector.close()
        raise
    if model.config.predictor:
        assert isinstance(runner, Model), "refused by with_predictor"
        drafter = PredictorDrafter(runner, chunk_tokens=chunk_tokens, tokens=predicted_tokens)
    adapters = {each.name: each.digest for each in model.adapters}
    for adapter in adapters.values():
        connector.register(adapter)
    vision = Vision.of(model, connector)
    return Engine(
        runner, model.tokenizer, connector, settings, drafter=drafter, adapters=adapters, vision=vision
    )


def _device_heads(divided: OpenModel) -> list[range]:
    """Return the KV heads that the GPU of each rank holds."""
    heads = divided.heads
    return [kv_heads_of(divided.config, Share(rank, heads)) for rank in range(heads)] * divided.parts


def _option(divided: OpenModel) -> str:
    return _HEADS if divided.heads > 1 else _TOKENS


def build_draft_model(
    draft: LoadedModel,
    model: LoadedModel,
    *,
    pool_pages: int,
    tokens: int,
    store: str | None = None,
    prefix_cache: bool = True,
    host_bytes: int = DEFAULT_HOST_BYTES,
    disk_bytes: int = DEFAULT_DISK_BYTES,
    disk_codec: str = NONE,
    chunk_tokens: int = DEFAULT_CHUNK_TOKENS,
    settings: EngineSettings | None = None,
) -> DraftModel:
    """Return ``draft`` as the drafter of an engine of ``model``, with its own pages: ``pool_pages`` of its
    first layer group. They are stored in the daemon at ``store`` under the draft model's identity, or in the
    directory beside ``store`` that ends with ``-draft``.

    Raises the errors of :func:`check_draft` and :func:`build_engine`.
    """
    check_draft(draft.config, model.config)
    settings, spec = settings or EngineSettings(), draft.kv_spec(chunk_tokens=chunk_tokens)
    settings.check_chunk(chunk_tokens)
    check_pool(spec, pool_pages, draft.device, nbytes=pool_bytes(spec, pool_pages, settings))
    connector = open_connector(
        spec,
        draft.identity(spec),
        pool_pages=group_pages(spec, pool_pages, settings),
        store=store if store is None or "://" in store else f"{store.rstrip('/')}-draft",
        prefix_cache=prefix_cache,
        host_bytes=host_bytes,
        disk_bytes=disk_bytes,
        disk_codec=disk_codec,
        device=draft.device,
    )
    return DraftModel(
        make_runner(draft, connector.pools, settings), connector, tokens=tokens, settings=settings
    )


def check_draft(draft: ModelConfig, model: ModelConfig) -> None:
    """Raise :class:`UsageError` for models with different vocabularies or with cross attention."""
    if model.cross is not None or draft.cross is not None:
        raise UsageError("--draft MODEL does not work with cross attention: give --draft prompt-lookup")
    if draft.vocab_size != model.vocab_size:
        raise UsageError(
            f"a draft model must have the model's vocabulary: it has {draft.vocab_size} tokens, "
            f"the model {model.vocab_size}"
        )


def make_runner(model: LoadedModel, pools: Sequence[PagePool], settings: EngineSettings) -> Runner:
    """Return the model over a pool for each of its layer groups, on their device. Raises
    :class:`~tierstore_engine.errors.RankLostError` if another rank does not start."""
    if model.divided is not None:
        from tierstore_engine.ranks.runner import RankedRunner

        return RankedRunner.start(model, pools)
    memories = [make_memory(pool, model.config) for pool in pools]
    runnable = Model(model.config, model.weights, memories, device=model.device, adapters=model.adapters)
    slots = [pool.hbm if isinstance(pool, DeviceOverflowPool) else pool for pool in pools]
    on_device = [pool for pool in slots if isinstance(pool, DevicePool)]
    if on_device:
        from tierstore_engine.device import CudaRunner

        return CudaRunner(runnable, memories, on_device, settings)
    return runnable


def pools_of_one_sequence(model: LoadedModel, tokens: int) -> list[PagePool]:
    """Return a pool for each layer group of a model on the CPU, with the pages of one sequence of ``tokens``
    tokens. A layer group with a window also gets pages for all tokens. A recurrent state gets one page."""
    spec, states = model.kv_spec(), model.config.states
    pages = pages_for_tokens(spec, tokens)
    return [PagePool(part, 1 if group in states else pages) for group, part in enumerate(spec.split())]


def check_device(device: str) -> None:
    """Raise :class:`UsageError` for a device that does not exist."""
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
    """Return the device that ``auto`` means for a model of ``dtype``: a GPU if one can compute it."""
    check_device(device)
    if device != "auto":
        return device
    return "cuda" if torch.cuda.is_available() and dtype in KERNEL_DTYPES else "cpu"


def _fitting_pages(spec: KVSpec, device: str, settings: EngineSettings) -> int:
    if device == "cpu":
        raise UsageError(
            "give the pool's number of pages: on a CPU the pool shares the memory with everything else"
        )
    return fitting_pages(spec, CudaDevice(_device_index(device)), settings)


def _device_index(device: str) -> int:
    """Return the number of a device: 1 for ``cuda:1``, and 0 for ``cuda``."""
    return torch.device(device).index or 0


def _check_memory(source: OpenModel) -> None:
    device, wanted, form = source.device, weights_bytes(source.config), source.config.dtype
    if source.source is not None and not source.expand:
        with open_weights(source.source) as stored:
            if stored.quantised:
                wanted, form = stored.nbytes, stored.quantised
    memory = memory_bytes().total if device == "cpu" else torch.cuda.mem_get_info(_device_index(device))[0]
    if device != "cpu":
        wanted //= source.heads
    if device == "cpu" and source.parts > 1 and not _shares_weights(source):
        wanted, form = wanted * source.parts, f"{form}, once for each of {source.parts} parts"
    if wanted > memory:
        raise UsageError(
            f"the model's weights take {format_size(wanted)} as {form}, more than the "
            f"{'memory of this machine' if device == 'cpu' else 'free memory of its GPU'}, "
            f"{format_size(memory)}"
        )
