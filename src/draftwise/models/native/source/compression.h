// BFloat16 as the twelve bits of narrow.h, without loss.

#pragma once

#include "vectors.h"

namespace {

INLINE int exponent_of(BFloat16 number) { return number.bits >> 7 & 0xff; }

// Add up how many numbers have each of the 256 exponents.
inline void count_exponents(const BFloat16 *numbers, int64_t size, int64_t *counts) {
    // Of numbers that follow each other apart: one need not wait for the other.
    constexpr int APART = 4;
    int64_t parts[APART][256] = {};
    for (int64_t i = 0; i < size; ++i) ++parts[i % APART][exponent_of(numbers[i])];
    for (const auto &part : parts)
        for (int exponent = 0; exponent < 256; ++exponent) counts[exponent] += part[exponent];
}

// Write numbers, a multiple of 128, as groups of 192 bytes. codes: of each exponent, 16 for none.
// exceptions get the places of the numbers whose exponent has none, and behind them the number.
inline void compress(const BFloat16 *numbers, int64_t size, const uint8_t *codes, char *to,
                     uint64_t *exceptions) {
    constexpr int APART = 32;  // numbers whose codes share a word
    constexpr int64_t GROUP = 4 * APART;
    for (int64_t first = 0; first < size; first += GROUP) {
        uint16_t words[APART] = {};
        uint8_t rest[GROUP];
        for (int i = 0; i < GROUP; ++i) {
            const BFloat16 number = numbers[first + i];
            const uint8_t code = codes[exponent_of(number)];
            if (code > 15) *exceptions++ = (uint64_t)(first + i) << 16 | number.bits;
            words[i % APART] |= (code & 15) << 4 * (i / APART);
            rest[i] = (number.bits >> 8 & 0x80) | (number.bits & 0x7f);
        }
        memcpy(to, words, sizeof words);
        memcpy(to + sizeof words, rest, sizeof rest);
        to += sizeof words + sizeof rest;
    }
}

}  // namespace
