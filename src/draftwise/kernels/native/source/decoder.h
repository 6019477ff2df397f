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
#include "blocks.h"
#include "experts.h"
#include "matrix.h"
#include "narrow.h"
#include "norm.h"
#include "packed_product.h"
#include "recurrent_layer.h"
#include "threads.h"
#include "tiles.h"

#include <algorithm>

// Weights of one layer. Matrices are packed into panels. Each panel of gate_up contains one vector
// of columns of gate and one of up. Norms that the layer does not have are null.
struct DecoderLayer {
    const float *attention_norm, *mlp_norm;          // [hidden] norms of the blocks' inputs
    const float *attention_out_norm, *mlp_out_norm;  // [hidden] norms of the blocks' outputs
    const float *q_norm, *k_norm;                    // [norm size] before the rotary embedding
    const void *qkv, *out;             // or the projections of a recurrence
    const void *gate_up, *down;        // null if the layer has only experts that tokens choose
    const Experts *experts;            // null for none
    const float *qkv_bias, *out_bias;  // padded with zeros to whole panels, or null
    const float *sinks;                // [heads] as in AttentionCall
    const RecurrentLayer *recurrent;   // null for a layer with attention
    int64_t q_norm_size, k_norm_size;  // of one head, or of all heads that are normalised together
    int64_t rotary;                    // index of the rotary embedding; -1 for none
    int64_t intermediate;              // size of the gate; 0 for none
    int64_t sees_segment, shares_window;  // as in AttentionCall
};

// How a drafting head reads states of a target; see StateInputSpec of decoder_spec.py.
struct StateInput {
    const void *projection;     // packed panels, from the states of a token side by side to hidden
    const float *embedding_norm;  // [hidden] norm of the embedded tokens, which the projection reads
                                  // before one state of size hidden; null if it reads states only
    const float *joint_norm;    // [num_states * size] norm of all states together, or null
    const float *norms;         // [num_states, size] norms of each state, or null
    const float *state_norm;    // [hidden] norm of the projected states, or of the state that is
                                // projected with the token
    int64_t num_states, size;   // number of states of a token, and size of each
    int64_t norm_before_residual, norm_output;
    int64_t is_context;         // whether the projected states are rows of a context, which have keys
                                // and values in every layer and nothing else
};

enum Activation { SILU = 0, GELU_TANH = 1 };

constexpr int64_t PACKED = 0;  // DecoderModel::bits of weights of packed.h

// Sizes and weights of a model.
struct DecoderModel {
    const void *embedding;        // [vocab, hidden]
    const float *norm;            // [hidden] weight of the final norm
    const void *head;             // packed panels of the vocabulary projection
    const DecoderLayer *layers;   // [num_layers]
    const int64_t *rotary_sizes;  // [rotary embeddings] leading elements of a head that are rotated
    int64_t num_layers, hidden, heads, kv_heads, head_size, vocab;
    int64_t packs_experts;   // whether experts have weights of packed.h, whatever the others have
    int64_t is_bfloat16;     // whether weights and cache are BFloat16, not float32
    int64_t bits;            // stored bits per number of a matrix: those of its type, fewer for
                             // narrow.h, or PACKED
    int64_t activation;      // Activation of the gate
    int64_t has_gates;       // whether each query is followed by a gate of the head's output
    double epsilon;          // added to the mean square in norms
    double scale;            // factor of the attention scores
    double softcap;          // limit of the attention scores, as in AttentionCall
    double embedding_scale;  // factor of the embedding
    double residual_scale;   // factor of a block's output before it is added
    double logit_scale;      // factor of the logits
    double logit_softcap;    // limit of the logits: softcap * tanh(logit / softcap); 0 for none
    const StateInput *state_input;  // null for models that read tokens only
    const int64_t *output_ids;      // [vocab] token ids of the logits; null for 0, 1, 2, ...
    const DecoderModel *projector;  // without layers, whose norm and head compute the logits in place
                                    // of the model's own; null for none
    // Adapter of an exit, h + up down norm(h) before the final norm; see exits/adapter.py.
    const float *adapter_norm;              // [hidden]
    const void *adapter_down, *adapter_up;  // packed panels
    int64_t adapter_rank;                   // whole panels; 0 for none
    // Blocks of the embedding; see blocks.h. Null if its numbers have the type of the cache.
    const BlockKind *embedding_kind;
    int64_t embedding_row_bytes;
};

// The KV cache of a model.
struct DecoderCache {
    void *const *keys, *const *values;           // [num_layers] as in AttentionCall
    const int64_t *capacities;                   // [num_layers] token slots per cache slot
    const int64_t *windows, *chunks;             // [num_layers] as in AttentionCall
    const float *const *cosines, *const *sines;  // [rotary embeddings][positions, size / 2]
    const RecurrentMemory *recurrent;            // [num_layers]; null without recurrences
    const RecurrentRows *rows;
};

// Arguments of draftwise_decode: one forward pass.
struct DecoderCall {
    const DecoderModel *model;
    const DecoderCache *cache;
    const Threads *threads;
    const int64_t *ids;           // [tokens] token ids
    const int64_t *segments;      // [segments, 4] fields of Segment
    const int64_t *logit_tokens;  // [logits] indices of the packed tokens whose logits are computed
    float *logits;                // [logits, vocab] output; null if only carried is wanted
    char *memory;                 // draftwise_decoder_memory bytes of scratch memory, aligned to 64
    int64_t num_tokens, num_segments, num_logits;
    int64_t largest_segment;  // tokens of the largest segment
    const int64_t *tapped_layers;  // [tapped] layers whose inputs are returned; the number of layers
                                   // stands for the output of the last one
    void *tapped;                  // [tokens, tapped, hidden] output, of the type of the cache
    int64_t num_tapped;
    const void *states;           // [tokens, num_states * size] states that a head reads, of the type
                                  // of the cache; null if it reads what is carried
    float *carried;               // [..., hidden] what a head's next pass reads in place of states;
                                  // of other models the residual stream after the last layer; null
                                  // if it is not wanted
    const int64_t *carried_rows;  // [logits] rows of carried that are written, and without states
                                  // also [tokens] rows that a head reads
    const float *entering;        // [tokens, hidden] residual stream before the first layer; null
                                  // if the tokens are embedded
    const TreeToken *tree;        // [tokens] as in AttentionCall
};

namespace {

// Attention tasks per thread: enough for threads that claim them one by one to finish together.
constexpr int TASKS_PER_THREAD = 8;
// The part of the rest of a share of a product that a thread claims, and the least number of panels.
// Small last pieces let the threads finish together.
constexpr int64_t PART_OF_REST = 4, MIN_PANELS = 4;

// Numbers of a token that attention computes from its row: queries, each with its gate if there are
// gates, keys and values.
INLINE int64_t attention_products(const DecoderModel &model) {
    const int64_t per_query = model.has_gates ? 2 : 1;
    return (per_query * model.heads + 2 * model.kv_heads) * model.head_size;
}

// Bytes of scratch memory of a pass; see dispatch.h.
int64_t decoder_memory(const DecoderModel &model, int64_t num_tokens, int64_t largest_segment,
                       int64_t num_threads);

// Computes this thread's part of the logits of a pass from its residual stream, whose rows have a
// distance of stride. The model of the call is a projector; see dispatch.h.
void project_by(const DecoderCall &call, const float *stream, int64_t stride, Worker worker);

// Intermediate results of a pass, in its scratch memory.
template <class W>
struct Buffers {
    typedef typename W::Stored T;
    typedef typename W::Input Input;
    // Whether attention results are converted before they are multiplied.
    static constexpr bool CONVERTS = !std::is_same<T, Input>::value;
    // Whether a row is converted as a whole, after all of its numbers are computed.
    static constexpr bool WHOLE_ROWS = std::is_same<RowGroup, Input>::value;
    static constexpr int64_t COUNTERS_PER_LINE = CACHE_LINE / sizeof(int64_t);

    int64_t hidden_stride, normed_stride, qkv_stride, attended_size, kv_size, inner_stride;
    int64_t active_stride, row_floats;
    float *hidden, *projected, *qkv;
    float *active;      // [tokens, active_stride] what becomes inner, if rows are converted whole
    float *row_scratch; // [threads, row_floats] a row that is converted whole
    float *embedded, *state_scratch;  // of a head: embedded tokens, and floats of each thread
    int64_t states_size, states_stride, both_stride;
    Input *normed, *inputs, *inner, *states, *both;
    T *queries, *keys, *values, *attended;
    float *scratch;
    char *expanded;    // [threads, expanded_bytes] expanded panels
    int64_t *claimed;  // [2, threads, COUNTERS_PER_LINE]; see Pass::claimed
    char *experts;     // ExpertBuffers
    char *projection;  // memory of the projector
    RecurrentBuffers<T> recurrent;
    int64_t scratch_size, expanded_bytes, bytes;
    int64_t most_experts = 0, most_chosen = 0, expert_inner = 0;  // largest of all layers

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
        normed_stride = row_stride(W(), num_tokens, model.hidden);
        int64_t inner_size = model.adapter_rank;
        bool norms_outputs = false;
        RecurrentSizes recurrences;
        for (int64_t i = 0; i < model.num_layers; ++i) {
            const DecoderLayer &layer = model.layers[i];
            norms_outputs |= layer.attention_out_norm || layer.mlp_out_norm;
            inner_size = std::max(inner_size, layer.intermediate);
            if (layer.recurrent) recurrences.include(*layer.recurrent);
            if (!layer.experts) continue;
            most_experts = std::max(most_experts, layer.experts->count);
            most_chosen = std::max(most_chosen, layer.experts->chosen);
            expert_inner = std::max(expert_inner, layer.experts->inner);
        }
        const int64_t mixed_size = std::max(attended_size, recurrences.inner);
        const bool has_rows = WHOLE_ROWS || model.has_gates || recurrences.inner;
        qkv_stride = round_up(std::max(attention_products(model), recurrences.products),
                              PANEL_WIDTH);
        active_stride = round_up(inner_size, PANEL_WIDTH);
        inner_stride = WHOLE_ROWS ? num_tokens : round_up(inner_size, LANES);
        allocate(hidden, num_tokens * hidden_stride);
        allocate(projected, norms_outputs ? num_tokens * hidden_stride : 0);
        const StateInput *reads = model.state_input;
        states_size = reads ? reads->num_states * reads->size : 0;
        states_stride = row_stride(W(), num_tokens, states_size);
        both_stride = reads ? row_stride(W(), num_tokens, 2 * model.hidden) : 0;
        row_floats = has_rows ? round_up(std::max(reads ? 2 * model.hidden : model.hidden,
                                                  mixed_size), PANEL_WIDTH) : 0;
        allocate(embedded, reads ? num_tokens * hidden_stride : 0);
        allocate(state_scratch, num_threads * states_size);
        allocate(states, rows_size(W(), num_tokens, states_size));
        allocate(both, reads ? rows_size(W(), num_tokens, 2 * model.hidden) : 0);
        allocate(qkv, num_tokens * qkv_stride);
        allocate(normed, rows_size(W(), num_tokens, model.hidden));
        allocate(inner, WHOLE_ROWS ? rows_size(W(), num_tokens, inner_size)
                                   : num_tokens * inner_stride);
        allocate(active, WHOLE_ROWS ? num_tokens * active_stride : 0);
        allocate(row_scratch, num_threads * row_floats);
        allocate(queries, num_tokens * attended_size);
        allocate(keys, num_tokens * kv_size);
        allocate(values, num_tokens * kv_size);
        allocate(attended, num_tokens * attended_size);
        allocate(inputs, CONVERTS || has_rows ? rows_size(W(), num_tokens, mixed_size) : 0);
        recurrent.take(recurrences, num_tokens, allocate);
        scratch_size = attention_scratch_size(largest_segment, model.heads, model.kv_heads,
                                              model.kv_heads, model.head_size, model.head_size);
        allocate(scratch, num_threads * scratch_size);
        const int64_t max_depth =
            std::max({model.hidden, mixed_size, inner_size, expert_inner, states_size,
                      reads ? 2 * model.hidden : 0});
        expanded_bytes = expansion_bytes(W(), max_depth);
        if (model.packs_experts)
            expanded_bytes = std::max(expanded_bytes, expansion_bytes(PackedWeight(), max_depth));
        allocate(expanded, num_threads * expanded_bytes);
        allocate(experts, !most_experts ? 0
                          : model.packs_experts
                              ? experts_of<PackedWeight>(nullptr, num_tokens, model.hidden).bytes
                              : experts_of<W>(nullptr, num_tokens, model.hidden).bytes);
        allocate(claimed, 2 * num_threads * COUNTERS_PER_LINE);
        allocate(projection, model.projector
                                 ? decoder_memory(*model.projector, num_tokens, 1, num_threads)
                                 : 0);
    }

    // Intermediate results of experts with weights X.
    template <class X>
    ExpertBuffers<X> experts_of(char *memory, int64_t num_tokens, int64_t hidden) const {
        return ExpertBuffers<X>(memory, num_tokens, hidden, most_experts, most_chosen,
                                expert_inner);
    }
};

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

    // Resets the counters of the first products. No thread uses them before the next barrier.
    void begin() { *claimed(0, worker.index) = *claimed(1, worker.index) = 0; }

    void run() {
        begin();
        if (call.states && !joined_input()) return store_context(*model.state_input);
        if (call.entering) enter();
        else embed(joined_input() ? buffers.embedded : buffers.hidden);
        if (joined_input()) read_states(*joined_input());
        for (int64_t index = 0; index < model.num_layers; ++index) {
            tap(index);
            layer(index);
        }
        tap(model.num_layers);
        logits();
    }

    // How a head reads states beside the tokens; null if it does not.
    const StateInput *joined_input() const {
        return model.state_input && !model.state_input->is_context ? model.state_input : nullptr;
    }

    // Embeds all tokens.
    void embed(float *embedded) const {
        const int64_t rows = call.num_tokens, hidden = model.hidden;
        for (int64_t i = worker.first(rows); i < worker.end(rows); ++i) {
            float *to = embedded + i * buffers.hidden_stride;
            if (model.embedding_kind)
                expand_row(*model.embedding_kind,
                           (const uint8_t *)model.embedding +
                               call.ids[i] * model.embedding_row_bytes,
                           hidden, to);
            else
                convert((const T *)model.embedding + call.ids[i] * hidden, hidden, to);
            if (model.embedding_scale != 1)
                for (int64_t j = 0; j < hidden; ++j) to[j] *= (float)model.embedding_scale;
        }
        worker.wait();
    }

    // Continues the residual stream of an earlier pass.
    void enter() const {
        const int64_t rows = call.num_tokens, hidden = model.hidden;
        for (int64_t i = worker.first(rows); i < worker.end(rows); ++i)
            memcpy(buffers.hidden + i * buffers.hidden_stride, call.entering + i * hidden,
                   hidden * sizeof(float));
        worker.wait();
    }

    // Begins the residual stream of a head with the projected states, or with what is carried. With
    // embedding_norm, either is projected together with the token.
    void read_states(const StateInput &reads) {
        if (call.states && !reads.embedding_norm) return project_states(reads);
        const int64_t rows = call.num_tokens, hidden = model.hidden;
        for (int64_t i = worker.first(rows); i < worker.end(rows); ++i) {
            float *to = buffers.hidden + i * buffers.hidden_stride;
            if (call.states)
                normed_states(reads, i, to);
            else
                memcpy(to, call.carried + call.carried_rows[i] * hidden, hidden * sizeof *to);
        }
        worker.wait();
        if (!reads.embedding_norm) return;
        norm_both_rows(reads, reads.embedding_norm);
        begin_stream(buffers.both, buffers.both_stride, 2 * hidden, reads);
    }

    // Writes the projected states to hidden.
    void project_states(const StateInput &reads) {
        const int64_t rows = call.num_tokens, total = buffers.states_size;
        float *numbers = buffers.state_scratch + worker.index * total;
        for (int64_t i = worker.first(rows); i < worker.end(rows); ++i) {
            normed_states(reads, i, numbers);
            put_row(W(), numbers, total, buffers.states_stride,
                    row_of(W(), buffers.states, buffers.states_stride, i));
        }
        worker.wait();
        begin_stream(buffers.states, buffers.states_stride, total, reads);
    }

    // Writes the projection of rows to hidden.
    void begin_stream(const typename W::Input *x, int64_t stride, int64_t depth,
                      const StateInput &reads) {
        product(x, stride, call.num_tokens, depth, reads.projection, num_panels(model.hidden),
                [&](int64_t row, int64_t panel, Floats left, Floats right) {
                    float *to = buffers.hidden + row * buffers.hidden_stride + panel * PANEL_WIDTH;
                    write(left, to);
                    write(right, to + LANES);
                });
        worker.wait();
    }

    // Stores keys and values of the projected states in all layers. No layer changes the states.
    void store_context(const StateInput &reads) {
        project_states(reads);
        norm_rows(reads.state_norm);
        for (int64_t index = 0; index < model.num_layers; ++index) {
            const DecoderLayer &layer = model.layers[index];
            multiply_qkv(layer, buffers.normed, buffers.normed_stride, model.hidden,
                         first_key_panel());
            rotate_rows(layer, false);
            append_rows(index);
        }
    }

    // The first panel of the queries, keys and values that has keys. It may have queries too.
    int64_t first_key_panel() const {
        return (attention_products(model) - 2 * buffers.kv_size) / PANEL_WIDTH;
    }

    // Whether nothing reads the output of a layer, so that only its keys and values are needed: it is
    // the last layer of a pass without results.
    bool stores_only(int64_t index) const {
        return index == model.num_layers - 1 && !call.num_logits && !call.num_tapped &&
               !call.tree && !model.layers[index].recurrent;
    }

    // Stores the keys and values of all rows in the cache of a layer.
    void append_rows(int64_t index) const {
        const int64_t size = model.head_size, heads = model.kv_heads, stride = buffers.kv_size;
        const int64_t capacity = call.cache->capacities[index], strides[2] = {stride, size};
        const int64_t tasks = call.num_segments * heads;
        for (int64_t i = worker.first(tasks); i < worker.end(tasks); ++i) {
            const Segment &segment = ((const Segment *)call.segments)[i / heads];
            const int64_t head = i % heads;
            const auto store = [&](const T *from, void *cache) {
                T *to = (T *)cache + segment.cache_slot * capacity * stride + head * size;
                append(segment, from, strides, head, (int)size, to, stride, capacity);
            };
            store(buffers.keys, call.cache->keys[index]);
            store(buffers.values, call.cache->values[index]);
        }
    }

    // The states of a token, normalised if the head does so.
    void normed_states(const StateInput &reads, int64_t row, float *numbers) const {
        const int64_t total = buffers.states_size, size = reads.size;
        convert((const T *)call.states + row * total, total, numbers);
        if (reads.joint_norm)
            normalise(numbers, reads.joint_norm, total, total, model.epsilon, numbers);
        if (reads.norms)
            for (int64_t k = 0; k < reads.num_states; ++k)
                normalise(numbers + k * size, reads.norms + k * size, size, size, model.epsilon,
                          numbers + k * size);
    }

    // Normalises the embedded tokens and the rows of hidden, side by side.
    void norm_both_rows(const StateInput &reads, const float *embedding_norm) const {
        const int64_t rows = call.num_tokens, hidden = model.hidden;
        for (int64_t i = worker.first(rows); i < worker.end(rows); ++i) {
            const float *embedded = buffers.embedded + i * buffers.hidden_stride;
            float *stream = buffers.hidden + i * buffers.hidden_stride;
            auto *to = row_of(W(), buffers.both, buffers.both_stride, i);
            const auto write_both = [&](auto *both, int64_t padded) {
                normalise(embedded, embedding_norm, hidden, hidden, model.epsilon, both);
                normalise(stream, reads.state_norm, hidden, padded - hidden, model.epsilon,
                          both + hidden);
            };
            if constexpr (Buffers<W>::WHOLE_ROWS) {
                write_both(own_row(), 2 * hidden);
                put_row(W(), own_row(), 2 * hidden, buffers.both_stride, to);
            } else {
                write_both(to, buffers.both_stride);
            }
            if (reads.norm_before_residual)
                normalise(stream, reads.state_norm, hidden, hidden, model.epsilon, stream);
        }
        worker.wait();
    }

    // Keeps what the next token of each draft reads in place of states, or the residual stream.
    void carry() const {
        const bool norms = model.state_input && model.state_input->norm_output;
        const int64_t rows = call.num_logits, hidden = model.hidden;
        for (int64_t i = worker.first(rows); i < worker.end(rows); ++i) {
            const float *from = buffers.hidden + call.logit_tokens[i] * buffers.hidden_stride;
            float *to = call.carried + call.carried_rows[i] * hidden;
            if (norms)
                normalise(from, model.norm, hidden, hidden, model.epsilon, to);
            else
                memcpy(to, from, hidden * sizeof *to);
        }
    }

    // Adds the output of the adapter to the residual stream.
    void adapt() {
        const int64_t rows = call.num_tokens, rank = model.adapter_rank;
        norm_rows(model.adapter_norm);
        product(buffers.normed, buffers.normed_stride, rows, model.hidden, model.adapter_down,
                num_panels(rank), [&](int64_t row, int64_t panel, Floats left, Floats right) {
                    const auto put = [&](auto *to) {
                        write(left, to);
                        write(right, to + LANES);
                    };
                    const int64_t column = panel * PANEL_WIDTH;
                    if constexpr (Buffers<W>::WHOLE_ROWS)
                        put(buffers.active + row * buffers.active_stride + column);
                    else
                        put(buffers.inner + row * buffers.inner_stride + column);
                });
        worker.wait();
        put_active_rows(rank);
        product(buffers.inner, buffers.inner_stride, rows, rank, model.adapter_up,
                num_panels(model.hidden),
                [&](int64_t row, int64_t panel, Floats left, Floats right) {
                    add_columns(left, right, buffers.hidden + row * buffers.hidden_stride +
                                                 panel * PANEL_WIDTH);
                });
        worker.wait();
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
            auto *to = row_of(W(), buffers.normed, buffers.normed_stride, i);
            if (weight)
                put_normed(from, weight, to);
            else
                put_row(W(), from, model.hidden, buffers.normed_stride, to);
        }
        worker.wait();
    }

    // Normalises a row of hidden numbers that will be multiplied.
    void put_normed(const float *from, const float *weight, typename W::Input *to) const {
        const int64_t size = model.hidden;
        if constexpr (Buffers<W>::WHOLE_ROWS) {
            normalise(from, weight, size, size, model.epsilon, own_row());
            put_row(W(), own_row(), size, buffers.normed_stride, to);
        } else {
            normalise(from, weight, size, buffers.normed_stride, model.epsilon, to);
        }
    }

    // This thread's memory for a row that is converted as a whole.
    float *own_row() const { return buffers.row_scratch + worker.index * buffers.row_floats; }

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

    // Calls work(first, end) for the panels of a product that this thread computes. With work
    // stealing, a thread claims the pieces of its own share of the panels and then pieces of the
    // other threads' shares, as cores may differ in speed or be interrupted. The caller must
    // synchronise the threads after each product.
    template <class Work>
    void claim(int64_t panels, const Work &work) {
        // Resets the counter of the next product, which no thread uses before the next barrier.
        *claimed(num_products + 1, worker.index) = 0;
        for (int64_t i = 0; i < worker.count; ++i) {
            const Worker owner = {(worker.index + i) % worker.count, worker.count, worker.barrier};
            const int64_t first = owner.first(panels), share = owner.end(panels) - first;
            int64_t *counter = claimed(num_products, owner.index);
            int64_t offset = __atomic_load_n(counter, __ATOMIC_RELAXED);
            while (offset < share) {
                const int64_t piece = std::max(MIN_PANELS, (share - offset) / PART_OF_REST);
                const int64_t end = min_int(offset + piece, share);
                if (!__atomic_compare_exchange_n(counter, &offset, end, true, __ATOMIC_RELAXED,
                                                 __ATOMIC_RELAXED))
                    continue;
                work(first + offset, first + end);
                offset = __atomic_load_n(counter, __ATOMIC_RELAXED);
            }
        }
        ++num_products;
    }

    // Computes this thread's part of a product, from a panel of the weight on; see claim.
    template <class Epilogue>
    void product(const typename W::Input *x, int64_t stride, int64_t rows, int64_t depth,
                 const void *weight, int64_t panels, const Epilogue &epilogue,
                 int64_t first_panel = 0) {
        claim(panels - first_panel, [&](int64_t first, int64_t end) {
            multiply(W(), x, stride, rows, depth, weight, first_panel + first, first_panel + end,
                     own_expanded(), epilogue);
        });
    }

    // This thread's memory for expanded panels.
    char *own_expanded() const {
        return buffers.expanded + worker.index * buffers.expanded_bytes;
    }

    // What happens to a product before it is added. Each pointer may be null.
    struct Addition {
        const float *norm, *bias;
        const float *factors = nullptr;  // of each row, at a distance of stride
        int64_t stride = 0;
    };

    // Adds the product of x and a weight to hidden.
    void add_product(const typename W::Input *x, int64_t stride, int64_t depth,
                     const void *weight, const Addition &addition) {
        const float scale = (float)model.residual_scale;
        product(x, stride, call.num_tokens, depth, weight, num_panels(model.hidden),
                [&](int64_t row, int64_t panel, Floats left, Floats right) {
                    const int64_t offset = row * buffers.hidden_stride + panel * PANEL_WIDTH;
                    if (addition.bias) {
                        left += read(addition.bias + panel * PANEL_WIDTH);
                        right += read(addition.bias + panel * PANEL_WIDTH + LANES);
                    }
                    if (addition.norm) {
                        write(left, buffers.projected + offset);
                        write(right, buffers.projected + offset + LANES);
                        return;
                    }
                    const float own =
                        addition.factors ? scale * addition.factors[row * addition.stride] : scale;
                    add_columns(left * own, right * own, buffers.hidden + offset);
                });
        worker.wait();
        if (addition.norm) add_normed_rows(addition.norm);
    }

    // Adds two vectors of columns.
    static void add_columns(Floats left, Floats right, float *to) {
        write(read(to) + left, to);
        write(read(to + LANES) + right, to + LANES);
    }

    Floats activate(Floats gate, Floats up) const {
        return (model.activation == GELU_TANH ? gelu_tanh(gate) : silu(gate)) * up;
    }

    void layer(int64_t index) {
        const DecoderLayer &layer = model.layers[index];
        const int64_t first_panel = stores_only(index) ? first_key_panel() : 0;
        if (index == 0 && joined_input() && !joined_input()->embedding_norm) {
            norm_both_rows(*joined_input(), layer.attention_norm);
            multiply_qkv(layer, buffers.both, buffers.both_stride, 2 * model.hidden, first_panel);
        } else {
            norm_rows(layer.attention_norm);
            multiply_qkv(layer, buffers.normed, buffers.normed_stride, model.hidden, first_panel);
        }
        if (stores_only(index)) {
            rotate_rows(layer, false);
            append_rows(index);
            return;
        }
        int64_t depth = buffers.attended_size;
        const typename W::Input *inputs = buffers.inputs;
        if (layer.recurrent) {
            depth = recurrent_inner(*layer.recurrent);
            recur(index);
        } else {
            rotate_rows(layer);
            attend(index);
            inputs = attended_inputs();
        }
        add_product(inputs, row_stride(W(), call.num_tokens, depth), depth, layer.out,
                    {layer.attention_out_norm, layer.out_bias});
        if (!layer.experts) {
            norm_rows(layer.mlp_norm);
            feed_forward(layer);
        } else if (model.packs_experts) {
            add_experts<PackedWeight>(layer);
        } else {
            add_experts<W>(layer);
        }
    }

    // Computes queries, keys and values of normalised rows, from a panel of the weight on.
    void multiply_qkv(const DecoderLayer &layer, const typename W::Input *x, int64_t stride,
                      int64_t depth, int64_t first_panel = 0) {
        product(x, stride, call.num_tokens, depth, layer.qkv,
                num_panels(layer.recurrent ? recurrent_products(*layer.recurrent)
                                           : attention_products(model)),
                [&](int64_t row, int64_t panel, Floats left, Floats right) {
                    if (layer.qkv_bias) {
                        left += read(layer.qkv_bias + panel * PANEL_WIDTH);
                        right += read(layer.qkv_bias + panel * PANEL_WIDTH + LANES);
                    }
                    float *to = buffers.qkv + row * buffers.qkv_stride + panel * PANEL_WIDTH;
                    write(left, to);
                    write(right, to + LANES);
                },
                first_panel);
        worker.wait();
    }

    // Adds the feed-forward block of normalised rows to hidden. factors are those of Addition.
    void feed_forward(const DecoderLayer &layer, const float *factors = nullptr,
                      int64_t factor_stride = 0) {
        product(buffers.normed, buffers.normed_stride, call.num_tokens, model.hidden,
                layer.gate_up, round_up(layer.intermediate, LANES) / LANES,
                [&](int64_t row, int64_t panel, Floats gate, Floats up) {
                    const Floats result = activate(gate, up);
                    if constexpr (Buffers<W>::WHOLE_ROWS)
                        write(result,
                              buffers.active + row * buffers.active_stride + panel * LANES);
                    else
                        write(result, buffers.inner + row * buffers.inner_stride + panel * LANES);
                });
        worker.wait();
        put_active_rows(layer.intermediate);
        add_product(buffers.inner, buffers.inner_stride, layer.intermediate, layer.down,
                    {layer.mlp_out_norm, nullptr, factors, factor_stride});
    }

    // Adds the experts of a layer to hidden, and the feed-forward block of all tokens if it has one.
    template <class X>
    void add_experts(const DecoderLayer &layer) {
        const Experts &experts = *layer.experts;
        const int64_t tokens = call.num_tokens, hidden = model.hidden;
        const auto memory = buffers.template experts_of<X>(buffers.experts, tokens, hidden);
        for (int64_t i = worker.first(tokens); i < worker.end(tokens); ++i) {
            float *row = memory.rows + i * memory.hidden_stride;
            normalise(buffers.hidden + i * buffers.hidden_stride, layer.mlp_norm, hidden, hidden,
                      model.epsilon, row);
            if (layer.gate_up)
                put_row(W(), row, hidden, buffers.normed_stride,
                        row_of(W(), buffers.normed, buffers.normed_stride, i));
        }
        worker.wait();
        route(experts, tokens, hidden, memory, worker);
        if (layer.gate_up)
            feed_forward(layer, experts.has_shared_gate ? memory.scores + experts.count : nullptr,
                         memory.score_stride);
        const float scale = (float)model.residual_scale;
        compute_experts(
            experts, tokens, hidden, memory, worker, own_expanded(),
            [&](int64_t panels, const auto &work) { claim(panels, work); },
            [&](Floats gate, Floats up) { return activate(gate, up); },
            [&](int64_t token, int64_t panel, Floats left, Floats right) {
                add_columns(left * scale, right * scale,
                            buffers.hidden + token * buffers.hidden_stride + panel * PANEL_WIDTH);
            });
    }

    // Converts the rows of active to those of inner, if rows are converted as a whole.
    void put_active_rows(int64_t size) const {
        if constexpr (Buffers<W>::WHOLE_ROWS) {
            const int64_t rows = call.num_tokens;
            for (int64_t i = worker.first(rows); i < worker.end(rows); ++i)
                put_row(W(), buffers.active + i * buffers.active_stride, size,
                        buffers.inner_stride,
                        row_of(W(), buffers.inner, buffers.inner_stride, i));
            worker.wait();
        }
    }

    // Normalises heads in place, one by one or several together. Together they are consecutive.
    void norm_heads(float *heads, int64_t num_heads, int64_t distance, const float *weight,
                    int64_t size) const {
        if (!weight) return;
        const int64_t count = num_heads * model.head_size / size;
        for (int64_t i = 0; i < count; ++i) {
            float *head = heads + i * (size == model.head_size ? distance : size);
            normalise(head, weight, size, size, model.epsilon, head);
        }
    }

    // Normalises queries and keys, applies the rotary embedding, and converts them and the values.
    void rotate_rows(const DecoderLayer &layer, bool with_queries = true) const {
        const int64_t size = model.head_size, query_distance = model.has_gates ? 2 * size : size;
        const int64_t num_query = model.heads * query_distance;
        const int64_t rotated = layer.rotary < 0 ? 0 : model.rotary_sizes[layer.rotary];
        const int64_t half = rotated / 2, end = worker.end(call.num_tokens);
        int64_t segment = 0;
        for (int64_t i = worker.first(call.num_tokens); i < end; ++i) {
            const int64_t *fields = call.segments + 4 * segment;
            while (i >= fields[3] + fields[2]) fields = call.segments + 4 * ++segment;
            const int64_t position = call.tree ? call.tree[i].position : fields[1] + i - fields[3];
            const float *cosines = nullptr, *sines = nullptr;
            if (rotated) {
                cosines = call.cache->cosines[layer.rotary] + position * half;
                sines = call.cache->sines[layer.rotary] + position * half;
            }
            float *from = buffers.qkv + i * buffers.qkv_stride;
            if (with_queries)
                norm_heads(from, model.heads, query_distance, layer.q_norm, layer.q_norm_size);
            norm_heads(from + num_query, model.kv_heads, size, layer.k_norm, layer.k_norm_size);
            const auto rotate_heads = [&](int64_t num_heads, int64_t distance, T *to) {
                for (int64_t h = 0; h < num_heads; ++h, from += distance, to += size) {
                    if (rotated) rotate(from, cosines, sines, half, to);
                    if (rotated < size) convert(from + rotated, size - rotated, to + rotated);
                }
            };
            if (with_queries)
                rotate_heads(model.heads, query_distance,
                             buffers.queries + i * buffers.attended_size);
            else
                from += num_query;
            rotate_heads(model.kv_heads, size, buffers.keys + i * buffers.kv_size);
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
        attention.sinks = model.layers[index].sinks;
        attention.segments = (const Segment *)call.segments;
        attention.tree = call.tree;
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
        attention.sees_segment = model.layers[index].sees_segment;
        attention.shares_window = model.layers[index].shares_window;
        tasks_for(attention)(attention, buffers.scratch + worker.index * buffers.scratch_size,
                             &next_task);
        worker.wait();
    }

    // The results of attention in the type of a product's input, times the sigmoids of the gates.
    const typename W::Input *attended_inputs() const {
        if constexpr (!Buffers<W>::CONVERTS)
            if (!model.has_gates) return (const typename W::Input *)buffers.attended;
        const int64_t size = buffers.attended_size, rows = call.num_tokens;
        const int64_t stride = row_stride(W(), rows, size);
        for (int64_t i = worker.first(rows); i < worker.end(rows); ++i) {
            const T *from = buffers.attended + i * size;
            auto *to = row_of(W(), buffers.inputs, stride, i);
            if (model.has_gates || Buffers<W>::WHOLE_ROWS) {
                convert(from, size, own_row());
                if (model.has_gates) gate_heads(buffers.qkv + i * buffers.qkv_stride);
                put_row(W(), own_row(), size, stride, to);
            } else if constexpr (!Buffers<W>::WHOLE_ROWS) {
                convert(from, size, to);
            }
        }
        worker.wait();
        return buffers.inputs;
    }

    // Multiplies the heads of own_row with the sigmoids of the gates among a token's products.
    void gate_heads(const float *products) const {
        const int64_t size = model.head_size;
        for (int64_t h = 0; h < model.heads; ++h) {
            const float *gates = products + (2 * h + 1) * size;
            float *head = own_row() + h * size;
            for (int64_t i = 0; i < size; i += LANES)
                write_partial(read_partial(head, i, size, 0) *
                                  sigmoid(read_partial(gates, i, size, 0)),
                              head, i, size);
        }
    }

    // Computes the inputs of a recurrence's output projection.
    void recur(int64_t index) const {
        const RecurrentLayer &layer = *model.layers[index].recurrent;
        const int64_t rows = call.num_tokens, inner = recurrent_inner(layer);
        const int64_t stride = row_stride(W(), rows, inner);
        const RecurrentWork<T> work = {layer, call.cache->recurrent[index], *call.cache->rows,
                                       buffers.recurrent, call.segments, call.num_segments, rows,
                                       buffers.qkv, buffers.qkv_stride, worker};
        work.run();
        for (int64_t i = worker.first(rows); i < worker.end(rows); ++i) {
            work.gated_row(i, model.epsilon, own_row());
            put_row(W(), own_row(), inner, stride, row_of(W(), buffers.inputs, stride, i));
        }
        worker.wait();
    }

    void logits() {
        if (call.carried) carry();
        if (!call.logits || !call.num_logits) return;
        if (model.adapter_rank) adapt();
        if (!model.projector) return project(buffers.hidden, buffers.hidden_stride);
        DecoderCall projection = call;
        projection.model = model.projector;
        projection.memory = buffers.projection;
        project_by(projection, buffers.hidden, buffers.hidden_stride, worker);
    }

    // Computes the logits of rows of a residual stream.
    void project(const float *stream, int64_t stride) {
        const int64_t rows = call.num_logits;
        for (int64_t i = worker.first(rows); i < worker.end(rows); ++i)
            put_normed(stream + call.logit_tokens[i] * stride, model.norm,
                       row_of(W(), buffers.normed, buffers.normed_stride, i));
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
