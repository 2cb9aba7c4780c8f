// What the native kernels share: vectors of 16 floats, bfloat16 beside float32, an exponential, places in the cache.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

#if !defined(__AVX512F__) || !defined(__AVX512BW__) || !defined(__AVX512DQ__) || !defined(__AVX512VL__)
#error "the native kernels need AVX-512 (F, BW, DQ, VL)"
#endif

namespace penstock {

constexpr int LANES = 16;

// 2^x. What is below -150, or no number, gives 0; what is above 128, infinity.
inline __m512 exp2_of(__m512 x) {
    x = _mm512_max_ps(x, _mm512_set1_ps(-200.f));  // of a number and none, the second
    const __m512 whole = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const __m512 part = _mm512_sub_ps(x, whole);  // -0.5 to 0.5
    __m512 y = _mm512_set1_ps(1.3264721e-3f);
    y = _mm512_fmadd_ps(y, part, _mm512_set1_ps(9.6715136e-3f));
    y = _mm512_fmadd_ps(y, part, _mm512_set1_ps(5.5507338e-2f));
    y = _mm512_fmadd_ps(y, part, _mm512_set1_ps(2.4022242e-1f));
    y = _mm512_fmadd_ps(y, part, _mm512_set1_ps(6.9314698e-1f));
    y = _mm512_fmadd_ps(y, part, _mm512_set1_ps(1.f));  // 2^0 is 1, to the bit
    return _mm512_scalef_ps(y, whole);
}

constexpr float LOG2_E = 1.44269504f;

// The hyperbolic tangent: a polynomial where a quotient would cancel.
inline __m512 tanh_of(__m512 x) {
    const __m512 size = _mm512_abs_ps(x), square = _mm512_mul_ps(x, x);
    __m512 y = _mm512_set1_ps(-5.70498873e-3f);
    y = _mm512_fmadd_ps(y, square, _mm512_set1_ps(2.06390888e-2f));
    y = _mm512_fmadd_ps(y, square, _mm512_set1_ps(-5.37397156e-2f));
    y = _mm512_fmadd_ps(y, square, _mm512_set1_ps(1.33314422e-1f));
    y = _mm512_fmadd_ps(y, square, _mm512_set1_ps(-3.33332819e-1f));
    const __m512 near = _mm512_fmadd_ps(_mm512_mul_ps(y, square), x, x);
    const __m512 one = _mm512_set1_ps(1.f), shrunk = exp2_of(_mm512_mul_ps(size, _mm512_set1_ps(-2.f * LOG2_E)));
    const __m512 far = _mm512_div_ps(_mm512_sub_ps(one, shrunk), _mm512_add_ps(one, shrunk));
    const __mmask16 is_near = _mm512_cmp_ps_mask(size, _mm512_set1_ps(0.625f), _CMP_LT_OQ);
    const __m512 signed_far = _mm512_or_ps(far, _mm512_and_ps(x, _mm512_set1_ps(-0.f)));
    return _mm512_mask_blend_ps(is_near, signed_far, near);
}

// Each lane's bits, rounded to nearest even at the upper 16.
inline __m512i rounded_to_upper_half(__m512 x) {
    const __m512i bits = _mm512_castps_si512(x);
    const __m512i is_odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    return _mm512_add_epi32(bits, _mm512_add_epi32(is_odd, _mm512_set1_epi32(0x7fff)));
}

// Values of a dtype in memory, as floats in a vector. `load` and `store` take the first `count` of 16.
struct Float32 {
    using value = float;
    static __m512 load(const value* from, __mmask16 lanes) { return _mm512_maskz_loadu_ps(lanes, from); }
    static void store(value* to, __mmask16 lanes, __m512 x) { _mm512_mask_storeu_ps(to, lanes, x); }
    static __m512 rounded(__m512 x) { return x; }
};

struct Bfloat16 {
    using value = uint16_t;
    static __m512 load(const value* from, __mmask16 lanes) {
        const __m512i wide = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(lanes, from));
        return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
    }
    static void store(value* to, __mmask16 lanes, __m512 x) {
        const __m512i upper = _mm512_srli_epi32(rounded_to_upper_half(x), 16);
        _mm256_mask_storeu_epi16(to, lanes, _mm512_cvtepi32_epi16(upper));
    }
    static __m512 rounded(__m512 x) {
        const __m512i upper = _mm512_and_si512(rounded_to_upper_half(x), _mm512_set1_epi32(0xffff0000));
        return _mm512_castsi512_ps(upper);
    }
};

// Tokens that lie side by side in the cache.
struct Place {
    int64_t start;
    int64_t num_tokens;
};

inline __mmask16 first_lanes(int64_t count) {
    if (count <= 0) return 0;
    return count >= LANES ? __mmask16(0xffff) : __mmask16((1u << count) - 1);
}

}  // namespace penstock
