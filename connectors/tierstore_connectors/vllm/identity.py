"""What tells pages apart: the identity of an engine's pages, and the key of each chunk.

**Keys** come from the block hashes that vLLM has computed. vLLM's hash of a block covers the hash of the
block before it, its tokens, and whatever else changes its KV: the images in it, the LoRA adapter, the cache
salt. A key made from less would give prompts that only look alike each other's pages. So the hash of a
chunk's last block is the chunk's key, hashed once more with adapter and salt: with
``--prefix-caching-hash-algo xxhash`` a tenant could find collisions of vLLM's own hash.

**Names.** A page of attention is found along the pages before it, whose tokens are compared. The state of a
chunk's end is found by itself: its name is SHA-256, chained over the keys and the tokens of all chunks up to
there. The name stands where other pages have tokens, and all of its bits are compared. So the state of
another prefix is not served even where vLLM's hashes collide.

**The identity** is everything that vLLM's block hashes do not cover. Two engines share pages only where all
of it is equal: the model's configuration and weights, the dtypes, quantization, the attention backends,
vLLM's version (a page's bytes are the backend's affair), the layout, and which part of the model this worker
has. Data parallel ranks compute the same and share.

Local weight files identify themselves, wherever they are mounted: by names, sizes, times, and a sample of
their bytes, since images are often built with one time for all files. Weights from the hub are identified by
their commit. Of all others only the user can name the version (``namespace``).
"""

from __future__ import annotations

import hashlib
import re
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from tierstore.keys import KEY_BYTES, TOKEN_BYTES, Identity, PageKey, Prompt
from tierstore.spec import KVSpec
from tierstore_connectors.common.facts import (
    COMMIT,
    WEIGHTS,
    digest,
    digest_of_files,
    facts,
    plain,
    weight_files,
)
from tierstore_connectors.vllm.layout import PageLayout, UnsupportedError

_MOST_ADAPTERS = 65_536


def model_digest(config: Any, version: str, backends: list[str], device: str, namespace: str) -> str:
    """A digest of the model's shape and how it is computed; of its weights see :func:`weights_revision`.
    ``config`` is vLLM's own. Raises :class:`UnsupportedError` where each process computes something else."""
    model, cache, load = config.model_config, config.cache_config, config.load_config
    if vars(cache).get("calculate_kv_scales", False):
        raise UnsupportedError("calculate_kv_scales makes up KV scales at run time: pages cannot be shared")
    load_format = str(load.load_format)
    parts: dict[str, Any] = {
        "architectures": sorted(model.hf_config.architectures or ()),
        "hf_config": plain(model.hf_config.to_dict()),
        "dtype": str(model.dtype),
        "quantization": str(model.quantization),
        "kv_dtype": str(cache.cache_dtype),
        "load_format": load_format,
        "seed": model.seed if load_format == "dummy" else None,  # the weights are made from it
        "vllm": version,
        "backends": backends,
        "device": device,
        "hash": str(cache.prefix_caching_hash_algo),
        "namespace": namespace,
    }
    return hashlib.sha256(msgspec.json.encode(sorted(parts.items()))).hexdigest()[:32]


def weights_revision(config: Any, namespace: str) -> str:
    """Identify the model's weights among others of the same shape. Raises
    :class:`UnsupportedError` where nothing does: neither files, nor a commit, nor a ``namespace``."""
    model, load = config.model_config, config.load_config
    if files := _weight_files(config):
        return digest_of_files(files)
    named = f"{model.model} {model.revision or ''}"
    if str(load.load_format) == "dummy":
        return named  # the seed says the rest
    commit = vars(model.hf_config).get("_commit_hash")  # of a checkpoint from the hub, where "main" moves
    if commit:
        return f"{named}@{commit}"
    if COMMIT.fullmatch(str(model.revision or "")) or namespace:
        return named
    raise UnsupportedError(
        f"the weights of {model.model} cannot be identified (no local weight files, no commit): give "
        'kv_connector_extra_config a "namespace" that changes with them'
    )


def _weight_files(config: Any) -> list[Path]:
    """Those that vLLM loads, as far as they are local: of a directory, of a file's name, or of the files that
    a split file belongs to."""
    model, load = config.model_config, config.load_config
    place = str(vars(model).get("model_weights") or model.model)
    if str(load.load_format) == "tensorizer":
        extra = vars(load).get("model_loader_extra_config") or {}
        place = str(extra.get("tensorizer_uri") or extra.get("tensorizer_dir") or place)
    path = Path(place)
    if path.is_dir():
        return weight_files(path)
    pattern = re.sub(r"-\d{5}-of-(\d{5})", r"-*-of-\1", path.name)  # GGUF
    pattern = re.sub(r"%0?\d*d", "*", pattern)  # tensorizer, one file for each rank
    return sorted(path.parent.glob(pattern)) if path.suffix in WEIGHTS else []


class AdapterVersions:
    """Which version of a LoRA adapter a request is computed with.

    vLLM loads an adapter once and keeps it under its number, whatever becomes of its files. So the files are
    looked at with the first request of a number. Once they change after that, it is unknown which ones vLLM
    computes with, and the adapter goes without the cache until it has another number
    (unloaded and loaded again) or the engine is started again."""

    def __init__(self) -> None:
        self._seen: OrderedDict[tuple[int, str], str] = OrderedDict()

    def version(self, adapter: Any) -> str:
        """``adapter`` is vLLM's ``LoRARequest``. Raises :class:`UnsupportedError` when it is
        unknown."""
        number, place = int(adapter.lora_int_id), str(adapter.lora_path)
        try:
            files = sorted(each for each in Path(place).expanduser().iterdir() if each.is_file())
            now = digest(facts(files))
        except OSError as error:
            raise UnsupportedError(
                f"the weights of the adapter {adapter.lora_name!r} cannot be identified ({place!r} is no "
                "local directory): its requests go without the cache"
            ) from error
        first = self._seen.setdefault((number, place), now)
        if first != now:
            raise UnsupportedError(
                f"the files of the adapter {adapter.lora_name!r} have changed since its first request: its "
                "requests go without the cache until it is unloaded and loaded again"
            )
        if len(self._seen) > _MOST_ADAPTERS:
            self._seen.popitem(last=False)
        return first


def page_identity(
    layout: PageLayout, *, chunk_tokens: int, model: str, revision: str, shard: str, meaning: str = ""
) -> Identity:
    """The identity of pages with ``layout``. ``meaning``: of their bytes, as far as the layout says nothing
    of it."""
    spec = KVSpec.opaque(layout.page_bytes, chunk_tokens=chunk_tokens)
    codec = f"vllm-{layout.digest}"
    if meaning:
        codec += f"-{hashlib.sha256(meaning.encode()).hexdigest()[:16]}"
    return Identity.of(spec, model=model, revision=revision, codec=codec, shard=shard)


def request_salt(adapter: Sequence[str], salt: str | None) -> bytes:
    """A digest of what tells apart requests with equal block hashes: the adapter (its name, path and
    version), and the salt."""
    return hashlib.sha256(msgspec.json.encode([list(adapter), salt])).digest()


def chunk_key(block_hash: bytes, secret: bytes) -> PageKey:
    """The key of the chunk whose last block has this hash."""
    return PageKey(hashlib.sha256(secret + bytes(block_hash)).digest()[:KEY_BYTES])


def chunk_keys(
    block_hashes: Sequence[bytes], secret: bytes, blocks_per_chunk: int, first: int = 0
) -> list[PageKey]:
    """The keys of the whole chunks from chunk ``first`` on."""
    last = range((first + 1) * blocks_per_chunk - 1, len(block_hashes), blocks_per_chunk)
    return [chunk_key(block_hashes[at], secret) for at in last]


class ChunkNames:
    """The names of a prompt's chunks, as it grows."""

    def __init__(self, chunk_tokens: int) -> None:
        self.chunk_tokens = chunk_tokens
        self._names: list[bytes] = []

    def cut(self, chunks: int) -> None:
        """The prompt goes on in another way behind its first ``chunks`` chunks."""
        del self._names[chunks:]

    def pages(
        self, identity: Identity, chunks: range, keys: Sequence[PageKey], tokens: bytes | bytearray
    ) -> Prompt:
        """The pages of ``chunks``, each to be found by its name. ``keys`` and ``tokens`` (uint32,
        little-endian) are those of the prompt, up to there at least."""
        width = self.chunk_tokens * TOKEN_BYTES
        known = list(self._names)
        for chunk in range(len(known), chunks.stop):
            before = known[-1] if known else b""
            part = tokens[chunk * width : (chunk + 1) * width]
            known.append(hashlib.sha256(before + keys[chunk] + part).digest())
        self._names = known
        names = known[chunks.start : chunks.stop]
        return Prompt.named_pages(identity, names, chunk_tokens=self.chunk_tokens, pages_before=chunks.start)


def hashes_are_private(algorithm: str, environment: Mapping[str, str], *, fixed_seed: bool) -> bool:
    """Whether vLLM's block hashes mean something in one process only, so that nothing is found again by
    another one or after a restart. ``fixed_seed``: this vLLM begins cryptographic hashes with a constant
    (from 0.29 on); otherwise with random bytes, unless the environment has a seed."""
    if "PYTHONHASHSEED" in environment:
        return False
    return not (fixed_seed and algorithm.startswith("sha256"))
