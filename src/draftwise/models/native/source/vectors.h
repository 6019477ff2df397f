// Vectors of the compiler (GCC and Clang), so that one source serves all instruction sets: numbers
// as float32, loading and storing them, and the few functions that kernels here need.

#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX512BF16__)
// GCC 12 warns of the values that its own intrinsics leave undefined on purpose.
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
constexpr float MINUS_INFINITY = -__builtin_inff();

struct BFloat16 {
    uint16_t bits;
};

// A vector or, of the shorter type, a pair of vectors, as float32. Splitting 32 bits into two halves
// is all that BFloat16 takes; it leaves the numbers at even places in the first vector and those at
// odd places in the second. Scores do not depend on the order, and unload restores it.
INLINE void load(const float *from, Floats *to) { memcpy(to, from, sizeof *to); }

INLINE void load(const BFloat16 *from, Floats *to) {
    Words pairs;
    memcpy(&pairs, from, sizeof pairs);
    to[0] = (Floats)(pairs << 16);
    to[1] = (Floats)(pairs & 0xffff0000u);
}

template <class T>
constexpr int PAIR = sizeof(float) / sizeof(T);

INLINE void unload(const Floats *from, float *to) { memcpy(to, from, sizeof *from); }

// Rounded to nearest even, in the upper halves; a NaN stays one.
INLINE Words rounded(Floats x) {
    const Words bits = (Words)x, nan = Words{} + 0x7fc00000u;
    return x == x ? bits + 0x7fffu + ((bits >> 16) & 1u) : nan;
}

INLINE void unload(const Floats *from, BFloat16 *to) {
    const Words pairs = (rounded(from[0]) >> 16) | (rounded(from[1]) & 0xffff0000u);
    memcpy(to, &pairs, sizeof pairs);
}

// size numbers as float32, filled up with zeros to a whole number of vectors.
template <class T>
INLINE void widen(const T *from, int size, Floats *to) {
    constexpr int step = PAIR<T> * LANES;
    for (; size >= step; size -= step, from += step, to += PAIR<T>) load(from, to);
    if (size) {
        T padded[step] = {};
        memcpy(padded, from, size * sizeof(T));
        load(padded, to);
    }
}

// The opposite: of so many numbers.
template <class T>
INLINE void narrow(const Floats *from, int size, T *to) {
    constexpr int step = PAIR<T> * LANES;
    for (; size >= step; size -= step, from += PAIR<T>, to += step) unload(from, to);
    if (size) {
        T padded[step];
        unload(from, padded);
        memcpy(to, padded, size * sizeof(T));
    }
}

// rotated: the lanes moved around. sum_neighbours: sums of two lanes each, those of a before b's.
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
INLINE Floats rotated(Floats v, Lanes<I...>) {
    return __builtin_shufflevector(v, v, ((I + BY) % LANES)...);
}
template <int BY>
INLINE Floats rotated(Floats v) {
    return rotated<BY>(v, typename LanesUpTo<LANES>::type());
}
template <int... I>
INLINE Floats sum_neighbours(Floats a, Floats b, Lanes<I...>) {
    return __builtin_shufflevector(a, b, (2 * I)...) + __builtin_shufflevector(a, b, (2 * I + 1)...);
}
INLINE Floats sum_neighbours(Floats a, Floats b) {
    return sum_neighbours(a, b, typename LanesUpTo<LANES>::type());
}
#else
template <int BY>
INLINE Floats rotated(Floats v) {
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

// 2^x for x < 127, by the Taylor series of the fraction; NaN for NaN.
INLINE Floats power_of_two(Floats x) {
    const float to_integer = 12582912.0f;  // 1.5 * 2^23: adding it leaves no bits for a fraction
    const Floats shifted = x + to_integer;
    const Floats f = x - (shifted - to_integer);
    Floats series = 1.54035304e-4f * f + 1.33335581e-3f;
    series = series * f + 9.61812911e-3f;
    series = series * f + 5.55041087e-2f;
    series = series * f + 2.40226507e-1f;
    series = series * f + 6.93147181e-1f;
    series = series * f + 1.0f;
    // Unsigned: what is far below the range wraps around before it is replaced.
    const Floats result = (Floats)((Words)series + ((Words)shifted << 23));
    const Floats zero = {};
    const Floats normal = x < -126.0f ? zero : result;
    return x == x ? normal : x;
}

INLINE Floats larger(Floats a, Floats b) { return a > b ? a : b; }

template <int BY = LANES / 2>
INLINE float largest(Floats v) {
    if constexpr (BY == 0)
        return v[0];
    else
        return largest<BY / 2>(larger(v, rotated<BY>(v)));
}

INLINE int64_t rounded_up(int64_t size, int64_t step) { return (size + step - 1) / step * step; }

INLINE int least(int64_t a, int64_t b) { return (int)(a < b ? a : b); }

template <int BY = LANES / 2>
INLINE float total(Floats v) {
    if constexpr (BY == 0)
        return v[0];
    else
        return total<BY / 2>(v + rotated<BY>(v));
}

typedef uint16_t Shorts __attribute__((vector_size(LANES * 2)));

// Numbers in the order in which they lie, one vector.
INLINE Floats read(const float *from) {
    Floats v;
    memcpy(&v, from, sizeof v);
    return v;
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
    const Shorts bits = __builtin_convertvector(rounded(v) >> 16, Shorts);
#endif
    memcpy(to, &bits, sizeof bits);
}

}  // namespace
