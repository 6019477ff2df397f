// The format of weights whose numbers are integers of few bits.
//
// A tile has 16 columns of the weight, in blocks of up to 256 inputs. Expanded, a group of 32 inputs
// of a tile is an operand of the dot products of VNNI and NEON and a tile of the matrix unit: for
// each four inputs, the four numbers of each column.

#pragma once

#include "vectors.h"

#include <type_traits>

// How the scales of a weight are stored.
enum ScaleForm {
    BYTE_SCALES = 0,   // an integer of 8 bits, times a float16 of each column and block
    HALF_SCALES = 1,   // float16
    FLOAT_SCALES = 2,  // float32
    POWER_SCALES = 3,  // e for 2^(e - 128)
};

// The format of a tile. A number is ((code - zero) * scale - minimum) * unit.
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
    double unit;           // a float32
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

template <int BITS, bool HAS_TABLE, int QUAD = 0>
INLINE void expand_group(const char *from, const uint8_t *table, Bytes zero, char *to) {
    if constexpr (QUAD < GROUP_QUADS) {
        for (int64_t byte = 0; byte < CACHE_LINE; byte += sizeof(Bytes)) {
            Bytes codes = codes_of<BITS, QUAD>(from + byte);
            if constexpr (HAS_TABLE) codes = looked_up(codes, table);
            codes -= zero;
            memcpy(to + QUAD * CACHE_LINE + byte, &codes, sizeof codes);
        }
        expand_group<BITS, HAS_TABLE, QUAD + 1>(from, table, zero, to);
    }
}

// Expands the codes of a block, less zero.
INLINE void expand_block(const PackedKind &kind, const char *from, int64_t zero, char *to) {
    const Bytes less = Bytes{} + (uint8_t)zero;
    const auto expand_with = [&](auto bits, auto has_table) {
        constexpr int BITS = decltype(bits)::value;
        constexpr bool HAS_TABLE = decltype(has_table)::value;
        for (int64_t g = 0; g < kind.groups; ++g)
            expand_group<BITS, HAS_TABLE>(from + g * (GROUP_BYTES * BITS / 8), kind.table, less,
                                          to + g * GROUP_BYTES);
    };
    const auto expand = [&](auto bits) { expand_with(bits, std::false_type()); };
    if (kind.has_table) return expand_with(std::integral_constant<int, 4>(), std::true_type());
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

// Reads count vectors of scales, times unit. IS_SIGNED is for scales of 8 bits.
template <bool IS_SIGNED>
INLINE void read_scales(int64_t form, const char *factors, const char *from, int64_t count,
                        float unit, float (*to)[TILE_COLUMNS]) {
    if (form == BYTE_SCALES) {
        float factor[TILE_COLUMNS];
        read_halves(factors, factor);
        for (int64_t k = 0; k < count; ++k, from += TILE_COLUMNS)
            for (int i = 0; i < TILE_COLUMNS; ++i) {
                const int32_t scale = IS_SIGNED ? (int8_t)from[i] : (uint8_t)from[i];
                to[k][i] = factor[i] * (float)scale * unit;
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
        for (int i = 0; i < TILE_COLUMNS; ++i) to[k][i] *= unit;
    }
}

INLINE void read_block_scales(const PackedKind &kind, const PackedLayout &layout,
                              const char *block, BlockScales &to) {
    const int64_t count = kind.groups * (1 + kind.has_halves), parts = 1 + kind.has_minimums;
    const char *scales = block + parts * layout.factors;
    const float unit = (float)kind.unit;
    read_scales<true>(kind.form, block, scales, count, unit, to.scales);
    if (kind.has_minimums)
        read_scales<false>(kind.form, block + layout.factors, scales + layout.scales, count, -unit,
                           to.minimums);
}

}  // namespace
