// A whole pass of a Llama over packed tokens, on the CPU.
//
// All threads run through the layers together: each computes its share of every product's columns
// and of the rows in between, and they meet at a barrier where one needs what the others made. A
// step of a small draft is over in the time that a few calls of a framework take. The residual is
// float32 throughout. Every row is computed in the same order whatever else is in the pass, as long
// as its attention is split alike.

#pragma once

#include "attention_tasks.h"
#include "matrix.h"
#include "narrow.h"
#include "threads.h"
#include "tiles.h"

#include <algorithm>

// Weights of one layer; matrices in panels, gate and up interleaved vector by vector.
struct DecoderLayer {
    const float *attention_norm, *mlp_norm;  // [hidden]
    const void *qkv, *out, *gate_up, *down;
    const float *qkv_bias;  // filled up with zeros to whole panels, or null
};

struct DecoderModel {
    const void *embedding;         // [vocab, hidden]
    const float *norm;             // [hidden]
    const void *head;              // in panels
    const DecoderLayer *layers;
    int64_t num_layers, hidden, heads, kv_heads, head_size, intermediate, vocab;
    int64_t is_bfloat16, bits;  // bits: of a stored weight, fewer than its numbers have in narrow.h
    double epsilon, scale;
};

struct DecoderCache {
    void *const *keys, *const *values;  // of each layer, as in AttentionCall
    const float *cosines, *sines;       // [capacity, head_size / 2]
    int64_t capacity;
};

struct DecoderCall {
    const DecoderModel *model;
    const DecoderCache *cache;
    const Threads *threads;
    const int64_t *ids;            // [tokens]
    const int64_t *segments;       // [segments, 4]: row, start, count, first token
    const int64_t *logit_tokens;   // [logits]: whose logits are wanted
    float *logits;                 // [logits, vocab]
    char *memory;                  // decoder_memory bytes, aligned to 64
    int64_t num_tokens, num_segments, num_logits, largest_segment;
};

namespace {

constexpr int TASKS_PER_THREAD = 8;  // threads that take tasks one by one end at about the same time
constexpr int64_t PIECES_PER_THREAD = 8, LEAST_PANELS = 4;  // that are taken at once

// Where a pass keeps what it computes.
template <class W>
struct Buffers {
    typedef typename W::Stored T;
    typedef typename W::Number Number;
    static constexpr bool CONVERTS = sizeof(T) != sizeof(Number);
    static constexpr int64_t NUMBERS_OF_LINE = CACHE_LINE / sizeof(int64_t);

    int64_t hidden_stride, normed_stride, qkv_stride, attended_size, kv_size, inner_stride;
    float *hidden, *qkv;
    Number *normed, *inputs, *inner;
    T *queries, *keys, *values, *attended;
    float *scratch;
    char *expanded;  // what each thread writes out
    int64_t *taken;  // [2, threads, a line]: see Pass::product
    int64_t scratch_size, expanded_bytes, bytes;

    Buffers(const DecoderModel &model, char *memory, int64_t num_tokens, int64_t largest_segment,
            int64_t num_threads) {
        bytes = 0;
        const auto take = [&](auto *&pointer, int64_t numbers) {
            pointer = (decltype(&*pointer))(memory + bytes);
            bytes += rounded_up(numbers * (int64_t)sizeof *pointer, CACHE_LINE);
        };
        attended_size = model.heads * model.head_size;
        kv_size = model.kv_heads * model.head_size;
        hidden_stride = rounded_up(model.hidden, PANEL);
        normed_stride = rounded_up(model.hidden, W::DEPTH);
        qkv_stride = rounded_up(attended_size + 2 * kv_size, PANEL);
        inner_stride = rounded_up(model.intermediate, LANES);
        take(hidden, num_tokens * hidden_stride);
        take(qkv, num_tokens * qkv_stride);
        take(normed, num_tokens * normed_stride);
        take(inner, num_tokens * inner_stride);
        take(queries, num_tokens * attended_size);
        take(keys, num_tokens * kv_size);
        take(values, num_tokens * kv_size);
        take(attended, num_tokens * attended_size);
        take(inputs, CONVERTS ? num_tokens * attended_size : 0);
        scratch_size = attention_scratch_size(largest_segment, model.heads, model.kv_heads,
                                              model.kv_heads, model.head_size, model.head_size);
        take(scratch, num_threads * scratch_size);
        const int64_t deepest = std::max({model.hidden, attended_size, model.intermediate});
        expanded_bytes = narrow_memory(W(), deepest);
        take(expanded, num_threads * expanded_bytes);
        take(taken, 2 * num_threads * NUMBERS_OF_LINE);
    }
};

template <class From, class To>
INLINE void convert(const From *from, int64_t size, To *to) {
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES) write(read(from + i), to + i);
    if (i < size) {
        From some[LANES] = {};
        To converted[LANES];
        memcpy(some, from + i, (size - i) * sizeof *from);
        write(read(some), converted);
        memcpy(to + i, converted, (size - i) * sizeof *to);
    }
}

// Root mean square normalisation (Zhang and Sennrich 2019), equation 4.
template <class Number>
INLINE void normalise(const float *x, const float *weight, int64_t size, int64_t padded,
                      double epsilon, Number *out) {
    Floats squares = {};
    int64_t whole = size / LANES * LANES;
    for (int64_t i = 0; i < whole; i += LANES) squares += read(x + i) * read(x + i);
    float sum = total(squares);
    for (int64_t i = whole; i < size; ++i) sum += x[i] * x[i];
    const float factor = 1.0f / __builtin_sqrtf(sum / (float)size + (float)epsilon);
    for (int64_t i = 0; i < whole; i += LANES)
        write(read(x + i) * factor * read(weight + i), out + i);
    for (int64_t i = whole; i < padded; ++i) {
        const float value = i < size ? x[i] * factor * weight[i] : 0.0f;
        convert(&value, 1, out + i);
    }
}

// Rotary position embedding (Su et al. 2021) of one head, halves layout.
template <class T>
INLINE void rotate(const float *x, const float *cosines, const float *sines, int64_t half, T *out) {
    int64_t i = 0;
    for (; i + LANES <= half; i += LANES) {
        const Floats a = read(x + i), b = read(x + half + i);
        const Floats cosine = read(cosines + i), sine = read(sines + i);
        write(a * cosine - b * sine, out + i);
        write(b * cosine + a * sine, out + half + i);
    }
    for (; i < half; ++i) {
        const float a = x[i], b = x[half + i];
        const float left = a * cosines[i] - b * sines[i], right = b * cosines[i] + a * sines[i];
        convert(&left, 1, out + i);
        convert(&right, 1, out + half + i);
    }
}

INLINE Floats silu(Floats x) {
    Floats exponent = x * -1.4426950408889634f;
    const Floats most = Floats{} + 126.0f;
    exponent = exponent > most ? most : exponent;
    return x / (1.0f + power_of_two(exponent));
}

template <class W>
struct Pass {
    typedef typename W::Stored T;

    const DecoderModel &model;
    const DecoderCall &call;
    const Buffers<W> buffers;
    int64_t &next_task;  // of attention, shared
    const Worker me;
    int64_t products = 0;  // begun so far

    void run() {
        const int64_t *ids = call.ids;
        *taken(0, me.index) = *taken(1, me.index) = 0;
        const int64_t rows = call.num_tokens, hidden = model.hidden;
        for (int64_t i = me.first(rows); i < me.end(rows); ++i)
            convert((const T *)model.embedding + ids[i] * hidden, hidden,
                    buffers.hidden + i * buffers.hidden_stride);
        me.wait();
        for (int64_t index = 0; index < model.num_layers; ++index) layer(index);
        logits();
    }

    void norm_rows(const float *weight) const {
        const int64_t rows = call.num_tokens;
        for (int64_t i = me.first(rows); i < me.end(rows); ++i)
            normalise(buffers.hidden + i * buffers.hidden_stride, weight, model.hidden,
                      buffers.normed_stride, model.epsilon,
                      buffers.normed + i * buffers.normed_stride);
        me.wait();
    }

    // Panels of a thread's share that were taken, in one of two products that follow each other.
    int64_t *taken(int64_t product, int64_t thread) const {
        return buffers.taken +
               (product % 2 * me.count + thread) * Buffers<W>::NUMBERS_OF_LINE;
    }

    // This thread's share of the columns, piece by piece, and then what others have not begun of
    // theirs: processors are not all as fast, nor all undisturbed. Threads meet after each product.
    template <class Use>
    void product(const typename W::Number *x, int64_t stride, int64_t rows, int64_t depth,
                 const void *weight, int64_t panels, const Use &use) {
        char *memory = buffers.expanded + me.index * buffers.expanded_bytes;
        *taken(products + 1, me.index) = 0;  // nobody looks at it before they have met
        for (int64_t i = 0; i < me.count; ++i) {
            const Worker whose = {(me.index + i) % me.count, me.count, me.barrier};
            const int64_t first = whose.first(panels), share = whose.end(panels) - first;
            const int64_t piece = std::max(LEAST_PANELS, share / PIECES_PER_THREAD);
            int64_t *done = taken(products, whose.index);
            while (__atomic_load_n(done, __ATOMIC_RELAXED) < share) {
                const int64_t at = __atomic_fetch_add(done, piece, __ATOMIC_RELAXED);
                if (at >= share) break;
                multiply(W(), x, stride, rows, depth, weight, first + at,
                         first + least(at + piece, share), memory, use);
            }
        }
        ++products;
    }

    void add_product(const typename W::Number *x, int64_t stride, int64_t depth,
                     const void *weight) {
        product(x, stride, call.num_tokens, depth, weight, num_panels(model.hidden),
                [&](int64_t row, int64_t panel, Floats left, Floats right) {
                    float *to = buffers.hidden + row * buffers.hidden_stride + panel * PANEL;
                    write(read(to) + left, to);
                    write(read(to + LANES) + right, to + LANES);
                });
        me.wait();
    }

    void layer(int64_t index) {
        const DecoderLayer &layer = model.layers[index];
        norm_rows(layer.attention_norm);
        product(buffers.normed, buffers.normed_stride, call.num_tokens, model.hidden, layer.qkv,
                buffers.qkv_stride / PANEL,
                [&](int64_t row, int64_t panel, Floats left, Floats right) {
                    if (layer.qkv_bias) {
                        left += read(layer.qkv_bias + panel * PANEL);
                        right += read(layer.qkv_bias + panel * PANEL + LANES);
                    }
                    float *to = buffers.qkv + row * buffers.qkv_stride + panel * PANEL;
                    write(left, to);
                    write(right, to + LANES);
                });
        me.wait();
        rotate_rows();
        attend(index);
        const auto *inputs = attended_inputs();
        add_product(inputs, buffers.attended_size, buffers.attended_size, layer.out);
        norm_rows(layer.mlp_norm);
        product(buffers.normed, buffers.normed_stride, call.num_tokens, model.hidden,
                layer.gate_up, buffers.inner_stride / LANES,
                [&](int64_t row, int64_t panel, Floats gate, Floats up) {
                    write(silu(gate) * up, buffers.inner + row * buffers.inner_stride + panel * LANES);
                });
        me.wait();
        add_product(buffers.inner, buffers.inner_stride, model.intermediate, layer.down);
    }

    void rotate_rows() const {
        const int64_t size = model.head_size, half = size / 2;
        const DecoderCache &cache = *call.cache;
        const int64_t end = me.end(call.num_tokens);
        int64_t segment = 0;
        for (int64_t i = me.first(call.num_tokens); i < end; ++i) {
            const int64_t *of = call.segments + 4 * segment;
            while (i >= of[3] + of[2]) of = call.segments + 4 * ++segment;
            const int64_t position = of[1] + i - of[3];
            const float *cosines = cache.cosines + position * half;
            const float *sines = cache.sines + position * half;
            const float *from = buffers.qkv + i * buffers.qkv_stride;
            T *query = buffers.queries + i * buffers.attended_size;
            for (int64_t h = 0; h < model.heads; ++h, from += size)
                rotate(from, cosines, sines, half, query + h * size);
            T *key = buffers.keys + i * buffers.kv_size;
            for (int64_t h = 0; h < model.kv_heads; ++h, from += size)
                rotate(from, cosines, sines, half, key + h * size);
            convert(from, buffers.kv_size, buffers.values + i * buffers.kv_size);
        }
        if (me.index == 0) next_task = 0;
        me.wait();
    }

    void attend(int64_t index) const {
        AttentionCall own = {};
        const int64_t size = model.head_size;
        own.queries = buffers.queries;
        own.new_keys = buffers.keys;
        own.new_values = buffers.values;
        own.keys = call.cache->keys[index];
        own.values = call.cache->values[index];
        own.out = buffers.attended;
        own.segments = (const Segment *)call.segments;
        own.query_strides[0] = buffers.attended_size;
        own.key_strides[0] = own.value_strides[0] = buffers.kv_size;
        own.query_strides[1] = own.key_strides[1] = own.value_strides[1] = size;
        own.num_segments = call.num_segments;
        own.capacity = call.cache->capacity;
        own.heads = model.heads;
        own.kv_heads = model.kv_heads;
        own.key_size = own.value_size = size;
        const int64_t tasks = TASKS_PER_THREAD * me.count;
        const int64_t per_task = model.kv_heads * call.num_segments / (me.count > 1 ? tasks : 1);
        own.heads_per_task = per_task < 1 ? 1 : least(per_task, model.kv_heads);
        own.is_bfloat16 = model.is_bfloat16;
        own.scale = model.scale;
        tasks_for(own)(own, buffers.scratch + me.index * buffers.scratch_size, &next_task);
        me.wait();
    }

    const typename W::Number *attended_inputs() const {
        if constexpr (!Buffers<W>::CONVERTS) {
            return (const typename W::Number *)buffers.attended;
        } else {
            const int64_t size = buffers.attended_size, rows = call.num_tokens;
            for (int64_t i = me.first(rows); i < me.end(rows); ++i)
                convert(buffers.attended + i * size, size, buffers.inputs + i * size);
            me.wait();
            return buffers.inputs;
        }
    }

    void logits() {
        const int64_t rows = call.num_logits;
        for (int64_t i = me.first(rows); i < me.end(rows); ++i)
            normalise(buffers.hidden + call.logit_tokens[i] * buffers.hidden_stride, model.norm,
                      model.hidden, buffers.normed_stride, model.epsilon,
                      buffers.normed + i * buffers.normed_stride);
        me.wait();
        product(buffers.normed, buffers.normed_stride, rows, model.hidden, model.head,
                num_panels(model.vocab),
                [&](int64_t row, int64_t panel, Floats left, Floats right) {
                    write_columns(left, right, least(PANEL, model.vocab - panel * PANEL),
                                  call.logits + row * model.vocab + panel * PANEL);
                });
        me.wait();
    }
};

template <class W>
int64_t memory_for(const DecoderModel &model, int64_t num_tokens, int64_t largest_segment,
                   int64_t num_threads) {
    return Buffers<W>(model, nullptr, num_tokens, largest_segment, num_threads).bytes;
}

template <class W>
void decode(const DecoderCall &call) {
    int64_t next_task = 0;
    together(*call.threads, [&](Worker me) {
        const Buffers<W> buffers(*call.model, call.memory, call.num_tokens, call.largest_segment,
                                 call.threads->count);
        Pass<W>{*call.model, call, buffers, next_task, me}.run();
    });
}

}  // namespace
