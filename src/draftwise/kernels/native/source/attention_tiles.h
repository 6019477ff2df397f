// Attention on the processor's matrix unit (Intel AMX). Many queries share a key-value head if
// several tokens are verified or if query heads are grouped. A single query is computed in the same
// way, so that its result is the same bit by bit.
//
// The scores of a key are one vector with a lane for each of the 16 queries of a tile. The softmax
// of a query therefore compares and adds numbers of a single lane. Keys are read directly from the
// cache. Values of two keys are interleaved and weights are rounded, as in attention.h. The other
// properties of attention.h apply as well.

#pragma once

#include "attention.h"
#include "tiles.h"

#if defined(__AMX_BF16__)

namespace {

constexpr int TILE_QUERIES = 16, TILE_KEYS = 16;
constexpr int TILED_BLOCK = 64;        // keys of a block
constexpr int MAX_QUERY_TILES = 8;     // tiles of queries per head and pass over the keys
constexpr int PAIRS = TILE_DEPTH / 2;  // pairs of keys in a tile of values

INLINE bool fits_attention_tiles(int64_t key_size, int64_t value_size) {
    return key_size % TILE_DEPTH == 0 && value_size % TILE_DEPTH == 0 && may_use_tiles();
}

// Transposes a matrix of 16 x 16 words.
INLINE void transpose(Words *rows) {
    __m512i a[16], b[16];
    memcpy(a, rows, sizeof a);
    for (int i = 0; i < 16; i += 2) {
        b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]);
        b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
    }
    for (int i = 0; i < 16; i += 4)
        for (int j = 0; j < 2; ++j) {
            a[i + 2 * j] = _mm512_unpacklo_epi64(b[i + j], b[i + j + 2]);
            a[i + 2 * j + 1] = _mm512_unpackhi_epi64(b[i + j], b[i + j + 2]);
        }
    // Quarter q of a[4 g + c] contains word 4 q + c of the rows 4 g to 4 g + 3.
    for (int c = 0; c < 4; ++c) {
        b[c] = _mm512_shuffle_i32x4(a[c], a[4 + c], 0x88);
        b[4 + c] = _mm512_shuffle_i32x4(a[c], a[4 + c], 0xdd);
        b[8 + c] = _mm512_shuffle_i32x4(a[8 + c], a[12 + c], 0x88);
        b[12 + c] = _mm512_shuffle_i32x4(a[8 + c], a[12 + c], 0xdd);
    }
    for (int c = 0; c < 4; ++c) {
        a[c] = _mm512_shuffle_i32x4(b[c], b[8 + c], 0x88);
        a[8 + c] = _mm512_shuffle_i32x4(b[c], b[8 + c], 0xdd);
        a[4 + c] = _mm512_shuffle_i32x4(b[4 + c], b[12 + c], 0x88);
        a[12 + c] = _mm512_shuffle_i32x4(b[4 + c], b[12 + c], 0xdd);
    }
    memcpy(rows, a, sizeof a);
}

// The state of a tile of up to 16 queries of a key-value head, with one lane per query.
struct TiledQueries {
    Floats sum, shift;  // running softmax, as in RunningSoftmax
    Ints begin, last;   // positions of the first and the last key that each query attends to
    int min_begin;      // minimum of begin
    int max_begin;      // maximum of begin
    int min_last;       // minimum of last
    int count;          // number of queries
};

// The scratch memory of a task: buffers that its heads share, and the state of each tile of
// queries.
struct TiledScratch {
    int64_t key_steps, value_chunks;
    BFloat16 *keys;   // [TILED_BLOCK, key_size] copy of an incomplete block
    Words *values;    // [TILED_BLOCK / TILE_DEPTH, value_chunks, PAIRS]
    Floats *scores;   // [TILED_BLOCK]
    Words *weights;   // [TILED_BLOCK / TILE_DEPTH, TILE_QUERIES]
    char *tiles;
    int64_t bytes_of_tile, bytes;

    TiledScratch(int64_t key_size, int64_t value_size, int64_t num_tiles, char *memory) {
        bytes = 0;
        const auto allocate = [&](auto *&pointer, int64_t numbers) {
            pointer = (decltype(&*pointer))(memory + bytes);
            bytes += round_up(numbers * (int64_t)sizeof *pointer, CACHE_LINE);
        };
        key_steps = key_size / TILE_DEPTH;
        value_chunks = value_size / LANES;
        allocate(keys, TILED_BLOCK * key_size);
        allocate(values, TILED_BLOCK / TILE_DEPTH * value_chunks * PAIRS);
        allocate(scores, TILED_BLOCK);
        allocate(weights, TILED_BLOCK / TILE_DEPTH * TILE_QUERIES);
        bytes_of_tile = round_up(sizeof(TiledQueries), CACHE_LINE) +
                        (key_steps + value_chunks) * 16 * (int64_t)sizeof(Floats);
        allocate(tiles, num_tiles * bytes_of_tile);
    }

    TiledQueries &state(int64_t tile) const {
        return *(TiledQueries *)(tiles + tile * bytes_of_tile);
    }

    // [key_steps, 16] pairs of elements, with one lane per query.
    Words *queries(int64_t tile) const {
        return (Words *)(tiles + tile * bytes_of_tile +
                         round_up(sizeof(TiledQueries), CACHE_LINE));
    }

    // [value_chunks, 16] weighted sums of values, with one vector per query.
    Floats *sums(int64_t tile) const { return (Floats *)(queries(tile) + key_steps * 16); }
};

// Initialises a tile with the queries of a key-value head that start at index first.
INLINE void init_queries(const AttentionCall &call, const Segment &segment, int64_t kv_head,
                         int64_t first, const TiledScratch &memory, int64_t tile) {
    const int heads = (int)(call.heads / call.kv_heads);
    TiledQueries &state = memory.state(tile);
    state.count = min_int(TILE_QUERIES, heads * segment.count - first);
    state.sum = Floats{};
    state.shift = Floats{} + MINUS_INFINITY;
    state.min_last = (int)(segment.start + first / heads);
    Words *queries = memory.queries(tile);
    for (int i = 0; i < TILE_QUERIES; ++i) {
        const int64_t query = first + i;
        // Unused lanes have the causal mask of the first query.
        state.last[i] = i < state.count ? (int)(segment.start + query / heads) : state.min_last;
        state.begin[i] = (int)first_visible(call, state.last[i]);
        if (call.sinks && i < state.count) {
            state.shift[i] = (float)(call.sinks[kv_head * heads + query % heads] * LOG2_E);
            state.sum[i] = 1.0f;
        }
        for (int64_t step = 0; step < memory.key_steps; ++step) {
            Words row = {};
            if (i < state.count)
                memcpy(&row, (const BFloat16 *)call.queries +
                                 (segment.first_token + query / heads) * call.query_strides[0] +
                                 (kv_head * heads + query % heads) * call.query_strides[1] +
                                 step * TILE_DEPTH,
                       sizeof row);
            queries[step * 16 + i] = row;
        }
    }
    state.min_begin = state.begin[0];
    state.max_begin = state.begin[state.count - 1];
    for (int64_t step = 0; step < memory.key_steps; ++step) transpose(queries + step * 16);
    memset((void *)memory.sums(tile), 0, memory.value_chunks * 16 * sizeof(Floats));
}

// Interleaves the values of each two keys. For each two chunks, stores the pairs at even indices,
// then those at odd indices.
INLINE void pack_tiled_values(const BFloat16 *from, int64_t stride, int num_keys, int64_t chunks,
                              Words *to, NextBlock<BFloat16> &next_block) {
    const int num_pairs = (int)round_up(num_keys, TILE_DEPTH) / 2;
    for (int pair = 0; pair < num_pairs; ++pair) {
        next_block.prefetch();
        for (int64_t c = 0; c < chunks; c += 2) {
            Words first = {}, second = {};
            const BFloat16 *here = from + 2 * pair * stride + c * LANES;
            if (2 * pair < num_keys) memcpy(&first, here, sizeof first);
            if (2 * pair + 1 < num_keys) memcpy(&second, here + stride, sizeof second);
            Words *tile = to + (pair / PAIRS * chunks + c) * PAIRS + pair % PAIRS;
            tile[0] = (first & 0xffffu) | (second << 16);
            tile[PAIRS] = (first >> 16) | (second & 0xffff0000u);
        }
    }
}

// Computes the scores of COUNT tiles of keys (16 keys each) with a tile of queries.
template <int COUNT>
INLINE void score_tiles(const BFloat16 *keys, int64_t stride, const Words *queries, int64_t steps,
                        Floats *scores) {
    const int64_t bytes = stride * (int64_t)sizeof *keys;
    _tile_zero(0);
    _tile_zero(1);
    for (int64_t step = 0; step < steps; ++step) {
        _tile_loadd(6, queries + step * 16, TILE_BYTES);
        _tile_loadd(4, keys + step * TILE_DEPTH, bytes);
        _tile_dpbf16ps(0, 4, 6);
        if (COUNT == 2) {
            _tile_loadd(5, keys + TILE_KEYS * stride + step * TILE_DEPTH, bytes);
            _tile_dpbf16ps(1, 5, 6);
        }
    }
    _tile_stored(0, scores, TILE_BYTES);
    if (COUNT == 2) _tile_stored(1, scores + TILE_KEYS, TILE_BYTES);
}

// Computes 2^x for any x, accurate enough for weights that are rounded to BFloat16.
INLINE __m512 approximate_power_of_two(__m512 x) {
    const __m512 whole = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const __m512 f = _mm512_sub_ps(x, whole);
    __m512 series = _mm512_set1_ps(9.61812911e-3f);
    series = _mm512_fmadd_ps(series, f, _mm512_set1_ps(5.55041087e-2f));
    series = _mm512_fmadd_ps(series, f, _mm512_set1_ps(2.40226507e-1f));
    series = _mm512_fmadd_ps(series, f, _mm512_set1_ps(6.93147181e-1f));
    series = _mm512_fmadd_ps(series, f, _mm512_set1_ps(1.0f));
    return _mm512_scalef_ps(series, whole);
}

// Converts the scores of a block of keys to weights, a row of pairs for each query, and updates the
// running softmax and its sums. The keys are padded to num_rows with weights of 0.
INLINE void update_tile_softmax(Floats *scores, int num_keys, int num_rows, int64_t first,
                                float scale, TiledQueries &state, Floats *sums, int64_t chunks,
                                Words *weights, NextBlock<BFloat16> &next_block) {
    const Floats hidden = Floats{} + MINUS_INFINITY;
    for (int k = num_keys; k < num_rows; ++k) scores[k] = hidden;
    if (first + num_keys - 1 > state.min_last || first < state.max_begin)
        for (int k = 0; k < num_keys; ++k) {
            const int position = (int)first + k;
            scores[k] =
                (state.last >= position) & (state.begin <= position) ? scores[k] : hidden;
        }
    Floats tops[4] = {hidden, hidden, hidden, hidden};
    for (int k = 0; k < num_rows; k += 4)
        for (int i = 0; i < 4; ++i) tops[i] = lanewise_max(scores[k + i], tops[i]);
    const Floats top =
        lanewise_max(lanewise_max(tops[0], tops[1]), lanewise_max(tops[2], tops[3])) * scale;
    const uint32_t exceeded =
        _mm512_cmp_ps_mask((__m512)top, (__m512)(state.shift + MAX_EXCESS), _CMP_GT_OQ);
    if (exceeded) {
        const Floats shift = (Floats)_mm512_mask_mov_ps((__m512)state.shift, exceeded, (__m512)top);
        const Floats rescale = (Floats)_mm512_mask_mov_ps(
            (__m512)(Floats{} + 1.0f), exceeded, (__m512)power_of_two(state.shift - shift));
        state.sum *= rescale;
        state.shift = shift;
        if (first)  // before, the sums are 0
            for (int i = 0; i < state.count; ++i)
                for (int64_t c = 0; c < chunks; ++c) sums[c * 16 + i] *= rescale[i];
    }
    // While all scores are -infinity, the shift is -infinity too, and 0 is used instead.
    const __m512 shift = (__m512)(state.shift == hidden ? Floats{} : state.shift);
    const __m512 factor = _mm512_set1_ps(scale);
    const __m512i pairs = (__m512i)(Words{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15} *
                                        0x10001u +
                                    0x100000u);  // indices of the low and the high half
    const __m512bh ones = (__m512bh)(Words{} + 0x3f803f80u);
    __m512 sum = (__m512)state.sum;
    for (int k = 0; k < num_rows; k += 2) {
        next_block.prefetch();
        const __m512 even = _mm512_fmsub_ps((__m512)scores[k], factor, shift);
        const __m512 odd = _mm512_fmsub_ps((__m512)scores[k + 1], factor, shift);
        const __m512bh both =
            _mm512_cvtne2ps_pbh(approximate_power_of_two(odd), approximate_power_of_two(even));
        const __m512i row = _mm512_permutexvar_epi16(pairs, (__m512i)both);
        sum = _mm512_dpbf16_ps(sum, (__m512bh)row, ones);
        weights[k / 2] = (Words)row;
    }
    state.sum = (Floats)sum;
    for (int k = 0; k < num_rows; k += TILE_DEPTH) transpose(weights + k / 2);
}

// Adds the weighted values of a block of keys to WIDTH chunks of the sums of a tile of queries.
template <int WIDTH>
INLINE void add_tiles(const Words *weights, const Words *values, int num_rows, int64_t chunks,
                      Floats *sums) {
    _tile_loadd(0, sums, TILE_BYTES);
    _tile_loadd(1, sums + 16, TILE_BYTES);
    if (WIDTH == 4) {
        _tile_loadd(2, sums + 32, TILE_BYTES);
        _tile_loadd(3, sums + 48, TILE_BYTES);
    }
    for (int k = 0; k < num_rows; k += TILE_DEPTH, weights += 16, values += chunks * PAIRS) {
        _tile_loadd(4, weights, TILE_BYTES);
        _tile_loadd(6, values, TILE_BYTES);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, values + PAIRS, TILE_BYTES);
        _tile_dpbf16ps(1, 4, 7);
        if (WIDTH == 4) {
            _tile_loadd(6, values + 2 * PAIRS, TILE_BYTES);
            _tile_dpbf16ps(2, 4, 6);
            _tile_loadd(7, values + 3 * PAIRS, TILE_BYTES);
            _tile_dpbf16ps(3, 4, 7);
        }
    }
    _tile_stored(0, sums, TILE_BYTES);
    _tile_stored(1, sums + 16, TILE_BYTES);
    if (WIDTH == 4) {
        _tile_stored(2, sums + 32, TILE_BYTES);
        _tile_stored(3, sums + 48, TILE_BYTES);
    }
}

// Computes one block of keys of one key-value head for the tiles of queries first_tile to end_tile.
INLINE void attend_tiled_block(const AttentionCall &call, const BFloat16 *keys,
                               const BFloat16 *values, int64_t first, int num_keys,
                               int64_t first_tile, int64_t end_tile, const TiledScratch &memory,
                               NextBlock<BFloat16> &next_block) {
    const int64_t key_size = call.key_size, value_stride = call.kv_heads * call.value_size;
    const ScoreScale scale(call);
    const int num_rows = (int)round_up(num_keys, TILE_DEPTH);
    int64_t stride = call.kv_heads * key_size;
    if (num_keys % TILE_KEYS) {  // copied so that nothing after the last key is read
        for (int k = 0; k < (int)round_up(num_keys, TILE_KEYS); ++k)
            if (k < num_keys)
                memcpy(memory.keys + k * key_size, keys + k * stride, key_size * sizeof *keys);
            else
                memset((void *)(memory.keys + k * key_size), 0, key_size * sizeof *keys);
        keys = memory.keys;
        stride = key_size;
    }
    pack_tiled_values(values, value_stride, num_keys, memory.value_chunks, memory.values,
                      next_block);
    for (int64_t tile = first_tile; tile < end_tile; ++tile) {
        TiledQueries &state = memory.state(tile);
        // All keys are masked.
        if (state.last[state.count - 1] < first || first + num_keys <= state.min_begin) continue;
        Floats *sums = memory.sums(tile);
        // Tile loads and stores are unknown to the compiler.
        __asm__ volatile("" ::: "memory");
        for (int k = 0; k < num_keys; k += TILE_DEPTH)
            (num_keys - k > TILE_KEYS ? score_tiles<2> : score_tiles<1>)(
                keys + k * stride, stride, memory.queries(tile), memory.key_steps,
                memory.scores + k);
        __asm__ volatile("" ::: "memory");
        if (scale.cap)
            for (int k = 0; k < num_keys; ++k) memory.scores[k] = scale(memory.scores[k]);
        update_tile_softmax(memory.scores, num_keys, num_rows, first,
                            scale.cap ? 1.0f : scale.factor, state, sums, memory.value_chunks,
                            memory.weights, next_block);
        __asm__ volatile("" ::: "memory");
        int64_t c = 0;
        for (; c + 4 <= memory.value_chunks; c += 4)
            add_tiles<4>(memory.weights, memory.values + c * PAIRS, num_rows, memory.value_chunks,
                         sums + c * 16);
        for (; c < memory.value_chunks; c += 2)
            add_tiles<2>(memory.weights, memory.values + c * PAIRS, num_rows, memory.value_chunks,
                         sums + c * 16);
        __asm__ volatile("" ::: "memory");
    }
}

// Writes the results of a tile of queries.
INLINE void write_outputs(const AttentionCall &call, const Segment &segment, int64_t kv_head,
                          int64_t first, const TiledScratch &memory, int64_t tile) {
    const int heads = (int)(call.heads / call.kv_heads);
    const TiledQueries &state = memory.state(tile);
    const Floats *sums = memory.sums(tile);
    const Floats normalizers = 1.0f / state.sum;
    for (int i = 0; i < state.count; ++i) {
        const int64_t query = first + i;
        BFloat16 *out = (BFloat16 *)call.out + ((segment.first_token + query / heads) * call.heads +
                                                kv_head * heads + query % heads) *
                                                   call.value_size;
        for (int64_t c = 0; c < memory.value_chunks; c += 2, out += 2 * LANES) {
            const Floats pair[2] = {sums[c * 16 + i] * normalizers[i],
                                    sums[(c + 1) * 16 + i] * normalizers[i]};
            store(pair, out);
        }
    }
}

// The same as attend of attention.h.
void attend_tiled(const AttentionCall &call, const Segment &segment, int64_t first_head,
                  int64_t end_head, float *scratch) {
    const int64_t key_size = call.key_size, value_size = call.value_size;
    const int64_t key_stride = call.kv_heads * key_size, value_stride = call.kv_heads * value_size;
    BFloat16 *keys = (BFloat16 *)call.keys + segment.cache_slot * call.capacity * key_stride;
    BFloat16 *values = (BFloat16 *)call.values + segment.cache_slot * call.capacity * value_stride;
    const int64_t num_queries = call.heads / call.kv_heads * segment.count;
    const int64_t count_heads = end_head - first_head;
    if (call.new_keys)
        for (int64_t head = first_head; head < end_head; ++head) {
            append(segment, call.new_keys, call.key_strides, head, (int)key_size,
                   keys + head * key_size, key_stride, call.capacity);
            append(segment, call.new_values, call.value_strides, head, (int)value_size,
                   values + head * value_size, value_stride, call.capacity);
        }
    const TiledScratch memory(key_size, value_size, MAX_QUERY_TILES * count_heads, (char *)scratch);
    const TileConfig config(TILE_ROWS);
    for (int64_t begin = 0; begin < num_queries; begin += MAX_QUERY_TILES * TILE_QUERIES) {
        const int64_t end = min_int(num_queries, begin + MAX_QUERY_TILES * TILE_QUERIES);
        const auto for_tiles = [&](const auto &body) {
            for (int64_t head = first_head; head < end_head; ++head)
                for (int64_t first = begin; first < end; first += TILE_QUERIES)
                    body(call, segment, head, first, memory,
                         (head - first_head) * MAX_QUERY_TILES + (first - begin) / TILE_QUERIES);
        };
        for_tiles(init_queries);
        const int64_t num_tiles = (end - begin + TILE_QUERIES - 1) / TILE_QUERIES;
        const int64_t heads = call.heads / call.kv_heads;  // query heads per key-value head
        const int64_t length = segment.start + (end - 1) / heads + 1;  // visible to the last query
        const int64_t first_key =
            first_visible(call, segment.start + begin / heads) / TILED_BLOCK * TILED_BLOCK;
        for (int64_t first = first_key; first < length; first += TILED_BLOCK) {
            const int64_t slot = first % call.capacity;
            for (int64_t head = first_head; head < end_head; ++head) {
                NextBlock<BFloat16> next_block(call, keys, values, first_head, end_head, head,
                                               first, length, TILED_BLOCK);
                const int64_t tile = (head - first_head) * MAX_QUERY_TILES;
                attend_tiled_block(call, keys + slot * key_stride + head * key_size,
                                   values + slot * value_stride + head * value_size, first,
                                   min_int(TILED_BLOCK, length - first), tile, tile + num_tiles,
                                   memory, next_block);
                next_block.prefetch_rest();
            }
        }
        for_tiles(write_outputs);
    }
}

}  // namespace

#endif
