// Vectors of 16 floats or words of 32 bits, by NEON: four of 4.
#pragma once

#include <arm_neon.h>

#include <cstdint>
#include <cstring>

namespace penstock {

struct Floats {
    float32x4_t a, b, c, d;
};
struct Words {
    uint32x4_t a, b, c, d;
};
using Mask = uint16_t;

constexpr int SUM_VECTORS = 4;  // that a loop may keep in registers, beside what it multiplies

// A vector out of quarters, each of which `of` makes of a quarter of all others.
template <class Vector, class Of, class... From>
inline Vector quarters(const Of& of, const From&... from) {
    return {of(from.a...), of(from.b...), of(from.c...), of(from.d...)};
}

// Of memory of any type.
template <class Part>
inline Part load_part(const void* from) {
    Part part;
    std::memcpy(&part, from, sizeof part);
    return part;
}
template <class Vector>
inline Vector load_vector(const void* from) {
    const auto* bytes = static_cast<const uint8_t*>(from);
    using Quarter = decltype(Vector::a);
    return {load_part<Quarter>(bytes), load_part<Quarter>(bytes + 16), load_part<Quarter>(bytes + 32),
            load_part<Quarter>(bytes + 48)};
}
template <class Vector>
inline void store_vector(void* to, Vector x) {
    auto* bytes = static_cast<uint8_t*>(to);
    std::memcpy(bytes, &x.a, 16);
    std::memcpy(bytes + 16, &x.b, 16);
    std::memcpy(bytes + 32, &x.c, 16);
    std::memcpy(bytes + 48, &x.d, 16);
}
// The lanes that a mask has are the first of all.
template <class Vector>
inline Vector load_first(const void* from, Mask lanes) {
    if (lanes == 0xffff) return load_vector<Vector>(from);
    alignas(16) uint32_t some[16] = {};
    std::memcpy(some, from, __builtin_popcount(lanes) * sizeof *some);
    return load_vector<Vector>(some);
}

inline Floats same(float x) {
    const float32x4_t quarter = vdupq_n_f32(x);
    return {quarter, quarter, quarter, quarter};
}
inline Floats zeros() { return same(0.f); }
inline Floats load_floats(const float* from) { return load_vector<Floats>(from); }
inline void store_floats(float* to, Floats x) { store_vector(to, x); }
inline Floats plus(Floats x, Floats y) {
    return quarters<Floats>([](auto x, auto y) { return vaddq_f32(x, y); }, x, y);
}
inline Floats minus(Floats x, Floats y) {
    return quarters<Floats>([](auto x, auto y) { return vsubq_f32(x, y); }, x, y);
}
inline Floats times(Floats x, Floats y) {
    return quarters<Floats>([](auto x, auto y) { return vmulq_f32(x, y); }, x, y);
}
inline Floats over(Floats x, Floats y) {
    return quarters<Floats>([](auto x, auto y) { return vdivq_f32(x, y); }, x, y);
}
inline Floats fma(Floats x, Floats y, Floats sum) {
    return quarters<Floats>([](auto x, auto y, auto sum) { return vfmaq_f32(sum, x, y); }, x, y, sum);
}
// Where either is no number, the second.
inline Floats larger(Floats x, Floats y) {
    return quarters<Floats>([](auto x, auto y) { return vbslq_f32(vcgtq_f32(x, y), x, y); }, x, y);
}
inline Floats rounded_to_whole(Floats x) {
    return quarters<Floats>([](auto x) { return vrndnq_f32(x); }, x);
}

inline Words same_words(uint32_t x) {
    const uint32x4_t quarter = vdupq_n_u32(x);
    return {quarter, quarter, quarter, quarter};
}
inline Words zero_words() { return same_words(0); }
inline Words load_words(const void* from) { return load_vector<Words>(from); }
inline void store_words(void* to, Words x) { store_vector(to, x); }
inline Floats as_floats(Words x) {
    return quarters<Floats>([](auto x) { return vreinterpretq_f32_u32(x); }, x);
}
inline Words as_words(Floats x) {
    return quarters<Words>([](auto x) { return vreinterpretq_u32_f32(x); }, x);
}
inline Words both(Words x, Words y) {
    return quarters<Words>([](auto x, auto y) { return vandq_u32(x, y); }, x, y);
}
inline Words either(Words x, Words y) {
    return quarters<Words>([](auto x, auto y) { return vorrq_u32(x, y); }, x, y);
}
inline Words sum_of_words(Words x, Words y) {
    return quarters<Words>([](auto x, auto y) { return vaddq_u32(x, y); }, x, y);
}
inline Words product_of_words(Words x, Words y) {
    return quarters<Words>([](auto x, auto y) { return vmulq_u32(x, y); }, x, y);
}
inline Words shifted_left(Words x, int bits) {
    return quarters<Words>([bits](uint32x4_t x) { return x << bits; }, x);
}
inline Words shifted_right(Words x, int bits) {
    return quarters<Words>([bits](uint32x4_t x) { return x >> bits; }, x);
}
inline Words shifted_signed(Words x, int bits) {
    return quarters<Words>([bits](auto x) { return vreinterpretq_u32_s32(vreinterpretq_s32_u32(x) >> bits); }, x);
}
inline Floats converted(Words x) {
    return quarters<Floats>([](auto x) { return vcvtq_f32_s32(vreinterpretq_s32_u32(x)); }, x);
}

// Bits of 16 lanes, out of lanes that are all ones or all zeros, and back.
inline Words bits_of_lanes() {
    alignas(16) static constexpr uint32_t BITS[] = {1 << 0, 1 << 1, 1 << 2,  1 << 3,  1 << 4,  1 << 5,  1 << 6,  1 << 7,
                                                    1 << 8, 1 << 9, 1 << 10, 1 << 11, 1 << 12, 1 << 13, 1 << 14, 1 << 15};
    return load_words(BITS);
}
inline Mask mask_of(Words lanes) {
    const Words own = both(lanes, bits_of_lanes());
    return vaddvq_u32(vorrq_u32(vorrq_u32(own.a, own.b), vorrq_u32(own.c, own.d)));
}
inline Words lanes_of(Mask mask) {
    return quarters<Words>([all = vdupq_n_u32(mask)](auto bits) { return vtstq_u32(all, bits); }, bits_of_lanes());
}

// x * 2^power in two steps: neither power of two is too small or too large for a float.
inline Floats by_power_of_two(Floats x, Floats power) {
    const auto quarter = [](auto x, auto power) {
        const int32x4_t all = vcvtnq_s32_f32(vminnmq_f32(power, vdupq_n_f32(254.f)));
        const int32x4_t first = vshrq_n_s32(all, 1), second = vsubq_s32(all, first);
        const auto power_of = [](int32x4_t of) {
            return vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(of, vdupq_n_s32(127)), 23));
        };
        return vmulq_f32(vmulq_f32(x, power_of(first)), power_of(second));
    };
    return quarters<Floats>(quarter, x, power);
}
inline float sum_of(Floats x) {
    const float32x4_t four = vaddq_f32(vaddq_f32(x.a, x.c), vaddq_f32(x.b, x.d));
    const float32x2_t two = vadd_f32(vget_low_f32(four), vget_high_f32(four));
    return vget_lane_f32(two, 0) + vget_lane_f32(two, 1);
}
inline float largest_of(Floats x) {
    return vmaxnmvq_f32(vmaxnmq_f32(vmaxnmq_f32(x.a, x.c), vmaxnmq_f32(x.b, x.d)));
}
inline Mask is_less(Floats x, Floats y) {
    return mask_of(quarters<Words>([](auto x, auto y) { return vcltq_f32(x, y); }, x, y));
}
inline bool differ(Floats x, Floats y) {
    const Words are_equal = quarters<Words>([](auto x, auto y) { return vceqq_f32(x, y); }, x, y);
    return mask_of(are_equal) != 0xffff;
}
inline Mask is_greater(Words x, Words y) {
    const auto greater = [](auto x, auto y) {
        return vcgtq_s32(vreinterpretq_s32_u32(x), vreinterpretq_s32_u32(y));
    };
    return mask_of(quarters<Words>(greater, x, y));
}
inline Mask is_less(Words x, Words y) { return is_greater(y, x); }
inline Mask is_at_most(Words x, Words y) { return ~is_greater(x, y); }
inline Floats chosen(Mask lanes, Floats yes, Floats no) {
    const auto quarter = [](auto which, auto yes, auto no) { return vbslq_f32(which, yes, no); };
    return quarters<Floats>(quarter, lanes_of(lanes), yes, no);
}
inline Floats load_first_floats(const float* from, Mask lanes) { return load_first<Floats>(from, lanes); }
inline void store_first_floats(float* to, Mask lanes, Floats x) {
    if (lanes == 0xffff) return store_floats(to, x);
    float some[16];
    store_floats(some, x);
    std::memcpy(to, some, __builtin_popcount(lanes) * sizeof *to);
}
// By the lower 4 bits of each word.
inline Floats looked_up(Words index, const float* table) {
    const Floats values = load_floats(table);
    const uint8x16x4_t bytes = {vreinterpretq_u8_f32(values.a), vreinterpretq_u8_f32(values.b),
                                vreinterpretq_u8_f32(values.c), vreinterpretq_u8_f32(values.d)};
    const auto quarter = [&](auto index) {  // the places of each float's four bytes
        const uint32x4_t places = vmlaq_n_u32(vdupq_n_u32(0x03020100), vandq_u32(index, vdupq_n_u32(15)), 0x04040404);
        return vreinterpretq_f32_u8(vqtbl4q_u8(bytes, vreinterpretq_u8_u32(places)));
    };
    return quarters<Floats>(quarter, index);
}
// Values of 16 bits, each in a word.
inline Words load_first_halves(const uint16_t* from, Mask lanes) {
    uint16_t some[16] = {};
    if (lanes != 0xffff) {
        std::memcpy(some, from, __builtin_popcount(lanes) * sizeof *from);
        from = some;
    }
    const auto low = load_part<uint16x8_t>(from), high = load_part<uint16x8_t>(from + 8);
    return {vmovl_u16(vget_low_u16(low)), vmovl_high_u16(low), vmovl_u16(vget_low_u16(high)), vmovl_high_u16(high)};
}
inline void store_first_halves(uint16_t* to, Mask lanes, Words x) {
    const uint16x8_t halves[] = {vmovn_high_u32(vmovn_u32(x.a), x.b), vmovn_high_u32(vmovn_u32(x.c), x.d)};
    std::memcpy(to, halves, lanes == 0xffff ? sizeof halves : __builtin_popcount(lanes) * sizeof *to);
}
// A byte of each lane.
inline Words byte_of(Words x, int index) { return both(shifted_right(x, 8 * index), same_words(255)); }
inline Words load_signed_bytes(const void* from) {
    const auto all = load_part<int8x16_t>(from);
    const int16x8_t low = vmovl_s8(vget_low_s8(all)), high = vmovl_high_s8(all);
    return {vreinterpretq_u32_s32(vmovl_s16(vget_low_s16(low))), vreinterpretq_u32_s32(vmovl_high_s16(low)),
            vreinterpretq_u32_s32(vmovl_s16(vget_low_s16(high))), vreinterpretq_u32_s32(vmovl_high_s16(high))};
}
inline Floats load_float16(const void* from) {
    const auto* bytes = static_cast<const uint8_t*>(from);
    const auto low = load_part<float16x8_t>(bytes), high = load_part<float16x8_t>(bytes + 16);
    return {vcvt_f32_f16(vget_low_f16(low)), vcvt_high_f32_f16(low), vcvt_f32_f16(vget_low_f16(high)),
            vcvt_high_f32_f16(high)};
}

// Bytes, four to a word.
inline Words sum_of_bytes(Words x, Words y) {
    const auto quarter = [](auto x, auto y) {
        return vreinterpretq_u32_u8(vaddq_u8(vreinterpretq_u8_u32(x), vreinterpretq_u8_u32(y)));
    };
    return quarters<Words>(quarter, x, y);
}
inline Words looked_up_bytes(Words index, const uint8_t* table) {
    const auto quarter = [all = load_part<uint8x16_t>(table)](auto index) {
        return vreinterpretq_u32_u8(vqtbl1q_u8(all, vandq_u8(vreinterpretq_u8_u32(index), vdupq_n_u8(15))));
    };
    return quarters<Words>(quarter, index);
}
inline Words rounded_words(Floats x) {
    return quarters<Words>([](auto x) { return vreinterpretq_u32_s32(vcvtnq_s32_f32(x)); }, x);
}
// Words from -128 to 127, of which `order` says which one is where.
inline void store_bytes(int8_t* to, Words x, const uint8_t* order) {
    const uint16x8_t low = vmovn_high_u32(vmovn_u32(x.a), x.b), high = vmovn_high_u32(vmovn_u32(x.c), x.d);
    const uint8x16_t bytes = vqtbl1q_u8(vmovn_high_u16(vmovn_u16(low), high), load_part<uint8x16_t>(order));
    std::memcpy(to, &bytes, sizeof bytes);
}
inline Words here(Words x) { return x; }
constexpr int BYTE_VECTORS = 1, BYTE_SUMS = 4;  // vectors of sums, of rows by outputs, that registers hold
inline Words pairs_of_bytes(Words x, Words y) {
    const auto quarter = [](auto x, auto y) {
        const uint8x16_t a = vreinterpretq_u8_u32(x);
        const int8x16_t b = vreinterpretq_s8_u32(y);
        const int16x8_t low = vmulq_s16(vreinterpretq_s16_u16(vmovl_u8(vget_low_u8(a))), vmovl_s8(vget_low_s8(b)));
        const int16x8_t high = vmulq_s16(vreinterpretq_s16_u16(vmovl_high_u8(a)), vmovl_high_s8(b));
        return vreinterpretq_u32_s16(vpaddq_s16(low, high));
    };
    return quarters<Words>(quarter, x, y);
}
inline Words sum_of_halves(Words x, Words y) {
    const auto quarter = [](auto x, auto y) {
        return vreinterpretq_u32_s16(vaddq_s16(vreinterpretq_s16_u32(x), vreinterpretq_s16_u32(y)));
    };
    return quarters<Words>(quarter, x, y);
}
inline Words sum_of_pairs(Words x, Words y) {
    const auto quarter = [](auto x, auto y) {
        const int16x8_t a = vreinterpretq_s16_u32(x), b = vreinterpretq_s16_u32(y);
        return vreinterpretq_u32_s32(vpaddq_s32(vmull_s16(vget_low_s16(a), vget_low_s16(b)), vmull_high_s16(a, b)));
    };
    return quarters<Words>(quarter, x, y);
}

// Rows become columns: 16 squares of 4.
inline void transpose(const Words* rows, Words* out) {
    const auto square = [&](uint32x4_t Words::*from, int first_row, int column, uint32x4_t Words::*to) {
        const Words* own = rows + first_row;
        const auto pairs = [](uint32x4_t x, uint32x4_t y, auto of) { return vreinterpretq_u64_u32(of(x, y)); };
        const auto even = [](auto x, auto y) { return vtrn1q_u32(x, y); };
        const auto odd = [](auto x, auto y) { return vtrn2q_u32(x, y); };
        const uint64x2_t even_low = pairs(own[0].*from, own[1].*from, even);
        const uint64x2_t odd_low = pairs(own[0].*from, own[1].*from, odd);
        const uint64x2_t even_high = pairs(own[2].*from, own[3].*from, even);
        const uint64x2_t odd_high = pairs(own[2].*from, own[3].*from, odd);
        out[column].*to = vreinterpretq_u32_u64(vtrn1q_u64(even_low, even_high));
        out[column + 1].*to = vreinterpretq_u32_u64(vtrn1q_u64(odd_low, odd_high));
        out[column + 2].*to = vreinterpretq_u32_u64(vtrn2q_u64(even_low, even_high));
        out[column + 3].*to = vreinterpretq_u32_u64(vtrn2q_u64(odd_low, odd_high));
    };
    constexpr uint32x4_t Words::*QUARTERS[] = {&Words::a, &Words::b, &Words::c, &Words::d};
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i)
#pragma GCC unroll 4
        for (int j = 0; j < 4; ++j) square(QUARTERS[j], 4 * i, 4 * j, QUARTERS[i]);
}

inline float float_of_half(uint16_t bits) {
    __fp16 value;
    std::memcpy(&value, &bits, sizeof bits);
    return value;
}
inline uint16_t half_of_float(float from) {
    const __fp16 value = from;
    uint16_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
}

// Between two looks of a thread that waits. `yield` takes no time where a core has but one thread.
inline void rest() { __asm__ volatile("isb"); }

}  // namespace penstock
