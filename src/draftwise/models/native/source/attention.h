// Attention of a few new tokens to their request's cached keys and values, on the CPU.
//
// Neighbouring key-value heads of a request are one task. A task stores its new keys and values,
// then reads each key and value of the request once, in blocks that stay in the first-level cache,
// for all query heads and all new tokens together. Lengths are exact: nothing is padded, and memory
// beyond a request's length is never read. The softmax runs along with the blocks (Milakov and
// Gimelshein 2018, algorithm 3), in float32. A NaN that a token may see makes its result NaN.
//
// Threads are the caller's: it passes the function that runs something on all of them.

#pragma once

#include "vectors.h"

// New tokens of one request.
struct Segment {
    int64_t row, start, count, first_token;
};

// Strides are in elements; the last dimension of every tensor is contiguous.
struct AttentionCall {
    const void *queries;     // [tokens, heads, key_size]
    const void *new_keys;    // [tokens, kv_heads, key_size], or null: they are in the cache already
    const void *new_values;  // [tokens, kv_heads, value_size], likewise
    void *keys;              // [rows, capacity, kv_heads, key_size]
    void *values;            // [rows, capacity, kv_heads, value_size]
    void *out;               // [tokens, heads, value_size], contiguous
    float *scratch;          // scratch_size floats for each thread, aligned to 64 bytes
    const Segment *segments;
    int64_t query_strides[2], key_strides[2], value_strides[2];
    int64_t num_segments, capacity, heads, kv_heads, key_size, value_size;
    int64_t heads_per_task, scratch_size, is_bfloat16;
    double scale;
};

namespace {

constexpr int BLOCK = 32;  // keys that are looked at together
constexpr int GROUPS = BLOCK / LANES;
constexpr int PREFETCH_HEADS = 2;  // how far ahead memory is asked for

// How numbers of type T are multiplied: as float32.
template <class T>
struct Widened {
    typedef T Number;
    typedef Floats Packed;  // part of a query, a key, or the values of one step
    typedef float Weight;   // of the values of one step
    static constexpr int PACKED = LANES;  // numbers in Packed
    static constexpr int KEYS_PER_STEP = 1;

    // Vectors that so many numbers take.
    static int vectors(int64_t size) {
        constexpr int step = PAIR<T> * LANES;
        return (int)((size + step - 1) / step) * PAIR<T>;
    }

    INLINE Floats multiply_add(Floats sum, Packed a, Packed b) { return sum + a * b; }

    INLINE Floats multiply_add(Floats sum, Packed a, Weight b) { return sum + a * b; }

    INLINE void pack(const T *from, int size, Packed *to) { widen(from, size, to); }

    // Keys that are looked at one after another; stride counts vectors.
    INLINE const Packed *pack_keys(const T *from, int64_t from_stride, int num_keys, int size,
                                   Packed *to, int64_t *stride) {
        *stride = vectors(size);
        for (int t = 0; t < num_keys; ++t) widen(from + t * from_stride, size, to + t * *stride);
        return to;
    }

    INLINE void pack_values(const T *from, int64_t from_stride, int num_keys, int size,
                            Packed *to) {
        for (int t = 0; t < num_keys; ++t)
            widen(from + t * from_stride, size, to + t * vectors(size));
    }

    // Weights as they are used, in place; returns their sum, lane by lane.
    INLINE Floats pack_weights(Floats *weights) {
        Floats sum = weights[0];
        for (int g = 1; g < GROUPS; ++g) sum += weights[g];
        return sum;
    }
};

#if defined(__AVX512BF16__)
// Processors that multiply pairs of BFloat16 and add to float32. Keys are used where they lie;
// values of two keys are interleaved, and weights are rounded, as in PyTorch's own kernels.
struct Paired {
    typedef BFloat16 Number;
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
        // Nothing behind the last key is read.
        *stride = vectors(size);
        for (int t = 0; t < num_keys; ++t) pack(from + t * from_stride, size, to + t * *stride);
        return to;
    }

    // Of each two keys: the values at even places, then those at odd places.
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

// Lane i holds, summed over LANES / N lanes, the product of the query and the i-th of N keys.
// CHUNKS vectors make one key; 0 stands for the number given at run time.
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

// Add the weighted values of some steps to the sums of NUM_QUERIES queries; WIDTH vectors of each.
template <class F, int NUM_QUERIES, int WIDTH>
INLINE void add_weighted(Floats *sums, const typename F::Weight *weights,
                         const typename F::Packed *values, int num_steps, int chunks) {
    Floats part[NUM_QUERIES][WIDTH];
    for (int i = 0; i < NUM_QUERIES; ++i)
        for (int c = 0; c < WIDTH; ++c) part[i][c] = sums[i * chunks + c];
    for (int t = 0; t < num_steps; ++t)
        for (int i = 0; i < NUM_QUERIES; ++i)
            for (int c = 0; c < WIDTH; ++c)
                part[i][c] = F::multiply_add(part[i][c], values[t * chunks + c],
                                             weights[i * BLOCK + t]);
    for (int i = 0; i < NUM_QUERIES; ++i)
        for (int c = 0; c < WIDTH; ++c) sums[i * chunks + c] = part[i][c];
}

template <class F, int NUM_QUERIES>
void add_weighted(Floats *sums, const Floats *weights, const typename F::Packed *values,
                  int num_steps, int chunks) {
    const typename F::Weight *by = (const typename F::Weight *)weights;
    int c = 0;
    for (; c + 4 <= chunks; c += 4)
        add_weighted<F, NUM_QUERIES, 4>(sums + c, by, values + c, num_steps, chunks);
    for (; c < chunks; ++c)
        add_weighted<F, NUM_QUERIES, 1>(sums + c, by, values + c, num_steps, chunks);
}

// The running softmax of one query.
struct Running {
    Floats sum;   // of weights, lane by lane
    float shift;  // taken off the scores, so that weights stay in range
    int visible;  // how many keys of the present block it sees
};

// The shift follows the largest score only when that has grown by this much: in float32, weights of
// up to 2 to this power are as exact as those of up to 1.
constexpr float MAX_EXCESS = 16;

constexpr int RUNNING_SIZE = sizeof(Running) / sizeof(Floats);

// Turn the scores of one block into weights. A score beyond the visible ones counts as -infinity.
template <class F>
INLINE void weigh(Floats *scores, float scale, Running &running, Floats *sums, int chunks) {
    for (int g = 0; g < GROUPS; ++g) scores[g] *= scale;
    const Floats hidden = Floats{} + MINUS_INFINITY;
    if (running.visible < BLOCK) {
        Ints lane;
        for (int i = 0; i < LANES; ++i) lane[i] = i;
        for (int g = 0; g < GROUPS; ++g)
            scores[g] = lane + g * LANES < running.visible ? scores[g] : hidden;
    }
    Floats top = scores[0];
    for (int g = 1; g < GROUPS; ++g) top = larger(scores[g], top);
    const float maximum = largest(top);
    if (maximum > running.shift + MAX_EXCESS) {
        const Floats shrink = power_of_two(Floats{} + (running.shift - maximum));
        for (int c = 0; c < chunks; ++c) sums[c] *= shrink;
        running.sum *= shrink;
        running.shift = maximum;
    }
    // As long as all scores are -infinity, there is nothing to shift by.
    const float shift = running.shift == MINUS_INFINITY ? 0.0f : running.shift;
    for (int g = 0; g < GROUPS; ++g) scores[g] = power_of_two(scores[g] - shift);
    running.sum += F::pack_weights(scores);
}

// Keys and values that are needed later, asked for one after the other.
template <class T>
struct NextBlock {
    const T *keys, *values;
    int64_t key_stride, value_stride;
    int key_bytes, value_bytes, left;

    // The block that is needed two heads later: about as long memory takes to answer.
    NextBlock(const AttentionCall &call, const T *all_keys, const T *all_values,
              int64_t first_head, int64_t end_head, int64_t head, int64_t first, int64_t length,
              int block) {
        const int64_t count_heads = end_head - first_head;
        const int64_t ahead = head - first_head + PREFETCH_HEADS;
        const int64_t next = first + ahead / count_heads * block;
        const int64_t at = next * call.kv_heads + first_head + ahead % count_heads;
        keys = all_keys + at * call.key_size;
        values = all_values + at * call.value_size;
        key_stride = call.kv_heads * call.key_size;
        value_stride = call.kv_heads * call.value_size;
        key_bytes = (int)(call.key_size * sizeof(T));
        value_bytes = (int)(call.value_size * sizeof(T));
        left = next < length ? least(block, length - next) : 0;
    }

    // One key and its value.
    void ask() {
        if (left <= 0) return;
        for (int byte = 0; byte < key_bytes; byte += CACHE_LINE)
            __builtin_prefetch((const char *)keys + byte, 0, 2);
        for (int byte = 0; byte < value_bytes; byte += CACHE_LINE)
            __builtin_prefetch((const char *)values + byte, 0, 2);
        keys += key_stride;
        values += value_stride;
        --left;
    }

    void ask_rest() {
        while (left > 0) ask();
    }
};

// Store the new keys or values of a segment.
template <class T>
INLINE void append(const Segment &segment, const void *from, const int64_t *strides, int64_t head,
                   int size, T *to, int64_t to_stride) {
    const T *first = (const T *)from + segment.first_token * strides[0] + head * strides[1];
    for (int64_t j = 0; j < segment.count; ++j)
        memcpy(to + (segment.start + j) * to_stride, first + j * strides[0], size * sizeof(T));
}

// What a task keeps for each key-value head.
template <class F>
struct Head {
    typename F::Packed *queries;
    Floats *sums;
    Running *running;
};

// One block of one key-value head, for all queries of the segment.
template <class F, int CHUNKS>
void attend_block(const AttentionCall &call, const Segment &segment, const Head<F> &head,
                  const typename F::Number *keys, const typename F::Number *values, int64_t first,
                  Floats *scratch) {
    typedef typename F::Packed Packed;
    const int key_size = (int)call.key_size, value_size = (int)call.value_size;
    const int key_chunks = CHUNKS ? CHUNKS : F::vectors(key_size);
    const int value_chunks = F::vectors(value_size) * F::KEYS_PER_STEP;
    const int heads = (int)(call.heads / call.kv_heads);
    const int num_queries = heads * (int)segment.count;
    const int num_keys = least(BLOCK, segment.start + segment.count - first);
    const float scale = (float)(call.scale * 1.4426950408889634);  // for powers of two
    Packed *key_block = (Packed *)scratch;
    Packed *value_block = key_block + BLOCK * key_chunks;
    Floats *weights = (Floats *)(value_block + BLOCK / F::KEYS_PER_STEP * value_chunks);

    int64_t stride;
    const Packed *packed_keys =
        F::pack_keys(keys, call.kv_heads * key_size, num_keys, key_size, key_block, &stride);
    // Token j sees the keys up to its own; whoever sees none of this block is not touched.
    const int64_t unseen = first - segment.start;
    const int from = unseen > 0 ? (int)unseen * heads : 0;
    for (int i = from, j = from / heads; i < num_queries; ++j)
        for (const int end = i + heads; i < end; ++i)
            head.running[i].visible = least(BLOCK, segment.start + j + 1 - first);
    for (int i = from; i < num_queries; ++i) {
        const int visible = head.running[i].visible;
        Floats *scores = weights + i * GROUPS;
        for (int g = 0; g < GROUPS; ++g)
            scores[g] = g * LANES < visible
                            ? products<F, CHUNKS, LANES>(head.queries + i * key_chunks,
                                                         packed_keys + g * LANES * stride, stride,
                                                         key_chunks)
                            : Floats{};
        weigh<F>(scores, scale, head.running[i], head.sums + i * value_chunks,
                 value_chunks);
    }

    F::pack_values(values, call.kv_heads * value_size, num_keys, value_size, value_block);
    for (int i = from; i < num_queries;) {
        // Together go queries that see equally many. (In pairs, the last key's partner may be one
        // of the same request's later tokens, with a weight of 0.)
        const int visible = head.running[i].visible;
        const int steps = (visible + F::KEYS_PER_STEP - 1) / F::KEYS_PER_STEP;
        int together = 1;
        while (together < 4 && i + together < num_queries &&
               head.running[i + together].visible == visible)
            ++together;
        Floats *into = head.sums + i * value_chunks;
        const Floats *by = weights + i * GROUPS;
        switch (together) {
            case 1: add_weighted<F, 1>(into, by, value_block, steps, value_chunks); break;
            case 2: add_weighted<F, 2>(into, by, value_block, steps, value_chunks); break;
            case 3: add_weighted<F, 3>(into, by, value_block, steps, value_chunks); break;
            default: add_weighted<F, 4>(into, by, value_block, steps, value_chunks);
        }
        i += together;
    }
}

// One request and neighbouring key-value heads. The heads take turns block by block, so that memory
// is read in the order in which it lies.
template <class F, int CHUNKS>
void attend(const AttentionCall &call, const Segment &segment, int64_t first_head,
            int64_t end_head, float *memory) {
    typedef typename F::Number T;
    Floats *const scratch = (Floats *)memory;
    const int key_size = (int)call.key_size, value_size = (int)call.value_size;
    const int key_chunks = CHUNKS ? CHUNKS : F::vectors(key_size);
    const int value_chunks = F::vectors(value_size) * F::KEYS_PER_STEP;
    const int64_t key_stride = call.kv_heads * key_size, value_stride = call.kv_heads * value_size;
    const int heads = (int)(call.heads / call.kv_heads);  // that share one key-value head
    const int num_queries = heads * (int)segment.count;
    T *keys = (T *)call.keys + segment.row * call.capacity * key_stride;
    T *values = (T *)call.values + segment.row * call.capacity * value_stride;

    const int64_t shared = BLOCK * (key_chunks + value_chunks / F::KEYS_PER_STEP);
    Floats *states = scratch + shared + num_queries * GROUPS;
    const auto state = [&](int64_t kv_head) {
        Head<F> head;
        const int64_t size = num_queries * (key_chunks + value_chunks + RUNNING_SIZE);
        head.queries = (typename F::Packed *)(states + (kv_head - first_head) * size);
        head.sums = (Floats *)(head.queries + num_queries * key_chunks);
        head.running = (Running *)(head.sums + num_queries * value_chunks);
        return head;
    };
    for (int64_t kv_head = first_head; kv_head < end_head; ++kv_head) {
        if (call.new_keys) {
            append(segment, call.new_keys, call.key_strides, kv_head, key_size,
                   keys + kv_head * key_size, key_stride);
            append(segment, call.new_values, call.value_strides, kv_head, value_size,
                   values + kv_head * value_size, value_stride);
        }
        const Head<F> head = state(kv_head);
        for (int i = 0; i < num_queries; ++i) {
            const T *query = (const T *)call.queries +
                             (segment.first_token + i / heads) * call.query_strides[0] +
                             (kv_head * heads + i % heads) * call.query_strides[1];
            F::pack(query, key_size, head.queries + i * key_chunks);
            for (int c = 0; c < value_chunks; ++c) head.sums[i * value_chunks + c] = Floats{};
            head.running[i] = {Floats{}, MINUS_INFINITY, 0};
        }
    }

    const int64_t length = segment.start + segment.count;
    for (int64_t first = 0; first < length; first += BLOCK)
        for (int64_t kv_head = first_head; kv_head < end_head; ++kv_head) {
            NextBlock<T>(call, keys, values, first_head, end_head, kv_head, first, length, BLOCK)
                .ask_rest();
            attend_block<F, CHUNKS>(call, segment, state(kv_head),
                                    keys + first * key_stride + kv_head * key_size,
                                    values + first * value_stride + kv_head * value_size, first,
                                    scratch);
        }

    for (int64_t kv_head = first_head; kv_head < end_head; ++kv_head) {
        const Head<F> head = state(kv_head);
        for (int i = 0; i < num_queries; ++i) {
            T *out = (T *)call.out + ((segment.first_token + i / heads) * call.heads +
                                      kv_head * heads + i % heads) * value_size;
            Floats *sums = head.sums + i * value_chunks;
            const float normalizer = 1.0f / total(head.running[i].sum);
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
    const int64_t states = heads_per_task * queries * (chunks + RUNNING_SIZE);
    const int64_t size = LANES * (BLOCK * chunks + queries * GROUPS + states);
    return rounded_up(size, 16);
}

}  // namespace
