// What the nodes of token trees get from a draft model's logits: their most likely next tokens, or
// children that are drawn without replacement.

#pragma once

#include "sampling.h"

// Arguments of draftwise_describe_nodes.
struct NodeCall {
    const float *logits;      // [rows, vocab]
    const int64_t *requests;  // [rows] index into the sampling parameters
    float *const *q;          // [rows] memory for the distribution that children are drawn from,
                              // [vocab]; null for greedy requests
    int64_t *tokens;          // [rows, width] output: the most likely tokens of greedy requests
    float *probs;             // [rows, width] output: their probabilities at temperature 1
    float *entropy;           // [rows] output: entropy in nats without filters; null if not wanted
    float *largest;           // [rows] output: largest probability of q; 0 for greedy requests
    int64_t *support;         // [rows] output: number of tokens of q
    char *scratch;            // [threads] Scratch
    Sampling sampling;
    int64_t num_rows, vocab, width;
};

// Arguments of draftwise_draw_children.
struct ChildrenCall {
    const float *const *q;   // [nodes] the distribution of each node, [vocab]
    const double *uniforms;  // [nodes, width]
    int64_t *children;       // [nodes, width] output: drawn tokens; -1 where q has no mass left
    char *scratch;           // [threads] Scratch
    int64_t num_nodes, vocab, width;
};

namespace {

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

// Number of positive numbers.
int64_t count_positive(const float *numbers, int64_t size) {
    Ints negative = {};
    for (int64_t i = 0; i < size; i += LANES)
        negative += read_partial(numbers, i, size, 0.0f) > 0.0f;
    int64_t count = 0;
    for (int lane = 0; lane < LANES; ++lane) count -= negative[lane];
    return count;
}

void describe_node(const NodeCall &call, int64_t row, int64_t thread) {
    const int64_t request = call.requests[row], vocab = call.vocab, width = call.width;
    const float *logits = call.logits + row * vocab;
    const Scratch scratch(call.scratch, vocab, call.sampling, thread);
    const bool is_drawn = call.q[row] != nullptr;
    call.largest[row] = 0.0f;
    call.support[row] = 0;
    fill(call.probs + row * width, width, 0.0f);
    for (int64_t i = 0; i < width; ++i) call.tokens[row * width + i] = 0;
    Softmax p;
    if (call.entropy || !is_drawn) {
        const Sampling unfiltered = {call.sampling.temperature, nullptr, nullptr, nullptr};
        const float entropy =
            call.entropy ? describe<true>(logits, vocab, unfiltered, request, scratch, p)
                         : describe<false>(logits, vocab, unfiltered, request, scratch, p);
        if (call.entropy) call.entropy[row] = is_nan(p) ? 0.0f : entropy;
    }
    if (!is_drawn) {
        if (is_nan(p)) return;
        int64_t *tokens = call.tokens + row * width;
        largest_numbers(logits, vocab, width, tokens);
        for (int64_t i = 0; i < width; ++i)
            call.probs[row * width + i] = prob_of(p, tokens[i]);
        return;
    }
    describe<false>(logits, vocab, call.sampling, request, scratch, p);
    if (is_nan(p)) return fill(call.q[row], vocab, 0.0f);
    write_probs(p, call.q[row]);
    call.largest[row] = p.factor;  // the most likely token has weight 1
    call.support[row] = count_positive(call.q[row], vocab);
}

// Draws children of one node without replacement.
void draw_children(const ChildrenCall &call, int64_t node, double *sums) {
    const float *q = call.q[node];
    int64_t *children = call.children + node * call.width;
    int64_t count = 0;
    const auto left = [&](int64_t i, int64_t end) {
        Floats weights = read_partial(q, i, end, 0.0f);
        for (int64_t child = 0; child < count; ++child)
            if (children[child] >= i && children[child] < i + LANES)
                weights[children[child] - i] = 0.0f;
        return weights;
    };
    double all = sum_blocks(call.vocab, sums, left);
    for (int64_t rank = 0; rank < call.width; ++rank) {
        if (!(all > 0)) {
            children[rank] = -1;
            continue;
        }
        const double uniform = call.uniforms[node * call.width + rank];
        children[rank] = sample_index(call.vocab, sums, all, uniform, left);
        count = rank + 1;
        // The sum of the block without the child, and of all blocks.
        const int64_t block = children[rank] / SUM_BLOCK, start = block * SUM_BLOCK;
        sum_blocks(min_int(SUM_BLOCK, call.vocab - start), sums + block,
                   [&](int64_t i, int64_t end) { return left(start + i, start + end); });
        all = 0;
        for (int64_t i = 0; i < num_blocks(call.vocab); ++i) all += sums[i];
    }
}

}  // namespace
