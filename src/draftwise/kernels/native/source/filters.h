// The top-k and top-p filters of a list of weights. One pass over a list computes the mass and the
// number of weights above a limit. Bisection narrows the range of weights that contains the boundary
// until a few remain. Each pass reads only the weights that the range still contains. Only the last
// few are sorted.

#pragma once

#include <algorithm>

#include "rows.h"

namespace {

constexpr int64_t MAX_SORTED = 32;  // largest number of tokens that are sorted

// Mass and number of the weights above a limit.
struct MassAbove {
    double mass;
    int64_t count;
};

// Computes the mass and the number of the weights that are larger than a limit.
INLINE MassAbove mass_above(const float *weights, int64_t size, float limit) {
    double mass = 0;
    int64_t count = 0;
    for_each_block(size, [&](int64_t start, int64_t end) {
        Floats part = {};
        const Floats zero = {};
        Ints negative = {};
        for (int64_t i = start; i < end; i += LANES) {
            const Floats weight = read_partial(weights, i, end, 0.0f);
            const Ints is_above = weight > limit;  // -1 for true
            part += is_above ? weight : zero;
            negative += is_above;
        }
        mass += horizontal_sum(part);
        for (int lane = 0; lane < LANES; ++lane) count -= negative[lane];
    });
    return {mass, count};
}

INLINE uint32_t bits_of(float number) {
    uint32_t bits;
    memcpy(&bits, &number, sizeof bits);
    return bits;
}

INLINE float float_of(uint32_t bits) {
    float number;
    memcpy(&number, &bits, sizeof number);
    return number;
}

// The boundary between kept and dropped tokens.
struct Boundary {
    float max_dropped;      // largest weight of tokens that are dropped for certain
    MassAbove surely_kept;  // tokens that are kept for certain, heavier than those at the boundary
    int64_t count;          // number of tokens at the boundary
};

// Copies the weights in a range that excludes its first and includes its last value. Returns their
// number. The copy may overwrite the list itself, and needs memory for LANES more numbers.
INLINE int64_t copy_range(const float *weights, int64_t size, float from, float to, float *copy) {
    int64_t count = 0;
    for (int64_t start = 0; start < size; start += LANES) {
        const Floats chunk = read_partial(weights, start, size, 0.0f);
        const Ints inside = (chunk > from) & (chunk <= to);
#if defined(__AVX512F__)
        const __mmask16 chosen = _mm512_test_epi32_mask((__m512i)inside, (__m512i)inside);
        const __m512 packed = _mm512_maskz_compress_ps(chosen, (__m512)chunk);
        memcpy(copy + count, &packed, sizeof packed);
        count += __builtin_popcount(chosen);
#else
        if (!any_of(inside)) continue;
        for (int lane = 0; lane < LANES; ++lane)
            if (inside[lane]) copy[count++] = chunk[lane];
#endif
    }
    return count;
}

// Finds the tokens at the boundary and writes them to order, heaviest first, ties by token id. A
// filter keeps the heaviest tokens until needs_more returns false for the mass and number of those
// above a weight. All weights are at most 1. Weights of at most max_dropped are dropped. order has
// memory for LANES more numbers than there are weights.
template <class NeedsMore>
INLINE Boundary find_boundary(const float *weights, int64_t size, float max_dropped,
                              const NeedsMore &needs_more, int32_t *order) {
    // The bit patterns of positive floats are ordered like their values.
    uint32_t low = bits_of(max_dropped), high = bits_of(1.0f);
    MassAbove surely_kept = {0.0, 0};
    float *within = (float *)order;  // the weights above low and up to high
    int64_t num_within = copy_range(weights, size, max_dropped, 1.0f, within);
    while (num_within > MAX_SORTED && high - low > 1) {
        const uint32_t middle = low + (high - low) / 2;
        const MassAbove heavier = mass_above(within, num_within, float_of(middle));
        const MassAbove above_limit = {surely_kept.mass + heavier.mass,
                                       surely_kept.count + heavier.count};
        if (needs_more(above_limit)) {
            high = middle;
            surely_kept = above_limit;
        } else {
            low = middle;
        }
        num_within = copy_range(within, num_within, float_of(low), float_of(high), within);
    }
    const float from = float_of(low), to = float_of(high);
    int64_t count = 0;
    for (int64_t start = 0; start < size; start += LANES) {
        const Floats chunk = read_partial(weights, start, size, 0.0f);
        const Ints inside = (chunk > from) & (chunk <= to);
        if (!any_of(inside)) continue;
        for (int lane = 0; lane < LANES; ++lane)
            if (inside[lane]) order[count++] = (int32_t)(start + lane);
    }
    std::sort(order, order + count, [&](int32_t a, int32_t b) {
        return weights[a] != weights[b] ? weights[a] > weights[b] : a < b;
    });
    return {from, surely_kept, count};
}

// Sets all weights of at most a limit to 0.
INLINE void zero_up_to(float *weights, int64_t size, float limit) {
    const Floats zero = {};
    for (int64_t i = 0; i < size; i += LANES) {
        const Floats weight = read_partial(weights, i, size, 0.0f);
        write_partial(weight > limit ? weight : zero, weights, i, size);
    }
}

// Keeps the top_k largest weights and all weights tied with the last of them. Sets the others to 0.
void keep_top_k(float *weights, int64_t size, int64_t top_k, int32_t *order) {
    const auto needs_more = [&](const MassAbove &above_limit) { return above_limit.count < top_k; };
    const Boundary boundary = find_boundary(weights, size, 0.0f, needs_more, order);
    const int64_t wanted = top_k - boundary.surely_kept.count;
    if (wanted >= boundary.count) return zero_up_to(weights, size, boundary.max_dropped);
    zero_up_to(weights, size, float_of(bits_of(weights[order[wanted - 1]]) - 1));
}

// The mass that top-p keeps at least, and a weight up to which all tokens are dropped: even all
// tokens of the vocabulary together, if each had at most this weight, would have only half of the
// mass that is not needed.
struct TopP {
    double needed;
    float max_dropped;

    // all is the mass of all tokens of the vocabulary.
    TopP(float top_p, double all, int64_t vocab)
        : needed(top_p * all), max_dropped((float)(0.5 * (all - needed) / (double)vocab)) {}
};

// Keeps the smallest number of largest weights whose sum is at least the needed mass. Sets the
// others to 0.
void keep_top_p(float *weights, int64_t size, const TopP &top_p, int32_t *order) {
    const auto needs_more = [&](const MassAbove &above) { return above.mass < top_p.needed; };
    const Boundary boundary = find_boundary(weights, size, top_p.max_dropped, needs_more, order);
    double mass = boundary.surely_kept.mass;
    int64_t kept = 0;
    while (kept < boundary.count && (mass < top_p.needed || mass == 0))
        mass += weights[order[kept++]];
    for (; kept < boundary.count; ++kept) weights[order[kept]] = 0.0f;
    zero_up_to(weights, size, boundary.max_dropped);
}

}  // namespace
