"""The identity of pages that different engines share (``share_engines``): the model, without the engine.

All engines store the same numbers for a token of a model, apart from rounding: keys after norm and RoPE, and
values after their projection, both in the model's dtype. So the identity of a shared page names the model but
no engine. :func:`shared_identity` makes the identity from:

- the fields of ``config.json``, except those in :data:`HARMLESS`,
- all bytes of the weights' files,
- the dtype that the engine computes in, the layout of a page with its chunk size, and the tenant
  (``namespace``),
- :data:`FORM`, a description of the numbers in a page.

**Sharing is refused** for a ``config.json`` with an unknown field, because two engines may read the field
differently, and for a model whose KV was not measured (:data:`MEASURED`). A connector also refuses engine
options that change the model's arithmetic (quantised KV, overrides, adapters).

**Keys.** Shared pages have keys over token ids (:mod:`tierstore.keys`), like the bundled engine's pages.
Pages of a layer group with a window are found by name, a hash of all tokens up to the page's end. The vLLM
connector's scheduler half knows the token ids of a request, so it computes the same keys. Block hashes of
vLLM are not used, because they depend on a constant and a token encoding of vLLM. SGLang passes hashes of
pages without tokens, so the SGLang connector finds the tokens of each hash in SGLang's process
(:mod:`tierstore_connectors.sglang.sharing`). Naming all pages by SGLang's hashes was rejected: a hit could
then only end at whole pages, and no page would have a parent.

Sharing is off by default, because the pages of another engine are not bit-equal to the engine's own.
docs/sharing.md has the measured differences.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tierstore.errors import SpecError, UsageError
from tierstore.keys import TOKEN_BYTES, TOKEN_DTYPE, Identity, Prompt
from tierstore.spec import KVSpec, read_json
from tierstore_connectors.common.contents import contents, default_cache, model_files
from tierstore_connectors.common.facts import WEIGHTS, digest, plain, words

FORM = "1: keys after norm and RoPE, values as projected, unscaled"
"""A description of the numbers in a shared page. Increase the first digit when their meaning or order
changes."""

MEASURED = frozenset({"llama", "qwen2", "qwen3", "gemma3_text"})
"""The values of ``model_type`` for which measurements found the KV of all engines equal within 1e-3
(float32)."""

DTYPES = ("float32", "bfloat16", "float16")
ROPES = ("default", "linear", "llama3", "yarn")
"""Kinds of RoPE whose rotation depends on the position only, not on an engine's maximum prompt length."""

_COUNTED = words("""
    architectures model_type hidden_size intermediate_size num_hidden_layers num_attention_heads
    num_key_value_heads head_dim hidden_act rms_norm_eps attention_bias mlp_bias vocab_size
    tie_word_embeddings max_position_embeddings rope_theta rope_scaling rope_parameters partial_rotary_factor
    sliding_window max_window_layers use_sliding_window layer_types sliding_window_pattern
    _sliding_window_pattern rope_local_base_freq hidden_activation query_pre_attn_scalar
    attn_logit_softcapping final_logit_softcapping
""")
_FALSE = words("use_bidirectional_attention")  # fields that must be false or absent
HARMLESS = words("""
    _name_or_path _model_name_or_path transformers_version bos_token_id eos_token_id pad_token_id unk_token_id
    use_cache initializer_range torch_dtype dtype attention_dropout pretraining_tp
""")
"""Fields of ``config.json`` that do not change KV. The identity has the engine's dtype instead of ``dtype``
and ``torch_dtype``. No engine uses ``pretraining_tp``."""


def shared_identity(
    folder: Path | None, *, dtype: str, chunk_tokens: int, namespace: str = "", sampled: bool = False
) -> Identity:
    """Return the identity of a model's shared pages, with all heads and layers.

    ``folder`` has the model's ``config.json`` and weights; None if the model has no local folder. ``dtype``
    is the dtype that the engine computes in, for example ``bfloat16``. ``sampled`` reads only samples of
    large files. Raise :class:`UsageError` if the model's pages cannot be shared."""
    if folder is None or not folder.is_dir():
        raise refusal("the model needs a local folder with config.json and weights")
    if dtype not in DTYPES:
        raise refusal(f"KV must be in {', '.join(DTYPES)}, got {dtype}")
    try:
        config = read_json(folder / "config.json")
        spec = KVSpec.from_hf_config(_checked(config), dtype=dtype, chunk_tokens=chunk_tokens)
        weights = {name: file for name, file in model_files(folder).items() if file.suffix in WEIGHTS}
        if not weights:
            raise refusal(f"{folder} has no weights")
        revision = contents(weights, remembered=default_cache(), sampled=sampled).digest
    except SpecError as error:
        raise refusal(str(error)) from error
    except OSError as error:
        raise refusal(f"cannot read the model's files: {error}") from error
    counted = {name: plain(value) for name, value in sorted(config.items()) if name not in HARMLESS}
    return Identity.of(
        spec,
        model=digest(["shared", FORM, dtype, list(counted.items())]),
        revision=revision,
        codec=f"shared {FORM}",
        tenant=namespace,
    )


class SharedPrompt(Prompt):
    """A prompt for one lookup of pages that engines share. The keys and names of its pages depend on tokens
    and identities only. ``model`` is the identity of the whole model, and ``identities`` has one identity for
    each part of each layer group."""

    __slots__ = ("_identities",)

    def __init__(
        self, model: Identity, identities: Sequence[Identity], tokens: bytes, chunk_tokens: int
    ) -> None:
        self._identities = identities
        super().__init__(model, np.frombuffer(tokens, TOKEN_DTYPE), chunk_tokens=chunk_tokens)

    @property
    def identities(self) -> Sequence[Identity]:
        return self._identities


def shared_chunks(
    model: Identity, identity: Identity, tokens: bytes, chunks: range, chunk_tokens: int, *, named: bool
) -> tuple[Prompt, int]:
    """Return a prompt that finds the shared pages of ``chunks`` in one layer group, and the index of the
    first of ``chunks`` in this prompt.

    ``model`` is the whole model's identity, and ``identity`` the identity of the pages. ``tokens`` are the
    prompt's tokens (uint32, little-endian), at least up to the end of ``chunks``. ``named`` says whether the
    group's pages are found by name."""
    whole = tokens[: chunks.stop * chunk_tokens * TOKEN_BYTES]
    if not named:
        return Prompt(identity, np.frombuffer(whole, TOKEN_DTYPE), chunk_tokens=chunk_tokens), chunks.start
    names = SharedPrompt(model, [identity], whole, chunk_tokens).names(chunks.stop)[chunks.start :]
    prompt = Prompt.named_pages(identity, names, chunk_tokens=chunk_tokens, pages_before=chunks.start)
    return prompt, 0


def refusal(reason: str) -> UsageError:
    """Return the error for an engine that cannot share its pages."""
    return UsageError(f"share_engines: {reason}; leave share_engines out to use a cache of this engine alone")


def _checked(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return ``config``. Raise :class:`UsageError` for an unknown field, and for a ``model_type`` outside
    :data:`MEASURED`."""
    kind = config.get("model_type")
    if kind not in MEASURED:
        known = ", ".join(sorted(MEASURED))
        raise refusal(f"pages of model_type {kind!r} are not shared (measured: {known})")
    unknown = sorted(
        name
        for name in config.keys() - _COUNTED - HARMLESS
        if name not in _FALSE or config[name] not in (None, False)
    )
    if unknown:
        raise refusal(f"config.json has {', '.join(unknown)}, which may change KV")
    for name in ("rope_parameters", "rope_scaling"):
        for kind in _rope_kinds(config.get(name)):
            if kind not in ROPES:
                raise refusal(f"RoPE must be one of {', '.join(ROPES)}, got {kind!r}")
    return config


def _rope_kinds(rope: object) -> list[object]:
    """Return the kinds of RoPE that a field of ``config.json`` names: one, or one for each kind of layers."""
    if not isinstance(rope, Mapping):
        return [] if rope is None else [rope]
    kinds = [kind for each in rope.values() if isinstance(each, Mapping) for kind in _rope_kinds(each)]
    return kinds or [rope.get("rope_type") or rope.get("type") or "default"]
