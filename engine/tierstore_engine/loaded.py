"""Models before and after their weights are read, and what their layers remember in pools."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tierstore.keys import Identity
from tierstore.spec import DEFAULT_CHUNK_TOKENS, KVSpec, LayerKind
from tierstore.tiers.hbm import PagePool
from tierstore_connectors.common.sharing import refusal, shared_identity
from tierstore_engine.adapters import Adapter
from tierstore_engine.attention import make_attention
from tierstore_engine.attention.base import pages_on_device
from tierstore_engine.config import ModelConfig
from tierstore_engine.delta import CpuDeltaStates
from tierstore_engine.layer_weights import ModelWeights
from tierstore_engine.mamba1 import CpuMamba1States
from tierstore_engine.mamba2 import CpuMamba2States
from tierstore_engine.model import Memory
from tierstore_engine.ranks.shared import SharedWeights
from tierstore_engine.short_conv import CpuShortConvStates
from tierstore_engine.tokenizer import Tokenizer
from tierstore_engine.weights import FileStates


@dataclass(frozen=True)
class OpenModel:
    """A model without its weights. ``source`` is its checkpoint folder or GGUF file, and ``folder`` has its
    tokenizer and chat template; both are None for a preset. With ``expand``, quantised weights are expanded
    when they are read. With ``on_disk``, weights stay in their files. ``heads`` is the number of ranks that
    share the model's heads, and ``parts`` the number of parts of each sequence's tokens
    (:mod:`tierstore_engine.ranks`)."""

    config: ModelConfig
    tokenizer: Tokenizer
    folder: Path | None
    device: str
    source: Path | None = None
    expand: bool = False
    on_disk: bool = False
    adapters: tuple[Adapter, ...] = ()
    heads: int = 1
    parts: int = 1

    @property
    def ranks(self) -> int:
        """Return the number of processes that compute the model."""
        return self.heads * self.parts

    @property
    def gguf(self) -> Path | None:
        """Return the GGUF file that the model is in; None for a folder or a preset."""
        return self.source if self.source is not None and self.source.is_file() else None


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to run. Several engines may share one. ``digest`` covers all bytes of its weights, and
    ``source`` is where they were read, as in :class:`OpenModel`. With ``divided``, the weights are rank 0's
    share, and the other ranks read their shares of the model ``divided``, whose ``files`` must not have
    changed. If all ranks have the same weights, these are in ``shared`` memory."""

    config: ModelConfig
    tokenizer: Tokenizer
    weights: ModelWeights
    digest: str
    device: str
    adapters: tuple[Adapter, ...] = ()
    source: Path | None = None
    divided: OpenModel | None = None
    seed: int = 0
    files: FileStates = ()
    shared: SharedWeights | None = None

    def kv_spec(self, *, chunk_tokens: int = DEFAULT_CHUNK_TOKENS) -> KVSpec:
        return self.config.kv_spec(chunk_tokens=chunk_tokens)

    def identity(self, spec: KVSpec) -> Identity:
        """Return the identity of this model's pages. Models with different weights, shapes, RoPE or KV
        formats have different identities."""
        config = self.config
        return Identity.of(
            spec,
            model=config.digest(),
            revision=self.digest,
            rope=config.rope.describe(),
            codec=config.kv.describe(),
        )

    def shared_identity(self, spec: KVSpec) -> Identity:
        """Return the identity of pages that other engines share. Raise :class:`UsageError` if this model's
        pages cannot be shared."""
        config = self.config
        if config.kv.quantised:
            raise refusal("a KV of --kv-dtype is this engine's own")
        if config.arithmetic:
            raise refusal("--deterministic needs pages that this engine has computed itself")
        if self.adapters:
            raise refusal("pages computed with an adapter are not shared")
        shared = shared_identity(self.source, dtype=config.dtype, chunk_tokens=spec.chunk_tokens)
        if shared.layout != spec.describe():
            raise refusal("this engine keeps the layers of this model in other groups")
        return shared


def make_memory(pool: PagePool, config: ModelConfig) -> Memory:
    """Return the memory of the layer group of ``pool``. Raises the errors of
    :func:`~tierstore_engine.attention.make_attention`."""
    [group] = pool.spec.groups
    if group.kind is not LayerKind.RECURRENT_STATE:
        return make_attention(pool, config)
    if config.short_conv is not None:
        return CpuShortConvStates(pool, config)  # open_model refuses GPUs
    if config.mamba1 is not None:
        return CpuMamba1States(pool, config)  # the same
    if pool.device == "cpu":
        return (CpuDeltaStates if config.mamba is None else CpuMamba2States)(pool, config)
    from tierstore_engine.attention.cuda_states import CudaDeltaStates, CudaMamba2States
    from tierstore_engine.kernels.cupy_launcher import CupyLauncher

    launcher = CupyLauncher(pool.device)  # imported first, because its error says what is missing
    kind = CudaDeltaStates if config.mamba is None else CudaMamba2States
    return kind(pages_on_device(pool), pool.spec, config, launcher)
