/* Pages copied and checksummed in one pass over memory, matrices turned, and the keys of chunks.
 *
 * Python reaches these with ctypes, which gives up the GIL for the whole of a call. They do what no library of
 * Python's does: many copies in one call, past the caches (a page that is stored is not read again soon, and a
 * store that goes past the caches saves reading what is written over), with the checksum of what is copied taken
 * while it is in the first-level cache.
 *
 * The checksum is XXH3-64 without a seed, for inputs of more than 240 bytes, as its specification has it
 * (github.com/Cyan4973/xxHash, doc/xxhash_spec.md); the tests hold it against the xxhash package.
 */

#include <stddef.h>
#include <stdint.h>
#include <string.h>

/* PORTABLE: what other processors get, for tests on this one. */
#if defined(__x86_64__) && !defined(PORTABLE)
#define X86 1
#include <immintrin.h>
#else
#define X86 0
#endif

/* What native/__init__.py was written for: it refuses a library that was built from another version of this. */
#define INTERFACE 5

/* ---- copying ------------------------------------------------------------------------------------------- */

#if X86
#define QUARTER 4096 /* four places in memory at a time are read faster than one */

static void stream_line(char *to, const char *of) {
    __m128i a = _mm_loadu_si128((const __m128i *)of), b = _mm_loadu_si128((const __m128i *)of + 1);
    __m128i c = _mm_loadu_si128((const __m128i *)of + 2), d = _mm_loadu_si128((const __m128i *)of + 3);
    _mm_prefetch(of + 256, _MM_HINT_T0);
    _mm_stream_si128((__m128i *)to, a);
    _mm_stream_si128((__m128i *)to + 1, b);
    _mm_stream_si128((__m128i *)to + 2, c);
    _mm_stream_si128((__m128i *)to + 3, d);
}

/* Past the caches; fence() makes it visible to others in order. */
static void stream(char *to, const char *of, size_t nbytes) {
    size_t head = -(uintptr_t)to & 63;
    if (head > nbytes)
        head = nbytes;
    memcpy(to, of, head);
    to += head, of += head, nbytes -= head;
    for (; nbytes >= 4 * QUARTER; to += 4 * QUARTER, of += 4 * QUARTER, nbytes -= 4 * QUARTER)
        for (size_t at = 0; at < QUARTER; at += 64)
            for (size_t quarter = 0; quarter < 4 * QUARTER; quarter += QUARTER)
                stream_line(to + quarter + at, of + quarter + at);
    for (; nbytes >= 64; to += 64, of += 64, nbytes -= 64)
        stream_line(to, of);
    memcpy(to, of, nbytes);
}

static void fence(void) { _mm_sfence(); }
#else
static void stream(char *to, const char *of, size_t nbytes) { memcpy(to, of, nbytes); }
static void fence(void) {}
#endif

/* ---- XXH3-64 ------------------------------------------------------------------------------------------- */

#define PRIME32_1 0x9E3779B1U
#define PRIME32_2 0x85EBCA77U
#define PRIME32_3 0xC2B2AE3DU
#define PRIME64_1 0x9E3779B185EBCA87ULL
#define PRIME64_2 0xC2B2AE3D27D4EB4FULL
#define PRIME64_3 0x165667B19E3779F9ULL
#define PRIME64_4 0x85EBCA77C2B2AE63ULL
#define PRIME64_5 0x27D4EB2F165667C5ULL
#define PRIME_MX1 0x165667919E3779F9ULL

#define STRIPE 64
#define BLOCK 1024 /* 16 stripes; each uses 64 of the 192 bytes of SECRET, 8 bytes further than the stripe before */
#define SECRET_BYTES 192

static const uint8_t SECRET[SECRET_BYTES] = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c,
    0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f,
    0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21,
    0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c,
    0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
    0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8,
    0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d,
    0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64,
    0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
    0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
    0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce,
    0x45, 0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e,
};

static uint64_t read64(const void *at) {
    uint64_t value;
    memcpy(&value, at, sizeof value);
    return value; /* little-endian, like everything tierstore runs on: native/__init__.py looks */
}

/* Mix stripes of the input into the eight sums. */
static void mix(uint64_t acc[8], const char *in, size_t stripes, const uint8_t *secret) {
    for (; stripes; stripes--, in += STRIPE, secret += 8)
        for (int lane = 0; lane < 8; lane++) {
            uint64_t value = read64(in + 8 * lane), keyed = value ^ read64(secret + 8 * lane);
            acc[lane ^ 1] += value;
            acc[lane] += (keyed & 0xffffffff) * (keyed >> 32);
        }
}

#if X86
#define AHEAD 2048 /* bytes: far enough that reading from memory is hidden behind writing to it */

/* Mix stripes in, and where `to` is not NULL, copy them past the caches as they come by: what is hashed is in the
 * registers then, and the checksum takes next to no time of its own. `to` is aligned to 32 bytes. */
__attribute__((always_inline, target("avx2"))) static inline void
mix_avx2(uint64_t acc[8], char *to, const char *in, size_t stripes, const uint8_t *secret) {
    __m256i sums[2] = {_mm256_loadu_si256((__m256i *)acc), _mm256_loadu_si256((__m256i *)acc + 1)};
    for (; stripes; stripes--, in += STRIPE, secret += 8) {
        _mm_prefetch(in + AHEAD, _MM_HINT_T0);
        for (int half = 0; half < 2; half++) {
            __m256i value = _mm256_loadu_si256((const __m256i *)in + half);
            __m256i keyed = _mm256_xor_si256(value, _mm256_loadu_si256((const __m256i *)secret + half));
            __m256i product = _mm256_mul_epu32(keyed, _mm256_srli_epi64(keyed, 32));
            __m256i swapped = _mm256_shuffle_epi32(value, _MM_SHUFFLE(1, 0, 3, 2));
            sums[half] = _mm256_add_epi64(sums[half], _mm256_add_epi64(product, swapped));
            if (to)
                _mm256_stream_si256((__m256i *)to + half, value);
        }
        to += to ? STRIPE : 0;
    }
    _mm256_storeu_si256((__m256i *)acc, sums[0]);
    _mm256_storeu_si256((__m256i *)acc + 1, sums[1]);
}

__attribute__((target("avx2"))) static void mix_wide(uint64_t acc[8], const char *in, size_t stripes,
                                                     const uint8_t *secret) {
    mix_avx2(acc, NULL, in, stripes, secret);
}

__attribute__((target("avx2"))) static void stream_block(uint64_t acc[8], char *to, const char *in) {
    mix_avx2(acc, to, in, BLOCK / STRIPE, SECRET);
}

static int wide(void) { return __builtin_cpu_supports("avx2"); }
#else
#define mix_wide mix
static void stream_block(uint64_t acc[8], char *to, const char *in) {
    memcpy(to, in, BLOCK);
    mix(acc, in, BLOCK / STRIPE, SECRET);
}
static int wide(void) { return 0; }
#endif

static void scramble(uint64_t acc[8]) {
    for (int lane = 0; lane < 8; lane++) {
        acc[lane] ^= acc[lane] >> 47;
        acc[lane] ^= read64(SECRET + SECRET_BYTES - STRIPE + 8 * lane);
        acc[lane] *= PRIME32_1;
    }
}

static uint64_t folded_product(uint64_t a, uint64_t b) {
    unsigned __int128 product = (unsigned __int128)a * b;
    return (uint64_t)product ^ (uint64_t)(product >> 64);
}

static uint64_t merged(const uint64_t acc[8], const uint8_t *secret, uint64_t value) {
    for (int pair = 0; pair < 4; pair++)
        value += folded_product(acc[2 * pair] ^ read64(secret + 16 * pair),
                                acc[2 * pair + 1] ^ read64(secret + 16 * pair + 8));
    value ^= value >> 37;
    value *= PRIME_MX1;
    return value ^ value >> 32;
}

static const uint64_t START[8] = {PRIME32_3, PRIME64_1, PRIME64_2, PRIME64_3,
                                  PRIME64_4, PRIME32_2, PRIME64_5, PRIME32_1};

/* Bytes copied where `to` is not NULL, and mixed into the sums that make their hash. What is mixed in is the source,
 * as it is copied: bytes that somebody changes meanwhile leave a copy that does not match its checksum. */
static void copy_and_mix(uint64_t acc[8], char *to, const char *of, size_t nbytes, int past_caches) {
    void (*mix_here)(uint64_t *, const char *, size_t, const uint8_t *) = wide() ? mix_wide : mix;
    int streaming = to && past_caches && wide() && !((uintptr_t)to & 31);
    size_t at = 0;
    memcpy(acc, START, sizeof START);
    for (; nbytes - at > BLOCK; at += BLOCK) { /* the last block is never a whole one */
        if (streaming) {
            stream_block(acc, to + at, of + at);
        } else {
            if (to)
                memcpy(to + at, of + at, BLOCK);
            mix_here(acc, of + at, BLOCK / STRIPE, SECRET);
        }
        scramble(acc);
    }
    if (to)
        memcpy(to + at, of + at, nbytes - at);
    mix_here(acc, of + at, (nbytes - at - 1) / STRIPE, SECRET);
    mix_here(acc, of + nbytes - STRIPE, 1, SECRET + SECRET_BYTES - STRIPE - 7);
}

static uint64_t copy_and_hash(char *to, const char *of, size_t nbytes, int past_caches) {
    uint64_t acc[8];
    copy_and_mix(acc, to, of, nbytes, past_caches);
    return merged(acc, SECRET + 11, nbytes * PRIME64_1);
}

/* Runs of memory, read one behind the other. */
struct runs {
    const uint64_t *at, *sizes; /* of the run that is being read, and those behind it */
    uint64_t done;              /* bytes of it */
};

static void next_bytes(struct runs *runs, size_t nbytes) {
    runs->done += nbytes;
    if (runs->done == *runs->sizes)
        runs->at++, runs->sizes++, runs->done = 0;
}

static void gather(char *to, struct runs *runs, size_t nbytes) {
    while (nbytes) {
        size_t left = *runs->sizes - runs->done, piece = left < nbytes ? left : nbytes;
        memcpy(to, (const char *)*runs->at + runs->done, piece);
        next_bytes(runs, piece);
        to += piece, nbytes -= piece;
    }
}

/* Like copy_and_hash(), of a page in several runs, none of which is empty. Blocks that lie in two runs are hashed
 * from where they were copied to. */
static uint64_t gather_and_hash(char *to, struct runs runs, size_t nbytes, int past_caches) {
    void (*mix_here)(uint64_t *, const char *, size_t, const uint8_t *) = wide() ? mix_wide : mix;
    int streaming = past_caches && wide() && !((uintptr_t)to & 31);
    uint64_t acc[8];
    size_t at = 0;
    memcpy(acc, START, sizeof START);
    for (; nbytes - at > BLOCK; at += BLOCK) {
        if (streaming && *runs.sizes - runs.done >= BLOCK) {
            stream_block(acc, to + at, (const char *)*runs.at + runs.done);
            next_bytes(&runs, BLOCK);
        } else {
            gather(to + at, &runs, BLOCK);
            mix_here(acc, to + at, BLOCK / STRIPE, SECRET);
        }
        scramble(acc);
    }
    gather(to + at, &runs, nbytes - at);
    mix_here(acc, to + at, (nbytes - at - 1) / STRIPE, SECRET);
    mix_here(acc, to + nbytes - STRIPE, 1, SECRET + SECRET_BYTES - STRIPE - 7);
    return merged(acc, SECRET + 11, nbytes * PRIME64_1);
}

/* The canonical form of XXH3-128: its upper half first, and of both the upper bytes. */
static void hash_128(const char *of, size_t nbytes, char digest[16]) {
    uint64_t acc[8], half;
    copy_and_mix(acc, NULL, of, nbytes, 0);
    half = __builtin_bswap64(merged(acc, SECRET + SECRET_BYTES - STRIPE - 11, ~(nbytes * PRIME64_2)));
    memcpy(digest, &half, sizeof half);
    half = __builtin_bswap64(merged(acc, SECRET + 11, nbytes * PRIME64_1));
    memcpy(digest + sizeof half, &half, sizeof half);
}

#define KEY 16
#define MOST_CHUNK 4096 /* bytes */

/* ---- matrices ------------------------------------------------------------------------------------------ */

/* A matrix of items in two places, with the distances between its rows and columns in each, in bytes. */
struct matrix {
    uint64_t rows, columns, item;
    uint64_t to_row, to_column, of_row, of_column;
};

/* rows x columns items one by one, for what does not fit the squares below. */
static void place_items(char *to, const char *of, const struct matrix *m, size_t row, size_t rows, size_t column,
                        size_t columns) {
    for (size_t r = row; r < row + rows; r++)
        for (size_t c = column; c < column + columns; c++)
            memcpy(to + r * m->to_row + c * m->to_column, of + r * m->of_row + c * m->of_column, m->item);
}

#if X86
/* Squares of items: a row of `of` becomes a column of `to`. The distances are those between rows. */
static void turn_4x4_of_4(char *to, size_t to_row, const char *of, size_t of_row) {
    __m128i a = _mm_loadu_si128((const __m128i *)of), b = _mm_loadu_si128((const __m128i *)(of + of_row));
    __m128i c = _mm_loadu_si128((const __m128i *)(of + 2 * of_row));
    __m128i d = _mm_loadu_si128((const __m128i *)(of + 3 * of_row));
    __m128i ab = _mm_unpacklo_epi32(a, b), cd = _mm_unpacklo_epi32(c, d);
    __m128i ab_high = _mm_unpackhi_epi32(a, b), cd_high = _mm_unpackhi_epi32(c, d);
    _mm_storeu_si128((__m128i *)to, _mm_unpacklo_epi64(ab, cd));
    _mm_storeu_si128((__m128i *)(to + to_row), _mm_unpackhi_epi64(ab, cd));
    _mm_storeu_si128((__m128i *)(to + 2 * to_row), _mm_unpacklo_epi64(ab_high, cd_high));
    _mm_storeu_si128((__m128i *)(to + 3 * to_row), _mm_unpackhi_epi64(ab_high, cd_high));
}

static void turn_8x8_of_2(char *to, size_t to_row, const char *of, size_t of_row) {
    __m128i in[8], two[8], four[8];
    for (int i = 0; i < 8; i++)
        in[i] = _mm_loadu_si128((const __m128i *)(of + i * of_row));
    for (int i = 0; i < 4; i++) {
        two[2 * i] = _mm_unpacklo_epi16(in[2 * i], in[2 * i + 1]);
        two[2 * i + 1] = _mm_unpackhi_epi16(in[2 * i], in[2 * i + 1]);
    }
    for (int i = 0; i < 2; i++)
        for (int half = 0; half < 2; half++) {
            four[4 * i + 2 * half] = _mm_unpacklo_epi32(two[4 * i + half], two[4 * i + 2 + half]);
            four[4 * i + 2 * half + 1] = _mm_unpackhi_epi32(two[4 * i + half], two[4 * i + 2 + half]);
        }
    for (int i = 0; i < 4; i++) {
        _mm_storeu_si128((__m128i *)(to + 2 * i * to_row), _mm_unpacklo_epi64(four[i], four[4 + i]));
        _mm_storeu_si128((__m128i *)(to + (2 * i + 1) * to_row), _mm_unpackhi_epi64(four[i], four[4 + i]));
    }
}
#endif

/* `to` has contiguous rows, and `of` contiguous columns: turn squares in registers. */
static void turn(char *to, const char *of, const struct matrix *m) {
    size_t row = 0, done = 0;
#if X86
    size_t side = m->item == 4 ? 4 : m->item == 2 ? 8 : 0;
    void (*square)(char *, size_t, const char *, size_t) = side == 4 ? turn_4x4_of_4 : turn_8x8_of_2;
    done = side ? m->columns / side * side : 0;
    for (; side && row + side <= m->rows; row += side)
        for (size_t column = 0; column < done; column += side)
            square(to + row * m->to_row + column * m->item, m->to_row,
                   of + row * m->item + column * m->of_column, m->of_column);
#endif
    place_items(to, of, m, 0, row, done, m->columns - done);
    place_items(to, of, m, row, m->rows - row, 0, m->columns);
}

static void copy_rows(char *to, const char *of, size_t rows, size_t width, size_t to_row, size_t of_row,
                      int past_caches) {
    if (to_row == width && of_row == width)
        width *= rows, rows = 1;
    for (size_t row = 0; row < rows; row++)
        if (past_caches)
            stream(to + row * to_row, of + row * of_row, width);
        else
            memcpy(to + row * to_row, of + row * of_row, width);
}

#define TURNED 32768 /* bytes that stay in the first-level cache while they are turned */

/* `m` has contiguous rows in `to`, if it has any there. */
static void copy_matrix(char *to, const char *of, const struct matrix *m, int past_caches) {
    char turned[TURNED];
    size_t width = m->columns * m->item;
    int rows = m->to_column == m->item;
    if (rows && m->of_column == m->item) {
        copy_rows(to, of, m->rows, width, m->to_row, m->of_row, past_caches);
    } else if (rows && m->of_row == m->item && past_caches && m->rows * width <= TURNED) {
        struct matrix here = *m;
        here.to_row = width;
        turn(turned, of, &here);
        copy_rows(to, turned, m->rows, width, m->to_row, width, past_caches);
    } else if (rows && m->of_row == m->item) {
        turn(to, of, m);
    } else {
        place_items(to, of, m, 0, m->rows, 0, m->columns);
    }
}

/* ---- what Python calls ---------------------------------------------------------------------------------- */

int tierstore_interface(void) { return INTERFACE; }

/* Copy `nbytes` for each (destination, source) pair of addresses, past the caches if asked to. */
void tierstore_copy(const uint64_t (*pairs)[2], size_t count, size_t nbytes, int past_caches) {
    for (size_t i = 0; i < count; i++)
        if (past_caches)
            stream((char *)pairs[i][0], (const char *)pairs[i][1], nbytes);
        else
            memcpy((char *)pairs[i][0], (const char *)pairs[i][1], nbytes);
    fence();
}

/* The same, with the XXH3-64 of each source; a destination of 0 is none. nbytes > 240. */
void tierstore_copy_and_hash(const uint64_t (*pairs)[2], size_t count, size_t nbytes, int past_caches,
                             uint64_t *checksums) {
    for (size_t i = 0; i < count; i++)
        checksums[i] = copy_and_hash((char *)pairs[i][0], (const char *)pairs[i][1], nbytes, past_caches);
    fence();
}

/* Copy a matrix for each (destination, source) pair of addresses of its first item, past the caches if asked to. */
void tierstore_copy_matrices(const uint64_t (*pairs)[2], size_t count, const struct matrix *matrix, int past_caches) {
    struct matrix m = *matrix;
    if (m.to_column != m.item) { /* rows for columns: the other order may be contiguous */
        m.rows = matrix->columns, m.columns = matrix->rows;
        m.to_row = matrix->to_column, m.to_column = matrix->to_row;
        m.of_row = matrix->of_column, m.of_column = matrix->of_row;
    }
    for (size_t i = 0; i < count; i++)
        copy_matrix((char *)pairs[i][0], (const char *)pairs[i][1], &m, past_caches);
    fence();
}

/* Copy `count` pages together, each from `runs` runs of these sizes, with the XXH3-64 of each. `places` has for each
 * page where it goes and where its runs are. The sizes are above 0, and their sum is above 240. */
void tierstore_gather_and_hash(const uint64_t *places, size_t count, const uint64_t *sizes, size_t runs,
                               int past_caches, uint64_t *checksums) {
    size_t nbytes = 0;
    for (size_t run = 0; run < runs; run++)
        nbytes += sizes[run];
    for (size_t i = 0; i < count; i++, places += 1 + runs) {
        struct runs of = {places + 1, sizes, 0};
        checksums[i] = gather_and_hash((char *)places[0], of, nbytes, past_caches);
    }
    fence();
}

/* The keys of `count` chunks of `width` bytes, one behind the other: each the XXH3-128 of the key before it and its
 * chunk. 240 < KEY + width <= sizeof link. */
void tierstore_chunk_keys(const char *parent, const char *chunks, size_t count, size_t width, char *keys) {
    char link[KEY + MOST_CHUNK];
    for (size_t i = 0; i < count; i++) {
        memcpy(link, i ? keys + (i - 1) * KEY : parent, KEY);
        memcpy(link + KEY, chunks + i * width, width);
        hash_128(link, KEY + width, keys + i * KEY);
    }
}
