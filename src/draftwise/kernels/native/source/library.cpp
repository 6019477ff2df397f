// The functions that Python calls. The library exports only these. Their names begin with
// draftwise_, so that they do not collide with names of other libraries, such as POSIX's accept.

#include <atomic>

#include "acceptance.h"
#include "attention_tasks.h"
#include "blocks.h"
#include "compression.h"
#include "decoder.h"
#include "dispatch.h"
#include "drafting.h"
#include "narrow.h"
#include "packed_product.h"
#include "recurrence.h"
#include "recurrent_layer.h"
#include "sampling.h"
#include "suffix.h"
#include "threads.h"
#include "tiles.h"
#include "trees.h"
#include "uniforms.h"

// The library is compiled with -fvisibility=hidden.
#define DRAFTWISE_EXPORT extern "C" __attribute__((visibility("default")))

// Size in bytes of a structure that Python also declares.
struct StructureSize {
    const char *name;
    int64_t size;
};

// Returns the sizes of all shared structures, ending with a null name. Python compares them with
// its own when it loads the library.
DRAFTWISE_EXPORT const StructureSize *draftwise_structure_sizes() {
#define SIZE_OF(structure) {#structure, sizeof(structure)}
    static const StructureSize sizes[] = {
        SIZE_OF(AcceptanceCall),
        SIZE_OF(AttentionCall),
        SIZE_OF(ContinuationCall),
        SIZE_OF(ConvolutionCall),
        SIZE_OF(DecoderCache),
        SIZE_OF(DecoderCall),
        SIZE_OF(DecoderLayer),
        SIZE_OF(DecoderModel),
        SIZE_OF(DistributionCall),
        SIZE_OF(DraftCall),
        SIZE_OF(GreedyCall),
        SIZE_OF(ExpandCall),
        SIZE_OF(Experts),
        SIZE_OF(MatchSums),
        SIZE_OF(ScoreCall),
        SIZE_OF(NarrowHeader),
        SIZE_OF(NodeCall),
        SIZE_OF(PackCall),
        SIZE_OF(PackIntegersCall),
        SIZE_OF(PackedHeader),
        SIZE_OF(PackedKind),
        SIZE_OF(BlockKind),
        SIZE_OF(PackedSection),
        SIZE_OF(Penalties),
        SIZE_OF(RecurrenceCall),
        SIZE_OF(RecurrenceSegment),
        SIZE_OF(RecurrentLayer),
        SIZE_OF(RecurrentMemory),
        SIZE_OF(RecurrentRows),
        SIZE_OF(Sampling),
        SIZE_OF(Segment),
        SIZE_OF(Softmax),
        SIZE_OF(StateInput),
        SIZE_OF(SuffixCorpus),
        SIZE_OF(Threads),
        SIZE_OF(TreeAcceptanceCall),
        SIZE_OF(TreeToken),
        {nullptr, 0},
    };
#undef SIZE_OF
    return sizes;
}

// Floats of scratch memory that a thread needs for segments of up to num_tokens tokens.
DRAFTWISE_EXPORT int64_t draftwise_attention_scratch(int64_t num_tokens, int64_t heads,
                                                     int64_t kv_heads, int64_t heads_per_task,
                                                     int64_t key_size, int64_t value_size) {
    return attention_scratch_size(num_tokens, heads, kv_heads, heads_per_task, key_size,
                                  value_size);
}

// Computes the attention of one layer.
DRAFTWISE_EXPORT void draftwise_attention(const AttentionCall *call, const Threads *threads) {
    int64_t next_task = 0;
    const RunTasks tasks = tasks_for(*call);
    run_on_team(*threads, [&](Worker worker) {
        tasks(*call, call->scratch + worker.index * call->scratch_size, &next_task);
    });
}

// Returns 1 if weights of BFloat16 are packed in pairs (PairedWeight), else 0.
DRAFTWISE_EXPORT int64_t draftwise_multiplies_pairs() {
#if defined(__AVX512BF16__)
    return 1;
#else
    return 0;
#endif
}

// Returns 1 if the matrix unit multiplies weights of BFloat16 whose depth is a multiple of a
// tile's, else 0.
DRAFTWISE_EXPORT int64_t draftwise_multiplies_tiles() {
#if defined(__AMX_BF16__)
    return may_use_tiles();
#else
    return 0;
#endif
}

// Returns the number of float32 lanes of a vector.
DRAFTWISE_EXPORT int64_t draftwise_lanes() { return LANES; }

// Returns the bytes of scratch memory that a pass needs.
DRAFTWISE_EXPORT int64_t draftwise_decoder_memory(const DecoderModel *model, int64_t num_tokens,
                                                  int64_t largest_segment, int64_t num_threads) {
    return decoder_memory(*model, num_tokens, largest_segment, num_threads);
}

// Runs a forward pass.
DRAFTWISE_EXPORT void draftwise_decode(const DecoderCall *call) {
    dispatch_weight(*call->model, [&](auto weight) { return decode<decltype(weight)>(*call); });
}

// Drafts several tokens with a draft model.
DRAFTWISE_EXPORT void draftwise_draft(DraftCall *call) {
    dispatch_weight(*call->next->model,
                    [&](auto weight) { return draft<decltype(weight)>(*call); });
}

// Returns the bytes of scratch memory that a thread needs to sample from rows of vocab logits.
DRAFTWISE_EXPORT int64_t draftwise_sampling_scratch(int64_t vocab, int64_t has_filters) {
    return Scratch::bytes(vocab, has_filters);
}

// Finds the largest logit of each row.
DRAFTWISE_EXPORT void draftwise_greedy(const GreedyCall *call, const Threads *threads) {
    run_on_team(*threads, [&](Worker worker) {
        for (int64_t row = worker.first(call->num_rows); row < worker.end(call->num_rows); ++row)
            greedy_row(*call, row);
    });
}

// Computes the random numbers of a step.
DRAFTWISE_EXPORT void draftwise_uniforms(const uint64_t *seeds, const int64_t *positions,
                                         int64_t num_requests, int64_t num_tokens, double *drawing,
                                         float *accepting) {
    step_uniforms(seeds, positions, num_requests, num_tokens, drawing, accepting);
}

// Computes distributions from logits.
DRAFTWISE_EXPORT void draftwise_distributions(const DistributionCall *call,
                                              const Threads *threads) {
    run_on_team(*threads, [&](Worker worker) {
        for (int64_t row = worker.first(call->num_rows); row < worker.end(call->num_rows); ++row)
            distribution(*call, row, worker.index);
    });
}

// Verifies drafted tokens by the acceptance law.
DRAFTWISE_EXPORT void draftwise_accept(const AcceptanceCall *call, const Threads *threads) {
    // Rows and requests take different times, so each worker takes the next one.
    std::atomic<int64_t> next_row{0}, next_request{0};
    run_on_team(*threads, [&](Worker worker) {
        for (int64_t row; (row = next_row++) < call->num_rows;)
            describe_row(*call, row, worker.index);
        worker.wait();
        for (int64_t request; (request = next_request++) < call->num_requests;)
            accept(*call, request, worker.index);
    });
}

// Verifies token trees.
DRAFTWISE_EXPORT void draftwise_accept_trees(const TreeAcceptanceCall *call,
                                             const Threads *threads) {
    std::atomic<int64_t> next_tree{0};
    run_on_team(*threads, [&](Worker worker) {
        for (int64_t tree; (tree = next_tree++) < call->num_trees;)
            follow_tree(*call, tree, worker.index);
    });
}

// Finds what the nodes of token trees get children from.
DRAFTWISE_EXPORT void draftwise_describe_nodes(const NodeCall *call, const Threads *threads) {
    std::atomic<int64_t> next_row{0};
    run_on_team(*threads, [&](Worker worker) {
        for (int64_t row; (row = next_row++) < call->num_rows;)
            describe_node(*call, row, worker.index);
    });
}

// Computes a companion's scores of drafted tokens.
DRAFTWISE_EXPORT void draftwise_score(const ScoreCall *call, const Threads *threads) {
    run_on_team(*threads, [&](Worker worker) {
        for (int64_t row = worker.first(call->num_rows); row < worker.end(call->num_rows); ++row)
            score_row(*call, row, worker.index);
    });
}

// See count_exponents.
DRAFTWISE_EXPORT void draftwise_count_exponents(const uint16_t *numbers, int64_t size,
                                                int64_t *counts) {
    count_exponents((const BFloat16 *)numbers, size, counts);
}

// See compress.
DRAFTWISE_EXPORT void draftwise_compress(const uint16_t *numbers, int64_t size,
                                         const uint8_t *codes, char *to, uint64_t *exceptions) {
    compress((const BFloat16 *)numbers, size, codes, to, exceptions);
}

// Computes the tokens of a pass in a layer with a recurrent state.
DRAFTWISE_EXPORT void draftwise_recur(const RecurrenceCall *call, const Threads *threads) {
    run_on_team(*threads, [&](Worker worker) { recur(*call, worker); });
}

// Computes a causal convolution of a pass.
DRAFTWISE_EXPORT void draftwise_convolve(const ConvolutionCall *call, const Threads *threads) {
    run_on_team(*threads, [&](Worker worker) {
        if (call->is_bfloat16) convolve<BFloat16>(*call, worker);
        else convolve<float>(*call, worker);
    });
}

// Finds continuations of texts after earlier occurrences of their last tokens.
DRAFTWISE_EXPORT void draftwise_continuations(const ContinuationCall *call) {
    for (int64_t request = 0; request < call->num_requests; ++request)
        if (call->limits[request] > 0) find_continuation(*call, request);
}

// Learns the acceptance of continuations; see learn_matches.
DRAFTWISE_EXPORT void draftwise_learn_matches(const ContinuationCall *call, const int64_t *known,
                                              const int64_t *accepted) {
    learn_matches(*call, known, accepted);
}

// Adds positions of a corpus's chunk to its indices; see index_chunk.
DRAFTWISE_EXPORT void draftwise_index_chunk(const SuffixCorpus *corpus, int64_t chunk, int64_t first,
                                            int64_t end) {
    index_chunk(*corpus, chunk, first, end);
}

// Bytes of a tile with depth inputs.
DRAFTWISE_EXPORT int64_t draftwise_tile_bytes(const PackedKind *kind, int64_t depth) {
    return tile_bytes(*kind, depth);
}

// Converts rows of blocks to tiles.
DRAFTWISE_EXPORT void draftwise_pack_blocks(const PackCall *call, const Threads *threads) {
    run_on_team(*threads, [&](Worker worker) { pack_rows(*call, worker); });
}

// Converts rows of integers with scales to tiles.
DRAFTWISE_EXPORT void draftwise_pack_integers(const PackIntegersCall *call,
                                              const Threads *threads) {
    run_on_team(*threads, [&](Worker worker) { pack_rows(*call, worker); });
}

// Expands rows of blocks to float32.
DRAFTWISE_EXPORT void draftwise_expand_rows(const ExpandCall *call, const Threads *threads) {
    run_on_team(*threads, [&](Worker worker) {
        for (int64_t row = worker.first(call->num_rows); row < worker.end(call->num_rows); ++row)
            expand_row(*call->kind, call->rows + row * call->row_bytes, call->depth,
                       call->to + row * call->depth);
    });
}

// Returns the bytes of memory of draftwise_multiply_packed.
DRAFTWISE_EXPORT int64_t draftwise_packed_memory(int64_t num_rows, int64_t depth,
                                                 int64_t num_threads) {
    return packed_rows_memory(num_rows, depth, num_threads);
}

// Multiplies rows with a weight of packed.h.
DRAFTWISE_EXPORT void draftwise_multiply_packed(const float *rows, int64_t num_rows, int64_t depth,
                                                const void *weight, int64_t columns, float *to,
                                                char *memory, const Threads *threads) {
    multiply_packed_rows(rows, num_rows, depth, weight, columns, to, memory, *threads);
}
