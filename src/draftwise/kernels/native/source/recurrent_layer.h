// Layers with a recurrence in place of attention, within a pass of decoder.h: gated delta nets (Yang
// et al. 2024, arXiv 2412.06464), Mamba-2 (Dao and Gu 2024, arXiv 2405.21060) and short convolutions.
//
// A token's row is multiplied with the layer's projections. A convolution, a recurrence and a gate
// make the row of it that is multiplied with the output projection. A thread computes some channels
// of the convolution, then some heads of the recurrence, then whole rows.

#pragma once

#include "experts.h"
#include "norm.h"
#include "recurrence.h"
#include "rows.h"

// What the products of a token with the projections are, one after the other. The convolution reads
// what is in brackets.
enum RecurrentKind {
    DELTA_NET = 0,          // [queries, keys, values], gates, betas, steps
    MAMBA2 = 1,             // gates, [values, keys, queries], steps
    SHORT_CONVOLUTION = 2,  // factors of the inputs, gates, inputs; [factors * inputs]
};

// A layer. Keys and queries belong to groups of consecutive heads.
struct RecurrentLayer {
    const float *taps, *tap_bias;   // [width, channels], the newest input last; [channels] or null
    const float *step_bias, *rate;  // [heads] a state decays by exp(-rate * softplus(step + bias))
    const float *skip;              // [heads] factors of the values in the output, or null
    const float *norm;              // [heads * values]
    int64_t kind, width, channels;
    int64_t heads, groups, keys, values;  // 0 for short convolutions
    int64_t norm_size;                    // numbers of a row that are normalised together
    double least_step, most_step;         // limits of softplus(step + bias) of Mamba-2
};

// Where a cache has the states and the convolution inputs of a layer; see RecurrenceCall and
// ConvolutionCall.
struct RecurrentMemory {
    float *states, *decays, *keys, *updates;  // null for short convolutions
    int64_t *bases;
    void *ring;
    int64_t ring_size;
};

// What all layers of a cache share.
struct RecurrentRows {
    const int64_t *final_lengths;  // [slots] no token before this position will be rejected
    int64_t most, kept;            // rows of a slot, and those that are kept of more tokens
};

namespace {

constexpr float UNIT_EPSILON = 1e-6f;  // added to the squares of keys and queries of delta nets

// Numbers of a token after the recurrence, and its products with the projections.
INLINE int64_t recurrent_inner(const RecurrentLayer &layer) {
    return layer.heads ? layer.heads * layer.values : layer.channels;
}

INLINE int64_t recurrent_products(const RecurrentLayer &layer) {
    if (layer.kind == SHORT_CONVOLUTION) return 3 * layer.channels;
    const int64_t steps = layer.kind == DELTA_NET ? 2 * layer.heads : layer.heads;
    return layer.channels + recurrent_inner(layer) + steps;
}

// Index of the first gate among the products.
INLINE int64_t first_gate(const RecurrentLayer &layer) {
    return layer.kind == MAMBA2 ? 0 : layer.channels;
}

// Base of a state after a pass. RecurrentCache.plan has the same rule.
INLINE int64_t new_base(const RecurrentRows &rows, int64_t base, int64_t slot, int64_t start,
                        int64_t count) {
    const int64_t final_length = std::max(base, rows.final_lengths[slot]);
    const int64_t moved = std::min(final_length, start), end = start + count;
    return end - moved > rows.most ? end - rows.kept : moved;
}

// The largest layer of a model.
struct RecurrentSizes {
    int64_t channels = 0, heads = 0, keys = 0, values = 0;  // the last two of all heads together
    int64_t inner = 0, products = 0;

    void include(const RecurrentLayer &layer) {
        channels = std::max(channels, layer.channels);
        heads = std::max(heads, layer.heads);
        keys = std::max(keys, layer.heads * layer.keys);
        values = std::max(values, layer.heads * layer.values);
        inner = std::max(inner, recurrent_inner(layer));
        products = std::max(products, recurrent_products(layer));
    }
};

// Intermediate results of all layers of a pass. T is the type of convolution inputs.
template <class T>
struct RecurrentBuffers {
    T *inputs;                                   // [tokens, channels]
    float *mixed;                                // [tokens, channels]
    float *decay, *beta, *key, *query, *value, *out;  // as in RecurrenceCall
    RecurrenceSegment *segments;

    // Takes memory with allocate(pointer, numbers).
    template <class Allocate>
    void take(const RecurrentSizes &sizes, int64_t num_tokens, const Allocate &allocate) {
        allocate(inputs, num_tokens * sizes.channels);
        allocate(mixed, num_tokens * sizes.channels);
        for (float **each : {&decay, &beta}) allocate(*each, num_tokens * sizes.heads);
        for (float **each : {&key, &query}) allocate(*each, num_tokens * sizes.keys);
        for (float **each : {&value, &out}) allocate(*each, num_tokens * sizes.values);
        allocate(segments, num_tokens);
    }
};

// The recurrence of one layer in a pass, as a thread sees it.
template <class T>
struct RecurrentWork {
    const RecurrentLayer &layer;
    const RecurrentMemory &memory;
    const RecurrentRows &rows;
    const RecurrentBuffers<T> &buffers;
    const int64_t *segments;  // [segments, 4] fields of Segment
    int64_t num_segments, num_tokens;
    const float *products;    // [tokens, stride]
    int64_t stride;
    const Worker &worker;

    // Computes all tokens. Then gated_row may be called for any of them.
    void run() const {
        convolve_channels();
        worker.wait();
        if (!layer.heads) return;
        const int64_t items = num_tokens * layer.heads;
        for (int64_t i = worker.first(items); i < worker.end(items); ++i) {
            if (layer.kind == DELTA_NET) prepare_delta(i / layer.heads, i % layer.heads);
            else prepare_scan(i / layer.heads, i % layer.heads);
        }
        if (worker.index == 0) plan_segments();
        worker.wait();
        RecurrenceCall call = {};
        call.states = memory.states;
        call.decays = memory.decays, call.keys = memory.keys, call.updates = memory.updates;
        call.bases = memory.bases;
        call.segments = buffers.segments;
        call.decay = buffers.decay, call.key = buffers.key, call.query = buffers.query;
        call.value = buffers.value, call.out = buffers.out;
        call.beta = layer.kind == DELTA_NET ? buffers.beta : nullptr;
        call.num_segments = num_segments, call.heads = layer.heads;
        call.num_keys = layer.keys, call.num_values = layer.values;
        call.decay_size = 1, call.max_rows = rows.most;
        recur(call, worker);
    }

    // Writes the row of a token that is multiplied with the output projection.
    void gated_row(int64_t token, double epsilon, float *to) const {
        const int64_t inner = recurrent_inner(layer), size = layer.norm_size;
        const float *gates = products + token * stride + first_gate(layer);
        const float *mixed = buffers.mixed + token * layer.channels;
        if (layer.kind == SHORT_CONVOLUTION) {
            for (int64_t i = 0; i < inner; i += LANES)
                write_partial(read_partial(gates, i, inner, 0) * read_partial(mixed, i, inner, 0),
                              to, i, inner);
            return;
        }
        memcpy(to, buffers.out + token * inner, inner * sizeof *to);
        for (int64_t head = 0; layer.skip && head < layer.heads; ++head)
            for (int64_t i = head * layer.values; i < (head + 1) * layer.values; ++i)
                to[i] += layer.skip[head] * mixed[i];
        if (layer.kind == MAMBA2) gate(gates, inner, to);
        for (int64_t i = 0; i < inner; i += size)
            normalise(to + i, layer.norm + i, size, size, epsilon, to + i);
        if (layer.kind == DELTA_NET) gate(gates, inner, to);
    }

private:
    // Multiplies numbers with the SiLU of gates.
    static void gate(const float *gates, int64_t size, float *to) {
        for (int64_t i = 0; i < size; i += LANES)
            write_partial(read_partial(to, i, size, 0) * silu(read_partial(gates, i, size, 0)), to,
                          i, size);
    }

    void convolve_channels() const {
        const int64_t channels = layer.channels;
        const Span own = channels_of(worker, channels);
        for (int64_t token = 0; token < num_tokens; ++token) {
            const float *from = products + token * stride;
            T *to = buffers.inputs + token * channels;
            if (layer.kind == SHORT_CONVOLUTION) {
                float *product = buffers.mixed + token * channels;
                for (int64_t i = own.first; i < own.end; ++i)
                    product[i] = from[i] * from[2 * channels + i];
                from = product;
            } else if (layer.kind == MAMBA2) {
                from += recurrent_inner(layer);
            }
            convert(from + own.first, own.end - own.first, to + own.first);
        }
        ConvolutionCall call = {};
        call.ring = memory.ring;
        call.inputs = buffers.inputs;
        call.weight = layer.taps, call.bias = layer.tap_bias;
        call.out = buffers.mixed;
        // The fields that a convolution reads are the same.
        call.segments = (const RecurrenceSegment *)segments;
        call.num_segments = num_segments, call.width = layer.width;
        call.size = memory.ring_size, call.channels = channels;
        convolve<T>(call, worker);
        if (layer.kind == SHORT_CONVOLUTION) return;
        for (int64_t token = 0; token < num_tokens; ++token) {
            float *row = buffers.mixed + token * channels;
            for (int64_t i = own.first; i < own.end; i += LANES)
                write_partial(silu(read_partial(row, i, own.end, 0)), row, i, own.end);
        }
    }

    void plan_segments() const {
        for (int64_t i = 0; i < num_segments; ++i) {
            const int64_t *fields = segments + 4 * i;
            buffers.segments[i] = {fields[0], fields[1], fields[2],
                                   new_base(rows, memory.bases[fields[0]], fields[0], fields[1],
                                            fields[2])};
        }
    }

    static float softplus(float x) { return x > 20.0f ? x : __builtin_log1pf(__builtin_expf(x)); }

    // Multiplies a vector with factor and divides it by its length.
    static void put_unit(const float *from, int64_t size, float factor, float *to) {
        Floats squares = {};
        for (int64_t i = 0; i < size; i += LANES) {
            const Floats v = read_partial(from, i, size, 0);
            squares += v * v;
        }
        const float scale = factor / __builtin_sqrtf(horizontal_sum(squares) + UNIT_EPSILON);
        for (int64_t i = 0; i < size; i += LANES)
            write_partial(read_partial(from, i, size, 0) * scale, to, i, size);
    }

    void prepare_delta(int64_t token, int64_t head) const {
        const int64_t keys = layer.keys, values = layer.values, heads = layer.heads;
        const int64_t row = token * heads + head, group = head / (heads / layer.groups);
        const float *mixed = buffers.mixed + token * layer.channels;
        put_unit(mixed + group * keys, keys, 1.0f / __builtin_sqrtf((float)keys),
                 buffers.query + row * keys);
        put_unit(mixed + (layer.groups + group) * keys, keys, 1.0f, buffers.key + row * keys);
        memcpy(buffers.value + row * values, mixed + 2 * layer.groups * keys + head * values,
               values * sizeof(float));
        const float *betas = products + token * stride + layer.channels + heads * values;
        const float step = softplus(betas[heads + head] + layer.step_bias[head]);
        buffers.beta[row] = sigmoid(betas[head]);
        buffers.decay[row] = __builtin_expf(-layer.rate[head] * step);
    }

    void prepare_scan(int64_t token, int64_t head) const {
        const int64_t keys = layer.keys, values = layer.values, heads = layer.heads;
        const int64_t row = token * heads + head, group = head / (heads / layer.groups);
        const int64_t inner = heads * values;
        const float *mixed = buffers.mixed + token * layer.channels;
        const float *steps = products + token * stride + inner + layer.channels;
        float step = softplus(steps[head] + layer.step_bias[head]);
        step = std::min(std::max(step, (float)layer.least_step), (float)layer.most_step);
        buffers.decay[row] = __builtin_expf(-layer.rate[head] * step);
        const float *own_keys = mixed + inner + group * keys;
        memcpy(buffers.key + row * keys, own_keys, keys * sizeof(float));
        memcpy(buffers.query + row * keys, own_keys + layer.groups * keys, keys * sizeof(float));
        const float *from = mixed + head * values;
        float *to = buffers.value + row * values;
        for (int64_t i = 0; i < values; i += LANES)
            write_partial(read_partial(from, i, values, 0) * step, to, i, values);
    }
};

}  // namespace
