"""Readers of quantised safetensors: ``quantization_config``, and the tensors that make up one matrix.

A :class:`WeightScheme` names the tensors of a matrix in the checkpoint, beside facts such as bits and groups.
Each layout has one small function that makes a :class:`~tierstore_engine.quantised.PackedMatrix` of these
tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from tierstore_engine.config_fields import Raw
from tierstore_engine.errors import ModelError
from tierstore_engine.quantised import PackedMatrix
from tierstore_engine.weight_formats import (
    FP4,
    FP8_E4M3,
    FP8_E5M2,
    INT8,
    UINT4,
    UINT8,
    WeightFormat,
)

_WHERE = "config.json: quantization_config"
_CODES = {torch.float8_e4m3fn: FP8_E4M3, torch.float8_e5m2: FP8_E5M2, torch.int8: INT8}
CODE_DTYPES = ("F8_E4M3", "F8_E5M2", "I8")


@dataclass(frozen=True, slots=True)
class WeightScheme:
    """How a checkpoint's weights are quantised. One scale applies to ``group`` columns (None: all columns)
    and to ``block_rows`` rows. ``zero_shift`` is added to stored zeros."""

    method: str
    layout: TensorLayout
    bits: int = 8
    group: int | None = None
    block_rows: int = 1
    zero_shift: int = 0


@dataclass(frozen=True, slots=True)
class TensorLayout:
    """The tensors of a matrix, by the ends of their names. ``codes`` marks a quantised matrix. Tensors in
    ``unread`` are not needed, such as scales of activations."""

    codes: str
    needed: tuple[str, ...]
    optional: tuple[str, ...]
    unread: tuple[str, ...]
    pack: Callable[[WeightScheme, Mapping[str, torch.Tensor]], PackedMatrix]

    def stem(self, name: str) -> str:
        """Return the common prefix of the tensors of weight ``name``."""
        return name.removesuffix("weight") if name.endswith(".weight") else f"{name}_"


def read_scheme(value: Any) -> WeightScheme:
    """Return the scheme of a ``quantization_config``. Raises :class:`ModelError` for a scheme that is not
    read, with its name."""
    given = value if isinstance(value, Mapping) else {}
    method = str(given.get("quant_method") or given.get("quant_algo") or "quantised").lower()
    reader = _READERS.get(method)
    if reader is None:
        raise ModelError(f"config.json: {method} weights are not read: convert them to bfloat16")
    try:
        return reader(given)
    except (AttributeError, TypeError) as error:
        raise ModelError(
            f"{_WHERE}: {method} weights are not read: a field is of a wrong kind: {error}"
        ) from error


def _positive(raw: Raw, name: str) -> int:
    value = raw.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ModelError(f"{_WHERE}.{name} must be a positive number, got {value!r}")
    return value


def _group(value: Any) -> int | None:
    """Return the number of columns in a group; -1 and null mean all columns."""
    if value is None or value == -1:
        return None
    return _positive({"group_size": value}, "group_size")


def _expect(raw: Raw, name: str, known: tuple[Any, ...], method: str) -> Any:
    value = raw.get(name, known[0])
    value = value.lower() if isinstance(value, str) else value
    if value not in known:
        raise ModelError(
            f"{_WHERE}: {method} weights with {name} {value!r} are not read (only "
            f"{' and '.join(map(str, known))}): convert them to bfloat16"
        )
    return value


def _absent(raw: Raw, name: str, method: str) -> None:
    if raw.get(name):
        raise ModelError(f"{_WHERE}: {method} weights with {name} are not read: convert them to bfloat16")


def _blocks_of(value: Any) -> tuple[int, int | None]:
    """Return the number of rows and columns to which a scale applies. If the scheme names no block, this is
    one row."""
    if value is None:
        return 1, None
    if not isinstance(value, list) or len(value) != 2 or any(type(each) is not int for each in value):
        raise ModelError(f"{_WHERE}: a block has two sizes, got {value!r}")
    rows, columns = value
    return _positive({"block": rows}, "block"), _positive({"block": columns}, "block")


def _fp8(raw: Raw) -> WeightScheme:
    _expect(raw, "fmt", ("e4m3", None), "fp8")
    rows, columns = _blocks_of(raw.get("weight_block_size"))
    return WeightScheme("fp8", _SCALED, group=columns, block_rows=rows)


def _fbgemm(_: Raw) -> WeightScheme:
    return WeightScheme("fbgemm_fp8", _SCALED)


def _gptq(raw: Raw) -> WeightScheme:
    _absent(raw, "dynamic", "gptq")
    if "bits" not in raw:
        raise ModelError(f"{_WHERE}.bits is missing: gptq weights are not read without it")
    bits = _expect(raw, "bits", (4, 8), "gptq")
    written = _expect(raw, "checkpoint_format", ("gptq", "gptq_v2"), "gptq")
    group = _group(raw.get("group_size"))
    return WeightScheme("gptq", _GPTQ, bits, group, zero_shift=0 if written == "gptq_v2" else 1)


def _awq(raw: Raw) -> WeightScheme:
    _expect(raw, "version", ("gemm",), "awq")
    if "bits" not in raw:
        raise ModelError(f"{_WHERE}.bits is missing: awq weights are not read without it")
    return WeightScheme("awq", _AWQ, _expect(raw, "bits", (4,), "awq"), _group(raw.get("group_size")))


def _mxfp4(_: Raw) -> WeightScheme:
    return WeightScheme("mxfp4", _MXFP4, 4, 32)


def _compressed_tensors(raw: Raw) -> WeightScheme:
    name = "compressed-tensors"
    _absent(raw, "transform_config", name)
    if (raw.get("sparsity_config") or {}).get("format", "dense") != "dense":
        raise ModelError(f"{_WHERE}: {name} weights with sparsity are not read: convert them to bfloat16")
    groups = raw.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise ModelError(f"{_WHERE}.config_groups is missing: {name} weights are not read without it")
    schemes = {_compressed_group(raw, each) for each in groups.values()}
    if len(schemes) != 1:
        raise ModelError(f"{_WHERE}: {name} weights of several kinds are not read: convert them to bfloat16")
    [scheme] = schemes
    return scheme


def _compressed_group(raw: Raw, group: Any) -> WeightScheme:
    name = "compressed-tensors"
    given = group.get("weights") if isinstance(group, Mapping) else None
    if not isinstance(given, Mapping):
        raise ModelError(f"{_WHERE}: {name} weights are not read: a group of config_groups has no weights")
    known = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized")
    written = _expect({"format": group.get("format") or raw.get("format")}, "format", known, name)
    packed = written == "pack-quantized"
    strategy = _expect(given, "strategy", ("tensor", "channel", "group", "block"), name)
    kind = _expect(given, "type", ("int", "float"), name)
    bits = _expect(given, "num_bits", (4, 8) if packed else (8,), name)
    if packed and kind != "int":
        raise ModelError(
            f"{_WHERE}: {name} weights with packed floats are not read: convert them to bfloat16"
        )
    rows, columns = _blocks_of(given.get("block_structure")) if strategy == "block" else (1, None)
    if strategy == "group":
        columns = _positive(given, "group_size")
    return WeightScheme(f"{name} {written}", _PACKED if packed else _SCALED, bits, columns, rows)


_READERS: Mapping[str, Callable[[Raw], WeightScheme]] = {
    "awq": _awq,
    "compressed-tensors": _compressed_tensors,
    "fbgemm_fp8": _fbgemm,
    "fp8": _fp8,
    "gptq": _gptq,
    "mxfp4": _mxfp4,
}


# -- one function for each layout ----------------------------------------------------------------------


def _matrix(
    scheme: WeightScheme,
    codes: tuple[WeightFormat, torch.Tensor],
    scales: torch.Tensor,
    zeros: torch.Tensor | None = None,
    groups: torch.Tensor | None = None,
) -> PackedMatrix:
    """Return the matrix, after a check that there is a scale for each block. ``groups`` has the group of each
    column if groups are not in order. Raises :class:`ValueError` otherwise."""
    form, packed = codes
    rows, columns = PackedMatrix(form, packed).shape
    width = scheme.group or columns
    block_rows = rows if scales.numel() == 1 else scheme.block_rows
    if scales.ndim < 2:
        scales = scales.reshape(-1, 1)
        zeros = None if zeros is None else zeros.reshape(-1, 1)
    wanted = (-(-rows // block_rows), -(-columns // width) if scales.shape[-1] > 1 else 1)
    for table in (scales, zeros):
        if table is not None and tuple(table.shape) != wanted:
            raise ValueError(f"scales or zeros have shape {list(table.shape)}, expected {list(wanted)}")
    if scales.shape[-1] == 1 and scales.numel() > 1 and width < columns:
        raise ValueError(f"one scale for a row, expected one for each {width} columns")
    alike = columns if scales.shape[-1] == 1 else width
    if groups is not None and torch.equal(groups.long(), torch.arange(columns) // alike):
        groups = None
    inside = groups is None or bool(((groups >= 0) & (groups < wanted[1])).all())
    if not inside or (groups is not None and len(groups) != columns):
        raise ValueError("g_idx names groups that have no scales")
    groups = None if groups is None else groups.long()
    return PackedMatrix(form, packed, scales, zeros, groups, alike, block_rows)


def _scaled(scheme: WeightScheme, tensors: Mapping[str, torch.Tensor]) -> PackedMatrix:
    """Read numbers of 8 bits, whose scales are in another tensor."""
    codes = tensors["weight"]
    scales = tensors.get("weight_scale", tensors.get("weight_scale_inv"))
    if scales is None:
        raise ValueError("there is no weight_scale")
    zeros = tensors.get("weight_zero_point")
    zeros = None if zeros is None else zeros.reshape(scales.shape)
    return _matrix(scheme, (_CODES[codes.dtype], codes.view(torch.uint8)), scales, zeros)


def _bytes_of(words: torch.Tensor) -> torch.Tensor:
    """Return int32 ``[rows, words]`` as uint8 ``[rows, bytes]``, the lowest byte of a word first."""
    return words.contiguous().view(torch.uint8)


def _unpacked(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Return the numbers that are packed in int32 ``[rows, words]`` as uint8, the lowest bits of a word
    first."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    return (words.unsqueeze(-1) >> shifts & (1 << bits) - 1).flatten(-2).to(torch.uint8)


def _gptq_matrix(scheme: WeightScheme, tensors: Mapping[str, torch.Tensor]) -> PackedMatrix:
    """Read a matrix whose words pack numbers of consecutive inputs. Stored zeros are 1 too small in the first
    version of the format."""
    codes = _bytes_of(tensors["qweight"].T)
    zeros = _unpacked(tensors["qzeros"], scheme.bits).to(torch.int16) + scheme.zero_shift
    scales = tensors["scales"].T.contiguous()
    form = UINT4 if scheme.bits == 4 else UINT8
    return _matrix(scheme, (form, codes), scales, zeros.T.contiguous(), tensors.get("g_idx"))


_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)  # the place in a word of each of the eight outputs


def _awq_matrix(scheme: WeightScheme, tensors: Mapping[str, torch.Tensor]) -> PackedMatrix:
    """Read a matrix whose words pack numbers of eight outputs in interleaved order."""

    def outputs(words: torch.Tensor) -> torch.Tensor:
        by_word = _unpacked(words, 4).view(len(words), -1, 8)
        return by_word[..., _AWQ_PLACES].flatten(-2).T.contiguous()

    codes = outputs(tensors["qweight"])
    codes = codes[:, 0::2] | codes[:, 1::2] << 4
    return _matrix(scheme, (UINT4, codes), tensors["scales"].T.contiguous(), outputs(tensors["qzeros"]))


def _packed_matrix(scheme: WeightScheme, tensors: Mapping[str, torch.Tensor]) -> PackedMatrix:
    """Read a matrix whose words pack numbers of consecutive inputs. Zeros are packed along the outputs, or
    are signed numbers."""
    form = UINT4 if scheme.bits == 4 else UINT8
    rows, columns = map(int, tensors["weight_shape"].tolist())
    codes = _bytes_of(tensors["weight_packed"])[:, : -(-columns // form.block)].contiguous()
    scales, zeros, groups = (
        tensors.get(name) for name in ("weight_scale", "weight_zero_point", "weight_g_idx")
    )
    assert scales is not None
    if zeros is not None and zeros.dtype == torch.int32:
        zeros = _unpacked(zeros.T.contiguous(), scheme.bits).T[:rows].contiguous()
    elif zeros is not None:
        zeros = zeros + form.zero
    if groups is not None and int(groups.min()) < 0:  # tools write this field and do not use it
        groups = None
    return _matrix(scheme, (form, codes), scales, zeros, groups)


def _mxfp4_matrix(scheme: WeightScheme, tensors: Mapping[str, torch.Tensor]) -> PackedMatrix:
    """Read the matrices of all experts. A scale is a power of two."""
    codes, exponents = tensors["blocks"], tensors["scales"]
    codes = codes.reshape(-1, codes.shape[-2] * codes.shape[-1])
    # The exponent of bfloat16 has the same 8 bits. The value 0 means 2^-127, which is below the normal range
    # of bfloat16.
    scales = (exponents.to(torch.int16) << 7).masked_fill(exponents == 0, 1 << 6).view(torch.bfloat16)
    return _matrix(scheme, (FP4, codes), scales.reshape(len(codes), -1))


_ACTIVATIONS = ("input_scale", "activation_scale", "input_scale_ub", "input_zero_point", "output_scale")
_SCALED = TensorLayout(
    "weight", (), ("weight_scale", "weight_scale_inv", "weight_zero_point"), _ACTIVATIONS, _scaled
)
_GPTQ = TensorLayout("qweight", ("qzeros", "scales"), ("g_idx",), (), _gptq_matrix)
_AWQ = TensorLayout("qweight", ("qzeros", "scales"), (), (), _awq_matrix)
_PACKED = TensorLayout(
    "weight_packed",
    ("weight_scale", "weight_shape"),
    ("weight_zero_point", "weight_g_idx"),
    _ACTIVATIONS,
    _packed_matrix,
)
_MXFP4 = TensorLayout("blocks", ("scales",), (), (), _mxfp4_matrix)
