// What Python calls. Only these functions leave the library, and all their names begin with
// draftwise_: others, such as POSIX's accept, are never taken for ours or ours for them.

#include "acceptance.h"
#include "attention_tasks.h"
#include "compression.h"
#include "decoder.h"
#include "drafting.h"
#include "narrow.h"
#include "sampling.h"
#include "threads.h"
#include "tiles.h"

// The library is compiled with -fvisibility=hidden.
#define DRAFTWISE_EXPORT extern "C" __attribute__((visibility("default")))

// Bytes of a structure that Python declares as well.
struct StructureSize {
    const char *name;
    int64_t size;
};

// Python compares these with its own when it loads the library. A null name marks the end.
DRAFTWISE_EXPORT const StructureSize *draftwise_structure_sizes() {
#define SIZE_OF(structure) {#structure, sizeof(structure)}
    static const StructureSize sizes[] = {
        SIZE_OF(AcceptanceCall),
        SIZE_OF(AttentionCall),
        SIZE_OF(DecoderCache),
        SIZE_OF(DecoderCall),
        SIZE_OF(DecoderLayer),
        SIZE_OF(DecoderModel),
        SIZE_OF(DistributionCall),
        SIZE_OF(DraftCall),
        SIZE_OF(DraftRule),
        SIZE_OF(ScoreCall),
        SIZE_OF(NarrowHeader),
        SIZE_OF(Sampling),
        SIZE_OF(Segment),
        SIZE_OF(Threads),
        {nullptr, 0},
    };
#undef SIZE_OF
    return sizes;
}

// Floats of scratch memory that a thread needs for segments of up to num_tokens tokens.
DRAFTWISE_EXPORT int64_t draftwise_attention_scratch(int64_t num_tokens, int64_t heads, int64_t kv_heads,
                                     int64_t heads_per_task, int64_t key_size,
                                     int64_t value_size) {
    return attention_scratch_size(num_tokens, heads, kv_heads, heads_per_task, key_size, value_size);
}

DRAFTWISE_EXPORT void draftwise_attention(const AttentionCall *call, const Threads *threads) {
    int64_t next = 0;
    const Tasks tasks = tasks_for(*call);
    together(*threads, [&](Worker me) {
        tasks(*call, call->scratch + me.index * call->scratch_size, &next);
    });
}

#if defined(__AMX_BF16__)
// Whether every product of a model is made of whole tiles.
static bool fits_tiles(const DecoderModel &model) {
    const int64_t depths[] = {model.hidden, model.heads * model.head_size, model.intermediate};
    for (const int64_t depth : depths)
        if (depth % TILE_DEPTH) return false;
    return may_use_tiles();
}
#endif

// Call something with the way in which a model's weights are multiplied.
template <class Use>
static auto by_weight(const DecoderModel &model, const Use &use) {
#if defined(__AMX_BF16__)
    if (model.is_bfloat16 && fits_tiles(model)) {
        if (model.bits == 8) return use(NarrowWeight<TiledWeight, EightBits>());
        if (model.bits == 12) return use(NarrowWeight<TiledWeight, TwelveBits>());
        return use(TiledWeight());
    }
#endif
#if defined(__AVX512BF16__)
    if (model.is_bfloat16)
        return model.bits == 8 ? use(NarrowWeight<PairedWeight, EightBits>()) : use(PairedWeight());
#endif
    return model.is_bfloat16 ? use(WideWeight<BFloat16>()) : use(WideWeight<float>());
}

// Whether pairs of BFloat16 are multiplied, which decides how a weight is laid out.
DRAFTWISE_EXPORT int64_t draftwise_multiplies_pairs() {
#if defined(__AVX512BF16__)
    return 1;
#else
    return 0;
#endif
}

// Whether the processor's matrix unit multiplies them, of models whose sizes are whole tiles.
DRAFTWISE_EXPORT int64_t draftwise_multiplies_tiles() {
#if defined(__AMX_BF16__)
    return may_use_tiles();
#else
    return 0;
#endif
}

DRAFTWISE_EXPORT int64_t draftwise_lanes() { return LANES; }

// Bytes of memory that a pass needs.
DRAFTWISE_EXPORT int64_t draftwise_decoder_memory(const DecoderModel *model, int64_t num_tokens,
                                  int64_t largest_segment, int64_t num_threads) {
    return by_weight(*model, [&](auto weight) {
        return memory_for<decltype(weight)>(*model, num_tokens, largest_segment, num_threads);
    });
}

DRAFTWISE_EXPORT void draftwise_decode(const DecoderCall *call) {
    by_weight(*call->model, [&](auto weight) { return decode<decltype(weight)>(*call); });
}

DRAFTWISE_EXPORT void draftwise_draft(DraftCall *call) {
    by_weight(*call->next->model, [&](auto weight) { return draft<decltype(weight)>(*call); });
}

DRAFTWISE_EXPORT void draftwise_distributions(const DistributionCall *call, const Threads *threads) {
    together(*threads, [&](Worker me) {
        for (int64_t row = me.first(call->num_rows); row < me.end(call->num_rows); ++row)
            distribution(*call, row, me.index);
    });
}

DRAFTWISE_EXPORT void draftwise_accept(const AcceptanceCall *call, const Threads *threads) {
    together(*threads, [&](Worker me) {
        for (int64_t request = me.index; request < call->num_requests; request += me.count)
            accept(*call, request, me.index);
    });
}

DRAFTWISE_EXPORT void draftwise_score(const ScoreCall *call, const Threads *threads) {
    together(*threads, [&](Worker me) {
        for (int64_t row = me.first(call->num_rows); row < me.end(call->num_rows); ++row)
            score_row(*call, row, me.index);
    });
}

DRAFTWISE_EXPORT void draftwise_count_exponents(const uint16_t *numbers, int64_t size, int64_t *counts) {
    count_exponents((const BFloat16 *)numbers, size, counts);
}

DRAFTWISE_EXPORT void draftwise_compress(const uint16_t *numbers, int64_t size, const uint8_t *codes, char *to,
                         uint64_t *exceptions) {
    compress((const BFloat16 *)numbers, size, codes, to, exceptions);
}
