// Rows of numbers of any length, a vector at a time.

#pragma once

#include "vectors.h"

namespace {

constexpr int64_t SUMMED = 256;  // weights that are summed in float32 before they meet a double

// The vector that starts at i; behind the end there is something else instead.
INLINE Floats read_within(const float *from, int64_t i, int64_t size, float instead) {
    if (i + LANES <= size) return read(from + i);
    float some[LANES];
    for (int lane = 0; lane < LANES; ++lane) some[lane] = i + lane < size ? from[i + lane] : instead;
    return read(some);
}

INLINE void write_within(Floats v, float *to, int64_t i, int64_t size) {
    if (i + LANES <= size)
        write(v, to + i);
    else
        memcpy(to + i, &v, (size - i) * sizeof *to);
}

INLINE void fill(float *to, int64_t size, float value) {
    const Floats v = Floats{} + value;
    for (int64_t i = 0; i < size; i += LANES) write_within(v, to, i, size);
}

// use(start, end) for pieces of SUMMED numbers and the rest.
template <class Use>
INLINE void by_pieces(int64_t size, const Use &use) {
    for (int64_t start = 0; start < size; start += SUMMED)
        use(start, start + least(SUMMED, size - start));
}

// Of weights; in double, so that the unlikely count too.
INLINE double sum_of(const float *weights, int64_t size) {
    double sum = 0;
    by_pieces(size, [&](int64_t start, int64_t end) {
        Floats part = {};
        for (int64_t i = start; i < end; i += LANES) part += read_within(weights, i, end, 0.0f);
        sum += total(part);
    });
    return sum;
}

INLINE float maximum(const float *numbers, int64_t size) {
    Floats top = Floats{} + MINUS_INFINITY;
    for (int64_t i = 0; i < size; i += LANES)
        top = larger(read_within(numbers, i, size, MINUS_INFINITY), top);
    return largest(top);
}

INLINE int64_t index_of(float number, const float *numbers, int64_t size) {
    for (int64_t i = 0; i < size; ++i)
        if (numbers[i] == number) return i;
    return 0;
}

}  // namespace
