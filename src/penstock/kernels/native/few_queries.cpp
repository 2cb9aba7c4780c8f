// Attention of few queries, as those of a decode: they would leave most lanes empty, so the lanes are keys, and then
// columns of the values. Each query's sums are formed in the order that attention.cpp forms them in, to the same bits.
//
// What counts is how fast keys and values come from memory. So they are read where they lie, once for all queries of
// their head, and all heads of a block one after the other, since those lie side by side. A large block is first read
// through in a row: of that, processors fetch more ahead by themselves than they can be asked for.
#include <algorithm>
#include <limits>
#include <type_traits>

#include "attention.h"

namespace penstock {
namespace {

// What the queries of a head have seen, as in attention.cpp. Columns are in the order that `column_of` tells.
template <int E>
struct alignas(64) Seen {
    float values[MOST_FEW][E];
    float largest[LANES];  // by query, in powers of two
    float weight[LANES];

    void clear(int num_rows) {
        std::memset(values, 0, num_rows * sizeof values[0]);
        std::memset(weight, 0, sizeof weight);
        for (float& score : largest) score = MINUS_INFINITY;
    }

    void add(const Seen& other, int num_rows) {
        alignas(64) float shrink[2][LANES];
        const Floats ours = load_floats(largest), theirs = load_floats(other.largest);
        const Floats both = larger(ours, theirs);
        const Floats a = exp2_of(minus(ours, both)), b = exp2_of(minus(theirs, both));
        store_floats(largest, both);
        store_floats(shrink[0], a);
        store_floats(shrink[1], b);
        auto join = [](float* x, const float* y, Floats a, Floats b) {
            store_floats(x, fma(load_floats(x), a, times(load_floats(y), b)));
        };
        join(weight, other.weight, a, b);
        for (int row = 0; row < num_rows; ++row) {
            const Floats a = same(shrink[0][row]), b = same(shrink[1][row]);
            for (int d = 0; d < E; d += LANES) join(&values[row][d], &other.values[row][d], a, b);
        }
    }
};

// Pairs of values come out of a load of 32 by halves of its quarters.
template <class T, int E>
constexpr int column_of(int at) {
    if (T::STEP == 1 || at >= E / 32 * 32) return at;
    const int lane = at % 16;
    return at / 32 * 32 + lane / 4 * 8 + at % 32 / 16 * 4 + lane % 4;
}

// The queries of one head, and where its keys and values begin.
template <class T, int D>
struct alignas(64) Queries {
    uint32_t words[MOST_FEW][D / T::STEP];
    int32_t first_seen[MOST_FEW];  // a query sees tokens [first_seen, end_seen)
    int32_t end_seen[MOST_FEW];
    const typename T::value* keys;
    const typename T::value* values;
    // Where its share of the next block begins, from that block's first value on.
    int64_t key_ahead, value_ahead;
    int64_t key_ahead_stride, value_ahead_stride;
};

// Up to 64 tokens: where each lies, in values from the first of the cache.
struct Tokens {
    int first;
    int count;
    int64_t next_key, next_value;  // where the next block most often begins
    int64_t key_offsets[BLOCK];
    int64_t value_offsets[BLOCK];
};

// Of R queries.
template <class T, int D, int E, int R>
struct Few {
    using value = typename T::value;
    static constexpr int WORDS = D / T::STEP;
    alignas(64) float scores[R][BLOCK];
    alignas(64) uint32_t weights[R][BLOCK / T::STEP];

    static void prefetch(const value* row, int size) {
        for (int d = 0; d < size; d += 64 / sizeof(value))
            __builtin_prefetch(row + d, 0, 2);
    }

    void score(const Queries<T, D>& queries, const Tokens& tokens) {
        for (int k = 0; k < tokens.count; k += LANES) {
            Floats sums[R];
            for (int r = 0; r < R; ++r) sums[r] = zeros();
#pragma GCC unroll 1
            for (int w = 0; w < WORDS; w += LANES) {
                Words rows[LANES], turned[LANES];
                if (k + LANES <= tokens.count) {
#pragma GCC unroll 16
                    for (int i = 0; i < LANES; ++i) rows[i] = load(queries.keys + tokens.key_offsets[k + i], w);
                } else {
                    for (int i = 0; i < LANES; ++i)
                        rows[i] = k + i < tokens.count ? load(queries.keys + tokens.key_offsets[k + i], w)
                                                       : zero_words();
                }
                transpose(rows, turned);
                constexpr int LAST = WORDS % LANES ? WORDS % LANES : LANES;
                const int num_words = w + LANES <= WORDS ? LANES : LAST;
#pragma GCC unroll 16
                for (int i = 0; i < LANES; ++i) {
                    if (WORDS % LANES && i >= num_words) break;
#pragma GCC unroll 8
                    for (int r = 0; r < R; ++r)
                        sums[r] = T::dot(sums[r], same_words(queries.words[r][w + i]), turned[i]);
                }
            }
            const value* next = queries.keys + tokens.next_key + queries.key_ahead + k * queries.key_ahead_stride;
            for (int i = 0; i < LANES; ++i) prefetch(next + i * queries.key_ahead_stride, D);
            for (int r = 0; r < R; ++r) store_floats(&scores[r][k], sums[r]);
        }
    }

    static Words load(const value* row, int w) {
        return T::words(row + w * T::STEP, first_lanes(WORDS - w));
    }

    // Scores become weights; what was seen before shrinks where there is a larger score now.
    void weigh(const Queries<T, D>& queries, const Tokens& tokens, const Scores& how, Seen<E>& seen) {
        const Floats scales = same(how.scale);
        alignas(64) float most[LANES], largest[LANES], shrink[LANES];
        for (int r = 0; r < LANES; ++r) most[r] = MINUS_INFINITY;
        for (int r = 0; r < R; ++r) {
            const int num_hidden = queries.first_seen[r] - tokens.first;
            const int num_seen = std::min(tokens.count, queries.end_seen[r] - tokens.first);
            Floats highest = same(MINUS_INFINITY);
            for (int k = 0; k < BLOCK; k += LANES) {
                const Mask visible = first_lanes(num_seen - k) & ~first_lanes(num_hidden - k);
                Floats score = load_floats(&scores[r][k]);
                if (how.cap > 0) score = how.capped(score);
                score = chosen(visible, score, same(MINUS_INFINITY));
                store_floats(&scores[r][k], score);
                highest = larger(highest, score);
            }
            most[r] = largest_of(highest);
        }
        const Floats before = load_floats(seen.largest);
        const Floats now = larger(before, times(load_floats(most), scales));
        const Floats shrinks = exp2_of(minus(before, now));
        store_floats(largest, now);
        store_floats(shrink, shrinks);
        store_floats(seen.largest, now);
        for (int r = 0; r < R; ++r)
            for (int k = 0; k < BLOCK; k += LANES) {
                const Floats score = times(load_floats(&scores[r][k]), scales);
                const Floats own = exp2_of(minus(score, same(largest[r])));
                store_floats(&scores[r][k], own);
                T::store_words(weights[r], k, own);
            }
        alignas(64) float sums[LANES] = {};
        for (int k = 0; k < tokens.count; ++k)
            for (int r = 0; r < R; ++r) sums[r] += scores[r][k];
        store_floats(seen.weight, fma(load_floats(seen.weight), shrinks, load_floats(sums)));
        if (differ(now, before)) {
            for (int r = 0; r < R; ++r)
                for (int d = 0; d < E; d += LANES)
                    store_floats(&seen.values[r][d], times(load_floats(&seen.values[r][d]), same(shrink[r])));
        }
    }

    // V vectors of columns from `d` on. A word's second token may be missing.
    template <int V>
    static void load_values(const value* first, const value* second, int d, Words* out) {
        if constexpr (T::STEP == 1) {
            for (int v = 0; v < V; ++v) out[v] = T::words(first + d + v * LANES, 0xffff);
        } else if constexpr (V == 1) {
            const auto wide = [d](const value* row) {
                return row ? load_first_halves(row + d, 0xffff) : zero_words();
            };
            out[0] = either(wide(first), shifted_left(wide(second), 16));
        } else {
            for (int v = 0; v < V; v += 2)
                T::load_pairs(first + d + v * LANES, second ? second + d + v * LANES : nullptr, out + v);
        }
    }

    template <int V>
    void add_columns(const Queries<T, D>& queries, const Tokens& tokens, int d, Seen<E>& seen) {
        Floats sums[R][V];
        for (int r = 0; r < R; ++r)
            for (int v = 0; v < V; ++v) sums[r][v] = load_floats(&seen.values[r][d + v * LANES]);
        auto add = [&](int word, const value* first, const value* second) __attribute__((always_inline)) {
            Words values[V];
            load_values<V>(first, second, d, values);
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r) {
                const Words weight = same_words(weights[r][word]);
#pragma GCC unroll 4
                for (int v = 0; v < V; ++v) sums[r][v] = T::dot(sums[r][v], weight, values[v]);
            }
        };
        const int num_whole = tokens.count / T::STEP;
        const value* next = queries.values + tokens.next_value + queries.value_ahead;
        for (int word = 0; word < num_whole; ++word) {
            const value* first = queries.values + tokens.value_offsets[word * T::STEP];
            const value* second = queries.values + tokens.value_offsets[word * T::STEP + T::STEP - 1];
            add(word, first, second);
            if (d == 0) {
                for (int i = 0; i < T::STEP; ++i, next += queries.value_ahead_stride) prefetch(next, E);
            }
        }
        if (tokens.count % T::STEP) add(num_whole, queries.values + tokens.value_offsets[tokens.count - 1], nullptr);
        for (int r = 0; r < R; ++r)
            for (int v = 0; v < V; ++v) store_floats(&seen.values[r][d + v * LANES], sums[r][v]);
    }

    void add_values(const Queries<T, D>& queries, const Tokens& tokens, Seen<E>& seen) {
        constexpr int WIDE = E % 64 == 0 ? 4 : 2;
        constexpr int MOST = R * WIDE <= SUM_VECTORS ? WIDE : R * 2 <= SUM_VECTORS ? 2 : 1;
        int d = 0;
        for (; d + MOST * LANES <= E; d += MOST * LANES) add_columns<MOST>(queries, tokens, d, seen);
        if constexpr (E % (MOST * LANES) != 0) add_columns<1>(queries, tokens, d, seen);
    }

    // In line always: as a call it takes up to 1.3 times as long.
    __attribute__((always_inline)) static void see(const Queries<T, D>& queries, const Tokens& tokens,
                                                   const Scores& how, Seen<E>& seen) {
        Few few;
        few.score(queries, tokens);
        few.weigh(queries, tokens, how, seen);
        few.add_values(queries, tokens, seen);
    }
};

constexpr int64_t LARGE_ROW = 1024;  // bytes of a token's keys

template <class T, int D, int E>
struct Sequence {
    using value = typename T::value;
    const Heads& heads;
    const Span& span;
    const Place* places;

    int num_rows() const { return span.num_rows * heads.group; }
    int num_tokens() const { return span.position + span.num_rows; }
    // Tokens [first_block, num_tokens) have all that the queries see.
    int first_block() const { return heads.first_seen(span.position) / BLOCK * BLOCK; }
    int first_segment() const { return first_block() / SEGMENT; }
    int end_segment() const { return (num_tokens() + SEGMENT - 1) / SEGMENT; }
    int64_t head(int64_t kv_head, int row) const { return kv_head * heads.group + row % heads.group; }
    int64_t offset(int64_t kv_head, int row, int64_t stride, int size) const {
        return (span.row + row / heads.group) * stride + head(kv_head, row) * size;
    }

    // What queries of a head have seen before the first token: nothing, or their sinks.
    void begin(int64_t kv_head, Seen<E>& total) const {
        total.clear(num_rows());
        if (!heads.sinks) return;
        for (int row = 0; row < num_rows(); ++row) {
            total.largest[row] = heads.sinks[head(kv_head, row)] * LOG2_E;
            total.weight[row] = 1;
        }
    }

    // What queries of KV heads [first_head, end_head) see of a segment.
    void see(int segment, int64_t first_head, int64_t end_head, Seen<E>* seen) const {
        static thread_local std::vector<Queries<T, D>> queries;
        queries.resize(end_head - first_head);
        const bool is_whole = end_head - first_head == heads.num_kv_heads;
        const bool is_large = is_whole && heads.num_kv_heads * D * int64_t(sizeof(value)) >= LARGE_ROW;
        for (int64_t head = first_head; head < end_head; ++head) {
            auto& own = queries[head - first_head];
            load(head, own);
            // All heads together read a whole block, and then best in the order in which it lies.
            own.key_ahead = is_whole ? head * (BLOCK - 1) * D : 0;
            own.key_ahead_stride = is_large ? 0 : is_whole ? D : heads.key_stride;
            own.value_ahead = is_whole ? head * (BLOCK - 1) * E : 0;
            own.value_ahead_stride = is_large ? 0 : is_whole ? E : heads.value_stride;
            seen[head - first_head].clear(MOST_FEW);
        }
        Tokens tokens;
        const Place* place = places + span.first_place;
        const int begin = std::max(segment * SEGMENT, first_block());
        int64_t skip = begin - span.first_token;
        while (skip >= place->num_tokens) skip -= place++->num_tokens;
        const int end = std::min((segment + 1) * SEGMENT, num_tokens());
        for (tokens.first = begin; tokens.first < end; tokens.first += BLOCK) {
            tokens.count = std::min(BLOCK, end - tokens.first);
            for (int k = 0; k < tokens.count; ++k, ++skip) {
                if (skip == place->num_tokens) {
                    ++place;
                    skip = 0;
                }
                tokens.key_offsets[k] = (place->start + skip) * heads.key_stride;
                tokens.value_offsets[k] = (place->start + skip) * heads.value_stride;
            }
            tokens.next_key = tokens.key_offsets[tokens.count - 1] + heads.key_stride;
            tokens.next_value = tokens.value_offsets[tokens.count - 1] + heads.value_stride;
            if (is_large) {
                read_through(heads.keys, tokens.key_offsets, tokens.count, heads.num_kv_heads * D);
                read_through(heads.values, tokens.value_offsets, tokens.count, heads.num_kv_heads * E);
            }
            for (int64_t head = 0; head < end_head - first_head; ++head)
                see_block(queries[head], tokens, seen[head]);
        }
    }

    // Apart, so that the loops of others stay as fast as they are.
    __attribute__((noinline)) static void read_through(const void* from, const int64_t* offsets, int count,
                                                       int64_t size) {
        for (int k = 0; k < count; ++k) {
            const auto* row = reinterpret_cast<const volatile uint8_t*>(static_cast<const value*>(from) + offsets[k]);
            for (int64_t at = 0; at < size * int64_t(sizeof(value)); at += 64) (void)row[at];
        }
    }

    void load(int64_t kv_head, Queries<T, D>& queries) const {
        std::memset(queries.words, 0, sizeof queries.words);
        for (int row = 0; row < MOST_FEW; ++row) {
            const int own = std::min(row, num_rows() - 1);
            const int64_t position = span.position + own / heads.group;
            queries.first_seen[row] = heads.first_seen(position);
            queries.end_seen[row] = position + 1;
            T::copy(static_cast<const value*>(heads.queries) + offset(kv_head, own, heads.query_stride, D), D,
                    queries.words[row]);
        }
        queries.keys = static_cast<const value*>(heads.keys) + kv_head * D;
        queries.values = static_cast<const value*>(heads.values) + kv_head * E;
    }

    void see_block(const Queries<T, D>& queries, const Tokens& tokens, Seen<E>& seen) const {
        const Scores how(heads);
        switch (num_rows()) {
            case 1: return Few<T, D, E, 1>::see(queries, tokens, how, seen);
            case 2: return Few<T, D, E, 2>::see(queries, tokens, how, seen);
            case 3: return Few<T, D, E, 3>::see(queries, tokens, how, seen);
            case 4: return Few<T, D, E, 4>::see(queries, tokens, how, seen);
            case 5:
            case 6: return Few<T, D, E, 6>::see(queries, tokens, how, seen);
            default: return Few<T, D, E, MOST_FEW>::see(queries, tokens, how, seen);
        }
    }

    void store(int64_t kv_head, const Seen<E>& total) const {
        for (int row = 0; row < num_rows(); ++row) {
            alignas(64) value turned[E];
            const Floats weight = same(total.weight[row]);
            for (int d = 0; d < E; d += LANES)
                T::store(&turned[d], 0xffff, over(load_floats(&total.values[row][d]), weight));
            value* out = static_cast<value*>(heads.out) + offset(kv_head, row, heads.out_stride, E);
            for (int d = 0; d < E; ++d) out[column_of<T, E>(d)] = turned[d];
        }
    }
};

// Every segment of a sequence is work of its own, for all heads or, where that is too little work for the threads, for
// some. Segments are added up in their order all the same; they are taken in waves, so that what they gave needs
// little room.
template <class T, int D, int E>
void attend_few_of(const Heads& heads, const std::vector<const Span*>& spans, const Place* places, int num_threads) {
    struct Part {
        int span, segment;
        int64_t first_head, end_head;
        int64_t at;  // of its first head in `seen`
    };
    constexpr int64_t ROOM = int64_t(16) << 20;
    const int num_spans = spans.size();
    const int64_t num_heads = heads.num_kv_heads;
    auto sequence = [&](int i) { return Sequence<T, D, E>{heads, *spans[i], places}; };
    int64_t begin = std::numeric_limits<int64_t>::max(), end = 0, total_segments = 0;
    for (int i = 0; i < num_spans; ++i) {
        begin = std::min<int64_t>(begin, sequence(i).first_segment());
        end = std::max<int64_t>(end, sequence(i).end_segment());
        total_segments += sequence(i).end_segment() - sequence(i).first_segment();
    }
    const int64_t wave = std::max<int64_t>(1, ROOM / (num_spans * num_heads * sizeof(Seen<E>)));
    const int64_t wanted_splits = (4 * std::abs(num_threads) + total_segments - 1) / total_segments;
    const int64_t splits = std::min(num_heads, wanted_splits);
    std::vector<Seen<E>> totals(num_spans * num_heads), seen;
    std::vector<Part> parts;
    std::vector<int64_t> first_seen(num_spans);
    for (int64_t first = begin; first < end; first += wave) {
        parts.clear();
        int64_t num_seen = 0;
        for (int i = 0; i < num_spans; ++i) {
            first_seen[i] = num_seen;
            const int64_t last = std::min<int64_t>(first + wave, sequence(i).end_segment());
            for (int64_t segment = std::max<int64_t>(first, sequence(i).first_segment()); segment < last;
                 ++segment, num_seen += num_heads)
                for (int64_t s = 0; s < splits; ++s) {
                    const int64_t head = s * num_heads / splits;
                    parts.push_back({i, int(segment), head, (s + 1) * num_heads / splits, num_seen + head});
                }
        }
        if (int64_t(seen.size()) < num_seen) seen.resize(num_seen);
        for_pieces(parts.size(), num_threads, [&](int64_t p) {
            const Part& part = parts[p];
            sequence(part.span).see(part.segment, part.first_head, part.end_head, &seen[part.at]);
        });
        for_pieces(num_spans * num_heads, num_seen < 16 ? 1 : num_threads, [&](int64_t i) {
            const auto own = sequence(i / num_heads);
            const int64_t from = std::max<int64_t>(first, own.first_segment());
            const int64_t last = std::min<int64_t>(first + wave, own.end_segment());
            if (first == begin) own.begin(i % num_heads, totals[i]);
            for (int64_t segment = from; segment < last; ++segment)
                totals[i].add(seen[first_seen[i / num_heads] + (segment - from) * num_heads + i % num_heads],
                              own.num_rows());
            if (first + wave >= end) own.store(i % num_heads, totals[i]);
        });
    }
}

}  // namespace

void attend_few(bool is_bfloat16, int64_t head_dim, const Heads& heads, const std::vector<const Span*>& spans,
                const Place* places, int num_threads) {
    with_head_dims(head_dim, heads.value_dim, [&](auto size, auto value_size) {
        if (!is_bfloat16) attend_few_of<DotFloat32, size, value_size>(heads, spans, places, num_threads);
        if (is_bfloat16) attend_few_of<DotBfloat16, size, value_size>(heads, spans, places, num_threads);
    });
}

}  // namespace penstock
