// The acceptance law of draftwise.core.rejection. The kernel describes the target's distributions,
// row by row. Then it computes, request by request, the number of accepted tokens and the next
// token.

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
    const int64_t *owners;         // [rows] request of each row
    Softmax *rows;                 // [rows] memory for the target's distributions
    char *scratch;                 // [threads] Scratch
    int64_t *num_accepted, *next_tokens;         // [requests] output
    float *acceptance, *prefix_acceptance_prob;  // [requests, width] output, initially zero
    uint8_t *is_nan;                             // [rows] output: whether the logits are NaN
    const double *following_uniforms;  // [requests, following_width] final_uniforms of the steps
                                       // that would begin after each drafted token
    int64_t *drawn;          // [rows] memory for the tokens of one-hot requests
    const uint8_t *one_hot;  // [requests] whether all proposals are one-hot; null for none
    Sampling sampling;
    int64_t num_requests, num_rows, vocab, width;
    int64_t token_stride, proposal_stride;  // elements per request
    int64_t uniforms_width, following_width;
    int64_t by_block;  // whether to verify by block instead of token by token
};

namespace {

// The proposal of one position. If q is null, it is one-hot at a token, or empty if the token is
// negative.
struct Proposal {
    const float *q;  // [vocab], or null
    int64_t token;
};

// The proposal of a request at position i.
INLINE Proposal proposal_at(const AcceptanceCall &call, int64_t request, int64_t i) {
    if (!call.proposals) {
        const bool verified = i < call.lengths[request];
        return {nullptr, verified ? call.tokens[request * call.token_stride + i] : -1};
    }
    return {call.proposals + request * call.proposal_stride + i * call.vocab, -1};
}

// The residual max(p * scale - q, 0) with scale <= 1.
struct Residual {
    const Softmax &p;
    float scale;
    Proposal q;

    INLINE_MEMBER Floats operator()(int64_t i, int64_t end) const {
        const Floats zero = {};
        Floats remaining = probs_at(p, i, end) * scale;
        if (q.q) remaining -= read_partial(q.q, i, end, 0.0f);
        // The residual of a token that is proposed with probability 1 is 0.
        if (q.token >= 0)
            remaining = (lane_numbers() == (int32_t)(q.token - i)) ? zero : remaining;
        return remaining > 0.0f ? remaining : zero;
    }
};

// Verifies one request with one-hot proposals: a proposed token is accepted if it is the drawn one.
void accept_one_hot(const AcceptanceCall &call, int64_t request) {
    const int64_t length = call.lengths[request], first = call.first_rows[request];
    const int64_t *tokens = call.tokens + request * call.token_stride;
    int64_t num_accepted = 0;
    float product = 1.0f;
    for (int64_t i = 0; i < length; ++i) {
        const float prob = prob_of(call.rows[first + i], tokens[i]);
        const float valid = prob == prob ? prob : 0.0f;
        call.acceptance[request * call.width + i] = valid;
        product *= valid;
        call.prefix_acceptance_prob[request * call.width + i] = product;
        if (num_accepted == i) num_accepted += call.drawn[first + i] == tokens[i];
    }
    call.num_accepted[request] = num_accepted;
    call.next_tokens[request] = call.drawn[first + num_accepted];
}

// Verifies one request and writes its results.
void accept(const AcceptanceCall &call, int64_t request, int64_t thread) {
    const int64_t length = call.lengths[request], vocab = call.vocab;
    const Softmax *rows = call.rows + call.first_rows[request];
    const Scratch scratch(call.scratch, vocab, call.sampling, thread);
    const int64_t *tokens = call.tokens + request * call.token_stride;
    const float *q =
        call.proposals ? call.proposals + request * call.proposal_stride : nullptr;
    const float lenience = call.lenience ? call.lenience[request] : 1.0f;
    if (call.one_hot && call.one_hot[request] && lenience == 1.0f)
        return accept_one_hot(call, request);
    const float *uniforms = call.accept_uniforms + request * call.uniforms_width;
    float *acceptance = call.acceptance + request * call.width;
    float *prefix_acceptance_prob = call.prefix_acceptance_prob + request * call.width;
    const bool by_block = call.by_block && lenience == 1.0f;

    // Token by token: the number of consecutive accepted tokens. By block: p_i of Sun et al. 2024.
    int64_t num_accepted = 0;
    bool all_accepted = true;
    float joint = 1.0f, product = 1.0f;
    for (int64_t i = 0; i < length; ++i) {
        const float ratio = prob_of(rows[i], tokens[i]) / (q ? q[i * vocab + tokens[i]] : 1.0f);
        acceptance[i] = ratio == ratio ? std::min(ratio, 1.0f) : 0.0f;
        joint = std::min(joint * ratio, 1.0f);
        const float lenient_ratio = ratio / lenience;
        product *= std::min(lenient_ratio, 1.0f);
        const float prefix_prob = by_block ? joint : product;
        prefix_acceptance_prob[i] = prefix_prob == prefix_prob ? prefix_prob : 0.0f;
        all_accepted = all_accepted && uniforms[i] < lenient_ratio;
        num_accepted += all_accepted;
    }
    const auto residual_at = [&](int64_t i, float scale) {
        return Residual{rows[i], scale, proposal_at(call, request, i)};
    };
    float scale = 1.0f;
    double remaining = -1.0;  // the mass of the residual after the accepted tokens, once it is known
    if (by_block) {
        // The longest prefix that is accepted as a block, with h_i of algorithm 2.
        for (num_accepted = length; num_accepted > 0; --num_accepted) {
            scale = prefix_acceptance_prob[num_accepted - 1];
            // The mass is at most scale, up to rounding, and so is h_i.
            if (uniforms[num_accepted - 1] >= scale * 1.0001f) continue;
            remaining = sum_blocks(vocab, scratch.sums, residual_at(num_accepted, scale));
            if (uniforms[num_accepted - 1] < remaining / (remaining + (1.0 - scale))) break;
            remaining = -1.0;
        }
        if (num_accepted == 0) scale = 1.0f;
    }
    Residual residual = residual_at(num_accepted, scale);
    if (remaining < 0) remaining = sum_blocks(vocab, scratch.sums, residual);
    if (!(remaining > 0)) {
        // p equals the proposal up to rounding, and p is the right distribution.
        residual.q = {nullptr, -1};
        remaining = sum_blocks(vocab, scratch.sums, residual);
    }
    call.num_accepted[request] = num_accepted;
    call.next_tokens[request] =
        sample_index(vocab, scratch.sums, remaining, call.final_uniforms[request], residual);
}

// Describes the target's distribution of a row, and draws from it if its proposal is one-hot.
void describe_row(const AcceptanceCall &call, int64_t row, int64_t thread) {
    const int64_t vocab = call.vocab, request = call.owners[row];
    const Scratch scratch(call.scratch, vocab, call.sampling, thread);
    describe_sampled(call.logits + row * vocab, vocab, call.sampling, request, scratch,
                     call.rows[row]);
    const Softmax &p = call.rows[row];
    call.is_nan[row] = is_nan(p);
    if (!call.one_hot || !call.one_hot[request]) return;
    if (p.token >= 0) {
        call.drawn[row] = p.token;
        return;
    }
    const auto probs = [&](int64_t i, int64_t end) { return probs_at(p, i, end); };
    const double all = sum_blocks(vocab, scratch.sums, probs);
    const int64_t position = row - call.first_rows[request];
    const double uniform =
        position == 0 ? call.final_uniforms[request]
                      : call.following_uniforms[request * call.following_width + position - 1];
    call.drawn[row] = sample_index(vocab, scratch.sums, all, uniform, probs);
}

}  // namespace
