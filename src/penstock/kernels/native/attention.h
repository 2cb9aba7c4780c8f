// What the two ways of attention share: how values are multiplied, and the blocks and segments in which they are summed.
#pragma once

#include <type_traits>
#include <vector>

#include "calls.h"

namespace penstock {

constexpr int BLOCK = 64;
constexpr int SEGMENT = 256;
constexpr float MINUS_INFINITY = -__builtin_inff();

// How dot products become powers of two: capped where there is a cap, which is done first, and scaled.
struct Scores {
    float scale;
    float cap;        // 0: none
    float cap_scale;

    explicit Scores(const Heads& heads)
        : scale((heads.soft_cap > 0 ? 1 : heads.scale) * LOG2_E),
          cap(heads.soft_cap),
          cap_scale(heads.soft_cap > 0 ? heads.scale / heads.soft_cap : 0) {}

    Floats capped(Floats score) const {
        return times(tanh_of(times(score, same(cap_scale))), same(cap));
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
