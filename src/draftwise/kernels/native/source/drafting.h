// Drafting of several tokens in one call. For each position, the draft model computes the next
// token's distribution, and the token is sampled.

#pragma once

#include <chrono>
#include <cmath>

#include "decoder.h"
#include "penalties.h"
#include "sampling.h"

// Arguments of draftwise_draft. A row is a request that is still drafting. If the logits of all
// positions were computed before, tokens are drawn from them and no pass is run.
struct DraftCall {
    const DecoderCall *first;  // pass over the new tokens; null if they were already read
    DecoderCall *next;         // pass over the last sampled token of each row
    int64_t *next_ids;         // [rows] token ids of next
    int64_t *next_segments;    // [rows, 4] segments of next; sampling a token advances the start
    int64_t *requests;         // [rows] request of each row; finished requests are removed
    const int64_t *limits;     // [requests] maximum number of drafted tokens
    int64_t *lengths;          // [requests] number of drafted tokens so far
    const double *uniforms;    // [requests, uniforms_width]; null if all requests get their most
                               // likely tokens
    int64_t *tokens;           // [requests, width] output: ids of the sampled tokens
    float *probs;              // [requests, width + 1, vocab] output; null if all are greedy
    float *draft_probs;        // [requests, width, vocab] output; null if probs are the same
    float *entropy;            // [requests, width] output; null without signals
    float *token_probs;        // [requests, width] output; null without signals
    uint8_t *is_nan;           // [requests, width] output: whether the logits are NaN
    char *scratch;             // [threads] Scratch
    Sampling sampling;
    Penalties penalties;
    int64_t num_rows, position;  // number of rows and next position; updated
    int64_t num_positions;       // maximum number of positions to draft in this call
    int64_t width, uniforms_width, vocab;
    int64_t carried_stride;      // floats from one position's rows of next->carried to the next's
    double drawing_s;  // seconds in which tokens were sampled; updated
    float *block_logits;        // [..., vocab] logits of all positions; null if next computes them
    const int64_t *block_rows;  // [requests] row of block_logits of each request's first position
};

namespace {

// Samples the next token of a row from its logits, and prepares the row's next pass.
void draw_row(const DraftCall &call, const DecoderModel &model, float *logits, int64_t own_vocab,
              int64_t row, int64_t position, int64_t thread) {
    const int64_t request = call.requests[row], vocab = call.vocab;
    const int64_t place = request * call.width + position, shared_vocab = min_int(own_vocab, vocab);
    const bool greedy = !call.uniforms || call.sampling.temperature[request] == 0.0f;
    const bool signals = call.entropy != nullptr;
    float *q = call.probs ? call.probs + (request * (call.width + 1) + position) * vocab : nullptr;
    float *draft_probs = call.draft_probs ? call.draft_probs + place * vocab : nullptr;
    // Memory of the distribution at the request's temperature, which equals q unless it is greedy.
    float *soft = draft_probs ? draft_probs : greedy ? nullptr : q;
    penalise(call.penalties, request, logits, shared_vocab);
    bool is_nan;
    int64_t token = 0;
    if (!greedy || signals) {
        const Scratch scratch(call.scratch, vocab, call.sampling, thread);
        Softmax row;
        const float entropy =
            signals ? describe<true>(logits, shared_vocab, call.sampling, request, scratch, row)
                    : describe<false>(logits, shared_vocab, call.sampling, request, scratch, row);
        is_nan = ::is_nan(row);
        if (is_nan) {
            if (soft) fill(soft, shared_vocab, 0.0f);
        } else if (greedy) {
            if (soft) write_probs(row, soft);
            token = largest_of(logits, shared_vocab).index;
        } else {
            const double uniform = call.uniforms[request * call.uniforms_width + position];
            token = write_and_sample(row, uniform, scratch.sums, soft);
        }
        if (soft) fill(soft + shared_vocab, vocab - shared_vocab, 0.0f);
        if (signals) {
            call.entropy[place] = is_nan ? 0.0f : entropy;
            call.token_probs[place] = is_nan ? 0.0f : prob_of(row, token);
        }
    } else {
        const Largest largest = largest_of(logits, shared_vocab);
        is_nan = largest.any_nan;
        token = is_nan ? 0 : largest.index;
    }
    if (q && q != soft) {
        if (greedy) {
            fill(q, vocab, 0.0f);
            if (!is_nan) q[token] = 1.0f;
        } else {
            memcpy(q, soft, vocab * sizeof *q);
        }
    }
    call.is_nan[place] = is_nan;
    if (!is_nan) count_token(call.penalties, request, token);
    call.tokens[place] = call.next_ids[row] = model.output_ids ? model.output_ids[token] : token;
    ++call.next_segments[4 * row + 1];
}

// Removes the rows whose draft ends after a position, and keeps the order of the others.
void remove_finished(DraftCall &call, int64_t position) {
    const int64_t num_drafting = call.num_rows;
    int64_t kept = 0;
    for (int64_t row = 0; row < num_drafting; ++row) {
        const int64_t request = call.requests[row];
        const bool is_nan = call.is_nan[request * call.width + position];
        const bool continues = position + 1 < call.limits[request];
        // A position with NaN logits proposes no token and ends the draft.
        call.lengths[request] += !is_nan;
        if (is_nan || !continues) continue;
        call.requests[kept] = request;
        call.next_ids[kept] = call.next_ids[row];
        int64_t *to = call.next_segments + 4 * kept;
        for (int64_t i = 0; i < 3; ++i) to[i] = call.next_segments[4 * row + i];
        to[3] = kept++;
    }
    call.num_rows = kept;
    call.next->num_tokens = call.next->num_segments = call.next->num_logits = kept;
    if (call.next->carried) call.next->carried += call.carried_stride;
    call.position = position + 1;
}

// Drafts up to call.num_positions positions.
template <class W>
void draft(DraftCall &call) {
    int64_t next_task = 0;
    const int64_t start = call.position;
    const DecoderCall &any_call = call.first ? *call.first : *call.next;
    run_on_team(*any_call.threads, [&](Worker worker) {
        for (int64_t i = 0; i < call.num_positions && call.num_rows; ++i) {
            const DecoderCall &pass = i == 0 && call.first ? *call.first : *call.next;
            const int64_t own_vocab = call.block_logits ? call.vocab : pass.model->vocab;
            if (!call.block_logits) {
                const Buffers<W> buffers(*pass.model, pass.memory, pass.num_tokens,
                                         pass.largest_segment, pass.threads->count);
                Pass<W>{*pass.model, pass, buffers, next_task, worker}.run();
            }
            const auto started = std::chrono::steady_clock::now();
            const int64_t rows = call.num_rows;
            for (int64_t row = worker.first(rows); row < worker.end(rows); ++row) {
                float *logits = pass.logits + row * own_vocab;
                if (call.block_logits)
                    logits = call.block_logits +
                             (call.block_rows[call.requests[row]] + start + i) * own_vocab;
                draw_row(call, *pass.model, logits, own_vocab, row, start + i, worker.index);
            }
            worker.wait();
            if (worker.index == 0) {
                const std::chrono::duration<double> taken =
                    std::chrono::steady_clock::now() - started;
                call.drawing_s += taken.count();
                remove_finished(call, start + i);
            }
            worker.wait();
        }
    });
}

}  // namespace
