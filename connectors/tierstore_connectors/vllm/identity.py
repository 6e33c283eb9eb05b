"""What tells pages apart: the identity of an engine's pages, and the key of each chunk.

**Keys** come from the block hashes that vLLM has computed. vLLM's hash of a block covers the hash of the
block before it, its tokens, and whatever else changes its KV: the images in it, the LoRA adapter, the cache
salt. A key made from less would give prompts that only look alike each other's pages. So the hash of a
chunk's last block is the chunk's key, hashed once more with adapter and salt: with
``--prefix-caching-hash-algo xxhash`` a tenant could find collisions of vLLM's own hash.

**Names.** A page of full attention is found along the pages before it, whose tokens are compared. The pages
of windows and attention chunks, and the state of a chunk's end, are found by themselves: the name of such a
page is SHA-256, chained over the keys and the tokens of all chunks up to its end. The name stands where other
pages have tokens, and all of its bits are compared. So a page of another prefix is not served even where
vLLM's hashes collide.

**The identity** is everything that vLLM's block hashes do not cover. Two engines share pages only where all
of it is equal: every field of vLLM's configuration but those that are known not to change KV (``fields.py``),
the environment variables that choose kernels, the attention backends, the versions of vLLM and of what it
computes with, the layout, and which part of the model this worker has. Data parallel ranks compute the same
and share.

Every file of a local model counts by all of its bytes, wherever it is mounted: weights, configurations,
processors, code. Models from the hub are identified by their commit. Of all others only the user can name the
version (``namespace``).

**Adapters** count by the bytes of their files, and **images** (and all else that is no token) by what the
processor has made of them: vLLM's hash of an image may be a name that a client has given to it.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
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
from tierstore_connectors.common.facts import COMMIT, WEIGHTS, plain
from tierstore_connectors.vllm.fields import HARMLESS, counted_variables, length_counts
from tierstore_connectors.vllm.layout import PageLayout, UnsupportedError

_MOST_ADAPTERS = 65_536
_ADAPTER_S = 0.5  # that a request waits while its adapter is hashed
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
    """A digest of the model's shape and how it is computed; of its weights see :func:`weights_revision`.
    ``config`` is vLLM's own. Raises :class:`UnsupportedError` where each process computes something else."""
    if vars(config.cache_config).get("calculate_kv_scales", False):
        raise UnsupportedError("calculate_kv_scales makes up KV scales at run time: pages cannot be shared")
    dummy = str(config.load_config.load_format) == "dummy"
    parts: dict[str, Any] = {
        "config": described(config),
        "seed": config.model_config.seed if dummy else None,  # the weights are made from it
        "versions": {"vllm": version, **_versions()},
        "backends": backends,
        "device": device,
        "environment": counted_variables(environment),
        "namespace": namespace,
    }
    return hashlib.sha256(msgspec.json.encode(sorted(parts.items()))).hexdigest()[:32]


def _versions() -> dict[str, str]:
    """Of the packages that compute, those that are installed."""
    found = {}
    for name in _COMPUTES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def described(value: Any) -> Any:
    """``value`` of a configuration as JSON, equal in every process: dataclasses without the fields that
    :data:`~tierstore_connectors.vllm.fields.HARMLESS` lists, functions by their code, and objects that
    nothing is known of by their class."""
    if isinstance(value, Enum):  # also those that are numbers or texts
        return value.name
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return repr(value)
    if isinstance(value, (bytes, bytearray)):
        return value.hex()
    if callable(getattr(value, "to_dict", None)) and not isinstance(value, type):  # of transformers
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
    return _name(type(value)) if " at 0x" in text else [_name(type(value)), text]  # torch.dtype and its like


def _name(thing: Any) -> str:
    return f"{getattr(thing, '__module__', '')}.{getattr(thing, '__qualname__', thing)}"


def _described_fields(config: Any) -> dict[str, Any]:
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
    """What identifies an engine's weights among others of the same shape. ``files``: None if there are none
    here."""

    revision: str
    files: Contents | None


def weights_revision(config: Any, namespace: str, *, sampled: bool = False) -> Weights:
    """Identify the weights, of the model and of the draft model: by all files of local ones. This reads them
    all, unless they are remembered; with ``sampled`` it reads a sample. Raises :class:`UnsupportedError`
    where nothing identifies them: neither files, nor a commit, nor a ``namespace``."""
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
        raise UnsupportedError(f"the model's files cannot be read: {error}") from error
    return Weights(" ".join([hashed.digest, *names]), hashed)


def _named(model: Any, load: Any, namespace: str, *, local: bool) -> str:
    """What identifies weights that are no local files. ``local``: the rest of the model is, and counts by its
    files instead of its place."""
    place = str(vars(model).get("model_weights") or ("" if local else model.model))
    if str(load.load_format) == "dummy":
        return place  # the seed says the rest
    commit = vars(model.hf_config).get("_commit_hash")  # of a checkpoint from the hub, where "main" moves
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
    """The local files that a model is made of: its folder, the weights elsewhere, the tokenizer."""
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
    """The files that a configuration names (scales, a quantised adapter), as far as they are local."""
    if isinstance(values, dict):
        pairs: Iterable[tuple[object, Any]] = values.items()
    elif isinstance(values, list):
        pairs = enumerate(values)
    else:
        path = Path(values) if isinstance(values, str) and "/" in values else None
        return {name: path} if path is not None and path.is_file() else {}
    return {found: file for key, each in pairs for found, file in _named_files(each, f"{name}/{key}").items()}


def _split_files(file: Path) -> dict[str, Path]:
    """The weights that ``file`` names, or that it is a part of, and what lies beside them but for the weights
    of other models."""
    pattern = re.sub(r"-\d{5}-of-(\d{5})", r"-*-of-\1", file.name)  # GGUF
    pattern = re.sub(r"%0?\d*d", "*", pattern)  # tensorizer, one file for each rank
    found = {each.name: each for each in file.parent.glob(pattern) if each.is_file()}
    for each in file.parent.iterdir():
        beside = each.suffix not in WEIGHTS or "mmproj" in each.name.lower()
        if beside and each.is_file() and not each.name.startswith("."):
            found[each.name] = each
    return found


class AdapterVersions:
    """Which version of a LoRA adapter a request is computed with: the digest of all bytes of its files.

    vLLM loads an adapter once and keeps it under its number, whatever becomes of its files. So the files are
    hashed with the first request of a number, or when vLLM is told to load it. Once their times or sizes
    change after that, or the number gets another folder, it is unknown which ones vLLM computes with. The
    number goes without the cache from then on, until the adapter has another one (unloaded and loaded again)
    or the engine is started again."""

    def __init__(self) -> None:
        self._seen: OrderedDict[int, tuple[list[object], Future[Contents]]] = OrderedDict()  # by number
        self._unknown: set[int] = set()
        self._hashing = ThreadPoolExecutor(1, thread_name_prefix="tierstore-adapters")

    def version(self, adapter: Any) -> str:
        """``adapter`` is vLLM's ``LoRARequest``. The first call of a number hashes. After half a second
        that goes on in the background. Raises :class:`UnsupportedError` when the version is
        unknown."""
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
    """What images and all else that is no token are, by the tensors that the processor has made of them.

    vLLM's own hash of an image may be a client's ``multi_modal_uuids``. A client that gives one name to two
    images gets vLLM's wrong answer as long as vLLM remembers the first; stored pages would make it last. So
    the tensors count as well. Where a name comes again with other tensors it is unknown which of them vLLM
    computes with: what vLLM's encoder has made of the first is kept by that name. Such a name is not cached
    any more."""

    def __init__(self) -> None:
        self._seen: OrderedDict[str, str] = OrderedDict()  # "" if a name has had two contents

    def digests(self, features: Sequence[Any], hash_tokens: int) -> list[tuple[int, str]]:
        """In which block (of ``hash_tokens``) each of vLLM's ``mm_features`` begins, and a digest of it.
        Raises :class:`UnsupportedError` where there is none."""
        return [(int(each.mm_position.offset) // hash_tokens, self._digest(each)) for each in features]

    def _digest(self, feature: Any) -> str:
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
                f"two different {feature.modality}s have come under one name (multi_modal_uuids): requests "
                "with that name go without the cache"
            )
        return found


def _pieces(value: Any) -> Iterator[bytes | memoryview]:
    """The bytes of nested tensors, with their shapes."""
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
        raise UnsupportedError(
            "the scheduler does not see all of an image: its request goes without the cache"
        )
    else:
        yield repr(value).encode()


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


@dataclass(frozen=True, slots=True)
class Secret:
    """What tells apart prompts with equal block hashes. ``steps``: from which block on, in order."""

    steps: tuple[tuple[int, bytes], ...]

    def of(self, block: int) -> bytes:
        """For a chunk that ends with this block."""
        return next(secret for first, secret in reversed(self.steps) if first <= block)


def request_salt(adapter: Sequence[str], salt: str | None, media: Sequence[tuple[int, str]] = ()) -> Secret:
    """What tells apart requests with equal block hashes: the adapter (its name, path and version), the salt,
    and the ``media`` (block and digest of each, :class:`MediaContents`). Text before an image is shared."""
    secret = hashlib.sha256(msgspec.json.encode([list(adapter), salt])).digest()
    steps = [(0, secret)]
    for block, content in sorted(media):
        secret = hashlib.sha256(secret + content.encode()).digest()
        steps.append((block, secret))
    return Secret(tuple(steps))


def chunk_keys(
    block_hashes: Sequence[bytes], secret: Secret, blocks_per_chunk: int, first: int = 0
) -> list[PageKey]:
    """The keys of the whole chunks from chunk ``first`` on, each made from the hash of its last block."""
    last = range((first + 1) * blocks_per_chunk - 1, len(block_hashes), blocks_per_chunk)
    return [
        PageKey(hashlib.sha256(secret.of(at) + bytes(block_hashes[at])).digest()[:KEY_BYTES]) for at in last
    ]


class ChunkNames:
    """The names of a prompt's chunks, as it grows."""

    def __init__(self, chunk_tokens: int) -> None:
        self.chunk_tokens = chunk_tokens
        self._names: list[bytes] = []

    def cut(self, chunks: int) -> None:
        """The prompt goes on in another way behind its first ``chunks`` chunks."""
        del self._names[chunks:]

    def first(self, chunks: int, keys: Sequence[PageKey], tokens: bytes | bytearray) -> list[bytes]:
        """The names of the first ``chunks`` chunks. ``keys`` and ``tokens`` (uint32, little-endian) are those
        of the prompt, up to there at least."""
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
        """The pages of ``chunks``, each to be found by its name; ``keys`` and ``tokens`` as for
        :meth:`first`."""
        names = self.first(chunks.stop, keys, tokens)[chunks.start :]
        return Prompt.named_pages(identity, names, chunk_tokens=self.chunk_tokens, pages_before=chunks.start)


class EnginePrompt(Prompt):
    """The whole chunks of a prompt as one question for the pages of all KV cache groups on all workers:
    ``identities`` are what those of each are kept under. ``tokens`` (uint32, little-endian) may go on behind
    the last key."""

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
    """Whether vLLM's block hashes mean something in one process only, so that nothing is found again by
    another one or after a restart. ``fixed_seed``: this vLLM begins cryptographic hashes with a constant
    (from 0.29 on); otherwise with random bytes, unless the environment has a seed."""
    if "PYTHONHASHSEED" in environment:
        return False
    return not (fixed_seed and algorithm.startswith("sha256"))
