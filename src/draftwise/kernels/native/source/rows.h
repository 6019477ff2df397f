// Element-wise operations and reductions over arrays of any length, one vector at a time.

#pragma once

#include "vectors.h"

namespace {

constexpr int64_t SUM_BLOCK = 256;  // numbers summed in float32 before they are added to a double

// Reads the vector that starts at index i. Lanes beyond the end receive the padding value.
INLINE Floats read_partial(const float *from, int64_t i, int64_t size, float padding) {
    if (i + LANES <= size) return read(from + i);
    float padded[LANES];
    for (int lane = 0; lane < LANES; ++lane)
        padded[lane] = i + lane < size ? from[i + lane] : padding;
    return read(padded);
}

// Writes the lanes of a vector, starting at index i, that are within size.
INLINE void write_partial(Floats v, float *to, int64_t i, int64_t size) {
    if (i + LANES <= size)
        write(v, to + i);
    else
        memcpy(to + i, &v, (size - i) * sizeof *to);
}

INLINE void fill(float *to, int64_t size, float value) {
    const Floats v = Floats{} + value;
    for (int64_t i = 0; i < size; i += LANES) write_partial(v, to, i, size);
}

// Calls body(start, end) for each block of up to SUM_BLOCK numbers.
template <class Body>
INLINE void for_each_block(int64_t size, const Body &body) {
    for (int64_t start = 0; start < size; start += SUM_BLOCK)
        body(start, start + min_int(SUM_BLOCK, size - start));
}

// Sum of weights. Blocks are added in double, so that small weights are not lost.
INLINE double sum_of(const float *weights, int64_t size) {
    double sum = 0;
    for_each_block(size, [&](int64_t start, int64_t end) {
        Floats part = {};
        for (int64_t i = start; i < end; i += LANES) part += read_partial(weights, i, end, 0.0f);
        sum += horizontal_sum(part);
    });
    return sum;
}

// Maximum, ignoring NaN.
INLINE float maximum(const float *numbers, int64_t size) {
    Floats top = Floats{} + MINUS_INFINITY;
    for (int64_t i = 0; i < size; i += LANES)
        top = lanewise_max(read_partial(numbers, i, size, MINUS_INFINITY), top);
    return horizontal_max(top);
}

// The largest of size numbers.
struct Largest {
    int64_t index;  // the first index of it
    float number;
    bool any_nan;  // whether a number is NaN; the others are then meaningless
};

INLINE Largest largest_of(const float *numbers, int64_t size) {
    float top = MINUS_INFINITY;
    int64_t from = 0;
    Ints is_nan = {};
    for_each_block(size, [&](int64_t start, int64_t end) {
        Floats tops = Floats{} + MINUS_INFINITY;
        for (int64_t i = start; i < end; i += LANES) {
            const Floats v = read_partial(numbers, i, end, MINUS_INFINITY);
            tops = lanewise_max(v, tops);
            is_nan |= v != v;
        }
        const float block_top = horizontal_max(tops);
        if (block_top > top) {
            top = block_top;
            from = start;
        }
    });
    const int64_t end = min_int(from + SUM_BLOCK, size);
    while (from < end - 1 && numbers[from] != top) ++from;
    bool any_nan = false;
    for (int lane = 0; lane < LANES; ++lane) any_nan |= is_nan[lane] != 0;
    return {from, top, any_nan};
}

}  // namespace
