// Rows that are rounded to 8 bits for products with the weights of packed.h.
//
// A row has groups of 32 inputs. The groups of several rows are stored [groups, rows], so that the
// groups that are multiplied with the same weights are neighbours.

#pragma once

#include "matrix.h"
#include "packed.h"

#if defined(__AVX2__) && !defined(__AVX512F__)
#include <immintrin.h>
#endif
#if defined(__ARM_NEON)
#include <arm_neon.h>
#endif

// 32 inputs of a row: numbers times scale. The sums are those of all 32 numbers, of the first and of
// the last 16.
struct RowGroup {
    int8_t numbers[32];
    float scale;
    float scaled_sums[3];  // sums times scale
    int32_t sums[3];
    int32_t padding;       // fills a cache line
};

namespace {

static_assert(sizeof(RowGroup) == CACHE_LINE, "a group of a row is a cache line");

constexpr int64_t ROWS_PADDING = 16;  // groups after the last that may be read

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

// Rounds a row to 8 bits, and writes its groups with a distance of stride. The last group is padded
// with zeros. NaN and infinity give a result that is not finite.
INLINE void round_row(const float *row, int64_t size, int64_t stride, RowGroup *to) {
    for (int64_t start = 0; start < size; start += GROUP_INPUTS, to += stride) {
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
        int32_t rounded[GROUP_INPUTS], sums[3] = {};
        for (int i = 0; i < GROUP_INPUTS; i += LANES) {
            const Ints own = (Ints)fused_multiply_add(read(numbers + i), inverse, shift);
            const Ints integers = own - (Ints)shift;
            memcpy(rounded + i, &integers, sizeof integers);
        }
        for (int i = 0; i < GROUP_INPUTS; ++i) {
            to->numbers[i] = (int8_t)rounded[i];
            sums[1 + i / 16] += to->numbers[i];
        }
        sums[0] = sums[1] + sums[2];
        to->scale = largest / 127.0f;
        for (int i = 0; i < 3; ++i) {
            to->sums[i] = sums[i];
            to->scaled_sums[i] = to->scale * (float)sums[i];
        }
    }
}

// A weight in the format of packed.h, whose rows are rounded.
struct PackedWeight {
    typedef BFloat16 Stored;
    typedef RowGroup Input;
};

// The functions of matrix.h for rows. Their stride is the distance of the groups of a row.
INLINE int64_t row_stride(PackedWeight, int64_t rows, int64_t /* depth */) { return rows; }

INLINE int64_t rows_size(PackedWeight, int64_t rows, int64_t depth) {
    return rows * ((depth + GROUP_INPUTS - 1) / GROUP_INPUTS) + ROWS_PADDING;
}

INLINE RowGroup *row_of(PackedWeight, RowGroup *rows, int64_t /* stride */, int64_t row) {
    return rows + row;
}

INLINE void put_row(PackedWeight, const float *row, int64_t depth, int64_t stride, RowGroup *to) {
    round_row(row, depth, stride, to);
}

}  // namespace
