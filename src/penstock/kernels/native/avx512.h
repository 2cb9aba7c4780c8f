// Vectors of 16 floats or words of 32 bits, by AVX-512.
#pragma once

#include <cstdint>

#include "x86.h"

namespace penstock {

using Floats = __m512;
using Words = __m512i;
using Mask = __mmask16;

constexpr int SUM_VECTORS = 16;  // that a loop may keep in registers, beside what it multiplies

inline Floats zeros() { return _mm512_setzero_ps(); }
inline Floats same(float x) { return _mm512_set1_ps(x); }
inline Floats load_floats(const float* from) { return _mm512_loadu_ps(from); }
inline void store_floats(float* to, Floats x) { _mm512_storeu_ps(to, x); }
inline Floats plus(Floats a, Floats b) { return _mm512_add_ps(a, b); }
inline Floats minus(Floats a, Floats b) { return _mm512_sub_ps(a, b); }
inline Floats times(Floats a, Floats b) { return _mm512_mul_ps(a, b); }
inline Floats over(Floats a, Floats b) { return _mm512_div_ps(a, b); }
inline Floats fma(Floats a, Floats b, Floats sum) { return _mm512_fmadd_ps(a, b, sum); }
inline Floats larger(Floats a, Floats b) { return _mm512_max_ps(a, b); }
inline Floats rounded_to_whole(Floats x) {
    return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
inline Floats by_power_of_two(Floats x, Floats power) { return _mm512_scalef_ps(x, power); }
inline float sum_of(Floats x) { return _mm512_reduce_add_ps(x); }
inline float largest_of(Floats x) { return _mm512_reduce_max_ps(x); }
inline Mask is_less(Floats a, Floats b) { return _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ); }
inline bool differ(Floats a, Floats b) { return _mm512_cmp_ps_mask(a, b, _CMP_NEQ_UQ) != 0; }
inline Floats chosen(Mask lanes, Floats yes, Floats no) { return _mm512_mask_blend_ps(lanes, no, yes); }
inline Floats load_first_floats(const float* from, Mask lanes) { return _mm512_maskz_loadu_ps(lanes, from); }
inline void store_first_floats(float* to, Mask lanes, Floats x) { _mm512_mask_storeu_ps(to, lanes, x); }

inline Words zero_words() { return _mm512_setzero_si512(); }
inline Words same_words(uint32_t x) { return _mm512_set1_epi32(x); }
inline Words load_words(const void* from) { return _mm512_loadu_si512(from); }
inline void store_words(void* to, Words x) { _mm512_storeu_si512(to, x); }
inline Floats as_floats(Words x) { return _mm512_castsi512_ps(x); }
inline Words as_words(Floats x) { return _mm512_castps_si512(x); }
inline Words both(Words a, Words b) { return _mm512_and_si512(a, b); }
inline Words either(Words a, Words b) { return _mm512_or_si512(a, b); }
inline Words sum_of_words(Words a, Words b) { return _mm512_add_epi32(a, b); }
inline Words product_of_words(Words a, Words b) { return _mm512_mullo_epi32(a, b); }
inline Words shifted_left(Words x, int bits) { return _mm512_slli_epi32(x, bits); }
inline Words shifted_right(Words x, int bits) { return _mm512_srli_epi32(x, bits); }
inline Words shifted_signed(Words x, int bits) { return _mm512_srai_epi32(x, bits); }
inline Floats converted(Words x) { return _mm512_cvtepi32_ps(x); }
inline Mask is_less(Words a, Words b) { return _mm512_cmplt_epi32_mask(a, b); }
inline Mask is_greater(Words a, Words b) { return _mm512_cmpgt_epi32_mask(a, b); }
inline Mask is_at_most(Words a, Words b) { return _mm512_cmple_epi32_mask(a, b); }
inline Floats looked_up(Words index, const float* table) { return _mm512_permutexvar_ps(index, _mm512_loadu_ps(table)); }
// Values of 16 bits, each in a word.
inline Words load_first_halves(const uint16_t* from, Mask lanes) {
    return _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(lanes, from));
}
inline void store_first_halves(uint16_t* to, Mask lanes, Words x) {
    _mm256_mask_storeu_epi16(to, lanes, _mm512_cvtepi32_epi16(x));
}
// A byte of each lane.
inline Words byte_of(Words x, int index) { return both(shifted_right(x, 8 * index), same_words(255)); }
inline Words load_signed_bytes(const void* from) {
    return _mm512_cvtepi8_epi32(_mm_loadu_si128(static_cast<const __m128i*>(from)));
}
inline Floats load_float16(const void* from) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(static_cast<const __m256i*>(from)));
}

// Bytes, four to a word.
inline Words sum_of_bytes(Words a, Words b) { return _mm512_add_epi8(a, b); }
inline Words looked_up_bytes(Words index, const uint8_t* table) {
    return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(table))), index);
}
inline Words rounded_words(Floats x) { return _mm512_cvtps_epi32(x); }
// Words from -128 to 127, of which `order` says which one is where.
inline void store_bytes(int8_t* to, Words x, const uint8_t* order) {
    const __m128i by = _mm_loadu_si128(reinterpret_cast<const __m128i*>(order));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm_shuffle_epi8(_mm512_cvtepi32_epi8(x), by));
}
// The same, computed here: the compiler takes sums of integers in another order, for which it lacks registers.
inline Words here(Words x) {
    asm("" : "+v"(x));
    return x;
}
constexpr int BYTE_VECTORS = 2, BYTE_SUMS = 12;  // vectors of sums, of rows by outputs, that registers hold with totals
inline Words pairs_of_bytes(Words a, Words b) { return _mm512_maddubs_epi16(a, b); }
inline Words sum_of_halves(Words a, Words b) { return _mm512_add_epi16(a, b); }
inline Words sum_of_pairs(Words a, Words b) { return _mm512_madd_epi16(a, b); }
#ifndef __AVX512BF16__
#define PENSTOCK_DOTS_HALVES 1  // integers of 16 bits, two to a word, faster than floats
inline Words dot_of_halves(Words sum, Words a, Words b) { return here(sum_of_words(sum, sum_of_pairs(a, b))); }
#endif
#ifdef __AVX512VNNI__
inline Words dot_bytes(Words sum, Words a, Words b) { return _mm512_dpbusd_epi32(sum, a, b); }
#define PENSTOCK_DOTS_BYTES
#endif

// Rows become columns.
inline void transpose(const Words* rows, Words* out) {
    Words pairs[16], fours[16];
#pragma GCC unroll 8
    for (int i = 0; i < 16; i += 2) {
        pairs[i] = _mm512_unpacklo_epi32(rows[i], rows[i + 1]);
        pairs[i + 1] = _mm512_unpackhi_epi32(rows[i], rows[i + 1]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 16; i += 4)
#pragma GCC unroll 2
        for (int j = 0; j < 2; ++j) {
            fours[i + 2 * j] = _mm512_unpacklo_epi64(pairs[i + j], pairs[i + j + 2]);
            fours[i + 2 * j + 1] = _mm512_unpackhi_epi64(pairs[i + j], pairs[i + j + 2]);
        }
    // fours[4 * i + j] has column j of every quarter, of rows 4 * i to 4 * i + 3.
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
        const Words even_low = _mm512_shuffle_i32x4(fours[j], fours[4 + j], 0x88);
        const Words odd_low = _mm512_shuffle_i32x4(fours[j], fours[4 + j], 0xdd);
        const Words even_high = _mm512_shuffle_i32x4(fours[8 + j], fours[12 + j], 0x88);
        const Words odd_high = _mm512_shuffle_i32x4(fours[8 + j], fours[12 + j], 0xdd);
        out[j] = _mm512_shuffle_i32x4(even_low, even_high, 0x88);
        out[8 + j] = _mm512_shuffle_i32x4(even_low, even_high, 0xdd);
        out[4 + j] = _mm512_shuffle_i32x4(odd_low, odd_high, 0x88);
        out[12 + j] = _mm512_shuffle_i32x4(odd_low, odd_high, 0xdd);
    }
}

#ifdef __AVX512BF16__
#define PENSTOCK_HAS_PAIRS 1  // of bfloat16, which one instruction multiplies and adds

inline Floats dot_of_pairs(Floats sum, Words a, Words b) { return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b); }
// To nearest even at the upper 16 bits; what is too small for a float's own exponent becomes zero.
inline Floats rounded_to_upper_half(Floats x) {
    return as_floats(shifted_left(_mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(x)), 16));
}
inline void store_first_rounded(uint16_t* to, Mask lanes, Floats x) {
    _mm256_mask_storeu_epi16(to, lanes, (__m256i)_mm512_cvtneps_pbh(x));
}
inline Words load_first_words(const void* from, Mask lanes) { return _mm512_maskz_loadu_epi32(lanes, from); }
// Lane by lane, both rounded.
inline Words pairs_of(Floats first, Floats second) {
    const Words order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21,
                                         5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    return _mm512_permutexvar_epi16(order, (Words)_mm512_cvtne2ps_pbh(second, first));
}
// Halves of words in turn from both, those of the lower halves of quarters, and of the upper.
inline Words lower_in_turn(Words a, Words b) { return _mm512_unpacklo_epi16(a, b); }
inline Words upper_in_turn(Words a, Words b) { return _mm512_unpackhi_epi16(a, b); }
#endif

}  // namespace penstock
