"""The identity of an engine's pages, and the keys of chunks.

**Keys** are made from vLLM's block hashes. A block hash covers the hash of the block before it, the
block's tokens, and everything else of a request that changes its KV: images, LoRA adapter, cache salt. A
chunk's key is the hash of the chunk's last block, hashed again with adapter and salt. Without the salt,
a tenant could construct collisions of block hashes with ``--prefix-caching-hash-algo xxhash``.

**Names.** A page of full attention is found through the pages before it, and its tokens are compared. A page
of a window, an attention chunk or a recurrent state is found by its name: a SHA-256 hash, chained over the
keys and tokens of all chunks up to the page's end. The name is stored in place of tokens, and all bits of the
name are compared. So a page of a different prefix is not served even if vLLM's hashes collide.

**The identity** covers everything that vLLM's block hashes do not cover. Two engines share pages only if all
of these are equal:

- every field of vLLM's configuration except the fields known not to change KV (``fields.py``),
- the environment variables that influence the choice of kernels, and the attention backends,
- the versions of vLLM and of the packages that vLLM computes with,
- the layout, and the worker's part of the model. Data-parallel ranks have equal identities.

A local model is identified by all bytes of its files (weights, configurations, processors, code), but not by
its path. A model from the hub is identified by its commit. For any other model the user must give a version
(``namespace``).

**Adapters** are identified by the bytes of their files. **Images** and other media are identified by the
processor's output, because vLLM's hash of an image may be a name that a client has chosen.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import re
import types
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import msgspec

from tierstore.keys import KEY_BYTES, TOKEN_BYTES, Identity, PageKey, Prompt
from tierstore.spec import KVSpec
from tierstore_connectors.common.contents import Contents, contents, default_cache, model_files
from tierstore_connectors.common.facts import COMMIT, WEIGHTS, installed_versions, plain
from tierstore_connectors.vllm.fields import HARMLESS, counted_variables, length_counts
from tierstore_connectors.vllm.layout import PageLayout, UnsupportedError

_MOST_ADAPTERS = 65_536
_ADAPTER_S = 0.5  # how long a request waits while its adapter is hashed
_MOST_MEDIA, _MOST_MEDIA_BYTES = 65_536, 256 << 20
_COMPUTES = ("torch", "transformers", "triton", "flashinfer-python", "flash-attn")


def model_digest(
    config: Any,
    version: str,
    backends: list[str],
    device: str,
    namespace: str,
    environment: Mapping[str, str],
) -> str:
    """Return a digest of the model's shape and computation, without its weights (:func:`weights_revision`).

    ``config`` is a ``VllmConfig``. Raise :class:`UnsupportedError` if processes with equal configurations
    would compute different KV.
    """
    if vars(config.cache_config).get("calculate_kv_scales", False):
        raise UnsupportedError(
            "calculate_kv_scales computes KV scales at run time, so pages cannot be shared"
        )
    dummy = str(config.load_config.load_format) == "dummy"
    parts: dict[str, Any] = {
        "config": described(config),
        "seed": config.model_config.seed if dummy else None,  # dummy weights are made from the seed
        "versions": {"vllm": version, **installed_versions(_COMPUTES)},
        "backends": backends,
        "device": device,
        "environment": counted_variables(environment),
        "namespace": namespace,
    }
    return hashlib.sha256(msgspec.json.encode(sorted(parts.items()))).hexdigest()[:32]


def described(value: Any) -> Any:
    """Return a configuration value as JSON that is equal in every process.

    The fields in :data:`~tierstore_connectors.vllm.fields.HARMLESS` are left out. A function is described by
    its code, and an object of an unknown type by its class.
    """
    if isinstance(value, Enum):  # checked first, because an enum may also be a number or a string
        return value.name
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return repr(value)
    if isinstance(value, (bytes, bytearray)):
        return value.hex()
    # Configurations of transformers have the method to_dict().
    if callable(getattr(value, "to_dict", None)) and not isinstance(value, type):
        return [_name(type(value)), plain(value.to_dict())]
    if is_dataclass(value) and not isinstance(value, type):
        return _described_fields(value)
    if isinstance(value, Mapping):
        return {str(key): described(value[key]) for key in sorted(value, key=str)}
    if isinstance(value, (list, tuple)):
        return [described(each) for each in value]
    if isinstance(value, (set, frozenset)):
        return sorted((described(each) for each in value), key=str)
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, (type, types.ModuleType)):
        return _name(value)
    if isinstance(value, types.CodeType):
        return [value.co_code.hex(), list(value.co_names), [described(each) for each in value.co_consts]]
    if isinstance(value, functools.partial):
        return [described(value.func), described(value.args), described(value.keywords)]
    if inspect.isfunction(value) or inspect.ismethod(value):
        held = [cell.cell_contents for cell in value.__closure__ or ()]
        return [_name(value), described(value.__code__), described(held)]
    text = str(value)
    return _name(type(value)) if " at 0x" in text else [_name(type(value)), text]  # for example torch.dtype


def _name(thing: Any) -> str:
    return f"{getattr(thing, '__module__', '')}.{getattr(thing, '__qualname__', thing)}"


def _described_fields(config: Any) -> dict[str, Any] | None:
    if getattr(config, "ec_connector", None) == "TierStoreECConnector":
        return None  # equal to no connector, because stored embeddings equal the encoder's output
    names = {name for cls in type(config).__mro__ for name in HARMLESS.get(cls.__name__, ())}
    found = {
        each.name: described(getattr(config, each.name, None))
        for each in fields(config)
        if each.name not in names
    }
    if type(config).__name__ == "ModelConfig":
        shape = config.hf_config.to_dict()
        if length_counts(list(config.hf_config.architectures or ()), shape):
            found["max_model_len"] = config.max_model_len
    return found


@dataclass(frozen=True, slots=True)
class Weights:
    """The identity of an engine's weights among models of the same shape. ``files`` is None if the model has
    no local files."""

    revision: str
    files: Contents | None


def weights_revision(config: Any, namespace: str, *, sampled: bool = False) -> Weights:
    """Identify the weights of the model and of the draft model.

    Local models are identified by the contents of all their files. With ``sampled``
    only samples of the files are read.
    Raise :class:`UnsupportedError` for weights without local files, commit and ``namespace``.
    """
    found: dict[str, Path] = {}
    names = []
    speculative = getattr(config, "speculative_config", None)
    draft = getattr(speculative, "draft_model_config", None)
    loads = [("", config.model_config, config.load_config)]
    if draft is not None and draft is not config.model_config:
        loads.append(("draft/", draft, getattr(speculative, "draft_load_config", None) or config.load_config))
    try:
        for prefix, model, load in loads:
            files = _files(model, load)
            found.update({prefix + name: file for name, file in files.items()})
            if not any(file.suffix in WEIGHTS for file in files.values()):
                names.append(prefix + _named(model, load, namespace, local=bool(files)))
        found.update(_named_files(described(config)))
        if not found:
            return Weights(" ".join(names), None)
        hashed = contents(found, remembered=default_cache(), sampled=sampled)
    except OSError as error:
        raise UnsupportedError(f"cannot read the model's files: {error}") from error
    return Weights(" ".join([hashed.digest, *names]), hashed)


def _named(model: Any, load: Any, namespace: str, *, local: bool) -> str:
    """Return a text that identifies weights without local files. ``local`` says whether the model's other
    files are local, so that they identify the model instead of its path."""
    place = str(vars(model).get("model_weights") or ("" if local else model.model))
    if str(load.load_format) == "dummy":
        return place  # dummy weights are made from the seed, which is part of the model digest
    commit = vars(model.hf_config).get("_commit_hash")  # a model from the hub has it
    if commit:
        return f"{place}@{commit}"
    named = f"{place} {model.revision or ''}"
    if COMMIT.fullmatch(str(model.revision or "")) or namespace:
        return named
    raise UnsupportedError(
        f"the weights of {model.model} cannot be identified (no local weight files, no commit): give "
        'kv_connector_extra_config a "namespace" that changes with them'
    )


def _files(model: Any, load: Any) -> dict[str, Path]:
    """Return the local files of a model: in its folder, and weights, tokenizer and configuration in other
    folders."""
    found: dict[str, Path] = {}
    if (folder := Path(str(model.model))).is_dir():
        found.update(model_files(folder))
    place = str(vars(model).get("model_weights") or model.model)
    if str(load.load_format) == "tensorizer":
        extra = vars(load).get("model_loader_extra_config") or {}
        place = str(extra.get("tensorizer_uri") or extra.get("tensorizer_dir") or place)
    weights = Path(place)
    if weights.is_dir():
        if weights != folder:
            found.update({f"weights/{name}": file for name, file in model_files(weights).items()})
    elif weights.suffix in WEIGHTS and weights.parent.is_dir():
        found.update(_split_files(weights))
    for name in ("tokenizer", "hf_config_path"):
        other = str(vars(model).get(name) or "")
        if other and Path(other).is_dir() and Path(other) != folder:
            files = model_files(Path(other))
            found.update({f"{name}/{each}": file for each, file in files.items()})
    return found


def _named_files(values: Any, name: str = "config") -> dict[str, Path]:
    """Return the local files whose paths a configuration contains, for example of scales."""
    if isinstance(values, dict):
        pairs: Iterable[tuple[object, Any]] = values.items()
    elif isinstance(values, list):
        pairs = enumerate(values)
    else:
        path = Path(values) if isinstance(values, str) and "/" in values else None
        return {name: path} if path is not None and path.is_file() else {}
    return {found: file for key, each in pairs for found, file in _named_files(each, f"{name}/{key}").items()}


def _split_files(file: Path) -> dict[str, Path]:
    """Return the files of the checkpoint that ``file`` belongs to, and the other files in its folder, except
    weights of other models."""
    pattern = re.sub(r"-\d{5}-of-(\d{5})", r"-*-of-\1", file.name)  # GGUF
    pattern = re.sub(r"%0?\d*d", "*", pattern)  # tensorizer has one file for each rank
    found = {each.name: each for each in file.parent.glob(pattern) if each.is_file()}
    for each in file.parent.iterdir():
        beside = each.suffix not in WEIGHTS or "mmproj" in each.name.lower()
        if beside and each.is_file() and not each.name.startswith("."):
            found[each.name] = each
    return found


class AdapterVersions:
    """The versions of LoRA adapters: digests of all bytes of their files.

    vLLM loads an adapter once and keeps it under a number, even if the adapter's files change. So the files
    are hashed before vLLM loads the adapter, or at the number's first request. If the times or sizes of the
    files change later, or the number gets another folder, it is unknown which files vLLM computes with. From
    then on requests of this number are not cached. Unloading and loading the adapter again gives it a new
    number.
    """

    def __init__(self) -> None:
        self._seen: OrderedDict[int, tuple[list[object], Future[Contents]]] = OrderedDict()  # by number
        self._unknown: set[int] = set()
        self._hashing = ThreadPoolExecutor(1, thread_name_prefix="tierstore-adapters")

    def version(self, adapter: Any) -> str:
        """Return the version of ``adapter``, vLLM's ``LoRARequest``.

        The first call for a number starts to hash the adapter's files, and waits at most half a second.
        Raise :class:`UnsupportedError` while the version is unknown.
        """
        number, place = int(adapter.lora_int_id), str(adapter.lora_path)
        try:
            files = [each for each in sorted(Path(place).expanduser().iterdir()) if each.is_file()]
            now: list[object] = [place, *map(_status, files)]
            if number not in self._seen:
                named = {each.name: each for each in files}
                hashing = self._hashing.submit(contents, named, remembered=default_cache())
                self._seen[number] = (now, hashing)
                if len(self._seen) > _MOST_ADAPTERS:
                    self._seen.popitem(last=False)
                wait((hashing,), _ADAPTER_S)
            first, hashing = self._seen[number]
            found = hashing.result(0).digest if hashing.done() else None
        except OSError as error:
            raise UnsupportedError(
                f"the weights of the adapter {adapter.lora_name!r} cannot be identified ({place!r} is no "
                "local directory): its requests go without the cache"
            ) from error
        if first != now:
            self._unknown.add(number)
        if number in self._unknown:
            raise UnsupportedError(
                f"the files of the adapter {adapter.lora_name!r} have changed since its first request: its "
                "requests go without the cache until it is unloaded and loaded again"
            )
        if found is None:
            raise UnsupportedError(
                f"the adapter {adapter.lora_name!r} is still being hashed: its requests go without the cache "
                "until that is done"
            )
        return found

    def close(self) -> None:
        self._hashing.shutdown(wait=False, cancel_futures=True)


def _status(file: Path) -> list[object]:
    status = file.stat()
    return [file.name, status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns]


class MediaContents:
    """Digests of the tensors that the processor makes of images and other media.

    vLLM's own hash of an image may be a client's ``multi_modal_uuids``. If a client gives one name to two
    images, vLLM uses the first image's embedding for both images while the encoder cache has it. Stored pages
    would make this error permanent, so the tensors are hashed as well. If two different tensors have one
    name, it is unknown which of them vLLM computes with. Requests with such a name are not cached.
    """

    def __init__(self) -> None:
        self._seen: OrderedDict[str, str] = OrderedDict()  # the digest by name, or "" for an ambiguous name

    def digests(self, features: Sequence[Any], hash_tokens: int) -> list[tuple[int, str]]:
        """Return for each of vLLM's ``mm_features`` its digest and the block of ``hash_tokens`` tokens in
        which it begins, as (block, digest). Raise :class:`UnsupportedError` as :meth:`digest` does."""
        return [(int(each.mm_position.offset) // hash_tokens, self.digest(each)) for each in features]

    def digest(self, feature: Any) -> str:
        """Return the digest of one of vLLM's ``mm_features``: SHA-256, in hexadecimal digits. Raise
        :class:`UnsupportedError` if the feature's tensors are not available, or if two contents have its
        name."""
        name = f"{feature.modality} {feature.identifier}"
        items = feature.data
        if items is None or "address" in items:
            raise UnsupportedError(
                f"the scheduler does not see this {feature.modality} of a request (--mm-processor-cache-type "
                "shm, or an encoder elsewhere): such requests go without the cache"
            )
        hashed = hashlib.sha256()
        left = _MOST_MEDIA_BYTES
        for key in sorted(items):
            for piece in _pieces(items[key].data):
                hashed.update(piece)
                left -= len(piece)
            if left < 0:
                raise UnsupportedError(
                    f"a request has more than {_MOST_MEDIA_BYTES >> 20} MiB of one {feature.modality}: such "
                    "requests go without the cache"
                )
            hashed.update(key.encode() + b"\0")
        found = hashed.hexdigest()
        if self._seen.setdefault(name, found) != found:
            self._seen[name] = ""
        self._seen.move_to_end(name)
        if len(self._seen) > _MOST_MEDIA:
            self._seen.popitem(last=False)
        if not self._seen[name]:
            raise UnsupportedError(
                f"two different {feature.modality}s have the same name (multi_modal_uuids): requests with "
                "that name go without the cache"
            )
        return found


def _pieces(value: Any) -> Iterator[bytes | memoryview]:
    """Yield the bytes of nested tensors, with their shapes."""
    if hasattr(value, "detach"):
        import torch

        tensor = value.detach().cpu().contiguous()
        yield f"{tensor.dtype}{tuple(tensor.shape)}".encode()
        yield memoryview(tensor.reshape(-1).view(torch.uint8).numpy())
    elif isinstance(value, (list, tuple)):
        yield f"[{len(value)}".encode()
        for each in value:
            yield from _pieces(each)
    elif value is None:
        raise UnsupportedError("the scheduler does not see all of an image, so its request is not cached")
    else:
        yield repr(value).encode()


def page_identity(
    layout: PageLayout, *, chunk_tokens: int, model: str, revision: str, shard: str, meaning: str = ""
) -> Identity:
    """Return the identity of pages with ``layout``. ``meaning`` describes properties of their bytes that the
    layout does not contain."""
    spec = KVSpec.opaque(layout.page_bytes, chunk_tokens=chunk_tokens)
    codec = f"vllm-{layout.digest}"
    if meaning:
        codec += f"-{hashlib.sha256(meaning.encode()).hexdigest()[:16]}"
    return Identity.of(spec, model=model, revision=revision, codec=codec, shard=shard)


@dataclass(frozen=True, slots=True)
class Secret:
    """The secret part of a request's chunk keys, which separates prompts with equal block hashes. ``steps``
    has pairs (block, secret), ordered by block: a secret applies from its block on, until the next secret."""

    steps: tuple[tuple[int, bytes], ...]

    def of(self, block: int) -> bytes:
        """Return the secret for a chunk whose last block is ``block``."""
        return next(secret for first, secret in reversed(self.steps) if first <= block)


def request_salt(adapter: Sequence[str], salt: str | None, media: Sequence[tuple[int, str]] = ()) -> Secret:
    """Return the secret part of a request's keys, made from the adapter (name, path and version), the salt,
    and the ``media`` (block and digest of each, :class:`MediaContents`). An image does not change the keys of
    chunks before it."""
    secret = hashlib.sha256(msgspec.json.encode([list(adapter), salt])).digest()
    steps = [(0, secret)]
    for block, content in sorted(media):
        secret = hashlib.sha256(secret + content.encode()).digest()
        steps.append((block, secret))
    return Secret(tuple(steps))


def chunk_keys(
    block_hashes: Sequence[bytes], secret: Secret, blocks_per_chunk: int, first: int = 0
) -> list[PageKey]:
    """Return the keys of whole chunks from chunk ``first`` on. A key is made from the hash of the chunk's
    last block."""
    last = range((first + 1) * blocks_per_chunk - 1, len(block_hashes), blocks_per_chunk)
    return [
        PageKey(hashlib.sha256(secret.of(at) + bytes(block_hashes[at])).digest()[:KEY_BYTES]) for at in last
    ]


class ChunkNames:
    """The names of a prompt's chunks, which are computed as the prompt grows."""

    def __init__(self, chunk_tokens: int) -> None:
        self.chunk_tokens = chunk_tokens
        self._names: list[bytes] = []

    def cut(self, chunks: int) -> None:
        """Drop the names after the first ``chunks`` chunks, because the prompt's continuation has changed."""
        del self._names[chunks:]

    def first(self, chunks: int, keys: Sequence[PageKey], tokens: bytes | bytearray) -> list[bytes]:
        """Return the names of the first ``chunks`` chunks. ``keys`` and ``tokens`` (uint32, little-endian)
        are the prompt's, for at least these chunks."""
        width = self.chunk_tokens * TOKEN_BYTES
        known = list(self._names)
        for chunk in range(len(known), chunks):
            before = known[-1] if known else b""
            part = tokens[chunk * width : (chunk + 1) * width]
            known.append(hashlib.sha256(before + keys[chunk] + part).digest())
        self._names = known
        return known[:chunks]

    def pages(
        self, identity: Identity, chunks: range, keys: Sequence[PageKey], tokens: bytes | bytearray
    ) -> Prompt:
        """Return a prompt that finds the pages of ``chunks`` by name. ``keys`` and ``tokens`` are described
        in :meth:`first`."""
        names = self.first(chunks.stop, keys, tokens)[chunks.start :]
        return Prompt.named_pages(identity, names, chunk_tokens=self.chunk_tokens, pages_before=chunks.start)


class EnginePrompt(Prompt):
    """The whole chunks of a prompt, for one lookup of the pages of all KV cache groups on all workers.

    ``identities`` has the identity of each group on each worker. ``tokens`` (uint32, little-endian) may be
    longer than the chunks of ``keys``.
    """

    __slots__ = ("_all_names", "_identities", "_tokens")

    def __init__(
        self, identities: Sequence[Identity], keys: Sequence[PageKey], tokens: bytes, chunk_tokens: int
    ) -> None:
        super().__init__(identities[0], chunk_tokens=chunk_tokens)
        self.keys = list(keys)
        self._identities = identities
        self._tokens = tokens[: len(keys) * chunk_tokens * TOKEN_BYTES]
        self._data += self._tokens
        self._all_names = ChunkNames(chunk_tokens)

    @property
    def identities(self) -> Sequence[Identity]:
        return self._identities

    @property
    def token_bytes(self) -> bytes:
        return self._tokens

    def keys_of(self, group: int) -> list[PageKey]:
        return self.keys

    def names(self, chunks: int) -> list[bytes]:
        return self._all_names.first(chunks, self.keys, self._tokens)


def hashes_are_private(algorithm: str, environment: Mapping[str, str], *, fixed_seed: bool) -> bool:
    """Return whether vLLM's block hashes differ between processes, so that other processes find no pages.

    ``fixed_seed`` says whether this vLLM starts cryptographic hashes with a constant, as vLLM does from 0.29
    on. Older versions start them with random bytes unless the environment has a seed.
    """
    if "PYTHONHASHSEED" in environment:
        return False
    return not (fixed_seed and algorithm.startswith("sha256"))
