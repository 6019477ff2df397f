// Products of a few rows with a weight that was laid out once, in panels.
//
// A panel is two vectors of columns. It lies step after step, so that it is read from one end to the
// other, once from memory whatever the number of rows: while the rows after the first few are
// multiplied with it, the next panel is asked for. Rows are taken as many at a time as there are
// registers for their sums.

#pragma once

#include "vectors.h"

namespace {

constexpr int PANEL = 2 * LANES;
constexpr int LARGEST_BLOCK = LANES == 16 ? 12 : 6;  // rows at a time
constexpr int LARGEST_ALONE = LANES == 16 ? 9 : 6;    // that are quicker as one block than as two
constexpr int ROWS_AT_ONCE = 16 * LARGEST_BLOCK;     // that stay in the cache meanwhile

// How a weight is multiplied: as float32, of each column one number after the other.
template <class T>
struct WideWeight {
    typedef T Stored;       // type of the weight
    typedef float Number;   // type of what it is multiplied with
    typedef float Factor;   // what one step takes of a row
    typedef Floats Columns;
    static constexpr int DEPTH = 1;  // numbers of a row in one step
    static constexpr int BYTES = PANEL * sizeof(T);  // of a panel in one step

    INLINE void load(const char *from, Columns *to) {
        if constexpr (sizeof(T) == sizeof(float))
            memcpy(to, from, 2 * sizeof *to);
        else
            ::load((const T *)from, to);  // column c and the one LANES further share a word
    }

    INLINE Floats multiply_add(Floats sum, Columns column, Factor by) { return sum + column * by; }
};

#if defined(__AVX512BF16__)
// Pairs of BFloat16, multiplied by the processor. A word holds two numbers of a column.
struct PairedWeight {
    typedef BFloat16 Stored;
    typedef BFloat16 Number;
    typedef uint32_t Factor;
    typedef Words Columns;
    static constexpr int DEPTH = 2;
    static constexpr int BYTES = PANEL * sizeof(Factor);

    INLINE void load(const char *from, Columns *to) { memcpy(to, from, 2 * sizeof *to); }

    INLINE Floats multiply_add(Floats sum, Columns column, Factor by) {
        return (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)column,
                                        (__m512bh)_mm512_set1_epi32((int)by));
    }
};
#endif

// Of a weight with so many inputs.
template <class W>
INLINE int64_t steps(int64_t depth) { return (depth + W::DEPTH - 1) / W::DEPTH; }

INLINE int64_t num_panels(int64_t columns) { return (columns + PANEL - 1) / PANEL; }

// COUNT rows with a panel. If it asks, every step asks for the next so many bytes that follow next.
// Each sum is made in the same order whatever COUNT is.
template <class W, int COUNT, bool ASKS>
INLINE void multiply_steps(const typename W::Number *x, int64_t stride, const char *panel,
                           int64_t count, const char *next, int64_t next_bytes, Floats *sums) {
    Floats part[COUNT][2] = {};  // by itself, so that it is kept in registers
    for (int64_t step = 0; step < count; ++step) {
        if (ASKS) __builtin_prefetch(next + step * next_bytes, 0, 2);
        typename W::Columns columns[2];
        W::load(panel + step * W::BYTES, columns);
#pragma GCC unroll 16
        for (int i = 0; i < COUNT; ++i) {
            typename W::Factor factor;
            memcpy(&factor, x + i * stride + step * W::DEPTH, sizeof factor);
            part[i][0] = W::multiply_add(part[i][0], columns[0], factor);
            part[i][1] = W::multiply_add(part[i][1], columns[1], factor);
        }
    }
    memcpy(sums, part, sizeof part);
}

template <class W, int COUNT, class Use>
void multiply_block(const typename W::Number *x, int64_t stride, const char *panel, int64_t depth,
                    const char *next, int64_t next_bytes, int64_t row, const Use &use) {
    Floats sums[2 * COUNT];
    const int64_t count = steps<W>(depth);
    if (next)
        multiply_steps<W, COUNT, true>(x, stride, panel, count, next, next_bytes, sums);
    else
        multiply_steps<W, COUNT, false>(x, stride, panel, count, next, 0, sums);
    for (int i = 0; i < COUNT; ++i) use(row + i, sums[2 * i], sums[2 * i + 1]);
}

template <class W, int COUNT, class Use>
void multiply_block_of(int count, const typename W::Number *x, int64_t stride, const char *panel,
                       int64_t depth, const char *next, int64_t next_bytes, int64_t row,
                       const Use &use) {
    if constexpr (COUNT > 1)
        if (count < COUNT)
            return multiply_block_of<W, COUNT - 1>(count, x, stride, panel, depth, next,
                                                   next_bytes, row, use);
    multiply_block<W, COUNT>(x, stride, panel, depth, next, next_bytes, row, use);
}

// What is to be asked for meanwhile: so many bytes, which follow what is multiplied.
struct Ahead {
    const char *from;  // or null
    int64_t bytes;
};

// x [rows, depth], rows first to end of it, with a panel; use(row, left, right) gets what comes out.
template <class W, class Use>
void multiply_panel(const typename W::Number *x, int64_t stride, int64_t first, int64_t end,
                    int64_t depth, const char *panel, Ahead ahead, const Use &use) {
    const int64_t rows = end - first, needed = (rows + LARGEST_BLOCK - 1) / LARGEST_BLOCK;
    const int64_t blocks = needed == 1 && rows > LARGEST_ALONE ? 2 : needed;
    // One block reads on so fast that the processor's own foresight does better.
    const bool asks = blocks > 1 && ahead.from;
    for (int64_t b = 0; b < blocks; ++b) {
        const int64_t row = first + rows * b / blocks, until = first + rows * (b + 1) / blocks;
        const char *next = asks ? ahead.from + ahead.bytes * b / blocks : nullptr;
        multiply_block_of<W, LARGEST_BLOCK>((int)(until - row), x + row * stride, stride, panel,
                                            depth, next, ahead.bytes / steps<W>(depth) / blocks,
                                            row, use);
    }
}

// x [rows, depth] with some panels of a weight; use(row, panel, left, right) gets what comes out.
// Only the weights of narrow.h need the memory.
template <class W, class Use>
void multiply(W, const typename W::Number *x, int64_t stride, int64_t rows, int64_t depth,
              const void *weight, int64_t first_panel, int64_t end_panel, char * /* memory */,
              const Use &use) {
    const int64_t size = steps<W>(depth) * W::BYTES;
    for (int64_t start = 0; start < rows; start += ROWS_AT_ONCE) {
        const int64_t end = least(start + ROWS_AT_ONCE, rows);
        for (int64_t p = first_panel; p < end_panel; ++p) {
            const char *panel = (const char *)weight + p * size;
            const Ahead ahead = {p + 1 < end_panel ? panel + size : nullptr, size};
            multiply_panel<W>(x, stride, start, end, depth, panel, ahead,
                              [&](int64_t row, Floats left, Floats right) {
                                  use(row, p, left, right);
                              });
        }
    }
}

// Some columns of a vector pair, of which so many are there.
INLINE void write_columns(Floats left, Floats right, int columns, float *to) {
    if (columns == PANEL) {
        write(left, to);
        write(right, to + LANES);
    } else {
        const Floats both[2] = {left, right};
        memcpy(to, both, columns * sizeof(float));
    }
}

}  // namespace
