// From logits to distributions and tokens, a row at a time: what draftwise.core.sampling and
// draftwise.core.signals compute, in as few passes over the vocabulary as it takes.

#pragma once

#include "filters.h"

// Sampling parameters, one entry per request; what nobody uses is null.
struct Sampling {
    const float *temperature;  // 0 for greedy
    const int64_t *top_k;
    const float *top_p, *min_p;
};

namespace {

constexpr float LOG2_E = 1.4426950408889634f;
constexpr float LN_2 = 0.6931471805599453f;

// Softmax with temperature (1 where it is 0) and filters. Returns the entropy in nats; NaN, with
// nothing but NaN in p, where logits are not numbers. order: memory for as many numbers.
float soften(const float *logits, int64_t size, const Sampling &sampling, int64_t request, float *p,
             int32_t *order) {
    const float temperature = sampling.temperature[request];
    const float scale = LOG2_E / (temperature == 0.0f ? 1.0f : temperature);
    const float top = maximum(logits, size);
    const auto exponent = [&](int64_t i) {
        return (read_within(logits, i, size, MINUS_INFINITY) - top) * scale;
    };
    double sum = 0, moment = 0;
    by_pieces(size, [&](int64_t start, int64_t end) {
        Floats part = {}, moments = {};
        for (int64_t i = start; i < end; i += LANES) {
            const Floats y = exponent(i), weight = power_of_two(y), zero = {};
            part += weight;
            moments += weight > 0.0f ? weight * y : zero;
            write_within(weight, p, i, size);
        }
        sum += total(part);
        moment += total(moments);
    });
    if (!(sum > 0)) {
        fill(p, size, __builtin_nanf(""));
        return __builtin_nanf("");
    }
    const int64_t top_k = sampling.top_k ? sampling.top_k[request] : size;
    const float top_p = sampling.top_p ? sampling.top_p[request] : 1.0f;
    const float min_p = sampling.min_p ? sampling.min_p[request] : 0.0f;
    if (top_k < size || top_p < 1.0f || min_p > 0.0f) {
        if (top_k < size || top_p < 1.0f) keep_top(p, size, top_k, top_p, order);
        sum = moment = 0;
        by_pieces(size, [&](int64_t start, int64_t end) {
            Floats part = {}, moments = {};
            for (int64_t i = start; i < end; i += LANES) {
                const Floats zero = {};
                Floats weight = read_within(p, i, size, 0.0f);
                weight = weight < min_p ? zero : weight;
                part += weight;
                moments += weight > 0.0f ? weight * exponent(i) : zero;
                write_within(weight, p, i, size);
            }
            sum += total(part);
            moment += total(moments);
        });
    }
    const float factor = (float)(1.0 / sum);
    for (int64_t i = 0; i < size; i += LANES)
        write_within(read_within(p, i, size, 0.0f) * factor, p, i, size);
    const double entropy = LN_2 * (__builtin_log2(sum) - moment / sum);
    return entropy > 0 ? (float)entropy : 0.0f;
}

// Draw an index from weights by inverting the cumulative distribution; never one of weight 0.
int64_t drawn(const float *weights, int64_t size, double uniform) {
    const double threshold = uniform * sum_of(weights, size);
    double before = 0;
    int64_t last = 0;
    for (int64_t start = 0; start < size; start += SUMMED) {
        const int64_t count = least(SUMMED, size - start);
        const double piece = sum_of(weights + start, count);
        if (before + piece > threshold) {
            double sum = before;
            for (int64_t i = start; i < start + count; ++i) {
                if (weights[i] > 0) last = i;
                sum += weights[i];
                if (sum > threshold && weights[i] > 0) return i;
            }
        }
        before += piece;
    }
    // Rounding at the edges: the last that can be drawn, or the likeliest.
    return weights[last] > 0 ? last : index_of(maximum(weights, size), weights, size);
}

// The one-hot distribution of the first of the largest.
INLINE int64_t one_hot(const float *scores, int64_t size, float *p) {
    const int64_t token = index_of(maximum(scores, size), scores, size);
    if (p) {
        fill(p, size, 0.0f);
        p[token] = 1.0f;
    }
    return token;
}

// The same, or NaN throughout where a score is not a number.
INLINE void one_hot_or_nan(const float *scores, int64_t size, float *p) {
    const double sum = sum_of(scores, size);
    const int64_t token = one_hot(scores, size, p);
    if (sum != sum || !(scores[token] < __builtin_inff())) fill(p, size, __builtin_nanf(""));
}

// S = sum of min(q, c).
INLINE float overlap(const float *q, const float *c, int64_t size) {
    double sum = 0;
    by_pieces(size, [&](int64_t start, int64_t end) {
        Floats part = {};
        for (int64_t i = start; i < end; i += LANES) {
            const Floats a = read_within(q, i, end, 0.0f), b = read_within(c, i, end, 0.0f);
            part += a < b ? a : b;
        }
        sum += total(part);
    });
    return (float)sum;
}

}  // namespace

// Distributions that tokens are drawn from.
struct DistributionCall {
    const float *logits;       // [rows, vocab]
    const int64_t *requests;   // [rows] index into the sampling parameters
    float *p;                  // [rows, vocab]
    int32_t *order;            // [threads, vocab], or null if nobody uses top-k or top-p
    Sampling sampling;
    int64_t num_rows, vocab, softens_greedy;  // greedy rows: draft_probs instead of one-hot
};

// What a companion thinks of drafted tokens.
struct ScoreCall {
    const float *logits;       // [rows, own_vocab]
    const int64_t *places;     // [rows, 2] request and position
    const int64_t *tokens;     // [requests, width]
    const float *q;            // [requests, q_width, vocab]
    float *c;                  // [requests, width, vocab]
    float *overlap, *agreement;  // [requests, width]
    int32_t *order;
    Sampling sampling;
    int64_t num_rows, own_vocab, vocab, width, q_stride;  // q_stride: numbers of a request
};

namespace {

void distribution(const DistributionCall &call, int64_t row, int64_t thread) {
    const int64_t request = call.requests[row];
    const float *logits = call.logits + row * call.vocab;
    float *p = call.p + row * call.vocab;
    int32_t *order = call.order ? call.order + thread * call.vocab : nullptr;
    if (call.softens_greedy || call.sampling.temperature[request] != 0.0f)
        soften(logits, call.vocab, call.sampling, request, p, order);
    else
        one_hot_or_nan(logits, call.vocab, p);
}

void score_row(const ScoreCall &call, int64_t row, int64_t thread) {
    const int64_t request = call.places[2 * row], position = call.places[2 * row + 1];
    const int64_t place = request * call.width + position, vocab = call.vocab;
    int32_t *order = call.order ? call.order + thread * vocab : nullptr;
    float *c = call.c + place * vocab;
    const int64_t own = least(call.own_vocab, vocab);
    const float entropy = soften(call.logits + row * call.own_vocab, own, call.sampling, request, c,
                                 order);
    fill(c + own, vocab - own, 0.0f);
    if (entropy != entropy) fill(c, vocab, 0.0f);
    const float *q = call.q + request * call.q_stride + position * vocab;
    const int64_t token = call.tokens[place];
    call.overlap[place] = overlap(q, c, vocab);
    call.agreement[place] = q[token] > 0 ? std::min(1.0f, c[token] / q[token]) : 0.0f;
}

}  // namespace
