// Distributions, sampled tokens and signals from logits, one row at a time. These functions compute
// the same as draftwise.core.sampling and draftwise.core.signals.
//
// A row of a large vocabulary fills a second-level cache. Writing a distribution and reading it again
// takes longer than computing it again. A distribution is therefore described by a few numbers
// (Softmax), and its probabilities are computed from the logits where they are needed.

#pragma once

#include "filters.h"

// Sampling parameters, [requests] each. A parameter that no request uses is null.
struct Sampling {
    const float *temperature;  // 0 for greedy requests
    const int64_t *top_k;
    const float *top_p, *min_p;
};

// The distribution of a row of logits. A token has the weight 2^((logit - top) * scale), at most 1,
// or 0 if a filter drops it. Its probability is weight * factor.
struct Softmax {
    const float *logits;  // [size]
    int64_t size;
    float top;           // the largest logit
    float scale;         // log2(e) / temperature
    float factor;        // probability of a token of weight 1; NaN if the logits are NaN
    float least;         // smallest weight that the filters keep; 0 without filters
    float lowest;        // exponents up to this one have weights below the least
    int32_t last_least;  // last token of the smallest weight that is kept
    int64_t token;       // the token of a one-hot distribution; -1 for others
};

namespace {

// Whether the logits of a row are NaN.
INLINE bool is_nan(const Softmax &row) { return row.factor != row.factor; }

constexpr float LN_2 = 0.6931471805599453f;
// The filters look only at tokens whose log2 of the weight is larger: than the first of these limits,
// which usually suffices, then than the second, and so on.
constexpr float CANDIDATE_LIMITS[] = {-14.0f, -17.0f, -20.0f, -24.0f, MINUS_INFINITY};

INLINE int64_t num_blocks(int64_t size) { return (size + SUM_BLOCK - 1) / SUM_BLOCK; }

// Scratch memory of one thread for rows of up to size numbers.
struct Scratch {
    double *sums;        // [blocks] sum of each block of a row
    float *weights;      // [size + LANES] weights of the filters' candidates
    int32_t *ids;        // [size + LANES] tokens of the candidates
    int32_t *order;      // [size + LANES] memory of the filters

    // base is the memory of all threads.
    Scratch(char *base, int64_t size, const Sampling &sampling, int64_t thread) {
        char *memory = base + thread * bytes(size, has_filters(sampling));
        sums = (double *)memory;
        weights = (float *)(memory + bytes(size, false));
        ids = (int32_t *)(weights + size + LANES);
        order = ids + size + LANES;
    }

    static bool has_filters(const Sampling &sampling) {
        return sampling.top_k || sampling.top_p || sampling.min_p;
    }

    // Bytes of one thread's memory. Without filters, only sums is used.
    static int64_t bytes(int64_t size, bool has_filters) {
        const int64_t sums = round_up(num_blocks(size) * (int64_t)sizeof(double), CACHE_LINE);
        const int64_t lists = 3 * (size + LANES) * (int64_t)sizeof(float);
        return sums + (has_filters ? round_up(lists, CACHE_LINE) : 0);
    }
};

// The filters of a request; values that keep all tokens where it has none.
struct Filters {
    int64_t top_k;
    float top_p, min_p;

    Filters(const Sampling &sampling, int64_t request, int64_t size)
        : top_k(sampling.top_k ? sampling.top_k[request] : size),
          top_p(sampling.top_p ? sampling.top_p[request] : 1.0f),
          min_p(sampling.min_p ? sampling.min_p[request] : 0.0f) {}

    bool any(int64_t size) const { return top_k < size || top_p < 1.0f || min_p > 0.0f; }
};

INLINE Ints lane_numbers() {
    Ints numbers;
    for (int lane = 0; lane < LANES; ++lane) numbers[lane] = lane;
    return numbers;
}

// log2 of the weights of logits, with the same bits in every call.
INLINE Floats exponents_of(Floats logits, float top, float scale) {
    return rounded((logits - top) * scale);
}

// One vector of log2 of the weights without filters.
INLINE Floats exponents_at(const Softmax &row, int64_t i, int64_t end) {
    return exponents_of(read_partial(row.logits, i, end, MINUS_INFINITY), row.top, row.scale);
}

// One vector of probabilities, with the same bits in every call. Lanes from end on are 0.
INLINE Floats probs_at(const Softmax &row, int64_t i, int64_t end) {
    const Floats zero = {};
    if (row.token >= 0) {
        const int32_t lane = (int32_t)(row.token - i);
        return (lane_numbers() == lane) ? zero + row.factor : zero;
    }
    const Floats exponent = exponents_at(row, i, end);
    if (!(row.least > 0)) return rounded(power_of_two(exponent) * row.factor);
    if (!any_of(exponent > row.lowest)) return zero;
    const Floats weight = power_of_two(exponent);
    const Ints is_tied = weight == row.least;
    const Ints is_kept =
        (weight > row.least) | (is_tied & (lane_numbers() + (int32_t)i <= row.last_least));
    return rounded((is_kept ? weight : zero) * row.factor);
}

// The probability of one token.
INLINE float prob_of(const Softmax &row, int64_t token) {
    const int64_t start = token / LANES * LANES;
    return probs_at(row, start, row.size)[token - start];
}

// Appends the tokens of one vector whose exponent is larger than a limit to the candidates. ids are
// the tokens of its lanes. They may have been read from the end of the list of candidates.
INLINE void add_candidates(Floats exponent, Floats weight, float limit, Ints ids,
                           const Scratch &scratch, int64_t &count) {
#if defined(__AVX512F__)
    const __mmask16 chosen =
        _mm512_cmp_ps_mask((__m512)exponent, _mm512_set1_ps(limit), _CMP_GT_OQ);
    if (!chosen) return;
    const __m512 weights = _mm512_maskz_compress_ps(chosen, (__m512)weight);
    const __m512i tokens = _mm512_maskz_compress_epi32(chosen, (__m512i)ids);
    memcpy(scratch.weights + count, &weights, sizeof weights);
    memcpy(scratch.ids + count, &tokens, sizeof tokens);
    count += __builtin_popcount(chosen);
#else
    const Ints inside = exponent > limit;
    if (!any_of(inside)) return;
    for (int lane = 0; lane < LANES; ++lane) {
        if (!inside[lane]) continue;
        scratch.weights[count] = weight[lane];
        scratch.ids[count++] = ids[lane];
    }
#endif
}

// Collects the tokens whose exponent is larger than a limit, and returns their number.
int64_t collect_candidates(const Softmax &row, float limit, const Scratch &scratch) {
    int64_t count = 0;
    for (int64_t i = 0; i < row.size; i += LANES) {
        const Floats exponent = exponents_at(row, i, row.size);
        add_candidates(exponent, power_of_two(exponent), limit, lane_numbers() + (int32_t)i, scratch,
                       count);
    }
    return count;
}

// Applies filters to a row, of which all is the sum of weights. The candidates of the first limit
// are given. Returns the sum of the kept weights. Stores the sum of weight * log2(weight) in moment
// unless it is null.
double apply_filters(Softmax &row, const Filters &filters, double all, int64_t count,
                     const Scratch &scratch, double *moment) {
    float *weights = scratch.weights;
    const bool has_top_k = filters.top_k < row.size, has_top_p = filters.top_p < 1.0f;
    const TopP of_all(filters.top_p, all, row.size);
    // Whether the candidates of a limit include all tokens that are kept.
    const auto is_complete = [&](float limit) {
        if (has_top_k) return count >= filters.top_k;
        if (has_top_p) return sum_of(weights, count) >= of_all.needed;
        return __builtin_log2f(filters.min_p) > limit + 0.5f;
    };
    for (const float *limit = CANDIDATE_LIMITS; *limit > MINUS_INFINITY && !is_complete(*limit);)
        count = collect_candidates(row, *++limit, scratch);
    if (has_top_k) keep_top_k(weights, count, filters.top_k, scratch.order);
    if (has_top_p)
        keep_top_p(weights, count,
                   has_top_k ? TopP(filters.top_p, sum_of(weights, count), row.size) : of_all,
                   scratch.order);
    // The sum of the kept weights, the smallest of them, and its last token.
    const auto kept_at = [&](int64_t i, int64_t end) {
        const Floats weight = read_partial(weights, i, end, 0.0f), zero = {};
        return (weight >= filters.min_p) ? weight : zero;
    };
    double sum = 0;
    Floats smallest = Floats{} + 1.0f;
    for_each_block(count, [&](int64_t start, int64_t end) {
        Floats part = {};
        for (int64_t i = start; i < end; i += LANES) {
            const Floats kept = kept_at(i, end);
            part += kept;
            smallest = (kept > 0.0f) & (kept < smallest) ? kept : smallest;
        }
        sum += horizontal_sum(part);
    });
    row.least = -horizontal_max(-smallest);
    int64_t last = round_up(count, LANES) - LANES;
    while (last > 0 && !any_of(kept_at(last, count) == row.least)) last -= LANES;
    row.last_least = 0;
    for (int64_t i = last; i < min_int(last + LANES, count); ++i)
        if (weights[i] == row.least) row.last_least = scratch.ids[i];
    if (moment) {
        *moment = 0;
        for (int64_t i = 0; i < count; ++i)
            if (weights[i] > 0.0f && weights[i] >= filters.min_p)
                *moment += weights[i] * __builtin_log2f(weights[i]);
    }
    row.lowest = __builtin_log2f(row.least) - 0.5f;
    return sum;
}

// Sums over the weights of a row, relative to a top that may rise.
struct WeightSums {
    double sum = 0;     // of the weights
    double moment = 0;  // of weight * log2(weight)

    // Makes all weights relative to a top that is higher by a number of powers of two.
    void raise(float powers) {
        const double factor = __builtin_exp2(-(double)powers);
        moment = (moment - powers * sum) * factor;
        sum *= factor;
    }
};

// Computes the weights of the candidates again, because the top has risen, and removes those whose
// exponent is no longer larger than the first limit. Returns the number of those that remain.
int64_t refresh_candidates(const Softmax &row, int64_t count, const Scratch &scratch) {
    int64_t kept = 0;
    for (int64_t first = 0; first < count; first += LANES) {
        const int64_t num = min_int(LANES, count - first);
        Ints ids = {};
        memcpy(&ids, scratch.ids + first, num * sizeof *scratch.ids);
        const Floats none = Floats{} + MINUS_INFINITY;
        const Floats logits = lane_numbers() < (int32_t)num ? gather(row.logits, ids) : none;
        const Floats exponent = exponents_of(logits, row.top, row.scale);
        add_candidates(exponent, power_of_two(exponent), CANDIDATE_LIMITS[0], ids, scratch, kept);
    }
    return kept;
}

// Describes the softmax of logits with the request's temperature and filters. A temperature of 0
// counts as 1. With WITH_ENTROPY, returns the entropy in nats, NaN if logits are NaN; else 0. Reads
// the logits from memory once: the largest logit of a chunk is found before the chunk is summed.
template <bool WITH_ENTROPY>
float describe(const float *logits, int64_t size, const Sampling &sampling, int64_t request,
               const Scratch &scratch, Softmax &row) {
    constexpr int64_t CHUNK = 16 * SUM_BLOCK;
    const float temperature = sampling.temperature[request];
    row.logits = logits;
    row.size = size;
    row.top = MINUS_INFINITY;
    row.scale = (float)LOG2_E / (temperature == 0.0f ? 1.0f : temperature);
    row.least = 0.0f;
    row.lowest = MINUS_INFINITY;
    row.last_least = 0;
    row.token = -1;
    const Filters filters(sampling, request, size);
    const bool is_filtered = filters.any(size);
    WeightSums sums;
    int64_t num_candidates = 0;
    for (int64_t first = 0; first < size; first += CHUNK) {
        const int64_t last = min_int(first + CHUNK, size);
        const float top = maximum(logits + first, last - first);
        if (top > row.top) {
            if (row.top > MINUS_INFINITY) sums.raise((top - row.top) * row.scale);
            row.top = top;
            num_candidates = refresh_candidates(row, num_candidates, scratch);
        }
        // Without any token so far, all weights are 0 or NaN with any top.
        const float base = row.top > MINUS_INFINITY ? row.top : 0.0f;
        for (int64_t start = first; start < last; start += SUM_BLOCK) {
            const int64_t end = min_int(start + SUM_BLOCK, last);
            Floats part = {}, moments = {};
            const Floats zero = {};
            for (int64_t i = start; i < end; i += LANES) {
                const Floats numbers = read_partial(logits, i, size, MINUS_INFINITY);
                const Floats exponent = exponents_of(numbers, base, row.scale);
                const Floats weight = power_of_two(exponent);
                part += weight;
                if constexpr (WITH_ENTROPY) moments += weight > 0.0f ? weight * exponent : zero;
                if (is_filtered)
                    add_candidates(exponent, weight, CANDIDATE_LIMITS[0],
                                   lane_numbers() + (int32_t)i, scratch, num_candidates);
            }
            sums.sum += horizontal_sum(part);
            if constexpr (WITH_ENTROPY) sums.moment += horizontal_sum(moments);
        }
    }
    if (!(sums.sum > 0)) {
        row.factor = __builtin_nanf("");
        return row.factor;
    }
    if (is_filtered) {
        sums.sum = apply_filters(row, filters, sums.sum, num_candidates, scratch,
                                 WITH_ENTROPY ? &sums.moment : nullptr);
    }
    row.factor = (float)(1.0 / sums.sum);
    const double entropy = LN_2 * (__builtin_log2(sums.sum) - sums.moment / sums.sum);
    return WITH_ENTROPY && entropy > 0 ? (float)entropy : 0.0f;
}

// Describes the one-hot distribution of the largest score. It is NaN if a score is NaN or infinite.
INLINE void describe_one_hot(const float *scores, int64_t size, Softmax &row) {
    const Largest largest = largest_of(scores, size);
    const bool is_valid = !largest.any_nan && largest.number < __builtin_inff();
    row = {scores, size, 0.0f, 0.0f, is_valid ? 1.0f : __builtin_nanf(""), 0.0f, 0.0f, 0,
           largest.index};
}

// Describes the distribution that a request's tokens are sampled from.
INLINE void describe_sampled(const float *logits, int64_t size, const Sampling &sampling,
                             int64_t request, const Scratch &scratch, Softmax &row) {
    if (sampling.temperature[request] == 0.0f)
        describe_one_hot(logits, size, row);
    else
        describe<false>(logits, size, sampling, request, scratch, row);
}

// Writes the probabilities of a row.
INLINE void write_probs(const Softmax &row, float *p) {
    for_each_block(row.size, [&](int64_t start, int64_t end) {
        for (int64_t i = start; i < end; i += LANES)
            write_partial(probs_at(row, i, end), p, i, end);
    });
}

// Stores the sum of each block of weights in sums, and returns the sum of all. weights_at(i, end)
// returns the vector of weights at index i.
template <class WeightsAt>
INLINE double sum_blocks(int64_t size, double *sums, const WeightsAt &weights_at) {
    double all = 0;
    for_each_block(size, [&](int64_t start, int64_t end) {
        Floats part = {};
        for (int64_t i = start; i < end; i += LANES) part += weights_at(i, end);
        all += sums[start / SUM_BLOCK] = horizontal_sum(part);
    });
    return all;
}

// Samples an index by inverting the cumulative distribution of weights, whose sums are given. Never
// returns an index of weight 0, unless all weights are 0 or NaN.
template <class WeightsAt>
INLINE int64_t sample_index(int64_t size, const double *sums, double all, double uniform,
                            const WeightsAt &weights_at) {
    const double threshold = uniform * all;
    double before = 0;
    int64_t last = 0, last_positive = -1;
    const auto search = [&](int64_t block) -> int64_t {
        float weights[SUM_BLOCK];
        const int64_t start = block * SUM_BLOCK, count = min_int(SUM_BLOCK, size - start);
        for (int64_t i = 0; i < count; i += LANES)
            write_partial(weights_at(start + i, start + count), weights, i, count);
        double sum = before;
        for (int64_t i = 0; i < count; ++i) {
            if (!(weights[i] > 0)) continue;
            last = start + i;
            sum += weights[i];
            if (sum > threshold) return start + i;
        }
        return -1;
    };
    for (int64_t block = 0; block < num_blocks(size); ++block) {
        if (sums[block] > 0) last_positive = block;
        if (before + sums[block] > threshold) {
            const int64_t found = search(block);
            if (found >= 0) return found;
        }
        before += sums[block];
    }
    // Rounding errors may leave no index: return the last one of positive weight.
    if (last_positive >= 0) search(last_positive);
    return last;
}

// Writes the probabilities of a row and samples a token.
INLINE int64_t write_and_sample(const Softmax &row, double uniform, double *sums, float *p) {
    const double all = sum_blocks(row.size, sums, [&](int64_t i, int64_t end) {
        const Floats probs = probs_at(row, i, end);
        write_partial(probs, p, i, end);
        return probs;
    });
    return sample_index(row.size, sums, all, uniform,
                        [&](int64_t i, int64_t end) { return read_partial(p, i, end, 0.0f); });
}

}  // namespace

// Arguments of draftwise_distributions, which computes distributions from logits.
struct DistributionCall {
    const float *logits;      // [rows, vocab]
    const int64_t *requests;  // [rows] index into the sampling parameters
    float *p;                 // [rows, vocab] output
    char *scratch;            // [threads] Scratch
    Sampling sampling;
    int64_t num_rows, vocab;
    int64_t softens_greedy;  // whether greedy rows are computed at temperature 1, not as one-hot
};

// Arguments of draftwise_greedy, which finds the largest logit of each row.
struct GreedyCall {
    const float *logits;  // [rows, vocab]
    int64_t *tokens;      // [rows] output: the first index of the largest logit
    uint8_t *is_nan;      // [rows] output: whether a logit is NaN
    int64_t num_rows, vocab;
};

// Arguments of draftwise_score, which computes a companion's scores of drafted tokens.
struct ScoreCall {
    const float *logits;         // [rows, own_vocab] logits of the companion
    const int64_t *places;       // [rows, 2] request and position
    const int64_t *tokens;       // [requests, width] drafted tokens
    const float *q;              // [requests, q_width, vocab] distributions of the draft
    float *c;                    // [requests, width, vocab] output: distributions of the companion
    float *overlap, *agreement;  // [requests, width] output: S and A
    char *scratch;               // [threads] Scratch
    Sampling sampling;
    int64_t num_rows, own_vocab, vocab, width;
    int64_t q_stride;  // elements of q per request
};

namespace {

void distribution(const DistributionCall &call, int64_t row, int64_t thread) {
    const int64_t request = call.requests[row], vocab = call.vocab;
    const float *logits = call.logits + row * vocab;
    const Scratch scratch(call.scratch, vocab, call.sampling, thread);
    Softmax softmax;
    if (call.softens_greedy)
        describe<false>(logits, vocab, call.sampling, request, scratch, softmax);
    else
        describe_sampled(logits, vocab, call.sampling, request, scratch, softmax);
    float *p = call.p + row * vocab;
    if (is_nan(softmax))
        fill(p, vocab, softmax.factor);
    else
        write_probs(softmax, p);
}

void greedy_row(const GreedyCall &call, int64_t row) {
    const Largest largest = largest_of(call.logits + row * call.vocab, call.vocab);
    call.tokens[row] = largest.index;
    call.is_nan[row] = largest.any_nan;
}

void score_row(const ScoreCall &call, int64_t row, int64_t thread) {
    const int64_t request = call.places[2 * row], position = call.places[2 * row + 1];
    const int64_t place = request * call.width + position, vocab = call.vocab;
    const int64_t shared_vocab = min_int(call.own_vocab, vocab);
    const Scratch scratch(call.scratch, vocab, call.sampling, thread);
    Softmax softmax;
    describe<false>(call.logits + row * call.own_vocab, shared_vocab, call.sampling, request,
                    scratch, softmax);
    float *c = call.c + place * vocab;
    const float *q = call.q + request * call.q_stride + position * vocab;
    const int64_t token = call.tokens[place];
    if (is_nan(softmax)) {
        fill(c, vocab, 0.0f);
        call.overlap[place] = call.agreement[place] = 0.0f;
        return;
    }
    // S, the sum of min(q, c), while c is written.
    call.overlap[place] = (float)sum_blocks(shared_vocab, scratch.sums, [&](int64_t i, int64_t end) {
        const Floats a = read_partial(q, i, end, 0.0f), b = probs_at(softmax, i, end);
        write_partial(b, c, i, end);
        return a < b ? a : b;
    });
    fill(c + shared_vocab, vocab - shared_vocab, 0.0f);
    call.agreement[place] = q[token] > 0 ? std::min(1.0f, c[token] / q[token]) : 0.0f;
}

}  // namespace
