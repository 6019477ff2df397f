// Blocks of GGUF files whose numbers are entries of a grid.
//
// An entry has 4 or 8 small numbers. A block has the index of each entry, the signs of its numbers
// and scales. Here a number is a code of 4 bits: its place among the numbers of the grid, and its
// sign as the highest bit. The layouts are described in ggml-common.h.

#pragma once

#include <cstdint>
#include <cstring>

namespace {

constexpr int SIGN_BIT = 3;

INLINE uint32_t read_word(const uint8_t *from) {
    uint32_t word;
    memcpy(&word, from, sizeof word);
    return word;
}

// Writes the codes of an entry; SIZE is 4 or 8. Bit i of signs is the sign of number i.
template <int SIZE>
INLINE void read_entry(const uint8_t *grid, int entry, unsigned signs, uint8_t *to) {
    for (int i = 0; i < SIZE; ++i)
        to[i] = (uint8_t)(grid[SIZE * entry + i] | (signs >> i & 1) << SIGN_BIT);
}

// Eight signs of which the number of negative ones is even.
INLINE unsigned eight_signs(unsigned seven) {
    return seven | (unsigned)__builtin_parity(seven) << 7;
}

// 2 s + 1 for two scales s of 4 bits in a byte, the low one first.
INLINE void read_odd_scales(uint8_t both, int8_t *to) {
    to[0] = (int8_t)(2 * (both & 15) + 1);
    to[1] = (int8_t)(2 * (both >> 4) + 1);
}

INLINE void read_iq2_xxs(const uint8_t *grid, const uint8_t *from, uint8_t *codes, int8_t *scales) {
    for (int group = 0; group < 8; ++group, from += 8, codes += 32) {
        const uint32_t rest = read_word(from + 4);
        scales[group] = (int8_t)(2 * (rest >> 28) + 1);
        for (int i = 0; i < 4; ++i)
            read_entry<8>(grid, from[i], eight_signs(rest >> 7 * i & 127), codes + 8 * i);
    }
}

INLINE void read_iq2_xs(const uint8_t *grid, const uint8_t *from, uint8_t *codes, int8_t *scales) {
    for (int i = 0; i < 32; ++i) {
        const int both = from[2 * i] | from[2 * i + 1] << 8;
        read_entry<8>(grid, both & 511, eight_signs((unsigned)both >> 9), codes + 8 * i);
    }
    for (int i = 0; i < 8; ++i) read_odd_scales(from[64 + i], scales + 2 * i);
}

INLINE void read_iq2_s(const uint8_t *grid, const uint8_t *from, uint8_t *codes, int8_t *scales) {
    for (int i = 0; i < 32; ++i) {
        const int entry = from[i] | (from[64 + i / 4] >> 2 * (i % 4) & 3) << 8;
        read_entry<8>(grid, entry, from[32 + i], codes + 8 * i);
    }
    for (int i = 0; i < 8; ++i) read_odd_scales(from[72 + i], scales + 2 * i);
}

INLINE void read_iq3_xxs(const uint8_t *grid, const uint8_t *from, uint8_t *codes, int8_t *scales) {
    for (int group = 0; group < 8; ++group) {
        const uint32_t rest = read_word(from + 64 + 4 * group);
        scales[group] = (int8_t)(2 * (rest >> 28) + 1);
        for (int i = 0; i < 8; ++i) {
            const unsigned signs = eight_signs(rest >> 7 * (i / 2) & 127) >> 4 * (i % 2);
            read_entry<4>(grid, from[8 * group + i], signs, codes + 32 * group + 4 * i);
        }
    }
}

INLINE void read_iq3_s(const uint8_t *grid, const uint8_t *from, uint8_t *codes, int8_t *scales) {
    for (int i = 0; i < 64; ++i) {
        const int entry = from[i] | (from[64 + i / 8] >> i % 8 & 1) << 8;
        read_entry<4>(grid, entry, (unsigned)from[72 + i / 2] >> 4 * (i % 2), codes + 4 * i);
    }
    for (int i = 0; i < 4; ++i) read_odd_scales(from[104 + i], scales + 2 * i);
}

// The sign of an entry of IQ1_S and IQ1_M is that of what is added to all of its numbers.
INLINE void read_iq1_s(const uint8_t *grid, const uint8_t *from, uint8_t *codes, int8_t *scales) {
    for (int group = 0; group < 8; ++group) {
        const int rest = from[32 + 2 * group] | from[33 + 2 * group] << 8;
        scales[group] = (int8_t)(2 * (rest >> 12 & 7) + 1);
        for (int i = 0; i < 4; ++i) {
            const int entry = from[4 * group + i] | (rest >> 3 * i & 7) << 8;
            read_entry<8>(grid, entry, rest >> 15 ? 255 : 0, codes + 32 * group + 8 * i);
        }
    }
}

// Returns the factor of the scales, which is float16.
INLINE uint16_t read_iq1_m(const uint8_t *grid, const uint8_t *from, uint8_t *codes,
                           int8_t *scales) {
    for (int i = 0; i < 32; ++i) {
        const int rest = from[32 + i / 2] >> 4 * (i % 2);
        read_entry<8>(grid, from[i] | (rest & 7) << 8, rest & 8 ? 255 : 0, codes + 8 * i);
    }
    unsigned factor = 0;
    for (int part = 0; part < 4; ++part) {
        const int word = from[48 + 2 * part] | from[49 + 2 * part] << 8;
        for (int i = 0; i < 4; ++i) scales[4 * part + i] = (int8_t)(2 * (word >> 3 * i & 7) + 1);
        factor |= (unsigned)(word >> 12) << 4 * part;
    }
    return (uint16_t)factor;
}

}  // namespace
