"""The byte layout of a page of a model's KV cache: its layers, its size, and the position of each tile.

A page holds the keys and values of one chunk (``chunk_tokens`` consecutive tokens) for **all** layers,
contiguous, in this order::

    [layer][K|V][kv_head][token][head_dim]

    [layer]([K|V][kv_head][token][head_dim], then scales [K|V][kv_head][token])     where KV is quantised

So one copy moves a page over PCIe or to disk, and each (layer, K|V, head) *tile* is a contiguous
``chunk_tokens × head_dim`` matrix for an attention kernel. Each :class:`LayerGroup` has the layers that store
their state in the same way. The layer groups of a page follow one another in the given order. If each layer
group has its own pages, :meth:`KVSpec.split` returns their layouts.

The pages of cross-attention layers hold KV of an encoder's rows instead of tokens. Each input of a prompt (an
image, say) has its own pages in these layers, and a prompt without inputs has none.

The outputs of an encoder (embeddings) are not KV, and have their own spec: :meth:`KVSpec.embedding`. A page
then holds ``chunk_tokens`` rows, ``[row][width]``.

>>> spec = KVSpec.uniform(layers=2, kv_heads=2, head_dim=64, dtype="float32")
>>> spec.page_bytes
131072
>>> spec.tile(layer=1, plane=0, head=1)
ByteRange(start=81920, stop=98304)
"""

from __future__ import annotations

import enum
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any

from tierstore.errors import SpecError

DEFAULT_CHUNK_TOKENS = 64

MIN_BYTES_PER_TOKEN = 32  # least page bytes per token, because memory also holds the page's token ids
MAX_TOKENS_OF_SMALL_PAGE = 128  # allowed in any page, because the smallest page takes 4 KiB in every tier

DTYPE_BITS: Mapping[str, int] = {
    "float32": 32,
    "float16": 16,
    "bfloat16": 16,
    "float8_e4m3fn": 8,
    "float8_e5m2": 8,
    "int8": 8,
    "int4": 4,  # two numbers in a byte, the first in its low half
    "uint8": 8,  # for opaque pages
}

SCALE_BYTES = 2  # a scale is a bfloat16
MOST_WORTH = 7


class LayerKind(str, enum.Enum):
    """The state that a layer stores for earlier tokens."""

    FULL_ATTENTION = "full_attention"  # K and V of every token (MHA, GQA, MQA)
    SLIDING_WINDOW = "sliding_window"  # K and V; only the last `window` tokens are read
    CHUNKED_ATTENTION = "chunked_attention"  # K and V, read within chunks of `window` tokens
    MLA_LATENT = "mla_latent"  # one latent vector per token instead of K and V
    RECURRENT_STATE = "recurrent_state"  # a state of fixed size, valid at a chunk's end
    CROSS_ATTENTION = "cross_attention"  # K and V of an encoder's rows, for each input of a prompt
    EMBEDDING = "embedding"  # rows that an encoder computed from one input, instead of KV
    OPAQUE = "opaque"  # bytes whose layout only the engine knows


_KEYS_AND_VALUES = (
    LayerKind.FULL_ATTENTION,
    LayerKind.SLIDING_WINDOW,
    LayerKind.CHUNKED_ATTENTION,
    LayerKind.CROSS_ATTENTION,
)
_WINDOWED = (LayerKind.SLIDING_WINDOW, LayerKind.CHUNKED_ATTENTION)
_STATES = (LayerKind.RECURRENT_STATE, LayerKind.OPAQUE)  # plain bytes, without tiles


@dataclass(frozen=True, slots=True)
class ByteRange:
    """A half-open range of bytes within a page."""

    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class LayerGroup:
    """Layers of the model that store their state in the same way.

    ``layers`` are indices into the model's layers, ascending. ``head_dim`` is the width of one vector: of a
    head's K or V, of the latent (with its RoPE part) for MLA, or of an embedding. ``window`` is in tokens,
    and only for sliding windows and attention chunks. ``state_bytes`` is per layer, and only for recurrent
    states and opaque pages.

    ``worth`` is only for embeddings. A byte of the embedding takes 2 to the power of ``worth`` (0 to 7) times
    as long to compute as a byte of KV. The default policy keeps such a page like a page with 2 to the power
    of ``worth`` times as many uses.
    """

    kind: LayerKind
    layers: tuple[int, ...]
    kv_heads: int = 1
    head_dim: int = 0
    window: int | None = None
    state_bytes: int = 0
    worth: int = 0

    @property
    def planes(self) -> int:
        """2 if K and V are stored separately, 1 for a latent, a state or an embedding."""
        return 2 if self.kind in _KEYS_AND_VALUES else 1

    @property
    def label(self) -> str:
        """The kind of its layers, for people: ``full attention``, ``sliding window 1,024``."""
        return self.kind.value.replace("_", " ") + (f" {self.window:,}" if self.window else "")


@dataclass(frozen=True)
class KVSpec:
    """The page layout of one model. Raise :class:`SpecError` if the fields contradict one another."""

    groups: tuple[LayerGroup, ...]
    dtype: str
    chunk_tokens: int = DEFAULT_CHUNK_TOKENS
    hashed: bool = False
    """Whether a page stores the words of a hash, by which the engine names the page, in the place of token
    ids."""
    value_dtype: str | None = None
    """Dtype of V; None if it is the same as K's dtype."""
    scaled: bool = False
    """Whether each vector has a scale. The scales of a layer follow the layer's tiles, so that one copy moves
    all of them."""

    def __post_init__(self) -> None:
        for dtype in self._dtypes:
            if dtype not in DTYPE_BITS:
                raise SpecError(f"unknown KV dtype {dtype!r} (known: {', '.join(DTYPE_BITS)})")
        if not isinstance(self.chunk_tokens, int) or self.chunk_tokens < 1:
            raise SpecError(f"chunk_tokens must be a whole number of at least 1, got {self.chunk_tokens!r}")
        layers = [layer for group in self.groups for layer in group.layers]
        if not layers or len(set(layers)) != len(layers):
            raise SpecError("every layer must be in exactly one layer group, and there must be at least one")
        for group in self.groups:
            _check_group(group)
            self._check_vectors(group)
        if self.of_inputs and (len(layers) > 1 or self.scaled or self.value_dtype):
            raise SpecError("embeddings are no part of a model's KV: make their spec with KVSpec.embedding")
        check_page(self.page_bytes, self.chunk_tokens)

    # -- constructors --------------------------------------------------------------------------------

    @classmethod
    def uniform(
        cls,
        *,
        layers: int,
        kv_heads: int,
        head_dim: int,
        dtype: str,
        chunk_tokens: int = DEFAULT_CHUNK_TOKENS,
        value_dtype: str | None = None,
        scaled: bool = False,
    ) -> KVSpec:
        """Return the spec of a model in which all layers have full attention with the same heads (Llama,
        Qwen, Mistral)."""
        group = LayerGroup(LayerKind.FULL_ATTENTION, tuple(range(layers)), kv_heads, head_dim)
        return cls((group,), dtype, chunk_tokens, value_dtype=value_dtype, scaled=scaled)

    @classmethod
    def opaque(cls, page_bytes: int, *, chunk_tokens: int, hashed: bool = False) -> KVSpec:
        """Return the spec of another engine's pages. Only their size is known. Such a page is found only as a
        whole, by the key that the engine gave to its chunk, because its bytes cannot be assigned to tokens.
        If the same bytes can have different meanings, ``Identity.codec`` must differ between the meanings."""
        group = LayerGroup(LayerKind.OPAQUE, (0,), state_bytes=page_bytes)
        return cls((group,), "uint8", chunk_tokens, hashed)

    @classmethod
    def embedding(cls, *, width: int, dtype: str, rows: int = DEFAULT_CHUNK_TOKENS, worth: int = 0) -> KVSpec:
        """Return the spec of an encoder's outputs: ``rows`` rows of ``width`` numbers on each page. An input
        has as many pages as its rows need. The pages are found by the content of the input:
        :meth:`Store.embedding <tierstore.Store.embedding>`. :func:`tierstore.sizing.embedding_worth` returns
        the ``worth`` of a model's embeddings (see :class:`LayerGroup`).

        >>> KVSpec.embedding(width=4096, dtype="bfloat16").page_bytes
        524288
        """
        return cls((LayerGroup(LayerKind.EMBEDDING, (0,), 1, width, worth=worth),), dtype, rows)

    @classmethod
    def from_hf_config(
        cls,
        config: Mapping[str, Any],
        *,
        dtype: str | None = None,
        chunk_tokens: int = DEFAULT_CHUNK_TOKENS,
    ) -> KVSpec:
        """Return the spec of a Hugging Face ``config.json`` (as a mapping).

        ``dtype`` replaces the model's own dtype. Raise :class:`SpecError` for a configuration that this
        version does not support (:func:`layer_groups`), and for recurrent layers, which store nothing per
        token.
        """
        groups = sorted(layer_groups(config), key=lambda group: group.window is not None)
        if any(group.kind in _STATES for group in groups):
            raise SpecError("config.json: layers with a recurrent state keep nothing for a token")
        return cls(tuple(groups), dtype or kv_dtype(config), chunk_tokens)

    # -- sizes and offsets ---------------------------------------------------------------------------

    @property
    def dtype_bytes(self) -> int:
        """Bytes of one number of K; of two numbers if a number has less than a byte."""
        return max(DTYPE_BITS[self.dtype] // 8, 1)

    @property
    def of_inputs(self) -> bool:
        """Whether pages hold embeddings of inputs instead of KV of prompts."""
        return any(group.kind is LayerKind.EMBEDDING for group in self.groups)

    @property
    def num_layers(self) -> int:
        return sum(len(group.layers) for group in self.groups)

    @cached_property
    def page_bytes(self) -> int:
        """Bytes of one page: all layers of one chunk."""
        return sum(len(group.layers) * self._layer_bytes(group) for group in self.groups)

    @property
    def token_bytes(self) -> float:
        """Bytes that one token adds, over all layers except cross-attention layers."""
        groups = (group for group in self.groups if group.kind is not LayerKind.CROSS_ATTENTION)
        return sum(len(group.layers) * self._layer_bytes(group) for group in groups) / self.chunk_tokens

    def split(self) -> tuple[KVSpec, ...]:
        """Return one spec for each layer group, in the order of ``groups``, for separate pages of the same
        chunks. A spec with one layer group returns only itself.

        >>> full, window = LayerGroup(LayerKind.FULL_ATTENTION, (1,), 1, 64), LayerGroup(
        ...     LayerKind.SLIDING_WINDOW, (0,), 1, 64, window=512
        ... )
        >>> [part.page_bytes for part in KVSpec((full, window), "float16").split()]
        [16384, 16384]
        """
        if len(self.groups) == 1:
            return (self,)
        return tuple(replace(self, groups=(group,)) for group in self.groups)

    def of_heads(self, heads: range) -> KVSpec:
        """Return the layout of pages that have only these KV heads, but all of a latent or a state.

        >>> spec = KVSpec.uniform(layers=2, kv_heads=4, head_dim=64, dtype="float16")
        >>> spec.of_heads(range(1, 3)).page_bytes / spec.page_bytes
        0.5
        """
        groups = (
            replace(group, kv_heads=len(heads)) if group.kind in _KEYS_AND_VALUES else group
            for group in self.groups
        )
        return replace(self, groups=tuple(groups))

    def pieces_of(self, heads: range) -> list[tuple[ByteRange, int]]:
        """Return the pieces of a page that together form a page of :meth:`of_heads`. Each piece has its first
        byte in that page.

        >>> spec = KVSpec.uniform(layers=1, kv_heads=2, head_dim=64, dtype="float16")
        >>> spec.pieces_of(range(1, 2))
        [(ByteRange(start=8192, stop=16384), 0), (ByteRange(start=24576, stop=32768), 8192)]
        """
        wanted: list[ByteRange] = []
        for group in self.groups:
            for layer in group.layers:
                if group.kind not in _KEYS_AND_VALUES:
                    wanted.append(self.layer(layer))
                    continue
                for find in (self.tile, self.scales) if self.scaled else (self.tile,):
                    for plane in range(group.planes):
                        first, last = find(layer, plane, heads[0]), find(layer, plane, heads[-1])
                        wanted.append(ByteRange(first.start, last.stop))
        starts = accumulate((each.nbytes for each in wanted), initial=0)
        return list(zip(wanted, starts, strict=False))

    def layer(self, layer: int) -> ByteRange:
        """Return the bytes of layer ``layer`` (the model's own index) within a page."""
        group, start = self._layer_starts[layer]
        return ByteRange(start, start + self._layer_bytes(group))

    def tile(self, layer: int, plane: int, head: int) -> ByteRange:
        """Return the bytes of one head's ``chunk_tokens × head_dim`` matrix. ``plane`` is 0 for K, 1 for
        V."""
        group, start = self._tiles_of(layer, plane, head)
        sizes = [self._tile_bytes(group, each) for each in range(plane + 1)]
        offset = start + group.kv_heads * sum(sizes[:plane]) + head * sizes[plane]
        return ByteRange(offset, offset + sizes[plane])

    def scales(self, layer: int, plane: int, head: int) -> ByteRange:
        """Return the bytes of the scales of the vectors in :meth:`tile`, one scale for each token."""
        if not self.scaled:
            raise SpecError("pages of this layout have no scales")
        group, start = self._tiles_of(layer, plane, head)
        nbytes = self.chunk_tokens * SCALE_BYTES
        offset = start + self._tiles_bytes(group) + (plane * group.kv_heads + head) * nbytes
        return ByteRange(offset, offset + nbytes)

    def _tiles_of(self, layer: int, plane: int, head: int) -> tuple[LayerGroup, int]:
        group, start = self._layer_starts[layer]
        if group.kind in _STATES:
            raise SpecError(f"layer {layer} is stored as {group.kind.value}, which has no tiles")
        if not (0 <= plane < group.planes and 0 <= head < group.kv_heads):
            raise SpecError(f"layer {layer} has no tile (plane {plane}, head {head})")
        return group, start

    def describe(self) -> str:
        """Return the layout as one line of text, which is part of the identity. Pages with equal lines have
        equal layouts."""
        dtype = self.dtype + (f"/{self.value_dtype}" if self.value_dtype else "") + "+scales" * self.scaled
        parts = ["hashed"] * self.hashed + [f"chunk={self.chunk_tokens}", f"dtype={dtype}"]
        for group in self.groups:
            layers = ",".join(map(str, group.layers))
            parts.append(
                f"{group.kind.value}[{layers}]x{group.kv_heads}x{group.head_dim}"
                f"/w{group.window or 0}/s{group.state_bytes}" + (f"/v{group.worth}" if group.worth else "")
            )
        return ";".join(parts)

    @classmethod
    def parse(cls, layout: str) -> KVSpec:
        """Return the spec for which :meth:`describe` returns this line. Raise :class:`SpecError` for any
        other text."""
        match = _LAYOUT.fullmatch(layout)
        groups = [_GROUP.fullmatch(part) for part in layout.removeprefix("hashed;").split(";")[2:]]
        if match is None or not all(groups):
            raise SpecError(f"not a page layout: {layout!r}")
        try:
            parsed = tuple(_parsed_group(group) for group in groups if group is not None)
            spec = cls(
                parsed,
                match["dtype"],
                int(match["chunk"]),
                bool(match["hashed"]),
                match["values"],
                bool(match["scaled"]),
            )
        except ValueError as error:  # Python does not parse a number with thousands of digits
            raise SpecError("not a page layout: a number in it is too long") from error
        if spec.describe() != layout:
            raise SpecError(f"not a page layout: {layout!r}")
        return spec

    @cached_property
    def _layer_starts(self) -> dict[int, tuple[LayerGroup, int]]:
        starts = {}
        offset = 0
        for group in self.groups:
            for layer in group.layers:
                starts[layer] = (group, offset)
                offset += self._layer_bytes(group)
        return starts

    def _layer_bytes(self, group: LayerGroup) -> int:
        if group.kind in _STATES:
            return group.state_bytes
        vectors = group.planes * group.kv_heads * self.chunk_tokens
        return self._tiles_bytes(group) + vectors * SCALE_BYTES * self.scaled

    def _tiles_bytes(self, group: LayerGroup) -> int:
        return sum(group.kv_heads * self._tile_bytes(group, plane) for plane in range(group.planes))

    def _tile_bytes(self, group: LayerGroup, plane: int) -> int:
        return self.chunk_tokens * group.head_dim * DTYPE_BITS[self._dtypes[plane]] // 8

    @property
    def _dtypes(self) -> tuple[str, str]:
        """The dtypes of K and of V."""
        return self.dtype, self.value_dtype or self.dtype

    def _check_vectors(self, group: LayerGroup) -> None:
        if any(group.head_dim * DTYPE_BITS[dtype] % 8 for dtype in self._dtypes):
            raise SpecError(f"{group.head_dim} numbers of {'/'.join(self._dtypes)} do not fill whole bytes")
        if self.scaled and group.kind not in _STATES and self._tiles_bytes(group) % SCALE_BYTES:
            raise SpecError("the scales of a layer would begin at an odd byte: make chunks longer")


_LAYOUT = re.compile(
    r"(?P<hashed>hashed;)?chunk=(?P<chunk>\d+);"
    r"dtype=(?P<dtype>\w+)(/(?P<values>\w+))?(?P<scaled>\+scales)?(;[^;]+)+"
)
_GROUP = re.compile(
    r"(?P<kind>\w+)\[(?P<layers>[\d,]*)\]x(?P<heads>\d+)x(?P<dim>\d+)/w(?P<window>\d+)/s(?P<state>\d+)"
    r"(/v(?P<worth>\d))?"
)


def _parsed_group(group: re.Match[str]) -> LayerGroup:
    try:
        kind = LayerKind(group["kind"])
        layers = tuple(int(layer) for layer in group["layers"].split(","))
    except ValueError as error:
        raise SpecError(f"not a layer group: {group[0]!r}") from error
    window, state_bytes = int(group["window"]), int(group["state"])
    shape = int(group["heads"]), int(group["dim"])
    return LayerGroup(kind, layers, *shape, window or None, state_bytes, int(group["worth"] or 0))


def check_page(page_bytes: int, chunk_tokens: int) -> None:
    """Raise :class:`SpecError` for pages so small that the memory for their token ids could exceed the tier's
    capacity.

    >>> check_page(1 << 20, chunk_tokens=64)
    >>> check_page(4096, chunk_tokens=1024)
    Traceback (most recent call last):
    tierstore.errors.SpecError: pages of 4096 bytes hold at most 128 tokens, got 1024: make chunks shorter
    """
    most = max(page_bytes // MIN_BYTES_PER_TOKEN, MAX_TOKENS_OF_SMALL_PAGE)
    if chunk_tokens > most:
        raise SpecError(
            f"pages of {page_bytes} bytes hold at most {most} tokens, got {chunk_tokens}: make chunks shorter"
        )


def layers_label(layout: str) -> str:
    """Describe the pages of a layout (a ``KVSpec.describe()`` line) for people; return ``–`` if the line is
    not a layout."""
    try:
        return ", ".join(group.label for group in KVSpec.parse(layout).groups)
    except SpecError:
        return "–"


def worth_of(layout: str) -> int:
    """Return the worth (:class:`LayerGroup`) of pages with this ``KVSpec.describe()`` line; 0 if it is not a
    layout. If a page has several layer groups, return the highest worth."""
    if "/v" not in layout:  # nearly all layouts have no worth
        return 0
    try:
        return max(group.worth for group in KVSpec.parse(layout).groups)
    except SpecError:
        return 0


def is_opaque(layout: str) -> bool:
    """Return whether this ``KVSpec.describe()`` line is for opaque pages."""
    return f";{LayerKind.OPAQUE.value}[" in layout


def is_cross(layout: str) -> bool:
    """Return whether the pages of this ``KVSpec.describe()`` line belong to cross-attention layers."""
    return f";{LayerKind.CROSS_ATTENTION.value}[" in layout


def is_hashed(layout: str) -> bool:
    """Return whether pages of this ``KVSpec.describe()`` line store the words of a hash in the place of token
    ids."""
    return layout.startswith("hashed;")


def has_whole_pages(layout: str) -> bool:
    """Return whether pages of this ``KVSpec.describe()`` line cannot be divided by tokens. A state is valid
    only behind the last token of its chunk, and a hash has no tokens."""
    return is_hashed(layout) or any(f";{kind.value}[" in layout for kind in _STATES)


def _check_group(group: LayerGroup) -> None:
    if group.kind in _STATES:
        if group.state_bytes < 1:
            raise SpecError(f"a layer group of kind {group.kind.value} needs state_bytes")
    elif group.kv_heads < 1 or group.head_dim < 1:
        raise SpecError(
            f"kv_heads and head_dim must be at least 1, got {group.kv_heads} and {group.head_dim}"
        )
    if (group.window is not None) != (group.kind in _WINDOWED):
        raise SpecError("only sliding-window and chunked layer groups have a window, and they must have one")
    if group.worth and group.kind is not LayerKind.EMBEDDING:
        raise SpecError(f"a layer group of kind {group.kind.value} has no worth")
    if not isinstance(group.worth, int) or not 0 <= group.worth <= MOST_WORTH:
        raise SpecError(f"worth must be a whole number between 0 and {MOST_WORTH}, got {group.worth!r}")


# -- config.json ---------------------------------------------------------------------------------------

LAYER_KINDS = {
    "full_attention": LayerKind.FULL_ATTENTION,
    "sliding_attention": LayerKind.SLIDING_WINDOW,
    "chunked_attention": LayerKind.CHUNKED_ATTENTION,
    "linear_attention": LayerKind.RECURRENT_STATE,
    "conv": LayerKind.RECURRENT_STATE,
    # Names before transformers 5:
    "attention": LayerKind.FULL_ATTENTION,
    "mamba": LayerKind.RECURRENT_STATE,
}
"""Layer kinds by their names in a ``config.json``."""
_BLOCKS = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}  # in Nemotron-H's hybrid_override_pattern
_ZAMBA2_PARTS = {"hybrid": ("attention", "mamba")}  # a hybrid layer counts as two layers
# Fields of unsupported models, whose layers differ without a list of their kinds.
_MIXED = re.compile(r"mamba_|ssm_|attn_layer_(period|offset)|linear_attn_config")
_STATES_ONLY = ("mamba", "mamba2", "falcon_mamba")  # values of model_type for models without attention
_FULL = LayerKind.FULL_ATTENTION
_STATE_BYTES = 4  # numbers of a recurrent state are float32, even if the model has another dtype


def read_json(file: Path) -> dict[str, Any]:
    """Return the JSON object in a file of a model folder. Raise :class:`SpecError` if the file does not have
    one."""
    try:
        value = json.loads(file.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise SpecError(f"cannot read {file}: {error}") from error
    if not isinstance(value, dict):
        raise SpecError(f"{file} does not hold a JSON object")
    return value


def positive(config: Mapping[str, Any], name: str) -> int:
    """Return a field of a ``config.json``. Raise :class:`SpecError` unless it is a positive integer."""
    value = config.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise SpecError(f"config.json: {name} must be a positive integer, got {value!r}")
    return value


def kv_dtype(config: Mapping[str, Any]) -> str:
    """Return the dtype of a model's KV. transformers 5 writes it as ``dtype``, transformers 4 as
    ``torch_dtype``."""
    config = config.get("text_config") or config
    return str(config.get("dtype") or config.get("torch_dtype") or "float32")


def layer_groups(config: Mapping[str, Any]) -> list[LayerGroup]:
    """Return the layer groups of a ``config.json``, in the order of their first layers. Layers that store
    nothing (the MLP blocks of Nemotron-H) belong to no group. Raise :class:`SpecError` for a configuration
    that this version does not support."""
    config = config.get("text_config") or config
    kinds = layer_kinds(config)
    if config.get("kv_lora_rank"):
        width = positive(config, "kv_lora_rank") + int(config.get("qk_rope_head_dim") or 0)
        return [LayerGroup(LayerKind.MLA_LATENT, tuple(range(len(kinds))), 1, width)]
    groups = []
    for kind in dict.fromkeys(kinds):
        members = tuple(at for at, each in enumerate(kinds) if each is kind)
        if kind is LayerKind.RECURRENT_STATE:
            groups.append(LayerGroup(kind, members, state_bytes=_state_bytes(config)))
        else:
            shape = kv_heads_of(config), head_dim_of(config)
            groups.append(LayerGroup(kind, members, *shape, _window(config, kind)))
    return groups


def head_dim_of(config: Mapping[str, Any]) -> int:
    """Return the width of a head's keys. Zamba2 has no field for it: its attention is twice as wide as the
    model."""
    heads, wide = positive(config, "num_attention_heads"), config.get("model_type") == "zamba2"
    given = None if wide else config.get("head_dim")
    return int(given or positive(config, "hidden_size") * (2 if wide else 1) // heads)


def kv_heads_of(config: Mapping[str, Any]) -> int:
    """Return how many heads have their own keys and values. Falcon's configuration has special fields for
    it."""
    heads = positive(config, "num_attention_heads")
    if "new_decoder_architecture" not in config:
        return int(config.get("num_key_value_heads") or heads)
    if config.get("multi_query", True) and not config["new_decoder_architecture"]:
        return 1
    return int(config.get("num_kv_heads") or heads)


def blocks(config: Mapping[str, Any]) -> list[str] | None:
    """Return the names of the blocks of a Nemotron-H model (each is a mixer or an MLP), or of the layers of a
    Zamba2 model; None for any other model."""
    named = config.get("layers_block_type")
    if named is None and (pattern := config.get("hybrid_override_pattern")):
        named = [_BLOCKS.get(each, each) for each in str(pattern)]
    return None if named is None else [str(each) for each in named]


def layer_kinds(config: Mapping[str, Any]) -> list[LayerKind]:
    """Return the kind of each layer, from a list of layers or from fields of single model families. A layer
    with both attention and a state counts as two layers. (MLA layers count as full attention here, because a
    latent is a field of the whole model.)"""
    if config.get("model_type") == "falcon_h1":  # each layer has attention and a state
        return [_FULL, LayerKind.RECURRENT_STATE] * positive(config, "num_hidden_layers")
    if (named := blocks(config)) is not None:
        named = [each for each in named if each not in ("mlp", "moe")]
        if config.get("model_type") == "zamba2":
            named = [part for each in named for part in _ZAMBA2_PARTS.get(each, (each,))]
    elif (types := config.get("layer_types")) is not None:
        named, layers = [str(each) for each in types], positive(config, "num_hidden_layers")
        if len(named) != layers:
            said = f"layer_types names {len(named)} layers"
            raise SpecError(f"config.json: layer_types does not fit {layers} layers: {said}")
    if named is not None:
        unknown = sorted(set(named) - LAYER_KINDS.keys())
        if unknown:
            raise SpecError(f"config.json: layer_types names {unknown}, which are not supported")
        return [LAYER_KINDS[each] for each in named]
    if config.get("model_type") in _STATES_ONLY:
        return [LayerKind.RECURRENT_STATE] * positive(config, "num_hidden_layers")
    if config.get("model_type") == "jamba":
        period, offset = positive(config, "attn_layer_period"), int(config.get("attn_layer_offset") or 0)
        numbers = range(positive(config, "num_hidden_layers"))
        return [_FULL if at % period == offset else LayerKind.RECURRENT_STATE for at in numbers]
    if (crossing := config.get("cross_attention_layers")) is not None:  # of Llama 3.2 Vision
        members = range(positive(config, "num_hidden_layers"))
        return [LayerKind.CROSS_ATTENTION if layer in crossing else _FULL for layer in members]
    for field in ("attn_layer_indices", "full_attn_idxs"):  # of Bamba and LFM2
        if (attending := config.get(field)) is not None:
            members = range(positive(config, "num_hidden_layers"))
            return [_FULL if layer in attending else LayerKind.RECURRENT_STATE for layer in members]
    if odd := sorted(name for name in config if _MIXED.match(name)):
        raise SpecError(f"config.json: {', '.join(odd)}: the layers of such models are not supported")
    return _kinds_by_field(config, positive(config, "num_hidden_layers"))


def _kinds_by_field(config: Mapping[str, Any], layers: int) -> list[LayerKind]:
    full, window, chunk = LayerKind.FULL_ATTENTION, LayerKind.SLIDING_WINDOW, LayerKind.CHUNKED_ATTENTION
    if every := config.get("full_attention_interval"):
        return [full if (at + 1) % every == 0 else LayerKind.RECURRENT_STATE for at in range(layers)]
    if config.get("attention_chunk_size"):  # Llama 4: layers without RoPE attend to all tokens
        return [chunk if rope else full for rope in rope_layers(config)]
    if not config.get("use_sliding_window", True):
        return [full] * layers
    every = config.get("sliding_window_pattern") or (2 if config.get("model_type") == "gemma2" else None)
    if every:
        return [full if (at + 1) % every == 0 else window for at in range(layers)]
    if not config.get("sliding_window"):
        return [full] * layers
    first = int(config.get("max_window_layers") or 0)  # layers of Qwen2 before this one have no window
    return [window if at >= first else full for at in range(layers)]


def rope_layers(config: Mapping[str, Any]) -> list[bool]:
    """Return for each layer of a Llama 4 model whether it has RoPE."""
    layers, every = positive(config, "num_hidden_layers"), int(config.get("no_rope_layer_interval") or 4)
    named = config.get("no_rope_layers") or [(at + 1) % every for at in range(layers)]
    if len(named) != layers:
        raise SpecError(f"config.json: no_rope_layers has {len(named)} entries for {layers} layers")
    return [bool(each) for each in named]


def _window(config: Mapping[str, Any], kind: LayerKind) -> int | None:
    if kind is LayerKind.SLIDING_WINDOW:
        return positive(config, "sliding_window")
    return positive(config, "attention_chunk_size") if kind is LayerKind.CHUNKED_ATTENTION else None


def _state_bytes(config: Mapping[str, Any]) -> int:
    """Return the state bytes of one layer: of a matrix for each head, and of the last inputs of the
    convolution."""
    if config.get("linear_num_value_heads"):  # gated delta
        keys = positive(config, "linear_num_key_heads") * positive(config, "linear_key_head_dim")
        values = positive(config, "linear_num_value_heads") * positive(config, "linear_value_head_dim")
        matrix = values * positive(config, "linear_key_head_dim")
        convolution = (2 * keys + values) * (positive(config, "linear_conv_kernel_dim") - 1)
        return (matrix + convolution) * _STATE_BYTES
    if config.get("ssm_state_size"):  # Nemotron-H
        values = positive(config, "mamba_num_heads") * positive(config, "mamba_head_dim")
        return _mamba2_bytes(config, values, "ssm_state_size", "n_groups", "conv_kernel")
    if config.get("model_type") == "mamba2":
        values = positive(config, "num_heads") * positive(config, "head_dim")
        return _mamba2_bytes(config, values, "state_size", "n_groups", "conv_kernel")
    if config.get("model_type") in _STATES_ONLY:  # Mamba-1
        width = int(config.get("intermediate_size") or 0)
        width = width or positive(config, "hidden_size") * positive(config, "expand")
        return _mamba1_bytes(config, width, "state_size", "conv_kernel")
    if config.get("conv_L_cache"):  # LFM2
        return positive(config, "hidden_size") * (positive(config, "conv_L_cache") - 1) * _STATE_BYTES
    if config.get("mamba_dt_rank"):  # Jamba
        width = positive(config, "hidden_size") * positive(config, "mamba_expand")
        return _mamba1_bytes(config, width, "mamba_d_state", "mamba_d_conv")
    if config.get("n_mamba_heads"):  # Zamba2
        values = int(config.get("mamba_expand") or 2) * positive(config, "hidden_size")
        return _mamba2_bytes(config, values, "mamba_d_state", "mamba_ngroups", "mamba_d_conv")
    if config.get("mamba_n_heads"):  # Granite 4.0-H, Bamba and Falcon-H1
        values = positive(config, "mamba_n_heads")
        if config.get("mamba_d_head", "auto") == "auto":
            expanded = int(config.get("mamba_expand") or 2) * positive(config, "hidden_size")
            values = int(config.get("mamba_d_ssm") or expanded)
        else:
            values *= positive(config, "mamba_d_head")
        return _mamba2_bytes(config, values, "mamba_d_state", "mamba_n_groups", "mamba_d_conv")
    raise SpecError("config.json: its layers with a recurrent state are not supported")


def _mamba1_bytes(config: Mapping[str, Any], channels: int, size: str, width: str) -> int:
    """Return the state bytes of one Mamba-1 layer: each of its ``channels`` has a column of the state.
    ``size`` and ``width`` are names of fields."""
    return channels * (positive(config, size) + positive(config, width) - 1) * _STATE_BYTES


def _mamba2_bytes(config: Mapping[str, Any], values: int, size: str, groups: str, width: str) -> int:
    """Return the state bytes of one Mamba-2 layer with ``values`` values. ``size``, ``groups`` and ``width``
    are names of fields."""
    state = positive(config, size)
    channels = values + 2 * positive(config, groups) * state
    return (values * state + channels * (positive(config, width) - 1)) * _STATE_BYTES
