"""The cache that users pass to ``generate``: transformers' cache layers, filled from a store and saved to it.

**Columns and tokens.** A cache has the same number of columns for each row of a batch. With padding on the
left, a row's prompt begins after ``pad`` columns, so token ``t`` of the row is in column ``pad + t``. A load
fills the leading columns that the store has for all rows.

**Tracking.** Before each forward pass the cache records the tokens, and checks that nothing else determines
their KV: no embeddings, images, custom masks or positions. After a call that fails this check (``_bypass`` is
True), nothing is loaded or saved until the cache is reset. An interrupted forward pass (``_busy`` is True)
leaves layers of different lengths, so the next prompt resets the cache.

**Time of saves.** Pages are saved after the first forward pass of a prompt, and when ``generate`` returns. A
recurrent state covers all tokens up to the last one. So a prompt of a model with states is computed in two
forward passes, to have the state at the end of the prompt's last whole chunk.

**Hooks.** transformers does not pass tokens to a cache. So the model gets four hooks, which act only in calls
whose cache is a TierStoreCache of this model:

- ``generate`` saves pages at its end.
- ``prepare_inputs_for_generation`` loads a prompt's prefix in its first call for the prompt.
- A hook before each forward pass records the tokens.
- A hook after each forward pass saves the pages of a prompt after the prompt's first forward pass.

The hooks have no state, so a copy of a model has the same hooks and uses its own caches.
"""

from __future__ import annotations

import copy
import functools
import inspect
import types
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeAlias

import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicSlidingWindowLayer, LinearAttentionLayer

from tierstore import Hit
from tierstore.errors import UsageError
from tierstore_connectors.common.guard import guarded
from tierstore_connectors.transformers.layers import Layer, LoadedRow
from tierstore_connectors.transformers.stores import CacheOptions, ModelStore

Row: TypeAlias = tuple[int, bytes]
"""The number of padding columns of a row, and its tokens. Equal rows (beams) are loaded and saved once."""

_ROUNDS = 4  # the most lookups of a batch until all hits have the same length
# Arguments of a forward pass that the cache checks, or that do not change KV.
_CHECKED = frozenset(
    {"input_ids", "attention_mask", "position_ids", "cache_position", "labels", "cache", "past_key_values"}
    | {"logits_to_keep"}
)


class TierStoreCache(DynamicCache):
    """A transformers cache that is filled from a tierstore and saved to it.

    ::

        cache = TierStoreCache(model, "./kv")  # a directory, or a daemon's URL such as ipc:///run/tierstore/s
        out = model.generate(**inputs, past_key_values=cache)

    ``generate`` loads the longest prefix of the prompt that the store has, and saves the KV that it computes.
    If the prompt continues the tokens in the cache, their KV is kept; otherwise the cache is reset. Programs
    that call the model directly use :meth:`load` and :meth:`save` instead.

    All caches with the same model, store address and options share a store. ``options`` are the fields of
    :class:`~tierstore_connectors.transformers.stores.CacheOptions`. Raise
    :class:`~tierstore.errors.UsageError` for a model that is not supported, and
    :class:`~tierstore.errors.StoreUnavailableError` for a directory that cannot be used. If no daemon
    answers, prompts are computed until it does.
    """

    layers: list[Layer]
    _tokens: torch.Tensor | None  # None if the tokens of the columns are unknown
    _pads: list[int]
    _saved: list[int]  # whole chunks of each row that were saved or loaded
    _known: dict[int, int]  # the first column that was loaded or computed, by layer group
    _branches: dict[Row, int]  # leading tokens that the groups of all tokens have in the store

    def __init__(self, model: Any, store: str | Path, **options: Any) -> None:
        if model.config.is_encoder_decoder:
            raise UsageError("TierStoreCache does not support encoder-decoder models")
        if any(name.endswith("A_log") and each.dim() > 1 for name, each in model.named_parameters()):
            raise UsageError(
                "TierStoreCache does not support Mamba-1 layers (Jamba, Zamba, Falcon Mamba): transformers "
                "computes the rest of a prompt without the state of its beginning"
            )
        self._store = ModelStore.open(model, store, CacheOptions.parse(options))
        self._close = weakref.finalize(self, self._store.close)
        self.errors = self._store.errors
        super().__init__(config=model.config)
        self._model = weakref.ref(model)
        self._prompt_columns: int | None = None
        self._losses = self._store.losses
        self.reset()
        _install(model)

    def __repr__(self) -> str:
        return f"TierStoreCache({self._columns} columns, {len(self._pads)} rows)"

    # -- methods for users
    # -------------------------------------------------------------------------------------

    def load(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> int:
        """Replace the cache's content by the longest prefix of ``input_ids`` that the store has, without the
        last token. Return the prefix's length ``n`` in columns: pass ``input_ids[:, n:]`` to the model, with
        the whole attention mask if there is one."""
        self.reset()
        self._inspect({"input_ids": input_ids, "attention_mask": attention_mask}, 0)
        return 0 if self._bypass else self._load(input_ids.cpu(), input_ids.shape[1] - 1)

    def save(self) -> None:
        """Start to save the pages in the cache that were not saved yet, in the background."""
        self._save(exact=True)

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until all saved pages are in the store, and on its disk if it has a disk tier. Wait at most
        ``timeout`` seconds, and return whether all pages are there."""
        return self._store.flush(timeout)

    def counters(self) -> Mapping[str, float]:
        """Return the counters of the model's store since it was opened (docs/transformers.md)."""
        return self._store.totals()

    def close(self) -> None:
        """Close the cache. Closing the last cache of a store also closes the store, after its saves."""
        self._close()

    # -- transformers' interface -----------------------------------------------------------------------

    def reset(self) -> None:
        self._empty()
        self._pads = []
        self._bypass = False
        self._busy = False
        self._prompt_end = 0

    def crop(self, tokens_to_remove: int) -> None:
        super().crop(tokens_to_remove)
        chunk, columns = self._store.options.chunk_tokens, self._columns
        whole = [max(columns - pad, 0) // chunk for pad in self._pads]
        self._saved = [min(pair) for pair in zip(self._saved, whole, strict=False)]

    def __deepcopy__(self, memo: dict[int, Any]) -> TierStoreCache:
        copied = copy.copy(self)
        for name in ("layers", "_pads", "_saved", "_known", "_branches"):
            setattr(copied, name, copy.deepcopy(vars(self)[name], memo))
        self._store.share()
        copied._close = weakref.finalize(copied, self._store.close)
        return copied

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        super().reorder_cache(beam_idx)
        self._pick_rows(beam_idx.tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        super().batch_repeat_interleave(repeats)
        self._pick_rows([row for row in range(len(self._pads)) for _ in range(repeats)])

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        super().batch_select_indices(indices)
        self._pick_rows(torch.arange(len(self._pads))[indices.cpu()].tolist())

    @property
    def is_compileable(self) -> bool:
        return False  # the layers grow, and pages are copied from them between forward passes

    # -- called by the model's hooks -------------------------------------------------------------------

    def serves(self, model: Any) -> bool:
        """Return whether the cache was made for ``model``."""
        return self._model() is model

    def generation_begins(self, input_ids: Any, attention_mask: Any) -> None:
        """Record the length of the prompts, because transformers may shorten the prompts or append candidate
        tokens to them. Reset the cache unless it holds a prefix of the prompts."""
        self._prompt_columns = None
        if self._busy:
            self.reset()
        if isinstance(input_ids, torch.Tensor) and input_ids.ndim == 2:
            masked = attention_mask if isinstance(attention_mask, torch.Tensor) else input_ids
            # If the mask is longer, the ids are only the tokens after those in the cache.
            self._prompt_columns = None if masked.shape[-1] != input_ids.shape[1] else input_ids.shape[1]
            whole = self._prompt_columns is not None and self._tokens is not None
            if whole and not self._continues(input_ids, attention_mask):
                self.reset()

    def generation_ends(self) -> None:
        """Save the pages that ``generate`` has computed."""
        self._prompt_columns = None
        self._save(exact=True)

    def prompt_begins(
        self, model: Any, ids: torch.Tensor, following: int | None, arguments: Mapping[str, Any]
    ) -> int | None:
        """Load the prefix of a prompt. Return how many of the prompt's last tokens must be computed, or None
        for all. ``following`` is this number before the load, as transformers has computed it."""
        past, known, tokens = self._columns, self._tokens, ids.cpu()
        prompt = self._prompt_columns
        if past and prompt is not None and known is not None and len(known) != len(ids):
            self.reset()  # another number of beams
            past, following = 0, None
        if past and (known is None or known.shape[1] < past):
            return following  # the cache was filled directly, so its tokens are unknown
        # True if ``ids`` are only the tokens after those in the cache, such as a part of a long prompt.
        follows = past > 0 and (prompt is None or ids.shape[1] < prompt)
        if follows and known is not None:
            tokens = torch.cat([known[:, :past], tokens], 1)
        columns = tokens.shape[1]
        self._inspect({**arguments, "input_ids": ids}, columns - ids.shape[1])
        # The last token of a prompt is always computed, and so are candidate tokens after it.
        limit = (columns if prompt is None else min(columns, prompt)) - 1
        if follows:
            limit = columns - 1
        if self._bypass:
            return following
        past = self._load(tokens, limit)
        if not self._bypass and not follows:
            past = self._compute_to_save_points(model, ids, arguments, limit)
        self._prompt_end = limit + 1
        return columns - past

    def forward_begins(self, arguments: Mapping[str, Any]) -> None:
        """Record the tokens of a forward pass."""
        past, ids = self._columns, arguments.get("input_ids")
        if self._busy:
            self._note_bypass("an interrupted forward pass")
        elif past and (self._tokens is None or self._tokens.shape[1] < past):
            self._note_bypass("a forward pass of a part of the model")
        self._busy = True
        self._inspect(arguments, past)
        if not isinstance(ids, torch.Tensor) or (past and self._tokens is None):
            self._tokens = None
        elif past and self._tokens is not None:
            self._tokens = torch.cat([self._tokens[:, :past], ids.cpu()], 1)
        else:
            self._tokens = ids.cpu()

    def forward_ends(self) -> None:
        """Save the pages of a prompt after the prompt's first forward pass."""
        self._busy = False
        if self._prompt_end:
            self._save(exact=False)
            self._prompt_end = 0

    # -- tracking --------------------------------------------------------------------------------------

    @property
    def _columns(self) -> int:
        return int(self.get_seq_length())

    def _empty(self) -> None:
        """Replace the layers by empty ones, and forget their tokens."""
        self.layers = self._new_layers()
        self._tokens = None
        self._saved = []
        self._known, self._branches = {}, {}

    def _new_layers(self) -> list[Layer]:
        recording = any(self.is_recording_past(at) for at in range(len(self.layers)))
        layers = self._store.layout.empty()
        for layer in layers if recording else ():
            if isinstance(layer, (DynamicSlidingWindowLayer, LinearAttentionLayer)):
                layer.activate_past_recording()
        return layers

    def _pick_rows(self, rows: Sequence[int]) -> None:
        if self._tokens is not None and self._pads:
            self._tokens = self._tokens[list(rows)]
            self._pads = [self._pads[row] for row in rows]
            self._saved = [self._saved[row] for row in rows]

    def _note_bypass(self, reason: str) -> None:
        """Load and save nothing until the next reset, and log the reason."""
        if not self._bypass:
            self._bypass = True
            self.errors.warn("bypass", f"calls with {reason} are neither loaded nor saved")
            self._store.counters.add("bypassed")

    def _continues(self, ids: torch.Tensor, mask: Any) -> bool:
        """Return whether each row of ``ids`` begins with the tokens in the cache and has at least one more. A
        prompt may have several rows in the cache (beams)."""
        past, known, (rows, columns) = self._columns, self._tokens, ids.shape
        if known is None or not past or past >= columns or len(known) % rows:
            return False
        several = len(known) // rows
        pads = [pad for pad in _pads(mask, rows, columns) or () for _ in range(several)]
        return pads == self._pads and torch.equal(
            ids[:, :past].cpu().repeat_interleave(several, 0), known[:, :past]
        )

    @guarded(lambda self, *_: self._note_bypass("arguments that cannot be read"))
    def _inspect(self, arguments: Mapping[str, Any], past: int) -> None:
        """Record the padding of a call whose ``input_ids`` are in the columns from ``past`` on. If anything
        besides tokens determines the KV of the call, load and save nothing."""
        reason = None if self._bypass else self._objection(arguments, past)
        if reason is not None:
            self._note_bypass(reason)

    def _objection(self, arguments: Mapping[str, Any], past: int) -> str | None:
        ids, model = arguments.get("input_ids"), self._model()
        for name, value in arguments.items():
            if name not in _CHECKED and isinstance(value, (torch.Tensor, Mapping, list, tuple)):
                return name
        if model is None or model.training:
            return "a model in training mode"
        if not isinstance(ids, torch.Tensor) or ids.ndim != 2:
            return "inputs other than input_ids"
        rows, count = ids.shape
        pads = _pads(arguments.get("attention_mask"), rows, past + count)
        if pads is None or (self._columns and pads != self._pads):
            return "an attention mask that is not padding on the left"
        if not _usual(arguments.get("position_ids"), pads, past, count):
            return "custom position_ids"
        self._pads = pads
        if len(self._saved) != rows:
            self._saved = [0] * rows
        return None

    # -- loading ---------------------------------------------------------------------------------------

    @guarded(lambda self, *_: self._columns)
    def _load(self, tokens: torch.Tensor, limit: int) -> int:
        """Fill the cache with the leading columns of ``tokens`` that the store has for all rows, at most
        ``limit``, if the store has more columns than the cache. Return the cache's number of columns."""
        past, model = self._columns, self._model()
        if model is None or self._store.changed(model):
            self._note_bypass("weights that changed after the cache was made")
            return past
        if limit <= past:
            return past
        self._branches = {}
        rows = self._rows(tokens)
        self._store.counters.add("lookups")
        self._store.counters.add("lookup_tokens", sum(max(limit - pad, 0) for pad in self._pads))
        found = self._loaded(rows, past, limit)
        if found is None:
            return past
        columns, loaded = found
        ordered = [loaded[row] for row in rows]
        layers, layout = self._new_layers(), self._store.layout
        known = {each.group.number: each.fill(layers, ordered, columns) for each in layout.vectors}
        for states in layout.states:
            states.fill(layers, ordered)
        # The statements below cannot raise, so the cache stays consistent.
        self.layers, self._known, self._tokens = layers, known, tokens[:, :columns]
        chunk = self._store.options.chunk_tokens
        self._saved = [max(columns - pad, 0) // chunk for pad in self._pads]
        gained = sum(max(columns - max(pad, past), 0) for pad in self._pads)
        self._store.counters.add("loaded_tokens", gained)
        return columns

    def _rows(self, tokens: torch.Tensor) -> list[Row]:
        numbers = tokens.to(torch.int64)
        return [(pad, row[pad:].numpy().tobytes()) for pad, row in zip(self._pads, numbers, strict=True)]

    def _loaded(self, rows: Sequence[Row], past: int, limit: int) -> tuple[int, dict[Row, LoadedRow]] | None:
        """Load the pages of each row. Return the number of columns that were loaded for all rows, and the
        pages. Return None if this number is at most ``past``."""
        layout = self._store.layout
        hits: dict[Row, Hit] = {}
        loaded: dict[Row, LoadedRow] = {}
        try:
            columns = arrived = self._agreed(hits, rows, past, limit)
            if columns <= past:
                return None
            for row in dict.fromkeys(rows):
                if row not in hits:  # all of its columns are padding
                    loaded[row] = layout.no_pages(row[0])
                    continue
                hit = hits.pop(row)
                wanted = hit.tokens
                tokens, pages, chunks = self._store.load(hit)
                arrived = min(arrived, columns - wanted + tokens)
                loaded[row] = LoadedRow(row[0], pages, chunks)
        finally:
            for hit in hits.values():
                hit.release()
        # A shortened hit would need other pages of windows and states.
        return None if arrived <= past or (arrived < columns and not layout.chained) else (arrived, loaded)

    def _agreed(self, hits: dict[Row, Hit], rows: Sequence[Row], past: int, limit: int) -> int:
        """Find hits that end in the same column for all rows. Return this column, or 0 if there is none."""
        columns = limit
        for turn in range(_ROUNDS):
            shortest = columns
            for row in dict.fromkeys(rows):
                pad, wanted = row[0], columns - row[0]
                if row in hits and hits[row].tokens == wanted:
                    continue
                if row in hits:
                    hits.pop(row).release()
                if wanted <= 0:
                    continue
                tokens = torch.frombuffer(bytearray(row[1]), dtype=torch.int64)[:wanted]
                hit = self._store.find(tokens.numpy(), counted=not turn)
                if hit is None:
                    return 0
                hits[row] = hit
                self._branches[row] = max(hit.branch, self._branches.get(row, 0))
                shortest = min(shortest, pad + hit.tokens)
            if shortest == columns:
                return columns
            if shortest <= past:
                return 0
            columns = shortest
        return 0

    # -- saving ----------------------------------------------------------------------------------------

    def _compute_to_save_points(
        self, model: Any, ids: torch.Tensor, arguments: Mapping[str, Any], limit: int
    ) -> int:
        """Compute a prompt up to its save points, the columns where states are saved: the end of the last
        whole chunk of each row, and the column where the row diverges from a stored prompt. Return the
        cache's number of columns."""
        past, chunk = self._columns, self._store.options.chunk_tokens
        if not self._store.layout.states:
            return past
        ends = {pad + (limit - pad) // chunk * chunk for pad in self._pads if limit > pad}
        ends.update(pad + branch // chunk * chunk for (pad, _), branch in self._branches.items())
        for end in sorted(ends):
            if not max(past, *self._pads) < end <= limit:
                continue
            sliced = {
                name: value[..., :end]
                for name, value in arguments.items()
                if name in ("attention_mask", "position_ids") and value is not None
            }
            inputs = type(model).prepare_inputs_for_generation(
                model, ids[:, :end], **{**arguments, **sliced, "next_sequence_length": end - past}
            )
            self._prompt_end = end
            model(**inputs)
            past = end
        return past

    @guarded(lambda self, *_, **__: None)
    def _save(self, *, exact: bool) -> None:
        """Start to save the pages that were not saved yet. For a model with states, ``exact`` saves pages up
        to the last token, not only whole chunks."""
        columns, tokens, model = self._columns, self._tokens, self._model()
        if self._bypass or self._busy or not columns or tokens is None or tokens.shape[1] < columns:
            return
        if model is None or self._store.changed(model):
            self._note_bypass("weights that changed after the cache was made")
            return
        if self._losses != self._store.losses:  # pages after a lost page cannot be found
            self._losses, self._saved = self._store.losses, [0] * len(self._pads)
        rows = self._rows(tokens[:, :columns])
        for at in {row: at for at, row in enumerate(rows)}.values():
            self._save_row(at, tokens[at, self._pads[at] : columns], exact=exact)
        chunk = self._store.options.chunk_tokens
        self._saved = [max(columns - pad, 0) // chunk for pad in self._pads]

    def _save_row(self, row: int, tokens: torch.Tensor, *, exact: bool) -> None:
        layout, chunk, pad = self._store.layout, self._store.options.chunk_tokens, self._pads[row]
        length, columns = len(tokens), len(tokens) + pad
        end = length if exact and layout.states else length - length % chunk
        if not end:
            return
        # A repetition of this prompt needs the windows at the last chunk boundary before the last token.
        prompt = min(self._prompt_end or columns, columns) - pad
        for group in layout.vectors:
            first, number = self._saved[row], group.group.number
            if group.window is not None:
                needed = group.group.chunks(max(prompt - 1, 0) // chunk * chunk)
                known = max(group.first_column(self.layers, columns), self._known.get(number, 0))
                first = max(first, needed.start, -(-(known - pad) // chunk))
            if first * chunk < end:
                span = range(pad + first * chunk, pad + end)
                pages = group.read(self.layers, row, span, columns)
                self._store.save(tokens[:end].numpy(), pages, first=first, group=number)
        for states in layout.states:
            if end == length:
                pages = states.read(self.layers, row)
                self._store.save(tokens.numpy(), pages, first=(end - 1) // chunk, group=states.group.number)


def _pads(mask: Any, rows: int, columns: int) -> list[int] | None:
    """Return how many columns each row of an attention mask leaves out on the left. Return None for any mask
    other than padding on the left."""
    if mask is None:
        return [0] * rows
    if not isinstance(mask, torch.Tensor) or mask.shape != (rows, columns):
        return None
    seen = mask.cpu() != 0
    pads = columns - seen.sum(1)
    whole = torch.equal(seen, torch.arange(columns) >= pads[:, None])
    return [int(pad) for pad in pads] if whole and bool((mask.cpu() <= 1).all()) else None


def _usual(positions: Any, pads: Sequence[int], past: int, count: int) -> bool:
    """Return whether tokens have the same positions as in a prompt without padding. Without ``positions``, a
    model counts from the first column."""
    if positions is None:
        return not any(pads)
    if not isinstance(positions, torch.Tensor) or positions.ndim != 2:
        return False
    expected = torch.arange(past, past + count) - torch.tensor(pads)[:, None]
    return bool(((positions[:, -count:].cpu() == expected) | (expected < 0)).all())


# -- hooks of a model ---------------------------------------------------------------------------------


def _install(model: Any) -> None:
    """Install the hooks in ``model``. Repeated calls do nothing."""
    generate, prepare = _methods(model.__class__)
    if getattr(vars(model).get("generate"), "__func__", None) is generate:
        return
    model.generate = types.MethodType(generate, model)
    model.prepare_inputs_for_generation = types.MethodType(prepare, model)
    model.register_forward_pre_hook(_before_forward, with_kwargs=True)
    model.register_forward_hook(_after_forward, with_kwargs=True)


@lru_cache(maxsize=64)
def _methods(kind: Any) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return ``generate`` and ``prepare_inputs_for_generation`` with hooks, for models of the class ``kind``.
    The new methods keep the signatures, which transformers reads."""

    @functools.wraps(kind.generate)
    def generate(self: Any, *args: Any, **kwargs: Any) -> Any:
        cache = _own(self, kwargs)
        if cache is None:
            return kind.generate(self, *args, **kwargs)
        given = args[0] if args else kwargs.get("inputs")
        ids = kwargs.get("input_ids") if given is None else given
        cache.generation_begins(ids, kwargs.get("attention_mask"))
        try:
            return kind.generate(self, *args, **kwargs)
        finally:
            cache.generation_ends()

    @functools.wraps(kind.prepare_inputs_for_generation)
    def prepare(self: Any, input_ids: Any, *args: Any, **kwargs: Any) -> Any:
        cache = _own(self, kwargs)
        if cache is not None and not args and kwargs.get("is_first_iteration"):
            kwargs["next_sequence_length"] = cache.prompt_begins(
                self, input_ids, kwargs.pop("next_sequence_length", None), kwargs
            )
        return kind.prepare_inputs_for_generation(self, input_ids, *args, **kwargs)

    return generate, prepare


def _own(model: Any, arguments: Mapping[str, Any]) -> TierStoreCache | None:
    """Return the cache in the arguments of a call, or None if it does not belong to ``model``."""
    found = arguments.get("cache")
    if found is None:
        found = arguments.get("past_key_values")
    return found if isinstance(found, TierStoreCache) and found.serves(model) else None


def _before_forward(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    arguments = _named(model, args, kwargs)
    cache = _own(model, arguments)
    if cache is not None:
        cache.forward_begins(arguments)


def _after_forward(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
    cache = _own(model, _named(model, args, kwargs))
    if cache is not None:
        cache.forward_ends()


def _named(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    return {**dict(zip(_parameters(model.__class__), args, strict=False)), **kwargs}


@lru_cache(maxsize=64)
def _parameters(kind: Any) -> tuple[str, ...]:
    return tuple(inspect.signature(kind.forward).parameters)[1:]
