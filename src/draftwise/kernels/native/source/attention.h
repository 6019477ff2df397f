// Attention of a few new tokens to the KV cache of their request, on the CPU. It is causal, or new
// tokens also attend to the new tokens after them, as the rows of a drafted block do.
//
// A task computes some neighbouring key-value heads of one request. It stores the new keys and
// values and then reads each key and value of the request once, for all query heads and all new
// tokens. Keys and values are read in blocks that stay in the first-level cache. There is no
// padding, and memory beyond a request's length is never read. The kernel computes a running
// softmax over the blocks in float32 (Milakov and Gimelshein 2018, algorithm 3). If a token attends
// to a NaN, its result is NaN.
//
// A layer may limit attention to a window or to a chunk of positions. Its cache may then be a ring:
// position p is in token slot p % capacity. A ring's capacity is a multiple of the block size, so
// that no block wraps around.
//
// The caller provides the threads.

#pragma once

#include "vectors.h"

// New tokens of one request.
struct Segment {
    int64_t cache_slot;
    int64_t start;        // position of the first new token
    int64_t count;        // number of new tokens
    int64_t first_token;  // index of the first new token among the packed tokens
};

// Place of a new token in a token tree. Its place in the cache is that of its segment.
struct TreeToken {
    int64_t root;        // place in the cache of the tree's first token; for a token in no tree,
                         // that of its segment
    int64_t position;    // position in the text
    uint64_t ancestors;  // bit i: attends to the token at root + i; 0 for a token in no tree
};

// Arguments of draftwise_attention. Strides are in elements of the tokens and heads of new tensors.
// The last dimension of every tensor is contiguous.
struct AttentionCall {
    const void *queries;      // [tokens, heads, key_size]
    const void *new_keys;     // [tokens, kv_heads, key_size]; null if they are in the cache
    const void *new_values;   // [tokens, kv_heads, value_size]; null like new_keys
    const float *sinks;       // [heads] score of the attention sink; null for none
    void *keys;               // [cache_slots, capacity, kv_heads, key_size] KV cache
    void *values;             // [cache_slots, capacity, kv_heads, value_size] KV cache
    void *out;                // [tokens, heads, value_size] output, contiguous
    float *scratch;           // [threads, scratch_size] scratch memory, aligned to 64 bytes
    const Segment *segments;  // [num_segments]
    const TreeToken *tree;    // [tokens]; null if no segment is part of a tree
    int64_t query_strides[2], key_strides[2], value_strides[2];
    int64_t num_segments, capacity, heads, kv_heads, key_size, value_size;
    int64_t heads_per_task;  // key-value heads of a task
    int64_t scratch_size;    // floats per thread
    int64_t is_bfloat16;     // whether the tensors are BFloat16, not float32
    int64_t window;          // newest tokens that a token attends to, itself included; 0 for all
    int64_t chunk;           // size of the chunks that limit attention; 0 for no chunks
    double scale;            // factor of the scores
    double softcap;          // limit of the scores: softcap * tanh(score / softcap); 0 for none
    int64_t sees_segment;    // whether a token also attends to the new tokens after it, as far as its
                             // window reaches to both sides
    int64_t shares_window;   // whether the window of all tokens of a segment is that of the first
};

namespace {

constexpr int BLOCK = 32;  // keys of a block
constexpr int SCORE_VECTORS = BLOCK / LANES;  // vectors of scores per query and block
constexpr int PREFETCH_HEADS = 2;  // prefetch distance in key-value heads

// The first position that the token at a position attends to. It never decreases with the position.
INLINE int64_t first_visible(const AttentionCall &call, int64_t position) {
    int64_t first = 0;
    if (call.window && position >= call.window) first = position - call.window + 1;
    if (call.chunk) {
        const int64_t start = position - position % call.chunk;
        if (start > first) first = start;
    }
    return first;
}

// The place after the last one that the token at a place attends to, except in a token tree.
INLINE int64_t visible_end(const AttentionCall &call, const Segment &segment, int64_t place) {
    if (!call.sees_segment) return place + 1;
    const int64_t end = segment.start + segment.count;
    return call.window && !call.shares_window ? min_int(end, place + call.window) : end;
}

// Converts products of queries and keys to scores.
struct ScoreScale {
    float factor, cap;  // a score is cap * tanh(factor * product), or factor * product if cap is 0

    explicit ScoreScale(const AttentionCall &call)
        : factor((float)(call.softcap ? call.scale / call.softcap : call.scale * LOG2_E)),
          cap((float)(call.softcap * LOG2_E)) {}

    INLINE_MEMBER Floats operator()(Floats products) const {
        const Floats scaled = products * factor;
        return cap ? hyperbolic_tangent(scaled) * cap : scaled;
    }
};

// The arithmetic for elements of type T, which are widened to float32.
template <class T>
struct Widened {
    typedef T Element;
    typedef Floats Packed;  // vector of a query, of a key, or of the values of one step
    typedef float Weight;   // softmax weights of the keys of one step
    static constexpr int PACKED = LANES;     // elements of Packed
    static constexpr int KEYS_PER_STEP = 1;  // keys whose values are accumulated in one step

    // Number of vectors of size elements.
    static int vectors(int64_t size) {
        constexpr int step = WIDE_VECTORS<T> * LANES;
        return (int)((size + step - 1) / step) * WIDE_VECTORS<T>;
    }

    INLINE Floats multiply_add(Floats sum, Packed a, Packed b) { return sum + a * b; }

    INLINE Floats multiply_add(Floats sum, Packed a, Weight b) { return sum + a * b; }

    INLINE void pack(const T *from, int size, Packed *to) { widen(from, size, to); }

    // Packs the keys of a block and returns their address. stride receives the number of vectors
    // between two keys.
    INLINE const Packed *pack_keys(const T *from, int64_t from_stride, int num_keys, int size,
                                   Packed *to, int64_t *stride) {
        *stride = vectors(size);
        for (int t = 0; t < num_keys; ++t) widen(from + t * from_stride, size, to + t * *stride);
        return to;
    }

    // Packs the values of a block.
    INLINE void pack_values(const T *from, int64_t from_stride, int num_keys, int size,
                            Packed *to) {
        for (int t = 0; t < num_keys; ++t)
            widen(from + t * from_stride, size, to + t * vectors(size));
    }

    // Converts weights to type Weight, in place. Returns the sum of each lane.
    INLINE Floats pack_weights(Floats *weights) {
        Floats sum = weights[0];
        for (int g = 1; g < SCORE_VECTORS; ++g) sum += weights[g];
        return sum;
    }
};

#if defined(__AVX512BF16__)
// The same for BFloat16 with the dot-product instructions of AVX512-BF16, which accumulate in
// float32. Keys are read directly from the cache. Values of two keys are interleaved, and weights
// are rounded to BFloat16, as in PyTorch's kernels.
struct Paired {
    typedef BFloat16 Element;
    typedef Words Packed;
    typedef uint32_t Weight;
    static constexpr int PACKED = 2 * LANES;
    static constexpr int KEYS_PER_STEP = 2;

    static bool fits(int64_t size) { return size % PACKED == 0; }

    static int vectors(int64_t size) { return (int)size / PACKED; }

    INLINE Floats multiply_add(Floats sum, Packed a, Packed b) {
        return (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
    }

    INLINE Floats multiply_add(Floats sum, Packed a, Weight b) {
        return multiply_add(sum, a, Packed{} + b);
    }

    INLINE void pack(const BFloat16 *from, int size, Packed *to) {
        memcpy(to, from, size * sizeof(BFloat16));
    }

    INLINE const Packed *pack_keys(const BFloat16 *from, int64_t from_stride, int num_keys,
                                   int size, Packed *to, int64_t *stride) {
        if (num_keys == BLOCK && (uintptr_t)from % sizeof(Packed) == 0) {
            *stride = from_stride / PACKED;
            return (const Packed *)from;
        }
        // Keys are copied so that nothing after the last key is read.
        *stride = vectors(size);
        for (int t = 0; t < num_keys; ++t) pack(from + t * from_stride, size, to + t * *stride);
        return to;
    }

    // For each two keys, stores the pairs of values at even indices, then those at odd indices.
    INLINE void pack_values(const BFloat16 *from, int64_t from_stride, int num_keys, int size,
                            Packed *to) {
        for (int t = 0; t < num_keys; t += 2)
            for (int d = 0; d < size; d += PACKED, to += 2) {
                Words first, second = {};
                memcpy(&first, from + t * from_stride + d, sizeof first);
                if (t + 1 < num_keys)
                    memcpy(&second, from + (t + 1) * from_stride + d, sizeof second);
                to[0] = (first & 0xffffu) | (second << 16);
                to[1] = (first >> 16) | (second & 0xffff0000u);
            }
    }

    INLINE Floats pack_weights(Floats *weights) {
        const __m512bh rounded = _mm512_cvtne2ps_pbh((__m512)weights[1], (__m512)weights[0]);
        memcpy(weights, &rounded, sizeof rounded);
        Floats pair[2];
        load((const BFloat16 *)weights, pair);
        return pair[0] + pair[1];
    }
};
#endif

// Computes the dot products of a query and N keys. LANES / N adjacent lanes of the result hold the
// partial sums of one key. A key has CHUNKS vectors. If CHUNKS is 0, it has chunks vectors.
template <class F, int CHUNKS, int N>
INLINE Floats products(const typename F::Packed *query, const typename F::Packed *keys,
                       int64_t stride, int chunks) {
    if constexpr (N > 1) {
        return sum_neighbours(
            products<F, CHUNKS, N / 2>(query, keys, stride, chunks),
            products<F, CHUNKS, N / 2>(query, keys + N / 2 * stride, stride, chunks));
    } else {
        Floats sum = {};
        for (int c = 0; c < (CHUNKS ? CHUNKS : chunks); ++c)
            sum = F::multiply_add(sum, query[c], keys[c]);
        return sum;
    }
}

// Adds the weighted values of some steps to WIDTH vectors of the sums of NUM_QUERIES queries.
template <class F, int NUM_QUERIES, int WIDTH>
INLINE void add_weighted(Floats *sums, const typename F::Weight *weights,
                         const typename F::Packed *values, int first_step, int end_step,
                         int chunks) {
    Floats part[NUM_QUERIES][WIDTH];
    for (int i = 0; i < NUM_QUERIES; ++i)
        for (int c = 0; c < WIDTH; ++c) part[i][c] = sums[i * chunks + c];
    for (int t = first_step; t < end_step; ++t)
        for (int i = 0; i < NUM_QUERIES; ++i)
            for (int c = 0; c < WIDTH; ++c)
                part[i][c] = F::multiply_add(part[i][c], values[t * chunks + c],
                                             weights[i * BLOCK + t]);
    for (int i = 0; i < NUM_QUERIES; ++i)
        for (int c = 0; c < WIDTH; ++c) sums[i * chunks + c] = part[i][c];
}

// The same for all vectors of the sums.
template <class F, int NUM_QUERIES>
void add_weighted(Floats *sums, const Floats *weights, const typename F::Packed *values,
                  int first_step, int end_step, int chunks) {
    const typename F::Weight *block_weights = (const typename F::Weight *)weights;
    int c = 0;
    for (; c + 4 <= chunks; c += 4)
        add_weighted<F, NUM_QUERIES, 4>(sums + c, block_weights, values + c, first_step, end_step,
                                        chunks);
    for (; c < chunks; ++c)
        add_weighted<F, NUM_QUERIES, 1>(sums + c, block_weights, values + c, first_step, end_step,
                                        chunks);
}

// The running softmax of one query.
struct RunningSoftmax {
    Floats sum;   // sum of the weights of each lane
    float shift;  // subtracted from the scores before exponentiation
    int hidden;   // leading keys of the current block that the query does not attend to
    int visible;  // end of the keys of the current block that it attends to
    uint32_t attended;  // bit i: attends to key i of the current block, in a token tree

    bool sees_block() const { return hidden < visible; }
};

// The shift is updated only if the largest score exceeds it by more than this. Weights of up to 2
// to this power have the same relative accuracy in float32 as weights of up to 1.
constexpr float MAX_EXCESS = 16;

constexpr int SOFTMAX_SIZE = sizeof(RunningSoftmax) / sizeof(Floats);

// Converts the scores of one block to weights, in place, and updates the running softmax and its
// sums. The scores of masked keys count as -infinity.
template <class F>
INLINE void update_softmax(Floats *scores, ScoreScale scale, RunningSoftmax &softmax, Floats *sums,
                           int chunks) {
    for (int g = 0; g < SCORE_VECTORS; ++g) scores[g] = scale(scores[g]);
    const Floats masked = Floats{} + MINUS_INFINITY;
    if (softmax.visible < BLOCK || softmax.hidden > 0 || ~softmax.attended) {
        Ints lane;
        for (int i = 0; i < LANES; ++i) lane[i] = i;
        for (int g = 0; g < SCORE_VECTORS; ++g) {
            const Ints key = lane + g * LANES;
            const Ints attended = ((Ints{} + (int)softmax.attended) >> key) & 1;
            scores[g] = (key < softmax.visible) & (key >= softmax.hidden) & (attended != 0)
                            ? scores[g]
                            : masked;
        }
    }
    Floats top = scores[0];
    for (int g = 1; g < SCORE_VECTORS; ++g) top = lanewise_max(scores[g], top);
    const float maximum = horizontal_max(top);
    if (maximum > softmax.shift + MAX_EXCESS) {
        const Floats rescale = power_of_two(Floats{} + (softmax.shift - maximum));
        for (int c = 0; c < chunks; ++c) sums[c] *= rescale;
        softmax.sum *= rescale;
        softmax.shift = maximum;
    }
    // While all scores are -infinity, the shift is -infinity too, and 0 is used instead.
    const float shift = softmax.shift == MINUS_INFINITY ? 0.0f : softmax.shift;
    for (int g = 0; g < SCORE_VECTORS; ++g) scores[g] = power_of_two(scores[g] - shift);
    softmax.sum += F::pack_weights(scores);
}

// The keys of the block that begins at place first to which a token attends, as bits.
INLINE uint32_t attended_keys(const TreeToken &token, int64_t first) {
    static_assert(BLOCK == 32, "a bit for each key of a block");
    if (!token.ancestors) return ~0u;
    const int64_t offset = first - token.root;
    if (offset <= -BLOCK || offset >= 64) return offset < 0 ? ~0u : 0u;
    if (offset >= 0) return (uint32_t)(token.ancestors >> offset);
    return (uint32_t)(token.ancestors << -offset) | ((1u << -offset) - 1);
}

// A later block of keys and values, which is prefetched key by key.
template <class T>
struct NextBlock {
    const T *keys, *values;
    int64_t key_stride, value_stride;
    int key_bytes, value_bytes, num_left;

    // The block that is needed PREFETCH_HEADS heads later, which is about the latency of memory.
    NextBlock(const AttentionCall &call, const T *all_keys, const T *all_values,
              int64_t first_head, int64_t end_head, int64_t head, int64_t first, int64_t length,
              int block) {
        const int64_t count_heads = end_head - first_head;
        const int64_t offset = head - first_head + PREFETCH_HEADS;
        const int64_t next = first + offset / count_heads * block;
        const int64_t at =
            next % call.capacity * call.kv_heads + first_head + offset % count_heads;
        keys = all_keys + at * call.key_size;
        values = all_values + at * call.value_size;
        key_stride = call.kv_heads * call.key_size;
        value_stride = call.kv_heads * call.value_size;
        key_bytes = (int)(call.key_size * sizeof(T));
        value_bytes = (int)(call.value_size * sizeof(T));
        num_left = next < length ? min_int(block, length - next) : 0;
    }

    // Prefetches the next key and its value.
    void prefetch() {
        if (num_left <= 0) return;
        for (int byte = 0; byte < key_bytes; byte += CACHE_LINE)
            __builtin_prefetch((const char *)keys + byte, 0, 2);
        for (int byte = 0; byte < value_bytes; byte += CACHE_LINE)
            __builtin_prefetch((const char *)values + byte, 0, 2);
        keys += key_stride;
        values += value_stride;
        --num_left;
    }

    // Prefetches all remaining keys and values.
    void prefetch_rest() {
        while (num_left > 0) prefetch();
    }
};

// Stores the new keys or values of a segment in the cache.
template <class T>
INLINE void append(const Segment &segment, const void *from, const int64_t *strides, int64_t head,
                   int size, T *to, int64_t to_stride, int64_t capacity) {
    const T *first = (const T *)from + segment.first_token * strides[0] + head * strides[1];
    int64_t slot = segment.start % capacity;
    for (int64_t j = 0; j < segment.count; ++j) {
        memcpy(to + slot * to_stride, first + j * strides[0], size * sizeof(T));
        if (++slot == capacity) slot = 0;
    }
}

// The state of one key-value head of a task, in scratch memory.
template <class F>
struct HeadState {
    typename F::Packed *queries;  // [queries, key_chunks]
    Floats *sums;                 // [queries, value_chunks] weighted sums of values
    RunningSoftmax *softmax;      // [queries]
};

// Computes one block of keys of one key-value head for all queries of the segment.
template <class F, int CHUNKS>
void attend_block(const AttentionCall &call, const Segment &segment, const HeadState<F> &head,
                  const typename F::Element *keys, const typename F::Element *values, int64_t first,
                  Floats *scratch) {
    typedef typename F::Packed Packed;
    const int key_size = (int)call.key_size, value_size = (int)call.value_size;
    const int key_chunks = CHUNKS ? CHUNKS : F::vectors(key_size);
    const int value_chunks = F::vectors(value_size) * F::KEYS_PER_STEP;
    const int heads = (int)(call.heads / call.kv_heads);
    const int num_queries = heads * (int)segment.count;
    const int num_keys = min_int(BLOCK, segment.start + segment.count - first);
    const ScoreScale scale(call);
    Packed *key_block = (Packed *)scratch;
    Packed *value_block = key_block + BLOCK * key_chunks;
    Floats *weights = (Floats *)(value_block + BLOCK / F::KEYS_PER_STEP * value_chunks);

    int64_t stride;
    const Packed *packed_keys =
        F::pack_keys(keys, call.kv_heads * key_size, num_keys, key_size, key_block, &stride);
    // Causal mask: token j attends to the keys up to its own, and tokens before this block are
    // skipped. Tokens that see the tokens after them are never skipped.
    const int64_t num_skipped = call.sees_segment ? 0 : first - segment.start;
    const int first_query = num_skipped > 0 ? (int)num_skipped * heads : 0;
    for (int i = first_query, j = first_query / heads; i < num_queries; ++j) {
        const int64_t place = segment.start + j;
        const TreeToken *token = call.tree ? call.tree + segment.first_token + j : nullptr;
        const int64_t own = call.shares_window ? segment.start : place;
        const int64_t position = token ? token->position : own;
        const int64_t num_hidden = first_visible(call, position) - first;
        const uint32_t attended = token ? attended_keys(*token, first) : ~0u;
        const int64_t end_visible = visible_end(call, segment, place);
        for (const int end = i + heads; i < end; ++i) {
            head.softmax[i].hidden = num_hidden > 0 ? min_int(BLOCK, num_hidden) : 0;
            head.softmax[i].visible = min_int(BLOCK, end_visible - first);
            head.softmax[i].attended = attended;
        }
    }
    for (int i = first_query; i < num_queries; ++i) {
        const int hidden = head.softmax[i].hidden, visible = head.softmax[i].visible;
        if (hidden >= visible) continue;
        Floats *scores = weights + i * SCORE_VECTORS;
        for (int g = 0; g < SCORE_VECTORS; ++g)
            scores[g] = g * LANES < visible && (g + 1) * LANES > hidden
                            ? products<F, CHUNKS, LANES>(head.queries + i * key_chunks,
                                                         packed_keys + g * LANES * stride, stride,
                                                         key_chunks)
                            : Floats{};
        update_softmax<F>(scores, scale, head.softmax[i], head.sums + i * value_chunks,
                          value_chunks);
    }

    F::pack_values(values, call.kv_heads * value_size, num_keys, value_size, value_block);
    for (int i = first_query; i < num_queries;) {
        // Up to four queries with the same visible keys are computed together. With two keys per
        // step, the first and the last step may contain a masked key, whose weight is 0.
        const RunningSoftmax &softmax = head.softmax[i];
        if (!softmax.sees_block()) {
            ++i;
            continue;
        }
        const int first_step = softmax.hidden / F::KEYS_PER_STEP;
        const int end_step = (softmax.visible + F::KEYS_PER_STEP - 1) / F::KEYS_PER_STEP;
        int num_joint = 1;
        while (num_joint < 4 && i + num_joint < num_queries &&
               head.softmax[i + num_joint].visible == softmax.visible &&
               head.softmax[i + num_joint].hidden == softmax.hidden)
            ++num_joint;
        Floats *query_sums = head.sums + i * value_chunks;
        const Floats *block_weights = weights + i * SCORE_VECTORS;
        const auto add = num_joint == 1   ? add_weighted<F, 1>
                         : num_joint == 2 ? add_weighted<F, 2>
                         : num_joint == 3 ? add_weighted<F, 3>
                                          : add_weighted<F, 4>;
        add(query_sums, block_weights, value_block, first_step, end_step, value_chunks);
        i += num_joint;
    }
}

// Computes the key-value heads first_head to end_head of one request. The inner loop is over the
// heads, so that memory is read sequentially.
template <class F, int CHUNKS>
void attend(const AttentionCall &call, const Segment &segment, int64_t first_head,
            int64_t end_head, float *memory) {
    typedef typename F::Element T;
    Floats *const scratch = (Floats *)memory;
    const int key_size = (int)call.key_size, value_size = (int)call.value_size;
    const int key_chunks = CHUNKS ? CHUNKS : F::vectors(key_size);
    const int value_chunks = F::vectors(value_size) * F::KEYS_PER_STEP;
    const int64_t key_stride = call.kv_heads * key_size, value_stride = call.kv_heads * value_size;
    const int heads = (int)(call.heads / call.kv_heads);  // query heads per key-value head
    const int num_queries = heads * (int)segment.count;
    T *keys = (T *)call.keys + segment.cache_slot * call.capacity * key_stride;
    T *values = (T *)call.values + segment.cache_slot * call.capacity * value_stride;

    const int64_t shared = BLOCK * (key_chunks + value_chunks / F::KEYS_PER_STEP);
    Floats *states = scratch + shared + num_queries * SCORE_VECTORS;
    const auto state = [&](int64_t kv_head) {
        HeadState<F> head;
        const int64_t size = num_queries * (key_chunks + value_chunks + SOFTMAX_SIZE);
        head.queries = (typename F::Packed *)(states + (kv_head - first_head) * size);
        head.sums = (Floats *)(head.queries + num_queries * key_chunks);
        head.softmax = (RunningSoftmax *)(head.sums + num_queries * value_chunks);
        return head;
    };
    for (int64_t kv_head = first_head; kv_head < end_head; ++kv_head) {
        if (call.new_keys) {
            append(segment, call.new_keys, call.key_strides, kv_head, key_size,
                   keys + kv_head * key_size, key_stride, call.capacity);
            append(segment, call.new_values, call.value_strides, kv_head, value_size,
                   values + kv_head * value_size, value_stride, call.capacity);
        }
        const HeadState<F> head = state(kv_head);
        for (int i = 0; i < num_queries; ++i) {
            const T *query = (const T *)call.queries +
                             (segment.first_token + i / heads) * call.query_strides[0] +
                             (kv_head * heads + i % heads) * call.query_strides[1];
            F::pack(query, key_size, head.queries + i * key_chunks);
            for (int c = 0; c < value_chunks; ++c) head.sums[i * value_chunks + c] = Floats{};
            head.softmax[i] = {Floats{}, MINUS_INFINITY, 0, 0, ~0u};
            if (call.sinks) {
                head.softmax[i].shift = (float)(call.sinks[kv_head * heads + i % heads] * LOG2_E);
                head.softmax[i].sum[0] = 1.0f;
            }
        }
    }

    const int64_t length = segment.start + segment.count;
    const int64_t earliest = call.tree ? call.tree[segment.first_token].root : segment.start;
    const int64_t begin = first_visible(call, earliest) / BLOCK * BLOCK;
    for (int64_t first = begin; first < length; first += BLOCK) {
        const int64_t slot = first % call.capacity;
        for (int64_t kv_head = first_head; kv_head < end_head; ++kv_head) {
            NextBlock<T>(call, keys, values, first_head, end_head, kv_head, first, length, BLOCK)
                .prefetch_rest();
            attend_block<F, CHUNKS>(call, segment, state(kv_head),
                                    keys + slot * key_stride + kv_head * key_size,
                                    values + slot * value_stride + kv_head * value_size, first,
                                    scratch);
        }
    }

    for (int64_t kv_head = first_head; kv_head < end_head; ++kv_head) {
        const HeadState<F> head = state(kv_head);
        for (int i = 0; i < num_queries; ++i) {
            T *out = (T *)call.out + ((segment.first_token + i / heads) * call.heads +
                                      kv_head * heads + i % heads) * value_size;
            Floats *sums = head.sums + i * value_chunks;
            const float normalizer = 1.0f / horizontal_sum(head.softmax[i].sum);
            for (int c = 0; c < value_chunks; ++c) sums[c] *= normalizer;
            narrow(sums, value_size, out);
        }
    }
}

// Floats of scratch memory that a thread needs for segments of up to num_tokens tokens.
int64_t vector_scratch_size(int64_t num_tokens, int64_t heads, int64_t kv_heads,
                            int64_t heads_per_task, int64_t key_size, int64_t value_size) {
    const int64_t queries = num_tokens * (heads / kv_heads);
    typedef Widened<BFloat16> Largest;
    const int64_t chunks = Largest::vectors(key_size) + Largest::vectors(value_size);
    const int64_t states = heads_per_task * queries * (chunks + SOFTMAX_SIZE);
    const int64_t size = LANES * (BLOCK * chunks + queries * SCORE_VECTORS + states);
    return round_up(size, 16);
}

}  // namespace
