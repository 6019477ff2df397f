// Products with weights that are stored in groups of inputs, each with a scale: the blocks of GGUF
// files, and weights quantised to 4 bits.
//
// A group of 16 or 32 inputs of the 32 columns of a panel is expanded to integers in a buffer that
// stays in the first-level cache, and multiplied there. Integers are exact in BFloat16, so that a
// weight is not rounded a second time. The sum over a group is multiplied with the scales of its
// columns in float32.

#pragma once

#include <algorithm>
#include <type_traits>

#include "matrix.h"

// Consecutive panels of a weight that are stored in the same format. A panel consists of its groups,
// one after another. A group consists of the scales of its columns, their minimums, and the codes of
// its numbers in the order of PairedWeight. Weights with one scale per column have it elsewhere.
struct GroupedSection {
    int64_t first_panel, offset;  // first panel, and its offset in bytes from the header
    int64_t bits;                 // bits of a code; a code of 8 bits is the integer itself
    int64_t group;                // inputs of a group
    int64_t has_minimums;         // whether a number is code * scale - minimum
    int64_t has_wide_scales;      // whether scales and minimums are float32, not float16
    int64_t output_scales;        // offset in bytes from the header to float32 scales of all columns,
                                  // which groups then do not have; 0 if groups have scales
    uint16_t values[64];          // the integer of each code of fewer bits, as BFloat16
};

constexpr int MAX_SECTIONS = 4;

// Start of a weight that is stored in groups.
struct GroupedHeader {
    int64_t num_sections;
    GroupedSection sections[MAX_SECTIONS];
};

#if defined(__AVX512BF16__)

namespace {

constexpr int64_t MAX_GROUP = 32, MIN_GROUP = 16;
constexpr int64_t CHUNK = 128;  // codes of fewer than 8 bits that are stored together

// Expands codes of BITS bits to BFloat16. A chunk of 128 codes begins with their lowest four bits.
// Each 16-bit word contains those of four codes, which are 32 apart. The other bits follow, 128 at a
// time.
template <int BITS>
struct GroupCodes {
    static constexpr int64_t CHUNK_BYTES = CHUNK * BITS / 8;
    __m512i low, high;  // the values of the codes 0 to 31 and 32 to 63

    explicit GroupCodes(const GroupedSection &section) {
        memcpy(&low, section.values, sizeof low);
        memcpy(&high, section.values + 32, sizeof high);
    }

    static int64_t bytes(int64_t numbers) { return numbers / CHUNK * CHUNK_BYTES; }

    INLINE_MEMBER void expand(const char *from, int64_t numbers, char *to) const {
        for (int64_t i = 0; i < numbers; i += CHUNK, from += CHUNK_BYTES) {
            __m512i words;
            memcpy(&words, from, sizeof words);
            expand_part<0>(words, from + sizeof words, to);
            expand_part<1>(words, from + sizeof words, to + CACHE_LINE);
            expand_part<2>(words, from + sizeof words, to + 2 * CACHE_LINE);
            expand_part<3>(words, from + sizeof words, to + 3 * CACHE_LINE);
            to += 4 * CACHE_LINE;
        }
    }

    template <int PART>
    INLINE_MEMBER void expand_part(__m512i words, const char *planes, char *to) const {
        __m512i codes = _mm512_and_si512(_mm512_srli_epi16(words, 4 * PART), _mm512_set1_epi16(15));
        for (int bit = 4; bit < BITS; ++bit) {
            __mmask32 is_set;
            memcpy(&is_set, planes + (bit - 4) * (CHUNK / 8) + PART * sizeof is_set, sizeof is_set);
            const __m512i power = _mm512_set1_epi16((short)(1 << bit));
            codes = _mm512_or_si512(codes, _mm512_maskz_mov_epi16(is_set, power));
        }
        const __m512i numbers = BITS > 5 ? _mm512_permutex2var_epi16(low, codes, high)
                                         : _mm512_permutexvar_epi16(codes, low);
        memcpy(to, &numbers, sizeof numbers);
    }
};

// Integers of 8 bits.
template <>
struct GroupCodes<8> {
    explicit GroupCodes(const GroupedSection &) {}

    static int64_t bytes(int64_t numbers) { return numbers; }

    INLINE_MEMBER void expand(const char *from, int64_t numbers, char *to) const {
        for (int64_t i = 0; i < numbers; i += 32) {
            __m128i bytes[2];
            memcpy(bytes, from + i, sizeof bytes);
            constexpr __mmask16 ALL = 0xffff;
            const __m512 low =
                _mm512_maskz_cvtepi32_ps(ALL, _mm512_maskz_cvtepi8_epi32(ALL, bytes[0]));
            const __m512 high =
                _mm512_maskz_cvtepi32_ps(ALL, _mm512_maskz_cvtepi8_epi32(ALL, bytes[1]));
            const __m512bh both = _mm512_cvtne2ps_pbh(high, low);
            memcpy(to + 2 * i, &both, sizeof both);
        }
    }
};

// A weight in groups.
struct GroupedWeight : PairedWeight {};

// Scratch memory of one thread.
struct GroupedScratch {
    static constexpr int64_t NUMBERS = CACHED_ROWS * PANEL_WIDTH;
    char *expanded;    // one expanded group
    float *sums;       // [CACHED_ROWS, PANEL_WIDTH] sums of the groups so far
    float *row_sums;   // [groups, CACHED_ROWS] sum of each row over each group

    explicit GroupedScratch(char *memory)
        : expanded(memory),
          sums((float *)(memory + MAX_GROUP / 2 * PairedWeight::BYTES)),
          row_sums(sums + NUMBERS) {}

    static int64_t bytes(int64_t depth) {
        const int64_t row_sums = depth / MIN_GROUP * CACHED_ROWS;
        return MAX_GROUP / 2 * PairedWeight::BYTES + (NUMBERS + row_sums) * (int64_t)sizeof(float);
    }
};

typedef void (*MultiplySteps)(const PairedWeight::Input *, int64_t, const char *, int64_t,
                              const char *, int64_t, Floats *);

// multiply_steps for each number of rows.
template <int COUNT>
INLINE MultiplySteps steps_for_rows(int64_t rows) {
    if constexpr (COUNT > 1)
        if (rows < COUNT) return steps_for_rows<COUNT - 1>(rows);
    return [](const PairedWeight::Input *x, int64_t stride, const char *panel, int64_t steps,
              const char *next, int64_t next_bytes, Floats *sums) {
        multiply_steps<PairedWeight, COUNT, 0>(x, stride, panel, steps, next, next_bytes, sums);
    };
}

// One vector of scales.
INLINE Floats read_scales(const char *from, bool is_wide, int64_t index) {
    if (is_wide) return read((const float *)from + index * LANES);
    __m256i halves;
    memcpy(&halves, from + index * (int64_t)sizeof halves, sizeof halves);
    return (Floats)_mm512_cvtph_ps(halves);
}

// Sums of each row over each group.
INLINE void sum_groups(const PairedWeight::Input *x, int64_t stride, int64_t rows, int64_t groups,
                       int64_t group, float *to) {
    for (int64_t g = 0; g < groups; ++g)
        for (int64_t row = 0; row < rows; ++row) {
            Floats sum = {};
            for (int64_t i = 0; i < group; i += LANES) sum += read(x + row * stride + g * group + i);
            to[g * CACHED_ROWS + row] = horizontal_sum(sum);
        }
}

// Multiplies rows first to end with panels of one section.
template <int BITS, class Epilogue>
void multiply_groups(const GroupedSection &section, const char *weight,
                     const PairedWeight::Input *x, int64_t stride, int64_t first, int64_t end,
                     int64_t depth, int64_t first_panel, int64_t end_panel,
                     const GroupedScratch &scratch, const Epilogue &epilogue) {
    constexpr int64_t PREFETCH_DISTANCE = 4096;  // in bytes
    const GroupCodes<BITS> codes(section);
    const int64_t group = section.group, groups = depth / group;
    const bool is_wide = section.has_wide_scales, has_minimums = section.has_minimums;
    const bool has_output_scales = section.output_scales;
    const int64_t scale_size = is_wide ? sizeof(float) : sizeof(uint16_t);
    const int64_t scale_bytes = has_output_scales ? 0 : PANEL_WIDTH * scale_size;
    const int64_t code_bytes = codes.bytes(group * PANEL_WIDTH);
    const int64_t bytes = (1 + has_minimums) * scale_bytes + code_bytes;
    const int64_t rows = end - first, blocks = (rows + MAX_BLOCK_ROWS - 1) / MAX_BLOCK_ROWS;
    // Blocks of rows have one of two sizes.
    const int64_t smallest = rows / blocks;
    const MultiplySteps kernels[2] = {
        steps_for_rows<MAX_BLOCK_ROWS>(smallest),
        steps_for_rows<MAX_BLOCK_ROWS>(min_int(smallest + 1, MAX_BLOCK_ROWS))};
    x += first * stride;
    if (has_minimums) sum_groups(x, stride, rows, groups, group, scratch.row_sums);
    const char *from =
        weight + section.offset + (first_panel - section.first_panel) * groups * bytes;
    for (int64_t p = first_panel; p < end_panel; ++p) {
        memset(scratch.sums, 0, rows * PANEL_WIDTH * sizeof(float));
        for (int64_t g = 0; g < groups; ++g, from += bytes) {
            for (int64_t byte = 0; byte < bytes; byte += CACHE_LINE)
                __builtin_prefetch(from + PREFETCH_DISTANCE + byte, 0, 2);
            codes.expand(from + bytes - code_bytes, group * PANEL_WIDTH, scratch.expanded);
            Floats scale[2] = {Floats{} + 1.0f, Floats{} + 1.0f}, minimum[2] = {};
            if (!has_output_scales)
                for (int i = 0; i < 2; ++i) scale[i] = read_scales(from, is_wide, i);
            if (has_minimums)
                for (int i = 0; i < 2; ++i) minimum[i] = read_scales(from + scale_bytes, is_wide, i);
            for (int64_t b = 0; b < blocks; ++b) {
                const int64_t row = rows * b / blocks, count = rows * (b + 1) / blocks - row;
                Floats part[2 * MAX_BLOCK_ROWS];
                kernels[count - smallest](x + row * stride + g * group, stride, scratch.expanded,
                                          group / 2, nullptr, 0, part);
                for (int64_t i = 0; i < count; ++i) {
                    float *sums = scratch.sums + (row + i) * PANEL_WIDTH;
                    Floats left = read(sums) + part[2 * i] * scale[0];
                    Floats right = read(sums + LANES) + part[2 * i + 1] * scale[1];
                    if (has_minimums) {
                        const float row_sum = scratch.row_sums[g * CACHED_ROWS + row + i];
                        left -= minimum[0] * row_sum;
                        right -= minimum[1] * row_sum;
                    }
                    write(left, sums);
                    write(right, sums + LANES);
                }
            }
        }
        Floats scale[2] = {Floats{} + 1.0f, Floats{} + 1.0f};
        if (has_output_scales) {
            const int64_t column = (p - section.first_panel) * PANEL_WIDTH;
            const float *scales = (const float *)(weight + section.output_scales) + column;
            for (int i = 0; i < 2; ++i) scale[i] = read(scales + i * LANES);
        }
        for (int64_t i = 0; i < rows; ++i) {
            const float *sums = scratch.sums + i * PANEL_WIDTH;
            epilogue(first + i, p, read(sums) * scale[0], read(sums + LANES) * scale[1]);
        }
    }
}

// The same as multiply of matrix.h. scratch is the memory of expansion_bytes.
template <class Epilogue>
void multiply(GroupedWeight, const PairedWeight::Input *x, int64_t stride, int64_t rows,
              int64_t depth, const void *weight, int64_t first_panel, int64_t end_panel,
              char *scratch, const Epilogue &epilogue) {
    const GroupedHeader &header = *(const GroupedHeader *)weight;
    for (int64_t start = 0; start < rows; start += CACHED_ROWS) {
        const int64_t end = min_int(start + CACHED_ROWS, rows);
        for (int64_t s = 0; s < header.num_sections; ++s) {
            const GroupedSection &section = header.sections[s];
            const bool is_last = s + 1 == header.num_sections;
            const int64_t from = std::max(first_panel, section.first_panel);
            const int64_t until =
                is_last ? end_panel : std::min(end_panel, header.sections[s + 1].first_panel);
            if (from >= until) continue;
            const auto multiply_section = [&](auto bits) {
                multiply_groups<decltype(bits)::value>(
                    section, (const char *)weight, x, stride, start, end, depth, from, until,
                    GroupedScratch(scratch), epilogue);
            };
            switch (section.bits) {
                case 4: multiply_section(std::integral_constant<int, 4>()); break;
                case 5: multiply_section(std::integral_constant<int, 5>()); break;
                case 6: multiply_section(std::integral_constant<int, 6>()); break;
                default: multiply_section(std::integral_constant<int, 8>());
            }
        }
    }
}

// Bytes of scratch memory that multiply needs for weights of at most max_depth inputs.
INLINE int64_t expansion_bytes(GroupedWeight, int64_t max_depth) {
    return round_up(GroupedScratch::bytes(max_depth), CACHE_LINE);
}

}  // namespace

#endif
