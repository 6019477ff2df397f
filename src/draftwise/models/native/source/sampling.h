// Distributions, sampled tokens and signals from logits, one row at a time. These functions compute
// the same as draftwise.core.sampling and draftwise.core.signals. They need few passes over the
// vocabulary.

#pragma once

#include "filters.h"

// Sampling parameters, [requests] each. A parameter that no request uses is null.
struct Sampling {
    const float *temperature;  // 0 for greedy requests
    const int64_t *top_k;
    const float *top_p, *min_p;
};

namespace {

constexpr float LN_2 = 0.6931471805599453f;

// Computes p, the softmax of logits with the request's temperature and filters. A temperature of 0
// counts as 1. Returns the entropy in nats. If logits are NaN, returns NaN and fills p with NaN.
// order is scratch memory for size numbers.
float filtered_softmax(const float *logits, int64_t size, const Sampling &sampling, int64_t request,
                       float *p, int32_t *order) {
    const float temperature = sampling.temperature[request];
    const float scale = (float)LOG2_E / (temperature == 0.0f ? 1.0f : temperature);
    const float top = maximum(logits, size);
    const auto exponent = [&](int64_t i) {
        return (read_partial(logits, i, size, MINUS_INFINITY) - top) * scale;
    };
    double sum = 0, moment = 0;
    for_each_block(size, [&](int64_t start, int64_t end) {
        Floats part = {}, moments = {};
        for (int64_t i = start; i < end; i += LANES) {
            const Floats y = exponent(i), weight = power_of_two(y), zero = {};
            part += weight;
            moments += weight > 0.0f ? weight * y : zero;
            write_partial(weight, p, i, size);
        }
        sum += horizontal_sum(part);
        moment += horizontal_sum(moments);
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
        for_each_block(size, [&](int64_t start, int64_t end) {
            Floats part = {}, moments = {};
            for (int64_t i = start; i < end; i += LANES) {
                const Floats zero = {};
                Floats weight = read_partial(p, i, size, 0.0f);
                weight = weight < min_p ? zero : weight;
                part += weight;
                moments += weight > 0.0f ? weight * exponent(i) : zero;
                write_partial(weight, p, i, size);
            }
            sum += horizontal_sum(part);
            moment += horizontal_sum(moments);
        });
    }
    const float factor = (float)(1.0 / sum);
    for (int64_t i = 0; i < size; i += LANES)
        write_partial(read_partial(p, i, size, 0.0f) * factor, p, i, size);
    const double entropy = LN_2 * (__builtin_log2(sum) - moment / sum);
    return entropy > 0 ? (float)entropy : 0.0f;
}

// Samples an index from weights by inverting the cumulative distribution. Never returns an index of
// weight 0.
int64_t sample_index(const float *weights, int64_t size, double uniform) {
    const double threshold = uniform * sum_of(weights, size);
    double before = 0;
    int64_t last = 0;
    for (int64_t start = 0; start < size; start += SUM_BLOCK) {
        const int64_t count = min_int(SUM_BLOCK, size - start);
        const double block_sum = sum_of(weights + start, count);
        if (before + block_sum > threshold) {
            double sum = before;
            for (int64_t i = start; i < start + count; ++i) {
                if (weights[i] > 0) last = i;
                sum += weights[i];
                if (sum > threshold && weights[i] > 0) return i;
            }
        }
        before += block_sum;
    }
    // Rounding errors may leave no index: use the last one of positive weight, or the heaviest.
    return weights[last] > 0 ? last : index_of(maximum(weights, size), weights, size);
}

// Returns the first index of the largest score. Writes its one-hot distribution unless p is null.
INLINE int64_t one_hot(const float *scores, int64_t size, float *p) {
    const int64_t token = index_of(maximum(scores, size), scores, size);
    if (p) {
        fill(p, size, 0.0f);
        p[token] = 1.0f;
    }
    return token;
}

// Writes the one-hot distribution of the largest score, or only NaN if a score is NaN or infinite.
INLINE void one_hot_or_nan(const float *scores, int64_t size, float *p) {
    const double sum = sum_of(scores, size);
    const int64_t token = one_hot(scores, size, p);
    if (sum != sum || !(scores[token] < __builtin_inff())) fill(p, size, __builtin_nanf(""));
}

// Returns the overlap S, the sum of min(q, c).
INLINE float overlap(const float *q, const float *c, int64_t size) {
    double sum = 0;
    for_each_block(size, [&](int64_t start, int64_t end) {
        Floats part = {};
        for (int64_t i = start; i < end; i += LANES) {
            const Floats a = read_partial(q, i, end, 0.0f), b = read_partial(c, i, end, 0.0f);
            part += a < b ? a : b;
        }
        sum += horizontal_sum(part);
    });
    return (float)sum;
}

}  // namespace

// Arguments of draftwise_distributions, which computes distributions from logits.
struct DistributionCall {
    const float *logits;      // [rows, vocab]
    const int64_t *requests;  // [rows] index into the sampling parameters
    float *p;                 // [rows, vocab] output
    int32_t *order;           // [threads, vocab] scratch memory; null without top-k and top-p
    Sampling sampling;
    int64_t num_rows, vocab;
    int64_t softens_greedy;  // whether greedy rows are computed at temperature 1, not as one-hot
};

// Arguments of draftwise_score, which computes a companion's scores of drafted tokens.
struct ScoreCall {
    const float *logits;         // [rows, own_vocab] logits of the companion
    const int64_t *places;       // [rows, 2] request and position
    const int64_t *tokens;       // [requests, width] drafted tokens
    const float *q;              // [requests, q_width, vocab] distributions of the draft
    float *c;                    // [requests, width, vocab] output: distributions of the companion
    float *overlap, *agreement;  // [requests, width] output: S and A
    int32_t *order;              // [threads, vocab] scratch memory; null without top-k and top-p
    Sampling sampling;
    int64_t num_rows, own_vocab, vocab, width;
    int64_t q_stride;  // elements of q per request
};

namespace {

void distribution(const DistributionCall &call, int64_t row, int64_t thread) {
    const int64_t request = call.requests[row];
    const float *logits = call.logits + row * call.vocab;
    float *p = call.p + row * call.vocab;
    int32_t *order = call.order ? call.order + thread * call.vocab : nullptr;
    if (call.softens_greedy || call.sampling.temperature[request] != 0.0f)
        filtered_softmax(logits, call.vocab, call.sampling, request, p, order);
    else
        one_hot_or_nan(logits, call.vocab, p);
}

void score_row(const ScoreCall &call, int64_t row, int64_t thread) {
    const int64_t request = call.places[2 * row], position = call.places[2 * row + 1];
    const int64_t place = request * call.width + position, vocab = call.vocab;
    int32_t *order = call.order ? call.order + thread * vocab : nullptr;
    float *c = call.c + place * vocab;
    const int64_t shared_vocab = min_int(call.own_vocab, vocab);
    const float entropy = filtered_softmax(call.logits + row * call.own_vocab, shared_vocab,
                                           call.sampling, request, c, order);
    fill(c + shared_vocab, vocab - shared_vocab, 0.0f);
    if (entropy != entropy) fill(c, vocab, 0.0f);
    const float *q = call.q + request * call.q_stride + position * vocab;
    const int64_t token = call.tokens[place];
    call.overlap[place] = overlap(q, c, vocab);
    call.agreement[place] = q[token] > 0 ? std::min(1.0f, c[token] / q[token]) : 0.0f;
}

}  // namespace
