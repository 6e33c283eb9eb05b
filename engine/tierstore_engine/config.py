"""The shape of a model: the parts of each layer, and what it keeps in pages.

A layer has a *mixer* (attention or a recurrence) and an MLP. The mixer's kind
(:class:`~tierstore.spec.LayerKind`) says what it stores: K and V of all tokens, of a window or of an
attention chunk, a latent of each token, or a state. Layers of one kind form a layer group.
:mod:`tierstore_engine.families` reads ``config.json``.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from typing import Any

import msgspec
import xxhash

from tierstore.spec import DEFAULT_CHUNK_TOKENS, DTYPE_BITS, KVSpec, LayerGroup, LayerKind
from tierstore_engine.errors import ModelError
from tierstore_engine.kv_format import KVFormat

DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding. ``kind`` is ``default``, ``linear``, ``llama3`` or ``yarn``. The other fields are
    used only by the kinds that need them."""

    theta: float = 10000.0
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 8192
    # Added later: see ModelConfig.
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    amplitude: float = 1.0
    """Factor of cosines and sines (YaRN)."""
    rotary_dim: int = 0
    """How many leading dimensions of a head are rotated; 0 for all."""
    interleaved: bool = False
    """Whether dimension 2i is rotated together with 2i + 1, instead of i with i + half."""
    sections: tuple[int, ...] = ()
    """The number of pairs of dimensions that rotate by each of three positions (time, height, width). Empty
    if tokens have one position."""

    def facts(self) -> dict[str, Any]:
        return _facts(self, since="beta_fast")

    def describe(self) -> str:
        """Return one line. Equal lines mean equal rotations; the line is part of the identity."""
        return ";".join(f"{name}={value}" for name, value in self.facts().items())


@dataclass(frozen=True)
class LatentConfig:
    """Multi-head latent attention (MLA). One vector of ``rank + rope_dim`` numbers is stored per token, from
    which the keys and values of all heads are computed. If ``query_rank`` is set, queries are computed by two
    products with ``query_rank`` numbers between them."""

    rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    query_rank: int | None = None

    @property
    def width(self) -> int:
        return self.rank + self.rope_dim


STATE_ALIGN = 64
"""Bytes. Each tensor of a state begins at a multiple of this within its page."""


class StateConfig(ABC):
    """The state of a layer: the last ``conv_width - 1`` inputs of a causal convolution (in the model's
    dtype), then a matrix of each head (float32)."""

    conv_width: int

    @property
    @abstractmethod
    def channels(self) -> int:
        """Return the number of the convolution's channels."""

    @property
    @abstractmethod
    def matrices(self) -> tuple[int, int, int]:
        """Return ``heads, key_dim, value_dim``. A key selects what is read of a matrix."""

    def inputs_bytes(self, dtype: str) -> int:
        """Return the bytes of the convolution's inputs, up to where the matrices begin."""
        return _aligned(self.channels * (self.conv_width - 1) * DTYPE_BITS[dtype] // 8)

    def state_bytes(self, dtype: str) -> int:
        """Return the bytes of one layer's state."""
        return self.inputs_bytes(dtype) + _aligned(math.prod(self.matrices) * 4)


@dataclass(frozen=True)
class DeltaConfig(StateConfig):
    """A gated delta rule layer. Its convolution covers queries, keys and values of all heads."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv_width: int

    def __post_init__(self) -> None:
        if self.value_heads % self.key_heads:
            raise ModelError(f"{self.value_heads} value heads cannot share {self.key_heads} key heads evenly")

    @property
    def channels(self) -> int:
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    @property
    def matrices(self) -> tuple[int, int, int]:
        return self.value_heads, self.key_dim, self.value_dim


@dataclass(frozen=True)
class Mamba2Config(StateConfig):
    """A Mamba-2 layer. The heads of a group share B, which writes to the state, and C, which reads it. The
    convolution covers the values of all heads, then B and C of all groups."""

    heads: int
    head_dim: int
    state_dim: int
    groups: int
    conv_width: int
    conv_bias: bool = True
    biased: bool = False
    """Whether the projections into and out of the layer have biases."""
    least_step: float = 0.0
    most_step: float | None = None
    """Limits of the step sizes (Δ)."""
    # Added later: see ModelConfig.
    norm: str = "after gate"
    """When the norm of the heads' output is applied: ``after gate`` or ``before gate``. Empty without a
    norm."""
    scales: tuple[float, ...] = ()
    """Factors of the projection's gates, values, B, C and step sizes. Empty if all are 1."""

    def __post_init__(self) -> None:
        if self.heads % self.groups:
            raise ModelError(f"{self.heads} Mamba-2 heads cannot share {self.groups} groups evenly")

    def facts(self) -> dict[str, Any]:
        return _facts(self, since="norm")

    @property
    def width(self) -> int:
        """Return the width of the values of all heads."""
        return self.heads * self.head_dim

    @property
    def channels(self) -> int:
        return self.width + 2 * self.groups * self.state_dim

    @property
    def matrices(self) -> tuple[int, int, int]:
        return self.heads, self.state_dim, self.head_dim


@dataclass(frozen=True)
class Mamba1Config(StateConfig):
    """A Mamba-1 layer. Step sizes are computed by two products with ``rank`` numbers between them."""

    width: int
    state_dim: int
    rank: int
    conv_width: int
    conv_bias: bool = True
    biased: bool = False
    """Whether the projections into and out of the layer have biases."""
    norm_eps: float | None = None
    """Epsilon of the norms of step sizes, keys and queries. None if the layer has no such norms."""
    trained_norms: bool = False
    """Whether these norms have weights."""

    @property
    def channels(self) -> int:
        return self.width

    @property
    def matrices(self) -> tuple[int, int, int]:
        return 1, self.state_dim, self.width


@dataclass(frozen=True)
class ShortConvConfig(StateConfig):
    """A layer whose state is only the last inputs of a convolution (LFM2)."""

    width: int
    conv_width: int
    biased: bool = False
    """Whether the convolution and the projections have biases."""

    def __post_init__(self) -> None:
        if self.conv_width < 2:
            raise ModelError(f"a convolution of {self.conv_width} tokens has no state")

    @property
    def channels(self) -> int:
        return self.width

    @property
    def matrices(self) -> tuple[int, int, int]:
        return 0, 0, 0


@dataclass(frozen=True)
class SharedBlocksConfig:
    """Transformer blocks without residuals that a model uses several times, in turn (Zamba2). ``uses`` has
    the layer of each use. Each use has its own keys and values, its own matrix for the block's output, and
    products of a low ``rank`` that are added to the block's products.

    A block's input is the residual stream beside the embeddings, ``2 × hidden_size`` wide. Its output is
    added to the input of the next layer's mixer, and not to the residual stream.
    """

    uses: tuple[int, ...]
    blocks: int
    rank: int
    adapted_attention: bool
    """Whether a use adds its own products to queries, keys and values, besides those that it adds in the
    MLP."""

    def block(self, layer: int) -> int:
        """Return the block that a layer uses, which is 0 for the first one.

        >>> [SharedBlocksConfig((1, 3, 5), 2, 8, False).block(layer) for layer in (1, 3, 5)]
        [0, 1, 0]
        """
        return self.uses.index(layer) % self.blocks


def _aligned(nbytes: int) -> int:
    return -(-nbytes // STATE_ALIGN) * STATE_ALIGN


@dataclass(frozen=True)
class ExpertsConfig:
    """A mixture of ``count`` experts. ``chosen`` of them compute each token.

    ``scoring`` turns the router's logits into scores: ``softmax`` over all experts, ``sigmoid`` of each, or
    ``softmax of chosen``. With ``groups``, experts are chosen only from the best ``best_groups`` groups; a
    group's rank is decided by its best ``group_members`` experts. Scores are normalised to sum to 1 if
    ``normalised``, and multiplied by ``scale``.
    """

    count: int
    chosen: int
    width: int
    scoring: str = "softmax"
    normalised: bool = False
    scale: float = 1.0
    groups: int = 1
    best_groups: int = 1
    group_members: int = 1
    correction: bool = False
    """Whether a bias is added to the scores when experts are chosen, and only then."""
    scaled_input: bool = False
    """Whether the score multiplies an expert's input instead of its output."""
    shared_width: int = 0
    """Width of the shared expert, which computes all tokens. 0 if there is none."""
    shared_gate: bool = False
    biased: bool = False
    """Whether the router and the experts have biases."""
    clamp: float | None = None
    """Limit of the values of gates and ups. If it is set, the rows of gates and ups alternate (gpt-oss)."""
    sharpness: float = 1.0
    """Sharpness of the sigmoid in a clamped expert's gate."""

    def __post_init__(self) -> None:
        if not 0 < self.chosen <= self.count:
            raise ModelError(f"a token cannot go to {self.chosen} of {self.count} experts")
        if self.count % self.groups or not 0 < self.best_groups <= self.groups:
            raise ModelError(
                f"{self.count} experts cannot be chosen from {self.best_groups} of {self.groups} groups"
            )
        if self.best_groups * (self.count // self.groups) < self.chosen:
            raise ModelError(f"{self.best_groups} groups of experts have fewer than {self.chosen} experts")


@dataclass(frozen=True)
class Temperature:
    """Scaling of queries by their position: ``1 + scale × log(1 + floor((position + 1) / floor))``."""

    floor: float
    scale: float


@dataclass(frozen=True)
class TensorNames:
    """The names in a checkpoint that differ between families of models."""

    mlp: str = "mlp"
    mlp_norm: str = "post_attention_layernorm"
    router: str = "gate"
    expert: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    packed: bool = False
    """Whether all experts are in one tensor, ``[experts, in, out]``."""
    shared: str = "shared_expert"
    # Added later: see ModelConfig.
    aside: str = ""
    """The name of an MLP that computes all tokens: the shared one beside the experts, or the only one of a
    layer."""
    joined: bool = False
    """Whether gates and ups are stored in one tensor, in MLPs and in experts."""
    blocks: bool = False
    """Whether mixers and MLPs are numbered in one sequence, and are all called ``mixer``."""
    fused_qkv: str = ""
    """``rows`` if Q, K and V are one tensor. ``heads`` if that tensor has, for each KV head, the rows of its
    query heads, of its keys and of its values."""
    renamed: tuple[tuple[str, str], ...] = ()
    """Pairs of (a part of a name, the text that the checkpoint has instead), applied in order."""

    def facts(self) -> dict[str, Any]:
        return _facts(self, since="aside")


@dataclass(frozen=True)
class ModelConfig:
    """A decoder. ``windows`` has one entry per layer: the number of tokens that a token sees, or None for all
    tokens.

    ``kinds`` has each layer's kind; ``windows`` then also has attention chunks. ``kinds`` is empty for models
    whose layers all store K and V of all tokens. These models have one layer group, even if some layers have
    windows.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    max_positions: int
    dtype: str
    rope: RopeConfig = field(default_factory=RopeConfig)
    norm_eps: float = 1e-6
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    tied_embeddings: bool = False
    windows: tuple[int | None, ...] = ()
    eos_ids: tuple[int, ...] = ()
    kv: KVFormat = field(default_factory=KVFormat)
    # Fields from here on were added later. They are left out of the digest at their defaults, so that the
    # identity of models without them stays the same.
    kinds: tuple[LayerKind, ...] = ()
    ropes: tuple[RopeConfig | None, ...] = ()
    """The RoPE of each layer, if layers differ; None for no rotation."""
    latent: LatentConfig | None = None
    delta: DeltaConfig | None = None
    mamba: Mamba2Config | None = None
    experts: ExpertsConfig | None = None
    dense_layers: tuple[int, ...] = ()
    """The layers that have one MLP instead of experts, in a model with experts."""
    bare_layers: tuple[int, ...] = ()
    """Layers without an MLP."""
    activation: str = "silu"
    """``silu``, ``gelu_tanh`` or ``gelu`` (exact), or ``relu2`` or ``xielu`` for MLPs without a gate."""
    centred_norms: bool = False
    """Whether 1 is added to a norm's weight."""
    post_norms: bool = False
    """Whether a norm is applied to the outputs of mixer and MLP before they are added."""
    embed_scale: float = 1.0
    residual_scale: float = 1.0
    """Factor of the outputs of mixer and MLP before they are added."""
    logit_divisor: float = 1.0
    logit_cap: float | None = None
    """If set, ``x`` becomes ``cap × tanh(x / cap)``. ``score_cap`` limits attention's scores in the same
    way."""
    score_cap: float | None = None
    score_scale: float | None = None
    """The factor of attention's scores. None means one over the root of head_dim."""
    sinks: bool = False
    """Whether each head has an additional score in its softmax, which has no value (an attention sink)."""
    gated_attention: bool = False
    unit_qk: bool = False
    """Whether queries and keys are scaled to a mean square of 1 after rotation."""
    temperature: Temperature | None = None
    """Scaling of queries in layers without rotation."""
    names: TensorNames = field(default_factory=TensorNames)
    ungated: bool = False
    """Whether MLPs have no gate, with any activation."""
    norm: str = "rms"
    """``rms``, or ``layer`` for LayerNorm: the mean is subtracted first."""
    norm_bias: bool = False
    pre_norms: bool = True
    """Whether a norm is applied to the inputs of mixer and MLP."""
    parallel: str = ""
    """Whether the MLP gets the same input as the mixer: with the mixer's norm (``one norm``) or with its own
    (``two norms``). Empty if the MLP gets the mixer's output."""
    qk_norm_over: str = "head"
    """The numbers that one norm of ``qk_norm`` covers: those of a ``head``, with the same weights for all
    heads; those of ``each`` head, with its own weights; or those of ``all`` heads together."""
    qk_norm_late: bool = False
    """Whether the norm of queries and keys is applied after their rotation."""
    short_conv: ShortConvConfig | None = None
    mamba1: Mamba1Config | None = None
    arithmetic: str = ""
    """With ``--deterministic``: the facts about the software and the processor that determine a token's bits.
    Empty otherwise."""
    beside: tuple[int, ...] = ()
    """Layers whose mixer gets the same normed input as the mixer of the previous layer, instead of that
    layer's output. Both outputs are added to the input together. The previous layer has no MLP
    (``bare_layers``)."""
    mixer_scales: tuple[float, ...] = ()
    """The factor of each layer's mixer output. Empty if all are 1."""
    mlp_scales: tuple[float, float] = (1.0, 1.0)
    """Factors of an MLP's gates before their activation, and of its output. Experts have none."""
    shared: SharedBlocksConfig | None = None
    """The blocks with attention that layers share. None if layers share none."""
    first_kv_head: int = 0
    """The first KV head in pages that this process computes. With several ranks, ``heads`` and ``kv_heads``
    count the heads of one rank, and pages have the heads of all (:mod:`tierstore_engine.ranks`)."""
    predictor: str = ""
    """How a checkpoint names the layer that drafts tokens (:mod:`tierstore_engine.predictor`): ``nextn`` as
    in DeepSeek V3, or ``mtp`` as in Qwen3-Next. Empty if no layer does. The drafting layer follows the last
    of ``layers``, and has its own entry in ``kinds``."""
    added_tokens: int = 0
    """The number of tokens after the vocabulary that occur in prompts only, such as an image's token."""

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ModelError(f"model dtype {self.dtype!r} is not supported (use one of {', '.join(DTYPES)})")
        if self.attends and self.heads % self.kv_heads:
            raise ModelError(f"{self.heads} attention heads cannot share {self.kv_heads} KV heads evenly")
        if self.attends and (self.head_dim < 2 or self.head_dim % 2):
            raise ModelError(f"head_dim must be even for rotary embeddings, got {self.head_dim}")
        if (self.recurrent is None) == (LayerKind.RECURRENT_STATE in self.kinds):
            raise ModelError("a model needs a state's shape exactly if it has layers with a recurrent state")
        if self.kv.keys != self.kv.values and LayerKind.MLA_LATENT in self.kinds:
            raise ModelError("latents are keys and values at once: give --kv-dtype one format for both")
        if self.kv.quantised and set(self.kinds) == {LayerKind.RECURRENT_STATE}:
            raise ModelError("--kv-dtype is for keys and values: this model keeps only states")

    # -- of one layer ----------------------------------------------------------------------------------

    def kind(self, layer: int) -> LayerKind:
        return self.kinds[layer] if self.kinds else LayerKind.FULL_ATTENTION

    @property
    def attention_scale(self) -> float:
        """Return the factor of scores before the softmax."""
        return self.score_scale or self.head_dim**-0.5

    @property
    def query_rows(self) -> int:
        """Return the rows of a layer's Q, with those of its gates."""
        return self.heads * self.head_dim * (2 if self.gated_attention else 1)

    def window(self, layer: int) -> int | None:
        return self.windows[layer] if self.windows else None

    def rope_of(self, layer: int) -> RopeConfig | None:
        return self.ropes[layer] if self.ropes else self.rope

    @cached_property
    def fed(self) -> frozenset[int]:
        """Return the layers whose mixer takes its input plus the output of the shared block before."""
        return frozenset(layer + 1 for layer in self.shared.uses) if self.shared is not None else frozenset()

    @cached_property
    def joined(self) -> frozenset[int]:
        """Return the layers that are computed in one go with the layer before."""
        return self.fed.union(self.beside)

    def stored_number(self, layer: int) -> int:
        """Return a layer's number in a checkpoint, where joined layers have one number together."""
        return layer - sum(each <= layer for each in self.joined)

    def mixer_scale(self, layer: int) -> float:
        return self.mixer_scales[layer] if self.mixer_scales else 1.0

    @property
    def gated_mlps(self) -> bool:
        return self.activation not in ("relu2", "xielu") and not self.ungated

    def experts_of(self, layer: int) -> ExpertsConfig | None:
        return None if layer in self.dense_layers else self.experts

    # -- layer groups ----------------------------------------------------------------------------------

    @cached_property
    def groups(self) -> tuple[LayerGroup, ...]:
        """Return the layer groups. Groups that need every token come first."""
        members: dict[tuple[LayerKind, int | None], list[int]] = {}
        for layer in range(self.layers + bool(self.predictor)):
            window = self.window(layer) if self.kind(layer) in _WINDOWED else None
            members.setdefault((self.kind(layer), window), []).append(layer)
        ordered = sorted(members.items(), key=lambda item: _ORDER.index(item[0][0]))
        return tuple(self._group(kind, window, tuple(layers)) for (kind, window), layers in ordered)

    def _group(self, kind: LayerKind, window: int | None, layers: tuple[int, ...]) -> LayerGroup:
        if kind is LayerKind.RECURRENT_STATE:
            assert self.recurrent is not None
            return LayerGroup(kind, layers, state_bytes=self.recurrent.state_bytes(self.dtype))
        if kind is LayerKind.MLA_LATENT:
            assert self.latent is not None
            return LayerGroup(kind, layers, 1, self.latent.width)
        return LayerGroup(kind, layers, self.kv_heads, self.head_dim, window)

    @property
    def attends(self) -> bool:
        """Return whether any layer attends to keys, values or latents. The layers of other models have
        recurrent states only, and ``heads``, ``kv_heads`` and ``head_dim`` are 0."""
        return set(self.kinds) != {LayerKind.RECURRENT_STATE}

    @property
    def recurrent(self) -> StateConfig | None:
        """Return the shape of the layers with a state, for any rule; None without any."""
        return self.delta or self.mamba or self.short_conv or self.mamba1

    @cached_property
    def states(self) -> frozenset[int]:
        """Return the layer groups that are recurrent states."""
        found = enumerate(self.groups)
        return frozenset(at for at, group in found if group.kind is LayerKind.RECURRENT_STATE)

    @cached_property
    def cross(self) -> int | None:
        """Return the layer group of cross attention; None without one."""
        kinds = [group.kind for group in self.groups]
        return kinds.index(LayerKind.CROSS_ATTENTION) if LayerKind.CROSS_ATTENTION in kinds else None

    @cached_property
    def without_tokens(self) -> frozenset[int]:
        """Return the layer groups that keep nothing for a token."""
        return self.states if self.cross is None else self.states | {self.cross}

    @property
    def prompt_tokens(self) -> int:
        """Return how many token ids prompts have."""
        return self.vocab_size + self.added_tokens

    def group_of(self, layer: int) -> int:
        """Return the layer group of ``layer``."""
        return self._group_of[layer]

    @cached_property
    def _group_of(self) -> dict[int, int]:
        return {layer: at for at, group in enumerate(self.groups) for layer in group.layers}

    def kv_spec(self, *, chunk_tokens: int = DEFAULT_CHUNK_TOKENS) -> KVSpec:
        """Return the page layout of all layer groups."""
        return KVSpec(
            self.groups,
            self.kv.codes[0].dtype if self.kv.quantised else self.dtype,
            chunk_tokens,
            value_dtype=self.kv.codes[1].dtype if self.kv.keys != self.kv.values else None,
            scaled=self.kv.dynamic,
        )

    # -- as a whole ------------------------------------------------------------------------------------

    def digest(self) -> str:
        """Return a short hex digest of every field that changes what the model computes, except the KV
        format."""
        values = _facts(self, since="kinds") | {"rope": self.rope.facts()}
        if "names" in values:
            values["names"] = self.names.facts()
        if self.mamba is not None:
            values["mamba"] = self.mamba.facts()
        for unused in ("eos_ids", "kv"):
            del values[unused]
        return xxhash.xxh3_128_hexdigest(msgspec.json.encode(sorted(values.items())))


def _facts(shape: Any, *, since: str) -> dict[str, Any]:
    """Return the values of a dataclass's fields. Fields from ``since`` on are left out if they have their
    defaults."""
    values = asdict(shape)
    every = fields(shape)
    for each in every[[each.name for each in every].index(since) :]:
        default = each.default_factory() if callable(each.default_factory) else each.default
        if getattr(shape, each.name) == default:
            del values[each.name]
    return values


_WINDOWED = (LayerKind.SLIDING_WINDOW, LayerKind.CHUNKED_ATTENTION)
_ORDER = (
    LayerKind.FULL_ATTENTION,
    LayerKind.MLA_LATENT,
    LayerKind.SLIDING_WINDOW,
    LayerKind.CHUNKED_ATTENTION,
    LayerKind.RECURRENT_STATE,
    LayerKind.CROSS_ATTENTION,
)
