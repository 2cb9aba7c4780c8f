// The experts of a layer over all rows of a pass: grouped by expert, some experts at a time, and summed in their order.
#include <algorithm>
#include <vector>

#include "calls.h"

namespace penstock {

struct Experts {
    const Weight* gate_up;  // of each expert
    const Weight* down;
    int64_t num_experts;
    int64_t num_active;
};

struct ExpertPass {
    const uint16_t* x;       // [rows, hidden]
    const int64_t* chosen;   // [rows, active]
    const float* weights;    // [rows, active]
    const uint16_t* shared;  // [rows, hidden], what the shared expert made of them; or none
    const float* gates;      // [rows], of that; or none
    uint16_t* out;           // [rows, hidden]
    float* totals;           // [rows, hidden], room
    uint16_t* room;          // [places, 2 * hidden + 3 * width]
    int64_t num_rows;
    int64_t num_places;      // that there is room for: no fewer than rows, or all
    int64_t shared_stride;
    int32_t is_canonical;
    int32_t num_threads;
};

namespace {

// A row, and the weight that one of its experts has in it.
struct Visit {
    int64_t row;
    float weight;
};

}  // namespace
}  // namespace penstock

extern "C" void penstock_experts(const penstock::Experts* experts, const penstock::ExpertPass* pass) {
    using namespace penstock;
    const int64_t hidden = experts->down->num_out, width = experts->down->num_in;
    const int64_t num_experts = experts->num_experts, num_active = experts->num_active, num_rows = pass->num_rows;
    const int num_threads = pass->num_threads;

    // Visits sorted by expert and then by row, and of each row the places of its own, in that order.
    std::vector<int64_t> starts(num_experts + 1), places(num_rows * num_active), filled(num_rows);
    std::vector<Visit> visits(num_rows * num_active);
    for (int64_t at = 0; at < num_rows * num_active; ++at) ++starts[pass->chosen[at] + 1];
    for (int64_t expert = 0; expert < num_experts; ++expert) starts[expert + 1] += starts[expert];
    std::vector<int64_t> next(starts.begin(), starts.end() - 1);
    for (int64_t at = 0; at < num_rows * num_active; ++at)
        visits[next[pass->chosen[at]]++] = {at / num_active, pass->weights[at]};
    for (int64_t place = 0; place < num_rows * num_active; ++place) {
        const int64_t row = visits[place].row;
        places[row * num_active + filled[row]++] = place;
    }

    uint16_t* const inputs = pass->room;
    uint16_t* const outputs = inputs + pass->num_places * hidden;
    uint16_t* const gate_up = outputs + pass->num_places * hidden;
    uint16_t* const activated = gate_up + pass->num_places * 2 * width;
    std::fill(filled.begin(), filled.end(), 0);  // of each row, the places that are summed
    std::vector<Weight> weights;
    std::vector<Rows> rows;
    for (int64_t first = 0, last; first < num_experts; first = last) {
        const int64_t start = starts[first];
        for (last = first; last < num_experts && starts[last + 1] - start <= pass->num_places;) ++last;
        const int64_t end = starts[last], count = end - start;
        for_pieces(count, num_threads, [&](int64_t at) {
            std::copy_n(pass->x + visits[start + at].row * hidden, hidden, inputs + at * hidden);
        }, 16);
        auto multiply_all = [&](const Weight* all, const uint16_t* x, uint16_t* out) {
            weights.clear();
            rows.clear();
            for (int64_t expert = first; expert < last; ++expert) {
                const int64_t own = starts[expert + 1] - starts[expert], at = starts[expert] - start;
                if (!own) continue;
                const int64_t num_in = all[expert].num_in, num_out = all[expert].num_out;
                weights.push_back(all[expert]);
                rows.push_back({x + at * num_in, out + at * num_out, nullptr, own, num_in, num_out});
            }
            multiply(weights.data(), rows.data(), weights.size(), pass->is_canonical, num_threads);
        };
        multiply_all(experts->gate_up, inputs, gate_up);
        penstock_silu_and_mul(1, gate_up, activated, count, width, num_threads);
        multiply_all(experts->down, activated, outputs);
        for_pieces(num_rows, num_threads, [&](int64_t row) {
            float* total = pass->totals + row * hidden;
            if (first == 0) std::fill_n(total, hidden, 0.0f);
            for (; filled[row] < num_active && places[row * num_active + filled[row]] < end; ++filled[row]) {
                const int64_t place = places[row * num_active + filled[row]];
                const Floats weight = same(visits[place].weight);
                for (int64_t at = 0; at < hidden; at += LANES) {
                    const Mask lanes = first_lanes(hidden - at);
                    const Floats own = Bfloat16::load(outputs + (place - start) * hidden + at, lanes);
                    const Floats sum = plus(load_first_floats(total + at, lanes), times(own, weight));
                    store_first_floats(total + at, lanes, sum);
                }
            }
        }, 4);
    }
    for_pieces(num_rows, num_threads, [&](int64_t row) {
        const Floats gate = same(pass->gates ? pass->gates[row] : 1.0f);
        for (int64_t at = 0; at < hidden; at += LANES) {
            const Mask lanes = first_lanes(hidden - at);
            Floats sum = load_first_floats(pass->totals + row * hidden + at, lanes);
            if (pass->shared)
                sum = plus(
                    sum, times(Bfloat16::load(pass->shared + row * pass->shared_stride + at, lanes), gate));
            Bfloat16::store(pass->out + row * hidden + at, lanes, sum);
        }
    }, 4);
}
