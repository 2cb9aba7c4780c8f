// The experts of a layer over all rows of a pass: chosen by their scores, grouped by expert, some experts at a time, and
// summed in their order.
#include <algorithm>
#include <vector>

#include "calls.h"

namespace penstock {

namespace {

// A row, and the weight that one of its experts has in it.
struct Visit {
    int64_t row;
    float weight;
};

// The best `count` of `size` values, from the best on; of equal ones the first.
void take_best(const float* values, int64_t size, int64_t count, int64_t* best) {
    for (int64_t n = 0; n < count; ++n) {
        int64_t found = -1;
        for (int64_t at = 0; at < size; ++at)
            if ((found < 0 || values[at] > values[found]) && std::find(best, best + n, at) == best + n) found = at;
        best[n] = found;
    }
}

// What is not of the best groups is out of reach.
void keep_best_groups(const Experts& experts, float* choice) {
    const int64_t num_groups = experts.num_groups, size = experts.num_experts / num_groups;
    const int64_t num_best = std::min(experts.group_best, size);
    std::vector<float> sums(num_groups);
    std::vector<int64_t> best(std::max(num_best, experts.num_active_groups));
    for (int64_t group = 0; group < num_groups; ++group) {
        take_best(choice + group * size, size, num_best, best.data());
        for (int64_t n = 0; n < num_best; ++n) sums[group] += choice[group * size + best[n]];
    }
    take_best(sums.data(), num_groups, experts.num_active_groups, best.data());
    for (int64_t group = 0; group < num_groups; ++group)
        if (std::find(best.data(), best.data() + experts.num_active_groups, group) ==
            best.data() + experts.num_active_groups)
            std::fill_n(choice + group * size, size, -__builtin_inff());
}

// The experts that a row goes to, and their weights.
void choose(const Experts& experts, const uint16_t* scores, int64_t* chosen, float* weights) {
    const int64_t count = experts.num_experts, num_active = experts.num_active;
    static thread_local std::vector<float> chances, choice;
    chances.resize(count + LANES);
    Floats largest = same(-__builtin_inff()), sum = zeros();
    for (int64_t at = 0; at < count; at += LANES) {
        const Mask lanes = first_lanes(count - at);
        largest = larger(largest, ::penstock::chosen(lanes, Bfloat16::load(scores + at, lanes), largest));
    }
    const Floats most = same(largest_of(largest));
    for (int64_t at = 0; at < count; at += LANES) {
        const Mask lanes = first_lanes(count - at);
        const Floats score = Bfloat16::load(scores + at, lanes);
        Floats chance = sigmoid_of(score);
        if (experts.is_softmax) {
            chance = ::penstock::chosen(lanes, exp2_of(times(minus(score, most), same(LOG2_E))), zeros());
            sum = plus(sum, chance);
        }
        store_floats(&chances[at], chance);
    }
    if (experts.is_softmax) {
        const float total = sum_of(sum);
        for (int64_t at = 0; at < count; ++at) chances[at] /= total;
    }
    choice.assign(chances.begin(), chances.begin() + count);
    for (int64_t at = 0; experts.choice_bias && at < count; ++at) choice[at] += experts.choice_bias[at];
    if (experts.num_groups > 1) keep_best_groups(experts, choice.data());
    take_best(choice.data(), count, num_active, chosen);
    float total = 0;
    for (int64_t n = 0; n < num_active; ++n) total += weights[n] = chances[chosen[n]];
    for (int64_t n = 0; n < num_active; ++n) {
        if (experts.is_normalised) weights[n] /= total;
        weights[n] *= experts.expert_scales ? experts.scale * experts.expert_scales[chosen[n]] : experts.scale;
    }
}

}  // namespace
}  // namespace penstock

// The experts [rows, active] that rows go to by their scores [rows, experts | ...], and their weights.
extern "C" void penstock_route(const penstock::Experts* experts, const uint16_t* scores, int64_t num_rows,
                               int64_t score_stride, int64_t* chosen, float* weights, int num_threads) {
    const int64_t num_active = experts->num_active;
    penstock::for_pieces(num_rows, num_threads, [&](int64_t row) {
        penstock::choose(*experts, scores + row * score_stride, chosen + row * num_active, weights + row * num_active);
    }, 16);
}

extern "C" void penstock_experts(const penstock::Experts* experts, const penstock::ExpertPass* pass) {
    using namespace penstock;
    const int64_t hidden = experts->down->num_out, width = experts->down->num_in;
    const int64_t num_experts = experts->num_experts, num_active = experts->num_active, num_rows = pass->num_rows;
    const int64_t num_places = experts->num_places(num_rows);
    const int num_threads = pass->num_threads;

    // Visits sorted by expert and then by row, and of each row the places of its own, in that order.
    const int64_t num_visits = num_rows * num_active;
    std::vector<int64_t> chosen(num_visits), starts(num_experts + 1), places(num_visits), filled(num_rows);
    std::vector<float> shares(num_visits);
    penstock_route(experts, pass->scores, num_rows, pass->score_stride, chosen.data(), shares.data(), num_threads);
    std::vector<Visit> visits(num_visits);
    for (int64_t at = 0; at < num_visits; ++at) ++starts[chosen[at] + 1];
    for (int64_t expert = 0; expert < num_experts; ++expert) starts[expert + 1] += starts[expert];
    std::vector<int64_t> next(starts.begin(), starts.end() - 1);
    for (int64_t at = 0; at < num_visits; ++at) visits[next[chosen[at]]++] = {at / num_active, shares[at]};
    for (int64_t place = 0; place < num_visits; ++place) {
        const int64_t row = visits[place].row;
        places[row * num_active + filled[row]++] = place;
    }

    uint16_t* const inputs = pass->room;
    uint16_t* const outputs = inputs + num_places * hidden;
    uint16_t* const gate_up = outputs + num_places * hidden;
    uint16_t* const activated = gate_up + num_places * 2 * width;
    std::fill(filled.begin(), filled.end(), 0);  // of each row, the places that are summed
    std::vector<Weight> weights;
    std::vector<Rows> rows;
    for (int64_t first = 0, last; first < num_experts; first = last) {
        const int64_t start = starts[first];
        for (last = first; last < num_experts && starts[last + 1] - start <= num_places;) ++last;
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
        Floats gate = same(1.0f);
        if (pass->shared && experts->gates_shared) {
            alignas(64) float gates[LANES];
            store_floats(gates, sigmoid_of(Bfloat16::load(pass->scores + row * pass->score_stride + num_experts, 1)));
            gate = same(gates[0]);
        }
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
