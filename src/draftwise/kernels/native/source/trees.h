// Token trees: the likely next tokens at their nodes, and their verification by the law of
// draftwise.core.trees. Only the target's distributions at nodes that are reached are computed.

#pragma once

#include "sampling.h"

// Arguments of draftwise_accept_trees. A tree's rows of logits are those of its root and of its
// verified nodes. Nodes come after their parents.
struct TreeAcceptanceCall {
    const float *logits;               // [rows, vocab] with bias, penalties and masks applied
    const int64_t *first_rows;         // [trees] row of each root
    const int64_t *lengths;            // [trees] number of verified nodes
    const int64_t *tokens, *parents;   // [trees, width]; the parent -1 is the root
    const double *final_uniforms;      // [trees]; these two are null if all trees are greedy
    const double *following_uniforms;  // [trees, uniforms_width] final_uniforms at each depth
    char *scratch;                     // [threads] Scratch
    int64_t *nodes;                    // [trees, width] output: the accepted nodes
    int64_t *num_accepted, *next_tokens;  // [trees] output
    uint8_t *is_nan;                      // [trees] output: whether logits that were read are NaN
    Sampling sampling;
    int64_t num_trees, vocab, width, uniforms_width;
};

// Arguments of draftwise_describe_nodes.
struct NodeCall {
    const float *logits;      // [rows, vocab]
    const int64_t *requests;  // [rows] index into the sampling parameters
    int64_t *tokens;          // [rows, width] output: the most likely tokens
    float *probs;             // [rows, width] output: their probabilities without filters
    float *entropy;           // [rows] output: entropy in nats without filters; null if not wanted
    char *scratch;            // [threads] Scratch
    Sampling sampling;
    int64_t num_rows, vocab, width;
};

namespace {

constexpr int64_t ROOT = -1;

// Draws the next token of a tree's request at a node.
int64_t draw_at(const TreeAcceptanceCall &call, const Softmax &p, int64_t tree, int64_t depth,
                double *sums) {
    if (p.token >= 0) return p.token;
    const double uniform = depth ? call.following_uniforms[tree * call.uniforms_width + depth - 1]
                                 : call.final_uniforms[tree];
    const auto probs = [&](int64_t i, int64_t end) { return probs_at(p, i, end); };
    const double all = sum_blocks(p.size, sums, probs);
    return sample_index(p.size, sums, all, uniform, probs);
}

// Follows one tree from its root while the drawn token is a child.
void follow_tree(const TreeAcceptanceCall &call, int64_t tree, int64_t thread) {
    const Scratch scratch(call.scratch, call.vocab, call.sampling, thread);
    const int64_t *tokens = call.tokens + tree * call.width;
    const int64_t *parents = call.parents + tree * call.width;
    const int64_t length = call.lengths[tree];
    int64_t at = ROOT, depth = 0, token = 0;
    call.is_nan[tree] = 0;
    for (;;) {
        Softmax p;
        const int64_t row = call.first_rows[tree] + at + 1;
        describe_sampled(call.logits + row * call.vocab, call.vocab, call.sampling, tree, scratch,
                         p);
        if (is_nan(p)) {
            call.is_nan[tree] = 1;
            token = 0;
            break;
        }
        token = draw_at(call, p, tree, depth, scratch.sums);
        int64_t child = at + 1;
        while (child < length && !(parents[child] == at && tokens[child] == token)) ++child;
        if (child >= length) break;
        call.nodes[tree * call.width + depth++] = at = child;
    }
    call.num_accepted[tree] = depth;
    call.next_tokens[tree] = token;
}

// Finds the indices of the largest numbers, largest first, ties by index.
void largest_numbers(const float *numbers, int64_t size, int64_t count, int64_t *indices) {
    for (int64_t i = 0; i < count; ++i) indices[i] = -1;
    float least = MINUS_INFINITY;  // the smallest one of a full list
    int64_t found = 0;
    for (int64_t start = 0; start < size; start += LANES) {
        const Floats chunk = read_partial(numbers, start, size, MINUS_INFINITY);
        if (found == count && !any_of(chunk > least)) continue;
        for (int64_t i = start; i < min_int(start + LANES, size); ++i) {
            if (found == count && !(numbers[i] > least)) continue;
            int64_t place = found < count ? found++ : count - 1;
            for (; place > 0 && numbers[indices[place - 1]] < numbers[i]; --place)
                indices[place] = indices[place - 1];
            indices[place] = i;
            if (found == count) least = numbers[indices[count - 1]];
        }
    }
}

// Finds the likely next tokens at a node.
void describe_node(const NodeCall &call, int64_t row, int64_t thread) {
    const int64_t request = call.requests[row], vocab = call.vocab, width = call.width;
    const float *logits = call.logits + row * vocab;
    const Scratch scratch(call.scratch, vocab, call.sampling, thread);
    const Sampling unfiltered = {call.sampling.temperature, nullptr, nullptr, nullptr};
    fill(call.probs + row * width, width, 0.0f);
    for (int64_t i = 0; i < width; ++i) call.tokens[row * width + i] = 0;
    Softmax p;
    const float entropy = call.entropy
                              ? describe<true>(logits, vocab, unfiltered, request, scratch, p)
                              : describe<false>(logits, vocab, unfiltered, request, scratch, p);
    if (call.entropy) call.entropy[row] = is_nan(p) ? 0.0f : entropy;
    if (is_nan(p)) return;
    int64_t *tokens = call.tokens + row * width;
    largest_numbers(logits, vocab, width, tokens);
    for (int64_t i = 0; i < width; ++i) call.probs[row * width + i] = prob_of(p, tokens[i]);
}

}  // namespace
