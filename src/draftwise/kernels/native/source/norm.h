// Normalisation of a row.

#pragma once

#include "matrix.h"

namespace {

// Root mean square normalisation (Zhang and Sennrich 2019), equation 4. Pads the result with zeros.
template <class Output>
INLINE void normalise(const float *x, const float *weight, int64_t size, int64_t padded,
                      double epsilon, Output *out) {
    Floats squares = {};
    int64_t whole = size / LANES * LANES;
    for (int64_t i = 0; i < whole; i += LANES) squares += read(x + i) * read(x + i);
    float sum = horizontal_sum(squares);
    for (int64_t i = whole; i < size; ++i) sum += x[i] * x[i];
    const float factor = 1.0f / __builtin_sqrtf(sum / (float)size + (float)epsilon);
    for (int64_t i = 0; i < whole; i += LANES)
        write(read(x + i) * factor * read(weight + i), out + i);
    for (int64_t i = whole; i < padded; ++i) {
        const float value = i < size ? x[i] * factor * weight[i] : 0.0f;
        convert(&value, 1, out + i);
    }
}

}  // namespace
