// What Python calls.

#include "acceptance.h"
#include "attention_tasks.h"
#include "compression.h"
#include "decoder.h"
#include "drafting.h"
#include "sampling.h"
#include "threads.h"
#include "tiles.h"

// Floats of scratch memory that a thread needs for segments of up to num_tokens tokens.
extern "C" int64_t attention_scratch(int64_t num_tokens, int64_t heads, int64_t kv_heads,
                                     int64_t heads_per_task, int64_t key_size,
                                     int64_t value_size) {
    return attention_scratch_size(num_tokens, heads, kv_heads, heads_per_task, key_size, value_size);
}

extern "C" void attention(const AttentionCall *call, const Threads *threads) {
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
extern "C" int64_t multiplies_pairs() {
#if defined(__AVX512BF16__)
    return 1;
#else
    return 0;
#endif
}

// Whether the processor's matrix unit multiplies them, of models whose sizes are whole tiles.
extern "C" int64_t multiplies_tiles() {
#if defined(__AMX_BF16__)
    return may_use_tiles();
#else
    return 0;
#endif
}

extern "C" int64_t lanes() { return LANES; }

// Bytes of memory that a pass needs.
extern "C" int64_t decoder_memory(const DecoderModel *model, int64_t num_tokens,
                                  int64_t largest_segment, int64_t num_threads) {
    return by_weight(*model, [&](auto weight) {
        return memory_for<decltype(weight)>(*model, num_tokens, largest_segment, num_threads);
    });
}

extern "C" void decode(const DecoderCall *call) {
    by_weight(*call->model, [&](auto weight) { return decode<decltype(weight)>(*call); });
}

extern "C" void draft(DraftCall *call) {
    by_weight(*call->next->model, [&](auto weight) { return draft<decltype(weight)>(*call); });
}

extern "C" void distributions(const DistributionCall *call, const Threads *threads) {
    together(*threads, [&](Worker me) {
        for (int64_t row = me.first(call->num_rows); row < me.end(call->num_rows); ++row)
            distribution(*call, row, me.index);
    });
}

extern "C" void accept(const AcceptanceCall *call, const Threads *threads) {
    together(*threads, [&](Worker me) {
        for (int64_t request = me.index; request < call->num_requests; request += me.count)
            accept(*call, request, me.index);
    });
}

extern "C" void judge(const JudgementCall *call, const Threads *threads) {
    together(*threads, [&](Worker me) {
        for (int64_t row = me.first(call->num_rows); row < me.end(call->num_rows); ++row)
            judgement(*call, row, me.index);
    });
}

extern "C" void count_exponents(const uint16_t *numbers, int64_t size, int64_t *counts) {
    count_exponents((const BFloat16 *)numbers, size, counts);
}

extern "C" void compress(const uint16_t *numbers, int64_t size, const uint8_t *codes, char *to,
                         uint64_t *exceptions) {
    compress((const BFloat16 *)numbers, size, codes, to, exceptions);
}
