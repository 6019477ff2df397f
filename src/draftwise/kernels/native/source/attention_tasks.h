// Attention of whole batches: distribution of its tasks over threads, and selection of the kernel.

#pragma once

#include "attention.h"
#include "attention_tiles.h"

namespace {

// Computes the key-value heads first_head to end_head of one segment.
typedef void (*Attend)(const AttentionCall &, const Segment &, int64_t first_head,
                       int64_t end_head, float *scratch);

// Claims and computes tasks until none is left. Every thread of the team calls it.
template <Attend ATTEND>
void run_tasks(const AttentionCall &call, float *scratch, int64_t *next_task) {
    const int64_t step = call.heads_per_task;
    const int64_t tasks_per_segment = (call.kv_heads + step - 1) / step;
    const int64_t num_tasks = call.num_segments * tasks_per_segment;
    for (;;) {
        const int64_t task = __atomic_fetch_add(next_task, 1, __ATOMIC_RELAXED);
        if (task >= num_tasks) return;
        const int64_t first_head = task % tasks_per_segment * step;
        ATTEND(call, call.segments[task / tasks_per_segment], first_head,
               min_int(call.kv_heads, first_head + step), scratch);
    }
}

typedef void (*RunTasks)(const AttentionCall &, float *scratch, int64_t *next_task);

// The kernel with vector instructions, specialised for common key sizes.
template <class F>
RunTasks tasks_by_vectors(int64_t key_size) {
    if (key_size == 64) return run_tasks<attend<F, 64 / F::PACKED>>;
    if (key_size == 128) return run_tasks<attend<F, 128 / F::PACKED>>;
    return run_tasks<attend<F, 0>>;
}

// Selects the kernel for a call.
RunTasks tasks_for(const AttentionCall &call) {
#if defined(__AMX_BF16__)
    // Token trees and masks that are not causal are computed with vector instructions.
    const bool is_causal = !call.tree && !call.sees_segment && !call.shares_window;
    const bool fits = fits_attention_tiles(call.key_size, call.value_size) && is_causal;
    if (call.is_bfloat16 && fits && call.scale > 0) return run_tasks<attend_tiled>;
#endif
#if defined(__AVX512BF16__)
    if (call.is_bfloat16 && Paired::fits(call.key_size) && Paired::fits(call.value_size))
        return tasks_by_vectors<Paired>(call.key_size);
#endif
    if (call.is_bfloat16) return tasks_by_vectors<Widened<BFloat16>>(call.key_size);
    return tasks_by_vectors<Widened<float>>(call.key_size);
}

// Floats of scratch memory that a thread needs for segments of up to num_tokens tokens.
int64_t attention_scratch_size(int64_t num_tokens, int64_t heads, int64_t kv_heads,
                               int64_t heads_per_task, int64_t key_size, int64_t value_size) {
    int64_t size =
        vector_scratch_size(num_tokens, heads, kv_heads, heads_per_task, key_size, value_size);
#if defined(__AMX_BF16__)
    if (fits_attention_tiles(key_size, value_size)) {
        const int64_t num_tiles = MAX_QUERY_TILES * heads_per_task;
        const TiledScratch memory(key_size, value_size, num_tiles, nullptr);
        const int64_t floats = memory.bytes / (int64_t)sizeof(float);
        size = floats > size ? floats : size;
    }
#endif
    return round_up(size, 16);
}

}  // namespace
