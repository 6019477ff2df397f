// Feed-forward layers with experts (Shazeer et al. 2017), of which each token chooses some.
//
// The rows of the tokens that chose an expert are gathered, so that each expert is read once in a
// pass. The thread that computes columns of the output adds all experts in ascending order. So a
// row's sum does not depend on the other rows.

#pragma once

#include "packed_product.h"
#include "threads.h"

#include <algorithm>

enum Scoring { SOFTMAX = 0, SIGMOID = 1 };

// The experts of a layer. A gate of experts that all tokens use, if there is one, is the last row of
// the router.
struct Experts {
    const float *router;      // [count, hidden], or [count + 1, hidden]
    const float *correction;  // [count] added to the scores by which experts are chosen, or null
    const void *const *gate_up, *const *down;  // [count] weights, as in DecoderLayer
    // Added to the scores, and to the products of each expert; null for nothing. Rows are padded.
    const float *router_bias;             // [count]
    const float *gate_bias, *up_bias;     // [count, whole vectors]
    const float *down_bias;               // [count, whole panels]
    int64_t count, chosen;    // all experts, and those of a token
    int64_t inner;            // size of an expert's gate
    int64_t scoring;          // Scoring
    int64_t normalises;       // whether the factors of a token's experts add up to scale
    int64_t has_shared_gate;
    double scale;             // of the factors
    double limit, slope;      // see clamped_gate; a limit of 0 for the activation of the model
};

namespace {

constexpr float LEAST_SUM = 1e-20f;  // of scores

INLINE float sigmoid(float x) { return 1.0f / (1.0f + __builtin_expf(-x)); }

// 1 + e^-x.
INLINE Floats one_and_exponential(Floats x) {
    Floats exponent = x * -1.4426950408889634f;
    const Floats limit = Floats{} + 126.0f;
    exponent = exponent > limit ? limit : exponent;
    return 1.0f + power_of_two(exponent);
}

INLINE Floats sigmoid(Floats x) { return 1.0f / one_and_exponential(x); }

// x * sigmoid(x).
INLINE Floats silu(Floats x) { return x / one_and_exponential(x); }

// The gate of gpt-oss: (up + 1) * gate * sigmoid(slope * gate), of limited numbers.
INLINE Floats clamped_gate(Floats gate, Floats up, float limit, float slope) {
    const Floats most = Floats{} + limit;
    gate = gate > most ? most : gate;
    up = up > most ? most : up;
    up = up < -most ? -most : up;
    return (up + 1.0f) * silu(gate * slope) / slope;
}

// One row and several rows of a router.
INLINE void multiply_router(const float *row, const float *router, int64_t hidden, int64_t count,
                            float *to) {
    constexpr int64_t BLOCK = 4;
    const int64_t whole = hidden / LANES * LANES;
    for (int64_t first = 0; first < count; first += BLOCK) {
        const int64_t size = min_int(BLOCK, count - first);
        const float *from[BLOCK];
        for (int64_t k = 0; k < BLOCK; ++k) from[k] = router + (first + k % size) * hidden;
        Floats sums[BLOCK] = {};
        for (int64_t i = 0; i < whole; i += LANES)
            for (int64_t k = 0; k < BLOCK; ++k) sums[k] += read(row + i) * read(from[k] + i);
        for (int64_t k = 0; k < size; ++k) {
            float sum = horizontal_sum(sums[k]);
            for (int64_t i = whole; i < hidden; ++i) sum += row[i] * from[k][i];
            to[first + k] = sum;
        }
    }
}

// Chooses the experts of a token, and the factors of their outputs. Of equal scores the first is
// chosen. The scores are overwritten.
INLINE void choose_experts(const Experts &experts, float *scores, int32_t *chosen,
                           float *factors) {
    const int64_t count = experts.count;
    if (experts.router_bias)
        for (int64_t e = 0; e < count; ++e) scores[e] += experts.router_bias[e];
    if (experts.scoring == SOFTMAX) {
        const float largest = *std::max_element(scores, scores + count);
        float sum = 0;
        for (int64_t e = 0; e < count; ++e) sum += scores[e] = __builtin_expf(scores[e] - largest);
        for (int64_t e = 0; e < count; ++e) scores[e] /= sum;
    } else {
        for (int64_t e = 0; e < count; ++e) scores[e] = sigmoid(scores[e]);
    }
    const auto rank = [&](int64_t e) {
        return experts.correction ? scores[e] + experts.correction[e] : scores[e];
    };
    // Insertion into the list of the best so far.
    int64_t size = 0;
    for (int64_t e = 0; e < count; ++e) {
        int64_t place = size;
        while (place > 0 && rank(e) > rank(chosen[place - 1])) --place;
        if (place == experts.chosen) continue;
        size = min_int(size + 1, experts.chosen);
        for (int64_t i = size - 1; i > place; --i) chosen[i] = chosen[i - 1];
        chosen[place] = (int32_t)e;
    }
    float sum = 0;
    for (int64_t i = 0; i < size; ++i) sum += factors[i] = scores[chosen[i]];
    const float scale =
        (float)experts.scale / (experts.normalises ? sum + LEAST_SUM : 1.0f);
    for (int64_t i = 0; i < size; ++i) factors[i] *= scale;
}

// Intermediate results of the experts of a pass. A pair is a token and an expert that it chose.
template <class X>
struct ExpertBuffers {
    typedef typename X::Input Input;
    // Whether a row is converted as a whole, after all of its numbers are computed.
    static constexpr bool WHOLE_ROWS = std::is_same<RowGroup, Input>::value;

    int64_t hidden_stride, score_stride, active_stride;
    float *rows;          // [tokens, hidden_stride] the input of the layer
    float *scores;        // [tokens, score_stride] of the router
    float *factors;       // [tokens, chosen]
    int32_t *chosen;      // [tokens, chosen]
    int64_t *tokens;      // [pairs] the token of each pair, in the order of the experts
    float *pair_factors;  // [pairs]
    int64_t *first_pairs; // [count + 1] of each expert
    int64_t *used;        // [1 + count] number of experts that are used, and the experts
    Input *gathered, *inner;  // the rows of each expert; see rows_of
    float *active;        // [pairs, active_stride] what becomes inner, if rows are converted whole
    int64_t bytes;

    ExpertBuffers(char *memory, int64_t num_tokens, int64_t hidden, int64_t most_experts,
                  int64_t most_chosen, int64_t inner_size) {
        bytes = 0;
        const auto allocate = [&](auto *&pointer, int64_t numbers) {
            pointer = (decltype(&*pointer))(memory + bytes);
            bytes += round_up(numbers * (int64_t)sizeof *pointer, CACHE_LINE);
        };
        const int64_t pairs = num_tokens * most_chosen;
        hidden_stride = round_up(hidden, LANES);
        score_stride = most_experts + 1;
        active_stride = round_up(inner_size, PANEL_WIDTH);
        allocate(rows, num_tokens * hidden_stride);
        allocate(scores, num_tokens * score_stride);
        allocate(factors, pairs);
        allocate(chosen, pairs);
        allocate(tokens, pairs);
        allocate(pair_factors, pairs);
        allocate(first_pairs, most_experts + 1);
        allocate(used, most_experts + 1);
        allocate(gathered, rows_size(X(), pairs, hidden));
        allocate(inner, WHOLE_ROWS ? rows_size(X(), pairs, inner_size) : pairs * active_stride);
        allocate(active, WHOLE_ROWS ? pairs * active_stride : 0);
    }
};

// The pairs of an expert.
struct ExpertPairs {
    int64_t expert, first, count;
};

// The rows of an expert's pairs with depth numbers. They are next to each other, because rows of
// packed weights, whose stride grows with their number, would share few sets of a cache.
template <class X>
INLINE typename X::Input *rows_of(typename X::Input *all, const ExpertPairs &own, int64_t depth) {
    return all + own.first * (rows_size(X(), 1, depth) - rows_size(X(), 0, depth));
}

// Sorts the pairs of all tokens by expert, and the pairs of an expert by token.
template <class X>
void sort_pairs(const Experts &experts, int64_t num_tokens, const ExpertBuffers<X> &buffers) {
    const int64_t pairs = num_tokens * experts.chosen;
    int64_t *first = buffers.first_pairs;
    std::fill(first, first + experts.count + 1, 0);
    for (int64_t i = 0; i < pairs; ++i) ++first[buffers.chosen[i] + 1];
    buffers.used[0] = 0;
    for (int64_t e = 0; e < experts.count; ++e) {
        if (first[e + 1]) buffers.used[++buffers.used[0]] = e;
        first[e + 1] += first[e];
    }
    for (int64_t i = 0; i < pairs; ++i) {
        const int64_t pair = first[buffers.chosen[i]]++;
        buffers.tokens[pair] = i / experts.chosen;
        buffers.pair_factors[pair] = buffers.factors[i];
    }
    for (int64_t e = experts.count; e > 0; --e) first[e] = first[e - 1];
    first[0] = 0;
}

// Scores all tokens, chooses their experts and sorts the pairs. The rows must be complete. Of a
// shared gate, the last score of each token becomes the factor.
template <class X>
void route(const Experts &experts, int64_t num_tokens, int64_t hidden,
           const ExpertBuffers<X> &buffers, Worker worker) {
    const int64_t outputs = experts.count + experts.has_shared_gate;
    const int64_t first = worker.first(outputs), end = worker.end(outputs);
    for (int64_t i = 0; i < num_tokens; ++i)
        multiply_router(buffers.rows + i * buffers.hidden_stride, experts.router + first * hidden,
                        hidden, end - first, buffers.scores + i * buffers.score_stride + first);
    worker.wait();
    for (int64_t i = worker.first(num_tokens); i < worker.end(num_tokens); ++i) {
        float *scores = buffers.scores + i * buffers.score_stride;
        choose_experts(experts, scores, buffers.chosen + i * experts.chosen,
                       buffers.factors + i * experts.chosen);
        if (experts.has_shared_gate) scores[experts.count] = sigmoid(scores[experts.count]);
    }
    worker.wait();
    if (worker.index == 0) sort_pairs(experts, num_tokens, buffers);
    worker.wait();
}

// Computes the experts of routed tokens. claim(panels, work) calls work(first, end) for the panels
// that this thread computes; activate(gate, up) is what the down projection reads; and add(token,
// panel, left, right) adds two vectors of columns to the output. scratch is memory of
// expansion_bytes of this thread.
template <class X, class Claim, class Activate, class Add>
void compute_experts(const Experts &experts, int64_t num_tokens, int64_t hidden,
                     const ExpertBuffers<X> &buffers, Worker worker, char *scratch,
                     const Claim &claim, const Activate &activate, const Add &add) {
    constexpr bool WHOLE_ROWS = ExpertBuffers<X>::WHOLE_ROWS;
    const int64_t pairs = num_tokens * experts.chosen, inner = experts.inner;
    const int64_t used = buffers.used[0];
    const auto pairs_of = [&](int64_t k) {
        const int64_t e = buffers.used[1 + k], first = buffers.first_pairs[e];
        return ExpertPairs{e, first, buffers.first_pairs[e + 1] - first};
    };
    // Writes this thread's share of all rows. numbers(pair) are those of a row.
    const auto put_rows = [&](typename X::Input *all, int64_t depth, const auto &numbers) {
        const int64_t begin = worker.first(pairs), end = worker.end(pairs);
        for (int64_t k = 0; k < used; ++k) {
            const ExpertPairs own = pairs_of(k);
            const int64_t stride = row_stride(X(), own.count, depth);
            typename X::Input *rows = rows_of<X>(all, own, depth);
            for (int64_t i = std::max(begin, own.first);
                 i < std::min(end, own.first + own.count); ++i)
                put_row(X(), numbers(i), depth, stride,
                        row_of(X(), rows, stride, i - own.first));
        }
        worker.wait();
    };
    put_rows(buffers.gathered, hidden, [&](int64_t pair) {
        return buffers.rows + buffers.tokens[pair] * buffers.hidden_stride;
    });
    const int64_t panels = round_up(inner, LANES) / LANES;
    claim(used * panels, [&](int64_t from, int64_t until) {
        for (int64_t k = from / panels; k * panels < until; ++k) {
            const ExpertPairs own = pairs_of(k);
            multiply(X(), rows_of<X>(buffers.gathered, own, hidden),
                     row_stride(X(), own.count, hidden), own.count, hidden,
                     experts.gate_up[own.expert], std::max<int64_t>(0, from - k * panels),
                     std::min(panels, until - k * panels), scratch,
                     [&](int64_t row, int64_t panel, Floats gate, Floats up) {
                         const int64_t column = panel * LANES;
                         if (experts.gate_bias) {
                             const int64_t at = own.expert * panels * LANES + column;
                             gate += read(experts.gate_bias + at);
                             up += read(experts.up_bias + at);
                         }
                         const Floats result =
                             experts.limit ? clamped_gate(gate, up, (float)experts.limit,
                                                          (float)experts.slope)
                                           : activate(gate, up);
                         const int64_t at = (own.first + row) * buffers.active_stride + column;
                         if constexpr (WHOLE_ROWS)
                             write(result, buffers.active + at);
                         else
                             write(result, buffers.inner + at);
                     });
        }
    });
    worker.wait();
    if constexpr (WHOLE_ROWS)
        put_rows(buffers.inner, inner,
                 [&](int64_t pair) { return buffers.active + pair * buffers.active_stride; });
    claim(num_panels(hidden), [&](int64_t from, int64_t until) {
        for (int64_t k = 0; k < used; ++k) {
            const ExpertPairs own = pairs_of(k);
            const typename X::Input *rows =
                WHOLE_ROWS ? rows_of<X>(buffers.inner, own, inner)
                           : buffers.inner + own.first * buffers.active_stride;
            multiply(X(), rows,
                     WHOLE_ROWS ? row_stride(X(), own.count, inner) : buffers.active_stride,
                     own.count, inner, experts.down[own.expert], from, until, scratch,
                     [&](int64_t row, int64_t panel, Floats left, Floats right) {
                         if (experts.down_bias) {
                             const float *bias =
                                 experts.down_bias +
                                 (own.expert * num_panels(hidden) + panel) * PANEL_WIDTH;
                             left += read(bias);
                             right += read(bias + LANES);
                         }
                         const float factor = buffers.pair_factors[own.first + row];
                         add(buffers.tokens[own.first + row], panel, left * factor,
                             right * factor);
                     });
        }
    });
    worker.wait();
}

}  // namespace
