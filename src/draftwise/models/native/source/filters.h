// Which tokens top-k and top-p keep. Nothing is sorted but the few tokens at the edge: how much lies
// above a weight is a matter of one pass over the vocabulary, and halving the range of weights in
// question soon leaves a handful.

#pragma once

#include <algorithm>

#include "rows.h"

namespace {

constexpr int64_t FEW = 32;  // tokens that are rather sorted than halved once more

struct Above {
    double mass;
    int64_t count;
};

// Of the weights that are larger than a limit.
INLINE Above above(const float *weights, int64_t size, float limit) {
    double mass = 0;
    int64_t count = 0;
    by_pieces(size, [&](int64_t start, int64_t end) {
        Floats part = {};
        const Floats zero = {};
        Ints negative = {};
        for (int64_t i = start; i < end; i += LANES) {
            const Floats weight = read_within(weights, i, end, 0.0f);
            const Ints is_above = weight > limit;  // -1 where it is
            part += is_above ? weight : zero;
            negative += is_above;
        }
        mass += total(part);
        for (int lane = 0; lane < LANES; ++lane) count -= negative[lane];
    });
    return {mass, count};
}

INLINE uint32_t bits_of(float number) {
    uint32_t bits;
    memcpy(&bits, &number, sizeof bits);
    return bits;
}

INLINE float number_of(uint32_t bits) {
    float number;
    memcpy(&number, &bits, sizeof number);
    return number;
}

// The tokens around the last one that is kept.
struct Edge {
    float least;     // tokens of at most this weight are dropped
    Above certain;   // tokens that are kept, all of larger weight than those at the edge
    int64_t count;   // tokens at the edge
};

// Sorts the tokens at the edge into order: the likeliest first, those of equal weight by number.
// fits: whether the tokens above a weight are fewer than are kept. No weight is larger than 1, and
// those of at most least are surely dropped.
template <class Fits>
INLINE Edge edge_of(const float *weights, int64_t size, float least, const Fits &fits,
                    int32_t *order) {
    // Of positive numbers the larger one has the larger bits.
    uint32_t low = bits_of(least), high = bits_of(1.0f);
    Above certain = {0.0, 0};
    int64_t up_to_low = above(weights, size, least).count;
    while (up_to_low - certain.count > FEW && high - low > 1) {
        const uint32_t middle = low + (high - low) / 2;
        const Above reached = above(weights, size, number_of(middle));
        if (fits(reached)) {
            high = middle;
            certain = reached;
        } else {
            low = middle;
            up_to_low = reached.count;
        }
    }
    const float from = number_of(low), to = number_of(high);
    int64_t count = 0;
    for (int64_t start = 0; start < size; start += LANES) {
        const Floats some = read_within(weights, start, size, 0.0f);
        const Ints inside = (some > from) & (some <= to);
        if (largest((Floats)(inside & (Ints)(Floats{} + 1.0f))) == 0.0f) continue;
        for (int lane = 0; lane < LANES; ++lane)
            if (inside[lane]) order[count++] = (int32_t)(start + lane);
    }
    std::sort(order, order + count, [&](int32_t a, int32_t b) {
        return weights[a] != weights[b] ? weights[a] > weights[b] : a < b;
    });
    return {from, certain, count};
}

// Sets weights of at most a limit to 0.
INLINE void drop_up_to(float *weights, int64_t size, float limit) {
    const Floats zero = {};
    for (int64_t i = 0; i < size; i += LANES) {
        const Floats weight = read_within(weights, i, size, 0.0f);
        write_within(weight > limit ? weight : zero, weights, i, size);
    }
}

// The top_k largest of the weights; tokens tied with the last of them all stay.
void keep_top_k(float *weights, int64_t size, int64_t top_k, int32_t *order) {
    const auto fits = [&](const Above &reached) { return reached.count < top_k; };
    const Edge edge = edge_of(weights, size, 0.0f, fits, order);
    const int64_t wanted = top_k - edge.certain.count;
    if (wanted >= edge.count) return drop_up_to(weights, size, edge.least);
    drop_up_to(weights, size, number_of(bits_of(weights[order[wanted - 1]]) - 1));
}

// The largest weights, as few as have the share top_p of all.
void keep_top_p(float *weights, int64_t size, float top_p, int32_t *order) {
    const double all = sum_of(weights, size), needed = top_p * all;
    // So light are at most those that are not needed, even if nearly all tokens are.
    const float least = (float)(0.5 * (all - needed) / size);
    const auto fits = [&](const Above &reached) { return reached.mass < needed; };
    const Edge edge = edge_of(weights, size, least, fits, order);
    double mass = edge.certain.mass;
    int64_t kept = 0;
    while (kept < edge.count && (mass < needed || mass == 0)) mass += weights[order[kept++]];
    for (; kept < edge.count; ++kept) weights[order[kept]] = 0.0f;
    drop_up_to(weights, size, edge.least);
}

// What is kept of weights, the largest of which is 1, by top-k and then top-p; the rest is set to 0.
// order: memory for as many numbers.
void keep_top(float *weights, int64_t size, int64_t top_k, float top_p, int32_t *order) {
    if (top_k < size) keep_top_k(weights, size, top_k, order);
    if (top_p < 1.0f) keep_top_p(weights, size, top_p, order);
}

}  // namespace
