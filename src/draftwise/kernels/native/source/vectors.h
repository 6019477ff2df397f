// Vectors of float32, based on the vector extensions of GCC and Clang. The same source compiles for
// every instruction set. The functions load, store, convert and reduce vectors.

#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX512F__)
// GCC 12 warns about values that its own intrinsics leave undefined on purpose.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <immintrin.h>
#pragma GCC diagnostic pop
#else
#include <immintrin.h>
#endif
#endif

namespace {

#if defined(__AVX512F__)
constexpr int LANES = 16;
#elif defined(__AVX__)
constexpr int LANES = 8;
#else
constexpr int LANES = 4;
#endif

typedef float Floats __attribute__((vector_size(LANES * 4)));
typedef int32_t Ints __attribute__((vector_size(LANES * 4)));
typedef uint32_t Words __attribute__((vector_size(LANES * 4)));

#define INLINE_MEMBER inline __attribute__((always_inline))
#define INLINE static INLINE_MEMBER

constexpr int CACHE_LINE = 64;
constexpr double LOG2_E = 1.4426950408889634;  // 1 / ln 2: exponents of e as exponents of 2
constexpr float MINUS_INFINITY = -__builtin_inff();

struct BFloat16 {
    uint16_t bits;
};

// Loads one vector of float32, or widens one vector of BFloat16 to two vectors of float32. BFloat16
// is widened by splitting each 32-bit word into halves. The first vector receives the elements at
// even indices, the second those at odd indices. Attention scores do not depend on this order, and
// store restores the original one.
INLINE void load(const float *from, Floats *to) { memcpy(to, from, sizeof *to); }

INLINE void load(const BFloat16 *from, Floats *to) {
    Words pairs;
    memcpy(&pairs, from, sizeof pairs);
    to[0] = (Floats)(pairs << 16);
    to[1] = (Floats)(pairs & 0xffff0000u);
}

// Number of float32 vectors that one vector of T is widened to.
template <class T>
constexpr int WIDE_VECTORS = sizeof(float) / sizeof(T);

// Stores vectors in the order that load produces, the inverse of load.
INLINE void store(const Floats *from, float *to) { memcpy(to, from, sizeof *from); }

// Rounds to BFloat16, to nearest even. The result is in the upper half of each word. NaN stays NaN.
INLINE Words round_to_bfloat16(Floats x) {
    const Words bits = (Words)x, nan = Words{} + 0x7fc00000u;
    return x == x ? bits + 0x7fffu + ((bits >> 16) & 1u) : nan;
}

INLINE void store(const Floats *from, BFloat16 *to) {
    const Words pairs =
        (round_to_bfloat16(from[0]) >> 16) | (round_to_bfloat16(from[1]) & 0xffff0000u);
    memcpy(to, &pairs, sizeof pairs);
}

// Widens size numbers to float32 and pads them with zeros to a whole number of vectors.
template <class T>
INLINE void widen(const T *from, int size, Floats *to) {
    constexpr int step = WIDE_VECTORS<T> * LANES;
    for (; size >= step; size -= step, from += step, to += WIDE_VECTORS<T>) load(from, to);
    if (size) {
        T padded[step] = {};
        memcpy(padded, from, size * sizeof(T));
        load(padded, to);
    }
}

// Converts size numbers from float32 to T, the inverse of widen.
template <class T>
INLINE void narrow(const Floats *from, int size, T *to) {
    constexpr int step = WIDE_VECTORS<T> * LANES;
    for (; size >= step; size -= step, from += WIDE_VECTORS<T>, to += step) store(from, to);
    if (size) {
        T padded[step];
        store(from, padded);
        memcpy(to, padded, size * sizeof(T));
    }
}

// rotate_lanes rotates the lanes of a vector by BY. sum_neighbours adds adjacent pairs of lanes and
// returns the sums of a before those of b.
#if defined(__clang__)
template <int... I>
struct Lanes {};
template <int N, int... I>
struct LanesUpTo : LanesUpTo<N - 1, N - 1, I...> {};
template <int... I>
struct LanesUpTo<0, I...> {
    typedef Lanes<I...> type;
};
template <int BY, int... I>
INLINE Floats rotate_lanes(Floats v, Lanes<I...>) {
    return __builtin_shufflevector(v, v, ((I + BY) % LANES)...);
}
template <int BY>
INLINE Floats rotate_lanes(Floats v) {
    return rotate_lanes<BY>(v, typename LanesUpTo<LANES>::type());
}
template <int... I>
INLINE Floats sum_neighbours(Floats a, Floats b, Lanes<I...>) {
    return __builtin_shufflevector(a, b, (2 * I)...) +
           __builtin_shufflevector(a, b, (2 * I + 1)...);
}
INLINE Floats sum_neighbours(Floats a, Floats b) {
    return sum_neighbours(a, b, typename LanesUpTo<LANES>::type());
}
#else
template <int BY>
INLINE Floats rotate_lanes(Floats v) {
    Ints from;
    for (int i = 0; i < LANES; ++i) from[i] = (i + BY) % LANES;
    return __builtin_shuffle(v, from);
}
INLINE Floats sum_neighbours(Floats a, Floats b) {
    Ints even;
    for (int i = 0; i < LANES; ++i) even[i] = 2 * i;
    return __builtin_shuffle(a, b, even) + __builtin_shuffle(a, b, even + 1);
}
#endif

// Returns a vector whose computation the compiler does not merge with later operations, so that the
// result has the same bits wherever it is computed.
INLINE Floats rounded(Floats v) {
#if defined(__x86_64__)
    __asm__("" : "+v"(v));
#endif
    return v;
}

// Computes 2^x for x < 127 with the Taylor series of the fractional part. NaN gives NaN.
INLINE Floats power_of_two(Floats x) {
#if defined(__AVX512F__)
    const Floats whole = (Floats)_mm512_roundscale_ps((__m512)x, _MM_FROUND_TO_NEAREST_INT);
#else
    const float to_integer = 12582912.0f;  // 1.5 * 2^23; adding it rounds to an integer
    const Floats shifted = x + to_integer, whole = shifted - to_integer;
#endif
    const Floats f = x - whole;
    Floats series = 1.54035304e-4f * f + 1.33335581e-3f;
    series = series * f + 9.61812911e-3f;
    series = series * f + 5.55041087e-2f;
    series = series * f + 2.40226507e-1f;
    series = series * f + 6.93147181e-1f;
    series = series * f + 1.0f;
#if defined(__AVX512F__)
    const __mmask16 is_normal =
        _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(-126.0f), _CMP_NLT_UQ);  // or is NaN
    return (Floats)_mm512_maskz_scalef_ps(is_normal, (__m512)series, (__m512)whole);
#else
    // Unsigned arithmetic, as values far below the range wrap around before they are replaced by 0.
    const Floats result = (Floats)((Words)series + ((Words)shifted << 23));
    const Floats zero = {};
    const Floats normal = x < -126.0f ? zero : result;
    return x == x ? normal : x;
#endif
}

// tanh(x) = 1 - 2 / (e^(2x) + 1); NaN for NaN.
INLINE Floats hyperbolic_tangent(Floats x) {
    Floats exponent = x * 2.8853900817779268f;  // 2 / ln 2
    const Floats limit = Floats{} + 126.0f;
    exponent = exponent > limit ? limit : exponent;
    return 1.0f - 2.0f / (power_of_two(exponent) + 1.0f);
}

// Maximum of each lane; b if either is NaN.
INLINE Floats lanewise_max(Floats a, Floats b) { return a > b ? a : b; }

// Maximum over all lanes.
template <int BY = LANES / 2>
INLINE float horizontal_max(Floats v) {
    if constexpr (BY == 0)
        return v[0];
    else
        return horizontal_max<BY / 2>(lanewise_max(v, rotate_lanes<BY>(v)));
}

// Whether any lane of the result of a comparison is true.
INLINE bool any_of(Ints comparison) {
#if defined(__AVX512F__)
    return _mm512_test_epi32_mask((__m512i)comparison, (__m512i)comparison) != 0;
#else
    int32_t either = 0;
    for (int lane = 0; lane < LANES; ++lane) either |= comparison[lane];
    return either != 0;
#endif
}

// Rounds size up to a multiple of step.
INLINE int64_t round_up(int64_t size, int64_t step) { return (size + step - 1) / step * step; }

INLINE int min_int(int64_t a, int64_t b) { return (int)(a < b ? a : b); }

// Sum over all lanes.
template <int BY = LANES / 2>
INLINE float horizontal_sum(Floats v) {
    if constexpr (BY == 0)
        return v[0];
    else
        return horizontal_sum<BY / 2>(v + rotate_lanes<BY>(v));
}

typedef uint16_t Shorts __attribute__((vector_size(LANES * 2)));

// These functions read and write one vector in memory order. BFloat16 is converted.
INLINE Floats read(const float *from) {
    Floats v;
    memcpy(&v, from, sizeof v);
    return v;
}

// Reads the numbers at the given indices.
INLINE Floats gather(const float *from, Ints indices) {
#if defined(__AVX512F__)
    return (Floats)_mm512_i32gather_ps((__m512i)indices, from, sizeof *from);
#else
    Floats v;
    for (int lane = 0; lane < LANES; ++lane) v[lane] = from[indices[lane]];
    return v;
#endif
}

INLINE Floats read(const BFloat16 *from) {
    Shorts v;
    memcpy(&v, from, sizeof v);
    return (Floats)(__builtin_convertvector(v, Words) << 16);
}

INLINE void write(Floats v, float *to) { memcpy(to, &v, sizeof v); }

INLINE void write(Floats v, BFloat16 *to) {
#if defined(__AVX512BF16__)
    const __m256bh bits = _mm512_cvtneps_pbh((__m512)v);
#else
    const Shorts bits = __builtin_convertvector(round_to_bfloat16(v) >> 16, Shorts);
#endif
    memcpy(to, &bits, sizeof bits);
}

}  // namespace
