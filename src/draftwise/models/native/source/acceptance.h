// The acceptance law of draftwise.core.rejection, request by request: the target's distributions,
// which drafted tokens are kept, and what is said instead, while all of it is in the cache.

#pragma once

#include <cmath>

#include "sampling.h"

struct AcceptanceCall {
    const float *logits;            // [rows, vocab]: of each request, one more than it verifies
    const int64_t *first_rows;      // [requests]
    const int64_t *lengths;         // [requests] how many tokens are verified
    const int64_t *tokens;          // [requests], drafted; token_stride apart
    const float *proposals;         // [requests], [positions, vocab]; proposal_stride apart; null: one-hot
    const float *accept_uniforms;   // [requests, uniforms_width]
    const double *final_uniforms;   // [requests]
    const float *lenience;          // [requests], or null for 1
    float *p;                       // [rows, vocab], memory
    int32_t *order;                 // [threads, vocab], or null if nobody uses top-k or top-p
    int64_t *num_accepted, *next_tokens;  // [requests]
    float *acceptance, *prefix_acceptance_prob;  // [requests, width], zeros before
    uint8_t *is_nan;                      // [rows]
    const float *least, *most;            // [requests, width] what is proposed, or null for all
    Sampling sampling;
    int64_t num_requests, vocab, width, token_stride, proposal_stride, uniforms_width, by_block;
};

namespace {

// What a position proposes: q where it lies between two bounds. Without q it is one token with
// certainty, or nothing if that token is negative.
struct Proposal {
    const float *q;
    float least, most;
    int64_t token;
};

INLINE Floats proposed(const Proposal &proposal, int64_t i, int64_t end) {
    const Floats q = read_within(proposal.q, i, end, 0.0f), zero = {};
    return ((q >= proposal.least) & (q <= proposal.most)) ? q : zero;
}

INLINE Proposal proposal_at(const AcceptanceCall &call, int64_t request, int64_t i) {
    if (!call.proposals) {
        const bool verified = i < call.lengths[request];
        return {nullptr, 0.0f, INFINITY, verified ? call.tokens[request * call.token_stride + i] : -1};
    }
    const float *q = call.proposals + request * call.proposal_stride + i * call.vocab;
    const int64_t place = request * call.width + i;
    if (!call.least || i >= call.width) return {q, 0.0f, INFINITY, -1};
    return {q, call.least[place], call.most[place], -1};
}

// max(p * scale - q, 0) with scale <= 1, and its sum; out may be null for nowhere.
INLINE double residual(float *p, float scale, Proposal q, int64_t size, float *out) {
    double sum = 0;
    // Nothing remains of a token that is proposed with certainty.
    const float certain = q.token < 0 ? 0.0f : p[q.token];
    if (q.token >= 0) p[q.token] = 0.0f;
    by_pieces(size, [&](int64_t start, int64_t end) {
        Floats part = {};
        const Floats zero = {};
        for (int64_t i = start; i < end; i += LANES) {
            Floats rest = read_within(p, i, end, 0.0f) * scale;
            if (q.q) rest -= proposed(q, i, end);
            rest = rest > 0.0f ? rest : zero;
            part += rest;
            if (out) write_within(rest, out, i, end);
        }
        sum += total(part);
    });
    if (q.token >= 0 && out != p) p[q.token] = certain;
    return sum;
}

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
            soften(logits, vocab, call.sampling, request, row, order);
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

    // By token: how many are kept one after the other. By block: p_i of Sun et al. 2024.
    int64_t kept = 0;
    bool keeps = true;
    float joint = 1.0f, product = 1.0f;
    for (int64_t i = 0; i < length; ++i) {
        const float ratio = p[i * vocab + tokens[i]] / (q ? q[i * vocab + tokens[i]] : 1.0f);
        acceptance[i] = ratio == ratio ? std::min(ratio, 1.0f) : 0.0f;
        joint = std::min(joint * ratio, 1.0f);
        const float limit = ratio / lenience;
        product *= std::min(limit, 1.0f);
        const float here = by_block ? joint : product;
        prefix_acceptance_prob[i] = here == here ? here : 0.0f;
        keeps = keeps && uniforms[i] < limit;
        kept += keeps;
    }
    float scale = 1.0f;
    if (by_block) {
        // The longest part that is kept as a whole; h_i of algorithm 2.
        for (kept = length; kept > 0; --kept) {
            const float running = prefix_acceptance_prob[kept - 1];
            const Proposal next = proposal_at(call, request, kept);
            const double rest = residual(p + kept * vocab, running, next, vocab, nullptr);
            const double keep = rest / (rest + (1.0 - running));
            if (uniforms[kept - 1] < keep) break;
        }
        scale = kept ? prefix_acceptance_prob[kept - 1] : 1.0f;
    }
    float *last = p + kept * vocab;
    const Proposal next = proposal_at(call, request, kept);
    // p = q' up to rounding leaves nothing; then p itself is the right distribution.
    const bool proposes = next.q || next.token >= 0;
    if (proposes && residual(last, scale, next, vocab, nullptr) > 0)
        residual(last, scale, next, vocab, last);
    call.num_accepted[request] = kept;
    call.next_tokens[request] = drawn(last, vocab, call.final_uniforms[request]);
}

}  // namespace
