// Products with weights of eight bits: half of what there is to read.
//
// A panel holds a column's numbers as in the panel of pairs that it stands for, a byte each, and
// behind them the scale of every column. It is written out as that panel of pairs, in a memory that
// stays in the cache, and multiplied there: whole numbers of eight bits are the same in BFloat16, so
// that nothing is rounded before the scale comes in at the end.

#pragma once

#include "matrix.h"
#include "tiles.h"

#if defined(__AVX512BF16__)

namespace {

template <class W>
struct QuantizedWeight : W {
    static constexpr bool EXPANDS = true;
};

// Bytes of a panel, and of what it is written out as.
INLINE int64_t quantized_size(int64_t depth) { return (depth + PANEL / 8) * PANEL; }
INLINE int64_t expanded_size(int64_t depth) { return depth * PANEL * (int64_t)sizeof(BFloat16); }

// Compilers convert vectors of bytes number by number, if they are not told how.
INLINE Floats as_floats(__m128i bytes) {
    constexpr __mmask16 ALL = 0xffff;
    return (Floats)_mm512_maskz_cvtepi32_ps(ALL, _mm512_maskz_cvtepi8_epi32(ALL, bytes));
}

constexpr int64_t AHEAD = 4096;  // bytes to ask for before they are needed

INLINE void expand(const char *from, int64_t count, char *to) {
    constexpr int64_t AT_ONCE = 2 * LANES;
    for (int64_t i = 0; i < count; i += AT_ONCE) {
        if (i % CACHE_LINE == 0) __builtin_prefetch(from + i + AHEAD, 0, 2);
        __m128i bytes[2];
        memcpy(bytes, from + i, sizeof bytes);
        const Floats low = as_floats(bytes[0]), high = as_floats(bytes[1]);
        const __m512bh both = _mm512_cvtne2ps_pbh((__m512)high, (__m512)low);
        memcpy(to + i * (int64_t)sizeof(BFloat16), &both, sizeof both);
    }
}

#if defined(__AMX_BF16__)
constexpr int64_t STEPS_AT_ONCE = 8;  // written out, that stay in the nearest cache

// A panel with so few rows that each part of it is needed once.
template <class Use>
void multiply_in_parts(const BFloat16 *x, int64_t stride, const TiledRows &rows, int64_t depth,
                       const char *panel, char *memory, const Use &use) {
    alignas(64) float sums[MOST_TILES * TILE_ROWS * PANEL];
    const int64_t steps = depth / TILE_DEPTH;
    for (int64_t step = 0; step < steps; step += STEPS_AT_ONCE) {
        const int64_t count = least(STEPS_AT_ONCE, steps - step), begin = step * TILE_DEPTH;
        expand(panel + begin * PANEL, count * TILE_DEPTH * PANEL, memory);
        const bool begins = step == 0, ends = step + count == steps;
        multiply_block(x, stride, rows, 0, begin, memory, count, nullptr, 0, sums, begins, ends);
    }
    hand_out(rows, 0, sums, rows.first, use);
}
#endif

// As multiply of matrix.h, with memory for a panel that is written out. The depth is even.
template <class W, class Use>
void multiply(QuantizedWeight<W>, const BFloat16 *x, int64_t stride, int64_t rows, int64_t depth,
              const void *weight, int64_t first_panel, int64_t end_panel, char *memory,
              const Use &use) {
    const int64_t whole = rounded_up(depth, PairedWeight::DEPTH), size = quantized_size(whole);
    for (int64_t start = 0; start < rows; start += ROWS_AT_ONCE) {
        const int64_t end = least(start + ROWS_AT_ONCE, rows);
        const auto multiply_all = [&](const auto &multiply_one) {
            for (int64_t p = first_panel; p < end_panel; ++p) {
                const char *panel = (const char *)weight + p * size;
                const Ahead ahead = {p + 1 < end_panel ? panel + size : nullptr, size};
                const float *scales = (const float *)(panel + whole * PANEL);
                const Floats left_scale = read(scales), right_scale = read(scales + LANES);
                multiply_one(panel, ahead, [&](int64_t row, Floats left, Floats right) {
                    use(row, p, left * left_scale, right * right_scale);
                });
            }
        };
#if defined(__AMX_BF16__)
        if constexpr (W::DEPTH == TILE_DEPTH) {
            const TiledRows tiled(start, end - start);
            const TileShapes shapes((int)tiled.in_tile);
            multiply_all([&](const char *panel, Ahead ahead, const auto &scaled) {
                if (tiled.blocks == 1)
                    return multiply_in_parts(x, stride, tiled, depth, panel, memory, scaled);
                expand(panel, whole * PANEL, memory);
                multiply_panel(x, stride, tiled, depth, memory, ahead, scaled);
            });
            continue;
        }
#endif
        multiply_all([&](const char *panel, Ahead ahead, const auto &scaled) {
            expand(panel, whole * PANEL, memory);
            multiply_panel<PairedWeight>(x, stride, start, end, depth, memory, ahead, scaled);
        });
    }
}

}  // namespace

#endif
