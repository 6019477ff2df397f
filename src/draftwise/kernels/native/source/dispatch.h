// Functions of a pass for the type of its model's packed weights.

#pragma once

#include "decoder.h"
#include "narrow.h"
#include "packed_product.h"
#include "tiles.h"

namespace {

#if defined(__AMX_BF16__)
// Whether the depth of every product of a model is a multiple of a tile's.
bool fits_tiles(const DecoderModel &model) {
    if (model.hidden % TILE_DEPTH || model.heads * model.head_size % TILE_DEPTH) return false;
    for (int64_t i = 0; i < model.num_layers; ++i) {
        const DecoderLayer &layer = model.layers[i];
        if (layer.intermediate % TILE_DEPTH) return false;
        if (layer.experts && layer.experts->inner % TILE_DEPTH) return false;
        if (layer.recurrent && recurrent_inner(*layer.recurrent) % TILE_DEPTH) return false;
    }
    const StateInput *reads = model.state_input;
    if (reads && reads->num_states * reads->size % TILE_DEPTH) return false;
    return may_use_tiles();
}
#endif

// Calls body with the type of the model's packed weights.
template <class Body>
auto dispatch_weight(const DecoderModel &model, const Body &body) {
    if (model.bits == PACKED) return body(PackedWeight());
#if defined(__AMX_BF16__)
    if (model.is_bfloat16 && fits_tiles(model)) {
        if (model.bits == 8) return body(NarrowWeight<TiledWeight, EightBits>());
        if (model.bits == 12) return body(NarrowWeight<TiledWeight, TwelveBits>());
        return body(TiledWeight());
    }
#endif
#if defined(__AVX512BF16__)
    if (model.is_bfloat16) {
        if (model.bits == 8) return body(NarrowWeight<PairedWeight, EightBits>());
        if (model.bits == 12) return body(NarrowWeight<PairedWeight, TwelveBits>());
        return body(PairedWeight());
    }
#endif
    return model.is_bfloat16 ? body(WideWeight<BFloat16>()) : body(WideWeight<float>());
}

int64_t decoder_memory(const DecoderModel &model, int64_t num_tokens, int64_t largest_segment,
                       int64_t num_threads) {
    return dispatch_weight(model, [&](auto weight) {
        return Buffers<decltype(weight)>(model, nullptr, num_tokens, largest_segment, num_threads)
            .bytes;
    });
}

void project_by(const DecoderCall &call, const float *stream, int64_t stride, Worker worker) {
    dispatch_weight(*call.model, [&](auto weight) {
        typedef decltype(weight) W;
        int64_t next_task = 0;
        const Buffers<W> buffers(*call.model, call.memory, call.num_logits, 1,
                                 call.threads->count);
        Pass<W> pass = {*call.model, call, buffers, next_task, worker};
        pass.begin();
        pass.project(stream, stride);
    });
}

}  // namespace
