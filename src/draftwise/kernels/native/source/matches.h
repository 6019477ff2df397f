// The acceptance of tokens that continue a text like an earlier occurrence of its last tokens.
// draftwise.estimators.matches defines the estimate and computes the same.

#pragma once

#include <algorithm>
#include <cstdint>

#include "vectors.h"

namespace {

// Smallest match length of each group of lengths, and smallest number of votes of each group.
constexpr int64_t MATCH_LENGTHS[] = {1, 2, 3, 4, 6, 9, 14, 20};
constexpr int64_t MATCH_VOTES[] = {1, 2, 4};
constexpr int NUM_LENGTHS = sizeof MATCH_LENGTHS / sizeof *MATCH_LENGTHS;
constexpr int NUM_VOTES = sizeof MATCH_VOTES / sizeof *MATCH_VOTES;
constexpr double PARENT_WEIGHT = 12.0;  // of a length's factor in those of its groups
constexpr double MATCH_MEMORY = 0.998;  // factor on older tokens of a group for each new one
constexpr double LOWEST_ACCEPTANCE = 0.01, HIGHEST_ACCEPTANCE = 0.995;

}  // namespace

// Accepted tokens, and the sum of their shares of the votes, by group.
struct MatchSums {
    double *length_accepted, *length_expected;  // [2, NUM_LENGTHS]
    double *group_accepted, *group_expected;    // [2, NUM_LENGTHS, 2, NUM_VOTES]
};

namespace {

// Number of bounds that a value reaches, minus 1.
template <int N>
INLINE int group_of(const int64_t (&bounds)[N], int64_t value) {
    int group = 0;
    while (group + 1 < N && value >= bounds[group + 1]) ++group;
    return group;
}

// The groups of a token.
struct MatchGroup {
    int of_length, of_all;

    MatchGroup(bool greedy, int64_t length, bool from_corpus, int64_t votes) {
        of_length = greedy * NUM_LENGTHS + group_of(MATCH_LENGTHS, length);
        of_all = (of_length * 2 + from_corpus) * NUM_VOTES + group_of(MATCH_VOTES, votes);
    }
};

INLINE double match_acceptance(const MatchSums &sums, const MatchGroup &group, double share) {
    const double of_length =
        sums.length_accepted[group.of_length] / sums.length_expected[group.of_length];
    const double factor = (sums.group_accepted[group.of_all] + PARENT_WEIGHT * of_length) /
                          (sums.group_expected[group.of_all] + PARENT_WEIGHT);
    return std::min(std::max(factor * share, LOWEST_ACCEPTANCE), HIGHEST_ACCEPTANCE);
}

}  // namespace
