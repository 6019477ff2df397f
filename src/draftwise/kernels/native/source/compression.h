// Lossless compression of BFloat16 to TwelveBits of narrow.h.

#pragma once

#include "vectors.h"

namespace {

INLINE int exponent_of(BFloat16 number) { return number.bits >> 7 & 0xff; }

// Adds the number of occurrences of each of the 256 exponents to counts.
inline void count_exponents(const BFloat16 *numbers, int64_t size, int64_t *counts) {
    // Consecutive numbers are counted in different tables, so that the increments are independent.
    constexpr int NUM_TABLES = 4;
    int64_t tables[NUM_TABLES][256] = {};
    for (int64_t i = 0; i < size; ++i) ++tables[i % NUM_TABLES][exponent_of(numbers[i])];
    for (const auto &table : tables)
        for (int exponent = 0; exponent < 256; ++exponent) counts[exponent] += table[exponent];
}

// Compresses numbers to groups of 192 bytes. size is a multiple of 128. codes[e] is the code of
// exponent e, or 16 for none. Numbers whose exponent has no code are written to exceptions, as
// index << 16 | bits.
inline void compress(const BFloat16 *numbers, int64_t size, const uint8_t *codes, char *to,
                     uint64_t *exceptions) {
    constexpr int NUM_WORDS = 32;  // 16-bit words of codes in a group
    constexpr int64_t GROUP = 4 * NUM_WORDS;
    for (int64_t first = 0; first < size; first += GROUP) {
        uint16_t words[NUM_WORDS] = {};
        uint8_t rest[GROUP];
        for (int i = 0; i < GROUP; ++i) {
            const BFloat16 number = numbers[first + i];
            const uint8_t code = codes[exponent_of(number)];
            if (code > 15) *exceptions++ = (uint64_t)(first + i) << 16 | number.bits;
            words[i % NUM_WORDS] |= (code & 15) << 4 * (i / NUM_WORDS);
            rest[i] = (number.bits >> 8 & 0x80) | (number.bits & 0x7f);
        }
        memcpy(to, words, sizeof words);
        memcpy(to + sizeof words, rest, sizeof rest);
        to += sizeof words + sizeof rest;
    }
}

}  // namespace
