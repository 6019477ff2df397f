// The acceptance law of draftwise.core.rejection. The kernel computes the target's distributions,
// the number of accepted tokens and the next token. It processes one request at a time, so that the
// data of a request stays in the processor's cache.

#pragma once

#include <cmath>

#include "sampling.h"

// Arguments of draftwise_accept.
struct AcceptanceCall {
    const float *logits;           // [rows, vocab]; each request has one row more than its length
    const int64_t *first_rows;     // [requests] first row of each request
    const int64_t *lengths;        // [requests] number of verified tokens
    const int64_t *tokens;         // [requests, width] drafted tokens, with token_stride
    const float *proposals;        // [requests, positions, vocab], with proposal_stride, or null
    const float *accept_uniforms;  // [requests, uniforms_width]
    const double *final_uniforms;  // [requests]
    const float *lenience;         // [requests]; null for 1
    float *p;                      // [rows, vocab] scratch memory
    int32_t *order;                // [threads, vocab] scratch memory; null without top-k and top-p
    int64_t *num_accepted, *next_tokens;         // [requests] output
    float *acceptance, *prefix_acceptance_prob;  // [requests, width] output, initially zero
    uint8_t *is_nan;                             // [rows] output: whether the logits are NaN
    const float *least, *most;  // [requests, width] range of proposed q(x); null for all of q
    Sampling sampling;
    int64_t num_requests, vocab, width;
    int64_t token_stride, proposal_stride;  // elements per request
    int64_t uniforms_width;
    int64_t by_block;  // whether to verify by block instead of token by token
};

namespace {

// The proposal of one position. It contains the tokens whose q(x) is between two bounds. If q is
// null, it is one-hot at a token, or empty if the token is negative.
struct Proposal {
    const float *q;     // [vocab], or null
    float least, most;  // bounds of q(x)
    int64_t token;
};

// One vector of q with tokens outside the bounds set to 0.
INLINE Floats proposed(const Proposal &proposal, int64_t i, int64_t end) {
    const Floats q = read_partial(proposal.q, i, end, 0.0f), zero = {};
    return ((q >= proposal.least) & (q <= proposal.most)) ? q : zero;
}

// The proposal of a request at position i.
INLINE Proposal proposal_at(const AcceptanceCall &call, int64_t request, int64_t i) {
    if (!call.proposals) {
        const bool verified = i < call.lengths[request];
        return {nullptr, 0.0f, INFINITY,
                verified ? call.tokens[request * call.token_stride + i] : -1};
    }
    const float *q = call.proposals + request * call.proposal_stride + i * call.vocab;
    const int64_t place = request * call.width + i;
    if (!call.least || i >= call.width) return {q, 0.0f, INFINITY, -1};
    return {q, call.least[place], call.most[place], -1};
}

// Computes max(p * scale - q, 0) with scale <= 1 and returns its sum. Writes the result to out
// unless out is null.
INLINE double residual(float *p, float scale, Proposal q, int64_t size, float *out) {
    double sum = 0;
    // The residual of a token that is proposed with probability 1 is 0.
    const float saved_prob = q.token < 0 ? 0.0f : p[q.token];
    if (q.token >= 0) p[q.token] = 0.0f;
    for_each_block(size, [&](int64_t start, int64_t end) {
        Floats part = {};
        const Floats zero = {};
        for (int64_t i = start; i < end; i += LANES) {
            Floats remaining = read_partial(p, i, end, 0.0f) * scale;
            if (q.q) remaining -= proposed(q, i, end);
            remaining = remaining > 0.0f ? remaining : zero;
            part += remaining;
            if (out) write_partial(remaining, out, i, end);
        }
        sum += horizontal_sum(part);
    });
    if (q.token >= 0 && out != p) p[q.token] = saved_prob;
    return sum;
}

// Verifies one request and writes its results.
void accept(const AcceptanceCall &call, int64_t request, int64_t thread) {
    const int64_t length = call.lengths[request], vocab = call.vocab;
    const int64_t first = call.first_rows[request];
    float *p = call.p + first * vocab;
    int32_t *order = call.order ? call.order + thread * vocab : nullptr;
    for (int64_t i = 0; i <= length; ++i) {
        const float *logits = call.logits + (first + i) * vocab;
        float *row = p + i * vocab;
        if (call.sampling.temperature[request] == 0.0f)
            one_hot_or_nan(logits, vocab, row);
        else
            filtered_softmax(logits, vocab, call.sampling, request, row, order);
        call.is_nan[first + i] = row[0] != row[0];
    }
    const int64_t *tokens = call.tokens + request * call.token_stride;
    const float *q =
        call.proposals ? call.proposals + request * call.proposal_stride : nullptr;
    const float lenience = call.lenience ? call.lenience[request] : 1.0f;
    const float *uniforms = call.accept_uniforms + request * call.uniforms_width;
    float *acceptance = call.acceptance + request * call.width;
    float *prefix_acceptance_prob = call.prefix_acceptance_prob + request * call.width;
    const bool by_block = call.by_block && lenience == 1.0f;

    // Token by token: the number of consecutive accepted tokens. By block: p_i of Sun et al. 2024.
    int64_t num_accepted = 0;
    bool all_accepted = true;
    float joint = 1.0f, product = 1.0f;
    for (int64_t i = 0; i < length; ++i) {
        const float ratio = p[i * vocab + tokens[i]] / (q ? q[i * vocab + tokens[i]] : 1.0f);
        acceptance[i] = ratio == ratio ? std::min(ratio, 1.0f) : 0.0f;
        joint = std::min(joint * ratio, 1.0f);
        const float lenient_ratio = ratio / lenience;
        product *= std::min(lenient_ratio, 1.0f);
        const float prefix_prob = by_block ? joint : product;
        prefix_acceptance_prob[i] = prefix_prob == prefix_prob ? prefix_prob : 0.0f;
        all_accepted = all_accepted && uniforms[i] < lenient_ratio;
        num_accepted += all_accepted;
    }
    float scale = 1.0f;
    if (by_block) {
        // The longest prefix that is accepted as a block, with h_i of algorithm 2.
        for (num_accepted = length; num_accepted > 0; --num_accepted) {
            const float running = prefix_acceptance_prob[num_accepted - 1];
            const Proposal next_proposal = proposal_at(call, request, num_accepted);
            const double remaining =
                residual(p + num_accepted * vocab, running, next_proposal, vocab, nullptr);
            const double accept_prob = remaining / (remaining + (1.0 - running));
            if (uniforms[num_accepted - 1] < accept_prob) break;
        }
        scale = num_accepted ? prefix_acceptance_prob[num_accepted - 1] : 1.0f;
    }
    float *final_p = p + num_accepted * vocab;
    const Proposal next_proposal = proposal_at(call, request, num_accepted);
    // If p equals the proposal up to rounding, the residual is 0 and p is the right distribution.
    const bool proposes = next_proposal.q || next_proposal.token >= 0;
    if (proposes && residual(final_p, scale, next_proposal, vocab, nullptr) > 0)
        residual(final_p, scale, next_proposal, vocab, final_p);
    call.num_accepted[request] = num_accepted;
    call.next_tokens[request] = sample_index(final_p, vocab, call.final_uniforms[request]);
}

}  // namespace
