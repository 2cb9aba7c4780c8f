// What the native kernels share: vectors of 16 floats on any set of instructions, bfloat16 beside float32, an
// exponential, places in the cache.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
#include "avx512.h"
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#include "avx2.h"
#elif defined(__aarch64__) && defined(__ARM_NEON)
#include "neon.h"
#else
#error "the native kernels need AVX2 with FMA and F16C, AVX-512 (F, BW, DQ, VL), or NEON of 64 bits"
#endif

namespace penstock {

constexpr int LANES = 16;

// The first lanes of a vector: `Mask` has a bit for each.
inline Mask first_lanes(int64_t count) {
    if (count <= 0) return 0;
    return count >= LANES ? Mask(0xffff) : Mask((1u << count) - 1);
}

// 2^x. What is below -150, or no number, gives 0; what is above 128, infinity.
inline Floats exp2_of(Floats x) {
    x = larger(x, same(-200.f));  // of a number and none, the second
    const Floats whole = rounded_to_whole(x);
    const Floats part = minus(x, whole);  // -0.5 to 0.5
    Floats y = same(1.3264721e-3f);
    y = fma(y, part, same(9.6715136e-3f));
    y = fma(y, part, same(5.5507338e-2f));
    y = fma(y, part, same(2.4022242e-1f));
    y = fma(y, part, same(6.9314698e-1f));
    y = fma(y, part, same(1.f));  // 2^0 is 1, to the bit
    return by_power_of_two(y, whole);
}

constexpr float LOG2_E = 1.44269504f;

inline Floats sigmoid_of(Floats x) {
    const Floats one = same(1.f);
    return over(one, plus(one, exp2_of(times(x, same(-LOG2_E)))));
}

// The hyperbolic tangent: a polynomial where a quotient would cancel.
inline Floats tanh_of(Floats x) {
    const Words sign = both(as_words(x), same_words(0x80000000));
    const Floats size = as_floats(both(as_words(x), same_words(0x7fffffff))), square = times(x, x);
    Floats y = same(-5.70498873e-3f);
    y = fma(y, square, same(2.06390888e-2f));
    y = fma(y, square, same(-5.37397156e-2f));
    y = fma(y, square, same(1.33314422e-1f));
    y = fma(y, square, same(-3.33332819e-1f));
    const Floats near = fma(times(y, square), x, x);
    const Floats one = same(1.f), shrunk = exp2_of(times(size, same(-2.f * LOG2_E)));
    const Floats far = over(minus(one, shrunk), plus(one, shrunk));
    return chosen(is_less(size, same(0.625f)), near, as_floats(either(as_words(far), sign)));
}

#ifndef PENSTOCK_HAS_PAIRS
// Each lane's bits, rounded to nearest even at the upper 16.
inline Words rounded_to_upper_half(Floats x) {
    const Words bits = as_words(x);
    const Words is_odd = both(shifted_right(bits, 16), same_words(1));
    return sum_of_words(bits, sum_of_words(is_odd, same_words(0x7fff)));
}
#endif

// Values of a dtype in memory, as floats in a vector. `load` and `store` take the first lanes that a mask has.
struct Float32 {
    using value = float;
    static Floats load(const value* from, Mask lanes) { return load_first_floats(from, lanes); }
    static void store(value* to, Mask lanes, Floats x) { store_first_floats(to, lanes, x); }
    static Floats rounded(Floats x) { return x; }
};

struct Bfloat16 {
    using value = uint16_t;
    static Floats load(const value* from, Mask lanes) {
        return as_floats(shifted_left(load_first_halves(from, lanes), 16));
    }
#ifdef PENSTOCK_HAS_PAIRS
    static void store(value* to, Mask lanes, Floats x) { store_first_rounded(to, lanes, x); }
    static Floats rounded(Floats x) { return rounded_to_upper_half(x); }
#else
    static void store(value* to, Mask lanes, Floats x) {
        store_first_halves(to, lanes, shifted_right(rounded_to_upper_half(x), 16));
    }
    static Floats rounded(Floats x) {
        return as_floats(both(rounded_to_upper_half(x), same_words(0xffff0000)));
    }
#endif
};

// How values lie where they are multiplied: STEP of them in a word of 32 bits, which one instruction multiplies with
// those of another. `words` takes as many as there are words in a vector, `copy` any number, which STEP divides.
template <class T>
struct DotFloats : T {
    using value = typename T::value;
    static constexpr int STEP = 1;
    static Floats dot(Floats sum, Words a, Words b) { return fma(as_floats(a), as_floats(b), sum); }
    static Words words(const value* from, Mask lanes) { return as_words(T::load(from, lanes)); }
    static void copy(const value* from, int count, uint32_t* to) {
        for (int at = 0; at < count; at += LANES) {
            const Mask lanes = first_lanes(count - at);
            store_first_floats(reinterpret_cast<float*>(to) + at, lanes, T::load(from + at, lanes));
        }
    }
    static void store_words(uint32_t* to, int at, Floats x) { store_floats(reinterpret_cast<float*>(to) + at, x); }
};
using DotFloat32 = DotFloats<Float32>;

#ifdef PENSTOCK_HAS_PAIRS
struct DotBfloat16 : Bfloat16 {
    static constexpr int STEP = 2;
    static Floats dot(Floats sum, Words a, Words b) { return dot_of_pairs(sum, a, b); }
    static Words words(const value* from, Mask lanes) { return load_first_words(from, lanes); }
    static void copy(const value* from, int count, uint32_t* to) { std::memcpy(to, from, count * sizeof *from); }
    static void store_words(uint32_t* to, int at, Floats x) { store(reinterpret_cast<value*>(to) + at, 0xffff, x); }
    // 32 columns of two tokens, or of one and nothing, by halves of their quarters.
    static void load_pairs(const value* first, const value* second, Words* out) {
        const Words a = load_words(first), b = second ? load_words(second) : zero_words();
        out[0] = lower_in_turn(a, b);
        out[1] = upper_in_turn(a, b);
    }
    // Lane by lane, a pair of both: 0, 16, 1, 17, ...
    static Words paired(Floats first, Floats second) { return pairs_of(first, second); }
};
#else
using DotBfloat16 = DotFloats<Bfloat16>;
#endif

// A sum of products of bytes, four to a word: those of the first from 0 to MOST, those of the second from -127 to 127.
#ifdef PENSTOCK_DOTS_BYTES
template <int MOST>
struct ByteSum {
    Words words;
    void begin(Words sum) { words = sum; }
    void add(Words a, Words b, int, int) { words = dot_bytes(words, a, b); }
};
#else
// Products of two bytes, and as many of those as fit, are summed in 16 bits.
template <int MOST>
struct ByteSum {
    static constexpr int TOGETHER = 32767 / (2 * 127 * MOST);
    Words words, halves;
    void begin(Words sum) { words = sum; }
    void add(Words a, Words b, int step, int num_steps) {
        const Words pairs = pairs_of_bytes(a, b);
        halves = step % TOGETHER ? here(sum_of_halves(halves, pairs)) : pairs;
        if (step % TOGETHER == TOGETHER - 1 || step == num_steps - 1)
            words = here(sum_of_words(words, sum_of_pairs(halves, same_words(0x00010001))));
    }
};
// Of 8 bits, two products may not fit: the upper 4 bits of the first factor count by themselves.
template <>
struct ByteSum<255> {
    Words words, low, high;
    void begin(Words sum) { words = sum; }
    void add(Words a, Words b, int step, int num_steps) {
        const Words nibbles = same_words(0x0f0f0f0f);
        const Words lower = pairs_of_bytes(both(a, nibbles), b);
        const Words upper = pairs_of_bytes(both(shifted_right(a, 4), nibbles), b);
        low = step ? here(sum_of_halves(low, lower)) : lower;
        high = step ? here(sum_of_halves(high, upper)) : upper;
        if (step == num_steps - 1)
            words = sum_of_words(words, sum_of_words(sum_of_pairs(low, same_words(0x00010001)),
                                                     sum_of_pairs(high, same_words(0x00100010))));
    }
};
#endif

// Tokens that lie side by side in the cache.
struct Place {
    int64_t start;
    int64_t num_tokens;
};

}  // namespace penstock
