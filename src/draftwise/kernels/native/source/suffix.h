// The search for continuations of texts after earlier occurrences of their last tokens, in the texts
// themselves and in a corpus. draftwise.engine.suffix defines the search and computes the same.

#pragma once

#include <algorithm>

#include "matches.h"
#include "vectors.h"

namespace {

constexpr int MAX_MATCH = 32;         // matches are compared up to this length
constexpr int MAX_OCCURRENCES = 256;  // latest occurrences of the last token that are compared
constexpr int MAX_VOTES = 8;          // matches whose continuations vote
constexpr int MAX_SHORTER = 3;        // matches shorter than the longest by more do not vote
constexpr int CORPUS_CHUNK = 512;            // tokens of a chunk of a corpus
constexpr int WAYS = 8;               // positions in a bucket of an index
constexpr int SHORT_GRAM = 3, LONG_GRAM = 8;  // tokens that the two indices hash
constexpr int32_t NO_TOKEN = -1;

}  // namespace

// A corpus: chunks of documents, and two indices of the n-grams that end at a position. A bucket
// contains positions, the newest first. Positions may have been overwritten since.
struct SuffixCorpus {
    int32_t *tokens;         // [chunks, CORPUS_CHUNK]
    int64_t *lengths;        // [chunks]
    uint64_t *namespaces;    // [chunks] only requests of the namespace, and of 0 all, may see it
    int32_t *short_index;    // [buckets, WAYS] of SHORT_GRAM tokens; -1 for no position
    int32_t *long_index;     // [buckets, WAYS] of LONG_GRAM tokens
    int64_t num_buckets;     // a power of two
};

// Arguments of draftwise_continuations.
struct ContinuationCall {
    const int32_t *texts;        // [slots, stride]
    const int64_t *ends;         // [slots] number of tokens of each text
    const uint64_t *namespaces;  // [slots]
    const uint8_t *greedy;       // [slots] whether the text is decoded at temperature 0
    const int64_t *slots;        // [requests]
    const int64_t *limits;       // [requests] maximum length; 0 to find nothing
    const SuffixCorpus *corpus;  // null without one
    const MatchSums *sums;       // what the acceptance is estimated from
    int64_t *tokens, *votes;     // [requests, width] output, initially 0
    double *shares, *acceptance;  // [requests, width] output, initially 0
    int64_t *lengths, *match_lengths, *chunks;  // [requests] output, initially 0, 0 and -1
    int64_t num_requests, stride, width;
};

namespace {

INLINE uint64_t gram_hash(uint64_t space, const int32_t *last, int size) {
    uint64_t hash = space;
    for (int i = 0; i < size; ++i) {
        hash = (hash ^ (uint64_t)(uint32_t)last[-i]) * 0x9E3779B97F4A7C15u;
        hash ^= hash >> 32;
    }
    return hash;
}

// A place whose tokens equal the last ones of a text.
struct Match {
    const int32_t *last;  // the last matching token
    int64_t room;         // number of tokens that follow it
    int64_t chunk;        // chunk of the corpus, or -1 for the text itself
    int length;           // number of matching tokens
};

// Number of tokens up to a place that equal the last tokens of a text.
INLINE int match_length(const int32_t *place, int64_t before, const int32_t *last, int64_t size) {
    const int limit = (int)std::min({(int64_t)MAX_MATCH, before + 1, size});
    int length = 0;
    while (length < limit && place[-length] == last[-length]) ++length;
    return length;
}

// The matches that vote. Longer ones come first, and earlier added ones among equals.
struct Voters {
    Match matches[MAX_VOTES];
    int count = 0;

    void add(const Match &match) {
        int at = count;
        while (at > 0 && matches[at - 1].length < match.length) --at;
        if (at == MAX_VOTES) return;
        if (count < MAX_VOTES) ++count;
        for (int i = count - 1; i > at; --i) matches[i] = matches[i - 1];
        matches[at] = match;
    }

    void remove_short() {
        while (count && matches[count - 1].length < matches[0].length - MAX_SHORTER) --count;
    }
};

// Adds the latest earlier occurrences of a text's last token.
void add_own_matches(const int32_t *text, int64_t end, Voters &voters) {
    const int32_t *last = text + end - 1;
    int num_found = 0;
    const auto add = [&](int64_t place) {
        voters.add({text + place, end - 1 - place, -1, match_length(text + place, place, last, end)});
        return ++num_found == MAX_OCCURRENCES;
    };
    int64_t place = end - 1;
    const Ints wanted = Ints{} + *last;
    for (; place >= LANES; place -= LANES) {
        Ints tokens;
        memcpy(&tokens, text + place - LANES, sizeof tokens);
        const Ints found = tokens == wanted;
        if (!any_of(found)) continue;
        for (int lane = LANES - 1; lane >= 0; --lane)
            if (found[lane] && add(place - LANES + lane)) return;
    }
    while (place-- > 0)
        if (text[place] == *last && add(place)) return;
}

// Adds the matches of one bucket of a corpus. Returns whether there are any.
bool add_bucket(const SuffixCorpus &corpus, const int32_t *index, uint64_t space, int gram,
                const int32_t *last, int64_t end, Voters &voters) {
    if (end < gram) return false;
    const uint64_t bucket = gram_hash(space, last, gram) & (uint64_t)(corpus.num_buckets - 1);
    bool found = false;
    for (int way = 0; way < WAYS; ++way) {
        const int32_t position = index[bucket * WAYS + way];
        if (position < 0) break;
        const int64_t chunk = position / CORPUS_CHUNK, place = position % CORPUS_CHUNK;
        const int64_t room = corpus.lengths[chunk] - 1 - place;
        if (corpus.namespaces[chunk] != space || room < 1) continue;
        const int length = match_length(corpus.tokens + position, place, last, end);
        if (length < gram) continue;
        voters.add({corpus.tokens + position, room, chunk, length});
        found = true;
    }
    return found;
}

void add_corpus_matches(const SuffixCorpus &corpus, uint64_t space, const int32_t *last, int64_t end,
                        Voters &voters) {
    if (!add_bucket(corpus, corpus.long_index, space, LONG_GRAM, last, end, voters))
        add_bucket(corpus, corpus.short_index, space, SHORT_GRAM, last, end, voters);
}

// The token at an offset after a match. A text repeats after its end, and a chunk does not.
INLINE int32_t token_after(const Match &match, int64_t offset) {
    if (match.chunk >= 0 && offset >= match.room) return NO_TOKEN;
    return match.last[1 + (offset < match.room ? offset : offset % match.room)];
}

// Calls visit(offset, token, support, votes) for each token of voter i's continuation: the total
// weight and the number of the voters that have the same tokens up to this one.
template <class Visit>
INLINE void follow(const Voters &voters, const double *weights, int i, int64_t width,
                   const Visit &visit) {
    unsigned agreeing = (1u << voters.count) - 1;
    for (int64_t offset = 0; offset < width; ++offset) {
        const int32_t token = token_after(voters.matches[i], offset);
        if (token == NO_TOKEN) return;
        double support = 0;
        for (int j = 0; j < voters.count; ++j) {
            if (!(agreeing >> j & 1)) continue;
            if (token_after(voters.matches[j], offset) == token)
                support += weights[j];
            else
                agreeing &= ~(1u << j);
        }
        visit(offset, token, support, __builtin_popcount(agreeing));
    }
}

// Finds the continuation of one text.
void find_continuation(const ContinuationCall &call, int64_t request) {
    const int64_t slot = call.slots[request], end = call.ends[slot], width = call.width;
    const int32_t *text = call.texts + slot * call.stride, *last = text + end - 1;
    Voters voters;
    add_own_matches(text, end, voters);
    if (call.corpus) {
        const uint64_t space = call.namespaces[slot];
        if (space) add_corpus_matches(*call.corpus, space, last, end, voters);
        add_corpus_matches(*call.corpus, 0, last, end, voters);
    }
    voters.remove_short();
    if (!voters.count) return;
    double weights[MAX_VOTES], before = 0;
    for (int i = 0; i < voters.count; ++i) {
        const int shorter = voters.matches[0].length - voters.matches[i].length;
        before += weights[i] = 1.0 / (double)(1 << shorter);
    }
    // The continuation with the largest sum of support over its tokens.
    int best = 0;
    double best_total = -1;
    for (int i = 0; i < voters.count; ++i) {
        double total = 0;
        follow(voters, weights, i, width,
               [&](int64_t, int32_t, double support, int) { total += support; });
        if (total > best_total) {
            best_total = total;
            best = i;
        }
    }
    const Match &match = voters.matches[best];
    int64_t length = 0;
    const int64_t first = request * width;
    const auto write = [&](int64_t offset, int32_t token, double support, int votes) {
        const double share = support / before;
        const MatchGroup group(call.greedy[slot], match.length + offset, match.chunk >= 0, votes);
        call.tokens[first + offset] = token;
        call.shares[first + offset] = share;
        call.votes[first + offset] = votes;
        call.acceptance[first + offset] = match_acceptance(*call.sums, group, share);
        before = support;
        length = offset + 1;
    };
    follow(voters, weights, best, std::min(width, call.limits[request]), write);
    call.lengths[request] = length;
    call.match_lengths[request] = match.length;
    call.chunks[request] = match.chunk;
}

// Calls visit(group, share, is_accepted) for each token with known acceptance.
template <class Visit>
INLINE void each_known(const ContinuationCall &call, const int64_t *known, const int64_t *accepted,
                       const Visit &visit) {
    for (int64_t request = 0; request < call.num_requests; ++request) {
        for (int64_t place = 0; place < known[request]; ++place) {
            const int64_t at = request * call.width + place;
            const MatchGroup group(call.greedy[call.slots[request]],
                                   call.match_lengths[request] + place, call.chunks[request] >= 0,
                                   call.votes[at]);
            visit(group, call.shares[at], place < accepted[request]);
        }
    }
}

// Learns which of the tokens that a call found were accepted. known: [requests] number of tokens up
// to the first rejected one. accepted: [requests] number of accepted tokens.
void learn_matches(const ContinuationCall &call, const int64_t *known, const int64_t *accepted) {
    const MatchSums &sums = *call.sums;
    // The tokens of one call have the same weight.
    each_known(call, known, accepted, [&](const MatchGroup &group, double, bool) {
        sums.length_accepted[group.of_length] *= MATCH_MEMORY;
        sums.length_expected[group.of_length] *= MATCH_MEMORY;
        sums.group_accepted[group.of_all] *= MATCH_MEMORY;
        sums.group_expected[group.of_all] *= MATCH_MEMORY;
    });
    each_known(call, known, accepted, [&](const MatchGroup &group, double share, bool is_accepted) {
        sums.length_accepted[group.of_length] += is_accepted;
        sums.length_expected[group.of_length] += share;
        sums.group_accepted[group.of_all] += is_accepted;
        sums.group_expected[group.of_all] += share;
    });
}

// Puts a position in front of a bucket, and drops the oldest one.
INLINE void insert(int32_t *bucket, int32_t position) {
    memmove(bucket + 1, bucket, (WAYS - 1) * sizeof *bucket);
    bucket[0] = position;
}

// Adds the positions first … end - 1 of a chunk to the indices.
void index_chunk(const SuffixCorpus &corpus, int64_t chunk, int64_t first, int64_t end) {
    const uint64_t space = corpus.namespaces[chunk], mask = (uint64_t)(corpus.num_buckets - 1);
    for (int64_t place = first; place < end; ++place) {
        const int32_t position = (int32_t)(chunk * CORPUS_CHUNK + place);
        const int32_t *last = corpus.tokens + position;
        if (place + 1 >= SHORT_GRAM)
            insert(corpus.short_index + (gram_hash(space, last, SHORT_GRAM) & mask) * WAYS, position);
        if (place + 1 >= LONG_GRAM)
            insert(corpus.long_index + (gram_hash(space, last, LONG_GRAM) & mask) * WAYS, position);
    }
}

}  // namespace
