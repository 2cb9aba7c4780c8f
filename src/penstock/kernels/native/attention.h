// What the two ways of attention share: how values are multiplied, and the blocks and segments in which they are summed.
#pragma once

#include <type_traits>
#include <vector>

#include "calls.h"

namespace penstock {

constexpr int BLOCK = 64;
constexpr int SEGMENT = 256;
constexpr float MINUS_INFINITY = -__builtin_inff();

// STEP values lie in a word of 32 bits, and are multiplied by one instruction.
struct DotFloat32 : Float32 {
    static constexpr int STEP = 1;
    static __m512 dot(__m512 sum, __m512i a, __m512i b) {
        return _mm512_fmadd_ps(_mm512_castsi512_ps(a), _mm512_castsi512_ps(b), sum);
    }
};

#ifdef __AVX512BF16__
struct DotBfloat16 : Bfloat16 {
    static constexpr int STEP = 2;
    static __m512 dot(__m512 sum, __m512i a, __m512i b) {
        return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b);
    }
    // Lane by lane, a pair of both: 0, 16, 1, 17, ...
    static __m512i paired(__m512 first, __m512 second) {
        const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7,
                                               22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
        return _mm512_permutexvar_epi16(order, (__m512i)_mm512_cvtne2ps_pbh(second, first));
    }
};
#endif

// How dot products become powers of two: capped where there is a cap, which is done first, and scaled.
struct Scores {
    float scale;
    float cap;        // 0: none
    float cap_scale;

    explicit Scores(const Heads& heads)
        : scale((heads.soft_cap > 0 ? 1 : heads.scale) * LOG2_E),
          cap(heads.soft_cap),
          cap_scale(heads.soft_cap > 0 ? heads.scale / heads.soft_cap : 0) {}

    __m512 capped(__m512 score) const {
        return _mm512_mul_ps(tanh_of(_mm512_mul_ps(score, _mm512_set1_ps(cap_scale))), _mm512_set1_ps(cap));
    }
};

// Calls `body` with the sizes of a head's keys and of its values; false where there is no code for them.
template <class Body>
bool with_head_dims(int64_t head_dim, int64_t value_dim, const Body& body) {
    const auto with = [&](auto key, auto value) {
        if (head_dim != key || value_dim != value) return false;
        body(key, value);
        return true;
    };
    const auto alike = [&](auto size) { return with(size, size); };
    return alike(std::integral_constant<int, 16>{}) || alike(std::integral_constant<int, 32>{}) ||
           alike(std::integral_constant<int, 64>{}) || alike(std::integral_constant<int, 80>{}) ||
           alike(std::integral_constant<int, 96>{}) || alike(std::integral_constant<int, 128>{}) ||
           alike(std::integral_constant<int, 256>{}) || alike(std::integral_constant<int, 512>{}) ||
           with(std::integral_constant<int, 192>{}, std::integral_constant<int, 128>{});
}

// Queries of a span for a KV head, where they are too few to be lanes; see few_queries.cpp.
constexpr int MOST_FEW = 8;
void attend_few(bool is_bfloat16, int64_t head_dim, const Heads& heads, const std::vector<const Span*>& spans,
                const Place* places, int num_threads);

}  // namespace penstock
