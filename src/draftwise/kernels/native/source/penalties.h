// Bias and penalties of logits, as in control_logits of draftwise.core.sampling. Only the tokens that
// have them are read and written.

#pragma once

#include <cstdint>

// Bias and penalties of all requests. A parameter that no request uses is null.
struct Penalties {
    const int64_t *bias_tokens;  // [requests, num_biases]
    const float *bias_values;    // [requests, num_biases]; 0 where a request has fewer
    const float *repetition, *presence, *frequency;  // [requests]
    // [requests, capacity] the tokens seen so far and their number of occurrences in the output.
    // Copies of a request's first token are padding.
    int64_t *tokens;
    float *counts;
    int64_t *num_tokens;  // [requests]
    int64_t num_biases, capacity;
};

namespace {

// Applies a request's bias and penalties to a row of logits.
inline void penalise(const Penalties &penalties, int64_t request, float *logits, int64_t vocab) {
    for (int64_t i = 0; i < penalties.num_biases; ++i) {
        const int64_t place = request * penalties.num_biases + i;
        const int64_t token = penalties.bias_tokens[place];
        if (token < vocab) logits[token] += penalties.bias_values[place];
    }
    if (!penalties.tokens) return;
    const int64_t *tokens = penalties.tokens + request * penalties.capacity;
    const float *counts = penalties.counts + request * penalties.capacity;
    for (int64_t i = 0; i < penalties.num_tokens[request]; ++i) {
        if (tokens[i] >= vocab || (i > 0 && tokens[i] == tokens[0])) continue;
        float value = logits[tokens[i]];
        if (penalties.repetition) {
            const float penalty = penalties.repetition[request];
            value = value < 0 ? value * penalty : value / penalty;
        }
        if (penalties.frequency) value -= penalties.frequency[request] * counts[i];
        if (penalties.presence) value -= penalties.presence[request] * (counts[i] > 0);
        logits[tokens[i]] = value;
    }
}

// Counts a token that a request was given.
inline void count_token(const Penalties &penalties, int64_t request, int64_t token) {
    if (!penalties.tokens) return;
    int64_t *tokens = penalties.tokens + request * penalties.capacity;
    float *counts = penalties.counts + request * penalties.capacity;
    int64_t place = 0;
    while (place < penalties.num_tokens[request] && tokens[place] != token) ++place;
    if (place == penalties.num_tokens[request]) {
        ++penalties.num_tokens[request];
        tokens[place] = token;
        counts[place] = 0;
    }
    ++counts[place];
}

}  // namespace
