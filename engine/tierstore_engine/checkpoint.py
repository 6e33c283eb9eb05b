"""A Hugging Face checkpoint folder: its ``config.json``, and its tensors by name, read one at a time."""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Set
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError, safe_open

from tierstore.errors import SpecError
from tierstore.spec import read_json
from tierstore_engine.config import ModelConfig
from tierstore_engine.config_fields import token_ids
from tierstore_engine.errors import ModelError
from tierstore_engine.families import check_quantisation, config_from_hf, unread_tensors, weight_scheme
from tierstore_engine.quantised import PackedMatrix
from tierstore_engine.weight_schemes import CODE_DTYPES
from tierstore_engine.weights_on_disk import MappedFile

CONFIG_FILE = "config.json"
GENERATION_FILE = "generation_config.json"
WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
QUANTISATION_FILES = (
    "hf_quant_config.json",
    "quantize_config.json",
    "quant_config.json",
    "quantization_config.json",
    "quanto_qmap.json",
    "quant_model_description.json",
)
"""Files beside ``config.json`` that quantisation tools write."""

VIEWED_DTYPES = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I8": torch.int8,
    "U8": torch.uint8,
    "I32": torch.int32,
    "I64": torch.int64,
}
_READ_DTYPES = ("BF16", "F16", "F32", "F64")


def read_config(folder: Path, *, dtype: str | None = None) -> ModelConfig:
    """Return the model's shape. The end-of-sequence ids come from ``generation_config.json`` if the folder
    has this file.

    Raises :class:`ModelError` if the folder is not a checkpoint that this engine can run.
    """
    if not folder.is_dir():
        raise ModelError(f"no model folder at {folder}")
    if not (folder / CONFIG_FILE).is_file():
        raise ModelError(f"{folder} is not a model folder: it has no {CONFIG_FILE}")
    raw = dict(_read_json(folder / CONFIG_FILE))
    if (folder / GENERATION_FILE).is_file():
        generation = _read_json(folder / GENERATION_FILE)
        if token_ids(generation.get("eos_token_id")):
            raw["eos_token_id"] = generation["eos_token_id"]
    config = config_from_hf(raw, dtype=dtype)
    for name in QUANTISATION_FILES if weight_scheme(raw) is None else ():
        if (folder / name).is_file():
            check_quantisation({"quantization_config": _quantisation(folder / name)}, name)
    return config


def _quantisation(file: Path) -> Mapping[str, Any]:
    """Return the contents of such a file of a quantisation tool. Weights are quantised if it has any
    entry."""
    raw = _read_json(file)
    inner = raw.get("quantization")
    return inner if isinstance(inner, dict) else raw or {"quant_method": "quantised"}


class StoredWeights(ABC):
    """The tensors of a model's files, by name. A context manager. ``quantised`` is the method of quantised
    weights, None without any."""

    quantised: str | None
    mapped: list[MappedFile]
    """The files whose memory tensors and matrices refer to. Empty if tensors are copies."""

    def __enter__(self) -> StoredWeights:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @abstractmethod
    def close(self) -> None:
        """Close the files."""

    @abstractmethod
    def __contains__(self, name: str) -> bool: ...

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Return the size of all tensors."""

    @abstractmethod
    def account_for(self, names: Set[str], *, unread: Set[str] = frozenset()) -> None:
        """Check that the files have the weights ``names`` in readable forms, and no others except ``unread``
        and known useless ones.

        Raises :class:`ModelError` otherwise: weights that are ignored, or read without their scale, would
        give wrong answers.
        """

    @abstractmethod
    def read(self, name: str, shape: torch.Size | None = None) -> torch.Tensor:
        """Return tensor ``name`` in host memory. Raises :class:`ModelError` if it is missing or not of
        ``shape``."""

    @abstractmethod
    def packed(self, name: str, shape: torch.Size) -> PackedMatrix | None:
        """Return weight ``name`` in its quantised form, or None if it is not quantised. All dimensions of
        ``shape`` except the last are its rows. Raises :class:`ModelError` if the weight is damaged or has
        another shape."""


class Checkpoint(StoredWeights):
    """The tensors of a folder's safetensors files, whole or sharded. Files are opened lazily."""

    def __init__(self, folder: Path, *, mapped: bool = False) -> None:
        """If ``mapped``, tensors are views of the mapped files (:mod:`tierstore_engine.weights_on_disk`)."""
        self._folder = folder
        self._files = _tensor_files(folder)
        self._open: dict[Path, Any] = {}
        self._stack = ExitStack()
        self._mapped = {each: mapped_file(each) for each in set(self._files.values())} if mapped else {}
        self._places: dict[Path, Mapping[str, Any]] = {}
        self.mapped = list(self._mapped.values())
        self._config = _read_json(folder / CONFIG_FILE)
        self._scheme = weight_scheme(self._config)
        self.quantised = None if self._scheme is None else self._scheme.method

    def close(self) -> None:
        self._open.clear()
        self._stack.close()

    def __contains__(self, name: str) -> bool:
        return name in self._files or self._stem(name) is not None

    @property
    def nbytes(self) -> int:
        return sum(file.stat().st_size for file in set(self._files.values()))

    def _stem(self, name: str) -> str | None:
        """Return the common prefix of the tensors of weight ``name``; None if the weight is not quantised."""
        if self._scheme is None:
            return None
        layout = self._scheme.layout
        stem = layout.stem(name)
        codes = stem + layout.codes
        found = codes in self._files and (codes != name or self._dtype(codes) in CODE_DTYPES)
        return stem if found else None

    def _expanded(self, names: Set[str]) -> tuple[set[str], set[str], set[str]]:
        """Return three sets of tensors for the weights ``names``: the tensors of weights that are not
        quantised, those that quantised weights need, and those that quantised weights may have."""
        plain, needed, allowed = set(names), set[str](), set[str]()
        for name in sorted(names):
            stem = self._stem(name)
            if stem is not None and self._scheme is not None:
                layout = self._scheme.layout
                plain.discard(name)
                needed |= {stem + each for each in (layout.codes, *layout.needed)}
                allowed |= {stem + each for each in (*layout.optional, *layout.unread)}
        if self._scheme is not None and not needed:
            raise ModelError(
                f"{self._folder / CONFIG_FILE}: {self._scheme.method} weights are not read: no tensor has "
                "their form"
            )
        return plain, needed, allowed

    def account_for(self, names: Set[str], *, unread: Set[str] = frozenset()) -> None:
        plain, needed, allowed = self._expanded(names)
        self._account_for(plain, needed, unread | allowed)

    def _account_for(self, names: Set[str], codes: Set[str], unread: Set[str]) -> None:
        """Check as :meth:`account_for`. ``codes`` are tensors that need not be in a float dtype."""
        useless = [re.compile(each) for each in unread_tensors(self._config)]
        others = sorted(self._files.keys() - names - codes - unread)
        others = [name for name in others if not any(each.fullmatch(name) for each in useless)]
        for name in sorted(names & self._files.keys()):
            dtype = self._dtype(name)
            if dtype not in _READ_DTYPES:
                raise ModelError(
                    f"{self._files[name]}: tensor {name} is {dtype}, and weights are read in "
                    f"{', '.join(_READ_DTYPES)} only: convert them to bfloat16"
                )
        if others:
            more = f" and {len(others) - 1} more" if len(others) > 1 else ""
            raise ModelError(
                f"{self._files[others[0]]}: tensor {others[0]} ({self._dtype(others[0])}){more} is not part "
                "of the model that config.json describes: the weights are quantised, or this engine does not "
                "compute all of them"
            )
        for name in sorted((names | codes) - self._files.keys()):
            raise self._missing(name)

    def _dtype(self, name: str) -> str:
        file = self._files[name]
        try:
            return str(self._handle(file).get_slice(name).get_dtype())
        except (OSError, SafetensorError) as error:
            raise ModelError(f"{file}: cannot read tensor {name}: {error}") from error

    def read(self, name: str, shape: torch.Size | None = None) -> torch.Tensor:
        file = self._files.get(name)
        if file is None:
            raise self._missing(name)
        try:
            handle = self._handle(file)
            found = tuple(handle.get_slice(name).get_shape())
            if shape is not None and found != tuple(shape):
                raise ModelError(
                    f"{file}: tensor {name} has shape {list(found)}, but config.json asks for {list(shape)}"
                )
            tensor: torch.Tensor = handle.get_tensor(name) if not self.mapped else self._view(file, name)
        except (OSError, SafetensorError) as error:
            raise ModelError(f"{file}: cannot read tensor {name}: {error}") from error
        return tensor

    def _view(self, file: Path, name: str) -> torch.Tensor:
        """Return a tensor as a view of its file."""
        data = self._mapped[file].bytes
        start = 8 + int.from_bytes(bytes(data[:8]), "little")
        if file not in self._places:
            self._places[file] = msgspec.json.decode(bytes(data[8:start]))
        place = self._places[file][name]
        first, stop = place["data_offsets"]
        flat = data[start + first : start + stop]
        try:
            return flat.view(VIEWED_DTYPES[place["dtype"]]).view(place["shape"])
        except (KeyError, RuntimeError) as error:
            raise ModelError(
                f"{file}: tensor {name} ({place['dtype']}) cannot be used where it lies: "
                "leave out --weights-on-disk"
            ) from error

    def named(self, pattern: str) -> list[str]:
        """Return the names of the tensors that match a regular expression as a whole, sorted."""
        return sorted(filter(re.compile(pattern).fullmatch, self._files))

    def packed(self, name: str, shape: torch.Size) -> PackedMatrix | None:
        scheme, stem = self._scheme, self._stem(name)
        if scheme is None or stem is None:
            return None
        layout = scheme.layout
        ends = [
            layout.codes,
            *layout.needed,
            *(each for each in layout.optional if stem + each in self._files),
        ]
        tensors = {end: self.read(stem + end) for end in ends}
        if not self.mapped:
            tensors = {end: tensor.clone() for end, tensor in tensors.items()}
        wanted = (math.prod(shape[:-1]), shape[-1])
        try:
            found = layout.pack(scheme, tensors)
            if found.shape != wanted:
                raise ValueError(f"its shape is {list(found.shape)}, config.json asks for {list(wanted)}")
        except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
            raise ModelError(
                f"{self._files[stem + layout.codes]}: tensor {stem}{layout.codes} has no {scheme.method} "
                f"weights: {str(error).splitlines()[0]}"
            ) from error
        return found

    def _missing(self, name: str) -> ModelError:
        return ModelError(f"{self._folder}: tensor {name} is missing from the checkpoint")

    def _handle(self, file: Path) -> Any:
        if file not in self._open:
            self._open[file] = self._stack.enter_context(safe_open(file, framework="pt", device="cpu"))
        return self._open[file]


def mapped_file(file: Path) -> MappedFile:
    """Map a file of weights. Raises :class:`ModelError`."""
    try:
        return MappedFile(file)
    except (OSError, ValueError) as error:
        raise ModelError(f"cannot map {file}: {error}") from error


def _tensor_files(folder: Path) -> Mapping[str, Path]:
    """Return the file of each tensor."""
    index = folder / INDEX_FILE
    if index.is_file():
        weight_map = _read_json(index).get("weight_map")
        if not isinstance(weight_map, dict):
            raise ModelError(f"{index} has no weight_map")
        files = {str(name): folder / str(file) for name, file in weight_map.items()}
        for file in sorted(set(files.values())):
            if not file.is_file():
                raise ModelError(f"{index} names {file.name}, which is not in the folder")
            files |= {name: file for name in _names_in(file) if name not in files}
        return files
    single = folder / WEIGHTS_FILE
    if not single.is_file():
        raise ModelError(f"{folder} has neither {WEIGHTS_FILE} nor {INDEX_FILE} (only safetensors are read)")
    return dict.fromkeys(_names_in(single), single)


def _names_in(file: Path) -> list[str]:
    try:
        with safe_open(file, framework="pt", device="cpu") as handle:
            return list(handle.keys())
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{file} is not a readable safetensors file: {error}") from error


def _read_json(file: Path) -> Mapping[str, Any]:
    try:
        return read_json(file)
    except SpecError as error:
        raise ModelError(str(error)) from error
