/* The lossless codec of float pages: encode and decode, a page at a time. tierstore/codec.py says what it is for.
 *
 * A page is cut into blocks of 8 KiB. Each block is encoded as numbers of the one kind that makes it smallest. The
 * caller therefore need not know the kinds of numbers in a page. A number is rotated left by one bit, so that its
 * exponent is at the top and its sign at the bottom:
 *
 *     bfloat16   eeeeeeee mmmmmmms        the upper byte is the symbol
 *     float16    eeeeemmm mmmmmmms        5 bits of the upper byte are the symbol, 3 are stored unchanged
 *     float32    eeeeeeee mmm…mms         the uppermost of four bytes is the symbol
 *
 * Mantissas do not compress: their bytes are stored unchanged, plane by plane. The most frequent 1, 3, 7 or 15 symbols of
 * a block have codes of 0 … 4 bits, and the encoder takes the width that makes the block smallest. The last code says
 * that the symbol is in a list after the codes. A Huffman code would be 5 % smaller. Codes of one width are decoded
 * several times as fast: whole registers are shifted, and one register is the table.
 *
 * Block:   kind | width << 4 (u8), escapes (u16), symbols (1 byte each: 1 where width is 0, else 2^width - 1),
 *          groups of 256 numbers: planes of lower bytes (256 each), the 3 bits (96 bytes; float16), codes (32 * width),
 *          then the escaped symbols in order, then the block's last bytes that fill no group.
 *          Or: kind RAW and the bytes; or kind SAME and one byte, which all are.
 *
 * The decoder trusts no input: damaged bytes never make it write outside the page or read outside the given bytes.
 */

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__) && !defined(PORTABLE)
#define X86 1
#include <immintrin.h>
#else
#define X86 0
#endif

#define INTERFACE 1 /* what native/__init__.py was written for */

#define BLOCK 8192
#define GROUP 256
#define MOST_WIDTH 4
#define HEAD 3

enum kind { RAW, SAME, BF16, F16, F32, KINDS };

static const int NUMBER_BYTES[KINDS] = {0, 0, 2, 2, 4};
static const int KEPT_BITS[KINDS] = {0, 0, 0, 3, 0}; /* of the upper byte, besides whole lower bytes */

typedef const uint8_t *bytes;

#define INLINE __attribute__((always_inline)) static inline

/* ---- bits, 256 values at a time --------------------------------------------------------------------------- */

/* Values of `width` bits: those of 1 bit fill 32 bytes, of 2 bits 64, of 4 bits 128. Of a byte's values the first is the
 * lowest, and the next is 256 / (8 / width) further on, so that neighbours are unpacked together. 3 bits are 2 and 1. */
INLINE void pack_even(uint8_t *to, bytes values, int width, int shift) {
    int stride = GROUP * width / 8, mask = (1 << width) - 1;
    for (int at = 0; at < stride; at++) {
        int packed = 0;
        for (int part = 0; part < 8 / width; part++)
            packed |= (values[at + part * stride] >> shift & mask) << part * width;
        to[at] = (uint8_t)packed;
    }
}

INLINE void pack(uint8_t *to, bytes values, int width) {
    switch (width) {
    case 1: pack_even(to, values, 1, 0); break;
    case 2: pack_even(to, values, 2, 0); break;
    case 3: pack_even(to, values, 2, 0), pack_even(to + 64, values, 1, 2); break;
    case 4: pack_even(to, values, 4, 0); break;
    }
}

INLINE void unpack_even(uint8_t *values, bytes of, int width, int shift, int add) {
    int stride = GROUP * width / 8, mask = (1 << width) - 1;
    for (int part = 0; part < 8 / width; part++)
        for (int at = 0; at < stride; at++) {
            uint8_t value = (uint8_t)((of[at] >> part * width & mask) << shift);
            values[part * stride + at] = add ? values[part * stride + at] | value : value;
        }
}

INLINE void unpack(uint8_t *values, bytes of, int width) {
    switch (width) {
    case 0: memset(values, 0, GROUP); break;
    case 1: unpack_even(values, of, 1, 0, 0); break;
    case 2: unpack_even(values, of, 2, 0, 0); break;
    case 3: unpack_even(values, of, 2, 0, 0), unpack_even(values, of + 64, 1, 2, 1); break;
    case 4: unpack_even(values, of, 4, 0, 0); break;
    }
}

/* ---- numbers and their planes ------------------------------------------------------------------------------ */

INLINE uint32_t turned_left(uint32_t number) { return number << 1 | number >> 31; }
INLINE uint16_t turned_left_16(uint16_t number) { return (uint16_t)(number << 1 | number >> 15); }

INLINE void split_16(bytes of, uint8_t *upper, uint8_t *lower) {
    for (int at = 0; at < GROUP; at++) {
        uint16_t number;
        memcpy(&number, of + 2 * at, 2);
        number = turned_left_16(number);
        upper[at] = (uint8_t)(number >> 8), lower[at] = (uint8_t)number;
    }
}

INLINE void join_16(uint8_t *to, bytes upper, bytes lower) {
    for (int at = 0; at < GROUP; at++) {
        uint16_t number = (uint16_t)(upper[at] << 8 | lower[at]);
        number = (uint16_t)(number >> 1 | number << 15);
        memcpy(to + 2 * at, &number, 2);
    }
}

INLINE void split_32(bytes of, uint8_t *upper, uint8_t *lower) {
    for (int at = 0; at < GROUP; at++) {
        uint32_t number;
        memcpy(&number, of + 4 * at, 4);
        number = turned_left(number);
        upper[at] = (uint8_t)(number >> 24);
        lower[at] = (uint8_t)(number >> 16), lower[GROUP + at] = (uint8_t)(number >> 8);
        lower[2 * GROUP + at] = (uint8_t)number;
    }
}

INLINE void join_32(uint8_t *to, bytes upper, bytes lower) {
    for (int at = 0; at < GROUP; at++) {
        uint32_t number = (uint32_t)upper[at] << 24 | (uint32_t)lower[at] << 16 |
                          (uint32_t)lower[GROUP + at] << 8 | lower[2 * GROUP + at];
        number = number >> 1 | number << 31;
        memcpy(to + 4 * at, &number, 4);
    }
}

/* ---- symbols ----------------------------------------------------------------------------------------------- */

/* Codes to symbols, of which the last stands for the next of the escaped ones. Returns how many of those it took, or -1
 * where there are fewer than `escapes`. */
typedef long look_up(uint8_t *codes, const uint8_t table[16], int width, bytes escaped, long escapes);

static long look_up_each(uint8_t *codes, const uint8_t table[16], int width, bytes escaped, long escapes) {
    long taken = 0;
    int escape = width ? (1 << width) - 1 : -1;
    for (int at = 0; at < GROUP; at++) {
        if (codes[at] != escape) {
            codes[at] = table[codes[at]];
        } else if (taken < escapes) {
            codes[at] = escaped[taken++];
        } else {
            return -1;
        }
    }
    return taken;
}

#if X86
#define WIDE __attribute__((target("avx2,bmi,popcnt")))

WIDE static long look_up_wide(uint8_t *codes, const uint8_t table[16], int width, bytes escaped, long escapes) {
    long taken = 0;
    __m256i symbols = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)table));
    __m256i escape = _mm256_set1_epi8((char)(width ? (1 << width) - 1 : -1));
    for (int at = 0; at < GROUP; at += 32) {
        __m256i code = _mm256_loadu_si256((const __m256i *)(codes + at));
        uint32_t found = (uint32_t)_mm256_movemask_epi8(_mm256_cmpeq_epi8(code, escape));
        _mm256_storeu_si256((__m256i *)(codes + at), _mm256_shuffle_epi8(symbols, code));
        if (taken + __builtin_popcount(found) > escapes)
            return -1;
        for (; found; found &= found - 1)
            codes[at + __builtin_ctz(found)] = escaped[taken++];
    }
    return taken;
}
#endif

/* What a block of one kind is encoded with. */
struct plan {
    int kind, width;
    long escapes;
    uint8_t table[16];
    uint8_t codes[256]; /* of each symbol */
};

static int table_size(int width) { return width ? (1 << width) - 1 : 1; }

static size_t group_bytes(int kind, int width) {
    return (size_t)(GROUP * (NUMBER_BYTES[kind] - 1) + GROUP / 8 * (KEPT_BITS[kind] + width));
}

/* The width that makes `total` symbols smallest, of which there are so many each. Returns their size in bits. */
static long best_width(const uint32_t counts[256], long total, struct plan *plan) {
    uint32_t found[256]; /* count << 8 | symbol: of a block few symbols occur at all */
    int symbols = 0;
    long best = -1, covered = 0, sums[15];
    for (int symbol = 0; symbol < 256; symbol++) {
        found[symbols] = counts[symbol] << 8 | (uint32_t)symbol;
        symbols += counts[symbol] != 0;
    }
    memset(plan->table, 0, sizeof plan->table);
    for (int rank = 0; rank < 15; rank++) {
        if (rank < symbols) {
            int most = rank;
            for (int at = rank + 1; at < symbols; at++)
                most = found[at] > found[most] ? at : most;
            uint32_t one = found[most];
            found[most] = found[rank];
            plan->table[rank] = (uint8_t)one;
            covered += one >> 8;
        }
        sums[rank] = covered;
    }
    for (int width = 0; width <= MOST_WIDTH; width++) {
        int size = table_size(width);
        long escapes = total - sums[size - 1], bits = total * width + 8 * (escapes + size);
        if ((width || !escapes) && (best < 0 || bits < best))
            best = bits, plan->width = width, plan->escapes = escapes;
    }
    return best;
}

INLINE int upper_byte(bytes of, int size) {
    uint16_t half;
    uint32_t word;
    if (size == 2) {
        memcpy(&half, of, 2);
        return turned_left_16(half) >> 8;
    }
    memcpy(&word, of, 4);
    return (int)(turned_left(word) >> 24);
}

/* Counts of the upper bytes of `numbers` numbers of `size` bytes, a multiple of 4; of one in `step` fours of them.
 * Neighbours are often equal, and are counted apart. Returns how many were counted. */
INLINE long count_upper(uint32_t counts[256], bytes of, long numbers, int size, int step) {
    uint32_t other[256];
    long counted = 0;
    memset(counts, 0, 256 * sizeof *counts);
    memset(other, 0, sizeof other);
    for (long at = 0; at < numbers; at += 4 * step, counted += 4) {
        bytes four = of + at * size;
        counts[upper_byte(four, size)]++, other[upper_byte(four + size, size)]++;
        counts[upper_byte(four + 2 * size, size)]++, other[upper_byte(four + 3 * size, size)]++;
    }
    for (int symbol = 0; symbol < 256; symbol++)
        counts[symbol] += other[symbol];
    return counted;
}

/* Counts of a float16's upper byte to those of its exponent. */
static void fold(uint32_t counts[256], const uint32_t upper[256]) {
    memset(counts, 0, 256 * sizeof *counts);
    for (int symbol = 0; symbol < 256; symbol++)
        counts[symbol >> 3] += upper[symbol];
}

#define SAMPLED 8 /* of so many fours of numbers one says what kind a block is */

/* How to encode `groups` groups, or whatever else these `nbytes` are. */
static void make_plan(struct plan *plan, bytes of, size_t nbytes) {
    uint32_t halves[256], words[256], folded[256];
    long numbers = (long)(nbytes / 2 / GROUP * GROUP), wide_numbers = (long)(nbytes / 4 / GROUP * GROUP);
    plan->kind = RAW;
    if (nbytes && !memcmp(of, of + 1, nbytes - 1)) {
        plan->kind = SAME;
        return;
    }
    if (!numbers)
        return;
    /* Bits of a byte of each kind, from a sample. */
    double best = 7.9;
    struct plan tried;
    long sampled = count_upper(halves, of, numbers, 2, SAMPLED);
    double bits = 4 + (double)best_width(halves, sampled, &tried) / (2. * (double)sampled);
    if (bits < best)
        best = bits, plan->kind = BF16;
    fold(folded, halves);
    bits = 5.5 + (double)best_width(folded, sampled, &tried) / (2. * (double)sampled);
    if (bits < best)
        best = bits, plan->kind = F16;
    if (wide_numbers) {
        sampled = count_upper(words, of, wide_numbers, 4, SAMPLED);
        bits = 6 + (double)best_width(words, sampled, &tried) / (4. * (double)sampled);
        if (bits < best)
            best = bits, plan->kind = F32;
    }
    if (plan->kind == RAW)
        return;
    if (plan->kind == F32)
        count_upper(halves, of, numbers = wide_numbers, 4, 1);
    else
        count_upper(halves, of, numbers, 2, 1);
    if (plan->kind == F16)
        fold(folded, halves);
    const uint32_t *counts = plan->kind == F16 ? folded : halves;
    best_width(counts, numbers, plan);
    memset(plan->codes, table_size(plan->width), sizeof plan->codes); /* the last code: escaped */
    for (int code = table_size(plan->width) - 1; code >= 0; code--)
        if (counts[plan->table[code]])
            plan->codes[plan->table[code]] = (uint8_t)code;
    if (HEAD + table_size(plan->width) + plan->escapes +
            numbers / GROUP * (long)group_bytes(plan->kind, plan->width) >=
        numbers * NUMBER_BYTES[plan->kind])
        plan->kind = RAW; /* the sample was none */
}

/* ---- blocks ------------------------------------------------------------------------------------------------ */

INLINE size_t encode_block(uint8_t *to, bytes of, size_t nbytes) {
    struct plan plan;
    uint8_t *start = to;
    make_plan(&plan, of, nbytes);
    if (plan.kind == RAW || plan.kind == SAME) {
        size_t kept = plan.kind == RAW ? nbytes : 1;
        *to = (uint8_t)plan.kind;
        memcpy(to + 1, of, kept);
        return 1 + kept;
    }
    int size = NUMBER_BYTES[plan.kind], kept = KEPT_BITS[plan.kind];
    size_t groups = nbytes / (size_t)(GROUP * size);
    uint8_t upper[GROUP], low_bits[GROUP];
    uint8_t *escaped;
    *to++ = (uint8_t)(plan.kind | plan.width << 4);
    *to++ = (uint8_t)plan.escapes, *to++ = (uint8_t)(plan.escapes >> 8);
    memcpy(to, plan.table, (size_t)table_size(plan.width));
    to += table_size(plan.width);
    escaped = to + groups * group_bytes(plan.kind, plan.width);
    for (size_t group = 0; group < groups; group++, of += GROUP * size) {
        if (size == 2)
            split_16(of, upper, to);
        else
            split_32(of, upper, to);
        to += GROUP * (size - 1);
        if (kept) {
            for (int at = 0; at < GROUP; at++)
                low_bits[at] = upper[at] & 7, upper[at] >>= 3;
            pack(to, low_bits, 3);
            to += GROUP / 8 * kept;
        }
        if (plan.width) {
            for (int at = 0; at < GROUP; at++) {
                uint8_t symbol = upper[at], code = plan.codes[symbol];
                *escaped = symbol; /* the place is there: the block would be RAW otherwise */
                escaped += code == table_size(plan.width);
                upper[at] = code;
            }
            pack(to, upper, plan.width);
            to += GROUP / 8 * plan.width;
        }
    }
    size_t tail = nbytes - groups * (size_t)(GROUP * size);
    memcpy(escaped, of, tail);
    return (size_t)(escaped + tail - start);
}

/* Returns how many bytes of `of` it took, or 0 for bytes that no encoder wrote. */
INLINE size_t decode_block(uint8_t *to, size_t nbytes, bytes of, size_t left, look_up *find) {
    bytes start = of;
    if (!left)
        return 0;
    int kind = *of & 15, width = *of >> 4;
    of++, left--;
    if (kind == RAW || kind == SAME) {
        size_t kept = kind == RAW ? nbytes : 1;
        if (width || left < kept)
            return 0;
        if (kind == RAW)
            memcpy(to, of, kept);
        else
            memset(to, *of, nbytes);
        return 1 + kept;
    }
    if (kind >= KINDS || width > MOST_WIDTH)
        return 0;
    int size = NUMBER_BYTES[kind], kept = KEPT_BITS[kind];
    size_t groups = nbytes / (size_t)(GROUP * size), tail = nbytes - groups * (size_t)(GROUP * size);
    if (left < 2)
        return 0;
    long escapes = of[0] | of[1] << 8;
    of += 2, left -= 2;
    size_t table_bytes = (size_t)table_size(width);
    if (left < table_bytes + groups * group_bytes(kind, width) + (size_t)escapes + tail)
        return 0;
    uint8_t table[16] = {0}, upper[GROUP], low_bits[GROUP];
    memcpy(table, of, table_bytes);
    of += table_bytes;
    bytes escaped = of + groups * group_bytes(kind, width);
    for (size_t group = 0; group < groups; group++, to += GROUP * size) {
        bytes lower = of, bits = of + GROUP * (size - 1);
        unpack(upper, bits + GROUP / 8 * kept, width);
        long taken = find(upper, table, width, escaped, escapes);
        if (taken < 0)
            return 0;
        escaped += taken, escapes -= taken;
        if (kept) {
            unpack(low_bits, bits, 3);
            for (int at = 0; at < GROUP; at++)
                upper[at] = (uint8_t)(upper[at] << 3 | low_bits[at]);
        }
        if (size == 2)
            join_16(to, upper, lower);
        else
            join_32(to, upper, lower);
        of += group_bytes(kind, width);
    }
    if (escapes)
        return 0;
    memcpy(to, escaped, tail);
    return (size_t)(escaped + tail - start);
}

/* ---- pages ------------------------------------------------------------------------------------------------- */

INLINE size_t encode_page(uint8_t *to, size_t room, bytes of, size_t nbytes) {
    size_t used = 0;
    uint8_t own[BLOCK]; /* of which a block is encoded: others may write to the page, and sizes must stay true */
    for (size_t at = 0; at < nbytes; at += BLOCK) {
        size_t block = nbytes - at < BLOCK ? nbytes - at : BLOCK;
        if (room - used < block + HEAD + 16) /* whatever the block becomes */
            return 0;
        memcpy(own, of + at, block);
        used += encode_block(to + used, own, block);
    }
    return used;
}

INLINE int decode_page(uint8_t *to, size_t nbytes, bytes of, size_t size, look_up *find) {
    size_t used = 0;
    for (size_t at = 0; at < nbytes; at += BLOCK) {
        size_t block = nbytes - at < BLOCK ? nbytes - at : BLOCK;
        size_t taken = decode_block(to + at, block, of + used, size - used, find);
        if (!taken)
            return 0;
        used += taken;
    }
    return used == size;
}

#if X86
WIDE static size_t encode_wide(uint8_t *to, size_t room, bytes of, size_t nbytes) {
    return encode_page(to, room, of, nbytes);
}
WIDE static int decode_wide(uint8_t *to, size_t nbytes, bytes of, size_t size) {
    return decode_page(to, nbytes, of, size, look_up_wide);
}
static int wide(void) { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi"); }
#endif

/* ---- what Python calls --------------------------------------------------------------------------------------- */

int tierstore_codec_interface(void) { return INTERFACE; }

/* The page encoded into `room` bytes at `to`; returns its size, or 0 where it may not fit. */
size_t tierstore_encode(uint8_t *to, size_t room, bytes of, size_t nbytes) {
#if X86
    if (wide())
        return encode_wide(to, room, of, nbytes);
#endif
    return encode_page(to, room, of, nbytes);
}

/* The `nbytes` of a page from its `size` encoded bytes. Returns whether they are an encoded page of that size. */
int tierstore_decode(uint8_t *to, size_t nbytes, bytes of, size_t size) {
#if X86
    if (wide())
        return decode_wide(to, nbytes, of, size);
#endif
    return decode_page(to, nbytes, of, size, look_up_each);
}
