// Layers with a recurrent state: gated delta rule, Mamba, lightning attention and similar ones.
//
// A head has a state of keys x values numbers. A token changes it and reads from it:
//
//     state = decay * state
//     update = beta * (value - key^T state) with the delta rule, otherwise value
//     state = state + key update^T
//     out = query^T state
//
// The state in memory is that of a position, its base. Of the tokens since, which may be rejected,
// the decays, keys and updates are kept as rows. A pass first applies the rows of tokens that stay:
// the state moves to a later base, and is read and written once. It then continues with a copy in the
// cache. A row changes the state by the same operations as its token did, so the state has the same
// bits, however many tokens were drafted and accepted. Columns of a state do not depend on each other.

#pragma once

#include "matrix.h"
#include "rows.h"
#include "threads.h"

#include <algorithm>

// Tokens of one request.
struct RecurrenceSegment {
    int64_t slot, start, count;  // place of the request, position of the first token
    int64_t base;                // new base: the state advances to this position, at most to the end
};

// Arguments of draftwise_recur. A row is kept at the place of its position, less the base.
struct RecurrenceCall {
    float *states;                   // [slots, heads, keys, values]
    float *decays, *keys, *updates;  // [slots, max_rows, heads, decay_size / keys / values]
    int64_t *bases;                  // [slots]
    const RecurrenceSegment *segments;
    const float *decay;              // [tokens, heads, decay_size]
    const float *key, *query;        // [tokens, heads, keys]
    float *value;                    // [tokens, heads, values]; becomes the updates
    const float *beta;               // [tokens, heads]; null without the delta rule
    float *out;                      // [tokens, heads, values]
    int64_t num_segments, heads, num_keys, num_values;
    int64_t decay_size;              // 1, keys, or keys * values
    int64_t max_rows;
};

// Arguments of draftwise_convolve: a causal convolution of each channel. The newest inputs of a request
// are in a ring, that of position p at p % size.
struct ConvolutionCall {
    void *ring;                  // [slots, size, channels]
    const void *inputs;          // [tokens, channels], of the same type
    const float *weight, *bias;  // [width, channels], the newest input last; [channels] or null
    float *out;                  // [tokens, channels]
    const RecurrenceSegment *segments;
    int64_t num_segments, width, size;
    int64_t channels;
    int64_t is_bfloat16;
};

namespace {

constexpr int64_t RECURRENCE_VECTORS = 2;
constexpr int64_t MOST_STATE_KEYS = 512;

// A product that is rounded before something is added to it. The compiler would join some products
// with sums and others not.
template <class V>
INLINE V rounded(V product) {
#if defined(__AVX512F__)
    __asm__("" : "+v"(product));
#elif defined(__x86_64__)
    __asm__("" : "+x"(product));
#elif defined(__aarch64__)
    __asm__("" : "+w"(product));
#else
    __asm__("" : "+m"(product));
#endif
    return product;
}

INLINE void load(const float *from, float *to) { *to = *from; }
INLINE void store(const float *from, float *to) { *to = *from; }

// Columns of the state of a head: COUNT vectors of type V.
template <class V, int COUNT>
struct StateColumns {
    static constexpr int64_t WIDTH = sizeof(V) / sizeof(float);
    V numbers[MOST_STATE_KEYS][COUNT];
    int64_t num_keys, num_values, decay_size;

    void read_state(const float *state) {
        for (int64_t i = 0; i < num_keys; ++i)
            for (int j = 0; j < COUNT; ++j)
                load(state + i * num_values + j * WIDTH, &numbers[i][j]);
    }

    void write(float *state) const {
        for (int64_t i = 0; i < num_keys; ++i)
            for (int j = 0; j < COUNT; ++j)
                store(&numbers[i][j], state + i * num_values + j * WIDTH);
    }

    // What number i, j is multiplied with. The decays begin at the columns if there is one for each.
    V decay_of(const float *decays, int64_t i, int j) const {
        if (decay_size == 1) return V{} + decays[0];
        if (decay_size == num_keys) return V{} + decays[i];
        V decay;
        load(decays + i * num_values + j * WIDTH, &decay);
        return decay;
    }

    void apply(const float *decays, const float *key, const V (&update)[COUNT]) {
        for (int64_t i = 0; i < num_keys; ++i)
            for (int j = 0; j < COUNT; ++j)
                numbers[i][j] = rounded(numbers[i][j] * decay_of(decays, i, j)) +
                                rounded(key[i] * update[j]);
    }

    void multiplied(const float *with, V (&sums)[COUNT]) const {
        for (int j = 0; j < COUNT; ++j) sums[j] = V{};
        for (int64_t i = 0; i < num_keys; ++i)
            for (int j = 0; j < COUNT; ++j) sums[j] += rounded(with[i] * numbers[i][j]);
    }

    // key^T of the decayed state, without changing it.
    void expected(const float *decays, const float *key, V (&sums)[COUNT]) const {
        for (int j = 0; j < COUNT; ++j) sums[j] = V{};
        for (int64_t i = 0; i < num_keys; ++i)
            for (int j = 0; j < COUNT; ++j)
                sums[j] += rounded(key[i] * rounded(numbers[i][j] * decay_of(decays, i, j)));
    }
};

// Computes the columns from column on of a head of a segment, whose first token is token.
template <class V, int COUNT>
void recur_columns(const RecurrenceCall &call, const RecurrenceSegment &segment, int64_t token,
                   int64_t head, int64_t column) {
    constexpr int64_t WIDTH = sizeof(V) / sizeof(float);
    const int64_t heads = call.heads, keys = call.num_keys, values = call.num_values;
    const int64_t base = call.bases[segment.slot], end = segment.start + segment.count;
    const bool has_all_decays = call.decay_size != 1 && call.decay_size != keys;
    const int64_t decay_column = has_all_decays ? column : 0;
    float *state = call.states + ((segment.slot * heads + head) * keys) * values + column;
    static thread_local StateColumns<V, COUNT> columns;
    columns.num_keys = keys, columns.num_values = values, columns.decay_size = call.decay_size;
    columns.read_state(state);
    for (int64_t position = base; position < end; ++position) {
        if (position == segment.base && segment.base > base) columns.write(state);
        V update[COUNT];
        if (position < segment.start) {
            const int64_t row = (segment.slot * call.max_rows + position - base) * heads + head;
            for (int j = 0; j < COUNT; ++j)
                load(call.updates + row * values + column + j * WIDTH, &update[j]);
            columns.apply(call.decays + row * call.decay_size + decay_column,
                          call.keys + row * keys, update);
            continue;
        }
        const int64_t row = (token + position - segment.start) * heads + head;
        const float *decay = call.decay + row * call.decay_size + decay_column;
        const float *key = call.key + row * keys;
        float *value = call.value + row * values + column;
        for (int j = 0; j < COUNT; ++j) load(value + j * WIDTH, &update[j]);
        if (call.beta) {
            V expected[COUNT];
            columns.expected(decay, key, expected);
            for (int j = 0; j < COUNT; ++j)
                update[j] = rounded(call.beta[row] * (update[j] - expected[j]));
            for (int j = 0; j < COUNT; ++j) store(&update[j], value + j * WIDTH);
        }
        columns.apply(decay, key, update);
        V out[COUNT];
        columns.multiplied(call.query + row * keys, out);
        for (int j = 0; j < COUNT; ++j)
            store(&out[j], call.out + row * values + column + j * WIDTH);
    }
    if (segment.base == end && segment.base > base) columns.write(state);
}

// Keeps the rows from the new base on.
INLINE void keep_rows(const RecurrenceCall &call, const RecurrenceSegment &segment, int64_t token) {
    const int64_t base = call.bases[segment.slot], end = segment.start + segment.count;
    struct { float *kept; const float *now; int64_t size; } const parts[] = {
        {call.decays, call.decay, call.heads * call.decay_size},
        {call.keys, call.key, call.heads * call.num_keys},
        {call.updates, call.value, call.heads * call.num_values}};
    for (const auto &part : parts) {
        float *kept = part.kept + segment.slot * call.max_rows * part.size;
        const int64_t bytes = part.size * (int64_t)sizeof(float);
        for (int64_t position = segment.base; position < end; ++position) {
            float *to = kept + (position - segment.base) * part.size;
            const float *from = position < segment.start
                                    ? kept + (position - base) * part.size
                                    : part.now + (token + position - segment.start) * part.size;
            if (from != to) memmove(to, from, bytes);
        }
    }
    call.bases[segment.slot] = segment.base;
}

// Computes all tokens of a pass.
INLINE void recur(const RecurrenceCall &call, const Worker &worker) {
    constexpr int64_t WIDE = RECURRENCE_VECTORS * LANES;
    const int64_t wide = call.num_values / WIDE, rest = call.num_values % WIDE;
    const int64_t parts = wide + (rest != 0), items = call.num_segments * call.heads * parts;
    int64_t token = 0, segment = 0;
    for (int64_t item = worker.first(items); item < worker.end(items); ++item) {
        for (; segment < item / (call.heads * parts); ++segment)
            token += call.segments[segment].count;
        const int64_t head = item / parts % call.heads, part = item % parts;
        const RecurrenceSegment &own = call.segments[segment];
        if (part < wide) {
            recur_columns<Floats, RECURRENCE_VECTORS>(call, own, token, head, part * WIDE);
            continue;
        }
        int64_t column = wide * WIDE;
        for (; column + LANES <= call.num_values; column += LANES)
            recur_columns<Floats, 1>(call, own, token, head, column);
        for (; column < call.num_values; ++column)
            recur_columns<float, 1>(call, own, token, head, column);
    }
    worker.wait();
    token = 0;
    for (segment = 0; segment < call.num_segments; token += call.segments[segment++].count)
        if (segment % worker.count == worker.index) keep_rows(call, call.segments[segment], token);
}

// A thread's share of channels, in whole vectors but for the last.
struct Span {
    int64_t first, end;
};

INLINE Span channels_of(const Worker &worker, int64_t channels) {
    const int64_t blocks = (channels + LANES - 1) / LANES;
    return {worker.first(blocks) * LANES, std::min(worker.end(blocks) * LANES, channels)};
}

// Reads a vector, or the first numbers of it and zeros.
template <class T>
INLINE Floats read_first(const T *from, int64_t size) {
    if (size >= LANES) return read(from);
    T padded[LANES] = {};
    memcpy(padded, from, size * sizeof *from);
    return read(padded);
}

// Computes a thread's channels of all tokens, and keeps their inputs.
template <class T>
INLINE void convolve(const ConvolutionCall &call, const Worker &worker) {
    const int64_t channels = call.channels;
    const auto [first, end] = channels_of(worker, channels);
    const T *inputs = (const T *)call.inputs;
    float *out = call.out;
    for (int64_t at = 0; at < call.num_segments; ++at) {
        const RecurrenceSegment &segment = call.segments[at];
        T *ring = (T *)call.ring + segment.slot * call.size * channels;
        for (int64_t token = 0; token < segment.count; ++token, out += channels) {
            const int64_t oldest = segment.start + token - call.width + 1;
            for (int64_t channel = first; channel < end; channel += LANES) {
                const int64_t size = end - channel;
                Floats sum = {};
                if (call.bias) sum = read_first(call.bias + channel, size);
                for (int64_t tap = oldest < 0 ? -oldest : 0; tap < call.width; ++tap) {
                    const int64_t position = oldest + tap;
                    const T *row = position < segment.start
                                       ? ring + position % call.size * channels
                                       : inputs + (position - segment.start) * channels;
                    const Floats weight = read_first(call.weight + tap * channels + channel, size);
                    sum += rounded(read_first(row + channel, size) * weight);
                }
                write_partial(sum, out, channel, end);
            }
        }
        const int64_t kept = std::min(segment.count, call.size);
        for (int64_t token = segment.count - kept; token < segment.count; ++token)
            memcpy(ring + (segment.start + token) % call.size * channels + first,
                   inputs + token * channels + first, (end - first) * sizeof(T));
        inputs += segment.count * channels;
    }
}

}  // namespace
