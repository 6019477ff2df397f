// What Python calls.

#include "attention.h"
#include "decoder.h"
#include "threads.h"

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

// Whether pairs of BFloat16 are multiplied, which decides how a weight is laid out.
extern "C" int64_t multiplies_pairs() {
#if defined(__AVX512BF16__)
    return 1;
#else
    return 0;
#endif
}

extern "C" int64_t lanes() { return LANES; }

// Bytes of memory that a pass needs.
extern "C" int64_t decoder_memory(const DecoderModel *model, int64_t num_tokens,
                                  int64_t largest_segment, int64_t num_threads) {
#if defined(__AVX512BF16__)
    if (model->is_bfloat16)
        return memory_for<PairedWeight>(*model, num_tokens, largest_segment, num_threads);
#endif
    return model->is_bfloat16
               ? memory_for<WideWeight<BFloat16>>(*model, num_tokens, largest_segment, num_threads)
               : memory_for<WideWeight<float>>(*model, num_tokens, largest_segment, num_threads);
}

extern "C" void decode(const DecoderCall *call) {
#if defined(__AVX512BF16__)
    if (call->model->is_bfloat16) return decode<PairedWeight>(*call);
#endif
    return call->model->is_bfloat16 ? decode<WideWeight<BFloat16>>(*call)
                                    : decode<WideWeight<float>>(*call);
}
