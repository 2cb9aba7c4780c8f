// Vectors of 16 floats or words of 32 bits, by AVX2 with FMA: two of 8.
#pragma once

#include <cstdint>
#include <cstring>

#include "x86.h"

namespace penstock {

struct Floats {
    __m256 low, high;
};
struct Words {
    __m256i low, high;
};
using Mask = uint16_t;

constexpr int SUM_VECTORS = 4;  // that a loop may keep in registers, beside what it multiplies

inline Floats zeros() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
inline Floats same(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline Floats load_floats(const float* from) { return {_mm256_loadu_ps(from), _mm256_loadu_ps(from + 8)}; }
inline void store_floats(float* to, Floats x) {
    _mm256_storeu_ps(to, x.low);
    _mm256_storeu_ps(to + 8, x.high);
}
inline Floats plus(Floats a, Floats b) { return {_mm256_add_ps(a.low, b.low), _mm256_add_ps(a.high, b.high)}; }
inline Floats minus(Floats a, Floats b) { return {_mm256_sub_ps(a.low, b.low), _mm256_sub_ps(a.high, b.high)}; }
inline Floats times(Floats a, Floats b) { return {_mm256_mul_ps(a.low, b.low), _mm256_mul_ps(a.high, b.high)}; }
inline Floats over(Floats a, Floats b) { return {_mm256_div_ps(a.low, b.low), _mm256_div_ps(a.high, b.high)}; }
inline Floats fma(Floats a, Floats b, Floats sum) {
    return {_mm256_fmadd_ps(a.low, b.low, sum.low), _mm256_fmadd_ps(a.high, b.high, sum.high)};
}
inline Floats larger(Floats a, Floats b) { return {_mm256_max_ps(a.low, b.low), _mm256_max_ps(a.high, b.high)}; }
inline Floats rounded_to_whole(Floats x) {
    constexpr int HOW = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    return {_mm256_round_ps(x.low, HOW), _mm256_round_ps(x.high, HOW)};
}

inline Words zero_words() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
inline Words same_words(uint32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
inline Words load_words(const void* from) {
    const auto* halves = static_cast<const __m256i*>(from);
    return {_mm256_loadu_si256(halves), _mm256_loadu_si256(halves + 1)};
}
inline void store_words(void* to, Words x) {
    auto* halves = static_cast<__m256i*>(to);
    _mm256_storeu_si256(halves, x.low);
    _mm256_storeu_si256(halves + 1, x.high);
}
inline Floats as_floats(Words x) { return {_mm256_castsi256_ps(x.low), _mm256_castsi256_ps(x.high)}; }
inline Words as_words(Floats x) { return {_mm256_castps_si256(x.low), _mm256_castps_si256(x.high)}; }
inline Words both(Words a, Words b) { return {_mm256_and_si256(a.low, b.low), _mm256_and_si256(a.high, b.high)}; }
inline Words either(Words a, Words b) { return {_mm256_or_si256(a.low, b.low), _mm256_or_si256(a.high, b.high)}; }
inline Words sum_of_words(Words a, Words b) {
    return {_mm256_add_epi32(a.low, b.low), _mm256_add_epi32(a.high, b.high)};
}
inline Words product_of_words(Words a, Words b) {
    return {_mm256_mullo_epi32(a.low, b.low), _mm256_mullo_epi32(a.high, b.high)};
}
inline Words shifted_left(Words x, int bits) { return {_mm256_slli_epi32(x.low, bits), _mm256_slli_epi32(x.high, bits)}; }
inline Words shifted_right(Words x, int bits) { return {_mm256_srli_epi32(x.low, bits), _mm256_srli_epi32(x.high, bits)}; }
inline Words shifted_signed(Words x, int bits) { return {_mm256_srai_epi32(x.low, bits), _mm256_srai_epi32(x.high, bits)}; }
inline Floats converted(Words x) { return {_mm256_cvtepi32_ps(x.low), _mm256_cvtepi32_ps(x.high)}; }

// Bits of 16 lanes, out of lanes that are all ones or all zeros, and back.
inline Mask mask_of(Words lanes) {
    return _mm256_movemask_ps(_mm256_castsi256_ps(lanes.low)) | _mm256_movemask_ps(_mm256_castsi256_ps(lanes.high)) << 8;
}
inline Words lanes_of(Mask mask) {
    const __m256i bits = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
    const auto half = [&](int own) { return _mm256_cmpeq_epi32(_mm256_and_si256(_mm256_set1_epi32(own), bits), bits); };
    return {half(mask & 255), half(mask >> 8)};
}

// x * 2^power in two steps: neither power of two is too small or too large for a float.
inline Floats by_power_of_two(Floats x, Floats power) {
    const auto half = [](__m256 x, __m256 power) {
        const __m256i all = _mm256_cvtps_epi32(_mm256_min_ps(power, _mm256_set1_ps(254.f)));
        const __m256i first = _mm256_srai_epi32(all, 1), second = _mm256_sub_epi32(all, first);
        const auto power_of = [](__m256i of) {
            return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(of, _mm256_set1_epi32(127)), 23));
        };
        return _mm256_mul_ps(_mm256_mul_ps(x, power_of(first)), power_of(second));
    };
    return {half(x.low, power.low), half(x.high, power.high)};
}
inline float sum_of(Floats x) {
    const __m256 eight = _mm256_add_ps(x.low, x.high);
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    four = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(four, _mm_movehdup_ps(four)));
}
inline float largest_of(Floats x) {
    const __m256 eight = _mm256_max_ps(x.low, x.high);
    __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    four = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(four, _mm_movehdup_ps(four)));
}
inline Mask is_less(Floats a, Floats b) {
    return mask_of(as_words({_mm256_cmp_ps(a.low, b.low, _CMP_LT_OQ), _mm256_cmp_ps(a.high, b.high, _CMP_LT_OQ)}));
}
inline bool differ(Floats a, Floats b) {
    const __m256 any = _mm256_or_ps(_mm256_cmp_ps(a.low, b.low, _CMP_NEQ_UQ), _mm256_cmp_ps(a.high, b.high, _CMP_NEQ_UQ));
    return _mm256_movemask_ps(any) != 0;
}
inline Mask is_greater(Words a, Words b) {
    return mask_of({_mm256_cmpgt_epi32(a.low, b.low), _mm256_cmpgt_epi32(a.high, b.high)});
}
inline Mask is_less(Words a, Words b) { return is_greater(b, a); }
inline Mask is_at_most(Words a, Words b) { return ~is_greater(a, b); }
inline Floats chosen(Mask lanes, Floats yes, Floats no) {
    const Floats which = as_floats(lanes_of(lanes));
    return {_mm256_blendv_ps(no.low, yes.low, which.low), _mm256_blendv_ps(no.high, yes.high, which.high)};
}
inline Floats load_first_floats(const float* from, Mask lanes) {
    if (lanes == 0xffff) return load_floats(from);
    const Words which = lanes_of(lanes);
    return {_mm256_maskload_ps(from, which.low), _mm256_maskload_ps(from + 8, which.high)};
}
inline void store_first_floats(float* to, Mask lanes, Floats x) {
    if (lanes == 0xffff) return store_floats(to, x);
    const Words which = lanes_of(lanes);
    _mm256_maskstore_ps(to, which.low, x.low);
    _mm256_maskstore_ps(to + 8, which.high, x.high);
}
inline Floats looked_up(Words index, const float* table) {
    const __m256 first = _mm256_loadu_ps(table), second = _mm256_loadu_ps(table + 8);
    const auto half = [&](__m256i index) {
        return _mm256_blendv_ps(_mm256_permutevar8x32_ps(first, index), _mm256_permutevar8x32_ps(second, index),
                                _mm256_castsi256_ps(_mm256_slli_epi32(index, 28)));
    };
    return {half(index.low), half(index.high)};
}
// Values of 16 bits, each in a word.
inline Words load_first_halves(const uint16_t* from, Mask lanes) {
    uint16_t some[16] = {};
    if (lanes != 0xffff) {
        std::memcpy(some, from, __builtin_popcount(lanes) * sizeof *from);
        from = some;
    }
    const auto* halves = reinterpret_cast<const __m128i*>(from);
    return {_mm256_cvtepu16_epi32(_mm_loadu_si128(halves)), _mm256_cvtepu16_epi32(_mm_loadu_si128(halves + 1))};
}
inline void store_first_halves(uint16_t* to, Mask lanes, Words x) {
    const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(x.low, x.high), 0xd8);
    if (lanes == 0xffff) return _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), packed);
    uint16_t some[16];
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(some), packed);
    std::memcpy(to, some, __builtin_popcount(lanes) * sizeof *to);
}
// A byte of each lane.
inline Words byte_of(Words x, int index) {
    const __m256i from = _mm256_setr_epi32(index, index + 4, index + 8, index + 12, index, index + 4, index + 8, index + 12);
    const __m256i which = _mm256_or_si256(from, _mm256_set1_epi32(0x80808000));  // all others become zero
    return {_mm256_shuffle_epi8(x.low, which), _mm256_shuffle_epi8(x.high, which)};
}
inline Words load_signed_bytes(const void* from) {
    const __m128i all = _mm_loadu_si128(static_cast<const __m128i*>(from));
    return {_mm256_cvtepi8_epi32(all), _mm256_cvtepi8_epi32(_mm_srli_si128(all, 8))};
}
inline Floats load_float16(const void* from) {
    const auto* halves = static_cast<const __m128i*>(from);
    return {_mm256_cvtph_ps(_mm_loadu_si128(halves)), _mm256_cvtph_ps(_mm_loadu_si128(halves + 1))};
}

// Bytes, four to a word.
inline Words sum_of_bytes(Words a, Words b) { return {_mm256_add_epi8(a.low, b.low), _mm256_add_epi8(a.high, b.high)}; }
inline Words looked_up_bytes(Words index, const uint8_t* table) {
    const __m256i both = _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(table)));
    return {_mm256_shuffle_epi8(both, index.low), _mm256_shuffle_epi8(both, index.high)};
}
inline Words rounded_words(Floats x) { return {_mm256_cvtps_epi32(x.low), _mm256_cvtps_epi32(x.high)}; }
// Words from -128 to 127, of which `order` says which one is where.
inline void store_bytes(int8_t* to, Words x, const uint8_t* order) {
    const __m256i halves = _mm256_permute4x64_epi64(_mm256_packs_epi32(x.low, x.high), 0xd8);
    const __m128i bytes = _mm_packs_epi16(_mm256_castsi256_si128(halves), _mm256_extracti128_si256(halves, 1));
    const __m128i by = _mm_loadu_si128(reinterpret_cast<const __m128i*>(order));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm_shuffle_epi8(bytes, by));
}
// The same, computed here: the compiler takes sums of integers in another order, for which it lacks registers.
inline Words here(Words x) {
    asm("" : "+x"(x.low), "+x"(x.high));
    return x;
}
constexpr int BYTE_VECTORS = 1, BYTE_SUMS = 4;  // vectors of sums, of rows by outputs, that registers hold
inline Words pairs_of_bytes(Words a, Words b) {
    return {_mm256_maddubs_epi16(a.low, b.low), _mm256_maddubs_epi16(a.high, b.high)};
}
inline Words sum_of_halves(Words a, Words b) { return {_mm256_add_epi16(a.low, b.low), _mm256_add_epi16(a.high, b.high)}; }
inline Words sum_of_pairs(Words a, Words b) { return {_mm256_madd_epi16(a.low, b.low), _mm256_madd_epi16(a.high, b.high)}; }
#define PENSTOCK_DOTS_HALVES 1  // integers of 16 bits, two to a word, faster than floats
inline Words dot_of_halves(Words sum, Words a, Words b) { return here(sum_of_words(sum, sum_of_pairs(a, b))); }

// Rows become columns: four squares of 8.
inline void transpose(const Words* rows, Words* out) {
    const auto square = [](const __m256i* from, __m256i* to) {
        __m256i pairs[8], fours[8];
        for (int i = 0; i < 8; i += 2) {
            pairs[i] = _mm256_unpacklo_epi32(from[i], from[i + 1]);
            pairs[i + 1] = _mm256_unpackhi_epi32(from[i], from[i + 1]);
        }
        for (int i = 0; i < 8; i += 4)
            for (int j = 0; j < 2; ++j) {
                fours[i + 2 * j] = _mm256_unpacklo_epi64(pairs[i + j], pairs[i + j + 2]);
                fours[i + 2 * j + 1] = _mm256_unpackhi_epi64(pairs[i + j], pairs[i + j + 2]);
            }
        for (int j = 0; j < 4; ++j) {
            to[j] = _mm256_permute2x128_si256(fours[j], fours[4 + j], 0x20);
            to[4 + j] = _mm256_permute2x128_si256(fours[j], fours[4 + j], 0x31);
        }
    };
    __m256i from[8], to[8];
    for (int half = 0; half < 2; ++half)
        for (int side = 0; side < 2; ++side) {
            for (int i = 0; i < 8; ++i) from[i] = side ? rows[half * 8 + i].high : rows[half * 8 + i].low;
            square(from, to);
            for (int i = 0; i < 8; ++i) (half ? out[side * 8 + i].high : out[side * 8 + i].low) = to[i];
        }
}

}  // namespace penstock
