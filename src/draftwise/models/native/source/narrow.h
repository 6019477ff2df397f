// Products with weights of fewer bits, of which there is less to read.
//
// What is stored is written out as the panels of pairs that it stands for, in a memory that stays in
// the cache, some steps before it is multiplied: so that writing, multiplying and waiting for memory
// go on at the same time. The weight begins with a NarrowHeader.

#pragma once

#include "matrix.h"
#include "tiles.h"

struct NarrowHeader {
    int64_t panels, scales;              // bytes from here to them; no scales: 0
    int64_t exceptions, num_exceptions;  // bytes from here to them, in order, one more behind them
    uint16_t exponents[32];              // of twelve bits: what the codes stand for, all twice
};

#if defined(__AVX512BF16__)

#include <algorithm>

namespace {

// Whole numbers of eight bits: the same in BFloat16, so that nothing is rounded before the scale of
// the column comes in at the end.
struct EightBits {
    static constexpr bool HAS_SCALES = true;
    static constexpr int64_t GROUP = 64, BYTES = 64;  // numbers that are written out at once

    explicit EightBits(const NarrowHeader &) {}

    // Compilers convert vectors of bytes number by number, if they are not told how.
    INLINE Floats as_floats(__m128i bytes) {
        constexpr __mmask16 ALL = 0xffff;
        return (Floats)_mm512_maskz_cvtepi32_ps(ALL, _mm512_maskz_cvtepi8_epi32(ALL, bytes));
    }

    INLINE_MEMBER void expand(const char *from, char *to) const {
        __m128i bytes[4];
        memcpy(bytes, from, sizeof bytes);
        for (int i = 0; i < 2; ++i) {
            const Floats low = as_floats(bytes[2 * i]), high = as_floats(bytes[2 * i + 1]);
            const __m512bh both = _mm512_cvtne2ps_pbh((__m512)high, (__m512)low);
            memcpy(to + i * CACHE_LINE, &both, sizeof both);
        }
    }
};

// BFloat16 to the last bit. A weight's exponents are few: sixteen of them have a code of four bits,
// and what has another one is an exception. Of each 128 numbers first come the codes, in a word those
// of numbers 32 apart, then a byte each of sign and fraction.
struct TwelveBits {
    static constexpr bool HAS_SCALES = false;
    static constexpr int64_t GROUP = 128, BYTES = 192;
    static constexpr uint16_t SIGN_AND_FRACTION = 0x807f;

    __m512i exponents;

    explicit TwelveBits(const NarrowHeader &header) {
        memcpy(&exponents, header.exponents, sizeof exponents);
    }

    INLINE_MEMBER void expand(const char *from, char *to) const {
        __m512i codes;
        memcpy(&codes, from, sizeof codes);
        expand_part<0>(codes, from, to);
        expand_part<1>(codes, from, to);
        expand_part<2>(codes, from, to);
        expand_part<3>(codes, from, to);
    }

    template <int PART>
    INLINE_MEMBER void expand_part(__m512i codes, const char *from, char *to) const {
        // Of a code's word only the lowest five bits count, and of these four, as the table is there
        // twice.
        const __m512i exponent =
            _mm512_permutexvar_epi16(_mm512_srli_epi16(codes, 4 * PART), exponents);
        __m256i rest;
        memcpy(&rest, from + sizeof codes + PART * sizeof rest, sizeof rest);
        constexpr int FIRST_AND_SECOND_OR_THIRD = 0xea;
        const __m512i numbers = _mm512_ternarylogic_epi32(
            _mm512_cvtepi8_epi16(rest), _mm512_set1_epi16((short)SIGN_AND_FRACTION), exponent,
            FIRST_AND_SECOND_OR_THIRD);
        memcpy(to + PART * CACHE_LINE, &numbers, sizeof numbers);
    }
};

// The numbers of some panels of a weight, one group after the other.
template <class N>
struct NarrowNumbers {
    static constexpr int64_t AHEAD = 8192;  // bytes to ask for before they are needed

    const N numbers;
    const char *from;
    int64_t at, end;            // number that is next, and the one behind the last
    const uint64_t *exception;  // the next one: its place in the weight, and behind it the number

    NarrowNumbers(const void *weight, int64_t numbers_of_panel, int64_t first_panel,
                  int64_t end_panel)
        : numbers(*(const NarrowHeader *)weight),
          at(first_panel * numbers_of_panel),
          end(end_panel * numbers_of_panel) {
        const NarrowHeader &header = *(const NarrowHeader *)weight;
        from = (const char *)weight + header.panels + at / N::GROUP * N::BYTES;
        exception = (const uint64_t *)((const char *)weight + header.exceptions);
        exception = std::lower_bound(exception, exception + header.num_exceptions,
                                     (uint64_t)at << 16);
    }

    // Write some groups out, as far as there are any.
    INLINE_MEMBER void write(int64_t groups, char *to) {
        const int64_t until = std::min(at + groups * N::GROUP, end);
        const char *const begin = to - at * (int64_t)sizeof(BFloat16);
        for (; at < until; at += N::GROUP, from += N::BYTES) {
            for (int64_t byte = 0; byte < N::BYTES; byte += CACHE_LINE)
                __builtin_prefetch(from + byte + AHEAD, 0, 2);
            numbers.expand(from, to);
            to += N::GROUP * (int64_t)sizeof(BFloat16);
        }
        for (; (int64_t)(*exception >> 16) < until; ++exception)
            memcpy((char *)begin + (*exception >> 16) * sizeof(BFloat16), exception,
                   sizeof(BFloat16));
        __asm__ volatile("" ::: "memory");  // the compiler does not know what tiles read
    }
};

// use(row, panel, left, right) of a weight, with the scales that belong to the panel.
template <class N, class Use>
INLINE void scaled(const void *weight, int64_t panel, int64_t row, Floats left, Floats right,
                   const Use &use) {
    if constexpr (N::HAS_SCALES) {
        const float *scales =
            (const float *)((const char *)weight + ((const NarrowHeader *)weight)->scales) +
            panel * PANEL;
        left *= read(scales);
        right *= read(scales + LANES);
    }
    use(row, panel, left, right);
}

// A weight that is multiplied as W is, its numbers stored as N.
template <class W, class N>
struct NarrowWeight : W {};

// As multiply of matrix.h, with memory for a panel that is written out. The depth is even.
template <class N, class Use>
void multiply(NarrowWeight<PairedWeight, N>, const BFloat16 *x, int64_t stride, int64_t rows,
              int64_t depth, const void *weight, int64_t first_panel, int64_t end_panel,
              char *memory, const Use &use) {
    const int64_t of_panel = rounded_up(depth, PairedWeight::DEPTH) * PANEL;
    const int64_t bytes = of_panel / N::GROUP * N::BYTES;
    for (int64_t start = 0; start < rows; start += ROWS_AT_ONCE) {
        NarrowNumbers<N> numbers(weight, of_panel, first_panel, end_panel);
        for (int64_t p = first_panel; p < end_panel; ++p) {
            numbers.write(of_panel / N::GROUP, memory);
            const Ahead ahead = {p + 1 < end_panel ? numbers.from : nullptr, bytes};
            multiply_panel<PairedWeight>(x, stride, start, least(start + ROWS_AT_ONCE, rows),
                                         depth, memory, ahead,
                                         [&](int64_t row, Floats left, Floats right) {
                                             scaled<N>(weight, p, row, left, right, use);
                                         });
        }
    }
}

// Bytes of that memory, for weights of so many inputs at most.
template <class N>
INLINE int64_t narrow_memory(NarrowWeight<PairedWeight, N>, int64_t deepest) {
    return rounded_up(deepest, PairedWeight::DEPTH) / PairedWeight::DEPTH * PairedWeight::BYTES;
}

#if defined(__AMX_BF16__)
// Steps that are written out before the one that is multiplied, and those that are kept: they stay in
// the nearest cache.
constexpr int64_t STEPS_AHEAD = 4, STEPS_KEPT = 8;

template <class N>
constexpr int64_t GROUPS_OF_STEP = TILE_DEPTH * PANEL / N::GROUP;

// Steps as multiply_tiles takes them, of which each is multiplied once.
template <class N>
struct StepsInTurn {
    NarrowNumbers<N> &numbers;
    char *kept;
    int64_t done;

    INLINE_MEMBER const char *operator()(int64_t) {
        numbers.write(GROUPS_OF_STEP<N>, place(done + STEPS_AHEAD));
        return place(done++);
    }

    char *place(int64_t step) const { return kept + step % STEPS_KEPT * TiledWeight::BYTES; }
};

// Those of a panel that is there, while the next is written out.
template <class N>
struct StepsOfPanel {
    NarrowNumbers<N> &numbers;
    const char *panel;
    char *next;
    int64_t left, at_once;  // groups of the next

    INLINE_MEMBER const char *operator()(int64_t step) {
        write(least(at_once, left));
        return panel + step * TiledWeight::BYTES;
    }

    INLINE_MEMBER void write(int64_t groups) {
        numbers.write(groups, next);
        next += groups * N::GROUP * (int64_t)sizeof(BFloat16);
        left -= groups;
    }
};

// As multiply of matrix.h.
template <class N, class Use>
void multiply(NarrowWeight<TiledWeight, N>, const BFloat16 *x, int64_t stride, int64_t rows,
              int64_t depth, const void *weight, int64_t first_panel, int64_t end_panel,
              char *memory, const Use &use) {
    alignas(64) float sums[MOST_TILES * TILE_ROWS * PANEL];
    const int64_t steps = depth / TILE_DEPTH, bytes = steps * TiledWeight::BYTES;
    const int64_t at_once = rows_at_once(depth);
    for (int64_t start = 0; start < rows; start += at_once) {
        const TiledRows tiled(start, least(at_once, rows - start));
        const TileShapes shapes((int)tiled.in_tile);
        NarrowNumbers<N> numbers(weight, depth * PANEL, first_panel, end_panel);
        const bool once = tiled.blocks == 1;
        numbers.write(GROUPS_OF_STEP<N> * (once ? STEPS_AHEAD : steps), memory);
        StepsInTurn<N> in_turn = {numbers, memory, 0};
        const int64_t groups = (GROUPS_OF_STEP<N> + tiled.blocks - 1) / tiled.blocks;
        for (int64_t p = first_panel; p < end_panel; ++p) {
            const int64_t turn = (p - first_panel) % 2;
            StepsOfPanel<N> of_panel = {numbers, memory + turn * bytes, memory + (1 - turn) * bytes,
                                        GROUPS_OF_STEP<N> * steps, groups};
            int64_t done = start;
            for (int64_t b = 0; b < tiled.blocks; ++b) {
                if (once)
                    multiply_block(x, stride, tiled, b, steps, in_turn, sums);
                else
                    multiply_block(x, stride, tiled, b, steps, of_panel, sums);
                done = hand_out(tiled, b, sums, done, [&](int64_t row, Floats left, Floats right) {
                    scaled<N>(weight, p, row, left, right, use);
                });
            }
        }
    }
}

template <class N>
INLINE int64_t narrow_memory(NarrowWeight<TiledWeight, N>, int64_t deepest) {
    const int64_t steps = rounded_up(deepest, TILE_DEPTH) / TILE_DEPTH;
    return std::max(STEPS_KEPT, 2 * steps) * TiledWeight::BYTES;
}
#endif

}  // namespace

#endif

namespace {

// Bytes that multiply needs to write panels out in, of a weight of so many inputs at most: none for
// one that is multiplied where it lies.
template <class W>
INLINE int64_t narrow_memory(W, int64_t) { return 0; }

}  // namespace
