# ruff: noqa: E501  # the texts to change are as long as they are
"""Bugs to plant into the kernels, one at a time: each is a change of text that compiles and must not survive.

They are the mistakes that kernels of this kind invite. A new kernel, or a new trick in one, deserves its own here.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Bug:
    """``old`` occurs ``times`` times in ``file``; with ``new`` in its place the kernel is wrong."""

    name: str
    file: str
    old: str
    new: str
    times: int = 1


PREFILL = [
    Bug("barrier missing", "prefill.cu", "__syncthreads();  // this tile", "// this tile"),
    Bug(
        "wait lets one group pass",
        "prefill.cu",
        "cp_async_wait<0>();\n    __syncthreads()",
        "cp_async_wait<1>();\n    __syncthreads()",
    ),
    Bug("one stage instead of two", "prefill.cu", "token / TILE % 2", "0", times=2),
    Bug(
        "causal mask hides the token itself",
        "prefill.cu",
        "key > newest ||",
        "key >= newest ||",
    ),
    Bug(
        "causal mask shows the next token",
        "prefill.cu",
        "key > newest ||",
        "key > newest + 1 ||",
    ),
    Bug(
        "tokens of an image do not see later ones",
        "prefill.cu",
        "causal ? position : end_token",
        "true ? position : end_token",
    ),
    Bug("diagonal found too late", "prefill.cu", "token + TILE > (causal", "token > (causal"),
    Bug("window one too wide", "scores.cuh", "position - window + 1, 0)", "position - window, 0)"),
    Bug(
        "window edge not masked",
        "prefill.cu",
        "token < first_visible(last_position, window, chunk)",
        "token < visible_begin",
    ),
    Bug("keys beyond the end are read", "prefill.cu", "&& token + row < end_token", ""),
    Bug("keys before the window are read", "prefill.cu", "token + row >= visible_begin &&", ""),
    Bug(
        "operands of P swapped",
        "prefill.cu",
        "[2 * step + part / 2][part % 2 * 2]",
        "[2 * step + part % 2][part / 2 * 2]",
    ),
    Bug(
        "operands of K swapped",
        "prefill.cu",
        "scores[strip][column], q[strip], k[0], k[1]",
        "scores[strip][column], q[strip], k[0], k[2]",
    ),
    Bug("V not transposed", "prefill.cu", "ldmatrix_x4_trans", "ldmatrix_x4"),
    Bug(
        "V read without its swizzle",
        "prefill.cu",
        "Tile<HEAD_DIM>::at(step * 16 + lane % 16, column + lane / 16)",
        "(step * 16 + lane % 16) * HEAD_DIM + (column + lane / 16) * 8",
    ),
    Bug("output not rescaled", "prefill.cu", "sums[strip][column][half * 2] *= rescale;", ""),
    Bug("denominator not rescaled", "prefill.cu", "denominator[strip][half] *= rescale;", ""),
    Bug(
        "rows that saw nothing",
        "prefill.cu",
        "most == NEGATIVE_INFINITY ? 0.f : most,",
        "most,",
    ),
    Bug(
        "page of the first tile for all", "prefill.cu", "pages.page_of(token)", "pages.page_of(visible_begin)"
    ),
    Bug("padding rows are written", "prefill.cu", "if (row >= count * group) continue;", ""),
    Bug(
        "padding queries are read",
        "prefill.cu",
        "const bool wanted = first_row + row < count * group;",
        "const bool wanted = true;",
    ),
    Bug("LSE in base 2", "prefill.cu", "+ log2f(sum)) * LN_2", "+ log2f(sum))"),
    Bug(
        "LSE of the unscaled maximum",
        "prefill.cu",
        "(maximum[strip][half] * scale_log2 + log2f",
        "(maximum[strip][half] + log2f",
    ),
]

SPLIT_PREFILL = [
    Bug(
        "parts overlap",
        "prefill.cu",
        "tiles * (split + 1) / count_of_splits * TILE",
        "(tiles * (split + 1) / count_of_splits + 1) * TILE",
    ),
    Bug(
        "parts leave a gap",
        "prefill.cu",
        "tiles * (split + 1) / count_of_splits * TILE",
        "(tiles * (split + 1) / count_of_splits - 1) * TILE",
    ),
    Bug(
        "parts of the longest for all",
        "prefill.cu",
        "count_of_splits = splits[sequence];",
        "count_of_splits = most_splits;",
    ),
    Bug("parts that are not there", "prefill.cu", "if (split >= count_of_splits) return;", ""),
    Bug("parts that saw nothing", "prefill.cu", "sum > 0.f ? 1.f / sum : 0.f", "1.f / sum"),
    Bug("parts of all sequences in one place", "prefill.cu", "first_parts[sequence] +", ""),
    Bug(
        "parts of other tokens",
        "prefill.cu",
        "(blockIdx.z % most_splits) * count +",
        "(blockIdx.z % most_splits) +",
    ),
    Bug("tokens of the next sequence", "merge.cu", "if (token >= count) return;", ""),
    Bug(
        "parts of the next token",
        "merge.cu",
        "stride = static_cast<long long>(count) * heads",
        "stride = heads",
    ),
    Bug("one part too few", "merge.cu", "stride, splits[sequence], out", "stride, splits[sequence] - 1, out"),
]

CHUNKED = [
    Bug(
        "chunks of queries' own", "scores.cuh", "position - position % chunk", "max(position - chunk + 1, 0)"
    ),
    Bug(
        "chunk begins one early",
        "scores.cuh",
        "position - position % chunk",
        "position - position % chunk - 1",
    ),
    Bug("chunk of the first row for all", "prefill.cu", "key < oldest", "key < visible_begin"),
]

CAPPED = [
    Bug("scores not capped", "scores.cuh", "if constexpr (!CAPPED) return product;", "return product;"),
    Bug("cap forgotten", "scores.cuh", "(CAPPED ? cap : scale) * LOG2_E", "LOG2_E"),
    Bug("capped before scaling", "scores.cuh", "inner(CAPPED ? scale / cap : 1.f)", "inner(1.f / cap)"),
    Bug("sigmoid instead of tanh", "scores.cuh", "1.f - __fdividef(2.f,", "1.f - __fdividef(1.f,"),
]

CONVOLUTION = [
    Bug("sum of half the parts", "states.cuh", "return x + __shfl_xor_sync(0xffffffffu, x, 2);", "return x;"),
    Bug(
        "inputs of the one before",
        "convolve.cu",
        "span.begins ? 0.f : Numbers<T>::widen(kept[i])",
        "Numbers<T>::widen(kept[i])",
    ),
    Bug(
        "drafts kept",
        "states.cuh",
        "certain(count - (drafts != nullptr ? drafts[sequence] : 0))",
        "certain(count)",
    ),
    Bug(
        "entries that are none",
        "states.cuh",
        "lengths[sequence] > 0 ? counts[sequence] : 0",
        "counts[sequence]",
    ),
    Bug(
        "inputs of the newest left out",
        "convolve.cu",
        "kept[i] = Numbers<T>::narrow(window[i]);",
        "kept[i] = Numbers<T>::narrow(i ? window[i - 1] : 0.f);",
    ),
    Bug(
        "convolution turned round",
        "convolve.cu",
        "sum += window[i] * weight[i]",
        "sum += window[i] * weight[WIDTH - 1 - i]",
    ),
    Bug("page of another sequence", "states.cuh", "pool + page * page_stride", "pool"),
    Bug("bias forgotten", "convolve.cu", "float sum = bias;", "float sum = 0.f;"),
    Bug(
        "bias for all channels",
        "convolve.cu",
        "biases != nullptr ? Numbers<T>::widen(biases[channel])",
        "biases != nullptr ? Numbers<T>::widen(biases[threadIdx.x % 32])",
    ),
    Bug(
        "rows as if they stood alone",
        "convolve.cu",
        "inputs[row * row_step + channel]",
        "inputs[row * channels + channel]",
    ),
]
"""Of what all recurrent states have."""

DELTA = [
    Bug("state of the one before", "delta.cu", "mine && !span.begins ? matrix", "mine ? matrix"),
    Bug("key overwritten while it is read", "delta.cu", "__syncthreads();  // all threads", "// all threads"),
    Bug("key read before it is there", "delta.cu", "__syncthreads();  // queries", "// queries"),
    Bug(
        "correction before the decay",
        "delta.cu",
        "known += state[i] * key[i * PARTS + part]",
        "known += state[i] / decay * key[i * PARTS + part]",
    ),
    Bug("state does not decay", "delta.cu", "state[i] *= decay;", ""),
    Bug("keys as they are", "delta.cu", "(value - known * of_key) * of_key", "(value - known * of_key)"),
    Bug(
        "queries not scaled",
        "delta.cu",
        "(over_parts(of_query) + EPSILON) * KEY_DIM",
        "(over_parts(of_query) + EPSILON)",
    ),
    Bug(
        "read before the token's own",
        "delta.cu",
        "      state[i] += key[i * PARTS + part] * correction;\n      read += state[i] * query[i * PARTS + part];",
        "      read += state[i] * query[i * PARTS + part];\n      state[i] += key[i * PARTS + part] * correction;",
    ),
    Bug(
        "values of the key's head",
        "delta.cu",
        "2 * keys_width + head * VALUE_DIM",
        "2 * keys_width + key_head * VALUE_DIM",
    ),
    Bug(
        "keys of the value's head",
        "delta.cu",
        "const int key_head = head / (heads / key_heads)",
        "const int key_head = head % key_heads",
    ),
    Bug(
        "matrix turned round",
        "delta.cu",
        "matrix[(i * PARTS + part) * VALUE_DIM + column] = state[i]",
        "matrix[column * KEY_DIM + i * PARTS + part] = state[i]",
    ),
]

MAMBA2 = [
    Bug(
        "tile overwritten while it is read", "mamba2.cu", "__syncthreads();  // all threads", "// all threads"
    ),
    Bug("tile read before it is there", "mamba2.cu", "__syncthreads();  // the tile", "// the tile"),
    Bug("state of the one before", "mamba2.cu", "mine && !span.begins ? matrix", "mine ? matrix"),
    Bug("state does not decay", "mamba2.cu", "stays * state[i] + key[at]", "state[i] + key[at]"),
    Bug(
        "own token decays",
        "mamba2.cu",
        "stays * state[i] + key[at] * added",
        "stays * (state[i] + key[at] * added)",
    ),
    Bug(
        "read before the token's own",
        "mamba2.cu",
        "        state[i] = stays * state[i] + key[at] * added;\n        read += state[i] * query[at];",
        "        read += stays * state[i] * query[at];\n        state[i] = stays * state[i] + key[at] * added;",
    ),
    Bug("written by what reads", "mamba2.cu", "from[at + keys]", "from[at + queries]"),
    Bug("x not scaled by the step", "mamba2.cu", "added = size[token] * x", "added = x"),
    Bug("skip forgotten", "mamba2.cu", "= read + skip * x", "= read"),
    Bug("skip of what was added", "mamba2.cu", "= read + skip * x", "= read + skip * added"),
    Bug("bias of steps forgotten", "mamba2.cu", " + biases[head]", ""),
    Bug("step without its softplus", "mamba2.cu", "given > STRAIGHT ? given : log1pf(expf(given))", "given"),
    Bug(
        "softplus overflows",
        "mamba2.cu",
        "given > STRAIGHT ? given : log1pf",
        "given > 1000.f ? given : log1pf",
    ),
    Bug("least step forgotten", "mamba2.cu", "fmaxf(positive, least_step)", "positive"),
    Bug(
        "most step forgotten",
        "mamba2.cu",
        "fminf(fmaxf(positive, least_step), most_step)",
        "fmaxf(positive, least_step)",
    ),
    Bug("decay of the first head", "mamba2.cu", "step * decays[head]", "step * decays[0]"),
    Bug("steps as if they stood alone", "mamba2.cu", "* row_step + head", "* heads + head"),
    Bug(
        "groups taken in turn",
        "mamba2.cu",
        "const int group = head / (heads / groups)",
        "const int group = head % groups",
    ),
    Bug(
        "reads by the first group",
        "mamba2.cu",
        "queries = keys + groups * STATE_DIM",
        "queries = keys - group * STATE_DIM + groups * STATE_DIM",
    ),
    Bug(
        "second block has the first's columns",
        "mamba2.cu",
        "const int of = first_column + i % COLUMNS",
        "const int of = i % COLUMNS",
    ),
    Bug("columns beyond the last", "mamba2.cu", "first_column + column < head_dim", "column < COLUMNS"),
    Bug("last tile as long as the others", "mamba2.cu", "min(TILE, end - done)", "TILE"),
    Bug(
        "steps of the first tile", "mamba2.cu", "steps[(row + threadIdx.x)", "steps[(span.row + threadIdx.x)"
    ),
    Bug(
        "matrix turned round",
        "mamba2.cu",
        "matrix[(i * PARTS + part) * head_dim] = state[i]",
        "(matrix - column + column * STATE_DIM)[i * PARTS + part] = state[i]",
    ),
    Bug(
        "matrix of the first head",
        "mamba2.cu",
        "static_cast<long long>(head) * STATE_DIM * head_dim + first_column",
        "first_column",
    ),
]

LATENTS = [
    Bug("barrier missing", "decode_mla.cu", "__syncthreads();  // this tile", "// this tile"),
    Bug(
        "maxima read before they are there",
        "decode_mla.cu",
        "__syncthreads();  // the maxima",
        "// the maxima",
    ),
    Bug(
        "weights read before they are there",
        "decode_mla.cu",
        "__syncthreads();  // the weights",
        "// the weights",
    ),
    Bug("sums read before they are there", "decode_mla.cu", "__syncthreads();  // the sums", "// the sums"),
    Bug("wait lets one group pass", "decode_mla.cu", "cp_async_wait<0>", "cp_async_wait<1>"),
    Bug("one stage instead of two", "decode_mla.cu", "token / TILE % 2", "0"),
    Bug("tokens beyond the range are read", "decode_mla.cu", "token + row < range.end && chunk", "chunk"),
    Bug("tokens beyond the range are seen", "decode_mla.cu", "column < range.end ?", "true ?"),
    Bug(
        "padding is read",
        "decode_mla.cu",
        "token + row < range.end && chunk < WIDTH / 8",
        "token + row < range.end",
    ),
    Bug("heads beyond the last are read", "decode_mla.cu", "first_head + row < heads && chunk", "chunk"),
    Bug("heads beyond the last are written", "decode_mla.cu", "if (first_head + row >= heads) continue;", ""),
    Bug(
        "maximum of one warp", "decode_mla.cu", "shared.maxima[group * 16", "shared.maxima[warp % GROUPS * 16"
    ),
    Bug(
        "denominator of one warp",
        "decode_mla.cu",
        "sum += shared.sums[group * 16 + row]",
        "sum = shared.sums[group * 16 + row]",
    ),
    Bug("output not rescaled", "decode_mla.cu", "*= rescale[i % 4 / 2]", "*= 1.f"),
    Bug("halves rescaled alike", "decode_mla.cu", "*= rescale[i % 4 / 2]", "*= rescale[0]"),
    Bug(
        "values of another piece",
        "decode_mla.cu",
        "column + lane / 16));\n        ptx",
        "column));\n        ptx",
    ),
    Bug("second step of the first", "decode_mla.cu", "q, k[2], k[3]", "q, k[0], k[1]"),
    Bug("table of the entry", "decode_mla.cu", "table_rows == nullptr ? entry : table_rows[entry]", "entry"),
    Bug("token not within its page", "decode_mla.cu", "(token % PAGE + row) * WIDTH", "row * WIDTH"),
    Bug("LSE in base 2", "decode_mla.cu", "log2_sum * LN_2", "log2_sum"),
]

TILES = [
    Bug("no swizzle: bank conflicts", "tile.cuh", "chunk ^ phase(row)", "chunk"),
    Bug("swizzle of the wrong rows", "tile.cuh", "return row & 7;", "return (row >> 1) & 7;"),
]

PAGES = [
    Bug(
        "V one head early",
        "paged.cuh",
        "plane(static_cast<long long>(kv_heads) *",
        "plane(static_cast<long long>(kv_heads - 1) *",
    ),
    Bug(
        "page offset in 32 bits",
        "paged.cuh",
        "page * page_stride +",
        "static_cast<int>(page * static_cast<int>(page_stride) * 65536) / 65536 +",
    ),
]

DECODE_MMA = [
    Bug("warp barrier missing", "decode_mma.cu", "__syncwarp();  // lanes read", "// lanes read"),
    Bug(
        "wait lets one more group pass",
        "decode_mma.cu",
        "cp_async_wait<STAGES - 2>",
        "cp_async_wait<STAGES - 1>",
    ),
    Bug(
        "empty groups not committed",
        "decode_mma.cu",
        "    ptx::cp_async_commit();  // also",
        "    if (tile < tiles) ptx::cp_async_commit();  // also",
    ),
    Bug("ring one stage short", "decode_mma.cu", "tile % STAGES", "tile % (STAGES - 1)", times=2),
    Bug("states overwrite the rings", "decode_mma.cu", "__syncthreads();  // the states", "// the states"),
    Bug(
        "states read before they are there",
        "decode_mma.cu",
        "  __syncthreads();\n  const long long part",
        "  const long long part",
    ),
    Bug("one token too many", "decode_mma.cu", "column < range.end ?", "column <= range.end ?"),
    Bug(
        "tokens before the range are seen",
        "decode_mma.cu",
        "column >= range.begin && column < range.end ?",
        "column < range.end ?",
    ),
    Bug("tokens beyond the range are read", "decode_mma.cu", "&& token + row < range.end", ""),
    Bug("page not looked up ahead", "decode_mma.cu", "page_of(token + WARPS * TOKENS)", "page_of(token)"),
    Bug(
        "rows of Q swapped",
        "decode_mma.cu",
        "lane / 4 + part % 2 * 8, dim = step * 16 + part / 2 * 8",
        "lane / 4 + part / 2 * 8, dim = step * 16 + part % 2 * 8",
    ),
    Bug(
        "rows beyond the group are read",
        "decode_mma.cu",
        "row < group ? *reinterpret_cast<const unsigned*>(q_heads + row * HEAD_DIM + dim) : 0u",
        "*reinterpret_cast<const unsigned*>(q_heads + row * HEAD_DIM + dim)",
    ),
    Bug(
        "quad maximum of half the quad",
        "decode_mma.cu",
        "most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 2));",
        "",
    ),
    Bug("denominator of half the quad", "decode_mma.cu", "sum += __shfl_xor_sync(0xffffffffu, sum, 2);", ""),
    Bug(
        "rows beyond the group are written",
        "decode_mma.cu",
        "states.store(part_out + part * HEAD_DIM, part_log2 + part, group)",
        "states.store(part_out + part * HEAD_DIM, part_log2 + part, 16)",
    ),
]

DECODE_SIMT = [
    Bug(
        "wait lets one more group pass",
        "decode_simt.cu",
        "cp_async_wait<STAGES - 1>",
        "cp_async_wait<STAGES>",
    ),
    Bug("ring one stage short", "decode_simt.cu", "tile % STAGES", "tile % (STAGES - 1)", times=2),
    Bug("dot product of half the row", "decode_simt.cu", "other > 0; other /= 2", "other > 1; other /= 2"),
    Bug("lanes that saw nothing", "decode_simt.cu", "most == NEGATIVE_INFINITY ? 0.f : most;", "most;"),
    Bug(
        "warp merges half its rows",
        "decode_simt.cu",
        "other < 32; other *= 2) value",
        "other < 16; other *= 2) value",
    ),
    Bug("states overwrite the rings", "decode_simt.cu", "__syncthreads();  // the states", "// the states"),
    Bug(
        "states read before they are there",
        "decode_simt.cu",
        "  __syncthreads();\n  const long long part",
        "  const long long part",
    ),
    Bug(
        "invisible tokens count",
        "decode_simt.cu",
        "if (!visible) scores[pass][head] = NEGATIVE_INFINITY;",
        "",
    ),
]

POINTWISE = [
    Bug("sums read before they are there", "pointwise.cu", "  __syncthreads();\n", ""),
    Bug(
        "squares of half a warp",
        "pointwise.cu",
        "other < 32; other *= 2) squares",
        "other < 16; other *= 2) squares",
    ),
    Bug(
        "squares of the first warp",
        "pointwise.cu",
        "sum += of_warps[warp]",
        "sum += warp ? 0.f : of_warps[warp]",
    ),
    Bug("mean over vectors", "pointwise.cu", "sum / width + epsilon", "sum / (width / 8) + epsilon"),
    Bug("epsilon forgotten", "pointwise.cu", "sum / width + epsilon", "sum / width"),
    Bug("sum not rounded before its square", "pointwise.cu", "      widen8<T>(mine, rounded);\n", ""),
    Bug(
        "norm of what was there before",
        "pointwise.cu",
        "added != nullptr ? total : hidden;  //",
        "hidden;  //",
    ),
    Bug("weights of the row", "pointwise.cu", "vector(weight, i)", "vector(weight, row + i)"),
    Bug(
        "gates and ups swapped",
        "pointwise.cu",
        "widen8<T>(ups, *reinterpret_cast<const uint4*>(gate + width + i))",
        "widen8<T>(ups, *reinterpret_cast<const uint4*>(gate + i))",
    ),
    Bug("gate the wrong way round", "pointwise.cu", "exp2_approx(-gates[k]", "exp2_approx(gates[k]"),
    Bug(
        "once around is enough",
        "pointwise.cu",
        "i < width; i += THREADS * 8",
        "i < width && i < THREADS * 8; i += THREADS * 8",
        times=3,
    ),
]

SPLITS = [
    Bug("token not within its page", "paged.cuh", "(token % PAGE) * HEAD_DIM", "0"),
    Bug("splits overlap", "split.cuh", "min(end * PAGE, length)", "min(end * PAGE + 1, length)"),
    Bug("splits leave a gap", "split.cuh", "min(end * PAGE, length)", "min(end * PAGE - 1, length)"),
    Bug("window of a split one too wide", "scores.cuh", "position - window + 1, 0)", "position - window, 0)"),
    Bug("warps not rescaled", "split.cuh", "ptx::exp2_approx(maximum[warp * ROWS + row] - most)", "1.f"),
    Bug("splits not weighted", "merge.cu", "ptx::exp2_approx(logs[i] - most)", "1.f"),
    Bug("last split forgotten", "merge.cu", "= begin + i < splits ?", "= begin + i < splits - 1 ?"),
    Bug(
        "last split counted again",
        "merge.cu",
        "begin + i < splits ? ptx::exp2_approx(logs[i] - most) : 0.f",
        "ptx::exp2_approx(logs[i] - most)",
    ),
    Bug(
        "LSE in base 2",
        "merge.cu",
        "lse[query] = (most + log2f(sum)) * LN_2;",
        "lse[query] = most + log2f(sum);",
    ),
]

CODES = [
    Bug(
        "keys under values' scales",
        "paged.cuh",
        "planes.scale(0, kv_head, first)",
        "planes.scale(1, kv_head, first)",
    ),
    Bug("one scale for a tile's keys", "paged.cuh", "key_scales + row, key_scale", "key_scales, key_scale"),
    Bug(
        "values where keys of their width would end",
        "paged.cuh",
        "kv_heads * (PAGE * KEY_BYTES) + (head",
        "kv_heads * (PAGE * VALUE_BYTES) + (head",
    ),
    Bug(
        "scales behind the keys",
        "paged.cuh",
        "kv_heads * (PAGE * (KEY_BYTES + VALUE_BYTES))",
        "kv_heads * (PAGE * KEY_BYTES)",
    ),
    Bug("head forgotten", "paged.cuh", "(plane * kv_heads + head) * PAGE", "plane * kv_heads * PAGE"),
    Bug("what is not wanted is read", "paged.cuh", "      if (wanted) {\n", "      {\n"),
    Bug(
        "numbers of a word turned round",
        "codes.cuh",
        "words[i / IN_WORD] >> (i % IN_WORD",
        "words[i / IN_WORD] >> ((IN_WORD - 1 - i % IN_WORD)",
    ),
    Bug("not centred", "codes.cuh", "static_cast<int>(code) - 8", "static_cast<int>(code) - 7"),
    Bug("without a sign", "codes.cuh", "static_cast<signed char>(code)", "static_cast<unsigned char>(code)"),
    Bug(
        "scale not rounded up", "quantise_write.cu", "__float_as_int(exact) + 0xffff", "__float_as_int(exact)"
    ),
    Bug(
        "a subnormal scale",
        "quantise_write.cu",
        "static_cast<int>(0xffff0000u), 1 << 23)",
        "static_cast<int>(0xffff0000u), 0)",
    ),
    Bug(
        "each lane its own scale",
        "quantise_write.cu",
        "int other = 16; other > 0",
        "int other = 16; other > 16",
    ),
    Bug(
        "rounded to zero",
        "codes.cuh",
        "return static_cast<int>(rintf(x)) & 0xff",
        "return static_cast<int>(x) & 0xff",
    ),
    Bug("not at the token's offset", "quantise_write.cu", "planes.key(head, offset)", "planes.key(head, 0)"),
    Bug("a token of no page", "quantise_write.cu", "  if (page < 0) return;\n", ""),
]

PACKED = [
    Bug(
        "activations overwritten while they are read",
        "packed.cu",
        "__syncthreads();  // all warps",
        "// all warps",
    ),
    Bug("activations read before they are there", "packed.cu", "__syncthreads();  // the act", "// the act"),
    Bug(
        "columns beyond the last",
        "packed.cu",
        "column < columns ? Numbers<T>::widen",
        "true ? Numbers<T>::widen",
    ),
    Bug(
        "numbers not rounded",
        "packed.cu",
        "Numbers<T>::widen(Numbers<T>::narrow(numbers[j][i]))",
        "numbers[j][i]",
    ),
    Bug("sum of half the lanes", "packed.cu", "int other = 16; other > 0", "int other = 8; other > 0"),
    Bug("rows beyond the last are written", "packed.cu", "lane == 0 && begin_row + j < rows", "lane == 0"),
    Bug(
        "second row of the first",
        "packed.cu",
        "first + min(begin_row + j, rows - 1)",
        "first + min(begin_row, rows - 1)",
    ),
    Bug("rows from the first on", "packed.cu", "= first + min(", "= min("),
    Bug("results as if they stood alone", "packed.cu", "out[token * out_stride +", "out[token * rows +"),
    Bug(
        "activations of the first token",
        "packed.cu",
        "x[static_cast<long long>(token) * columns",
        "x[static_cast<long long>(0) * columns",
    ),
    Bug(
        "halves of a lane's numbers swapped",
        "packed.cu",
        "tile + place(token, lane * 8 + 4)",
        "tile + place(token, lane * 8)",
    ),
    Bug("once around is enough", "packed.cu", "column += THREADS * 8", "column += columns"),
    Bug(
        "row of the block",
        "packed.cu",
        "rows != nullptr ? rows[blockIdx.x] :",
        "rows != nullptr ? static_cast<long long>(blockIdx.x) :",
    ),
    Bug("lower halves twice", "packed.cuh", ">> (part / 16 * 4) & 15", "& 15"),
    Bug("minimum forgotten", "packed.cuh", "if (MINIMUM) numbers[i] += least;", ""),
    Bug("fifth bits of the first byte", "packed.cuh", "block[FIFTHS + part / 8]", "block[FIFTHS]"),
    Bug(
        "scales of the first four",
        "packed.cuh",
        "part < 4 ? six[i4] & 63 : (six[8 + i4] & 15) | six[i4] >> 6 << 4",
        "six[i4] & 63",
    ),
    Bug("upper bits of another place", "packed.cuh", ">> (place / 32 * 2) & 3", ">> (place / 64 * 2) & 3"),
    Bug("scale of the block before", "packed.cuh", "block[192 + in / 16]", "block[192 + in / 32]"),
    Bug("halves of a byte swapped", "packed.cuh", ">> (i % 2 * 4) & 15 : 0", ">> (4 - i % 2 * 4) & 15 : 0"),
    Bug("scale of another row", "packed.cuh", "row / block_rows * width", "row * width"),
    Bug("one scale for eight columns", "packed.cuh", "|| group % 8 != 0", ""),
    Bug(
        "groups in order",
        "packed.cuh",
        "groups != nullptr ? groups[column + i] :",
        "false ? groups[column + i] :",
    ),
    Bug(
        "zeros forgotten",
        "packed.cuh",
        "least = zeros != nullptr ? table_number(zeros, at, zero_kind) : zero",
        "least = zero",
    ),
]

PRODUCTS = [
    Bug("barrier missing", "product.cu", "__syncthreads();  // this tile", "// this tile"),
    Bug("wait lets one more pass", "product.cu", "cp_async_wait<STAGES - 2>", "cp_async_wait<STAGES - 1>"),
    Bug("one stage instead of all", "product.cu", "tile % STAGES * STAGE", "0", times=2),
    Bug("columns beyond the last", "product.cu", "column < columns && from_row", "from_row"),
    Bug("rows beyond the last are read", "product.cu", "from_row < (of_x ? rows : products)", "true"),
    Bug("results beyond the last", "product.cu", "row < rows && product < products", "row < rows"),
    Bug("operands swapped", "product.cu", "a[strip], b[0], b[1]", "a[strip], b[0], b[2]"),
    Bug("half of the matrix twice", "product.cu", "+ lane / 16 * 8 + lane % 8", "+ lane % 8"),
    Bug(
        "second strip of the first", "product.cu", "warp_row + strip * 16 + lane % 16", "warp_row + lane % 16"
    ),
    Bug(
        "few rows are summed in another order",
        "product.cu",
        "for (int step = 0; step < COLUMNS / 16; step++) {",
        "for (int at = 0; at < COLUMNS / 16; at++) {\n      const int step = ROWS == 16 ? 3 - at : at;",
    ),
    Bug("last tile is left out", "product.cu", "(columns + COLUMNS - 1) / COLUMNS", "columns / COLUMNS"),
]

RACES = (
    "activations overwritten while they are read",
    "activations read before they are there",
    "barrier missing",
    "warp barrier missing",
    "states overwrite the rings",
    "states read before they are there",
    "sums read before they are there",
    "maxima read before they are there",
    "key overwritten while it is read",
    "key read before it is there",
    "tile overwritten while it is read",
    "tile read before it is there",
    "weights read before they are there",
)
"""Those of which ThreadSanitizer must say that they are races."""
