// Products with weights that are stored in fewer bits, which reduces the memory traffic.
//
// Groups of stored numbers are expanded to panels of PairedWeight in a buffer that stays in the
// cache. A group is expanded a few steps before it is multiplied, so that expansion, multiplication
// and memory accesses overlap. The weight begins with a NarrowHeader.

#pragma once

#include "matrix.h"
#include "tiles.h"

// Start of a weight that is stored in fewer bits. Offsets are in bytes from the header.
struct NarrowHeader {
    int64_t panels;          // offset of the panels
    int64_t scales;          // offset of the scales; 0 without scales
    int64_t exceptions;      // offset of the exceptions, in ascending order, and an end marker
    int64_t num_exceptions;  // number of exceptions, without the end marker
    uint16_t exponents[32];  // exponent of each 4-bit code of TwelveBits, stored twice
};

#if defined(__AVX512BF16__)

#include <algorithm>
#include <type_traits>

namespace {

// Quantised 8-bit integers. They are exact in BFloat16, so that no rounding occurs before the sums
// are multiplied with the scales of their columns.
struct EightBits {
    static constexpr bool HAS_SCALES = true;
    static constexpr int64_t GROUP = 64, BYTES = 64;  // numbers and bytes of a group

    explicit EightBits(const NarrowHeader &) {}

    // Intrinsics, as compilers convert generic vectors of bytes one element at a time.
    INLINE Floats as_floats(__m128i bytes) {
        constexpr __mmask16 ALL = 0xffff;
        return (Floats)_mm512_maskz_cvtepi32_ps(ALL, _mm512_maskz_cvtepi8_epi32(ALL, bytes));
    }

    // Expands one group to BFloat16.
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

// Lossless compression of BFloat16 to 12 bits. The numbers of a weight have few different
// exponents. The 16 most frequent exponents have a code of 4 bits. A number with another exponent
// is an exception. A group of 128 numbers begins with the codes. Each 16-bit word contains the
// codes of four numbers, which are 32 apart. One byte per number with sign and fraction follows.
struct TwelveBits {
    static constexpr bool HAS_SCALES = false;
    static constexpr int64_t GROUP = 128, BYTES = 192;
    static constexpr uint16_t SIGN_AND_FRACTION = 0x807f;

    __m512i exponents;

    explicit TwelveBits(const NarrowHeader &header) {
        memcpy(&exponents, header.exponents, sizeof exponents);
    }

    // Expands one group to BFloat16, with wrong exponents for exceptions.
    INLINE_MEMBER void expand(const char *from, char *to) const {
        Words numbers[4];
        expand(from, numbers);
        memcpy(to, numbers, sizeof numbers);
    }

    INLINE_MEMBER void expand(const char *from, Words *to) const {
        __m512i codes;
        memcpy(&codes, from, sizeof codes);
        to[0] = part<0>(codes, from);
        to[1] = part<1>(codes, from);
        to[2] = part<2>(codes, from);
        to[3] = part<3>(codes, from);
    }

    template <int PART>
    INLINE_MEMBER Words part(__m512i codes, const char *from) const {
        // The permutation uses the lowest five bits of each index. The fifth bit has no effect, as
        // the table is stored twice.
        const __m512i exponent =
            _mm512_permutexvar_epi16(_mm512_srli_epi16(codes, 4 * PART), exponents);
        __m256i rest;
        memcpy(&rest, from + sizeof codes + PART * sizeof rest, sizeof rest);
        constexpr int FIRST_AND_SECOND_OR_THIRD = 0xea;
        return (Words)_mm512_ternarylogic_epi32(
            _mm512_cvtepi8_epi16(rest), _mm512_set1_epi16((short)SIGN_AND_FRACTION), exponent,
            FIRST_AND_SECOND_OR_THIRD);
    }
};

// Expands the panels first_panel to end_panel of a weight sequentially, group by group.
template <class Format>
struct Expander {
    static constexpr int64_t PREFETCH_DISTANCE = 8192;  // in bytes

    const Format format;
    const char *from;           // next group
    int64_t at, end;            // index of the next number, and one past the last
    const uint64_t *exception;  // next exception: index << 16 | bits of the number

    Expander(const void *weight, int64_t panel_numbers, int64_t first_panel, int64_t end_panel)
        : format(*(const NarrowHeader *)weight),
          at(first_panel * panel_numbers),
          end(end_panel * panel_numbers) {
        const NarrowHeader &header = *(const NarrowHeader *)weight;
        from = (const char *)weight + header.panels + at / Format::GROUP * Format::BYTES;
        exception = (const uint64_t *)((const char *)weight + header.exceptions);
        exception = std::lower_bound(exception, exception + header.num_exceptions,
                                     (uint64_t)at << 16);
    }

    // Expands the given number of groups, or those that remain, and inserts their exceptions.
    INLINE_MEMBER void expand(int64_t groups, char *to) {
        const int64_t until = std::min(at + groups * Format::GROUP, end);
        const char *const begin = to - at * (int64_t)sizeof(BFloat16);
        for (; at < until; at += Format::GROUP, from += Format::BYTES) {
            for (int64_t byte = 0; byte < Format::BYTES; byte += CACHE_LINE)
                __builtin_prefetch(from + byte + PREFETCH_DISTANCE, 0, 2);
            format.expand(from, to);
            to += Format::GROUP * (int64_t)sizeof(BFloat16);
        }
        for (; (int64_t)(*exception >> 16) < until; ++exception)
            memcpy((char *)begin + (*exception >> 16) * sizeof(BFloat16), exception,
                   sizeof(BFloat16));
        __asm__ volatile("" ::: "memory");  // tile loads are unknown to the compiler
    }
};

// Multiplies results with the scales of their columns and passes them to the epilogue.
template <class Format, class Epilogue>
INLINE void apply_scales(const void *weight, int64_t panel, int64_t row, Floats left, Floats right,
                         const Epilogue &epilogue) {
    if constexpr (Format::HAS_SCALES) {
        const float *scales =
            (const float *)((const char *)weight + ((const NarrowHeader *)weight)->scales) +
            panel * PANEL_WIDTH;
        left *= read(scales);
        right *= read(scales + LANES);
    }
    epilogue(row, panel, left, right);
}

// A weight that is stored in Format and multiplied like W.
template <class W, class Format>
struct NarrowWeight : W {};

// Multiplies COUNT rows with a panel of compressed numbers, which are expanded in registers. The
// sums are those of multiply_steps.
template <int COUNT>
void multiply_compressed(const TwelveBits &format, const PairedWeight::Input *x, int64_t stride,
                         const char *from, int64_t groups, int64_t first_number,
                         const uint64_t *exception, Floats *sums) {
    constexpr int64_t PREFETCH_DISTANCE = 6144;  // in bytes
    Floats part[COUNT][2];
#pragma GCC unroll 16
    for (int i = 0; i < COUNT; ++i) part[i][0] = part[i][1] = Floats{};
    int64_t next_exception = (int64_t)(*exception >> 16) - first_number;
    for (int64_t group = 0; group < groups; ++group, from += TwelveBits::BYTES) {
        for (int64_t byte = 0; byte < TwelveBits::BYTES; byte += CACHE_LINE)
            __builtin_prefetch(from + PREFETCH_DISTANCE + byte, 0, 2);
        Words columns[4];
        format.expand(from, columns);
        if (__builtin_expect(next_exception < (group + 1) * TwelveBits::GROUP, 0)) {
            uint16_t numbers[TwelveBits::GROUP];
            memcpy(numbers, columns, sizeof numbers);
            while (next_exception < (group + 1) * TwelveBits::GROUP) {
                numbers[next_exception - group * TwelveBits::GROUP] = (uint16_t)*exception++;
                next_exception = (int64_t)(*exception >> 16) - first_number;
            }
            memcpy(columns, numbers, sizeof columns);
        }
        const PairedWeight::Input *factors = x + group * 2 * PairedWeight::DEPTH;
#pragma GCC unroll 2
        for (int step = 0; step < 2; ++step) {
#pragma GCC unroll 16
            for (int i = 0; i < COUNT; ++i) {
                const PairedWeight::Factor factor =
                    PairedWeight::factor(factors + i * stride + step * PairedWeight::DEPTH);
                for (int c = 0; c < 2; ++c)
                    part[i][c] =
                        PairedWeight::multiply_add(part[i][c], columns[2 * step + c], factor);
            }
        }
    }
#pragma GCC unroll 16
    for (int i = 0; i < COUNT; ++i) {
        sums[2 * i] = part[i][0];
        sums[2 * i + 1] = part[i][1];
    }
}

typedef void (*MultiplyCompressed)(const TwelveBits &, const PairedWeight::Input *, int64_t,
                                   const char *, int64_t, int64_t, const uint64_t *, Floats *);

// multiply_compressed for each number of rows.
template <int COUNT>
INLINE MultiplyCompressed compressed_for_rows(int64_t rows) {
    if constexpr (COUNT > 1)
        if (rows < COUNT) return compressed_for_rows<COUNT - 1>(rows);
    return multiply_compressed<COUNT>;
}

// The same as multiply of matrix.h for the rows first to end. Every register block expands the
// numbers again, which takes less time than writing them to a buffer and reading them again.
template <class Epilogue>
void multiply_in_registers(const PairedWeight::Input *x, int64_t stride, int64_t first, int64_t end,
                           int64_t panel_numbers, const void *weight, int64_t first_panel,
                           int64_t end_panel, const Epilogue &epilogue) {
    const NarrowHeader &header = *(const NarrowHeader *)weight;
    const TwelveBits format(header);
    const uint64_t *exception = (const uint64_t *)((const char *)weight + header.exceptions);
    const uint64_t *const last_exception = exception + header.num_exceptions;
    const int64_t groups = panel_numbers / TwelveBits::GROUP;
    const char *from =
        (const char *)weight + header.panels + first_panel * groups * TwelveBits::BYTES;
    const int64_t rows = end - first, blocks = (rows + MAX_BLOCK_ROWS - 1) / MAX_BLOCK_ROWS;
    for (int64_t p = first_panel; p < end_panel; ++p, from += groups * TwelveBits::BYTES) {
        const int64_t first_number = p * panel_numbers;
        exception =
            std::lower_bound(exception, last_exception, (uint64_t)first_number << 16);
        for (int64_t b = 0; b < blocks; ++b) {
            const int64_t row = first + rows * b / blocks, until = first + rows * (b + 1) / blocks;
            Floats sums[2 * MAX_BLOCK_ROWS];
            compressed_for_rows<MAX_BLOCK_ROWS>(until - row)(
                format, x + row * stride, stride, from, groups, first_number, exception, sums);
            for (int64_t i = 0; i < until - row; ++i)
                epilogue(row + i, p, sums[2 * i], sums[2 * i + 1]);
        }
    }
}

// The same as multiply of matrix.h. expanded is scratch memory for one panel. The depth is even.
template <class Format, class Epilogue>
void multiply(NarrowWeight<PairedWeight, Format>, const PairedWeight::Input *x, int64_t stride,
              int64_t rows, int64_t depth, const void *weight, int64_t first_panel,
              int64_t end_panel, char *expanded, const Epilogue &epilogue) {
    const int64_t panel_numbers = round_up(depth, PairedWeight::DEPTH) * PANEL_WIDTH;
    const int64_t bytes = panel_numbers / Format::GROUP * Format::BYTES;
    for (int64_t start = 0; start < rows; start += CACHED_ROWS) {
        const int64_t end = min_int(start + CACHED_ROWS, rows);
        if constexpr (std::is_same<Format, TwelveBits>::value) {
            multiply_in_registers(x, stride, start, end, panel_numbers, weight, first_panel,
                                  end_panel, epilogue);
            continue;
        }
        Expander<Format> expander(weight, panel_numbers, first_panel, end_panel);
        for (int64_t p = first_panel; p < end_panel; ++p) {
            expander.expand(panel_numbers / Format::GROUP, expanded);
            const PrefetchRange prefetch = {p + 1 < end_panel ? expander.from : nullptr, bytes};
            multiply_panel<PairedWeight>(x, stride, start, end, depth, expanded, prefetch,
                                         [&](int64_t row, Floats left, Floats right) {
                                             apply_scales<Format>(weight, p, row, left, right,
                                                                  epilogue);
                                         });
        }
    }
}

// Bytes of scratch memory that multiply needs for weights of at most max_depth inputs.
template <class Format>
INLINE int64_t expansion_bytes(NarrowWeight<PairedWeight, Format>, int64_t max_depth) {
    return round_up(max_depth, PairedWeight::DEPTH) / PairedWeight::DEPTH * PairedWeight::BYTES;
}

#if defined(__AMX_BF16__)
// Number of steps that expansion is ahead of multiplication, and size of the ring buffer in steps.
// The ring buffer fits in the first-level cache.
constexpr int64_t STEPS_AHEAD = 4, RING_STEPS = 8;

template <class Format>
constexpr int64_t GROUPS_PER_STEP = TILE_DEPTH * PANEL_WIDTH / Format::GROUP;

// Steps for multiply_tiles if each step is multiplied once. They are expanded into a ring buffer.
template <class Format>
struct StreamedSteps {
    Expander<Format> &expander;
    char *ring;
    int64_t done;  // number of steps returned so far

    INLINE_MEMBER const char *operator()(int64_t) {
        expander.expand(GROUPS_PER_STEP<Format>, slot(done + STEPS_AHEAD));
        return slot(done++);
    }

    char *slot(int64_t step) const { return ring + step % RING_STEPS * TiledWeight::BYTES; }
};

// Steps for multiply_tiles if a panel is multiplied with several blocks of rows. The panel is
// already expanded. Each call expands a part of the next panel.
template <class Format>
struct DoubleBufferedSteps {
    Expander<Format> &expander;
    const char *panel;
    char *next;                     // end of the expanded part of the next panel
    int64_t left, groups_per_step;  // groups of the next panel: remaining, and expanded per call

    INLINE_MEMBER const char *operator()(int64_t step) {
        expand_next(min_int(groups_per_step, left));
        return panel + step * TiledWeight::BYTES;
    }

    INLINE_MEMBER void expand_next(int64_t groups) {
        expander.expand(groups, next);
        next += groups * Format::GROUP * (int64_t)sizeof(BFloat16);
        left -= groups;
    }
};

// The same as multiply of matrix.h. expanded is scratch memory of expansion_bytes.
template <class Format, class Epilogue>
void multiply(NarrowWeight<TiledWeight, Format>, const BFloat16 *x, int64_t stride, int64_t rows,
              int64_t depth, const void *weight, int64_t first_panel, int64_t end_panel,
              char *expanded, const Epilogue &epilogue) {
    alignas(64) float sums[MAX_ROW_TILES * TILE_ROWS * PANEL_WIDTH];
    const int64_t steps = depth / TILE_DEPTH, bytes = steps * TiledWeight::BYTES;
    const int64_t max_rows = cached_rows(depth);
    for (int64_t start = 0; start < rows; start += max_rows) {
        const TiledRows tiled(start, min_int(max_rows, rows - start));
        const TileConfig config((int)tiled.rows_per_tile);
        Expander<Format> expander(weight, depth * PANEL_WIDTH, first_panel, end_panel);
        const bool streams = tiled.blocks == 1;
        expander.expand(GROUPS_PER_STEP<Format> * (streams ? STEPS_AHEAD : steps), expanded);
        StreamedSteps<Format> streamed = {expander, expanded, 0};
        const int64_t groups_per_step = (GROUPS_PER_STEP<Format> + tiled.blocks - 1) / tiled.blocks;
        for (int64_t p = first_panel; p < end_panel; ++p) {
            const int64_t buffer = (p - first_panel) % 2;
            DoubleBufferedSteps<Format> double_buffered = {
                expander, expanded + buffer * bytes, expanded + (1 - buffer) * bytes,
                GROUPS_PER_STEP<Format> * steps, groups_per_step};
            int64_t next_row = start;
            for (int64_t b = 0; b < tiled.blocks; ++b) {
                if (streams)
                    multiply_block(x, stride, tiled, b, steps, streamed, sums);
                else
                    multiply_block(x, stride, tiled, b, steps, double_buffered, sums);
                next_row = apply_epilogue(
                    tiled, b, sums, next_row, [&](int64_t row, Floats left, Floats right) {
                        apply_scales<Format>(weight, p, row, left, right, epilogue);
                    });
            }
        }
    }
}

template <class Format>
INLINE int64_t expansion_bytes(NarrowWeight<TiledWeight, Format>, int64_t max_depth) {
    const int64_t steps = round_up(max_depth, TILE_DEPTH) / TILE_DEPTH;
    return std::max(RING_STEPS, 2 * steps) * TiledWeight::BYTES;
}
#endif

}  // namespace

#endif

namespace {

// Bytes of scratch memory that multiply needs to expand panels: none for a weight that is stored as
// it is multiplied.
template <class W>
INLINE int64_t expansion_bytes(W, int64_t) { return 0; }

}  // namespace
