"""What tells SGLang's pages apart: the key of each page, and the identity of a pool's pages.

**Keys.** SGLang names a page by SHA-256 over all tokens up to its end (and, from 0.5.20 on, over the salt and
the adapter of the request). Its first 16 bytes find the page, and the whole hash stands where a page has its
tokens, so all of it is compared.

**The identity** is everything that the hash does not cover: SGLang's version (a page's bytes are its affair),
the model's configuration and weights, the dtypes, how the pool lies in memory, which part of the model this
rank has, and the *epoch*: SGLang tells nobody when an engine's weights are replaced, but an update may name a
version, and ``clear`` begins something new in any case.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tierstore.errors import UsageError
from tierstore.keys import NAME_BYTES, Identity, Prompt
from tierstore.spec import KVSpec
from tierstore_connectors.common.facts import COMMIT, digest, digest_of_files, plain, weight_files

_OF_WEIGHTS = ("model_path", "revision", "random_seed")
# What changes a page's bytes besides the weights; of these SGLang has what its version has.
_OF_COMPUTING = (
    *("dtype", "kv_cache_dtype", "quantization", "load_format", "attention_backend"),
    *("prefill_attention_backend", "decode_attention_backend", "json_model_override_args"),
    *("quantization_param_path", "rope_scaling", "torchao_config", "speculative_algorithm"),
    *("speculative_draft_model_path", "speculative_draft_model_revision"),
)


ARGUMENTS = (*_OF_WEIGHTS, *_OF_COMPUTING)
"""The names of SGLang's ``ServerArgs`` that identities are made of."""


def page_hash(key: str) -> bytes:
    """32 bytes for a page's name: SGLang's hash itself, or that of a name of another kind."""
    if len(key) == 2 * NAME_BYTES:
        try:
            return bytes.fromhex(key)
        except ValueError:
            pass  # of another kind, then
    return hashlib.sha256(key.encode()).digest()


def pages_named(identity: Identity, keys: Sequence[str], chunk_tokens: int, before: int = 0) -> Prompt:
    """The pages that SGLang names ``keys``, each by itself. ``before``: how many come before them, as far as
    SGLang says so."""
    names = [page_hash(key) for key in keys]
    return Prompt.named_pages(identity, names, chunk_tokens=chunk_tokens, pages_before=before)


def model_digest(version: str, arguments: Mapping[str, Any], namespace: str) -> str:
    """A digest of the model's shape and how it is computed. ``arguments`` are SGLang's ``ServerArgs``."""
    values = {name: plain(arguments[name]) for name in _OF_COMPUTING if name in arguments}
    config = Path(str(arguments.get("model_path", ""))) / "config.json"
    shape = plain(json.loads(config.read_text())) if config.is_file() else str(arguments.get("model_path"))
    seed = arguments.get("random_seed") if arguments.get("load_format") == "dummy" else None
    return digest([version, sorted(values.items()), shape, seed, namespace])


def weights_revision(arguments: Mapping[str, Any], namespace: str) -> str:
    """Identify the weights: by their files, by the hub's commit, or by the ``namespace``. Raises
    :class:`UsageError` where nothing does."""
    place, revision = str(arguments.get("model_path", "")), str(arguments.get("revision") or "")
    folder = Path(place)
    if folder.is_dir() and (files := weight_files(folder)):
        return digest_of_files(files)
    if COMMIT.fullmatch(revision) or namespace:
        return f"{place} {revision}"
    raise UsageError(
        f"the weights of {place} cannot be identified (no local weight files, and revision is no commit): "
        'give hicache-storage-backend-extra-config a "namespace" that changes with them'
    )


def pool_identity(
    page_bytes: int, chunk_tokens: int, *, pool: str, layout: str, model: str, revision: str, shard: str
) -> Identity:
    """The identity of the pages of one host pool."""
    spec = KVSpec.opaque(page_bytes, chunk_tokens=chunk_tokens, hashed=True)
    return Identity.of(spec, model=model, revision=revision, codec=f"sglang-{pool}-{layout}", shard=shard)
