"""Read a model's configuration and its packed weights from a GGUF file, the format of llama.cpp.

The metadata is converted to the fields of a ``config.json``, which :mod:`~tierstore_engine.families` reads.
Unknown keys of the metadata are refused, because they could change what the model computes.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Mapping, Set
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tierstore.gguf import CONFIG_FIELDS, GGUFHeader, config_fields
from tierstore.spec import positive
from tierstore_engine.checkpoint import StoredWeights, mapped_file
from tierstore_engine.config import ModelConfig, RopeConfig, TensorNames
from tierstore_engine.errors import ModelError
from tierstore_engine.families import config_from_hf
from tierstore_engine.quantised import PackedMatrix
from tierstore_engine.rope import inverse_frequencies
from tierstore_engine.weight_formats import GGUF_FORMATS

_FREQUENCIES = "rope_freqs.weight"
_LAYER_NAMES = (
    ("model.embed_tokens", "token_embd"),
    ("model.layers.", "blk."),
    ("model.norm", "output_norm"),
    ("lm_head", "output"),
    ("self_attn.q_proj", "attn_q"),
    ("self_attn.k_proj", "attn_k"),
    ("self_attn.v_proj", "attn_v"),
    ("self_attn.o_proj", "attn_output"),
    ("self_attn.q_norm", "attn_q_norm"),
    ("self_attn.k_norm", "attn_k_norm"),
    ("mlp.gate_proj", "ffn_gate"),
    ("mlp.up_proj", "ffn_up"),
    ("mlp.down_proj", "ffn_down"),
    ("input_layernorm", "attn_norm"),
)
_LLAMA_NAMES = TensorNames(renamed=(*_LAYER_NAMES, ("post_attention_layernorm", "ffn_norm")))
_GEMMA3_NAMES = TensorNames(
    mlp_norm="pre_feedforward_layernorm",
    renamed=(
        *_LAYER_NAMES,
        ("post_attention_layernorm", "post_attention_norm"),
        ("pre_feedforward_layernorm", "ffn_norm"),
        ("post_feedforward_layernorm", "post_ffw_norm"),
    ),
)
_CHECKED = ("attention.value_length", "rope.dimension_count")  # must be equal to attention.key_length
_ROPE = ("rope.scaling.type", "rope.scaling.factor")
_UNREAD = ("vocab_size",)  # the number of rows of the embeddings is used instead
_FORMS = dict(enumerate(["F32", "F16", "Q4_0", "Q4_1", "Q4_2", "Q4_3", "Q5_0", "Q5_1", "Q8_0", "Q8_1"]))
_FORMS |= {10: "Q2_K", 11: "Q3_K", 12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 15: "Q8_K"}
_FORMS |= {16: "IQ2_XXS", 20: "IQ4_NL", 23: "IQ4_XS", 30: "BF16", 39: "MXFP4"}


@dataclass(frozen=True)
class GGUFTensor:
    """A tensor of a GGUF file: the name of its format, its shape, and its bytes, uint8 ``[rows, bytes]``.
    ``data`` is empty for an unsupported format."""

    form: str
    shape: tuple[int, ...]
    data: np.ndarray[Any, np.dtype[np.uint8]]


@dataclass(frozen=True)
class GGUFContents:
    """The metadata and the tensors of a GGUF file. ``fields`` has no lists, such as the vocabulary."""

    fields: Mapping[str, Any]
    tensors: Mapping[str, GGUFTensor]


def read_gguf(file: Path) -> GGUFContents:
    """Return the contents of a GGUF file. Tensors are memory-mapped, not read.

    Raises :class:`ModelError` for a file that is damaged, incomplete or not GGUF.
    """
    try:
        with file.open("rb") as opened:
            return _contents(mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ))
    except struct.error as error:
        raise ModelError(f"{file} is not a readable GGUF file: it ends within its metadata") from error
    except (OSError, OverflowError, ValueError) as error:
        raise ModelError(f"{file} is not a readable GGUF file: {error}") from error


def _contents(data: mmap.mmap) -> GGUFContents:
    header = GGUFHeader(data)
    read = dict(header.fields())
    placed = [_placed(header) for _ in range(header.tensors)]
    align = read.get("general.alignment", 32)
    if not isinstance(align, int) or align < 1:
        raise ValueError(f"its alignment is {align!r}")
    start = -(-header.at // align) * align
    flat = np.frombuffer(data, np.uint8)
    found = {name: _tensor(flat, start + at, name, shape, form) for name, shape, form, at in placed}
    return GGUFContents(read, found)


def _placed(header: GGUFHeader) -> tuple[str, tuple[int, ...], str, int]:
    """Return the name of the next tensor, its shape, its format, and the offset of its bytes."""
    name, dimensions = header.text(), header.number("I")
    if not 1 <= dimensions <= 4:
        raise ValueError(f"tensor {name} has {dimensions} dimensions")
    shape = tuple(header.number("Q") for _ in range(dimensions))[::-1]
    kind = header.number("I")
    return name, shape, _FORMS.get(kind, f"of format {kind}"), header.number("Q")


def _tensor(
    flat: np.ndarray[Any, np.dtype[np.uint8]], at: int, name: str, shape: tuple[int, ...], form: str
) -> GGUFTensor:
    """Return the tensor whose bytes begin at ``at``."""
    rows, columns = math.prod(shape[:-1]), shape[-1]
    known = GGUF_FORMATS.get(form)
    if known is None:
        return GGUFTensor(form, shape, flat[:0])
    if columns % known.block or not rows or not columns:
        raise ValueError(f"tensor {name} has shape {list(shape)}, which {form} cannot pack")
    nbytes = rows * columns // known.block * known.block_bytes
    if at + nbytes > len(flat):
        raise ValueError(f"it ends within tensor {name}")
    return GGUFTensor(form, shape, flat[at : at + nbytes].reshape(rows, -1))


def config_from_gguf(file: Path, *, dtype: str | None = None) -> ModelConfig:
    """Return the configuration of the model. The default of ``dtype`` is float32, as in llama.cpp on a CPU.

    Raises :class:`ModelError` for an unsupported architecture and for unknown metadata.
    """
    contents = read_gguf(file)
    try:
        raw = dict(config_fields(contents.fields))
    except ValueError as error:
        raise ModelError(f"{file}: {error}") from error
    architecture = contents.fields["general.architecture"]
    own = {
        name.removeprefix(f"{architecture}."): value
        for name, value in contents.fields.items()
        if name.startswith(f"{architecture}.")
    }
    if unknown := sorted(own.keys() - CONFIG_FIELDS.keys() - {*_CHECKED, *_ROPE, *_UNREAD}):
        raise ModelError(f"{file}: {architecture}.{unknown[0]} is not read from GGUF")
    raw |= _fields(file, contents, own, raw)
    if architecture == "gemma3":
        return _gemma3(file, raw, dtype)
    raw["architectures"] = ["LlamaForCausalLM"]
    config = _config(file, raw, dtype)
    # In GGUF, RoPE rotates each pair of neighbouring rows of Q and of K.
    rope = replace(_with_frequencies(file, config, contents), interleaved=True)
    return replace(config, rope=rope, names=_LLAMA_NAMES)


def _config(file: Path, raw: Mapping[str, Any], dtype: str | None) -> ModelConfig:
    try:
        return config_from_hf(raw, dtype=dtype)
    except ModelError as error:
        raise ModelError(f"{file}: {str(error).removeprefix('config.json: ')}") from error


def _fields(
    file: Path, contents: GGUFContents, own: Mapping[str, Any], read: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the fields of a ``config.json`` that ``read`` lacks, because they follow from tensors or from
    several keys."""
    embeddings = contents.tensors.get("token_embd.weight")
    if embeddings is None or len(embeddings.shape) != 2:
        raise ModelError(f"{file}: tensor token_embd.weight is missing")
    raw: dict[str, Any] = {"vocab_size": embeddings.shape[0], "rope_theta": read.get("rope_theta", 10000.0)}
    raw["tie_word_embeddings"] = "output.weight" not in contents.tensors
    ends = (contents.fields.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot"))
    raw["eos_token_id"] = sorted({int(each) for each in ends if each is not None})
    head_dim = read.get("head_dim")
    for name in _CHECKED:
        if own.get(name, head_dim) != head_dim:
            raise ModelError(f"{file}: {name} must be attention.key_length, {head_dim!r}, got {own[name]!r}")
    kind = own.get("rope.scaling.type", "none")
    if kind not in ("none", "linear"):
        raise ModelError(f"{file}: RoPE of type {kind!r} is not read from GGUF")
    if kind == "linear":
        raw["rope_scaling"] = {"rope_type": "linear", "factor": own.get("rope.scaling.factor")}
    return raw


def _with_frequencies(file: Path, config: ModelConfig, contents: GGUFContents) -> RopeConfig:
    """Return the RoPE of ``config``, with the scaling of Llama 3 if the file has a tensor of frequency
    factors. The largest of these is the ``factor`` of the scaling."""
    tensor = contents.tensors.get(_FREQUENCIES)
    if tensor is None:
        return config.rope
    factors = torch.from_numpy(tensor.data.copy()).view(torch.float32).flatten()
    rope = replace(config.rope, kind="llama3", factor=float(factors.max()))
    plain = inverse_frequencies(config.rope, config.head_dim)
    if len(factors) != len(plain) or not torch.allclose(
        plain / factors, inverse_frequencies(rope, config.head_dim)
    ):
        raise ModelError(f"{file}: {_FREQUENCIES} is not Llama 3's RoPE scaling, the only one supported")
    return rope


def _gemma3(file: Path, raw: dict[str, Any], dtype: str | None) -> ModelConfig:
    """Read a Gemma 3 model. The file has its norm weights with 1 added."""
    scalar = raw.get("head_dim")
    if raw.get("num_hidden_layers") == 62:  # the model of 27B parameters scales queries differently
        scalar = positive(raw, "hidden_size") // positive(raw, "num_attention_heads")
    raw |= {"architectures": ["Gemma3ForCausalLM"], "query_pre_attn_scalar": scalar}
    raw["rope_local_base_freq"] = 10000.0
    return replace(_config(file, raw, dtype), centred_norms=False, names=_GEMMA3_NAMES)


class GGUFWeights(StoredWeights):
    quantised = "GGUF"

    def __init__(self, file: Path, *, mapped: bool = False) -> None:
        """``mapped``: matrices are views of the file (:mod:`tierstore_engine.weights_on_disk`)."""
        self._file = file
        self.mapped = [mapped_file(file)] if mapped else []
        self._tensors = read_gguf(file).tensors if not mapped else _contents(self.mapped[0].data).tensors

    def close(self) -> None:
        """Do nothing: the file stays mapped until the last of its tensors is freed."""

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    @property
    def nbytes(self) -> int:
        return sum(each.data.nbytes for each in self._tensors.values())

    def account_for(self, names: Set[str], *, unread: Set[str] = frozenset()) -> None:
        for name in sorted(names - self._tensors.keys()):
            raise ModelError(f"{self._file}: tensor {name} is missing")
        for name in sorted(self._tensors.keys() - names - unread - {_FREQUENCIES}):
            raise ModelError(f"{self._file}: tensor {name} is not part of a model of this architecture")
        for name in sorted(names):
            self._format(name)

    def _format(self, name: str) -> str:
        form = self._tensors[name].form
        if form not in GGUF_FORMATS:
            raise ModelError(
                f"{self._file}: tensor {name} has the unsupported format {form} (supported: "
                f"{', '.join(GGUF_FORMATS)})"
            )
        return form

    def read(self, name: str, shape: torch.Size | None = None) -> torch.Tensor:
        packed = self._matrix(name, shape)
        return packed.expanded().view(self._tensors[name].shape)

    def packed(self, name: str, shape: torch.Size) -> PackedMatrix | None:
        return self._matrix(name, shape) if len(shape) > 1 else None

    def _matrix(self, name: str, shape: torch.Size | None) -> PackedMatrix:
        tensor = self._tensors.get(name)
        if tensor is None:
            raise ModelError(f"{self._file}: tensor {name} is missing")
        if shape is not None and tensor.shape != tuple(shape):
            raise ModelError(
                f"{self._file}: tensor {name} has shape {list(tensor.shape)}, but by the metadata it should "
                f"have {list(shape)}"
            )
        data = tensor.data if self.mapped else tensor.data.copy()
        return PackedMatrix(GGUF_FORMATS[self._format(name)], torch.from_numpy(data))
