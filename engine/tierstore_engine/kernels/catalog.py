"""The kernels that a model's attention needs: their template arguments and launch parameters.

The numbers are chosen so that every instance compiles without spilling registers for every architecture in
``ARCHITECTURES``, and so that its shared memory fits the smallest of them (99 KiB per block on sm_86 and
sm_89). They have not been tuned on a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass

from tierstore_engine.errors import KernelError
from tierstore_engine.kv_format import KVFormat

FLOATS = KVFormat()

ARCHITECTURES = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")
HEAD_DIMS = (16, 32, 64, 96, 128, 256)
MAX_GROUP = 16
MAX_DELTA = 128
"""The most rows and columns of a matrix with a gated delta rule. Threads keep the rows in registers."""
MAX_MAMBA2 = 256
"""The most rows of a matrix of Mamba-2."""
MAMBA2_COLUMNS = 32
"""Columns per block."""
CONVOLVED_CHANNELS = 256
"""Channels per block."""
MAX_LATENT = 576
"""Numbers of the widest latent: 512 and 64, as in DeepSeek's models."""
SIMT_GROUPS = (1, 2)
"""The sizes of groups of query heads that decode on CUDA cores. An mma instruction has 16 rows, and most rows
are padding if a group has few heads. Still, the mma kernel needs fewer instructions than products on CUDA
cores from about three heads on (counted, not measured)."""

_C_TYPES = {"float16": "__half", "bfloat16": "__nv_bfloat16"}
KERNEL_DTYPES = tuple(_C_TYPES)
_CODES = {"float8_e4m3fn": "E4M3", "float8_e5m2": "E5M2", "int8": "Int8", "int4": "Int4"}
_MMA_ROWS = 16
_DECODE_TILE = 16  # tokens that a warp of a decode kernel computes at a time
_MAMBA2_TILE = 8  # tokens whose data a block has in shared memory


@dataclass(frozen=True, slots=True)
class Instance:
    """One kernel with its template arguments and its block size."""

    file: str
    name: str
    threads: int
    shared_bytes: int = 0


@dataclass(frozen=True, slots=True)
class KernelSet:
    """The kernels for one shape of attention. A prefill block handles ``prefill_rows`` (token, head) pairs.
    If KV is quantised, no kernel rotates keys while it writes them."""

    rope_write: Instance | None
    write: Instance
    decode: Instance
    combine: Instance
    prefill: Instance
    split_prefill: Instance
    combine_chunks: Instance
    prefill_rows: int
    merge: Instance

    def instances(self) -> tuple[Instance, ...]:
        writing = (self.write,) if self.rope_write is None else (self.rope_write, self.write)
        return (
            *writing,
            self.decode,
            self.combine,
            self.prefill,
            self.split_prefill,
            self.combine_chunks,
            self.merge,
        )


PAGE_COPY = Instance("page_copy.cu", "page_copy", 512)

_POINTWISE_THREADS = 256


@dataclass(frozen=True, slots=True)
class PointwiseSet:
    """The kernels for a decoder's operations other than products and attention."""

    add_norm: Instance
    silu_mul: Instance


def pointwise_set(dtype: str) -> PointwiseSet:
    """Return the kernels for ``dtype``, one of ``KERNEL_DTYPES``."""
    arguments = f"<{_C_TYPES[dtype]}, {_POINTWISE_THREADS}>"
    return PointwiseSet(
        Instance("pointwise.cu", f"add_norm{arguments}", _POINTWISE_THREADS, _POINTWISE_THREADS // 32 * 4),
        Instance("pointwise.cu", f"silu_mul{arguments}", _POINTWISE_THREADS),
    )


@dataclass(frozen=True, slots=True)
class ProductKernel:
    """A kernel for products. One block computes ``rows × products`` numbers."""

    instance: Instance
    rows: int
    products: int


@dataclass(frozen=True, slots=True)
class ProductSet:
    """The kernels for products in which a row's bits do not depend on other rows: one for at most
    ``few.rows`` rows, one for more."""

    few: ProductKernel
    many: ProductKernel


def product_set(dtype: str) -> ProductSet:
    """Return the kernels for ``dtype``, one of ``KERNEL_DTYPES``."""
    return ProductSet(_product(dtype, 16, 32, (16, 16), 4), _product(dtype, 64, 128, (32, 64), 3))


def _product(dtype: str, rows: int, products: int, of_warp: tuple[int, int], stages: int) -> ProductKernel:
    threads = rows // of_warp[0] * (products // of_warp[1]) * 32
    shape = f"{rows}, {products}, {of_warp[0]}, {of_warp[1]}, {stages}"
    name = f"multiply_rows<{_C_TYPES[dtype]}, {shape}>"
    return ProductKernel(
        Instance("product.cu", name, threads, stages * (rows + products) * 128),
        rows,
        products,
    )


MOST_PACKED = 16
"""Rows of activations that one product with packed weights computes."""
PACKED_ROWS = 16
"""Rows of the packed matrix that one block of threads computes."""
_PACKED_THREADS = 256
_PACKED_NUMBERS = {**_C_TYPES, "float32": "float"}
_PACKED_FORMATS = {
    "F32": "Plain<Float, 4>",
    "F16": "Plain<Half, 2>",
    "BF16": "Plain<BFloat, 2>",
    "float32": "Plain<Float, 4>",
    "float16": "Plain<Half, 2>",
    "bfloat16": "Plain<BFloat, 2>",
    "Q4_0": "Blocks32<false, false, 8>",
    "Q4_1": "Blocks32<true, false, 0>",
    "Q5_0": "Blocks32<false, true, 16>",
    "Q5_1": "Blocks32<true, true, 0>",
    "Q8_0": "Q8_0",
    "Q4_K": "BlocksK<false>",
    "Q5_K": "BlocksK<true>",
    "Q6_K": "Q6_K",
    "fp8_e4m3": "Plain<FiniteFloat8, 1>",
    "fp8_e5m2": "Plain<WideFloat8, 1>",
    "int8": "Plain<SignedByte, 1>",
    "uint8": "Plain<UnsignedByte, 1>",
    "uint4": "Nibbles<false>",
    "mxfp4": "Nibbles<true>",
}


@dataclass(frozen=True, slots=True)
class PackedSet:
    """The kernels for weights in one format: their numbers, and products with few rows."""

    unpack: Instance
    multiply: Instance


def packed_set(dtype: str, form: str) -> PackedSet:
    """Return the kernels for activations in ``dtype`` and weights in the format of this name. Raises
    :class:`KernelError` for another dtype."""
    if dtype not in _PACKED_NUMBERS:
        raise KernelError(
            f"the CUDA backend has no products with quantised weights in {dtype}: choose another dtype"
        )
    number, read = _PACKED_NUMBERS[dtype], _PACKED_FORMATS[form]
    shared = MOST_PACKED * _PACKED_THREADS * 4
    return PackedSet(
        Instance("packed.cu", f"unpack<{number}, {read}, {_PACKED_THREADS}>", _PACKED_THREADS),
        Instance(
            "packed.cu", f"multiply_packed<{number}, {read}, {PACKED_ROWS // 8}>", _PACKED_THREADS, shared
        ),
    )


def kernel_set(
    *,
    dtype: str,
    head_dim: int,
    group: int,
    page_tokens: int,
    kv: KVFormat = FLOATS,
    capped: bool = False,
) -> KernelSet:
    """Return the kernels for pages of ``page_tokens`` tokens and ``group`` query heads per KV head. Scores
    are ``capped`` or not.

    Raises :class:`KernelError` for shapes that the kernels do not compute.
    """
    _check_shape(dtype, page_tokens)
    if head_dim not in HEAD_DIMS:
        raise KernelError(f"the CUDA backend has no kernels for head_dim {head_dim} (it has {HEAD_DIMS})")
    if not 1 <= group <= MAX_GROUP:
        raise KernelError(f"the CUDA backend takes up to {MAX_GROUP} query heads per KV head, got {group}")
    number = _C_TYPES[dtype]
    codes = f", Codes<{', '.join(_CODES[code.dtype] for code in kv.codes)}>" if kv.quantised else ""
    options = f"{codes or ', Floats'}, true" if capped else codes
    prefill, prefill_rows = _prefill(number, head_dim, page_tokens, options, capped=capped, split=False)
    split_prefill, _ = _prefill(number, head_dim, page_tokens, options, capped=capped, split=True)
    page = f"{number}, {head_dim}, {page_tokens}"
    rotating = Instance("rope_write.cu", f"rope_write<{page}, true>", 256)
    plain = Instance("rope_write.cu", f"rope_write<{page}, false>", 256)
    quantising = Instance("quantise_write.cu", f"quantise_write<{page}{codes}>", 256)
    return KernelSet(
        rope_write=None if codes else rotating,
        write=quantising if codes else plain,
        decode=_decode(number, head_dim, group, page_tokens, options),
        combine=Instance("merge.cu", f"combine_splits<{number}, {head_dim}, {page_tokens}>", head_dim),
        prefill=prefill,
        split_prefill=split_prefill,
        combine_chunks=Instance("merge.cu", f"combine_chunks<{number}, {head_dim}>", head_dim),
        prefill_rows=prefill_rows,
        merge=Instance("merge.cu", f"merge_states<{number}, {head_dim}>", head_dim),
    )


@dataclass(frozen=True, slots=True)
class LatentSet:
    """The kernels for latents. One block of ``decode`` handles 16 heads of a token."""

    write: Instance
    decode: Instance
    combine: Instance
    merge: Instance

    def instances(self) -> tuple[Instance, ...]:
        return self.write, self.decode, self.combine, self.merge


def latent_set(*, dtype: str, width: int, rank: int, page_tokens: int) -> LatentSet:
    """Return the kernels for pages of ``page_tokens`` latents of ``width`` numbers. The first ``rank``
    numbers are values. Raises :class:`KernelError` for shapes that the kernels do not compute."""
    _check_shape(dtype, page_tokens)
    if rank % _MMA_ROWS or width % 8 or not rank <= width <= MAX_LATENT:
        raise KernelError(
            f"the CUDA backend has no kernels for latents of {rank} + {width - rank} numbers (it takes "
            f"multiples of 16 and of 8, up to {MAX_LATENT} together)"
        )
    number, warps, tile = _C_TYPES[dtype], 4, 32 if page_tokens % 32 == 0 else 16
    padded = -(-width // _MMA_ROWS) * _MMA_ROWS
    shared = ((_MMA_ROWS + 2 * tile) * padded + _MMA_ROWS * tile) * 2 + 2 * warps * _MMA_ROWS * 4
    name = f"decode_mla<{number}, {width}, {rank}, {page_tokens}, {tile}, {warps}>"
    return LatentSet(
        write=Instance("rope_write.cu", f"rope_write<{number}, {width}, {page_tokens}, false>", 256),
        decode=Instance("decode_mla.cu", name, warps * 32, shared),
        combine=Instance("merge.cu", f"combine_splits<{number}, {rank}, {page_tokens}>", rank),
        merge=Instance("merge.cu", f"merge_states<{number}, {rank}>", rank),
    )


@dataclass(frozen=True, slots=True)
class StateSet:
    """The kernels for recurrent states under one rule."""

    convolve: Instance
    rule: Instance


def delta_set(*, dtype: str, key_dim: int, value_dim: int, conv_width: int) -> StateSet:
    """Return the kernels for the gated delta rule over matrices of ``key_dim × value_dim``. Raises
    :class:`KernelError` for shapes that they do not compute."""
    convolve = _convolve(dtype, conv_width)
    if key_dim % 4 or key_dim > MAX_DELTA or value_dim > MAX_DELTA:
        raise KernelError(
            f"the CUDA backend has no kernels for states of {key_dim} × {value_dim} numbers under a gated "
            f"delta rule (it takes up to {MAX_DELTA} × {MAX_DELTA}, rows by fours)"
        )
    threads = -(-value_dim // 8) * 32
    rule = f"delta_rule<{_C_TYPES[dtype]}, {key_dim}, {value_dim}, {threads}>"
    return StateSet(convolve, Instance("delta.cu", rule, threads, 2 * key_dim * 4))


def mamba2_set(*, dtype: str, state_dim: int, conv_width: int) -> StateSet:
    """Return the kernels for Mamba-2 over matrices of ``state_dim`` rows and any number of columns. Raises
    :class:`KernelError` for shapes that they do not compute."""
    convolve = _convolve(dtype, conv_width)
    if state_dim % 4 or state_dim > MAX_MAMBA2:
        raise KernelError(
            f"the CUDA backend has no kernels for Mamba-2 states of {state_dim} rows (it takes up to "
            f"{MAX_MAMBA2}, by fours)"
        )
    shared = _MAMBA2_TILE * (2 * state_dim + MAMBA2_COLUMNS + 2) * 4
    rule = f"mamba2_rule<{_C_TYPES[dtype]}, {state_dim}>"
    return StateSet(convolve, Instance("mamba2.cu", rule, 4 * MAMBA2_COLUMNS, shared))


def _convolve(dtype: str, width: int) -> Instance:
    _check_shape(dtype, _DECODE_TILE)
    if not 2 <= width <= 8:
        raise KernelError(
            f"the CUDA backend has no kernels for states behind a convolution over {width} tokens (it takes "
            "2 to 8)"
        )
    return Instance("convolve.cu", f"convolve<{_C_TYPES[dtype]}, {width}>", CONVOLVED_CHANNELS)


def _check_shape(dtype: str, page_tokens: int) -> None:
    if dtype not in _C_TYPES:
        raise KernelError(
            f"the CUDA backend computes {' and '.join(_C_TYPES)}, not {dtype}: choose another dtype"
        )
    if page_tokens % _DECODE_TILE:
        raise KernelError(f"the CUDA backend needs chunk_tokens to be a multiple of 16, got {page_tokens}")


def _decode(number: str, head_dim: int, group: int, page_tokens: int, options: str) -> Instance:
    warps = 2 if head_dim > 128 else 4
    stages = 3 if head_dim > 96 else 4
    ring = warps * stages * 2 * _DECODE_TILE * head_dim * 2
    simt = group in SIMT_GROUPS
    states = warps * (group if simt else _MMA_ROWS) * (head_dim + 2) * 4
    shape = f"{group}, {warps}, {stages}" if simt else f"{warps}, {stages}"
    kernel = "decode_simt" if simt else "decode_mma"
    name = f"{kernel}<{number}, {head_dim}, {page_tokens}, {shape}{options}>"
    return Instance(f"{kernel}.cu", name, warps * 32, max(ring, states))


def _prefill(
    number: str, head_dim: int, page_tokens: int, options: str, *, capped: bool, split: bool
) -> tuple[Instance, int]:
    # In a warp, two strips of 16 rows share each fragment of K and V. With a head_dim of 256, and of 96 with
    # capped scores, there are registers for one strip only. Longer tiles need fewer barriers. From a head_dim
    # of 96 on, the registers have room for 32 tokens only.
    warps, strips = 4, 2 if head_dim <= (64 if capped else 128) else 1
    tile = 64 if head_dim <= 64 else 32
    while page_tokens % tile:
        tile //= 2
    rows = warps * strips * 16
    shape = f"{head_dim}, {page_tokens}, {tile}, {warps}, {strips}, {str(split).lower()}"
    name = f"prefill<{number}, {shape}{options}>"
    return Instance("prefill.cu", name, warps * 32, (rows + 4 * tile) * head_dim * 2), rows
