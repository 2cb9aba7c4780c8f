// All layers of a decoder over a few rows, one after the other, without a return to Python in between: what the calls
// of the other files do, in the same order and to the same bits.
#include <chrono>
#include <vector>

#include "calls.h"

namespace penstock {

// A weight in parts, each with the outputs after those of the one before; or none.
struct Product {
    const Weight* parts;
    int64_t num_parts;
    const uint16_t* bias;  // or none

    int64_t num_in() const { return num_parts ? parts->num_in : 0; }
    int64_t num_out() const {
        int64_t total = 0;
        for (const Weight* part = parts; part < parts + num_parts; ++part) total += part->num_out;
        return total;
    }
};

struct Layer {
    Product qkv;
    Product out;
    Product gate_up;           // of the block that every row goes through, where there is one
    Product down;
    Product router;            // to experts, where there are any
    const Experts* experts;    // or none
    const void* query_norm;    // of heads, or none
    const void* key_norm;
    const void* mlp_norm;
    const void* next_norm;     // of the next layer, or after the last
};

struct Pass {
    uint16_t* x;       // [rows, hidden], the residual stream: that after the last layer takes its place
    uint16_t* normed;  // [rows, hidden], the same for its norm
    const void* cos;   // [rows, rotary_dim]
    const void* sin;
    void* const* keys;  // the cache, layer by layer
    void* const* values;
    const Place* written;  // where the rows' keys and values go
    const Span* spans;
    const Place* places;
    int64_t num_spans;
    int64_t num_rows;
    int64_t num_heads;
    int64_t num_kv_heads;
    int64_t head_dim;
    int64_t rotary_dim;
    int32_t norm_is_float32;
    int32_t num_threads;
    float eps;
    float scale;
    int64_t* spent;  // nanoseconds of products, attention and the rest, to be added to; or none
};

// Adds what passes from one call to the next.
class Clock {
   public:
    enum Kind { PRODUCTS, ATTENTION, REST };

    explicit Clock(int64_t* spent) : spent_(spent) {
        if (spent_) last_ = now();
    }
    void add(Kind kind) {
        if (!spent_) return;
        const int64_t time = now();
        spent_[kind] += time - last_;
        last_ = time;
    }

   private:
    static int64_t now() { return std::chrono::steady_clock::now().time_since_epoch() / std::chrono::nanoseconds(1); }
    int64_t* spent_;
    int64_t last_ = 0;
};

}  // namespace penstock

extern "C" void penstock_run_layers(const penstock::Layer* layers, int64_t num_layers, const penstock::Pass* pass) {
    using namespace penstock;
    const int64_t num_rows = pass->num_rows, query_size = pass->num_heads * pass->head_dim;
    const int num_threads = pass->num_threads;
    static thread_local std::vector<uint16_t> room;
    static thread_local std::vector<float> totals;
    Clock clock(pass->spent);
    for (int64_t index = 0; index < num_layers; ++index) {
        const Layer& layer = layers[index];
        const Experts* const experts = layer.experts;
        const int64_t hidden = layer.qkv.num_in(), width = layer.down.num_in(), projected_size = layer.qkv.num_out();
        const int64_t num_places = experts ? experts->num_places(num_rows) : 0, num_scores = layer.router.num_out();
        const int64_t sizes[] = {projected_size * num_rows,
                                 query_size * num_rows,
                                 query_size * num_rows,
                                 hidden * num_rows,
                                 layer.gate_up.num_out() * num_rows,
                                 width * num_rows,
                                 num_scores * num_rows,
                                 experts && width ? hidden * num_rows : 0,
                                 experts ? num_places * (2 * hidden + 3 * experts->down->num_in) : 0};
        int64_t total = 0;
        for (int64_t size : sizes) total += size;
        room.resize(total);
        uint16_t* parts[9];
        uint16_t* next = room.data();
        for (int i = 0; i < 9; next += sizes[i++]) parts[i] = next;
        auto [projected, queries, attended, delta, gate_up, activated, scores, shared, expert_room] = parts;

        auto multiply = [&](const Product& product, const uint16_t* x, uint16_t* out) {
            clock.add(Clock::REST);
            const int64_t num_out = product.num_out();
            const uint16_t* bias = product.bias;
            for (const Weight* part = product.parts; part < product.parts + product.num_parts; ++part) {
                penstock_quantised_linear(part, x, out, bias, num_rows, part->num_in, num_out, 0, num_threads);
                out += part->num_out;
                if (bias) bias += part->num_out;
            }
            clock.add(Clock::PRODUCTS);
        };
        auto add = [&](const void* norm) {
            penstock_add_norm(1, pass->x, delta, pass->x, pass->normed, num_rows, hidden, norm, pass->norm_is_float32,
                              pass->eps, num_threads);
        };
        multiply(layer.qkv, pass->normed, projected);
        const HeadRows rows{projected,
                            queries,
                            pass->keys[index],
                            pass->values[index],
                            pass->cos,
                            pass->sin,
                            layer.query_norm,
                            layer.key_norm,
                            pass->written,
                            num_rows,
                            num_rows,
                            projected_size,
                            pass->num_heads,
                            pass->num_kv_heads,
                            pass->head_dim,
                            pass->rotary_dim,
                            pass->norm_is_float32,
                            num_threads,
                            pass->eps};
        penstock_place_heads(1, &rows);
        const Heads heads{queries,
                          attended,
                          pass->keys[index],
                          pass->values[index],
                          query_size,
                          query_size,
                          pass->num_kv_heads * pass->head_dim,
                          pass->num_kv_heads * pass->head_dim,
                          pass->num_kv_heads,
                          pass->num_heads / pass->num_kv_heads,
                          pass->head_dim,
                          0,
                          nullptr,
                          pass->scale,
                          0};
        clock.add(Clock::REST);
        penstock_attend(1, pass->head_dim, &heads, pass->spans, pass->num_spans, pass->places, num_threads);
        clock.add(Clock::ATTENTION);
        multiply(layer.out, attended, delta);
        add(layer.mlp_norm);
        if (width) {
            multiply(layer.gate_up, pass->normed, gate_up);
            penstock_silu_and_mul(1, gate_up, activated, num_rows, width, num_threads);
            multiply(layer.down, activated, experts ? shared : delta);
        }
        if (experts) {
            multiply(layer.router, pass->normed, scores);
            totals.resize(num_rows * hidden);
            const ExpertPass own{pass->normed,
                                 scores,
                                 width ? shared : nullptr,
                                 delta,
                                 totals.data(),
                                 expert_room,
                                 num_rows,
                                 num_scores,
                                 hidden,
                                 0,
                                 num_threads};
            clock.add(Clock::REST);
            penstock_experts(experts, &own);
            clock.add(Clock::PRODUCTS);
        }
        add(layer.next_norm);
    }
    clock.add(Clock::REST);
}
