// Drafting in one go: read a token, compute the next one's distribution, draw it, and so on.

#pragma once

#include "decoder.h"
#include "sampling.h"

struct DraftCall {
    const DecoderCall *first;  // reads what is new before the first token; null if that was done
    DecoderCall *next;         // reads the token drawn last of each row
    int64_t *next_ids;         // [rows], the ids of next
    int64_t *next_segments;    // [rows, 4], the segments of next, as of the position before
    const int64_t *requests;   // [rows] that draft, index into what follows
    const double *uniforms;    // [requests, uniforms_width], or null if all are greedy
    int64_t *tokens;           // [requests, width]
    float *probs;              // [requests, width + 1, vocab], or null if all are greedy
    float *beliefs;            // [requests, width, vocab], or null where probs say it
    float *entropy;            // [requests, width], or null if nobody asks for signals
    float *token_probs;        // [requests, width], likewise
    uint8_t *broken;           // [requests, width]
    float *spare;              // [threads, vocab], a distribution that is not kept
    int32_t *order;            // [threads, vocab], or null
    Sampling sampling;
    int64_t num_rows, position, num_positions, width, uniforms_width, vocab;
};

namespace {

void draw_row(const DraftCall &call, const float *logits, int64_t own_vocab, int64_t row,
              int64_t position, int64_t thread) {
    const int64_t request = call.requests[row], vocab = call.vocab;
    const int64_t place = request * call.width + position, own = least(own_vocab, vocab);
    const bool greedy = call.sampling.temperature[request] == 0.0f;
    const bool signals = call.entropy != nullptr;
    float *q = call.probs ? call.probs + (request * (call.width + 1) + position) * vocab : nullptr;
    float *belief = call.beliefs ? call.beliefs + place * vocab : nullptr;
    // Where the softened distribution goes: it is q itself unless the request is greedy.
    float *soft = belief ? belief : !greedy && q ? q : call.spare + thread * vocab;
    int32_t *order = call.order ? call.order + thread * vocab : nullptr;
    bool broken;
    int64_t token = 0;
    if (!greedy || signals) {
        const float entropy = soften(logits, own, call.sampling, request, soft, order);
        fill(soft + own, vocab - own, 0.0f);
        broken = entropy != entropy;
        if (broken) fill(soft, vocab, 0.0f);
        if (signals) call.entropy[place] = broken ? 0.0f : entropy;
    } else {
        const float sum = (float)sum_of(logits, own);
        broken = sum != sum;
    }
    if (broken) {
        if (q) fill(q, vocab, 0.0f);
    } else if (greedy) {
        token = one_hot(logits, own, nullptr);
        if (q) {
            fill(q, vocab, 0.0f);
            q[token] = 1.0f;
        }
    } else {
        token = drawn(soft, vocab, call.uniforms[request * call.uniforms_width + position]);
        if (q && q != soft) memcpy(q, soft, vocab * sizeof *q);
    }
    if (signals) call.token_probs[place] = soft[token];
    call.broken[place] = broken;
    call.tokens[place] = token;
    if (call.next_ids) {
        call.next_ids[row] = token;
        ++call.next_segments[4 * row + 1];
    }
}

template <class W>
void draft(const DraftCall &call) {
    int64_t next_task = 0;
    const DecoderCall &any = call.first ? *call.first : *call.next;
    together(*any.threads, [&](Worker me) {
        for (int64_t i = 0; i < call.num_positions; ++i) {
            const DecoderCall &pass = i == 0 && call.first ? *call.first : *call.next;
            const Buffers<W> buffers(*pass.model, pass.memory, pass.num_tokens,
                                     pass.largest_segment, pass.threads->count);
            Pass<W>{*pass.model, pass, buffers, next_task, me}.run();
            const int64_t own = pass.model->vocab;
            for (int64_t row = me.first(call.num_rows); row < me.end(call.num_rows); ++row)
                draw_row(call, pass.logits + row * own, own, row, call.position + i, me.index);
            me.wait();
        }
    });
}

}  // namespace
