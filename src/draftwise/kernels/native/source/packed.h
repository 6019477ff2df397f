// Products with weights whose numbers are integers of few bits, summed as integers.
//
// The rows are rounded to 8 bits, with a scale for each 32 inputs. The sum over 32 inputs is exact.
// It is multiplied with the scales in float32, group by group in the order of the inputs. So a
// result has the same bits for every number of rows, and with every instruction set.
//
// A tile has 16 columns of the weight, in blocks of up to 256 inputs. Expanded, a group of 32 inputs
// of a tile is an operand of the dot products of VNNI and NEON and a tile of the matrix unit: for
// each four inputs, the four numbers of each column.

#pragma once

#include "matrix.h"
#include "threads.h"
#include "tiles.h"
#include "vectors.h"

#if defined(__AVX2__) && !defined(__AVX512F__)
#include <immintrin.h>
#endif
#if defined(__ARM_FEATURE_DOTPROD)
#include <arm_neon.h>
#endif

#include <algorithm>
#include <type_traits>

// How the scales of a weight are stored.
enum ScaleForm {
    BYTE_SCALES = 0,   // an integer of 8 bits, times a float16 of each column and block
    HALF_SCALES = 1,   // float16
    FLOAT_SCALES = 2,  // float32
    POWER_SCALES = 3,  // e for 2^(e - 128)
};

// The format of a tile. A number is (code - zero) * scale - minimum.
//
// A block has the factors of its scales and minimums, if they have factors; then the scales, then
// the minimums of all groups; and from the next cache line the codes.
struct PackedKind {
    int64_t bits;          // of a code: 2, 3, 4, 5, 6 or 8
    int64_t zero;          // at most 128
    int64_t groups;        // groups of 32 inputs in a block: 1, 2, 4 or 8
    int64_t has_halves;    // whether a scale belongs to 16 inputs, not to 32
    int64_t has_minimums;
    int64_t form;          // ScaleForm of scales and minimums
    int64_t has_table;     // whether a code of 4 bits is the index of a code of 8 bits
    uint8_t table[16];
};

constexpr int MAX_PACKED_SECTIONS = 4;

// Consecutive units of a weight in the same format. A unit has two tiles. In a weight with gate and
// up projection, they are a tile of each; otherwise neighbours.
struct PackedSection {
    int64_t first_unit;
    int64_t offset;         // in bytes from the header
    PackedKind kinds[2];    // of a unit's tiles
};

// Start of a weight.
struct PackedHeader {
    int64_t is_paired;      // whether a unit has tiles of gate and up projection
    int64_t num_sections;
    PackedSection sections[MAX_PACKED_SECTIONS];
};

namespace {

constexpr int64_t TILE_COLUMNS = 16, GROUP_INPUTS = 32, GROUP_QUADS = GROUP_INPUTS / 4;
constexpr int64_t GROUP_BYTES = TILE_COLUMNS * GROUP_INPUTS;  // of an expanded group
constexpr int64_t MAX_GROUPS = 8;
constexpr int64_t TILE_VECTORS = TILE_COLUMNS / LANES;
constexpr int64_t PANELS_PER_UNIT = 2 * TILE_COLUMNS / (2 * LANES);

// Sizes in bytes of the parts of a block.
struct PackedLayout {
    int64_t factors, scales, codes, bytes;  // scales: of scales alone, without minimums

    explicit PackedLayout(const PackedKind &kind) {
        const int64_t parts = 1 + kind.has_minimums, count = kind.groups * (1 + kind.has_halves);
        const int64_t size = kind.form == HALF_SCALES ? 2 : kind.form == FLOAT_SCALES ? 4 : 1;
        factors = kind.form == BYTE_SCALES ? TILE_COLUMNS * (int64_t)sizeof(uint16_t) : 0;
        scales = count * TILE_COLUMNS * size;
        codes = round_up(parts * (factors + scales), CACHE_LINE);
        bytes = codes + kind.groups * GROUP_BYTES * kind.bits / 8;
    }
};

INLINE int64_t tile_bytes(const PackedKind &kind, int64_t depth) {
    return depth / GROUP_INPUTS / kind.groups * PackedLayout(kind).bytes;
}

// 32 inputs of a row.
struct RowGroup {
    int8_t numbers[GROUP_INPUTS];
    float scale;
    int16_t sums[2];  // of the first and the last 16 numbers
};

// a * b + c, rounded once.
INLINE Floats fused_multiply_add(Floats a, Floats b, Floats c) {
#if defined(__AVX512F__)
    return (Floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
    return (Floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__ARM_FEATURE_FMA) && defined(__ARM_NEON)
    return (Floats)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    Floats sum;
    for (int lane = 0; lane < LANES; ++lane) sum[lane] = __builtin_fmaf(a[lane], b[lane], c[lane]);
    return sum;
#endif
}

// float16 to float32, exactly.
INLINE float half_to_float(uint16_t half) {
    const uint32_t sign = (uint32_t)(half & 0x8000) << 16, rest = half & 0x7fff;
    uint32_t bits;
    float number;
    if (rest >= 0x7c00) {
        bits = sign | 0x7f800000u | (rest & 0x3ff) << 13;
        memcpy(&number, &bits, sizeof number);
        return number;
    }
    if (rest < 0x400) {
        number = (float)rest * 0x1p-24f;
        return sign ? -number : number;
    }
    bits = sign | ((rest << 13) + (112u << 23));
    memcpy(&number, &bits, sizeof number);
    return number;
}

// 2^(e - 128), exactly.
INLINE float power_scale(uint8_t e) {
    const uint32_t bits = e < 2 ? 0x00200000u << e : (uint32_t)(e - 1) << 23;
    float number;
    memcpy(&number, &bits, sizeof number);
    return number;
}

// Rounds a row to 8 bits. The last group is padded with zeros. NaN and infinity give a result that
// is not finite.
INLINE void round_row(const float *row, int64_t size, RowGroup *to) {
    for (int64_t start = 0; start < size; start += GROUP_INPUTS, ++to) {
        float numbers[GROUP_INPUTS] = {};
        memcpy(numbers, row + start,
               min_int(GROUP_INPUTS, size - start) * (int64_t)sizeof *numbers);
        Floats top = {};
        Ints is_nan = {};
        for (int i = 0; i < GROUP_INPUTS; i += LANES) {
            const Floats v = read(numbers + i);
            top = lanewise_max(v, lanewise_max(-v, top));
            is_nan |= v != v;
        }
        const float largest = any_of(is_nan) ? __builtin_nanf("") : horizontal_max(top);
        const Floats inverse = Floats{} + (largest > 0 ? 127.0f / largest : 0.0f);
        const Floats shift = Floats{} + 12582912.0f;  // 1.5 * 2^23; adding it rounds to an integer
        to->scale = largest / 127.0f;
        int32_t rounded[GROUP_INPUTS], sums[2] = {};
        for (int i = 0; i < GROUP_INPUTS; i += LANES) {
            const Ints own = (Ints)fused_multiply_add(read(numbers + i), inverse, shift);
            const Ints integers = own - (Ints)shift;
            memcpy(rounded + i, &integers, sizeof integers);
        }
        for (int i = 0; i < GROUP_INPUTS; ++i) {
            to->numbers[i] = (int8_t)rounded[i];
            sums[i / 16] += to->numbers[i];
        }
        to->sums[0] = (int16_t)sums[0];
        to->sums[1] = (int16_t)sums[1];
    }
}

// A weight in the format of this file.
struct PackedWeight {
    typedef BFloat16 Stored;
    typedef RowGroup Input;
    static constexpr int DEPTH = GROUP_INPUTS;
};

INLINE int64_t row_size(PackedWeight, int64_t depth) {
    return (depth + GROUP_INPUTS - 1) / GROUP_INPUTS;
}

INLINE void put_row(PackedWeight, const float *row, int64_t depth, RowGroup *to) {
    round_row(row, depth, to);
}

// --- Codes.

// Codes of LANES columns, four of each.
typedef uint8_t Bytes __attribute__((vector_size(LANES * 4)));
typedef uint16_t BytePairs __attribute__((vector_size(LANES * 4)));

INLINE Bytes read_bytes(const char *from) {
    Bytes v;
    memcpy(&v, from, sizeof v);
    return v;
}

// The bits from bit FROM of each byte, moved to bit TO, where mask selects them.
template <int FROM, int TO>
INLINE Bytes moved(Bytes v, uint8_t mask) {
    BytePairs pairs = (BytePairs)v;
    if constexpr (FROM > TO)
        pairs >>= FROM - TO;
    else
        pairs <<= TO - FROM;
    return (Bytes)pairs & mask;
}

INLINE Bytes looked_up(Bytes indices, const uint8_t *table) {
#if defined(__AVX512BW__)
    __m128i entries;
    memcpy(&entries, table, sizeof entries);
    return (Bytes)_mm512_shuffle_epi8(_mm512_broadcast_i32x4(entries), (__m512i)indices);
#else
    uint8_t codes[sizeof indices];
    memcpy(codes, &indices, sizeof codes);
    for (uint8_t &code : codes) code = table[code];
    return read_bytes((const char *)codes);
#endif
}

// The codes of four inputs of a group, QUAD of 8. The columns begin at from.
template <int BITS, int QUAD>
INLINE Bytes codes_of(const char *from) {
    if constexpr (BITS == 8) return read_bytes(from + QUAD * CACHE_LINE);
    Bytes codes;
    if constexpr (BITS >= 4) {
        const Bytes both = read_bytes(from + QUAD / 2 * CACHE_LINE);
        codes = moved<QUAD % 2 * 4, 0>(both, 15);
    } else {
        const Bytes four = read_bytes(from + QUAD / 4 * CACHE_LINE);
        codes = moved<QUAD % 4 * 2, 0>(four, 3);
    }
    if constexpr (BITS == 3)
        codes |= moved<QUAD, 2>(read_bytes(from + 2 * CACHE_LINE), 4);
    if constexpr (BITS == 5)
        codes |= moved<QUAD, 4>(read_bytes(from + 4 * CACHE_LINE), 16);
    if constexpr (BITS == 6)
        codes |= moved<QUAD % 4 * 2, 4>(read_bytes(from + (4 + QUAD / 4) * CACHE_LINE), 48);
    return codes;
}

template <int BITS, int QUAD = 0>
INLINE void expand_group(const char *from, const uint8_t *table, char *to) {
    if constexpr (QUAD < GROUP_QUADS) {
        for (int64_t byte = 0; byte < CACHE_LINE; byte += sizeof(Bytes)) {
            Bytes codes = codes_of<BITS, QUAD>(from + byte);
            if (table) codes = looked_up(codes, table);
            memcpy(to + QUAD * CACHE_LINE + byte, &codes, sizeof codes);
        }
        expand_group<BITS, QUAD + 1>(from, table, to);
    }
}

// Expands the codes of a block.
INLINE void expand_block(const PackedKind &kind, const char *from, char *to) {
    const auto expand = [&](auto bits) {
        constexpr int BITS = decltype(bits)::value;
        const uint8_t *table = BITS == 4 && kind.has_table ? kind.table : nullptr;
        for (int64_t g = 0; g < kind.groups; ++g)
            expand_group<BITS>(from + g * (GROUP_BYTES * BITS / 8), table, to + g * GROUP_BYTES);
    };
    switch (kind.bits) {
        case 2: return expand(std::integral_constant<int, 2>());
        case 3: return expand(std::integral_constant<int, 3>());
        case 4: return expand(std::integral_constant<int, 4>());
        case 5: return expand(std::integral_constant<int, 5>());
        case 6: return expand(std::integral_constant<int, 6>());
        default: return expand(std::integral_constant<int, 8>());
    }
}

// --- Scales.

// The scales and minimums of a block. Minimums are negative, as they are added.
struct BlockScales {
    float scales[2 * MAX_GROUPS][TILE_COLUMNS], minimums[2 * MAX_GROUPS][TILE_COLUMNS];
};

INLINE void read_halves(const char *from, float *to) {
#if defined(__AVX512F__)
    __m256i halves;
    memcpy(&halves, from, sizeof halves);
    _mm512_storeu_ps(to, _mm512_cvtph_ps(halves));
#else
    uint16_t halves[TILE_COLUMNS];
    memcpy(halves, from, sizeof halves);
    for (int i = 0; i < TILE_COLUMNS; ++i) to[i] = half_to_float(halves[i]);
#endif
}

// Reads count vectors of scales. IS_SIGNED is for scales of 8 bits.
template <bool IS_SIGNED>
INLINE void read_scales(int64_t form, const char *factors, const char *from, int64_t count,
                        float sign, float (*to)[TILE_COLUMNS]) {
    if (form == BYTE_SCALES) {
        float factor[TILE_COLUMNS];
        read_halves(factors, factor);
        for (int64_t k = 0; k < count; ++k, from += TILE_COLUMNS)
            for (int i = 0; i < TILE_COLUMNS; ++i) {
                const int32_t scale = IS_SIGNED ? (int8_t)from[i] : (uint8_t)from[i];
                to[k][i] = factor[i] * (float)scale * sign;
            }
        return;
    }
    for (int64_t k = 0; k < count; ++k) {
        if (form == HALF_SCALES) {
            read_halves(from + k * TILE_COLUMNS * 2, to[k]);
        } else if (form == FLOAT_SCALES) {
            memcpy(to[k], from + k * TILE_COLUMNS * 4, sizeof to[k]);
        } else {
            for (int i = 0; i < TILE_COLUMNS; ++i)
                to[k][i] = power_scale((uint8_t)from[k * TILE_COLUMNS + i]);
        }
        for (int i = 0; i < TILE_COLUMNS; ++i) to[k][i] *= sign;
    }
}

INLINE void read_block_scales(const PackedKind &kind, const PackedLayout &layout,
                              const char *block, BlockScales &to) {
    const int64_t count = kind.groups * (1 + kind.has_halves), parts = 1 + kind.has_minimums;
    const char *scales = block + parts * layout.factors;
    read_scales<true>(kind.form, block, scales, count, 1.0f, to.scales);
    if (kind.has_minimums)
        read_scales<false>(kind.form, block + layout.factors, scales + layout.scales, count, -1.0f,
                           to.minimums);
}

// --- Products.

// Adds the products of four inputs: of LANES columns with four numbers of a row. Some processors
// multiply integers with signs only, so that IMPLIED_ZERO is subtracted from each code.
#if defined(__AVX512VNNI__)
constexpr int IMPLIED_ZERO = 0;

INLINE Ints add_products(Ints sum, const char *codes, const int8_t *row) {
    int32_t four;
    memcpy(&four, row, sizeof four);
    __m512i columns;
    memcpy(&columns, codes, sizeof columns);
    return (Ints)_mm512_dpbusd_epi32((__m512i)sum, columns, _mm512_set1_epi32(four));
}
#elif defined(__AVX512BW__)
constexpr int IMPLIED_ZERO = 128;

INLINE Ints add_products(Ints sum, const char *codes, const int8_t *row) {
    int32_t four;
    memcpy(&four, row, sizeof four);
    __m512i columns;
    memcpy(&columns, codes, sizeof columns);
    columns = _mm512_xor_si512(columns, _mm512_set1_epi8((char)128));
    const __m512i own = _mm512_set1_epi32(four);
    const __m512i signed_row =
        _mm512_mask_sub_epi8(own, _mm512_movepi8_mask(columns), _mm512_setzero_si512(), own);
    // 128 * 127 * 2 is less than 2^15.
    const __m512i pairs = _mm512_maddubs_epi16(_mm512_abs_epi8(columns), signed_row);
    return sum + (Ints)_mm512_madd_epi16(pairs, _mm512_set1_epi16(1));
}
#elif defined(__AVX2__) && !defined(__AVX512F__)
constexpr int IMPLIED_ZERO = 128;

INLINE Ints add_products(Ints sum, const char *codes, const int8_t *row) {
    int32_t four;
    memcpy(&four, row, sizeof four);
    __m256i columns;
    memcpy(&columns, codes, sizeof columns);
    columns = _mm256_xor_si256(columns, _mm256_set1_epi8((char)128));
    const __m256i signed_row = _mm256_sign_epi8(_mm256_set1_epi32(four), columns);
    const __m256i sizes = _mm256_abs_epi8(columns);
#if defined(__AVXVNNI__)
    return (Ints)_mm256_dpbusd_avx_epi32((__m256i)sum, sizes, signed_row);
#else
    // 128 * 127 * 2 is less than 2^15.
    const __m256i pairs = _mm256_maddubs_epi16(sizes, signed_row);
    return sum + (Ints)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
#endif
}
#elif defined(__ARM_FEATURE_DOTPROD)
constexpr int IMPLIED_ZERO = 128;

INLINE Ints add_products(Ints sum, const char *codes, const int8_t *row) {
    int32_t four;
    memcpy(&four, row, sizeof four);
    const uint8x16_t columns = veorq_u8(vld1q_u8((const uint8_t *)codes), vdupq_n_u8(128));
    return (Ints)vdotq_s32((int32x4_t)sum, vreinterpretq_s8_u8(columns),
                           vreinterpretq_s8_s32(vdupq_n_s32(four)));
}
#else
constexpr int IMPLIED_ZERO = 0;

INLINE Ints add_products(Ints sum, const char *codes, const int8_t *row) {
    for (int lane = 0; lane < LANES; ++lane)
        for (int i = 0; i < 4; ++i) sum[lane] += (uint8_t)codes[4 * lane + i] * row[i];
    return sum;
}
#endif

// Adds a group to the sums of a row: SCALE of its scales, and the sum of the codes times the row.
INLINE Floats add_group(Floats sum, Ints products, int32_t correction, float row_scale,
                        const float *scales) {
    const Floats integer = __builtin_convertvector(products - correction, Floats);
    return fused_multiply_add(integer * row_scale, read(scales), sum);
}

INLINE Floats add_minimum(Floats sum, int32_t row_sum, float row_scale, const float *minimums) {
    return fused_multiply_add(Floats{} + row_scale * (float)row_sum, read(minimums), sum);
}

// Adds a group or its halves to the sum of a row, and the minimums. The products have the vectors
// of columns that begin at column. All kernels call it, so that their results have the same bits.
template <bool HAS_HALVES, bool HAS_MINIMUMS>
INLINE Floats add_scaled(Floats sum, const Ints *products, const RowGroup &row, int32_t zero,
                         const BlockScales &scales, int64_t group, int64_t column) {
    constexpr int PARTS = HAS_HALVES ? 2 : 1;
    const int32_t row_sums[2] = {HAS_HALVES ? row.sums[0] : row.sums[0] + row.sums[1], row.sums[1]};
    const int64_t first = PARTS * group;
    for (int k = 0; k < PARTS; ++k)
        sum = add_group(sum, products[k], zero * row_sums[k], row.scale,
                        scales.scales[first + k] + column);
    if constexpr (HAS_MINIMUMS)
        for (int k = 0; k < PARTS; ++k)
            sum = add_minimum(sum, row_sums[k], row.scale, scales.minimums[first + k] + column);
    return sum;
}

// Adds the products of COUNT rows with a block to their sums [rows, TILE_COLUMNS].
template <int COUNT, bool HAS_HALVES, bool HAS_MINIMUMS>
void multiply_rows(const RowGroup *x, int64_t stride, const char *expanded,
                   const BlockScales &scales, int64_t groups, int32_t zero, float *sums) {
    for (int64_t v = 0; v < TILE_VECTORS; ++v) {
        Floats part[COUNT];
#pragma GCC unroll 8
        for (int i = 0; i < COUNT; ++i) part[i] = read(sums + i * TILE_COLUMNS + v * LANES);
        for (int64_t g = 0; g < groups; ++g) {
            const char *codes = expanded + g * GROUP_BYTES + v * LANES * 4;
#pragma GCC unroll 8
            for (int i = 0; i < COUNT; ++i) {
                const RowGroup &row = x[i * stride + g];
                Ints products[2] = {};
#pragma GCC unroll 8
                for (int quad = 0; quad < GROUP_QUADS; ++quad) {
                    Ints &into = products[HAS_HALVES && quad >= GROUP_QUADS / 2];
                    into = add_products(into, codes + quad * CACHE_LINE, row.numbers + 4 * quad);
                }
                part[i] = add_scaled<HAS_HALVES, HAS_MINIMUMS>(part[i], products, row, zero,
                                                               scales, g, v * LANES);
            }
        }
#pragma GCC unroll 8
        for (int i = 0; i < COUNT; ++i) write(part[i], sums + i * TILE_COLUMNS + v * LANES);
    }
}

constexpr int MAX_PACKED_ROWS = 4;  // of a register block

// Calls multiply_rows for any number of rows.
template <bool HAS_HALVES, bool HAS_MINIMUMS>
INLINE void multiply_block(const RowGroup *x, int64_t stride, int64_t rows, const char *expanded,
                           const BlockScales &scales, int64_t groups, int32_t zero, float *sums) {
    const auto run = [&](auto count, int64_t row) {
        multiply_rows<decltype(count)::value, HAS_HALVES, HAS_MINIMUMS>(
            x + row * stride, stride, expanded, scales, groups, zero, sums + row * TILE_COLUMNS);
    };
    int64_t row = 0;
    for (; row + MAX_PACKED_ROWS <= rows; row += MAX_PACKED_ROWS)
        run(std::integral_constant<int, MAX_PACKED_ROWS>(), row);
    switch (rows - row) {
        case 1: run(std::integral_constant<int, 1>(), row); break;
        case 2: run(std::integral_constant<int, 2>(), row); break;
        case 3: run(std::integral_constant<int, 3>(), row); break;
        default: break;
    }
}

#if defined(__AMX_INT8__)

// Rows from which the matrix unit is faster.
constexpr int64_t LEAST_TILE_ROWS = 8;

// The registers: rows and columns of whole groups, and of half groups; sums.
struct PackedTileConfig {
    explicit PackedTileConfig(int rows) {
        struct alignas(64) {
            uint8_t palette, start_row, reserved[14];
            uint16_t bytes[16];
            uint8_t rows[16];
        } config = {};
        config.palette = 1;
        const auto set = [&](int tile, int tile_rows, int bytes) {
            config.rows[tile] = (uint8_t)tile_rows;
            config.bytes[tile] = (uint16_t)bytes;
        };
        set(0, rows, CACHE_LINE);
        set(1, rows, CACHE_LINE);
        set(2, rows, GROUP_INPUTS);
        set(3, GROUP_QUADS, CACHE_LINE);
        set(4, rows, GROUP_INPUTS / 2);
        set(5, GROUP_QUADS / 2, CACHE_LINE);
        __asm__ volatile("" ::: "memory");
        _tile_loadconfig(&config);
    }

    ~PackedTileConfig() { _tile_release(); }
};

// The same as multiply_block for the rows of a register tile, on the matrix unit. The rows before
// first are left out.
template <bool HAS_HALVES, bool HAS_MINIMUMS>
INLINE void multiply_on_tiles(const RowGroup *x, int64_t stride, int64_t first, int64_t rows,
                              const char *expanded, const BlockScales &scales, int64_t groups,
                              int32_t zero, float *sums) {
    const int64_t row_bytes = stride * (int64_t)sizeof(RowGroup);
    alignas(64) int32_t products[2][16 * TILE_COLUMNS];
    for (int64_t g = 0; g < groups; ++g) {
        const char *codes = expanded + g * GROUP_BYTES;
        const int8_t *numbers = x[g].numbers;
        __asm__ volatile("" ::: "memory");  // tile loads read memory unknown to the compiler
        _tile_zero(0);
        if constexpr (HAS_HALVES) {
            _tile_zero(1);
            _tile_loadd(4, numbers, row_bytes);
            _tile_loadd(5, codes, CACHE_LINE);
            _tile_dpbsud(0, 4, 5);
            _tile_loadd(4, numbers + GROUP_INPUTS / 2, row_bytes);
            _tile_loadd(5, codes + GROUP_BYTES / 2, CACHE_LINE);
            _tile_dpbsud(1, 4, 5);
            _tile_stored(1, products[1], CACHE_LINE);
        } else {
            _tile_loadd(2, numbers, row_bytes);
            _tile_loadd(3, codes, CACHE_LINE);
            _tile_dpbsud(0, 2, 3);
        }
        _tile_stored(0, products[0], CACHE_LINE);
        __asm__ volatile("" ::: "memory");
        for (int64_t i = first; i < rows; ++i) {
            Ints own[2];
            memcpy(own, products[0] + i * TILE_COLUMNS, sizeof own[0]);
            if constexpr (HAS_HALVES) memcpy(own + 1, products[1] + i * TILE_COLUMNS, sizeof own[1]);
            const Floats sum = add_scaled<HAS_HALVES, HAS_MINIMUMS>(
                read(sums + i * TILE_COLUMNS), own, x[i * stride + g], zero, scales, g, 0);
            write(sum, sums + i * TILE_COLUMNS);
        }
    }
}

#endif

// Scratch memory of one thread.
struct PackedScratch {
    static constexpr int64_t MAX_ROWS = 192;  // rows that are multiplied with a tile at once
    char *expanded;  // one expanded block
    BlockScales *scales;
    float *sums[2];  // [MAX_ROWS, TILE_COLUMNS] of each tile of a unit

    explicit PackedScratch(char *memory)
        : expanded(memory),
          scales((BlockScales *)(memory + MAX_GROUPS * GROUP_BYTES)),
          sums{(float *)(scales + 1), (float *)(scales + 1) + MAX_ROWS * TILE_COLUMNS} {}

    static int64_t bytes() {
        return MAX_GROUPS * GROUP_BYTES + (int64_t)sizeof(BlockScales) +
               2 * MAX_ROWS * TILE_COLUMNS * (int64_t)sizeof(float);
    }
};

// Multiplies rows with a tile.
template <bool HAS_HALVES, bool HAS_MINIMUMS>
void multiply_tile(const PackedKind &kind, const char *tile, const RowGroup *x, int64_t stride,
                   int64_t rows, int64_t depth, const PackedScratch &scratch, float *sums) {
    constexpr int64_t PREFETCH_DISTANCE = 4096;  // in bytes
    const PackedLayout layout(kind);
    const int64_t blocks = depth / GROUP_INPUTS / kind.groups;
    const int32_t zero = (int32_t)kind.zero;
#if defined(__AMX_INT8__)
    const bool on_tiles = rows >= LEAST_TILE_ROWS && may_use_tiles();
    // The rows of a register tile. The last tile may overlap the one before it.
    const int64_t tiles = (rows + 15) / 16, tile_rows = (rows + tiles - 1) / tiles;
#endif
    memset(sums, 0, rows * TILE_COLUMNS * sizeof *sums);
    for (int64_t b = 0; b < blocks; ++b, tile += layout.bytes, x += kind.groups) {
        for (int64_t byte = 0; byte < layout.bytes; byte += CACHE_LINE)
            __builtin_prefetch(tile + PREFETCH_DISTANCE + byte, 0, 2);
        read_block_scales(kind, layout, tile, *scratch.scales);
        expand_block(kind, tile + layout.codes, scratch.expanded);
#if defined(__AMX_INT8__)
        if (on_tiles) {
            for (int64_t row = 0; row < rows; row += tile_rows) {
                const int64_t start = min_int(row, rows - tile_rows);
                multiply_on_tiles<HAS_HALVES, HAS_MINIMUMS>(
                    x + start * stride, stride, row - start, tile_rows, scratch.expanded,
                    *scratch.scales, kind.groups, zero, sums + start * TILE_COLUMNS);
            }
            continue;
        }
#endif
        multiply_block<HAS_HALVES, HAS_MINIMUMS>(x, stride, rows, scratch.expanded,
                                                 *scratch.scales, kind.groups, zero - IMPLIED_ZERO,
                                                 sums);
    }
}

typedef void (*MultiplyTile)(const PackedKind &, const char *, const RowGroup *, int64_t, int64_t,
                             int64_t, const PackedScratch &, float *);

INLINE MultiplyTile tile_product(const PackedKind &kind) {
    if (kind.has_halves)
        return kind.has_minimums ? multiply_tile<true, true> : multiply_tile<true, false>;
    return kind.has_minimums ? multiply_tile<false, true> : multiply_tile<false, false>;
}

INLINE int64_t unit_of(int64_t panel) { return panel / PANELS_PER_UNIT; }

// The same as multiply of matrix.h. The panels are those of whole units. The memory expanded has
// expansion_bytes.
template <class Epilogue>
void multiply(PackedWeight, const RowGroup *x, int64_t stride, int64_t rows, int64_t depth,
              const void *weight, int64_t first_panel, int64_t end_panel, char *expanded,
              const Epilogue &epilogue) {
    const PackedHeader &header = *(const PackedHeader *)weight;
    const PackedScratch scratch(expanded);
    const int64_t first_unit = unit_of(first_panel);
    const int64_t end_unit = unit_of(end_panel + PANELS_PER_UNIT - 1);
    const int64_t max_rows = std::max<int64_t>(
        16, std::min<int64_t>(PackedScratch::MAX_ROWS, (1 << 20) / depth / 16 * 16));
    for (int64_t start = 0; start < rows; start += max_rows) {
        const int64_t count = min_int(max_rows, rows - start);
#if defined(__AMX_INT8__)
        const bool on_tiles = count >= LEAST_TILE_ROWS && may_use_tiles();
        const int64_t tiles = (count + 15) / 16;
#endif
        for (int64_t s = 0; s < header.num_sections; ++s) {
            const PackedSection &section = header.sections[s];
            const bool is_last = s + 1 == header.num_sections;
            const int64_t from = std::max(first_unit, section.first_unit);
            const int64_t until =
                is_last ? end_unit : std::min(end_unit, header.sections[s + 1].first_unit);
            const int64_t sizes[2] = {tile_bytes(section.kinds[0], depth),
                                      tile_bytes(section.kinds[1], depth)};
            for (int64_t unit = from; unit < until; ++unit) {
                const char *tile = (const char *)weight + section.offset +
                                   (unit - section.first_unit) * (sizes[0] + sizes[1]);
                for (int t = 0; t < 2; ++t) {
                    const PackedKind &kind = section.kinds[t];
#if defined(__AMX_INT8__)
                    if (on_tiles) {
                        const PackedTileConfig config((int)((count + tiles - 1) / tiles));
                        tile_product(kind)(kind, tile, x + start * stride, stride, count, depth,
                                           scratch, scratch.sums[t]);
                        tile += sizes[0];
                        continue;
                    }
#endif
                    tile_product(kind)(kind, tile, x + start * stride, stride, count, depth,
                                       scratch, scratch.sums[t]);
                    tile += sizes[0];
                }
                for (int64_t row = 0; row < count; ++row) {
                    const float *sums[2] = {scratch.sums[0] + row * TILE_COLUMNS,
                                            scratch.sums[1] + row * TILE_COLUMNS};
                    for (int64_t k = 0; k < PANELS_PER_UNIT; ++k) {
                        const int64_t panel = unit * PANELS_PER_UNIT + k;
                        if (panel < first_panel || panel >= end_panel) continue;
                        // Two vectors of columns: one of each tile, or neighbours.
                        const int64_t v = 2 * k * LANES;
                        const float *pair = sums[v / TILE_COLUMNS] + v % TILE_COLUMNS;
                        if (header.is_paired || TILE_VECTORS == 1)
                            epilogue(start + row, panel, read(sums[0] + k * LANES),
                                     read(sums[1] + k * LANES));
                        else
                            epilogue(start + row, panel, read(pair), read(pair + LANES));
                    }
                }
            }
        }
    }
}

INLINE int64_t expansion_bytes(PackedWeight, int64_t /* max_depth */) {
    return round_up(PackedScratch::bytes(), CACHE_LINE);
}

// Bytes of memory of multiply_packed_rows.
INLINE int64_t packed_rows_memory(int64_t num_rows, int64_t depth, int64_t num_threads) {
    return round_up(num_rows * row_size(PackedWeight(), depth) * (int64_t)sizeof(RowGroup),
                    CACHE_LINE) +
           num_threads * expansion_bytes(PackedWeight(), depth);
}

// Multiplies rows [num_rows, depth] with a weight that is not paired; to is [num_rows, columns].
INLINE void multiply_packed_rows(const float *rows, int64_t num_rows, int64_t depth,
                                 const void *weight, int64_t columns, float *to, char *memory,
                                 const Threads &threads) {
    const int64_t stride = row_size(PackedWeight(), depth), panels = num_panels(columns);
    RowGroup *rounded = (RowGroup *)memory;
    char *scratch = memory + packed_rows_memory(num_rows, depth, 0);
    const int64_t units = (panels + PANELS_PER_UNIT - 1) / PANELS_PER_UNIT;
    run_on_team(threads, [&](Worker worker) {
        for (int64_t i = worker.first(num_rows); i < worker.end(num_rows); ++i)
            round_row(rows + i * depth, depth, rounded + i * stride);
        worker.wait();
        multiply(PackedWeight(), rounded, stride, num_rows, depth, weight,
                 worker.first(units) * PANELS_PER_UNIT,
                 std::min(panels, worker.end(units) * PANELS_PER_UNIT),
                 scratch + worker.index * expansion_bytes(PackedWeight(), depth),
                 [&](int64_t row, int64_t panel, Floats left, Floats right) {
                     const int64_t first = panel * PANEL_WIDTH;
                     write_columns(left, right, min_int(PANEL_WIDTH, columns - first),
                                   to + row * columns + first);
                 });
    });
}

}  // namespace
