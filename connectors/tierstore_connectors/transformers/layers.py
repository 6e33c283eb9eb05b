"""The layer groups of a transformers cache, and copies between cache layers and pages.

The shapes of the layers' tensors are read from a forward pass of two tokens, because the fields of
configurations differ between model families. Layers with tensors of the same kind form one group:

- :class:`VectorGroup`: keys and values of all tokens or of a window. If keys and values differ in width (as
  latent vectors do), a page has one vector per token, which contains both.
- :class:`StateGroup`: recurrent and convolution states, which are replaced with every token.

Layers with attention chunks are treated as layers with windows, because transformers keeps as many tokens for
them as a chunk has.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeAlias

import torch
from transformers.cache_utils import (
    DummyLayer,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionLayer,
)

from tierstore.errors import UsageError
from tierstore.groups import Group, groups_of
from tierstore.spec import KVSpec, LayerGroup, LayerKind

Layer: TypeAlias = Any
_DTYPES: Mapping[torch.dtype, str] = {
    torch.float32: "float32",
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
}
_PROBE_TOKENS = 2  # some models treat a pass of one token as a decode step, which needs a state


class WindowLayer(DynamicSlidingWindowLayer):
    """A window layer that also keeps the last ``behind`` tokens before the window, because a window may begin
    inside a chunk, and pages are saved as whole chunks."""

    def __init__(self, sliding_window: int, behind: int) -> None:
        super().__init__(sliding_window=sliding_window)
        self._behind = behind
        self._fallen: tuple[torch.Tensor, torch.Tensor] | None = None

    def held(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the keys and values of all tokens that the layer has, in the order of tokens."""
        if self._fallen is None:
            return self.keys, self.values
        return torch.cat([self._fallen[0], self.keys], -2), torch.cat([self._fallen[1], self.values], -2)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        before = self.keys.shape[-2] if self.is_initialized and self.keys.numel() else 0
        keys, values = super().update(key_states, value_states, *args, **kwargs)
        self._keep(keys, values, before + key_states.shape[-2] - self.keys.shape[-2])
        return keys, values

    def crop(self, tokens_to_remove: int) -> None:
        keys, values = self.keys, self.values
        super().crop(tokens_to_remove)
        if self.is_initialized:
            self._keep(keys, values, keys.shape[-2] - abs(tokens_to_remove) - self.keys.shape[-2])

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        super().reorder_cache(beam_idx)
        self._each(lambda tensor: tensor.index_select(0, beam_idx.to(tensor.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        super().batch_repeat_interleave(repeats)
        self._each(lambda tensor: tensor.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        super().batch_select_indices(indices)
        self._each(lambda tensor: tensor[indices, ...])

    def fill(self, keys: torch.Tensor, values: torch.Tensor, tokens: int) -> None:
        """Fill an empty layer as after ``tokens`` tokens. ``keys`` and ``values`` are those of the last of
        these tokens."""
        kept = min(tokens, self.sliding_window - 1)
        self.update(keys[..., keys.shape[-2] - kept :, :], values[..., values.shape[-2] - kept :, :])
        self.cumulative_length = tokens
        self._keep(keys, values, keys.shape[-2] - kept)

    def _keep(self, keys: torch.Tensor, values: torch.Tensor, fallen: int) -> None:
        """Keep the first ``fallen`` tokens of ``keys`` and ``values``, which are no longer in the window."""
        if fallen <= 0:
            return
        new = keys[..., :fallen, :], values[..., :fallen, :]
        if self._fallen is not None:
            new = torch.cat([self._fallen[0], new[0]], -2), torch.cat([self._fallen[1], new[1]], -2)
        # Copy the tensors, because views would keep the keys of a whole prompt in memory.
        self._fallen = new[0][..., -self._behind :, :].clone(), new[1][..., -self._behind :, :].clone()

    def _each(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        if self._fallen is not None:
            self._fallen = change(self._fallen[0]), change(self._fallen[1])


@dataclass(frozen=True)
class VectorGroup:
    """Layers with keys and values of the same shape. ``widths`` are the widths of a key and a value.
    ``window`` is None if the layers keep every token."""

    group: Group
    layers: tuple[int, ...]
    heads: int
    widths: tuple[int, int]
    dtype: torch.dtype
    devices: tuple[torch.device, ...]
    window: int | None

    def first_column(self, cache: Sequence[Layer], columns: int) -> int:
        """Return the first of the cache's ``columns`` columns that all layers of the group still have."""
        return max(columns - _vectors(cache[layer])[0].shape[-2] for layer in self.layers)

    def read(self, cache: Sequence[Layer], row: int, columns: range, end: int) -> torch.Tensor:
        """Return pages of ``columns`` of one row of a cache with ``end`` columns, each page as a row of
        bytes. An incomplete last page is padded with zeros."""
        chunk = self.group.spec.chunk_tokens
        pages, whole = self._pages(-(-len(columns) // chunk)), len(columns) // chunk
        parts = self._parts(pages)
        for at, layer in enumerate(self.layers):
            for tensor, part in zip(_vectors(cache[layer]), parts, strict=True):
                start = columns.start - (end - tensor.shape[-2])
                new = tensor[row, :, start : start + len(columns)]
                if whole:
                    full = new[:, : whole * chunk].reshape(self.heads, whole, chunk, new.shape[-1])
                    part[:whole, at].copy_(full.transpose(0, 1))
                if tail := len(columns) - whole * chunk:
                    part[whole, at, :, :tail].copy_(new[:, whole * chunk :])
        return pages

    def fill(self, cache: Sequence[Layer], rows: Sequence[LoadedRow], columns: int) -> int:
        """Fill the layers with ``columns`` columns from loaded pages. Return the first column that the pages
        contain for all rows."""
        chunk, number = self.group.spec.chunk_tokens, self.group.number
        first = 0 if self.window is None else max(columns - (self.window - 1) - 2 * chunk, 0)
        views, known = [], first
        for each in rows:
            chunks = each.chunks[number]
            start = each.pad + chunks.start * chunk if chunks else columns
            views.append((start, [part.transpose(2, 3) for part in self._parts(each.pages[number])]))
            if start > each.pad:
                known = max(known, start)
        for at, (layer, device) in enumerate(zip(self.layers, self.devices, strict=True)):
            tensors = []
            for plane, width in enumerate(self.widths):
                tensor = torch.zeros((len(rows), self.heads, columns - first, width), dtype=self.dtype)
                for row, (start, parts) in enumerate(views):
                    begin = max(start, first)
                    vectors = parts[plane][:, at].flatten(0, 1)[begin - start : columns - start]
                    tensor[row, :, begin - first :] = vectors.transpose(0, 1)
                tensors.append(tensor.to(device))
            if self.window is None:
                cache[layer].update(*tensors)
            else:
                cache[layer].fill(*tensors, columns)
        return known

    def _pages(self, count: int) -> torch.Tensor:
        return torch.zeros((count, self.group.page_bytes), dtype=torch.uint8)

    def _parts(self, pages: torch.Tensor) -> list[torch.Tensor]:
        """Return the keys and the values in pages as views ``[page, layer, head, token, width]``."""
        chunk, (keys, values) = self.group.spec.chunk_tokens, self.widths
        numbers = pages.view(self.dtype)
        if self.group.spec.groups[0].planes == 2:
            planes = numbers.view(len(pages), len(self.layers), 2, self.heads, chunk, keys)
            return [planes[:, :, 0], planes[:, :, 1]]
        vectors = numbers.view(len(pages), len(self.layers), self.heads, chunk, keys + values)
        return [vectors[..., :keys], vectors[..., keys:]]


@dataclass(frozen=True)
class StateGroup:
    """Layers with states. ``states`` has the shape and dtype of each state of a layer, for one row:
    convolution and recurrent states alternate, with None for a state that the layer lacks."""

    group: Group
    layers: tuple[int, ...]
    states: tuple[tuple[tuple[int, ...], torch.dtype] | None, ...]
    devices: tuple[torch.device, ...]

    def read(self, cache: Sequence[Layer], row: int) -> torch.Tensor:
        """Return a page with the current states of one row."""
        parts = [
            _last(tensor, kept)[row].to("cpu").contiguous().flatten().view(torch.uint8)
            for layer in self.layers
            for tensor, kept in zip(_states(cache[layer]), self.states, strict=True)
            if tensor is not None and kept is not None
        ]
        return torch.cat(parts)[None]

    def fill(self, cache: Sequence[Layer], rows: Sequence[LoadedRow]) -> None:
        """Set the states from loaded pages. The states of a row without pages are zeros."""
        at = 0
        for layer, device in zip(self.layers, self.devices, strict=True):
            for number, state in enumerate(self.states):
                if state is None:
                    continue
                shape, dtype = state
                nbytes = torch.Size(shape).numel() * dtype.itemsize
                tensor = torch.zeros((len(rows), *shape), dtype=dtype)
                for row, each in enumerate(rows):
                    if len(pages := each.pages[self.group.number]):
                        tensor[row] = pages[0, at : at + nbytes].clone().view(dtype).view(shape)
                at += nbytes
                index, recurrent = divmod(number, 2)
                if recurrent:
                    cache[layer].update_recurrent_state(tensor.to(device), state_idx=index)
                else:
                    cache[layer].update_conv_state(
                        tensor.to(device), state_idx=index, conv_kernel_size=shape[-1]
                    )


@dataclass(frozen=True)
class LoadedRow:
    """The pages of one row, and the ``chunks`` of the row's prompt that they hold, by layer group. ``pad`` is
    the number of padding columns before the prompt."""

    pad: int
    pages: Sequence[torch.Tensor]
    chunks: Sequence[range]


class CacheLayout:
    """The layer groups of a model's cache."""

    def __init__(self, model: Any, chunk_tokens: int) -> None:
        """Read the shapes of the layers' tensors from a forward pass of ``model``. Raise :class:`UsageError`
        for a layer of an unsupported class."""
        self._config, self._chunk = model.config, chunk_tokens
        probe = _probe(model)
        kinds: dict[Any, list[int]] = {}
        for at, layer in enumerate(probe):
            if (key := _key(layer)) is not None:
                kinds.setdefault(key, []).append(at)
        # Groups whose layers keep all tokens come first.
        keys = sorted(kinds, key=lambda key: key.window is not None or key.states is not None)
        dtypes = {key.dtype for key in keys if key.states is None}
        if len(dtypes) != 1 or not dtypes <= set(_DTYPES):
            raise UsageError(f"the model's layers must have KV of one float dtype, got {_names(dtypes)}")
        self.dtype = dtypes.pop()
        self.spec = KVSpec(
            tuple(key.group(tuple(kinds[key])) for key in keys), _DTYPES[self.dtype], chunk_tokens
        )
        self.vectors: list[VectorGroup] = []
        self.states: list[StateGroup] = []
        for group, key in zip(groups_of(self.spec), keys, strict=True):
            layers = tuple(kinds[key])
            devices = tuple(_device(probe[layer]) for layer in layers)
            if key.states is None:
                self.vectors.append(
                    VectorGroup(group, layers, key.heads, key.widths, self.dtype, devices, key.window)
                )
            else:
                self.states.append(StateGroup(group, layers, key.states, devices))

    @property
    def chained(self) -> bool:
        """Whether all groups keep every token, so that a hit can be shortened to any length."""
        return not self.states and all(group.window is None for group in self.vectors)

    def no_pages(self, pad: int) -> LoadedRow:
        """Return a :class:`LoadedRow` without pages, for a row of ``pad`` padding columns."""
        parts = self.spec.split()
        pages = [torch.zeros((0, part.page_bytes), dtype=torch.uint8) for part in parts]
        return LoadedRow(pad, pages, [range(0)] * len(parts))

    def empty(self) -> list[Layer]:
        """Return new, empty cache layers."""
        layers: list[Layer] = DynamicCache(config=self._config).layers
        for at, layer in enumerate(layers):
            if isinstance(layer, DynamicSlidingWindowLayer):
                layers[at] = WindowLayer(layer.sliding_window, 2 * self._chunk)
        return layers


@dataclass(frozen=True)
class _Key:
    """The properties that all layers of a group have in common."""

    heads: int = 0
    widths: tuple[int, int] = (0, 0)
    dtype: torch.dtype | None = None
    window: int | None = None
    states: tuple[tuple[tuple[int, ...], torch.dtype] | None, ...] | None = None

    def group(self, layers: tuple[int, ...]) -> LayerGroup:
        if self.states is not None:
            nbytes = sum(torch.Size(each[0]).numel() * each[1].itemsize for each in self.states if each)
            return LayerGroup(LayerKind.RECURRENT_STATE, layers, state_bytes=nbytes)
        keys, values = self.widths
        if self.window is not None:
            return LayerGroup(LayerKind.SLIDING_WINDOW, layers, self.heads, keys, self.window)
        if keys == values:
            return LayerGroup(LayerKind.FULL_ATTENTION, layers, self.heads, keys)
        return LayerGroup(LayerKind.MLA_LATENT, layers, self.heads, keys + values)


@lru_cache(maxsize=64)
def cache_argument(kind: Any) -> str:
    """Return the name of a model class's argument for the cache: ``cache`` from transformers 5.24 on,
    ``past_key_values`` in earlier versions."""
    return "cache" if "cache" in inspect.signature(kind.forward).parameters else "past_key_values"


def _probe(model: Any) -> list[Layer]:
    """Return the cache layers of ``model`` after a forward pass of two tokens."""
    probe = DynamicCache(config=model.config)
    for layer in probe.layers:
        known = (DynamicLayer, DynamicSlidingWindowLayer, LinearAttentionLayer, DummyLayer)
        if type(layer) not in known:
            raise UsageError(f"TierStoreCache does not support layers of class {type(layer).__name__}")
    ids = torch.zeros((1, _PROBE_TOKENS), dtype=torch.long, device=model.device)
    with torch.no_grad():
        model(input_ids=ids, use_cache=True, **{cache_argument(model.__class__): probe})
    return list(probe.layers)


def _key(layer: Layer) -> _Key | None:
    """Return the properties of a layer's group, or None for a layer without KV and states."""
    if isinstance(layer, LinearAttentionLayer):
        states = _states(layer)
        described = tuple(None if each is None else (tuple(each.shape[1:]), each.dtype) for each in states)
        return _Key(states=described)
    if isinstance(layer, DummyLayer) or layer.keys is None:
        return None
    _, heads, _, width = layer.keys.shape
    window = layer.sliding_window if isinstance(layer, DynamicSlidingWindowLayer) else None
    widths = (width, layer.values.shape[-1])
    if layer.values.shape[1] != heads or (window is not None and widths[0] != widths[1]):
        raise UsageError("TierStoreCache does not support layers whose keys and values differ in heads")
    return _Key(heads, widths, layer.keys.dtype, window)


def _vectors(layer: Layer) -> tuple[torch.Tensor, torch.Tensor]:
    return layer.held() if isinstance(layer, WindowLayer) else (layer.keys, layer.values)


def _states(layer: Layer) -> list[torch.Tensor | None]:
    pairs = ((layer.conv_states[at], layer.recurrent_states[at]) for at in range(layer.number_of_states))
    return [each for pair in pairs for each in pair]


def _last(tensor: torch.Tensor, kept: tuple[tuple[int, ...], torch.dtype]) -> torch.Tensor:
    """Return a state without the earlier inputs that a layer keeps so that tokens can be removed."""
    return tensor[..., -kept[0][-1] :]


def _device(layer: Layer) -> torch.device:
    tensors = _states(layer) if isinstance(layer, LinearAttentionLayer) else [layer.keys]
    return next(each.device for each in tensors if each is not None)


def _names(dtypes: set[torch.dtype | None]) -> str:
    return ", ".join(sorted(str(each).removeprefix("torch.") for each in dtypes)) or "none"
