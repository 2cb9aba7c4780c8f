// What is done to each row of a pass on its own: norms, sums, activations, and a layer's heads on their way to the
// cache. A row's bits depend on nothing but the row.
#include <algorithm>
#include <cmath>

#include "calls.h"

namespace penstock {
namespace {

// Rows that are worth a thread's while.
constexpr int64_t VALUES_A_THREAD = 4096;

template <class Body>
void for_rows(int64_t num_rows, int64_t row_size, int num_threads, const Body& body) {
    const bool is_little = num_rows * row_size < 2 * VALUES_A_THREAD;
    for_pieces(num_rows, is_little ? 1 : num_threads, body, std::max<int64_t>(1, VALUES_A_THREAD / row_size));
}

// 1 / sqrt(mean(x^2) + eps), of values that `load(at, lanes)` gives.
template <class Load>
float inverse_rms(int64_t size, float eps, const Load& load) {
    Floats sum = zeros();
    for (int64_t at = 0; at < size; at += LANES) {
        const Floats x = load(at, first_lanes(size - at));
        sum = fma(x, x, sum);
    }
    return 1.f / std::sqrt(sum_of(sum) / size + eps);
}

// A weight of float32 is applied before rounding, one of the values' own dtype after it.
template <class T>
struct Norm {
    const void* weight;
    bool is_float32;
    float eps;

    template <class Load>
    void apply(typename T::value* out, int64_t size, const Load& load) const {
        const Floats scale = same(inverse_rms(size, eps, load));
        for (int64_t at = 0; at < size; at += LANES) {
            const Mask lanes = first_lanes(size - at);
            const Floats x = times(load(at, lanes), scale);
            T::store(out + at, lanes, is_float32
                ? times(x, Float32::load(static_cast<const float*>(weight) + at, lanes))
                : times(T::rounded(x), T::load(static_cast<const typename T::value*>(weight) + at, lanes)));
        }
    }
};

template <class T>
void norm_rows(const typename T::value* x, typename T::value* out, int64_t num_rows, int64_t num_parts,
               int64_t row_stride, int64_t part_stride, int64_t size, int num_threads, const Norm<T>& norm) {
    for_rows(num_rows, num_parts * size, num_threads, [&](int64_t row) {
        for (int64_t part = 0; part < num_parts; ++part) {
            const auto* from = x + row * row_stride + part * part_stride;
            norm.apply(out + (row * num_parts + part) * size, size,
                       [from](int64_t at, Mask lanes) { return T::load(from + at, lanes); });
        }
    });
}

// sum = x + delta, rounded; out = its norm.
template <class T>
void add_norm_rows(const typename T::value* x, const typename T::value* delta, typename T::value* sum,
                   typename T::value* out, int64_t num_rows, int64_t size, int num_threads, const Norm<T>& norm) {
    for_rows(num_rows, size, num_threads, [&](int64_t row) {
        auto* to = sum + row * size;
        for (int64_t at = 0; at < size; at += LANES) {
            const Mask lanes = first_lanes(size - at);
            T::store(to + at, lanes,
                     plus(T::load(x + row * size + at, lanes), T::load(delta + row * size + at, lanes)));
        }
        norm.apply(out + row * size, size, [to](int64_t at, Mask lanes) { return T::load(to + at, lanes); });
    });
}

template <class T>
void silu_and_mul_rows(const typename T::value* gate_up, typename T::value* out, int64_t num_rows, int64_t width,
                       int num_threads) {
    for_rows(num_rows, width, num_threads, [&](int64_t row) {
        const auto* gate = gate_up + 2 * row * width;
        const auto* up = gate + width;
        for (int64_t at = 0; at < width; at += LANES) {
            const Mask lanes = first_lanes(width - at);
            const Floats x = T::load(gate + at, lanes);
            const Floats activated = T::rounded(times(x, sigmoid_of(x)));
            T::store(out + row * width + at, lanes, times(activated, T::load(up + at, lanes)));
        }
    });
}

// The two halves of what is rotated are the first and the second parts of pairs. Each product is rounded, and then
// their sum, so that a row's bits are those of three passes.
template <class T>
void rotate_head(const typename T::value* from, const typename T::value* cos, const typename T::value* sin,
                 int64_t rotary_dim, int64_t head_dim, typename T::value* out) {
    const int64_t half = rotary_dim / 2;
    for (int64_t at = 0; at < half; at += LANES) {
        const Mask lanes = first_lanes(half - at);
        const Floats first = T::load(from + at, lanes), second = T::load(from + half + at, lanes);
        auto turned = [&](Floats own, Floats other, int64_t place) {
            const Floats a = T::rounded(times(other, T::load(sin + place, lanes)));
            const Floats b = T::rounded(times(own, T::load(cos + place, lanes)));
            T::store(out + place, lanes, plus(a, b));
        };
        turned(first, second, at);
        turned(second, first, half + at);
    }
    std::memcpy(out + rotary_dim, from + rotary_dim, (head_dim - rotary_dim) * sizeof *out);
}

template <class T>
void place_rows(const HeadRows& heads) {
    using value = typename T::value;
    const int64_t size = heads.head_dim, num_rotated = heads.num_heads + heads.num_kv_heads;
    auto place_of = [&](int64_t row) {
        const Place* place = heads.places;
        while (row >= place->num_tokens) row -= place++->num_tokens;
        return place->start + row;
    };
    for_rows(heads.num_rows, (num_rotated + heads.num_kv_heads) * size, heads.num_threads, [&](int64_t row) {
        const value* from = static_cast<const value*>(heads.projected) + row * heads.row_stride;
        const bool is_token = row < heads.num_tokens;
        const int64_t kept = is_token ? place_of(row) * heads.num_kv_heads * size : 0;
        const value* cos = static_cast<const value*>(heads.cos) + row * heads.rotary_dim;
        const value* sin = static_cast<const value*>(heads.sin) + row * heads.rotary_dim;
        alignas(64) value normed[1024];
        for (int64_t head = 0; head < num_rotated; ++head, from += size) {
            const bool is_query = head < heads.num_heads;
            if (!is_query && !is_token) break;
            value* out = is_query ? static_cast<value*>(heads.queries) + (row * heads.num_heads + head) * size
                                  : static_cast<value*>(heads.keys) + kept + (head - heads.num_heads) * size;
            const value* head_in = from;
            const void* weight = is_query ? heads.query_norm : heads.key_norm;
            if (weight) {
                const Norm<T> norm{weight, heads.norm_is_float32 != 0, heads.eps};
                norm.apply(normed, size, [from](int64_t at, Mask lanes) { return T::load(from + at, lanes); });
                head_in = normed;
            }
            rotate_head<T>(head_in, cos, sin, heads.rotary_dim, size, out);
        }
        if (is_token)
            std::memcpy(static_cast<value*>(heads.values) + kept, from, heads.num_kv_heads * size * sizeof(value));
    });
}

}  // namespace
}  // namespace penstock

using namespace penstock;

extern "C" void penstock_norm(int is_bfloat16, const void* x, void* out, int64_t num_rows, int64_t num_parts,
                              int64_t row_stride, int64_t part_stride, int64_t size, const void* weight,
                              int weight_is_float32, float eps, int num_threads) {
    if (is_bfloat16)
        norm_rows<Bfloat16>(static_cast<const uint16_t*>(x), static_cast<uint16_t*>(out), num_rows, num_parts,
                            row_stride, part_stride, size, num_threads, {weight, weight_is_float32 != 0, eps});
    else
        norm_rows<Float32>(static_cast<const float*>(x), static_cast<float*>(out), num_rows, num_parts, row_stride,
                           part_stride, size, num_threads, {weight, true, eps});
}

extern "C" void penstock_add_norm(int is_bfloat16, const void* x, const void* delta, void* sum, void* out,
                                  int64_t num_rows, int64_t size, const void* weight, int weight_is_float32,
                                  float eps, int num_threads) {
    if (is_bfloat16)
        add_norm_rows<Bfloat16>(static_cast<const uint16_t*>(x), static_cast<const uint16_t*>(delta),
                                static_cast<uint16_t*>(sum), static_cast<uint16_t*>(out), num_rows, size, num_threads,
                                {weight, weight_is_float32 != 0, eps});
    else
        add_norm_rows<Float32>(static_cast<const float*>(x), static_cast<const float*>(delta),
                               static_cast<float*>(sum), static_cast<float*>(out), num_rows, size, num_threads,
                               {weight, true, eps});
}

extern "C" void penstock_silu_and_mul(int is_bfloat16, const void* gate_up, void* out, int64_t num_rows,
                                      int64_t width, int num_threads) {
    if (is_bfloat16)
        silu_and_mul_rows<Bfloat16>(static_cast<const uint16_t*>(gate_up), static_cast<uint16_t*>(out), num_rows,
                                    width, num_threads);
    else
        silu_and_mul_rows<Float32>(static_cast<const float*>(gate_up), static_cast<float*>(out), num_rows, width,
                                   num_threads);
}

extern "C" void penstock_place_heads(int is_bfloat16, const HeadRows* heads) {
    if (is_bfloat16)
        place_rows<Bfloat16>(*heads);
    else
        place_rows<Float32>(*heads);
}
