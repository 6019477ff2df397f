// Products of a few rows with a packed weight.
//
// The weight is packed once into panels. A panel contains two vectors of columns, stored in the
// order of the steps along the depth, so that the microkernel reads it sequentially. A register
// block contains as many rows as there are registers for their sums. A panel is read from memory
// once for all register blocks. While rows are multiplied with a panel, the next panel is
// prefetched.

#pragma once

#include "vectors.h"

namespace {

// Converts size numbers between float32 and BFloat16.
template <class From, class To>
INLINE void convert(const From *from, int64_t size, To *to) {
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES) write(read(from + i), to + i);
    if (i < size) {
        From padded[LANES] = {};
        To converted[LANES];
        memcpy(padded, from + i, (size - i) * sizeof *from);
        write(read(padded), converted);
        memcpy(to + i, converted, (size - i) * sizeof *to);
    }
}

constexpr int PANEL_WIDTH = 2 * LANES;  // columns of a panel
constexpr int MAX_BLOCK_ROWS = LANES == 16 ? 12 : 6;  // rows of a register block
// Largest number of rows that is faster as one block than as two.
constexpr int MAX_SINGLE_BLOCK_ROWS = LANES == 16 ? 9 : 6;
constexpr int CACHED_ROWS = 16 * MAX_BLOCK_ROWS;  // rows that stay in the cache during a product

// The arithmetic of the microkernel for a weight of type T. One step multiplies one number of each
// column in float32.
template <class T>
struct WideWeight {
    typedef T Stored;      // type of the packed weight
    typedef float Input;   // type of the rows
    typedef const float *Factor;  // numbers of a row in one step, broadcast to all lanes
    typedef Floats Columns;
    static constexpr int DEPTH = 1;                        // numbers of a row in one step
    static constexpr int BYTES = PANEL_WIDTH * sizeof(T);  // bytes of a panel in one step

    INLINE void load(const char *from, Columns *to) {
        if constexpr (sizeof(T) == sizeof(float))
            for (int i = 0; i < 2; ++i) to[i] = read((const float *)from + i * LANES);
        else
            ::load((const T *)from, to);  // columns c and c + LANES share a word
    }

    INLINE Floats multiply_add(Floats sum, Columns column, Factor factor) {
        return sum + column * *factor;
    }

    INLINE Factor factor(const float *from) { return from; }
};

#if defined(__AVX512BF16__)
// The same for BFloat16. One step multiplies two numbers of each column, which share a word.
struct PairedWeight {
    typedef BFloat16 Stored;
    typedef Words Columns;
    static constexpr int DEPTH = 2;
    static constexpr int BYTES = PANEL_WIDTH * sizeof(uint32_t);

    INLINE void load(const char *from, Columns *to) {
        for (int i = 0; i < 2; ++i) memcpy(to + i, from + i * (int64_t)sizeof *to, sizeof *to);
    }

#if defined(DRAFTWISE_FLOAT32_PRODUCTS)
    // For processors on which two products in float32 are faster than a dot-product instruction.
    typedef float Input;
    typedef const float *Factor;

    INLINE Floats multiply_add(Floats sum, Columns column, Factor factor) {
        sum += (Floats)(column << 16) * factor[0];
        return sum + (Floats)(column & 0xffff0000u) * factor[1];
    }

    INLINE Factor factor(const float *from) { return from; }
#else
    // The dot-product instructions of AVX512-BF16.
    typedef BFloat16 Input;
    typedef uint32_t Factor;

    INLINE Floats multiply_add(Floats sum, Columns column, Factor factor) {
        return (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)column,
                                        (__m512bh)_mm512_set1_epi32((int)factor));
    }

    INLINE Factor factor(const BFloat16 *from) {
        Factor both;
        memcpy(&both, from, sizeof both);
        return both;
    }
#endif
};
#endif

// Number of elements of a row with depth numbers, as it is multiplied with a weight.
template <class W>
INLINE int64_t row_size(W, int64_t depth) { return round_up(depth, W::DEPTH); }

// Number of elements of all rows, and the distance of two rows.
template <class W>
INLINE int64_t rows_size(W, int64_t rows, int64_t depth) { return rows * row_size(W(), depth); }

template <class W>
INLINE int64_t row_stride(W, int64_t /* rows */, int64_t depth) { return row_size(W(), depth); }

template <class T, class W>
INLINE T *row_of(W, T *rows, int64_t stride, int64_t row) { return rows + row * stride; }

// Writes a row.
template <class W>
INLINE void put_row(W, const float *row, int64_t depth, int64_t /* stride */,
                    typename W::Input *to) {
    convert(row, depth, to);
    memset((void *)(to + depth), 0, (row_size(W(), depth) - depth) * sizeof *to);
}

// Number of steps of a weight with depth inputs.
template <class W>
INLINE int64_t steps_for(int64_t depth) { return (depth + W::DEPTH - 1) / W::DEPTH; }

INLINE int64_t num_panels(int64_t columns) { return (columns + PANEL_WIDTH - 1) / PANEL_WIDTH; }

// Multiplies COUNT rows with a panel. Each step prefetches a number of cache lines of the memory at
// next and advances by next_bytes. The order of each sum does not depend on COUNT.
template <class W, int COUNT, int PREFETCHED_LINES>
INLINE void multiply_steps(const typename W::Input *x, int64_t stride, const char *panel,
                           int64_t num_steps, const char *next, int64_t next_bytes, Floats *sums) {
    // A local array whose elements are written one by one, so that the compiler keeps it in
    // registers.
    Floats part[COUNT][2];
#pragma GCC unroll 16
    for (int i = 0; i < COUNT; ++i) part[i][0] = part[i][1] = Floats{};
    for (int64_t step = 0; step < num_steps; ++step) {
        for (int line = 0; line < PREFETCHED_LINES; ++line)
            __builtin_prefetch(next + step * next_bytes + line * CACHE_LINE, 0, 2);
        typename W::Columns columns[2];
        W::load(panel + step * W::BYTES, columns);
#pragma GCC unroll 16
        for (int i = 0; i < COUNT; ++i) {
            const typename W::Factor factor = W::factor(x + i * stride + step * W::DEPTH);
            part[i][0] = W::multiply_add(part[i][0], columns[0], factor);
            part[i][1] = W::multiply_add(part[i][1], columns[1], factor);
        }
    }
#pragma GCC unroll 16
    for (int i = 0; i < COUNT; ++i) {
        sums[2 * i] = part[i][0];
        sums[2 * i + 1] = part[i][1];
    }
}

// Multiplies a register block of COUNT rows with a panel and passes the results to the epilogue.
template <class W, int COUNT, class Epilogue>
void multiply_block(const typename W::Input *x, int64_t stride, const char *panel, int64_t depth,
                    const char *next, int64_t next_bytes, int64_t row, const Epilogue &epilogue) {
    Floats sums[2 * COUNT];
    const int64_t num_steps = steps_for<W>(depth);
    if (!next)
        multiply_steps<W, COUNT, 0>(x, stride, panel, num_steps, next, 0, sums);
    else if (next_bytes <= CACHE_LINE)
        multiply_steps<W, COUNT, 1>(x, stride, panel, num_steps, next, next_bytes, sums);
    else
        multiply_steps<W, COUNT, W::BYTES / CACHE_LINE>(x, stride, panel, num_steps, next,
                                                        next_bytes, sums);
    for (int i = 0; i < COUNT; ++i) epilogue(row + i, sums[2 * i], sums[2 * i + 1]);
}

// Calls multiply_block for a number of rows that is known at run time, at most COUNT.
template <class W, int COUNT, class Epilogue>
void dispatch_block(int count, const typename W::Input *x, int64_t stride, const char *panel,
                    int64_t depth, const char *next, int64_t next_bytes, int64_t row,
                    const Epilogue &epilogue) {
    if constexpr (COUNT > 1)
        if (count < COUNT)
            return dispatch_block<W, COUNT - 1>(count, x, stride, panel, depth, next,
                                                next_bytes, row, epilogue);
    multiply_block<W, COUNT>(x, stride, panel, depth, next, next_bytes, row, epilogue);
}

// Memory to prefetch during a product.
struct PrefetchRange {
    const char *from;  // null for no prefetching
    int64_t bytes;
};

// Multiplies the rows first to end of x [rows, depth] with a panel. For each row, calls
// epilogue(row, left, right) with the two vectors of results.
template <class W, class Epilogue>
void multiply_panel(const typename W::Input *x, int64_t stride, int64_t first, int64_t end,
                    int64_t depth, const char *panel, PrefetchRange prefetch,
                    const Epilogue &epilogue) {
    const int64_t rows = end - first, needed = (rows + MAX_BLOCK_ROWS - 1) / MAX_BLOCK_ROWS;
    const int64_t blocks = needed == 1 && rows > MAX_SINGLE_BLOCK_ROWS ? 2 : needed;
    for (int64_t b = 0; b < blocks; ++b) {
        const int64_t row = first + rows * b / blocks, until = first + rows * (b + 1) / blocks;
        const char *next = prefetch.from ? prefetch.from + prefetch.bytes * b / blocks : nullptr;
        dispatch_block<W, MAX_BLOCK_ROWS>((int)(until - row), x + row * stride, stride, panel,
                                          depth, next,
                                          prefetch.bytes / steps_for<W>(depth) / blocks, row,
                                          epilogue);
    }
}

// Multiplies x [rows, depth] with the panels first_panel to end_panel of a weight. Calls
// epilogue(row, panel, left, right) with the results. Only the weights of narrow.h need the scratch
// memory expanded.
template <class W, class Epilogue>
void multiply(W, const typename W::Input *x, int64_t stride, int64_t rows, int64_t depth,
              const void *weight, int64_t first_panel, int64_t end_panel, char * /* expanded */,
              const Epilogue &epilogue) {
    const int64_t size = steps_for<W>(depth) * W::BYTES;
    for (int64_t start = 0; start < rows; start += CACHED_ROWS) {
        const int64_t end = min_int(start + CACHED_ROWS, rows);
        for (int64_t p = first_panel; p < end_panel; ++p) {
            const char *panel = (const char *)weight + p * size;
            const PrefetchRange prefetch = {p + 1 < end_panel ? panel + size : nullptr, size};
            multiply_panel<W>(x, stride, start, end, depth, panel, prefetch,
                              [&](int64_t row, Floats left, Floats right) {
                                  epilogue(row, p, left, right);
                              });
        }
    }
}

// Writes the first columns of a pair of vectors.
INLINE void write_columns(Floats left, Floats right, int columns, float *to) {
    if (columns == PANEL_WIDTH) {
        write(left, to);
        write(right, to + LANES);
    } else {
        const Floats both[2] = {left, right};
        memcpy(to, both, columns * sizeof(float));
    }
}

}  // namespace
