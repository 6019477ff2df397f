// Drafting of several tokens in one call. For each position, the draft model computes the next
// token's distribution, and the token is sampled.

#pragma once

#include <chrono>
#include <cmath>

#include "decoder.h"
#include "penalties.h"
#include "sampling.h"

// DraftRule and RuleResults of draftwise.core.rules, which describe the fields.
struct DraftRule {
    const double *weights;           // [2, features]
    const int64_t *pairs;            // [features, 2]
    const double *history;           // [requests]
    const uint8_t *greedy;           // [requests]
    const double *thresholds;        // [requests]
    double *expected;                // [requests, width] output
    double *prefix_acceptance_prob;  // [requests] output
    float *least, *most;             // [requests, width] output
    int64_t *kept;                   // [requests] output
    double smallest_token_prob, largest_entropy, last_position;
    double lowest, highest;  // bounds of P
    double unfiltered_limit, min_required;
    int64_t num_features, width;
};

// Arguments of draftwise_draft. A row is a request that is still drafting.
struct DraftCall {
    const DecoderCall *first;  // pass over the new tokens; null if they were already read
    DecoderCall *next;         // pass over the last sampled token of each row
    int64_t *next_ids;         // [rows] token ids of next
    int64_t *next_segments;    // [rows, 4] segments of next; sampling a token advances the start
    int64_t *requests;         // [rows] request of each row; finished requests are removed
    const int64_t *limits;     // [requests] maximum number of drafted tokens
    int64_t *lengths;          // [requests] number of drafted tokens so far
    const DraftRule *rule;     // null if all requests draft to their limits
    const double *uniforms;    // [requests, uniforms_width]; null if all requests are greedy
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
};

namespace {

// Samples the next token of a row from its logits, and prepares the row's next pass.
void draw_row(const DraftCall &call, const DecoderModel &model, float *logits, int64_t row,
              int64_t position, int64_t thread) {
    const int64_t own_vocab = model.vocab;
    const int64_t request = call.requests[row], vocab = call.vocab;
    const int64_t place = request * call.width + position, shared_vocab = min_int(own_vocab, vocab);
    const bool greedy = call.sampling.temperature[request] == 0.0f;
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

// The range of l <= 0 in which bend l² + slope l + level >= 0. If there are two ranges, the upper
// one.
struct Range {
    double first, last;

    Range(double bend, double slope, double level) : first(-INFINITY), last(INFINITY) {
        if (std::fabs(bend) < 1e-9) {
            if (slope > 0) first = -level / slope;
            if (slope < 0) last = -level / slope;
            if (slope == 0 && level < 0) first = INFINITY;
            return;
        }
        const double inside = slope * slope - 4 * bend * level;
        const double root = std::sqrt(std::max(inside, 0.0));
        const double one = (-slope - root) / (2 * bend), other = (root - slope) / (2 * bend);
        if (bend < 0) {
            first = inside < 0 ? INFINITY : other;
            last = inside < 0 ? -INFINITY : one;
        } else if (inside >= 0) {
            // The values above the upper zero. If that zero is positive, those below the lower
            // zero.
            if (other <= 0) first = other;
            else last = one;
        }
    }
};

// The log-odds of acceptance at a position, level + slope l + bend l² with l = log q(x).
struct LogOdds {
    double level = 0, slope = 0, bend = 0;

    LogOdds(const DraftRule &rule, int64_t request, int64_t position, float entropy) {
        enum { ONE, LOG_TOKEN_PROB, ENTROPY, HISTORY, POSITION, OVERLAP, AGREEMENT, NUM_VARIABLES };
        double v[NUM_VARIABLES] = {1.0};
        v[ENTROPY] = std::min((double)entropy, rule.largest_entropy);
        v[HISTORY] = rule.history[request];
        v[POSITION] = std::min((double)position, rule.last_position) / rule.last_position;
        const double *weight = rule.weights + rule.num_features * rule.greedy[request];
        for (int64_t i = 0; i < rule.num_features; ++i) {
            const int64_t a = rule.pairs[2 * i], b = rule.pairs[2 * i + 1];
            if (a == LOG_TOKEN_PROB && b == LOG_TOKEN_PROB)
                bend += weight[i];
            else if (a == LOG_TOKEN_PROB || b == LOG_TOKEN_PROB)
                slope += weight[i] * v[a == LOG_TOKEN_PROB ? b : a];
            else
                level += weight[i] * v[a] * v[b];
        }
    }
};

// Returns whether the rule verifies the token at a position, whose required acceptance probability
// is needed. Stores the range of q(x) of verified tokens.
bool is_verified(const DraftRule &rule, const LogOdds &odds, int64_t request, int64_t position,
                 double needed, float token_prob) {
    if (!(needed > rule.unfiltered_limit)) return true;
    const double limit = std::min(std::max(needed, rule.min_required), 1 - rule.min_required);
    const Range accepted(odds.bend, odds.slope, odds.level - std::log(limit / (1 - limit)));
    const double lowest = std::log(rule.smallest_token_prob);  // lower bound of l
    const bool is_empty =
        accepted.first > accepted.last || accepted.last < lowest || accepted.first > 0;
    const float least = is_empty                   ? INFINITY
                        : accepted.first <= lowest ? 0.0f
                                                   : (float)std::exp(accepted.first);
    const float most = accepted.last >= 0 ? INFINITY : (float)std::exp(accepted.last);
    if (!rule.greedy[request]) {
        rule.least[request * rule.width + position] = least;
        rule.most[request * rule.width + position] = most;
    }
    return token_prob >= least && token_prob <= most;
}

// Returns whether the rule continues a request's draft after the token at a position, and updates
// the results of the rule.
bool continues_drafting(const DraftRule &rule, const DraftCall &call, int64_t request,
                        int64_t position) {
    const int64_t place = request * call.width + position;
    const float token_prob = call.token_probs[place];
    const LogOdds odds(rule, request, position, call.entropy[place]);
    const double l = std::log(std::max((double)token_prob, rule.smallest_token_prob));
    const double log_odds = (odds.bend * l + odds.slope) * l + odds.level;
    const double p = 1.0 / (1.0 + std::exp(-std::min(std::max(log_odds, -30.0), 30.0)));
    const double bounded = std::min(std::max(p, rule.lowest), rule.highest);
    const double before = rule.prefix_acceptance_prob[request], after = before * bounded;
    rule.prefix_acceptance_prob[request] = after;
    rule.expected[request * rule.width + position] = bounded;
    const double needed = rule.thresholds[request] / std::max(before, 1e-9);
    if (position == 0) rule.kept[request] = 0;
    rule.kept[request] += rule.kept[request] == position && !call.is_nan[place] &&
                          is_verified(rule, odds, request, position, needed, token_prob);
    return position + 1 < call.limits[request] && after >= rule.thresholds[request];
}

// Removes the rows whose draft ends after a position, and keeps the order of the others.
void remove_finished(DraftCall &call, int64_t position) {
    const int64_t num_drafting = call.num_rows;
    int64_t kept = 0;
    for (int64_t row = 0; row < num_drafting; ++row) {
        const int64_t request = call.requests[row];
        const bool is_nan = call.is_nan[request * call.width + position];
        bool continues = position + 1 < call.limits[request];
        if (call.rule) continues = continues_drafting(*call.rule, call, request, position);
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
            const Buffers<W> buffers(*pass.model, pass.memory, pass.num_tokens,
                                     pass.largest_segment, pass.threads->count);
            Pass<W>{*pass.model, pass, buffers, next_task, worker}.run();
            const int64_t own_vocab = pass.model->vocab;
            const auto started = std::chrono::steady_clock::now();
            for (int64_t row = worker.first(call.num_rows); row < worker.end(call.num_rows); ++row)
                draw_row(call, *pass.model, pass.logits + row * own_vocab, row, start + i,
                         worker.index);
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
