/* What a decode step of the bundled engine computes on the CPU: products of a few rows with a matrix, which may be
 * packed, attention of a few queries over KV pages, which are read where they lie, and recurrent states.
 *
 * A decode step has one token per sequence, so it reads every weight, key and value once and does little with each.
 * The time is that of reading memory, if nothing is read twice or copied, and nothing is called for each sequence and
 * layer. Python calls these functions with ctypes, which releases the GIL. Numbers are float32, bfloat16 or codes;
 * sums are float32. The result of a row depends neither on the other rows of the step nor on the number of threads.
 *
 * Attention: a task is one row (a query token), one KV head and up to TILE of the query heads that share it. It walks the
 * visible tokens in blocks of BLOCK, with the online softmax of Milakov and Gimelshein (arXiv:1805.02867): a running
 * maximum, the sum of the exponentials below it, and the weighted sum of values. After SEGMENT tokens a new sum begins,
 * and the old ones are merged: adding 100,000 numbers to one float32 would lose two digits.
 */

#include <math.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

/* PORTABLE: what other processors get, for tests on this one. */
#if defined(__x86_64__) && !defined(PORTABLE)
#define X86 1
#else
#define X86 0
#endif

#if !defined(__clang__)
#pragma GCC diagnostic ignored "-Wpsabi" /* vectors are passed between inlined functions only */
#endif

/* The version of these functions. native/__init__.py refuses a library with another version. */
#define INTERFACE 7

#define LANES 8
#define PAIR (2 * LANES)
#define BLOCK 32
#define LINE 64 /* bytes of a cache line */
#define SEGMENT 1024
#define TILE 16
#define MOST_WIDTH 1024
#define FEW_ROWS 16 /* of activations: their products take the time of reading the matrix */
#define MOST_THREADS 64
#define INLINE static inline __attribute__((always_inline))

typedef float floats __attribute__((vector_size(4 * LANES)));
typedef int32_t ints __attribute__((vector_size(4 * LANES)));
typedef uint32_t words __attribute__((vector_size(4 * LANES)));
typedef uint64_t longs __attribute__((vector_size(4 * LANES)));
typedef uint16_t halves __attribute__((vector_size(2 * LANES)));

enum { FLOAT32, BFLOAT16, INT8, FLOAT16, UINT8, INT16, CODED }; /* FLOAT16 to INT16: of scales and zeros only */

/* One layer's KV in the pages of a pool. `start` and `scales` are offsets in a page, of K and of V (the same for
 * latents): of the first head's vectors, and of their bfloat16 scales. A head has `chunk` vectors of `width`
 * numbers in a row. `fixed` are one scale for each head, in place of those in pages; NULL without. If the format is
 * CODED, K and V are codes: E4M3, E5M2, I8, or U4, whose numbers are 8 less. */
struct layer {
    const char *pages;
    uint64_t page_bytes, start[2], scales[2];
    const float *fixed[2];
    int32_t format, codes[2], chunk, heads, kv_heads, width;
    float scale, cap; /* cap: 0 for none */
};

/* A query's row in the batch, and the tokens that it sees, with the address of its block table. */
struct row {
    int64_t number, table, first, stop;
};

struct work {
    const struct layer *layer;
    const struct row *rows;
    const float *queries;
    float *out, *lse, *states; /* states: see tierstore_attend; NULL without */
    size_t tasks, tiles;       /* tiles: of each KV head's query heads */
    int last;
    atomic_size_t next;
};

/* ---- numbers ------------------------------------------------------------------------------------------- */

INLINE size_t number_bytes(int format) { return format == FLOAT32 ? 4 : format == BFLOAT16 ? 2 : 1; }

INLINE float bfloat(uint16_t bits) {
    uint32_t wide = (uint32_t)bits << 16;
    float number;
    memcpy(&number, &wide, 4);
    return number;
}

/* Lanes of two vectors: 0 to 7 are those of `a`, 8 to 15 those of `b`. */
#if defined(__clang__)
#define LANES_OF(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define LANES_OF(a, b, ...) __builtin_shuffle(a, b, (ints){__VA_ARGS__})
#endif

/* Eight bytes as numbers. Compilers take bytes apart one by one; this is a permutation and a shift. */
INLINE words spread(const void *from) {
    uint64_t eight;
    memcpy(&eight, from, 8);
    const words bytes = (words)(longs){eight};
    return LANES_OF(bytes, bytes, 0, 0, 0, 0, 1, 1, 1, 1);
}

INLINE ints signed_bytes(const void *from) {
    return (ints)(spread(from) << (words){24, 16, 8, 0, 24, 16, 8, 0}) >> 24;
}

INLINE ints unsigned_bytes(const void *from) {
    return (ints)(spread(from) >> (words){0, 8, 16, 24, 0, 8, 16, 24} & 255);
}

INLINE floats read(const char *from, size_t at, int format) {
    floats wide;
    if (format == FLOAT32) {
        memcpy(&wide, from + 4 * at, sizeof wide);
    } else if (format == BFLOAT16) {
        halves narrow;
        memcpy(&narrow, from + 2 * at, sizeof narrow);
        words bits = __builtin_convertvector(narrow, words) << 16;
        memcpy(&wide, &bits, sizeof wide);
    } else {
        wide = __builtin_convertvector(signed_bytes(from + at), floats);
    }
    return wide;
}

/* PAIR numbers from number `at` on, in the order of reordered(). Bfloat16 is widened with an instruction each: a word has
 * two numbers, so the first vector has the even ones and the second the odd ones. */
INLINE void read_two(const char *from, size_t at, int format, floats *one, floats *two) {
    if (format == BFLOAT16) {
        words both, even, odd;
        memcpy(&both, from + 2 * at, sizeof both);
        even = both << 16, odd = both & 0xffff0000u;
        memcpy(one, &even, sizeof even);
        memcpy(two, &odd, sizeof odd);
    } else {
        *one = read(from, at, format);
        *two = read(from, at + LANES, format);
    }
}

/* Copies a vector of `width` numbers into the order in which read_two() has them, or back from it. */
INLINE void reordered(float *to, const float *from, size_t width, int format, int back) {
    size_t at = 0;
    for (; format == BFLOAT16 && at + PAIR <= width; at += PAIR)
        for (size_t i = 0; i < PAIR; i++) {
            const size_t place = at + i / 2 + i % 2 * LANES;
            to[back ? at + i : place] = from[back ? place : at + i];
        }
    memcpy(to + at, from + at, (width - at) * sizeof(float));
}

INLINE float read_one(const char *from, size_t at, int format) {
    float number;
    uint16_t half;
    if (format == INT8)
        return (float)((const int8_t *)from)[at];
    if (format == BFLOAT16) {
        memcpy(&half, from + 2 * at, 2);
        return bfloat(half);
    }
    memcpy(&number, from + 4 * at, 4);
    return number;
}

INLINE floats load(const float *from) {
    floats vector;
    memcpy(&vector, from, sizeof vector);
    return vector;
}

INLINE void store(float *to, floats vector) { memcpy(to, &vector, sizeof vector); }

INLINE float sum(floats x) {
    return ((x[0] + x[4]) + (x[2] + x[6])) + ((x[1] + x[5]) + (x[3] + x[7]));
}

/* The sum of each of eight vectors, in their order. Each has the bits of sum(), with a fifth of its instructions. */
INLINE floats sums_of(const floats x[8]) {
    floats halves[4], quarters[2];
    for (size_t i = 0; i < 4; i++)
        halves[i] = LANES_OF(x[i], x[i + 4], 0, 1, 2, 3, 8, 9, 10, 11) + LANES_OF(x[i], x[i + 4], 4, 5, 6, 7, 12, 13, 14, 15);
    for (size_t i = 0; i < 2; i++)
        quarters[i] = LANES_OF(halves[2 * i], halves[2 * i + 1], 0, 1, 8, 9, 4, 5, 12, 13) +
                      LANES_OF(halves[2 * i], halves[2 * i + 1], 2, 3, 10, 11, 6, 7, 14, 15);
    return LANES_OF(quarters[0], quarters[1], 0, 2, 8, 10, 4, 6, 12, 14) +
           LANES_OF(quarters[0], quarters[1], 1, 3, 9, 11, 5, 7, 13, 15);
}

INLINE floats choose(ints mask, floats yes, floats no) {
    ints a, b;
    floats chosen;
    memcpy(&a, &yes, sizeof a);
    memcpy(&b, &no, sizeof b);
    a = (mask & a) | (~mask & b);
    memcpy(&chosen, &a, sizeof chosen);
    return chosen;
}

/* exp(x) for x of at most 0, within 2 units in the last place; 0 below -87. The polynomial is Cephes' expf. */
INLINE floats exp_of(floats x) {
    const floats zero = {0};
    ints tiny = x < -87.0f;
    x = choose(tiny, zero - 87.0f, x);
    ints power = __builtin_convertvector(x * 1.44269504f - 0.5f, ints); /* cut towards 0: rounds */
    floats whole = __builtin_convertvector(power, floats);
    floats rest = x - whole * 0.693359375f + whole * 2.12194440e-4f;
    floats y = zero + 1.9875691500e-4f;
    y = y * rest + 1.3981999507e-3f;
    y = y * rest + 8.3334519073e-3f;
    y = y * rest + 4.1665795894e-2f;
    y = y * rest + 1.6666665459e-1f;
    y = y * rest + 5.0000001201e-1f;
    y = y * rest * rest + rest + 1.0f;
    ints bits = (power + 127) << 23;
    floats two;
    memcpy(&two, &bits, sizeof two);
    return choose(tiny, zero, y * two);
}

INLINE floats tanh_of(floats x) {
    const floats zero = {0};
    floats negative = choose(x < 0.0f, x, -x);
    floats e = exp_of(negative + negative);
    floats size = (1.0f - e) / (1.0f + e);
    return choose(x < zero, -size, size);
}

/* ---- products with a matrix ---------------------------------------------------------------------------- */

/* Adds the products of the last columns, which do not fill a vector. fmaf: compilers may or may not round in between, and
 * a row has to have the same bits on all paths. */
INLINE float end_product(float product, const float *x, const char *w, size_t even, size_t width, int format) {
    for (size_t at = even; at < width; at++)
        product = fmaf(x[at], read_one(w, at, format), product);
    return product;
}

/* products[i][j] = x[i] · w[j], for four rows of `x` and two of `w`, with pointers to each. */
INLINE void multiply_tile(const float *const x[4], const char *const w[2], size_t width, float products[4][2],
                          int format) {
    const size_t even = width / LANES * LANES;
    floats s00 = {0}, s01 = {0}, s10 = {0}, s11 = {0}, s20 = {0}, s21 = {0}, s30 = {0}, s31 = {0};
    for (size_t at = 0; at < even; at += LANES) {
        const floats w0 = read(w[0], at, format), w1 = read(w[1], at, format);
        const floats x0 = load(x[0] + at), x1 = load(x[1] + at), x2 = load(x[2] + at), x3 = load(x[3] + at);
        s00 += x0 * w0, s01 += x0 * w1;
        s10 += x1 * w0, s11 += x1 * w1;
        s20 += x2 * w0, s21 += x2 * w1;
        s30 += x3 * w0, s31 += x3 * w1;
    }
    const float sums[4][2] = {{sum(s00), sum(s01)}, {sum(s10), sum(s11)}, {sum(s20), sum(s21)}, {sum(s30), sum(s31)}};
    for (size_t i = 0; i < 4; i++)
        for (size_t j = 0; j < 2; j++)
            products[i][j] = end_product(sums[i][j], x[i], w[j], even, width, format);
}

/* Adds x · w[j] to s[j], lane by lane, for eight rows of `w`: memory is read faster in more places at a time. */
INLINE void add_products(floats s[8], const float *x, const char *const w[8], size_t even, int format) {
    for (size_t at = 0; at < even; at += LANES) {
        const floats part = load(x + at);
        for (size_t j = 0; j < 8; j++)
            s[j] += part * read(w[j], at, format);
    }
}

/* The same as multiply_tile, for one row of `x` and eight of `w`. */
INLINE void multiply_one(const float *x, const char *const w[8], size_t width, float products[8], int format) {
    const size_t even = width / LANES * LANES;
    floats s[8] = {{0}};
    add_products(s, x, w, even, format);
    for (size_t j = 0; j < 8; j++)
        products[j] = end_product(sum(s[j]), x, w[j], even, width, format);
}

/* `count` rows of `x` times `rows` rows of a matrix: of `weight`, or from row `first` of `packed` on. */
struct product {
    const float *x;
    const char *weight;
    const struct packed *packed;
    float *out;
    size_t count, first, rows, width;
    int format, rounded; /* rounded: to bfloat16, of `packed` */
    atomic_size_t next;
};

#define ROWS 32 /* of the matrix, in a task */

INLINE void multiply_rows(const struct product *of, size_t first, int format) {
    const size_t bytes = of->width * number_bytes(format);
    const size_t stop = first + ROWS < of->rows ? first + ROWS : of->rows;
    if (of->count == 1) {
        for (size_t row = first; row < stop; row += 8) {
            const char *w[8];
            float products[8];
            const size_t some = stop - row < 8 ? stop - row : 8;
            for (size_t j = 0; j < 8; j++)
                w[j] = of->weight + (row + (j < some ? j : some - 1)) * bytes;
            multiply_one(of->x, w, of->width, products, format);
            memcpy(of->out + row, products, some * sizeof(float));
        }
        return;
    }
    for (size_t row = first; row < stop; row += 2) {
        const size_t second = row + 1 < stop ? row + 1 : row;
        const char *const w[2] = {of->weight + row * bytes, of->weight + second * bytes};
        for (size_t g = 0; g < of->count; g += 4) {
            const float *x[4];
            float products[4][2];
            for (size_t i = 0; i < 4; i++)
                x[i] = of->x + (g + i < of->count ? g + i : of->count - 1) * of->width;
            multiply_tile(x, w, of->width, products, format);
            for (size_t i = 0; i < 4 && g + i < of->count; i++) {
                of->out[(g + i) * of->rows + row] = products[i][0];
                of->out[(g + i) * of->rows + second] = products[i][second - row];
            }
        }
    }
}

/* ---- products with a packed matrix --------------------------------------------------------------------- */

/* The formats of weight_formats.py. Where a number is code × scale + minimum, the product is exact in float32, so a
 * fused multiply-add rounds like torch's two steps. */
enum { F32, BF16, F16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K, Q6_K, E4M3, E5M2, I8, U8, U4, MXFP4 };

/* `columns` are in `row_bytes`. Scales and zeros are [row blocks, table_width], in formats of their own. A column
 * belongs to the group that `groups` has for it, or without these to column / group. `zero` without zeros. */
struct packed {
    const uint8_t *codes;
    const char *scales, *zeros; /* NULL without */
    const int64_t *groups;      /* NULL without */
    uint64_t columns, row_bytes, table_width, group, block_rows;
    int32_t format, scale_format, zero_format;
    float zero;
};

#define PACKED_COLUMNS 512 /* decoded at a time: of eight rows they stay in the L1 cache. A multiple of all blocks */

INLINE float half(const uint8_t *from) {
    uint16_t bits;
    uint32_t wide;
    float number;
    memcpy(&bits, from, 2);
    const uint32_t size = bits & 0x7fff;
    if (size < 0x400) {
        number = (float)size * 0x1p-24f;
        return bits >> 15 ? -number : number;
    }
    wide = (uint32_t)(bits >> 15) << 31 | ((size << 13) + (112u << 23)) | (size < 0x7c00 ? 0 : 0x7f800000);
    memcpy(&number, &wide, 4);
    return number;
}

INLINE float table_number(const char *from, size_t at, int format) {
    int16_t number;
    if (format == FLOAT16)
        return half((const uint8_t *)from + 2 * at);
    if (format == UINT8)
        return (float)((const uint8_t *)from)[at];
    if (format == INT16) {
        memcpy(&number, from + 2 * at, 2);
        return (float)number;
    }
    return read_one(from, at, format);
}

INLINE ints eight_nibbles(const uint8_t *from) { /* the lower half of each byte first */
    const ints shifts = {0, 4, 8, 12, 16, 20, 24, 28};
    uint32_t some;
    memcpy(&some, from, sizeof some);
    return ((ints){0} + (int32_t)some) >> shifts & 15;
}

INLINE floats number(ints x) { return __builtin_convertvector(x, floats); }

/* 16 in the lanes whose bit is set. */
INLINE ints sixteen(int bits) {
    const ints each = {1, 2, 4, 8, 16, 32, 64, 128};
    return ((((ints){0} + bits) & each) != 0) & 16;
}

/* Floats of `mantissa` bits; the bits above them are the exponent, and from `special` on infinite or not a number. */
INLINE floats small_floats(ints size, ints negative, int mantissa, int bias, int special) {
    const ints normal = (size << (23 - mantissa)) + ((127 - bias) << 23);
    const floats tiny = number(size) * (1.0f / (float)(1 << (bias - 1 + mantissa)));
    floats found;
    ints bits;
    memcpy(&found, &normal, sizeof found);
    found = choose(size < 1 << mantissa, tiny, found);
    memcpy(&bits, &found, sizeof bits);
    bits |= ((size >= special) & 0x7f800000) | ((negative != 0) & INT32_MIN);
    memcpy(&found, &bits, sizeof found);
    return found;
}

INLINE floats decode_eight(const uint8_t *from, int format) {
    halves narrow;
    ints codes;
    switch (format) {
    case F32:
        return read((const char *)from, 0, FLOAT32);
    case BF16:
        return read((const char *)from, 0, BFLOAT16);
    case F16:
        memcpy(&narrow, from, sizeof narrow);
        codes = __builtin_convertvector(narrow, ints);
        return small_floats(codes & 0x7fff, codes & 0x8000, 10, 15, 0x7c00);
    case E4M3:
        codes = unsigned_bytes(from);
        return small_floats(codes & 0x7f, codes & 0x80, 3, 7, 0x7f);
    case E5M2:
        codes = unsigned_bytes(from);
        return small_floats(codes & 0x7f, codes & 0x80, 2, 15, 0x7c);
    case I8:
        return read((const char *)from, 0, INT8);
    case U8:
        return number(unsigned_bytes(from));
    case U4:
        return number(eight_nibbles(from));
    default:
        codes = eight_nibbles(from);
        return small_floats(codes & 7, codes & 8, 1, 1, 8);
    }
}

/* Decodes codes that are alike. `bits` are those of a code. `to` has room for a multiple of eight. */
INLINE void decode_codes(const uint8_t *from, size_t count, float *to, size_t bits, int format) {
    size_t at = 0;
    for (; at + LANES <= count; at += LANES)
        store(to + at, decode_eight(from + at * bits / 8, format));
    if (at < count) {
        uint8_t last[4 * LANES] = {0};
        memcpy(last, from + at * bits / 8, (count - at) * bits / 8);
        store(to + at, decode_eight(last, format));
    }
}

/* Blocks of 32 numbers: a scale, a minimum or none, fifth bits or none, and the lower halves before the upper ones. */
INLINE void decode_32(const uint8_t *from, size_t count, float *to, int minimum, int fifth, float zero) {
    const size_t fifths = minimum ? 4 : 2, codes = fifths + (fifth ? 4 : 0);
    for (const float *stop = to + count; to < stop; to += 32, from += codes + 16) {
        const float scale = half(from), least = minimum ? half(from + 2) : 0.0f;
        for (size_t i = 0; i < 4; i++) {
            const ints two = unsigned_bytes(from + codes + 8 * (i % 2));
            ints code = i < 2 ? two & 15 : two >> 4;
            if (fifth)
                code += sixteen(from[fifths + i]);
            const floats numbers = (number(code) - zero) * scale;
            store(to + 8 * i, minimum ? numbers + least : numbers);
        }
    }
}

INLINE void decode_q8_0(const uint8_t *from, size_t count, float *to) {
    for (const float *stop = to + count; to < stop; to += 32, from += 34) {
        const float scale = half(from);
        for (size_t i = 0; i < 32; i += 8)
            store(to + i, read((const char *)from + 2, i, INT8) * scale);
    }
}

/* Blocks of 8 × 32 numbers with a scale and a minimum for each 32, of 6 bits. */
INLINE void decode_k(const uint8_t *from, size_t count, float *to, int fifth) {
    const size_t codes = fifth ? 48 : 16;
    for (const float *stop = to + count; to < stop; to += 256, from += codes + 128) {
        const float scale = half(from), least = half(from + 2);
        const uint8_t *six = from + 4, *bits = from + 16;
        for (size_t part = 0; part < 8; part++) {
            const uint8_t *four = from + codes + part / 2 * 32;
            const size_t i = part % 4;
            const int s = part < 4 ? six[i] & 63 : (six[8 + i] & 15) | six[i] >> 6 << 4;
            const int m = part < 4 ? six[4 + i] & 63 : six[8 + i] >> 4 | six[4 + i] >> 6 << 4;
            const float by = (float)s * scale, below = (float)m * least;
            for (size_t at = 0; at < 32; at += 8) {
                const ints two = unsigned_bytes(four + at);
                ints code = part % 2 ? two >> 4 : two & 15;
                if (fifth)
                    code += (unsigned_bytes(bits + at) >> (int)part & 1) << 4;
                store(to + part * 32 + at, number(code) * by - below);
            }
        }
    }
}

/* Blocks of 16 × 16 numbers with a scale for each 16: halves of bytes, and two more bits. */
INLINE void decode_q6_k(const uint8_t *from, size_t count, float *to) {
    for (const float *stop = to + count; to < stop; to += 256, from += 210) {
        const float scale = half(from + 208);
        for (size_t side = 0; side < 2; side++)
            for (size_t at = 0; at < 32; at += 8) {
                const ints upper = unsigned_bytes(from + 128 + side * 32 + at);
                const ints first = unsigned_bytes(from + side * 64 + at);
                const ints second = unsigned_bytes(from + side * 64 + 32 + at);
                const ints lower[4] = {first & 15, second & 15, first >> 4, second >> 4};
                for (size_t part = 0; part < 4; part++) {
                    const size_t place = side * 128 + part * 32 + at;
                    const ints code = lower[part] + ((upper >> (int)(2 * part) & 3) << 4) - 32;
                    store(to + place, number(code) * ((float)((const int8_t *)from)[192 + place / 16] * scale));
                }
            }
    }
}

INLINE void apply_scales(const struct packed *of, size_t row, size_t from, size_t count, float *to) {
    const size_t table = row / of->block_rows * of->table_width, stop = from + count;
    size_t next = from / of->group;
    for (size_t at = from, end; at < stop; at = end) {
        const size_t group = of->groups != NULL ? (size_t)of->groups[at] : next++;
        const float by = table_number(of->scales, table + group, of->scale_format);
        const float zero = of->zeros == NULL ? of->zero : table_number(of->zeros, table + group, of->zero_format);
        end = of->groups != NULL ? at + 1 : next * of->group;
        end = end < stop ? end : stop;
        size_t i = at - from;
        for (; i + LANES <= end - from; i += LANES)
            store(to + i, (load(to + i) - zero) * by);
        for (; i < end - from; i++)
            to[i] = (to[i] - zero) * by;
    }
}

/* Decodes up to PACKED_COLUMNS of a row, from a multiple of that on. `to` has room for all. */
INLINE void decode_columns(const struct packed *of, size_t row, size_t from, size_t count, float *to) {
    const uint8_t *codes = of->codes + row * of->row_bytes;
    switch (of->format) {
#define CODES(format, bits) \
    case format: \
        decode_codes(codes + from * bits / 8, count, to, bits, format); \
        break;
        CODES(F32, 32)
        CODES(BF16, 16)
        CODES(F16, 16)
        CODES(E4M3, 8)
        CODES(E5M2, 8)
        CODES(I8, 8)
        CODES(U8, 8)
        CODES(U4, 4)
        CODES(MXFP4, 4)
#define BLOCKS(format, block, bytes, name, ...) \
    case format: \
        name(codes + from / block * bytes, count, to, ##__VA_ARGS__); \
        break;
        BLOCKS(Q4_0, 32, 18, decode_32, 0, 0, 8.0f)
        BLOCKS(Q4_1, 32, 20, decode_32, 1, 0, 0.0f)
        BLOCKS(Q5_0, 32, 22, decode_32, 0, 1, 16.0f)
        BLOCKS(Q5_1, 32, 24, decode_32, 1, 1, 0.0f)
        BLOCKS(Q8_0, 32, 34, decode_q8_0)
        BLOCKS(Q4_K, 256, 144, decode_k, 0)
        BLOCKS(Q5_K, 256, 176, decode_k, 1)
        BLOCKS(Q6_K, 256, 210, decode_q6_k)
    }
    if (of->scales != NULL)
        apply_scales(of, row, from, count, to);
}

/* Fetches the codes of columns that are decoded later. Memory is read in short pieces, which processors do not expect. */
INLINE void prefetch(const struct packed *of, size_t row, size_t from) {
    const uint8_t *codes = of->codes + row * of->row_bytes;
    const size_t columns = of->columns - from < PACKED_COLUMNS ? of->columns - from : PACKED_COLUMNS;
    for (size_t at = 0; at < columns * of->row_bytes / of->columns; at += 64)
        __builtin_prefetch(codes + from * of->row_bytes / of->columns + at);
}

/* Rounds to bfloat16. */
INLINE void round_numbers(float *numbers, size_t count) {
    const floats none = (floats){0} + NAN;
    for (size_t at = 0; at < count; at += LANES) {
        const floats x = load(numbers + at);
        words bits;
        floats rounded;
        memcpy(&bits, &x, sizeof bits);
        bits = (bits + 0x7fff + (bits >> 16 & 1)) & 0xffff0000;
        memcpy(&rounded, &bits, sizeof rounded);
        store(numbers + at, choose(x == x, rounded, none));
    }
}

/* Reads columns of a row as float32, from a multiple of PACKED_COLUMNS on. */
INLINE void read_columns(const struct product *of, size_t row, size_t from, size_t columns, float *to) {
    if (of->packed) {
        decode_columns(of->packed, of->first + row, from, columns, to);
        if (of->rounded)
            round_numbers(to, columns);
    } else if (of->format == FLOAT32) {
        memcpy(to, of->weight + 4 * (row * of->width + from), 4 * columns);
    } else {
        const char *numbers = of->weight + 2 * (row * of->width + from);
        const size_t even = columns / LANES * LANES;
        for (size_t at = 0; at < even; at += LANES)
            store(to + at, read(numbers, at, BFLOAT16));
        for (size_t at = even; at < columns; at++)
            to[at] = read_one(numbers, at, BFLOAT16);
    }
}

/* Products of a few rows of `x` with eight rows of the matrix, or with as many as there are. */
INLINE void multiply_packed_rows(const struct product *of, size_t first) {
    const size_t width = of->width, some = of->rows - first < 8 ? of->rows - first : 8;
    float tile[8][PACKED_COLUMNS] __attribute__((aligned(32)));
    floats sums[FEW_ROWS][8];
    const char *w[8];
    memset(sums, 0, of->count * sizeof sums[0]);
    for (size_t j = 0; j < 8; j++)
        w[j] = (const char *)tile[j < some ? j : 0];
    for (size_t at = 0; at < width; at += PACKED_COLUMNS) {
        const size_t left = width - at, wide = left < PACKED_COLUMNS ? left : PACKED_COLUMNS;
        const size_t even = wide / LANES * LANES;
        for (size_t j = 0; j < some; j++) {
            if (j + 1 < some)
                prefetch(of->packed, of->first + first + j + 1, at);
            read_columns(of, first + j, at, wide, tile[j]);
        }
        for (size_t i = 0; i < of->count; i++) {
            const float *x = of->x + i * width + at;
            floats s[8];
            memcpy(s, sums[i], sizeof s);
            add_products(s, x, w, even, FLOAT32);
            memcpy(sums[i], s, sizeof s);
            if (wide == left)
                for (size_t j = 0; j < some; j++)
                    of->out[i * of->rows + first + j] = end_product(sum(s[j]), x, w[j], even, wide, FLOAT32);
        }
    }
}

/* ---- products of many rows ------------------------------------------------------------------------------ */

/* The tile, the sums, and the columns of `x` that belong to them stay in an L2 cache of 512 KB. */
#define TILE_ROWS 24  /* of the matrix */
#define PANEL_ROWS 128 /* of `x` */

/* Adds the products of four rows of `x` and three of the tile to their sums. Twelve sums, three vectors of the tile and
 * one of `x` are the sixteen registers of AVX2. */
INLINE void add_tile(const float *const x[4], float (*w)[PACKED_COLUMNS], size_t even, floats (*sums)[TILE_ROWS]) {
    floats s[4][3];
    for (size_t i = 0; i < 4; i++)
        memcpy(s[i], sums[i], sizeof s[i]);
    for (size_t at = 0; at < even; at += LANES) {
        const floats w0 = load(w[0] + at), w1 = load(w[1] + at), w2 = load(w[2] + at);
        for (size_t i = 0; i < 4; i++) {
            const floats part = load(x[i] + at);
            s[i][0] += part * w0, s[i][1] += part * w1, s[i][2] += part * w2;
        }
    }
    for (size_t i = 0; i < 4; i++)
        memcpy(sums[i], s[i], sizeof s[i]);
}

/* Products of up to PANEL_ROWS rows of `x` with TILE_ROWS rows of the matrix, or with as many as there are. Each is summed
 * in the order in which products of a few rows are, so it has the same bits. */
INLINE void multiply_panel(const struct product *of, size_t row, size_t first) {
    const size_t count = of->count - row < PANEL_ROWS ? of->count - row : PANEL_ROWS;
    const size_t some = of->rows - first < TILE_ROWS ? of->rows - first : TILE_ROWS;
    float tile[TILE_ROWS][PACKED_COLUMNS] __attribute__((aligned(32)));
    floats sums[PANEL_ROWS][TILE_ROWS];
    memset(sums, 0, (count + 3) / 4 * 4 * sizeof sums[0]);
    for (size_t j = some; j < TILE_ROWS; j++)
        memset(tile[j], 0, sizeof tile[j]);
    for (size_t at = 0; at < of->width; at += PACKED_COLUMNS) {
        const size_t left = of->width - at, wide = left < PACKED_COLUMNS ? left : PACKED_COLUMNS;
        const size_t even = wide / LANES * LANES;
        for (size_t j = 0; j < some; j++)
            read_columns(of, first + j, at, wide, tile[j]);
        for (size_t i = 0; i < count; i += 4) {
            const float *x[4];
            for (size_t k = 0; k < 4; k++)
                x[k] = of->x + (row + (i + k < count ? i + k : count - 1)) * of->width + at;
            for (size_t j = 0; j < some; j += 3)
                add_tile(x, tile + j, even, (floats(*)[TILE_ROWS]) & sums[i][j]);
        }
        for (size_t i = 0; wide == left && i < count; i++)
            for (size_t j = 0; j < some; j++)
                of->out[(row + i) * of->rows + first + j] = end_product(
                    sum(sums[i][j]), of->x + (row + i) * of->width + at, (const char *)tile[j], even, wide, FLOAT32);
    }
}

INLINE void multiply_panels(const struct product *of, size_t first) {
    for (size_t row = 0; row < of->count; row += PANEL_ROWS)
        multiply_panel(of, row, first);
}

/* Rows of the matrix in a task. */
INLINE size_t task_rows(const struct product *of) {
    return of->count > FEW_ROWS ? TILE_ROWS : of->packed ? 8 : ROWS;
}

struct unpacking {
    const struct packed *packed;
    const int64_t *rows;
    float *out;
    size_t count;
    atomic_size_t next;
};

INLINE void unpack_row(const struct unpacking *of, size_t number) {
    const size_t width = of->packed->columns;
    float *to = of->out + number * width, tile[PACKED_COLUMNS];
    for (size_t at = 0; at < width; at += PACKED_COLUMNS) {
        const size_t wide = width - at < PACKED_COLUMNS ? width - at : PACKED_COLUMNS;
        decode_columns(of->packed, of->rows[number], at, wide, tile);
        memcpy(to + at, tile, wide * sizeof(float));
    }
}

/* ---- attention over one block of tokens ------------------------------------------------------------------------------- */

/* scores[g][t] = q[g] · k[t], for `count` reordered queries and `tokens` keys; further scores up to a multiple of LANES are
 * of no use. Four queries and two keys at a time: eight sums that do not wait for one another, and each number is read for several of
 * them. The values of these tokens are fetched meanwhile, two rows at a time: they are read by columns, which the processor
 * does not foresee. */
INLINE void multiply(const float *queries, size_t count, size_t width, const char *keys, const char *values,
                     size_t tokens, float (*scores)[BLOCK], int format) {
    const size_t even = width / LANES * LANES, row = width * number_bytes(format);
    for (size_t g = 0; g < count; g += 4) {
        const size_t last = count - 1;
        const float *q[4];
        for (size_t i = 0; i < 4; i++)
            q[i] = queries + (g + i < last ? g + i : last) * width;
        for (size_t first = 0; first < tokens; first += LANES) {
            floats s[4][LANES];
            for (size_t t = 0; t < LANES; t += 2) {
                const size_t at = first + t < tokens ? first + t : tokens - 1, next = at + 1 < tokens ? at + 1 : at;
                const char *const key[2] = {keys + at * row, keys + next * row};
                for (size_t byte = 0; g == 0 && byte < 2 * row; byte += LINE)
                    __builtin_prefetch(values + at * row + byte);
                floats s00 = {0}, s01 = {0}, s10 = {0}, s11 = {0}, s20 = {0}, s21 = {0}, s30 = {0}, s31 = {0};
                for (size_t w = 0; w < even; w += PAIR) {
                    floats k0, k1, l0 = {0}, l1 = {0};
                    const int two = w + PAIR <= even;
                    if (two) {
                        read_two(key[0], w, format, &k0, &l0);
                        read_two(key[1], w, format, &k1, &l1);
                    } else {
                        k0 = read(key[0], w, format), k1 = read(key[1], w, format);
                    }
                    const floats q0 = load(q[0] + w), q1 = load(q[1] + w), q2 = load(q[2] + w), q3 = load(q[3] + w);
                    s00 += q0 * k0, s01 += q0 * k1;
                    s10 += q1 * k0, s11 += q1 * k1;
                    s20 += q2 * k0, s21 += q2 * k1;
                    s30 += q3 * k0, s31 += q3 * k1;
                    if (two) {
                        const size_t v = w + LANES;
                        const floats r0 = load(q[0] + v), r1 = load(q[1] + v), r2 = load(q[2] + v), r3 = load(q[3] + v);
                        s00 += r0 * l0, s01 += r0 * l1;
                        s10 += r1 * l0, s11 += r1 * l1;
                        s20 += r2 * l0, s21 += r2 * l1;
                        s30 += r3 * l0, s31 += r3 * l1;
                    }
                }
                s[0][t] = s00, s[1][t] = s10, s[2][t] = s20, s[3][t] = s30;
                s[0][t + 1] = s01, s[1][t + 1] = s11, s[2][t + 1] = s21, s[3][t + 1] = s31;
            }
            for (size_t i = 0; i < 4 && g + i < count; i++) {
                float *to = scores[g + i] + first;
                store(to, sums_of(s[i]));
                for (size_t w = even; w < width; w++)
                    for (size_t t = 0; t < LANES && first + t < tokens; t++)
                        to[t] += q[i][w] * read_one(keys + (first + t) * row, w, format);
            }
        }
    }
}

/* sums[g] += Σ shares[g][t] v[t], for `vectors` (1 or 2) vectors from number `w` on, reordered. The same columns of
 * `ahead` are fetched meanwhile. */
INLINE void add_some(float *const to[4], const float *const share[4], size_t w, size_t vectors, const char *values,
                     const char *ahead, size_t tokens, size_t row, int format) {
    const size_t next = w + (vectors - 1) * LANES;
    floats a0 = load(to[0] + w), a1 = load(to[1] + w), a2 = load(to[2] + w), a3 = load(to[3] + w);
    floats b0 = load(to[0] + next), b1 = load(to[1] + next), b2 = load(to[2] + next), b3 = load(to[3] + next);
    for (size_t t = 0; t < tokens; t++) {
        floats v, u = {0};
        if (vectors == 2)
            read_two(values + t * row, w, format, &v, &u);
        else
            v = read(values + t * row, w, format);
        __builtin_prefetch(ahead + t * row + w * number_bytes(format));
        a0 += share[0][t] * v;
        a1 += share[1][t] * v;
        a2 += share[2][t] * v;
        a3 += share[3][t] * v;
        if (vectors == 2) {
            b0 += share[0][t] * u;
            b1 += share[1][t] * u;
            b2 += share[2][t] * u;
            b3 += share[3][t] * u;
        }
    }
    store(to[0] + w, a0); /* a repeated query is stored again with the same numbers */
    store(to[1] + w, a1);
    store(to[2] + w, a2);
    store(to[3] + w, a3);
    if (vectors == 2) {
        store(to[0] + next, b0);
        store(to[1] + next, b1);
        store(to[2] + next, b2);
        store(to[3] + next, b3);
    }
}

/* sums[g] += Σ shares[g][t] v[t] */
INLINE void add_values(float (*sums)[MOST_WIDTH], size_t count, size_t width, const char *values, const char *ahead,
                       size_t tokens, float (*shares)[BLOCK], int format) {
    const size_t even = width / LANES * LANES, row = width * number_bytes(format);
    for (size_t g = 0; g < count; g += 4) {
        const size_t last = count - 1;
        float *to[4];
        const float *share[4];
        for (size_t i = 0; i < 4; i++) {
            to[i] = sums[g + i < last ? g + i : last];
            share[i] = shares[g + i < last ? g + i : last];
        }
        size_t w = 0;
        for (; w + 2 * LANES <= even; w += 2 * LANES)
            add_some(to, share, w, 2, values, ahead, tokens, row, format);
        if (w < even)
            add_some(to, share, w, 1, values, ahead, tokens, row, format);
        for (size_t i = 0; i < 4 && g + i < count; i++)
            for (w = even; w < width; w++)
                for (size_t t = 0; t < tokens; t++)
                    sums[g + i][w] += shares[g + i][t] * read_one(values + t * row, w, format);
    }
}

struct softmax {
    float most[TILE], total[TILE], sums[TILE][MOST_WIDTH];
};

INLINE void begin(struct softmax *soft, size_t count, size_t width) {
    for (size_t g = 0; g < count; g++) {
        soft->most[g] = -INFINITY;
        soft->total[g] = 0;
        memset(soft->sums[g], 0, width * sizeof(float));
    }
}

/* Copies the numbers of a softmax to or from `kept`, with `width` + 2 floats for each query. */
INLINE void keep(const struct softmax *soft, float *kept, size_t stride, size_t count, size_t width) {
    for (size_t g = 0; g < count; g++, kept += stride) {
        kept[0] = soft->most[g], kept[1] = soft->total[g];
        memcpy(kept + 2, soft->sums[g], width * sizeof(float));
    }
}

INLINE void resume(struct softmax *soft, const float *kept, size_t stride, size_t count, size_t width) {
    for (size_t g = 0; g < count; g++, kept += stride) {
        soft->most[g] = kept[0], soft->total[g] = kept[1];
        memcpy(soft->sums[g], kept + 2, width * sizeof(float));
    }
}

INLINE float exp_one(float x) {
    const floats xs = {x};
    return exp_of(xs)[0];
}

/* Adds `other` to `soft`. */
INLINE void merge(struct softmax *soft, const struct softmax *other, size_t count, size_t width) {
    for (size_t g = 0; g < count; g++) {
        const float most = soft->most[g] > other->most[g] ? soft->most[g] : other->most[g];
        const float own = exp_one(soft->most[g] - most), theirs = exp_one(other->most[g] - most);
        for (size_t w = 0; w < width; w++)
            soft->sums[g][w] = soft->sums[g][w] * own + other->sums[g][w] * theirs;
        soft->total[g] = soft->total[g] * own + other->total[g] * theirs;
        soft->most[g] = most;
    }
}

/* The scores become shares of the softmax so far. The sums of values so far shrink if the maximum grows. */
INLINE void weigh(struct softmax *soft, float (*scores)[BLOCK], size_t count, size_t width, size_t tokens,
                  const float *key_scales, const float *value_scales, const struct layer *layer) {
    for (size_t g = 0; g < count; g++) {
        float *s = scores[g], most = soft->most[g];
        floats top = (floats){0} + most;
        for (size_t t = 0; t < BLOCK; t += LANES) {
            floats x = load(s + t) * load(key_scales + t);
            if (layer->cap != 0.0f)
                x = layer->cap * tanh_of(x / layer->cap);
            store(s + t, x);
        }
        for (size_t t = tokens; t < BLOCK; t++)
            s[t] = -INFINITY;
        for (size_t t = 0; t < BLOCK; t += LANES)
            top = choose(load(s + t) > top, load(s + t), top);
        for (size_t t = 0; t < LANES; t++)
            most = top[t] > most ? top[t] : most;
        const float shrink = most == soft->most[g] ? 1.0f : exp_one(soft->most[g] - most); /* mostly no new maximum */
        floats total = {0};
        for (size_t t = 0; t < BLOCK; t += LANES) {
            floats share = exp_of(load(s + t) - most);
            total += share;
            store(s + t, share * load(value_scales + t));
        }
        soft->total[g] = soft->total[g] * shrink + sum(total);
        soft->most[g] = most;
        if (shrink != 1.0f)
            for (size_t w = 0; w < width; w++)
                soft->sums[g][w] *= shrink;
    }
}

/* The scales of a block's keys or values, times `by`. */
INLINE void scales_of(float *scales, const struct layer *layer, int plane, const char *page, size_t head, size_t from,
                      size_t tokens, float by, int format) {
    const int scaled = format == INT8 || format == CODED;
    const float fixed = scaled && layer->fixed[plane] != NULL ? layer->fixed[plane][head] : 1.0f;
    for (size_t t = 0; t < BLOCK; t++)
        scales[t] = fixed * by;
    if (!scaled || layer->fixed[plane] != NULL)
        return;
    const char *held = page + layer->scales[plane] + 2 * (head * layer->chunk + from);
    for (size_t t = 0; t < tokens; t++)
        scales[t] = read_one(held, t, BFLOAT16) * by;
}

/* The keys (plane 0) or values (1) of a head, from token `at` to the end of its page. */
INLINE const char *vectors_of(const struct layer *layer, int plane, const int64_t *table, size_t head, size_t at,
                              int format) {
    const size_t chunk = layer->chunk, vector = (head * chunk + at % chunk) * layer->width;
    const char *held = layer->pages + table[at / chunk] * layer->page_bytes + layer->start[plane];
    if (format == CODED)
        return held + (layer->codes[plane] == U4 ? vector / 2 : vector);
    return held + vector * number_bytes(format);
}

/* `count` codes of a plane as numbers, in `to`. */
INLINE const char *numbers_of(const struct layer *layer, int plane, const char *held, size_t count, float *to) {
    const uint8_t *codes = (const uint8_t *)held;
    switch (layer->codes[plane]) {
    case E4M3:
        decode_codes(codes, count, to, 8, E4M3);
        break;
    case E5M2:
        decode_codes(codes, count, to, 8, E5M2);
        break;
    case I8:
        decode_codes(codes, count, to, 8, I8);
        break;
    default:
        decode_codes(codes, count, to, 4, U4);
        for (size_t i = 0; i < count; i++)
            to[i] -= 8;
    }
    return (const char *)to;
}

INLINE void attend(const struct work *work, size_t task, int format) {
    const struct layer *layer = work->layer;
    const size_t width = layer->width, chunk = layer->chunk, groups = layer->heads / layer->kv_heads;
    const size_t tile = task % work->tiles, head = task / work->tiles % layer->kv_heads;
    const struct row *row = &work->rows[task / work->tiles / layer->kv_heads];
    const int64_t *table = (const int64_t *)(intptr_t)row->table;
    const size_t count = groups - tile * TILE < TILE ? groups - tile * TILE : TILE;
    const size_t query = row->number * layer->heads + head * groups + tile * TILE;
    float queries[TILE * MOST_WIDTH], scores[TILE][BLOCK] = {{0}}, key_scales[BLOCK], value_scales[BLOCK];
    float decoded[BLOCK * MOST_WIDTH];
    const int numbers = format == CODED ? FLOAT32 : format;
    struct softmax soft, whole;
    const size_t half = width + 2, place = task / work->tiles / layer->kv_heads * layer->heads + query % layer->heads;
    float *state = work->states == NULL ? NULL : work->states + place * 2 * half;
    for (size_t g = 0; g < count; g++)
        reordered(queries + g * width, work->queries + (query + g) * width, width, numbers, 0);
    if (state == NULL) {
        begin(&soft, count, width);
        begin(&whole, count, width);
    } else {
        resume(&whole, state, 2 * half, count, width);
        resume(&soft, state + half, 2 * half, count, width);
    }
    for (size_t at = row->first, tokens; at < (size_t)row->stop; at += tokens) {
        const size_t from = at % chunk, left = row->stop - at;
        const char *page = layer->pages + table[at / chunk] * layer->page_bytes;
        tokens = chunk - from < BLOCK ? chunk - from : BLOCK;
        tokens = left < tokens ? left : tokens;
        const char *keys = vectors_of(layer, 0, table, head, at, format);
        const char *values = vectors_of(layer, 1, table, head, at, format);
        const char *ahead = vectors_of(layer, 0, table, head, tokens < left ? at + tokens : at, format);
        scales_of(key_scales, layer, 0, page, head, from, tokens, layer->scale, format);
        scales_of(value_scales, layer, 1, page, head, from, tokens, 1.0f, format);
        if (format == CODED)
            keys = numbers_of(layer, 0, keys, tokens * width, decoded);
        multiply(queries, count, width, keys, format == CODED ? keys : values, tokens, scores, numbers);
        weigh(&soft, scores, count, width, tokens, key_scales, value_scales, layer);
        if (format == CODED)
            values = numbers_of(layer, 1, values, tokens * width, decoded);
        add_values(soft.sums, count, width, values, ahead, tokens, scores, numbers);
        if ((at + tokens) / SEGMENT != at / SEGMENT) {
            merge(&whole, &soft, count, width);
            begin(&soft, count, width);
        }
    }
    if (!work->last) {
        keep(&whole, state, 2 * half, count, width);
        keep(&soft, state + half, 2 * half, count, width);
        return;
    }
    if (soft.total[0] != 0) /* not at the very end of a segment */
        merge(&whole, &soft, count, width);
    for (size_t g = 0; g < count; g++) {
        for (size_t w = 0; w < width; w++)
            whole.sums[g][w] /= whole.total[g];
        reordered(work->out + (query + g) * width, whole.sums[g], width, numbers, 1);
        work->lse[query + g] = whole.most[g] + logf(whole.total[g]);
    }
}

/* ---- recurrent states ----------------------------------------------------------------------------------- */

/* The states of one layer in pages, and the tokens that they are taken through. The state of a page has a matrix of `rows` ×
 * `columns` for each head. Heads share `key_heads` queries and keys, in order. Token for token, with k a key and q a query:
 *
 *     S  <-  a S + k (x) u                   and the token reads      S^T q
 *
 * `decays` are the logarithms of a. Mamba-2: u is `added`. The gated delta rule: u is rate (added - a S^T k). Mamba-1
 * (`fading`): a differs for each number of S, and its logarithm is the column's entry of `decays` times that of `fading`. */
struct recurrence {
    float *states;               /* of page 0, [heads, rows, columns] */
    uint64_t page_floats;        /* from one page to the next */
    const float *queries, *keys; /* [tokens, key_heads, rows] */
    const float *added;          /* [tokens, heads, columns] */
    const float *decays;         /* [tokens, heads], or with `fading` [tokens, heads, columns] */
    const float *rates;          /* [tokens, heads]; NULL without the delta rule */
    const float *fading;         /* [rows, columns], below 0; NULL without Mamba-1 */
    float *out;                  /* [tokens, heads, columns] */
    uint64_t heads, key_heads, rows, columns;
};

/* A sequence: the page of its state, and its tokens in the batch. */
struct passage {
    int64_t page, first, tokens;
};

struct recurring {
    const struct recurrence *of;
    const struct passage *passages;
    size_t tasks;
    atomic_size_t next;
};

#define STRIP 32 /* columns in a task: with 128 rows they stay in the L1 cache */
#define VECTORS (STRIP / LANES)
#define MOST_ROWS 256

struct strip {
    floats of[VECTORS];
};

INLINE struct strip read_strip(const float *from, size_t columns) {
    struct strip strip = {{{0}}};
    memcpy(&strip, from, columns * sizeof(float));
    return strip;
}

/* A column's numbers depend neither on the other columns nor on where a sequence's tokens are cut into steps. */
INLINE void recur(const struct recurring *work, size_t task) {
    const struct recurrence *of = work->of;
    const size_t strips = (of->columns + STRIP - 1) / STRIP, first = task % strips * STRIP;
    const size_t head = task / strips % of->heads, key_head = head / (of->heads / of->key_heads);
    const size_t columns = of->columns - first < STRIP ? of->columns - first : STRIP, rows = of->rows;
    const struct passage *passage = &work->passages[task / strips / of->heads];
    float *matrix = of->states + passage->page * of->page_floats + head * rows * of->columns + first;
    struct strip state[MOST_ROWS], fading[MOST_ROWS];
    for (size_t row = 0; row < rows; row++) {
        state[row] = read_strip(matrix + row * of->columns, columns);
        if (of->fading != NULL)
            fading[row] = read_strip(of->fading + row * of->columns + first, columns);
    }
    for (size_t token = passage->first; token < (size_t)(passage->first + passage->tokens); token++) {
        const size_t at = token * of->heads + head, keys = (token * of->key_heads + key_head) * rows;
        const float *key = of->keys + keys, *query = of->queries + keys;
        struct strip u = read_strip(of->added + at * of->columns + first, columns), out = {{{0}}};
        if (of->fading != NULL) {
            const struct strip steps = read_strip(of->decays + at * of->columns + first, columns);
            for (size_t row = 0; row < rows; row++)
                for (size_t v = 0; v < VECTORS; v++) {
                    const floats left = exp_of(steps.of[v] * fading[row].of[v]);
                    state[row].of[v] = left * state[row].of[v] + key[row] * u.of[v];
                    out.of[v] += query[row] * state[row].of[v];
                }
        } else {
            const float left = exp_one(of->decays[at]);
            if (of->rates != NULL) {
                struct strip held = {{{0}}};
                for (size_t row = 0; row < rows; row++)
                    for (size_t v = 0; v < VECTORS; v++)
                        held.of[v] += key[row] * state[row].of[v];
                for (size_t v = 0; v < VECTORS; v++)
                    u.of[v] = of->rates[at] * (u.of[v] - left * held.of[v]);
            }
            for (size_t row = 0; row < rows; row++)
                for (size_t v = 0; v < VECTORS; v++) {
                    state[row].of[v] = left * state[row].of[v] + key[row] * u.of[v];
                    out.of[v] += query[row] * state[row].of[v];
                }
        }
        memcpy(of->out + at * of->columns + first, &out, columns * sizeof(float));
    }
    for (size_t row = 0; row < rows; row++)
        memcpy(matrix + row * of->columns, &state[row], columns * sizeof(float));
}

/* A causal convolution of each channel. Token t is the sum of `width` rows of `inputs`: of those in sources[t]. */
struct convolution {
    const float *inputs; /* [inputs, channels] */
    const int64_t *sources;
    const float *weights; /* [width, channels] */
    const float *bias;    /* NULL without */
    float *out;           /* [tokens, channels] */
    size_t tokens, width, channels;
    atomic_size_t next;
};

INLINE void convolve(const struct convolution *of, size_t token) {
    const size_t channels = of->channels, even = channels / LANES * LANES;
    const int64_t *sources = of->sources + token * of->width;
    float *out = of->out + token * channels;
    for (size_t c = 0; c < even; c += LANES) {
        floats total = of->bias == NULL ? (floats){0} : load(of->bias + c);
        for (size_t tap = 0; tap < of->width; tap++)
            total += load(of->weights + tap * channels + c) * load(of->inputs + sources[tap] * channels + c);
        store(out + c, total);
    }
    for (size_t c = even; c < channels; c++) {
        float total = of->bias == NULL ? 0 : of->bias[c];
        for (size_t tap = 0; tap < of->width; tap++)
            total = fmaf(of->weights[tap * channels + c], of->inputs[sources[tap] * channels + c], total);
        out[c] = total;
    }
}

/* ---- the functions for this processor --------------------------------------------------------------------- */

#define FOR_EACH_TASK(name, of, call) \
    static void name(struct of *work) { \
        for (size_t task; (task = atomic_fetch_add(&work->next, 1)) < TASKS_##of(work);) \
            call; \
    }
#define TASKS_work(work) (work)->tasks
#define TASKS_product(work) ((work)->rows + task_rows(work) - 1) / task_rows(work)
#define TASKS_unpacking(work) (work)->count
#define TASKS_recurring(work) (work)->tasks
#define TASKS_convolution(work) (work)->tokens
#define FOR_EACH_FORMAT(prefix, suffix) \
    prefix FOR_EACH_TASK(attend_float32##suffix, work, attend(work, task, FLOAT32)) \
    prefix FOR_EACH_TASK(attend_bfloat16##suffix, work, attend(work, task, BFLOAT16)) \
    prefix FOR_EACH_TASK(attend_int8##suffix, work, attend(work, task, INT8)) \
    prefix FOR_EACH_TASK(attend_coded##suffix, work, attend(work, task, CODED)) \
    prefix FOR_EACH_TASK(multiply_float32##suffix, product, multiply_rows(work, task * ROWS, FLOAT32)) \
    prefix FOR_EACH_TASK(multiply_bfloat16##suffix, product, multiply_rows(work, task * ROWS, BFLOAT16)) \
    prefix FOR_EACH_TASK(multiply_packed##suffix, product, multiply_packed_rows(work, task * 8)) \
    prefix FOR_EACH_TASK(multiply_many##suffix, product, multiply_panels(work, task * TILE_ROWS)) \
    prefix FOR_EACH_TASK(unpack##suffix, unpacking, unpack_row(work, task)) \
    prefix FOR_EACH_TASK(recur_all##suffix, recurring, recur(work, task)) \
    prefix FOR_EACH_TASK(convolve_all##suffix, convolution, convolve(work, task))

#define PLAIN
FOR_EACH_FORMAT(PLAIN, )
#if X86
#define WIDE __attribute__((target("avx2,fma")))
FOR_EACH_FORMAT(WIDE, _wide)
#endif

#if X86
static int wide(void) { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }
#define CHOSEN(name) (wide() ? name##_wide : name)
#else
#define CHOSEN(name) name
#endif

static void *attend_some(void *work_) {
    struct work *work = work_;
    const int format = work->layer->format;
    (format == FLOAT32    ? CHOSEN(attend_float32)
     : format == BFLOAT16 ? CHOSEN(attend_bfloat16)
     : format == INT8     ? CHOSEN(attend_int8)
                          : CHOSEN(attend_coded))(work);
    return NULL;
}

static void *multiply_some(void *work_) {
    struct product *work = work_;
    (work->count > FEW_ROWS        ? CHOSEN(multiply_many)
     : work->packed                ? CHOSEN(multiply_packed)
     : work->format == FLOAT32     ? CHOSEN(multiply_float32)
                                   : CHOSEN(multiply_bfloat16))(work);
    return NULL;
}

static void *unpack_some(void *work) {
    CHOSEN(unpack)(work);
    return NULL;
}

static void *recur_some(void *work) {
    CHOSEN(recur_all)(work);
    return NULL;
}

static void *convolve_some(void *work) {
    CHOSEN(convolve_all)(work);
    return NULL;
}

/* Threads that help with one call at a time, and wait between calls. A thread that wakes when all tasks are taken does
 * not join, so the caller waits only for threads that compute. */
static struct {
    pthread_mutex_t turn, lock; /* turn: of the call that the threads help; lock: of the rest */
    pthread_cond_t wake, done;
    void *(*part)(void *);
    void *work;
    int started, wanted, running;
} helpers = {.turn = PTHREAD_MUTEX_INITIALIZER,
             .lock = PTHREAD_MUTEX_INITIALIZER,
             .wake = PTHREAD_COND_INITIALIZER,
             .done = PTHREAD_COND_INITIALIZER};

static void *help(void *unused) {
    pthread_mutex_lock(&helpers.lock);
    for (;;) {
        while (helpers.wanted == 0)
            pthread_cond_wait(&helpers.wake, &helpers.lock);
        helpers.wanted--;
        helpers.running++;
        void *(*const part)(void *) = helpers.part;
        void *const work = helpers.work;
        pthread_mutex_unlock(&helpers.lock);
        part(work);
        pthread_mutex_lock(&helpers.lock);
        if (--helpers.running == 0)
            pthread_cond_signal(&helpers.done);
    }
    return unused;
}

/* A child has none of its parent's other threads, and may have been forked while one of them held a lock. */
static void forget_helpers(void) {
    pthread_mutex_init(&helpers.turn, NULL);
    pthread_mutex_init(&helpers.lock, NULL);
    pthread_cond_init(&helpers.wake, NULL);
    pthread_cond_init(&helpers.done, NULL);
    helpers.started = helpers.wanted = helpers.running = 0;
}

static void watch_forks(void) { pthread_atfork(NULL, NULL, forget_helpers); }

/* Runs `part` on this thread and up to `threads` - 1 others. If they cannot be started, or help another call, this one
 * does all. */
static void run(void *(*part)(void *), void *work, size_t tasks, int threads) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    int others = threads - 1 < MOST_THREADS ? threads - 1 : MOST_THREADS;
    if ((size_t)others + 1 > tasks)
        others = (int)tasks - 1;
    if (others < 1 || pthread_mutex_trylock(&helpers.turn) != 0) {
        part(work);
        return;
    }
    pthread_once(&once, watch_forks);
    pthread_t thread;
    while (helpers.started < others && pthread_create(&thread, NULL, help, NULL) == 0) {
        pthread_detach(thread);
        helpers.started++;
    }
    pthread_mutex_lock(&helpers.lock);
    helpers.part = part;
    helpers.work = work;
    helpers.wanted = others;
    pthread_cond_broadcast(&helpers.wake);
    pthread_mutex_unlock(&helpers.lock);
    part(work);
    pthread_mutex_lock(&helpers.lock);
    helpers.wanted = 0;
    while (helpers.running > 0)
        pthread_cond_wait(&helpers.done, &helpers.lock);
    pthread_mutex_unlock(&helpers.lock);
    pthread_mutex_unlock(&helpers.turn);
}

int tierstore_decode_interface(void) { return INTERFACE; }

/* Equal numbers on two machines: equal bits of all results. Add 2 with each change of an order of sums. */
int tierstore_decode_arithmetic(void) {
#if X86
    return 4 + wide();
#else
    return 4;
#endif
}

/* out[i][j] = x[i] · weight[j]: `count` rows of float32 and `rows` of `format` (not INT8), each of `width` numbers. */
void tierstore_multiply(const float *x, size_t count, const void *weight, size_t rows, size_t width, int format,
                        float *out, int threads) {
    struct product work = {x, weight, NULL, out, count, 0, rows, width, format, 0, 0};
    run(multiply_some, &work, TASKS_product(&work), threads);
}

/* out[i][j] = x[i] · row first + j of `packed`: `count` rows of `x` and `rows` of the matrix, whose
 * numbers are rounded to bfloat16 if `rounded`. */
void tierstore_multiply_packed(const struct packed *packed, const float *x, size_t count, size_t first, size_t rows,
                               float *out, int rounded, int threads) {
    struct product work = {x, NULL, packed, out, count, first, rows, packed->columns, 0, rounded, 0};
    run(multiply_some, &work, TASKS_product(&work), threads);
}

/* out[i] = row rows[i] of `packed`, for `count` rows. */
void tierstore_unpack(const struct packed *packed, const int64_t *rows, size_t count, float *out, int threads) {
    struct unpacking work = {packed, rows, out, count, 0};
    run(unpack_some, &work, count, threads);
}

/* Takes the states of `count` sequences through their tokens, each alone. */
void tierstore_recur(const struct recurrence *of, const struct passage *passages, size_t count, int threads) {
    const size_t tasks = count * of->heads * ((of->columns + STRIP - 1) / STRIP);
    struct recurring work = {of, passages, tasks, 0};
    run(recur_some, &work, tasks, threads);
}

/* out[t] = bias + Σ weights[tap] × inputs[sources[t][tap]], for `tokens` tokens and each of `channels` numbers. */
void tierstore_convolve(const float *inputs, const int64_t *sources, size_t tokens, const float *weights, size_t width,
                        const float *bias, size_t channels, float *out, int threads) {
    struct convolution work = {inputs, sources, weights, bias, out, tokens, width, channels, 0};
    run(convolve_some, &work, tokens, threads);
}

/* Attention of the `count` rows in `rows` over one layer. `queries` and `out` are [batch rows, heads, width], `lse`
 * (the logarithm of each softmax denominator) [batch rows, heads]; only the named rows are read and written. Every
 * row sees at least one token, and has a page for each. `threads` includes the caller's.
 *
 * With `states`, several calls together see all tokens of the same rows: each a part of them, in order, which may be
 * empty. `states` is [count, heads, 2, width + 2], and holds two softmaxes for each query between the calls: that of
 * whole segments, and that since. At first their maxima are -inf and the rest is 0. The `last` call writes `out` and `lse`.
 * The result has the same bits as that of one call. */
void tierstore_attend(const struct layer *layer, const struct row *rows, size_t count, const float *queries,
                      float *out, float *lse, float *states, int last, int threads) {
    const size_t tiles = (layer->heads / layer->kv_heads + TILE - 1) / TILE;
    const size_t tasks = count * layer->kv_heads * tiles;
    struct work work = {layer, rows, queries, out, lse, states, tasks, tiles, last, 0};
    run(attend_some, &work, work.tasks, threads);
}
