// Drafting in one go: read a token, compute the next one's distribution, draw it, and so on.

#pragma once

#include <cmath>

#include "decoder.h"
#include "sampling.h"

// DraftRule of draftwise.core.rules.
struct DraftRule {
    const double *weights;               // [2, features]
    const int64_t *pairs;                // [features, 2]
    const double *history;               // [requests]
    const uint8_t *greedy;               // [requests]
    const double *thresholds;            // [requests]
    double *expected;                    // [requests, width]
    double *prefix_acceptance_prob;      // [requests]
    float *least, *most;                 // [requests, width]
    int64_t *kept;                       // [requests]
    double smallest_token_prob, largest_entropy, last_position, lowest, highest, unfiltered_limit,
        min_required;
    int64_t num_features, width;
};

struct DraftCall {
    const DecoderCall *first;  // reads what is new before the first token; null if that was done
    DecoderCall *next;         // reads the token drawn last of each row
    int64_t *next_ids;         // [rows], the ids of next
    int64_t *next_segments;    // [rows, 4], the segments of next, as of the position before
    int64_t *requests;         // [rows] that draft, index into what follows; who stops is taken out
    const int64_t *limits;     // [requests] most tokens
    int64_t *lengths;          // [requests] tokens drafted so far
    const DraftRule *rule;     // or null
    const double *uniforms;    // [requests, uniforms_width], or null if all are greedy
    int64_t *tokens;           // [requests, width]
    float *probs;              // [requests, width + 1, vocab], or null if all are greedy
    float *draft_probs;        // [requests, width, vocab], or null where probs are the same
    float *entropy;            // [requests, width], or null if nobody asks for signals
    float *token_probs;        // [requests, width], likewise
    uint8_t *is_nan;           // [requests, width]
    float *spare;              // [threads, vocab], a distribution that is not kept
    int32_t *order;            // [threads, vocab], or null
    Sampling sampling;
    int64_t num_rows, position, num_positions, width, uniforms_width, vocab;  // two first: changed
};

namespace {

void draw_row(const DraftCall &call, const float *logits, int64_t own_vocab, int64_t row,
              int64_t position, int64_t thread) {
    const int64_t request = call.requests[row], vocab = call.vocab;
    const int64_t place = request * call.width + position, own = least(own_vocab, vocab);
    const bool greedy = call.sampling.temperature[request] == 0.0f;
    const bool signals = call.entropy != nullptr;
    float *q = call.probs ? call.probs + (request * (call.width + 1) + position) * vocab : nullptr;
    float *belief = call.draft_probs ? call.draft_probs + place * vocab : nullptr;
    // Where the softened distribution goes: it is q itself unless the request is greedy.
    float *soft = belief ? belief : !greedy && q ? q : call.spare + thread * vocab;
    int32_t *order = call.order ? call.order + thread * vocab : nullptr;
    bool is_nan;
    int64_t token = 0;
    if (!greedy || signals) {
        const float entropy = soften(logits, own, call.sampling, request, soft, order);
        fill(soft + own, vocab - own, 0.0f);
        is_nan = entropy != entropy;
        if (is_nan) fill(soft, vocab, 0.0f);
        if (signals) call.entropy[place] = is_nan ? 0.0f : entropy;
    } else {
        const float sum = (float)sum_of(logits, own);
        is_nan = sum != sum;
    }
    if (is_nan) {
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
    call.is_nan[place] = is_nan;
    call.tokens[place] = token;
    call.next_ids[row] = token;
    ++call.next_segments[4 * row + 1];
}

// Where bend l² + slope l + level is not negative for l <= 0: of two ranges the upper one.
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
            // Beyond the upper zero, or if that lies above certainty up to the lower one.
            if (other <= 0) first = other;
            else last = one;
        }
    }
};

// The log-odds of acceptance at a position as level + slope l + bend l², with l = log q(x).
struct LogOdds {
    double level = 0, slope = 0, bend = 0;

    LogOdds(const DraftRule &rule, int64_t request, int64_t position, float entropy) {
        enum { ONE, LOG_TOKEN_PROB, ENTROPY, HISTORY, PLACE, OVERLAP, AGREEMENT, NUM_VARIABLES };
        double v[NUM_VARIABLES] = {1.0};
        v[ENTROPY] = std::min((double)entropy, rule.largest_entropy);
        v[HISTORY] = rule.history[request];
        v[PLACE] = std::min((double)position, rule.last_position) / rule.last_position;
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

// Whether the rule has the token at a position verified, for which so much is needed; notes which
// would be.
bool is_likely(const DraftRule &rule, const LogOdds &odds, int64_t request, int64_t position,
               double needed, float token_prob) {
    if (!(needed > rule.unfiltered_limit)) return true;
    const double limit = std::min(std::max(needed, rule.min_required), 1 - rule.min_required);
    const Range likely(odds.bend, odds.slope, odds.level - std::log(limit / (1 - limit)));
    const double lowest = std::log(rule.smallest_token_prob);  // whatever lies below counts as this
    const bool none = likely.first > likely.last || likely.last < lowest || likely.first > 0;
    const float least = none                     ? INFINITY
                        : likely.first <= lowest ? 0.0f
                                                 : (float)std::exp(likely.first);
    const float most = likely.last >= 0 ? INFINITY : (float)std::exp(likely.last);
    if (!rule.greedy[request]) {
        rule.least[request * rule.width + position] = least;
        rule.most[request * rule.width + position] = most;
    }
    return token_prob >= least && token_prob <= most;
}

// Whether the rule lets a request go on after the token at a position.
bool goes_on(const DraftRule &rule, const DraftCall &call, int64_t request, int64_t position) {
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
                          is_likely(rule, odds, request, position, needed, token_prob);
    return position + 1 < call.limits[request] && after >= rule.thresholds[request];
}

// Take out who stops after a position; the others move up.
void keep_going(DraftCall &call, int64_t position) {
    const int64_t num_drafting = call.num_rows;
    int64_t kept = 0;
    for (int64_t row = 0; row < num_drafting; ++row) {
        const int64_t request = call.requests[row];
        const bool is_nan = call.is_nan[request * call.width + position];
        bool goes = position + 1 < call.limits[request];
        if (call.rule) goes = goes_on(*call.rule, call, request, position);
        // What is not a number proposes nothing from there on.
        call.lengths[request] += !is_nan;
        if (is_nan || !goes) continue;
        call.requests[kept] = request;
        call.next_ids[kept] = call.next_ids[row];
        int64_t *to = call.next_segments + 4 * kept;
        for (int64_t i = 0; i < 3; ++i) to[i] = call.next_segments[4 * row + i];
        to[3] = kept++;
    }
    call.num_rows = kept;
    call.next->num_tokens = call.next->num_segments = call.next->num_logits = kept;
    call.position = position + 1;
}

template <class W>
void draft(DraftCall &call) {
    int64_t next_task = 0;
    const int64_t start = call.position;
    const DecoderCall &any = call.first ? *call.first : *call.next;
    together(*any.threads, [&](Worker me) {
        for (int64_t i = 0; i < call.num_positions && call.num_rows; ++i) {
            const DecoderCall &pass = i == 0 && call.first ? *call.first : *call.next;
            const Buffers<W> buffers(*pass.model, pass.memory, pass.num_tokens,
                                     pass.largest_segment, pass.threads->count);
            Pass<W>{*pass.model, pass, buffers, next_task, me}.run();
            const int64_t own = pass.model->vocab;
            for (int64_t row = me.first(call.num_rows); row < me.end(call.num_rows); ++row)
                draw_row(call, pass.logits + row * own, own, row, start + i, me.index);
            me.wait();
            if (me.index == 0) keep_going(call, start + i);
            me.wait();
        }
    });
}

}  // namespace
