"""Read the header of a GGUF file: its metadata and the descriptions of its tensors."""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tierstore.errors import UsageError

_VERSIONS = (2, 3)
_KINDS = "BbHhIif?saQqd"  # types of metadata values: codes of struct, or s for a string, a for an array
CONFIG_FIELDS = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.sliding_window": "sliding_window",
    "rope.freq_base": "rope_theta",
}
"""Keys of a model's metadata, without the architecture at their beginning, and the ``config.json`` fields
with the same meaning."""


class GGUFHeader:
    """The part of a GGUF file before the bytes of its ``tensors``. ``errors`` says how to treat text that is
    not UTF-8, as in :meth:`bytes.decode`. ``lists`` reads lists of metadata, such as the vocabulary.

    Raises :class:`ValueError` for bytes that are not GGUF, and :class:`struct.error` at the end of the file.
    Call :meth:`fields` once, before reading the descriptions of the tensors with :meth:`number` and
    :meth:`text`.
    """

    def __init__(self, data: mmap.mmap, *, errors: str = "strict", lists: bool = False) -> None:
        self._data = data
        self._lists = lists
        self._errors = errors
        if data[:4] != b"GGUF":
            raise ValueError("it does not begin with GGUF")
        self.at = 4
        version = self.number("I")
        if version not in _VERSIONS:
            raise ValueError(f"its version is {version}, and versions 2 and 3 are read")
        self.tensors, self._fields = self.number("Q"), self.number("Q")

    def fields(self) -> Iterator[tuple[str, Any]]:
        """Yield the names and values of the metadata. A list is None unless ``lists`` is true."""
        for _ in range(self._fields):
            yield self.text(), self._value()

    def number(self, kind: str) -> Any:
        """Return the next number, whose type is this code of struct."""
        [value] = struct.unpack_from(f"<{kind}", self._data, self.at)
        self.at += struct.calcsize(f"<{kind}")
        return value

    def text(self) -> str:
        return self._bytes(self.number("Q")).decode(errors=self._errors)

    def _value(self) -> Any:
        kind = self._kind()
        if kind == "a":
            return self._list()
        return self.text() if kind == "s" else self.number(kind)

    def _kind(self) -> str:
        kind = self.number("I")
        if kind >= len(_KINDS):
            raise ValueError(f"metadata has a value of the unknown kind {kind}")
        return _KINDS[kind]

    def _bytes(self, length: int) -> bytes:
        if self.at + length > len(self._data):
            raise ValueError("it ends within its metadata")
        self.at += length
        return self._data[self.at - length : self.at]

    def _list(self) -> list[Any] | None:
        kind, length = self._kind(), self.number("Q")
        if kind == "a":
            raise ValueError("metadata has a list of lists")
        if self._lists and kind == "s":
            return [self.text() for _ in range(length)]
        if self._lists:
            width = struct.calcsize(f"<{kind}")
            return [value for [value] in struct.iter_unpack(f"<{kind}", self._bytes(length * width))]
        if kind == "s":
            for _ in range(length):
                self._bytes(self.number("Q"))
        else:
            self._bytes(length * struct.calcsize(f"<{kind}"))
        return None


def config_fields(metadata: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the fields of a ``config.json`` from the metadata of a GGUF file. ``dtype`` is float32, in which
    llama.cpp computes keys and values on a CPU. Raises :class:`ValueError` for an architecture other than
    Llama and Gemma 3.

    >>> config_fields({"general.architecture": "llama", "llama.block_count": 30})["num_hidden_layers"]
    30
    """
    architecture = metadata.get("general.architecture")
    if architecture not in ("llama", "gemma3"):
        raise ValueError(f"architecture {architecture} is not read from GGUF (llama and gemma3 are)")
    raw: dict[str, Any] = {"dtype": "float32"}
    for key, name in CONFIG_FIELDS.items():
        if (value := metadata.get(f"{architecture}.{key}")) is not None:
            raw[name] = value
    heads, hidden = raw.get("num_attention_heads"), raw.get("hidden_size")
    if isinstance(heads, int) and heads > 0 and isinstance(hidden, int):
        raw.setdefault("head_dim", hidden // heads)
    if architecture == "gemma3":
        raw["sliding_window_pattern"] = 6
    return raw


def read_config(model: Path) -> Mapping[str, Any]:
    """Return :func:`config_fields` of a file. Raises :class:`UsageError` for a file that is damaged, not GGUF
    or of another architecture."""
    with _metadata(model) as fields:
        return config_fields(dict(fields))


def window_of(model: Path) -> int:
    """Return the length of a model's sliding window in tokens, 0 if its file does not name one. Raises
    :class:`UsageError` for a file that is not GGUF."""
    with _metadata(model) as fields:
        windows = (value for name, value in fields if name.endswith(".attention.sliding_window"))
        return next((value for value in windows if type(value) is int), 0)


@contextmanager
def _metadata(model: Path) -> Iterator[Iterator[tuple[str, Any]]]:
    try:
        with model.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            yield GGUFHeader(data, errors="replace").fields()
    except (OSError, OverflowError, ValueError, struct.error) as error:
        raise UsageError(f"{model} cannot be read as GGUF: {error}") from error
