// A whole forward pass of a decoder-only model over packed tokens, on the CPU. The families differ
// in what decoder_spec.py describes: norms, activation, rotary embedding and constant factors.
//
// All threads of the team go through the layers together. Each thread computes a share of the
// columns of every product and a share of the rows between products. The threads synchronise at a
// barrier before they use each other's results. A step of a small draft model takes as long as a
// few calls of a framework. The residual stream is float32. The order of a row's sums does not
// depend on the other rows of the pass, if its attention is split in the same way.

#pragma once

#include "attention_tasks.h"
#include "grouped.h"
#include "matrix.h"
#include "narrow.h"
#include "threads.h"
#include "tiles.h"

#include <algorithm>

// Weights of one layer. Matrices are packed into panels. Each panel of gate_up contains one vector
// of columns of gate and one of up. Norms that the layer does not have are null.
struct DecoderLayer {
    const float *attention_norm, *mlp_norm;          // [hidden] norms of the blocks' inputs
    const float *attention_out_norm, *mlp_out_norm;  // [hidden] norms of the blocks' outputs
    const float *q_norm, *k_norm;                    // [norm size] before the rotary embedding
    const void *qkv, *out, *gate_up, *down;
    const float *qkv_bias;             // padded with zeros to whole panels, or null
    int64_t q_norm_size, k_norm_size;  // of one head, or of all heads that are normalised together
    int64_t rotary;                    // index of the rotary embedding; -1 for none
};

enum Activation { SILU = 0, GELU_TANH = 1 };

constexpr int64_t IN_GROUPS = 0;  // DecoderModel::bits of weights of grouped.h

// Sizes and weights of a model.
struct DecoderModel {
    const void *embedding;        // [vocab, hidden]
    const float *norm;            // [hidden] weight of the final norm
    const void *head;             // packed panels of the vocabulary projection
    const DecoderLayer *layers;   // [num_layers]
    const int64_t *rotary_sizes;  // [rotary embeddings] leading elements of a head that are rotated
    int64_t num_layers, hidden, heads, kv_heads, head_size, intermediate, vocab;
    int64_t is_bfloat16;     // whether weights and cache are BFloat16, not float32
    int64_t bits;            // stored bits per number of a matrix: those of its type, fewer for
                             // narrow.h, or IN_GROUPS
    int64_t activation;      // Activation of the gate
    double epsilon;          // added to the mean square in norms
    double scale;            // factor of the attention scores
    double softcap;          // limit of the attention scores, as in AttentionCall
    double embedding_scale;  // factor of the embedding
    double residual_scale;   // factor of a block's output before it is added
    double logit_scale;      // factor of the logits
    double logit_softcap;    // limit of the logits: softcap * tanh(logit / softcap); 0 for none
};

// The KV cache of a model.
struct DecoderCache {
    void *const *keys, *const *values;           // [num_layers] as in AttentionCall
    const int64_t *capacities;                   // [num_layers] token slots per cache slot
    const int64_t *windows, *chunks;             // [num_layers] as in AttentionCall
    const float *const *cosines, *const *sines;  // [rotary embeddings][positions, size / 2]
};

// Arguments of draftwise_decode: one forward pass.
struct DecoderCall {
    const DecoderModel *model;
    const DecoderCache *cache;
    const Threads *threads;
    const int64_t *ids;           // [tokens] token ids
    const int64_t *segments;      // [segments, 4] fields of Segment
    const int64_t *logit_tokens;  // [logits] indices of the packed tokens whose logits are computed
    float *logits;                // [logits, vocab] output
    char *memory;                 // draftwise_decoder_memory bytes of scratch memory, aligned to 64
    int64_t num_tokens, num_segments, num_logits;
    int64_t largest_segment;  // tokens of the largest segment
    const int64_t *tapped_layers;  // [tapped] layers whose inputs are returned; the number of layers
                                   // stands for the output of the last one
    void *tapped;                  // [tokens, tapped, hidden] output, of the type of the cache
    int64_t num_tapped;
};

namespace {

// Attention tasks per thread: enough for threads that claim them one by one to finish together.
constexpr int TASKS_PER_THREAD = 8;
// Pieces of a thread's share of a product, and minimum number of panels of a piece.
constexpr int64_t PIECES_PER_THREAD = 8, MIN_PANELS = 4;

// Intermediate results of a pass, in its scratch memory.
template <class W>
struct Buffers {
    typedef typename W::Stored T;
    typedef typename W::Input Input;
    // Whether attention results are converted before they are multiplied.
    static constexpr bool CONVERTS = sizeof(T) != sizeof(Input);
    static constexpr int64_t COUNTERS_PER_LINE = CACHE_LINE / sizeof(int64_t);

    int64_t hidden_stride, normed_stride, qkv_stride, attended_size, kv_size, inner_stride;
    float *hidden, *projected, *qkv;
    Input *normed, *inputs, *inner;
    T *queries, *keys, *values, *attended;
    float *scratch;
    char *expanded;    // [threads, expanded_bytes] expanded panels
    int64_t *claimed;  // [2, threads, COUNTERS_PER_LINE]; see Pass::claimed
    int64_t scratch_size, expanded_bytes, bytes;

    Buffers(const DecoderModel &model, char *memory, int64_t num_tokens, int64_t largest_segment,
            int64_t num_threads) {
        bytes = 0;
        const auto allocate = [&](auto *&pointer, int64_t numbers) {
            pointer = (decltype(&*pointer))(memory + bytes);
            bytes += round_up(numbers * (int64_t)sizeof *pointer, CACHE_LINE);
        };
        attended_size = model.heads * model.head_size;
        kv_size = model.kv_heads * model.head_size;
        hidden_stride = round_up(model.hidden, PANEL_WIDTH);
        normed_stride = round_up(model.hidden, W::DEPTH);
        qkv_stride = round_up(attended_size + 2 * kv_size, PANEL_WIDTH);
        inner_stride = round_up(model.intermediate, LANES);
        bool norms_outputs = false;
        for (int64_t i = 0; i < model.num_layers; ++i)
            norms_outputs |= model.layers[i].attention_out_norm || model.layers[i].mlp_out_norm;
        allocate(hidden, num_tokens * hidden_stride);
        allocate(projected, norms_outputs ? num_tokens * hidden_stride : 0);
        allocate(qkv, num_tokens * qkv_stride);
        allocate(normed, num_tokens * normed_stride);
        allocate(inner, num_tokens * inner_stride);
        allocate(queries, num_tokens * attended_size);
        allocate(keys, num_tokens * kv_size);
        allocate(values, num_tokens * kv_size);
        allocate(attended, num_tokens * attended_size);
        allocate(inputs, CONVERTS ? num_tokens * attended_size : 0);
        scratch_size = attention_scratch_size(largest_segment, model.heads, model.kv_heads,
                                              model.kv_heads, model.head_size, model.head_size);
        allocate(scratch, num_threads * scratch_size);
        const int64_t max_depth = std::max({model.hidden, attended_size, model.intermediate});
        expanded_bytes = expansion_bytes(W(), max_depth);
        allocate(expanded, num_threads * expanded_bytes);
        allocate(claimed, 2 * num_threads * COUNTERS_PER_LINE);
    }
};

// Converts size numbers between float32 and BFloat16.
template <class From, class To>
INLINE void convert(const From *from, int64_t size, To *to) {
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES) write(read(from + i), to + i);
    if (i < size) {
        From padded[LANES] = {};
        To converted[LANES];
        memcpy(padded, from + i, (size - i) * sizeof *from);
        write(read(padded), converted);
        memcpy(to + i, converted, (size - i) * sizeof *to);
    }
}

// Root mean square normalisation (Zhang and Sennrich 2019), equation 4. Pads the result with zeros.
template <class Output>
INLINE void normalise(const float *x, const float *weight, int64_t size, int64_t padded,
                      double epsilon, Output *out) {
    Floats squares = {};
    int64_t whole = size / LANES * LANES;
    for (int64_t i = 0; i < whole; i += LANES) squares += read(x + i) * read(x + i);
    float sum = horizontal_sum(squares);
    for (int64_t i = whole; i < size; ++i) sum += x[i] * x[i];
    const float factor = 1.0f / __builtin_sqrtf(sum / (float)size + (float)epsilon);
    for (int64_t i = 0; i < whole; i += LANES)
        write(read(x + i) * factor * read(weight + i), out + i);
    for (int64_t i = whole; i < padded; ++i) {
        const float value = i < size ? x[i] * factor * weight[i] : 0.0f;
        convert(&value, 1, out + i);
    }
}

// Rotary position embedding (Su et al. 2021) of one head, which pairs each number with the one half
// a head further.
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

// x * sigmoid(x).
INLINE Floats silu(Floats x) {
    Floats exponent = x * -1.4426950408889634f;
    const Floats limit = Floats{} + 126.0f;
    exponent = exponent > limit ? limit : exponent;
    return x / (1.0f + power_of_two(exponent));
}

// x * P(z <= x) for a standard normal z, approximated with tanh (Hendrycks and Gimpel 2016).
INLINE Floats gelu_tanh(Floats x) {
    const Floats inner = (x + x * x * x * 0.044715f) * 0.7978845608028654f;  // sqrt(2 / pi)
    return x * 0.5f * (1.0f + hyperbolic_tangent(inner));
}

// One thread's part of a forward pass. All threads call the same functions in the same order.
template <class W>
struct Pass {
    typedef typename W::Stored T;

    const DecoderModel &model;
    const DecoderCall &call;
    const Buffers<W> buffers;
    int64_t &next_task;  // next unclaimed attention task, shared by all threads
    const Worker worker;
    int64_t num_products = 0;  // number of finished products

    void run() {
        const int64_t *ids = call.ids;
        *claimed(0, worker.index) = *claimed(1, worker.index) = 0;
        const int64_t rows = call.num_tokens, hidden = model.hidden;
        for (int64_t i = worker.first(rows); i < worker.end(rows); ++i) {
            float *to = buffers.hidden + i * buffers.hidden_stride;
            convert((const T *)model.embedding + ids[i] * hidden, hidden, to);
            if (model.embedding_scale != 1)
                for (int64_t j = 0; j < hidden; ++j) to[j] *= (float)model.embedding_scale;
        }
        worker.wait();
        for (int64_t index = 0; index < model.num_layers; ++index) {
            tap(index);
            layer(index);
        }
        tap(model.num_layers);
        logits();
    }

    // Copies the residual stream before a layer if it is wanted. Nothing changes the stream until
    // the next barrier.
    void tap(int64_t index) const {
        const int64_t rows = call.num_tokens, hidden = model.hidden;
        for (int64_t k = 0; k < call.num_tapped; ++k) {
            if (call.tapped_layers[k] != index) continue;
            for (int64_t i = worker.first(rows); i < worker.end(rows); ++i)
                convert(buffers.hidden + i * buffers.hidden_stride, hidden,
                        (T *)call.tapped + (i * call.num_tapped + k) * hidden);
        }
    }

    // Normalises all rows of hidden, or copies them if weight is null.
    void norm_rows(const float *weight) const {
        const int64_t rows = call.num_tokens;
        for (int64_t i = worker.first(rows); i < worker.end(rows); ++i) {
            const float *from = buffers.hidden + i * buffers.hidden_stride;
            auto *to = buffers.normed + i * buffers.normed_stride;
            if (weight) {
                normalise(from, weight, model.hidden, buffers.normed_stride, model.epsilon, to);
            } else {
                convert(from, model.hidden, to);
                const int64_t padding = buffers.normed_stride - model.hidden;
                memset((void *)(to + model.hidden), 0, padding * sizeof *to);
            }
        }
        worker.wait();
    }

    // Normalises all rows of projected and adds them to hidden.
    void add_normed_rows(const float *weight) const {
        const int64_t rows = call.num_tokens, size = model.hidden;
        const float scale = (float)model.residual_scale;
        for (int64_t i = worker.first(rows); i < worker.end(rows); ++i) {
            float *row = buffers.projected + i * buffers.hidden_stride;
            float *to = buffers.hidden + i * buffers.hidden_stride;
            normalise(row, weight, size, size, model.epsilon, row);
            for (int64_t j = 0; j < size; ++j) to[j] += row[j] * scale;
        }
        worker.wait();
    }

    // The number of claimed panels of a thread's share. Consecutive products use different
    // counters.
    int64_t *claimed(int64_t product, int64_t thread) const {
        return buffers.claimed +
               (product % 2 * worker.count + thread) * Buffers<W>::COUNTERS_PER_LINE;
    }

    // Computes this thread's part of a product. With work stealing, a thread claims the pieces of
    // its own share of the panels and then pieces of the other threads' shares, as cores may differ
    // in speed or be interrupted. The caller must synchronise the threads after each product.
    template <class Epilogue>
    void product(const typename W::Input *x, int64_t stride, int64_t rows, int64_t depth,
                 const void *weight, int64_t panels, const Epilogue &epilogue) {
        char *expanded = buffers.expanded + worker.index * buffers.expanded_bytes;
        // Resets the counter of the next product, which no thread uses before the next barrier.
        *claimed(num_products + 1, worker.index) = 0;
        for (int64_t i = 0; i < worker.count; ++i) {
            const Worker owner = {(worker.index + i) % worker.count, worker.count, worker.barrier};
            const int64_t first = owner.first(panels), share = owner.end(panels) - first;
            const int64_t piece = std::max(MIN_PANELS, share / PIECES_PER_THREAD);
            int64_t *counter = claimed(num_products, owner.index);
            while (__atomic_load_n(counter, __ATOMIC_RELAXED) < share) {
                const int64_t offset = __atomic_fetch_add(counter, piece, __ATOMIC_RELAXED);
                if (offset >= share) break;
                multiply(W(), x, stride, rows, depth, weight, first + offset,
                         first + min_int(offset + piece, share), expanded, epilogue);
            }
        }
        ++num_products;
    }

    // Adds the product of x and a weight to hidden. It is normalised first unless norm is null.
    void add_product(const typename W::Input *x, int64_t stride, int64_t depth,
                     const void *weight, const float *norm) {
        const float scale = (float)model.residual_scale;
        product(x, stride, call.num_tokens, depth, weight, num_panels(model.hidden),
                [&](int64_t row, int64_t panel, Floats left, Floats right) {
                    const int64_t offset = row * buffers.hidden_stride + panel * PANEL_WIDTH;
                    if (norm) {
                        write(left, buffers.projected + offset);
                        write(right, buffers.projected + offset + LANES);
                        return;
                    }
                    float *to = buffers.hidden + offset;
                    write(read(to) + left * scale, to);
                    write(read(to + LANES) + right * scale, to + LANES);
                });
        worker.wait();
        if (norm) add_normed_rows(norm);
    }

    void layer(int64_t index) {
        const DecoderLayer &layer = model.layers[index];
        norm_rows(layer.attention_norm);
        product(buffers.normed, buffers.normed_stride, call.num_tokens, model.hidden, layer.qkv,
                buffers.qkv_stride / PANEL_WIDTH,
                [&](int64_t row, int64_t panel, Floats left, Floats right) {
                    if (layer.qkv_bias) {
                        left += read(layer.qkv_bias + panel * PANEL_WIDTH);
                        right += read(layer.qkv_bias + panel * PANEL_WIDTH + LANES);
                    }
                    float *to = buffers.qkv + row * buffers.qkv_stride + panel * PANEL_WIDTH;
                    write(left, to);
                    write(right, to + LANES);
                });
        worker.wait();
        rotate_rows(layer);
        attend(index);
        const auto *inputs = attended_inputs();
        add_product(inputs, buffers.attended_size, buffers.attended_size, layer.out,
                    layer.attention_out_norm);
        norm_rows(layer.mlp_norm);
        product(buffers.normed, buffers.normed_stride, call.num_tokens, model.hidden,
                layer.gate_up, buffers.inner_stride / LANES,
                [&](int64_t row, int64_t panel, Floats gate, Floats up) {
                    const Floats active =
                        model.activation == GELU_TANH ? gelu_tanh(gate) : silu(gate);
                    write(active * up, buffers.inner + row * buffers.inner_stride + panel * LANES);
                });
        worker.wait();
        add_product(buffers.inner, buffers.inner_stride, model.intermediate, layer.down,
                    layer.mlp_out_norm);
    }

    // Normalises consecutive heads in place, one by one or several together.
    void norm_heads(float *heads, int64_t num_heads, const float *weight, int64_t size) const {
        if (!weight) return;
        for (int64_t i = 0; i < num_heads * model.head_size; i += size)
            normalise(heads + i, weight, size, size, model.epsilon, heads + i);
    }

    // Normalises queries and keys, applies the rotary embedding, and converts them and the values.
    void rotate_rows(const DecoderLayer &layer) const {
        const int64_t size = model.head_size, num_query = model.heads * size;
        const int64_t rotated = layer.rotary < 0 ? 0 : model.rotary_sizes[layer.rotary];
        const int64_t half = rotated / 2, end = worker.end(call.num_tokens);
        int64_t segment = 0;
        for (int64_t i = worker.first(call.num_tokens); i < end; ++i) {
            const int64_t *fields = call.segments + 4 * segment;
            while (i >= fields[3] + fields[2]) fields = call.segments + 4 * ++segment;
            const int64_t position = fields[1] + i - fields[3];
            const float *cosines = nullptr, *sines = nullptr;
            if (rotated) {
                cosines = call.cache->cosines[layer.rotary] + position * half;
                sines = call.cache->sines[layer.rotary] + position * half;
            }
            float *from = buffers.qkv + i * buffers.qkv_stride;
            norm_heads(from, model.heads, layer.q_norm, layer.q_norm_size);
            norm_heads(from + num_query, model.kv_heads, layer.k_norm, layer.k_norm_size);
            const auto rotate_heads = [&](int64_t num_heads, T *to) {
                for (int64_t h = 0; h < num_heads; ++h, from += size, to += size) {
                    if (rotated) rotate(from, cosines, sines, half, to);
                    if (rotated < size) convert(from + rotated, size - rotated, to + rotated);
                }
            };
            rotate_heads(model.heads, buffers.queries + i * buffers.attended_size);
            rotate_heads(model.kv_heads, buffers.keys + i * buffers.kv_size);
            convert(from, buffers.kv_size, buffers.values + i * buffers.kv_size);
        }
        if (worker.index == 0) next_task = 0;
        worker.wait();
    }

    void attend(int64_t index) const {
        AttentionCall attention = {};
        const int64_t size = model.head_size;
        attention.queries = buffers.queries;
        attention.new_keys = buffers.keys;
        attention.new_values = buffers.values;
        attention.keys = call.cache->keys[index];
        attention.values = call.cache->values[index];
        attention.out = buffers.attended;
        attention.segments = (const Segment *)call.segments;
        attention.query_strides[0] = buffers.attended_size;
        attention.key_strides[0] = attention.value_strides[0] = buffers.kv_size;
        attention.query_strides[1] = attention.key_strides[1] = attention.value_strides[1] = size;
        attention.num_segments = call.num_segments;
        attention.capacity = call.cache->capacities[index];
        attention.window = call.cache->windows[index];
        attention.chunk = call.cache->chunks[index];
        attention.heads = model.heads;
        attention.kv_heads = model.kv_heads;
        attention.key_size = attention.value_size = size;
        const int64_t tasks = TASKS_PER_THREAD * worker.count;
        const int64_t per_task =
            model.kv_heads * call.num_segments / (worker.count > 1 ? tasks : 1);
        attention.heads_per_task = per_task < 1 ? 1 : min_int(per_task, model.kv_heads);
        attention.is_bfloat16 = model.is_bfloat16;
        attention.scale = model.scale;
        attention.softcap = model.softcap;
        tasks_for(attention)(attention, buffers.scratch + worker.index * buffers.scratch_size,
                             &next_task);
        worker.wait();
    }

    // The results of attention in the type of a product's input.
    const typename W::Input *attended_inputs() const {
        if constexpr (!Buffers<W>::CONVERTS) {
            return (const typename W::Input *)buffers.attended;
        } else {
            const int64_t size = buffers.attended_size, rows = call.num_tokens;
            for (int64_t i = worker.first(rows); i < worker.end(rows); ++i)
                convert(buffers.attended + i * size, size, buffers.inputs + i * size);
            worker.wait();
            return buffers.inputs;
        }
    }

    void logits() {
        const int64_t rows = call.num_logits;
        for (int64_t i = worker.first(rows); i < worker.end(rows); ++i)
            normalise(buffers.hidden + call.logit_tokens[i] * buffers.hidden_stride, model.norm,
                      model.hidden, buffers.normed_stride, model.epsilon,
                      buffers.normed + i * buffers.normed_stride);
        worker.wait();
        const float cap = (float)model.logit_softcap;
        const float factor = (float)(cap ? model.logit_scale / cap : model.logit_scale);
        product(buffers.normed, buffers.normed_stride, rows, model.hidden, model.head,
                num_panels(model.vocab),
                [&](int64_t row, int64_t panel, Floats left, Floats right) {
                    left *= factor;
                    right *= factor;
                    if (cap) {
                        left = hyperbolic_tangent(left) * cap;
                        right = hyperbolic_tangent(right) * cap;
                    }
                    write_columns(left, right,
                                  min_int(PANEL_WIDTH, model.vocab - panel * PANEL_WIDTH),
                                  call.logits + row * model.vocab + panel * PANEL_WIDTH);
                });
        worker.wait();
    }
};

// Bytes of scratch memory that a pass needs.
template <class W>
int64_t memory_for(const DecoderModel &model, int64_t num_tokens, int64_t largest_segment,
                   int64_t num_threads) {
    return Buffers<W>(model, nullptr, num_tokens, largest_segment, num_threads).bytes;
}

// Runs a forward pass on all threads.
template <class W>
void decode(const DecoderCall &call) {
    int64_t next_task = 0;
    run_on_team(*call.threads, [&](Worker worker) {
        const Buffers<W> buffers(*call.model, call.memory, call.num_tokens, call.largest_segment,
                                 call.threads->count);
        Pass<W>{*call.model, call, buffers, next_task, worker}.run();
    });
}

}  // namespace
