// Verification of token trees by the two laws of draftwise.core.trees. Each tree is followed from its
// root. Only the target's distributions at nodes that are reached are computed.

#pragma once

#include <cfloat>

#include "sampling.h"

// Arguments of draftwise_accept_trees. A tree's rows of logits are those of its root and of its
// verified nodes. Nodes come after their parents, and children in the order in which they are tested.
struct TreeAcceptanceCall {
    const float *logits;             // [rows, vocab] with bias, penalties and masks applied
    const int64_t *first_rows;       // [trees] row of each root
    const int64_t *lengths;          // [trees] number of verified nodes
    const int64_t *tokens, *parents; // [trees, width]; the parent -1 is the root
    const uint8_t *is_drawn;         // [trees] whether the draft drew the children; null for no tree
    const float *const *proposals;   // [trees, width] q of each drawn node, [own_vocab]; null for a
                                     // node that is proposed with certainty
    const int64_t *ids;              // [own_vocab] tokens of q; null if they are 0, 1, 2, …
    const float *accept_uniforms;    // [trees, uniforms_width], one for each node
    const double *final_uniforms;    // [trees]; these two are null if all trees are greedy
    const double *following_uniforms;  // [trees, uniforms_width] final_uniforms at each depth
    char *scratch;                     // [threads] of draftwise_tree_scratch bytes
    int64_t *nodes;                    // [trees, width] output: the accepted nodes
    int64_t *num_accepted, *next_tokens;  // [trees] output
    uint8_t *is_nan;                      // [trees] output: whether logits that were read are NaN
    Sampling sampling;
    int64_t num_trees, vocab, own_vocab, width, uniforms_width;
};

namespace {

constexpr int64_t ROOT = -1, NO_NODE = -1;

// Bytes of one thread's memory: a Scratch, and two distributions.
INLINE int64_t tree_scratch_bytes(int64_t vocab, bool has_filters) {
    return Scratch::bytes(vocab, has_filters) + 2 * round_up(vocab, LANES) * (int64_t)sizeof(float);
}

// The reciprocal of the sum of weights. If the sum is tiny, it is made larger first, and all weights
// with it, so that the reciprocal is finite.
INLINE float reciprocal_of(double sum, float *weights, int64_t size) {
    constexpr double TINY = 0x1p-60;
    constexpr float FACTOR = 0x1p80f;
    if (sum < TINY) {
        for (int64_t i = 0; i < size; i += LANES)
            write_partial(read_partial(weights, i, size, 0.0f) * FACTOR, weights, i, size);
        sum *= FACTOR;
    }
    return (float)(1.0 / sum);
}

// What the children of one node have left of the target's p.
struct LeftOfTarget {
    const Softmax &p;
    float *memory;             // [vocab]
    bool is_written = false;   // whether it is memory * scale, and no longer p
    float scale = 1.0f;

    INLINE_MEMBER Floats operator()(int64_t i, int64_t end) const {
        return is_written ? read_partial(memory, i, end, 0.0f) * scale : probs_at(p, i, end);
    }

    float prob_of(int64_t token) const {
        return is_written ? memory[token] * scale : ::prob_of(p, token);
    }

    // Replaces it by norm(max(it - removed, 0)). removed_at(i, end) returns a vector of what is
    // removed.
    template <class RemovedAt>
    void remove(const RemovedAt &removed_at, double *sums) {
        const double mass = sum_blocks(p.size, sums, [&](int64_t i, int64_t end) {
            const Floats rest = (*this)(i, end) - removed_at(i, end), zero = {};
            const Floats positive = rest > 0.0f ? rest : zero;
            write_partial(positive, memory, i, end);
            return positive;
        });
        // Without mass, p equals the proposal up to rounding, and p is the right distribution.
        is_written = mass > 0;
        scale = is_written ? reciprocal_of(mass, memory, p.size) : 1.0f;
    }

    int64_t draw(double uniform, double *sums) const {
        if (!is_written && p.token >= 0) return p.token;
        const double all = sum_blocks(p.size, sums, *this);
        return sample_index(p.size, sums, all, uniform, *this);
    }
};

// What the draft's q has left beside the children of one node that were tested.
struct LeftOfDraft {
    const TreeAcceptanceCall &call;
    float *memory;               // [vocab]
    const float *from = nullptr; // the distribution, before anything was removed
    const float *q = nullptr;    // [vocab], times scale
    float scale = 1.0f;

    // Starts with the distribution of a node's first drawn child.
    void begin(const float *proposal) {
        if (from == proposal) return;
        from = q = proposal;
        scale = 1.0f;
        if (!call.ids) return;
        fill(memory, call.vocab, 0.0f);
        for (int64_t i = 0; i < call.own_vocab; ++i) memory[call.ids[i]] = proposal[i];
        q = memory;
    }

    INLINE_MEMBER Floats operator()(int64_t i, int64_t end) const {
        return read_partial(q, i, end, 0.0f) * scale;
    }

    float prob_of(int64_t token) const { return q[token] * scale; }

    void remove(int64_t token) {
        if (q != memory) memcpy(memory, q, call.vocab * sizeof *q);
        q = memory;
        memory[token] = 0.0f;
        const double mass = sum_of(memory, call.vocab);
        scale = mass > 0 ? reciprocal_of(mass, memory, call.vocab) : 0.0f;
    }
};

// Follows one tree.
struct TreeWalk {
    const TreeAcceptanceCall &call;
    int64_t tree;
    Scratch scratch;
    float *left_of_target, *left_of_draft;  // [vocab] memory for a node's children
    int64_t length;
    const int64_t *tokens, *parents;

    // memory has tree_scratch_bytes bytes.
    TreeWalk(const TreeAcceptanceCall &call, int64_t tree, char *memory)
        : call(call),
          tree(tree),
          scratch(memory, call.vocab, call.sampling, 0),
          length(call.lengths[tree]),
          tokens(call.tokens + tree * call.width),
          parents(call.parents + tree * call.width) {
        left_of_target = (float *)(memory + Scratch::bytes(call.vocab,
                                                           Scratch::has_filters(call.sampling)));
        left_of_draft = left_of_target + round_up(call.vocab, LANES);
    }

    // The first law: returns the child that is the token drawn from p, and stores the token.
    int64_t follow_target(const Softmax &p, int64_t at, int64_t depth, int64_t &token) {
        double uniform = 0;
        if (call.final_uniforms)
            uniform = depth ? call.following_uniforms[tree * call.uniforms_width + depth - 1]
                            : call.final_uniforms[tree];
        token = LeftOfTarget{p, left_of_target}.draw(uniform, scratch.sums);
        for (int64_t node = at + 1; node < length; ++node)
            if (parents[node] == at && tokens[node] == token) return node;
        return NO_NODE;
    }

    // The second law: returns the first child that is accepted. Without one, stores the token that is
    // drawn from what is left of p.
    int64_t test_children(const Softmax &p, int64_t at, int64_t &token) {
        LeftOfTarget left{p, left_of_target};
        LeftOfDraft rest{call, left_of_draft};
        for (int64_t node = at + 1; node < length; ++node) {
            if (parents[node] != at) continue;
            const float *proposal = call.proposals[tree * call.width + node];
            const int64_t child = tokens[node];
            float proposed = 1.0f;
            if (proposal) {
                rest.begin(proposal);
                proposed = std::max(rest.prob_of(child), FLT_MIN);
            }
            if (call.accept_uniforms[tree * call.uniforms_width + node] <
                left.prob_of(child) / proposed)
                return node;
            if (proposal) {
                left.remove(rest, scratch.sums);
                rest.remove(child);
            } else {
                const auto certain = [&](int64_t i, int64_t) {
                    const Floats zero = {};
                    return lane_numbers() == (int32_t)(child - i) ? zero + 1.0f : zero;
                };
                left.remove(certain, scratch.sums);
            }
        }
        token = left.draw(call.final_uniforms[tree], scratch.sums);
        return NO_NODE;
    }

    void run() {
        const bool is_drawn = call.is_drawn && call.is_drawn[tree];
        int64_t at = ROOT, depth = 0, token = 0;
        call.is_nan[tree] = 0;
        for (;;) {
            Softmax p;
            const int64_t row = call.first_rows[tree] + at + 1;
            describe_sampled(call.logits + row * call.vocab, call.vocab, call.sampling, tree,
                             scratch, p);
            if (is_nan(p)) {
                call.is_nan[tree] = 1;
                token = 0;
                break;
            }
            const int64_t child =
                is_drawn ? test_children(p, at, token) : follow_target(p, at, depth, token);
            if (child == NO_NODE) break;
            call.nodes[tree * call.width + depth++] = at = child;
        }
        call.num_accepted[tree] = depth;
        call.next_tokens[tree] = token;
    }
};

}  // namespace
