// The blocks of GGUF files, and their conversion to the tiles of packed.h.
//
// Every type is read as integers with scales, without loss. The types are those of ggml; their
// layouts are described in ggml-common.h.

#pragma once

#include "grids.h"
#include "packed.h"
#include "threads.h"

namespace {

// Types of blocks, by their number in files.
enum BlockType {
    Q4_0 = 2, Q4_1 = 3, Q5_0 = 6, Q5_1 = 7, Q8_0 = 8, Q2_K = 10, Q3_K = 11, Q4_K = 12, Q5_K = 13,
    Q6_K = 14, IQ2_XXS = 16, IQ2_XS = 17, IQ3_XXS = 18, IQ1_S = 19, IQ4_NL = 20, IQ3_S = 21,
    IQ2_S = 22, IQ4_XS = 23, IQ1_M = 29, TQ1_0 = 34, TQ2_0 = 35, MXFP4 = 39, NVFP4 = 40,
};

}  // namespace

// How the blocks of a tensor are read.
struct BlockKind {
    PackedKind packed;    // of their tiles
    int64_t type;
    const uint8_t *grid;  // see grids.h; null for types without a grid
};

namespace {

constexpr int64_t LARGE_BLOCK = 256;

// Up to 256 numbers of a row. The arrays have as many entries as the type has groups.
struct Block {
    uint8_t codes[LARGE_BLOCK];
    int8_t scales[16];             // for BYTE_SCALES
    uint8_t minimums[16];
    uint16_t factors[2];           // float16: of scales and minimums
    uint16_t half_scales[16], half_minimums[16];  // for HALF_SCALES; minimums are to be added
    uint8_t powers[8];             // for POWER_SCALES
};

INLINE uint16_t read_half(const uint8_t *from) {
    uint16_t half;
    memcpy(&half, from, sizeof half);
    return half;
}

// Low and high nibbles of size bytes, the low ones first.
INLINE void read_nibbles(const uint8_t *from, int size, uint8_t *to) {
    for (int i = 0; i < size; ++i) to[i] = from[i] & 15;
    for (int i = 0; i < size; ++i) to[size + i] = from[i] >> 4;
}

// Adds the fifth bits of 32 codes.
INLINE void add_fifth_bits(const uint8_t *from, uint8_t *to) {
    uint32_t bits;
    memcpy(&bits, from, sizeof bits);
    for (int i = 0; i < 32; ++i) to[i] |= (uint8_t)((bits >> i & 1) << 4);
}

// The scales and minimums of 6 bits of Q4_K and Q5_K.
INLINE void read_six_bits(const uint8_t *from, Block &to) {
    for (int i = 0; i < 4; ++i) {
        to.scales[i] = (int8_t)(from[i] & 63);
        to.minimums[i] = from[4 + i] & 63;
        to.scales[4 + i] = (int8_t)((from[8 + i] & 15) | (from[i] >> 6) << 4);
        to.minimums[4 + i] = (uint8_t)((from[8 + i] >> 4) | (from[4 + i] >> 6) << 4);
    }
}

// An unsigned number with 4 bits of exponent and 3 of fraction, halved, as float16.
INLINE uint16_t half_of_ue4m3(uint8_t x) {
    if (x == 0 || x == 0x7f) return 0;
    const int exponent = x >> 3 & 15, fraction = x & 7;
    const float number = exponent ? (float)(8 + fraction) * __builtin_ldexpf(1.0f, exponent - 11)
                                  : (float)fraction * 0x1p-10f;
    // The numbers are multiples of 2^-10 below 256: exact in float16.
    uint32_t bits;
    memcpy(&bits, &number, sizeof bits);
    if (number < 0x1p-14f) return (uint16_t)(number * 0x1p24f);
    return (uint16_t)((bits >> 13) - (112u << 10));
}

// The numbers of TQ1_0: five of three values in a byte, and four in each of the last four bytes.
INLINE void read_ternary(const uint8_t *from, uint8_t *to) {
    const struct { int bytes, numbers; } parts[] = {{32, 5}, {16, 5}, {4, 4}};
    for (const auto &part : parts) {
        for (int k = 0, power = 1; k < part.numbers; ++k, power *= 3)
            for (int i = 0; i < part.bytes; ++i) *to++ = (uint8_t)((uint8_t)(from[i] * power) * 3 >> 8);
        from += part.bytes;
    }
}

// Reads a block.
INLINE void read_block(const BlockKind &kind, const uint8_t *from, Block &to) {
    const uint8_t *grid = kind.grid;
    switch (kind.type) {
        case Q4_0:
            to.half_scales[0] = read_half(from);
            read_nibbles(from + 2, 16, to.codes);
            break;
        case Q4_1:
            to.half_scales[0] = read_half(from);
            to.half_minimums[0] = read_half(from + 2);
            read_nibbles(from + 4, 16, to.codes);
            break;
        case Q5_0:
            to.half_scales[0] = read_half(from);
            read_nibbles(from + 6, 16, to.codes);
            add_fifth_bits(from + 2, to.codes);
            break;
        case Q5_1:
            to.half_scales[0] = read_half(from);
            to.half_minimums[0] = read_half(from + 2);
            read_nibbles(from + 8, 16, to.codes);
            add_fifth_bits(from + 4, to.codes);
            break;
        case Q8_0:
            to.half_scales[0] = read_half(from);
            for (int i = 0; i < 32; ++i) to.codes[i] = from[2 + i] ^ 128;
            break;
        case IQ4_NL:
            to.half_scales[0] = read_half(from);
            read_nibbles(from + 2, 16, to.codes);
            break;
        case MXFP4:
            to.powers[0] = from[0];
            read_nibbles(from + 1, 16, to.codes);
            break;
        case NVFP4:
            for (int k = 0; k < 4; ++k) {
                to.half_scales[k] = half_of_ue4m3(from[k]);
                read_nibbles(from + 4 + 8 * k, 8, to.codes + 16 * k);
            }
            break;
        case Q2_K:
            for (int k = 0; k < 16; ++k) {
                to.scales[k] = (int8_t)(from[k] & 15);
                to.minimums[k] = from[k] >> 4;
            }
            for (int half = 0; half < 2; ++half)
                for (int k = 0; k < 4; ++k)
                    for (int i = 0; i < 32; ++i)
                        to.codes[128 * half + 32 * k + i] = from[16 + 32 * half + i] >> 2 * k & 3;
            to.factors[0] = read_half(from + 80);
            to.factors[1] = read_half(from + 82);
            break;
        case Q3_K: {
            const uint8_t *scales = from + 96;
            for (int k = 0; k < 16; ++k) {
                const int low = k < 8 ? scales[k] & 15 : scales[k - 8] >> 4;
                const int high = scales[8 + k % 4] >> 2 * (k / 4) & 3;
                to.scales[k] = (int8_t)((low | high << 4) - 32);
            }
            for (int half = 0; half < 2; ++half)
                for (int k = 0; k < 4; ++k)
                    for (int i = 0; i < 32; ++i) {
                        const int low = from[32 + 32 * half + i] >> 2 * k & 3;
                        const int high = from[i] >> (4 * half + k) & 1;
                        to.codes[128 * half + 32 * k + i] = (uint8_t)(low | high << 2);
                    }
            to.factors[0] = read_half(from + 108);
            break;
        }
        case Q4_K:
            to.factors[0] = read_half(from);
            to.factors[1] = read_half(from + 2);
            read_six_bits(from + 4, to);
            for (int k = 0; k < 4; ++k) read_nibbles(from + 16 + 32 * k, 32, to.codes + 64 * k);
            break;
        case Q5_K:
            to.factors[0] = read_half(from);
            to.factors[1] = read_half(from + 2);
            read_six_bits(from + 4, to);
            for (int k = 0; k < 4; ++k) read_nibbles(from + 48 + 32 * k, 32, to.codes + 64 * k);
            for (int k = 0; k < 8; ++k)
                for (int i = 0; i < 32; ++i)
                    to.codes[32 * k + i] |= (uint8_t)((from[16 + i] >> k & 1) << 4);
            break;
        case Q6_K:
            for (int half = 0; half < 2; ++half) {
                const uint8_t *low = from + 64 * half, *high = from + 128 + 32 * half;
                for (int k = 0; k < 4; ++k)
                    for (int i = 0; i < 32; ++i) {
                        const int four = low[32 * (k % 2) + i] >> 4 * (k / 2) & 15;
                        const int two = high[i] >> 2 * k & 3;
                        to.codes[128 * half + 32 * k + i] = (uint8_t)(four | two << 4);
                    }
            }
            memcpy(to.scales, from + 192, 16);
            to.factors[0] = read_half(from + 208);
            break;
        case IQ4_XS:
            to.factors[0] = read_half(from);
            for (int k = 0; k < 8; ++k) {
                const int low = from[4 + k / 2] >> 4 * (k % 2) & 15;
                const int high = read_half(from + 2) >> 2 * k & 3;
                to.scales[k] = (int8_t)((low | high << 4) - 32);
                read_nibbles(from + 8 + 16 * k, 16, to.codes + 32 * k);
            }
            break;
        case TQ2_0:
            for (int half = 0; half < 2; ++half)
                for (int k = 0; k < 4; ++k)
                    for (int i = 0; i < 32; ++i)
                        to.codes[128 * half + 32 * k + i] = from[32 * half + i] >> 2 * k & 3;
            for (int k = 0; k < 8; ++k) to.scales[k] = 1;
            to.factors[0] = read_half(from + 64);
            break;
        case TQ1_0:
            read_ternary(from, to.codes);
            for (int k = 0; k < 8; ++k) to.scales[k] = 1;
            to.factors[0] = read_half(from + 52);
            break;
        case IQ1_M: to.factors[0] = read_iq1_m(grid, from, to.codes, to.scales); break;
        case IQ1_S: case IQ2_XXS: case IQ2_XS: case IQ2_S: case IQ3_XXS: case IQ3_S:
            to.factors[0] = read_half(from);
            from += 2;
            switch (kind.type) {
                case IQ1_S: read_iq1_s(grid, from, to.codes, to.scales); break;
                case IQ2_XXS: read_iq2_xxs(grid, from, to.codes, to.scales); break;
                case IQ2_XS: read_iq2_xs(grid, from, to.codes, to.scales); break;
                case IQ2_S: read_iq2_s(grid, from, to.codes, to.scales); break;
                case IQ3_XXS: read_iq3_xxs(grid, from, to.codes, to.scales); break;
                default: read_iq3_s(grid, from, to.codes, to.scales); break;
            }
            break;
        default: break;
    }
}

// Numbers and bytes of a block of a type.
struct BlockSize {
    int64_t numbers, bytes;
};

INLINE BlockSize block_size(int64_t type) {
    switch (type) {
        case Q4_0: case IQ4_NL: return {32, 18};
        case Q4_1: return {32, 20};
        case Q5_0: return {32, 22};
        case Q5_1: return {32, 24};
        case Q8_0: return {32, 34};
        case MXFP4: return {32, 17};
        case NVFP4: return {64, 36};
        case Q2_K: return {256, 84};
        case Q3_K: return {256, 110};
        case Q4_K: return {256, 144};
        case Q5_K: return {256, 176};
        case Q6_K: return {256, 210};
        case IQ4_XS: return {256, 136};
        case IQ1_S: return {256, 50};
        case IQ1_M: return {256, 56};
        case IQ2_XXS: case TQ2_0: return {256, 66};
        case IQ2_XS: return {256, 74};
        case IQ2_S: return {256, 82};
        case IQ3_XXS: return {256, 98};
        case IQ3_S: return {256, 110};
        case TQ1_0: return {256, 54};
        default: return {0, 0};
    }
}

// The scale and the minimum of a group of a block, as they multiply and are subtracted.
INLINE void group_scales(const PackedKind &kind, const Block &block, int64_t group, float *scale,
                         float *minimum) {
    *minimum = 0;
    if (kind.form == BYTE_SCALES) {
        *scale = half_to_float(block.factors[0]) * (float)block.scales[group];
        if (kind.has_minimums)
            *minimum = half_to_float(block.factors[1]) * (float)block.minimums[group];
    } else if (kind.form == POWER_SCALES) {
        *scale = power_scale(block.powers[group]);
    } else {
        *scale = half_to_float(block.half_scales[group]);
        if (kind.has_minimums) *minimum = -half_to_float(block.half_minimums[group]);
    }
    *scale *= (float)kind.unit;
    *minimum *= (float)kind.unit;
}

// Expands a row to float32.
INLINE void expand_row(const BlockKind &blocks, const uint8_t *from, int64_t depth, float *to) {
    const PackedKind &kind = blocks.packed;
    const BlockSize size = block_size(blocks.type);
    const int64_t group_size = kind.has_halves ? 16 : 32;
    Block block;
    float scale = 0, minimum = 0;
    for (int64_t i = 0; i < depth; i += size.numbers, from += size.bytes) {
        read_block(blocks, from, block);
        for (int64_t j = 0; j < size.numbers; ++j) {
            if (j % group_size == 0) group_scales(kind, block, j / group_size, &scale, &minimum);
            const int code = kind.has_table ? kind.table[block.codes[j]] : block.codes[j];
            to[i + j] = (float)(code - (int)kind.zero) * scale - minimum;
        }
    }
}

// --- Packing.

// Writes the codes of a group [TILE_COLUMNS, GROUP_INPUTS] in the order of a tile.
template <int BITS>
INLINE void pack_codes(const uint8_t (*codes)[GROUP_INPUTS], char *to) {
    uint8_t quads[GROUP_QUADS][CACHE_LINE];
    for (int column = 0; column < TILE_COLUMNS; ++column)
        for (int quad = 0; quad < GROUP_QUADS; ++quad)
            memcpy(quads[quad] + 4 * column, codes[column] + 4 * quad, 4);
    uint8_t *out = (uint8_t *)to;
    if constexpr (BITS == 8) {
        memcpy(out, quads, sizeof quads);
        return;
    }
    constexpr int LOW = BITS >= 4 ? 4 : 2, PER_BYTE = 8 / LOW, MASK = (1 << LOW) - 1;
    for (int k = 0; k < GROUP_QUADS / PER_BYTE; ++k, out += CACHE_LINE)
        for (int i = 0; i < CACHE_LINE; ++i) {
            int byte = 0;
            for (int q = 0; q < PER_BYTE; ++q)
                byte |= (quads[PER_BYTE * k + q][i] & MASK) << LOW * q;
            out[i] = (uint8_t)byte;
        }
    constexpr int HIGH = BITS - LOW;
    if constexpr (HIGH > 0) {
        constexpr int PER_HIGH = 8 / HIGH, HIGH_MASK = (1 << HIGH) - 1;
        for (int k = 0; k < GROUP_QUADS / PER_HIGH; ++k, out += CACHE_LINE)
            for (int i = 0; i < CACHE_LINE; ++i) {
                int byte = 0;
                for (int q = 0; q < PER_HIGH; ++q)
                    byte |= (quads[PER_HIGH * k + q][i] >> LOW & HIGH_MASK) << HIGH * q;
                out[i] = (uint8_t)byte;
            }
    }
}

INLINE void pack_codes(int64_t bits, const uint8_t (*codes)[GROUP_INPUTS], char *to) {
    switch (bits) {
        case 2: return pack_codes<2>(codes, to);
        case 3: return pack_codes<3>(codes, to);
        case 4: return pack_codes<4>(codes, to);
        case 5: return pack_codes<5>(codes, to);
        case 6: return pack_codes<6>(codes, to);
        default: return pack_codes<8>(codes, to);
    }
}

}  // namespace

// Arguments of draftwise_pack_blocks: rows of blocks that become tiles.
struct PackCall {
    const uint8_t *rows;      // the blocks
    const int64_t *order;     // [num_rows] which row each column is; null for all in order
    const int64_t *blocks;    // [blocks] which part of a row each block is; null for all in order
    const BlockKind *kind;
    char *to;                 // first tile
    int64_t row_bytes, num_rows, depth;
    int64_t tile_stride;      // bytes from one tile to the next
};

namespace {

// Converts the rows of one tile. Columns after the last row are zero.
INLINE void pack_tile(const PackCall &call, int64_t tile) {
    const PackedKind &kind = call.kind->packed;
    const PackedLayout layout(kind);
    const BlockSize size = block_size(call.kind->type);
    const int64_t first = tile * TILE_COLUMNS;
    const int64_t columns = std::min<int64_t>(TILE_COLUMNS, call.num_rows - first);
    const int64_t halves = 1 + kind.has_halves, block_inputs = kind.groups * GROUP_INPUTS;
    const int64_t parts = 1 + kind.has_minimums, groups_read = size.numbers / GROUP_INPUTS;
    const int64_t num_blocks = call.depth / block_inputs;
    const uint8_t *rows[TILE_COLUMNS];
    for (int64_t c = 0; c < columns; ++c) {
        const int64_t row = call.order ? call.order[first + c] : first + c;
        rows[c] = call.rows + row * call.row_bytes;
    }
    char *to = call.to + tile * call.tile_stride;
    static thread_local uint8_t codes[MAX_GROUPS][TILE_COLUMNS][GROUP_INPUTS];
    for (int64_t b = 0; b < num_blocks; ++b, to += layout.bytes) {
        memset(to, 0, layout.codes);
        memset(codes, 0, sizeof codes);
        char *scales = to + parts * layout.factors, *minimums = scales + layout.scales;
        const int64_t first_group = (call.blocks ? call.blocks[b] : b) * kind.groups;
        for (int64_t c = 0; c < columns; ++c)
            for (int64_t g = 0, count; g < kind.groups; g += count) {
                // Groups of the row's own blocks, which may be smaller or larger.
                const int64_t group = first_group + g, own = group % groups_read;
                count = min_int(groups_read - own, kind.groups - g);
                Block block;
                read_block(*call.kind, rows[c] + group / groups_read * size.bytes, block);
                for (int64_t i = 0; i < count; ++i)
                    memcpy(codes[g + i][c], block.codes + (own + i) * GROUP_INPUTS, GROUP_INPUTS);
                for (int64_t i = 0; i < count * halves; ++i) {
                    const int64_t k = own * halves + i, at = (g * halves + i) * TILE_COLUMNS + c;
                    if (kind.form == BYTE_SCALES) {
                        scales[at] = block.scales[k];
                        if (kind.has_minimums) minimums[at] = (char)block.minimums[k];
                    } else if (kind.form == POWER_SCALES) {
                        scales[at] = (char)block.powers[k];
                    } else {
                        memcpy(scales + 2 * at, block.half_scales + k, 2);
                        const uint16_t negative = block.half_minimums[k] ^ 0x8000;
                        if (kind.has_minimums) memcpy(minimums + 2 * at, &negative, 2);
                    }
                }
                if (kind.form == BYTE_SCALES)
                    for (int64_t part = 0; part < parts; ++part)
                        memcpy(to + part * layout.factors + 2 * c, block.factors + part, 2);
            }
        for (int64_t g = 0; g < kind.groups; ++g)
            pack_codes(kind.bits, codes[g], to + layout.codes + g * GROUP_BYTES * kind.bits / 8);
    }
}

}  // namespace

// Arguments of draftwise_pack_integers: rows of integers with scales that become tiles. A number is
// integer * scale - minimum.
struct PackIntegersCall {
    const int8_t *numbers;    // [num_rows, depth]
    const float *scales;      // [num_rows, depth / group]
    const float *minimums;    // the same; null without minimums
    const PackedKind *kind;   // with HALF_SCALES or FLOAT_SCALES
    char *to;                 // first tile
    int64_t num_rows, depth, group, tile_stride;
    int64_t smallest;         // integer of code 0
};

namespace {

// float32 to float16, for numbers that float16 has.
INLINE uint16_t float_to_half(float number) {
    uint32_t bits;
    memcpy(&bits, &number, sizeof bits);
    const uint32_t sign = bits >> 16 & 0x8000, rest = bits & 0x7fffffffu;
    if (rest >= 0x7f800000u) return (uint16_t)(sign | 0x7c00 | (rest >> 13 & 0x3ff));
    if (rest < 0x38800000u) {
        float size;
        memcpy(&size, &rest, sizeof size);
        return (uint16_t)(sign | (uint32_t)(size * 0x1p24f));
    }
    return (uint16_t)(sign | ((rest >> 13) - (112u << 10)));
}

// Converts the rows of one tile; see pack_tile.
INLINE void pack_tile(const PackIntegersCall &call, int64_t tile) {
    const PackedKind &kind = *call.kind;
    const PackedLayout layout(kind);
    const int64_t first = tile * TILE_COLUMNS, halves = 1 + kind.has_halves;
    const int64_t columns = std::min<int64_t>(TILE_COLUMNS, call.num_rows - first);
    const int64_t block_inputs = kind.groups * GROUP_INPUTS, scaled = GROUP_INPUTS / halves;
    const bool is_wide = kind.form == FLOAT_SCALES;
    char *to = call.to + tile * call.tile_stride;
    uint8_t codes[TILE_COLUMNS][GROUP_INPUTS];
    for (int64_t input = 0; input < call.depth; input += block_inputs, to += layout.bytes) {
        memset(to, 0, layout.codes);
        char *parts[2] = {to, to + layout.scales};
        for (int64_t k = 0; k < kind.groups * halves; ++k)
            for (int64_t c = 0; c < columns; ++c) {
                const int64_t from =
                    (first + c) * (call.depth / call.group) + (input + k * scaled) / call.group;
                const int64_t at = k * TILE_COLUMNS + c;
                const float numbers[2] = {call.scales[from],
                                          call.minimums ? call.minimums[from] : 0.0f};
                for (int64_t part = 0; part < 1 + kind.has_minimums; ++part) {
                    const uint16_t half = float_to_half(numbers[part]);
                    if (is_wide) memcpy(parts[part] + 4 * at, numbers + part, 4);
                    else memcpy(parts[part] + 2 * at, &half, 2);
                }
            }
        for (int64_t g = 0; g < kind.groups; ++g) {
            memset(codes, 0, sizeof codes);
            for (int64_t c = 0; c < columns; ++c) {
                const int8_t *from =
                    call.numbers + (first + c) * call.depth + input + g * GROUP_INPUTS;
                for (int i = 0; i < GROUP_INPUTS; ++i)
                    codes[c][i] = (uint8_t)(from[i] - call.smallest);
            }
            pack_codes(kind.bits, codes, to + layout.codes + g * GROUP_BYTES * kind.bits / 8);
        }
    }
}

// Converts all rows.
template <class Call>
INLINE void pack_rows(const Call &call, const Worker &worker) {
    const int64_t tiles = (call.num_rows + TILE_COLUMNS - 1) / TILE_COLUMNS;
    for (int64_t tile = worker.first(tiles); tile < worker.end(tiles); ++tile)
        pack_tile(call, tile);
}

}  // namespace

// Arguments of draftwise_expand_rows: rows of blocks that become float32.
struct ExpandCall {
    const uint8_t *rows;
    const BlockKind *kind;
    float *to;                // [num_rows, depth]
    int64_t row_bytes, num_rows, depth;
};
