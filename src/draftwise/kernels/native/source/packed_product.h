// Products with weights whose numbers are integers of few bits, summed as integers.
//
// The rows are rounded to 8 bits, with a scale for each 32 inputs. The sum over 32 inputs is exact.
// It is multiplied with the scales in float32, group by group in the order of the inputs. So a
// result has the same bits for every number of rows, and with every instruction set.

#pragma once

#include "packed.h"
#include "packed_rows.h"
#include "threads.h"
#include "tiles.h"

#include <algorithm>
#include <type_traits>

namespace {

// Adds the products of four inputs: of LANES columns with four numbers of a row. The codes are less
// their zero where processors multiply integers with signs.
#if defined(__AVX512VNNI__)
constexpr bool HAS_SIGNED_CODES = false;

INLINE Ints add_products(Ints sum, const char *codes, const int8_t *row) {
    int32_t four;
    memcpy(&four, row, sizeof four);
    __m512i columns;
    memcpy(&columns, codes, sizeof columns);
    return (Ints)_mm512_dpbusd_epi32((__m512i)sum, columns, _mm512_set1_epi32(four));
}
#elif defined(__AVX512BW__)
constexpr bool HAS_SIGNED_CODES = true;

INLINE Ints add_products(Ints sum, const char *codes, const int8_t *row) {
    int32_t four;
    memcpy(&four, row, sizeof four);
    __m512i columns;
    memcpy(&columns, codes, sizeof columns);
    const __m512i own = _mm512_set1_epi32(four);
    const __m512i signed_row =
        _mm512_mask_sub_epi8(own, _mm512_movepi8_mask(columns), _mm512_setzero_si512(), own);
    // 128 * 127 * 2 is less than 2^15.
    const __m512i pairs = _mm512_maddubs_epi16(_mm512_abs_epi8(columns), signed_row);
    return sum + (Ints)_mm512_madd_epi16(pairs, _mm512_set1_epi16(1));
}
#elif defined(__AVX2__) && !defined(__AVX512F__)
constexpr bool HAS_SIGNED_CODES = true;

INLINE Ints add_products(Ints sum, const char *codes, const int8_t *row) {
    int32_t four;
    memcpy(&four, row, sizeof four);
    __m256i columns;
    memcpy(&columns, codes, sizeof columns);
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
constexpr bool HAS_SIGNED_CODES = true;

INLINE Ints add_products(Ints sum, const char *codes, const int8_t *row) {
    int32_t four;
    memcpy(&four, row, sizeof four);
    return (Ints)vdotq_s32((int32x4_t)sum, vld1q_s8((const int8_t *)codes),
                           vreinterpretq_s8_s32(vdupq_n_s32(four)));
}
#else
constexpr bool HAS_SIGNED_CODES = true;

INLINE Ints add_products(Ints sum, const char *codes, const int8_t *row) {
    for (int lane = 0; lane < LANES; ++lane)
        for (int i = 0; i < 4; ++i) sum[lane] += (int8_t)codes[4 * lane + i] * row[i];
    return sum;
}
#endif

// The format of a tile, as far as a product is compiled for it.
template <bool HALVES, bool MINIMUMS>
struct TileFormat {
    static constexpr bool HAS_HALVES = HALVES, HAS_MINIMUMS = MINIMUMS;
    static constexpr int PARTS = HALVES ? 2 : 1;    // of a group, with a scale each
    static constexpr int FIRST_SUM = HALVES ? 1 : 0;  // in RowGroup::sums
};

// Adds a group to the sum of a row. The products are those of each part, with the vectors of columns
// that begin at column. All kernels call it, so that their results have the same bits.
template <class Format>
INLINE Floats add_scaled(Floats sum, const Ints *products, const RowGroup &row,
                         const BlockScales &scales, int64_t group, int64_t column) {
    const int64_t first = Format::PARTS * group;
    for (int k = 0; k < Format::PARTS; ++k) {
        const Floats integers = __builtin_convertvector(products[k], Floats);
        sum = fused_multiply_add(integers * row.scale, read(scales.scales[first + k] + column),
                                 sum);
    }
    if constexpr (Format::HAS_MINIMUMS)
        for (int k = 0; k < Format::PARTS; ++k)
            sum = fused_multiply_add(Floats{} + row.scaled_sums[Format::FIRST_SUM + k],
                                     read(scales.minimums[first + k] + column), sum);
    return sum;
}

#if defined(__ARM_FEATURE_MATMUL_INT8)
constexpr bool MULTIPLIES_PAIRS = true;

// The products of two rows with the parts of a group, for LANES columns. An instruction multiplies
// eight inputs of two rows with two columns.
template <class Format>
INLINE void multiply_pair(const RowGroup *rows, const char *codes, Ints (*products)[2]) {
    int32x4_t sums[2][2] = {};  // of each part: of the first and of the last two columns
#pragma GCC unroll 4
    for (int quad = 0; quad < GROUP_QUADS; quad += 2) {
        int32x4_t first, second;
        memcpy(&first, codes + quad * CACHE_LINE, sizeof first);
        memcpy(&second, codes + (quad + 1) * CACHE_LINE, sizeof second);
        const int8x16_t pair = vcombine_s8(vld1_s8(rows[0].numbers + 4 * quad),
                                           vld1_s8(rows[1].numbers + 4 * quad));
        int32x4_t *into = sums[Format::HAS_HALVES && quad >= GROUP_QUADS / 2];
        into[0] = vmmlaq_s32(into[0], pair, vreinterpretq_s8_s32(vzip1q_s32(first, second)));
        into[1] = vmmlaq_s32(into[1], pair, vreinterpretq_s8_s32(vzip2q_s32(first, second)));
    }
    for (int k = 0; k < Format::PARTS; ++k) {
        const int64x2_t left = vreinterpretq_s64_s32(sums[k][0]);
        const int64x2_t right = vreinterpretq_s64_s32(sums[k][1]);
        products[0][k] = (Ints)vzip1q_s64(left, right);
        products[1][k] = (Ints)vzip2q_s64(left, right);
    }
}
#else
constexpr bool MULTIPLIES_PAIRS = false;

template <class Format>
INLINE void multiply_pair(const RowGroup *, const char *, Ints (*)[2]) {}
#endif

// Adds the products of COUNT rows with a block to their sums [rows, TILE_COLUMNS]. With HAS_ZERO,
// zero is subtracted from the codes.
template <int COUNT, bool HAS_ZERO, class Format>
void multiply_rows(const RowGroup *x, int64_t stride, const char *expanded,
                   const BlockScales &scales, int64_t groups, int32_t zero, float *sums) {
    for (int64_t v = 0; v < TILE_VECTORS; ++v) {
        Floats part[COUNT];
#pragma GCC unroll 8
        for (int i = 0; i < COUNT; ++i) part[i] = read(sums + i * TILE_COLUMNS + v * LANES);
        for (int64_t g = 0; g < groups; ++g) {
            const char *codes = expanded + g * GROUP_BYTES + v * LANES * 4;
            constexpr int IN_PAIRS = MULTIPLIES_PAIRS && !HAS_ZERO ? COUNT / 2 * 2 : 0;
#pragma GCC unroll 4
            for (int i = 0; i < IN_PAIRS; i += 2) {
                const RowGroup *rows = x + g * stride + i;
                Ints products[2][2];
                multiply_pair<Format>(rows, codes, products);
                for (int k = 0; k < 2; ++k)
                    part[i + k] = add_scaled<Format>(part[i + k], products[k], rows[k], scales, g,
                                                     v * LANES);
            }
#pragma GCC unroll 8
            for (int i = IN_PAIRS; i < COUNT; ++i) {
                const RowGroup &row = x[g * stride + i];
                Ints products[2] = {};
                if constexpr (HAS_ZERO)
                    for (int k = 0; k < Format::PARTS; ++k)
                        products[k] -= zero * row.sums[Format::FIRST_SUM + k];
#pragma GCC unroll 8
                for (int quad = 0; quad < GROUP_QUADS; ++quad) {
                    Ints &into = products[Format::HAS_HALVES && quad >= GROUP_QUADS / 2];
                    into = add_products(into, codes + quad * CACHE_LINE, row.numbers + 4 * quad);
                }
                part[i] = add_scaled<Format>(part[i], products, row, scales, g, v * LANES);
            }
        }
#pragma GCC unroll 8
        for (int i = 0; i < COUNT; ++i) write(part[i], sums + i * TILE_COLUMNS + v * LANES);
    }
}

constexpr int MAX_PACKED_ROWS = LANES == 16 ? 8 : 4;  // of a register block

// Calls multiply_rows for a number of rows that is known at run time, at most COUNT.
template <int COUNT, bool HAS_ZERO, class Format>
INLINE void multiply_few_rows(int64_t rows, const RowGroup *x, int64_t stride,
                              const char *expanded, const BlockScales &scales, int64_t groups,
                              int32_t zero, float *sums) {
    if constexpr (COUNT > 1)
        if (rows < COUNT)
            return multiply_few_rows<COUNT - 1, HAS_ZERO, Format>(rows, x, stride, expanded,
                                                                  scales, groups, zero, sums);
    multiply_rows<COUNT, HAS_ZERO, Format>(x, stride, expanded, scales, groups, zero, sums);
}

// The same for any number of rows.
template <bool HAS_ZERO, class Format>
void multiply_all_rows(const RowGroup *x, int64_t stride, int64_t rows, const char *expanded,
                       const BlockScales &scales, int64_t groups, int32_t zero, float *sums) {
    for (int64_t row = 0; row < rows; row += MAX_PACKED_ROWS)
        multiply_few_rows<MAX_PACKED_ROWS, HAS_ZERO, Format>(
            min_int(MAX_PACKED_ROWS, rows - row), x + row, stride, expanded, scales, groups, zero,
            sums + row * TILE_COLUMNS);
}

// How the rows of a product are multiplied.
struct RowPlan {
    static constexpr int64_t LEAST_TILE_ROWS = 6;  // from which the matrix unit is faster
    static constexpr int64_t MAX_TILE_ROWS = 16;

    int64_t rows;
    bool on_tiles;
    int64_t tile_rows;  // of a register tile; the last tile may overlap the tile before it

    explicit RowPlan(int64_t rows) : rows(rows), on_tiles(false) {
        const int64_t tiles = (rows + MAX_TILE_ROWS - 1) / MAX_TILE_ROWS;
        tile_rows = (rows + tiles - 1) / tiles;
#if defined(__AMX_INT8__)
        on_tiles = rows >= LEAST_TILE_ROWS && may_use_tiles();
#endif
    }
};

#if defined(__AMX_INT8__)

// Registers: sums of groups or halves (0, 1), rows and columns of groups (2, 3) and of halves (4, 5).
INLINE void configure_packed_tiles(int64_t rows) {
    TileShapes shapes;
    shapes.set(0, rows, CACHE_LINE);
    shapes.set(1, rows, CACHE_LINE);
    shapes.set(2, rows, GROUP_INPUTS);
    shapes.set(3, GROUP_QUADS, CACHE_LINE);
    shapes.set(4, rows, GROUP_INPUTS / 2);
    shapes.set(5, GROUP_QUADS / 2, CACHE_LINE);
    shapes.load();
}

// Multiplies the rows of a register tile with a group; products has the parts of the group.
template <class Format>
INLINE void multiply_group_on_tiles(const RowGroup *x, const char *codes, int32_t *products) {
    constexpr int64_t ROW_BYTES = sizeof(RowGroup);
    const int8_t *numbers = x->numbers;
    __asm__ volatile("" ::: "memory");  // tile loads read memory unknown to the compiler
    _tile_zero(0);
    if constexpr (Format::HAS_HALVES) {
        _tile_zero(1);
        _tile_loadd(4, numbers, ROW_BYTES);
        _tile_loadd(5, codes, CACHE_LINE);
        _tile_dpbssd(0, 4, 5);
        _tile_loadd(4, numbers + GROUP_INPUTS / 2, ROW_BYTES);
        _tile_loadd(5, codes + GROUP_BYTES / 2, CACHE_LINE);
        _tile_dpbssd(1, 4, 5);
        _tile_stored(1, products + RowPlan::MAX_TILE_ROWS * TILE_COLUMNS, CACHE_LINE);
    } else {
        _tile_loadd(2, numbers, ROW_BYTES);
        _tile_loadd(3, codes, CACHE_LINE);
        _tile_dpbssd(0, 2, 3);
    }
    _tile_stored(0, products, CACHE_LINE);
    __asm__ volatile("" ::: "memory");
}

// Adds the products of the rows of a register tile with a block to their sums. Of ROWS rows, the
// sums of first to end are written. While the sums of a group are scaled, the matrix unit multiplies
// the next group.
template <int ROWS, class Format>
void multiply_on_tiles(const RowGroup *x, int64_t stride, int64_t first, int64_t end,
                       const char *expanded, const BlockScales &scales, int64_t groups,
                       float *sums) {
    constexpr int64_t PART = RowPlan::MAX_TILE_ROWS * TILE_COLUMNS;
    alignas(64) int32_t products[2][2 * PART];
    Floats part[ROWS];
#pragma GCC unroll 16
    for (int i = 0; i < ROWS; ++i) part[i] = read(sums + i * TILE_COLUMNS);
    multiply_group_on_tiles<Format>(x, expanded, products[0]);
    for (int64_t g = 0; g < groups; ++g) {
        if (g + 1 < groups)
            multiply_group_on_tiles<Format>(x + (g + 1) * stride, expanded + (g + 1) * GROUP_BYTES,
                                            products[(g + 1) % 2]);
        const int32_t *from = products[g % 2];
        const RowGroup *rows = x + g * stride;
#pragma GCC unroll 16
        for (int i = 0; i < ROWS; ++i) {
            Ints own[2];
            memcpy(own, from + i * TILE_COLUMNS, sizeof own[0]);
            if constexpr (Format::HAS_HALVES)
                memcpy(own + 1, from + PART + i * TILE_COLUMNS, sizeof own[1]);
            part[i] = add_scaled<Format>(part[i], own, rows[i], scales, g, 0);
        }
    }
#pragma GCC unroll 16
    for (int i = 0; i < ROWS; ++i)
        if (i >= first && i < end) write(part[i], sums + i * TILE_COLUMNS);
}

// The same for all rows.
template <class Format>
INLINE void multiply_all_on_tiles(const RowGroup *x, int64_t stride, const RowPlan &plan,
                                  const char *expanded, const BlockScales &scales, int64_t groups,
                                  float *sums) {
    for (int64_t row = 0; row < plan.rows; row += plan.tile_rows) {
        const int64_t start = min_int(row, plan.rows - plan.tile_rows);
        const auto run = [&](auto count) {
            multiply_on_tiles<decltype(count)::value, Format>(
                x + start, stride, row - start, plan.tile_rows, expanded, scales, groups,
                sums + start * TILE_COLUMNS);
        };
        if (plan.tile_rows <= 8)
            run(std::integral_constant<int, 8>());
        else if (plan.tile_rows <= 12)
            run(std::integral_constant<int, 12>());
        else
            run(std::integral_constant<int, 16>());
    }
}

#endif

// Scratch memory of one thread.
struct PackedScratch {
    static constexpr int64_t MAX_ROWS = 192;  // rows that are multiplied with a tile at once
    static constexpr int64_t SUMS = (MAX_ROWS + ROWS_PADDING) * TILE_COLUMNS;
    char *expanded;  // one expanded block
    BlockScales *scales;
    float *sums[2];  // [MAX_ROWS + ROWS_PADDING, TILE_COLUMNS] of each tile of a unit

    explicit PackedScratch(char *memory)
        : expanded(memory),
          scales((BlockScales *)(memory + MAX_GROUPS * GROUP_BYTES)),
          sums{(float *)(scales + 1), (float *)(scales + 1) + SUMS} {}

    static int64_t bytes() {
        return MAX_GROUPS * GROUP_BYTES + (int64_t)sizeof(BlockScales) +
               2 * SUMS * (int64_t)sizeof(float);
    }
};

// Multiplies rows with a tile.
template <class Format>
void multiply_tile(const PackedKind &kind, const char *tile, const RowGroup *x, int64_t stride,
                   const RowPlan &plan, int64_t depth, const PackedScratch &scratch, float *sums) {
    constexpr int64_t PREFETCH_DISTANCE = 4096;  // in bytes
    const PackedLayout layout(kind);
    const int64_t blocks = depth / GROUP_INPUTS / kind.groups;
    const bool is_signed = HAS_SIGNED_CODES || plan.on_tiles;
    memset(sums, 0, plan.rows * TILE_COLUMNS * sizeof *sums);
    for (int64_t b = 0; b < blocks; ++b, tile += layout.bytes, x += kind.groups * stride) {
        for (int64_t byte = 0; byte < layout.bytes; byte += CACHE_LINE)
            __builtin_prefetch(tile + PREFETCH_DISTANCE + byte, 0, 2);
        read_block_scales(kind, layout, tile, *scratch.scales);
        expand_block(kind, tile + layout.codes, is_signed ? kind.zero : 0, scratch.expanded);
#if defined(__AMX_INT8__)
        if (plan.on_tiles) {
            multiply_all_on_tiles<Format>(x, stride, plan, scratch.expanded, *scratch.scales,
                                          kind.groups, sums);
            continue;
        }
#endif
        if (is_signed || kind.zero == 0)
            multiply_all_rows<false, Format>(x, stride, plan.rows, scratch.expanded,
                                             *scratch.scales, kind.groups, 0, sums);
        else
            multiply_all_rows<true, Format>(x, stride, plan.rows, scratch.expanded,
                                            *scratch.scales, kind.groups, (int32_t)kind.zero, sums);
    }
}

typedef void (*MultiplyTile)(const PackedKind &, const char *, const RowGroup *, int64_t,
                             const RowPlan &, int64_t, const PackedScratch &, float *);

INLINE MultiplyTile tile_product(const PackedKind &kind) {
    if (kind.has_halves)
        return kind.has_minimums ? multiply_tile<TileFormat<true, true>>
                                 : multiply_tile<TileFormat<true, false>>;
    return kind.has_minimums ? multiply_tile<TileFormat<false, true>>
                             : multiply_tile<TileFormat<false, false>>;
}

INLINE int64_t unit_of(int64_t panel) { return panel / PANELS_PER_UNIT; }

// Multiplies the rows of a plan with the panels of a section. row is the index of the first row.
template <class Epilogue>
void multiply_section(const PackedHeader &header, int64_t section_index, const RowGroup *x,
                      int64_t stride, const RowPlan &plan, int64_t row, int64_t depth,
                      int64_t first_panel, int64_t end_panel, const PackedScratch &scratch,
                      const Epilogue &epilogue) {
    const PackedSection &section = header.sections[section_index];
    const int64_t from = std::max(unit_of(first_panel), section.first_unit);
    int64_t until = unit_of(end_panel + PANELS_PER_UNIT - 1);
    if (section_index + 1 < header.num_sections)
        until = std::min(until, header.sections[section_index + 1].first_unit);
    const int64_t sizes[2] = {tile_bytes(section.kinds[0], depth),
                              tile_bytes(section.kinds[1], depth)};
    for (int64_t unit = from; unit < until; ++unit) {
        const char *tile = (const char *)&header + section.offset +
                           (unit - section.first_unit) * (sizes[0] + sizes[1]);
        for (int t = 0; t < 2; ++t, tile += sizes[0])
            tile_product(section.kinds[t])(section.kinds[t], tile, x, stride, plan, depth, scratch,
                                           scratch.sums[t]);
        for (int64_t i = 0; i < plan.rows; ++i) {
            const float *sums[2] = {scratch.sums[0] + i * TILE_COLUMNS,
                                    scratch.sums[1] + i * TILE_COLUMNS};
            for (int64_t k = 0; k < PANELS_PER_UNIT; ++k) {
                const int64_t panel = unit * PANELS_PER_UNIT + k;
                if (panel < first_panel || panel >= end_panel) continue;
                // Two vectors of columns: one of each tile, or neighbours.
                const int64_t v = 2 * k * LANES;
                const float *pair = sums[v / TILE_COLUMNS] + v % TILE_COLUMNS;
                if (header.is_paired || TILE_VECTORS == 1)
                    epilogue(row + i, panel, read(sums[0] + k * LANES), read(sums[1] + k * LANES));
                else
                    epilogue(row + i, panel, read(pair), read(pair + LANES));
            }
        }
    }
}

// The same as multiply of matrix.h. The panels are those of whole units. The memory expanded has
// expansion_bytes.
template <class Epilogue>
void multiply(PackedWeight, const RowGroup *x, int64_t stride, int64_t rows, int64_t depth,
              const void *weight, int64_t first_panel, int64_t end_panel, char *expanded,
              const Epilogue &epilogue) {
    const PackedHeader &header = *(const PackedHeader *)weight;
    const PackedScratch scratch(expanded);
    const int64_t max_rows = std::max<int64_t>(
        16, std::min<int64_t>(PackedScratch::MAX_ROWS, (1 << 20) / depth / 16 * 16));
    for (int64_t start = 0; start < rows; start += max_rows) {
        const RowPlan plan(min_int(max_rows, rows - start));
#if defined(__AMX_INT8__)
        if (plan.on_tiles) configure_packed_tiles(plan.tile_rows);
#endif
        for (int64_t s = 0; s < header.num_sections; ++s)
            multiply_section(header, s, x + start, stride, plan, start, depth, first_panel,
                             end_panel, scratch, epilogue);
#if defined(__AMX_INT8__)
        if (plan.on_tiles) _tile_release();
#endif
    }
}

INLINE int64_t expansion_bytes(PackedWeight, int64_t /* max_depth */) {
    return round_up(PackedScratch::bytes(), CACHE_LINE);
}

// Bytes of memory of multiply_packed_rows.
INLINE int64_t packed_rows_memory(int64_t num_rows, int64_t depth, int64_t num_threads) {
    return rows_size(PackedWeight(), num_rows, depth) * (int64_t)sizeof(RowGroup) +
           num_threads * expansion_bytes(PackedWeight(), depth);
}

// Multiplies rows [num_rows, depth] with a weight that is not paired; to is [num_rows, columns].
INLINE void multiply_packed_rows(const float *rows, int64_t num_rows, int64_t depth,
                                 const void *weight, int64_t columns, float *to, char *memory,
                                 const Threads &threads) {
    const int64_t stride = num_rows, panels = num_panels(columns);
    RowGroup *rounded = (RowGroup *)memory;
    char *scratch = memory + packed_rows_memory(num_rows, depth, 0);
    const int64_t units = (panels + PANELS_PER_UNIT - 1) / PANELS_PER_UNIT;
    run_on_team(threads, [&](Worker worker) {
        for (int64_t i = worker.first(num_rows); i < worker.end(num_rows); ++i)
            round_row(rows + i * depth, depth, stride, rounded + i);
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
