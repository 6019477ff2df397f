// Drafting in one go: read a token, compute the next one's distribution, draw it, and so on.

#pragma once

#include <cmath>

#include "decoder.h"
#include "sampling.h"

// DraftRule of draftwise.core.types.
struct DraftRule {
    const double *weights;               // [2, 8]
    const double *history;               // [requests]
    const uint8_t *greedy, *exempt;      // [requests]
    const double *needed;                // [, needed_width] by who drafts and what is left
    const double *thresholds;            // [requests]
    double *expected;                    // [requests, width]
    double *reach;                       // [requests]
    float *least, *most;                 // [requests, width]
    int64_t *kept;                       // [requests]
    double smallest_token_prob, largest_entropy, last_position, lowest, highest, next_to_nothing;
    int64_t needed_width, width;
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
    float *beliefs;            // [requests, width, vocab], or null where probs say it
    float *entropy;            // [requests, width], or null if nobody asks for signals
    float *token_probs;        // [requests, width], likewise
    uint8_t *broken;           // [requests, width]
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

// Whether the rule has the token at a position verified, for which so much is needed; notes which
// would be.
bool is_likely(const DraftRule &rule, const double *w, int64_t request, int64_t position,
               double entropy, double level, double needed, float token_prob) {
    if (!(needed > rule.next_to_nothing)) return true;
    constexpr double LEAST_NEEDED = 1e-6;
    const double limit = std::min(std::max(needed, LEAST_NEEDED), 1 - LEAST_NEEDED);
    const Range likely(w[2], w[5] * entropy + w[1], level - std::log(limit / (1 - limit)));
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
bool goes_on(const DraftRule &rule, const DraftCall &call, int64_t request, int64_t position,
             int64_t num_drafting) {
    const int64_t place = request * call.width + position;
    const double *w = rule.weights + 8 * rule.greedy[request];
    const double l = std::log(std::max((double)call.token_probs[place], rule.smallest_token_prob));
    const double h = std::min((double)call.entropy[place], rule.largest_entropy);
    const double i = std::min((double)position, rule.last_position) / rule.last_position;
    // What does not depend on the token.
    const double level = (w[4] * h + w[3]) * h + w[6] * rule.history[request] + w[0] + w[7] * i;
    const double log_odds = ((w[2] * l + w[5] * h) + w[1]) * l + level;
    const double p = 1.0 / (1.0 + std::exp(-std::min(std::max(log_odds, -30.0), 30.0)));
    const double bounded = std::min(std::max(p, rule.lowest), rule.highest);
    const double before = rule.reach[request], reach = rule.reach[request] *= bounded;
    rule.expected[request * rule.width + position] = bounded;
    const double needed = rule.thresholds[request] / std::max(before, 1e-9);
    if (position == 0) rule.kept[request] = 0;
    rule.kept[request] += rule.kept[request] == position && !call.broken[place] &&
                          is_likely(rule, w, request, position, h, level, needed,
                                    call.token_probs[place]);
    const int64_t left = call.limits[request] - position - 1;
    if (left <= 0) return false;
    return rule.exempt[request] || reach >= rule.needed[num_drafting * rule.needed_width + left];
}

// Take out who stops after a position; the others move up.
void keep_going(DraftCall &call, int64_t position) {
    const int64_t num_drafting = call.num_rows;
    int64_t kept = 0;
    for (int64_t row = 0; row < num_drafting; ++row) {
        const int64_t request = call.requests[row];
        const bool broken = call.broken[request * call.width + position];
        bool goes = position + 1 < call.limits[request];
        if (call.rule) goes = goes_on(*call.rule, call, request, position, num_drafting);
        // What is not a number proposes nothing from there on.
        call.lengths[request] += !broken;
        if (broken || !goes) continue;
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
