// What Python hands to the native kernels, and the calls it makes.
#pragma once

#include <algorithm>

#include "threads.h"
#include "vectors.h"

namespace penstock {

// Queries of one sequence.
struct Span {
    int64_t row;       // of its first query
    int64_t num_rows;
    int64_t position;  // of its first query in the sequence: query i sees position + i + 1 tokens
    int64_t first_place;
    int64_t first_token;  // that lies there: those before it are gone, behind every query's window
};

struct Heads {
    const void* queries;
    void* out;
    const void* keys;
    const void* values;
    int64_t query_stride;  // values from row to row
    int64_t out_stride;
    int64_t key_stride;    // from token to token
    int64_t value_stride;
    int64_t num_kv_heads;
    int64_t group;         // query heads to a KV head
    int64_t value_dim;     // of a head's values
    int64_t window;        // tokens that a query sees up to its own; 0: all
    const float* sinks;    // by query head: a score that weighs as a key's does, and has no value; or none
    float scale;
    float soft_cap;        // scores become soft_cap * tanh(score / soft_cap); 0: they stay

    int64_t first_seen(int64_t position) const { return window && position >= window ? position - window + 1 : 0; }
};

struct HeadRows {
    const void* projected;  // rows of queries, keys, values, and whatever follows
    void* queries;          // [rows, heads, head_dim]
    void* keys;             // the cache: [places, kv_heads, head_dim]
    void* values;
    const void* cos;        // [rows, rotary_dim]
    const void* sin;        // with its sign
    const void* query_norm; // [head_dim], or none
    const void* key_norm;
    const Place* places;    // where the first `num_tokens` rows go
    int64_t num_rows;
    int64_t num_tokens;
    int64_t row_stride;
    int64_t num_heads;
    int64_t num_kv_heads;
    int64_t head_dim;
    int64_t rotary_dim;
    int32_t norm_is_float32;
    int32_t num_threads;
    float eps;
};

// A quantised weight [num_out, num_in], see quantised.cpp.
struct Weight {
    uint8_t* panels;
    int64_t num_out;
    int64_t num_in;  // a multiple of 32
    int32_t form;
    int32_t rounds_rows;  // to 8 bits, before they are multiplied with it; of forms that are blocks
};

// The form of panels in bfloat16: for each pair of inputs, the pairs of 32 outputs.
constexpr int32_t BFLOAT16 = 6;
// The same, for products whose sums are oneDNN's.
constexpr int32_t PACKED = 7;

// Rows of bfloat16, and where their products go.
struct Rows {
    const uint16_t* x;
    uint16_t* out;
    const uint16_t* bias;  // or none
    int64_t num_rows;
    int64_t x_stride;
    int64_t out_stride;
};

// Rows by a weight, `count` times with rows and a weight of their own. What is not canonical may be computed in the way
// that is fastest for a few rows.
void multiply(const Weight* weights, const Rows* rows, int64_t count, bool is_canonical, int num_threads);

// A layer's experts, and how a router's scores become the weights of those that are active.
struct Experts {
    const Weight* gate_up;     // of each expert
    const Weight* down;
    const float* choice_bias;  // of each expert, added where they are chosen; or none
    const float* expert_scales;  // of what comes out of each; or none
    int64_t num_experts;
    int64_t num_active;
    int64_t num_groups;        // of experts; those of the best groups alone are chosen from
    int64_t num_active_groups;
    int64_t group_best;        // a group is as good as its best so many experts together
    int32_t is_softmax;        // scores become chances by softmax, or else each by its sigmoid
    int32_t is_normalised;     // to a sum of 1
    int32_t gates_shared;      // what the shared expert made counts by the sigmoid of the score after those of experts
    float scale;               // of the weights
    int64_t most_places;       // visits of rows that there is room for, unless there are more rows

    int64_t num_places(int64_t num_rows) const {
        return std::min(num_rows * num_active, std::max(num_rows, most_places));
    }
};

struct ExpertPass {
    const uint16_t* x;       // [rows, hidden]
    const uint16_t* scores;  // [rows, experts | the shared expert's | ...]
    const uint16_t* shared;  // [rows, hidden], what the shared expert made of them; or none
    uint16_t* out;           // [rows, hidden]
    float* totals;           // [rows, hidden], room
    uint16_t* room;          // [places, 2 * hidden + 3 * width]
    int64_t num_rows;
    int64_t score_stride;
    int64_t shared_stride;
    int32_t is_canonical;
    int32_t num_threads;
};

}  // namespace penstock

extern "C" {
int penstock_attend(int is_bfloat16, int64_t head_dim, const penstock::Heads* heads, const penstock::Span* spans,
                    int64_t num_spans, const penstock::Place* places, int num_threads);
void penstock_add_norm(int is_bfloat16, const void* x, const void* delta, void* sum, void* out, int64_t num_rows,
                       int64_t size, const void* weight, int weight_is_float32, float eps, int num_threads);
void penstock_silu_and_mul(int is_bfloat16, const void* gate_up, void* out, int64_t num_rows, int64_t width,
                           int num_threads);
void penstock_experts(const penstock::Experts* experts, const penstock::ExpertPass* pass);
void penstock_place_heads(int is_bfloat16, const penstock::HeadRows* heads);
int penstock_quantised_linear(const penstock::Weight* weight, const uint16_t* x, uint16_t* out, const uint16_t* bias,
                              int64_t num_rows, int64_t x_stride, int64_t out_stride, int is_canonical,
                              int num_threads);
}
