// Attention of spans of queries to their sequences' keys and values, which lie in a cache in a few places each.
//
// The lanes of a vector are queries; keys are walked one after the other, in blocks of 64 that are summed up in
// segments of 256, both counted from the sequence's first token. So a query's sums are formed in one order, whatever
// queries stand beside it, whatever chunk it came in, and however the work is shared among threads: its bits depend
// on its own sequence alone. Keys that a lane does not see weigh nothing, to the bit: so blocks before the window of
// all lanes are not read at all.
#include <algorithm>
#include <limits>
#include <type_traits>
#include <vector>

#include "attention.h"

namespace penstock {
namespace {

constexpr int WIDE = 2;       // vectors of queries that are taken together, where there are enough
constexpr int MOST_TILES = 4; // such pairs of vectors that share the reading of a block

// 64 tokens of one KV head: keys as they are, values in words of STEP tokens.
template <class T, int D, int E>
struct alignas(64) Block {
    uint32_t keys[BLOCK][D / T::STEP];
    uint32_t values[BLOCK / T::STEP][E];
};

// What lanes have seen: sums of values by their weights, which are relative to the largest score.
template <int E, int WIDTH>
struct alignas(64) Seen {
    float values[E][WIDTH];
    float largest[WIDTH];  // in powers of two
    float weight[WIDTH];

    void clear() {
        std::memset(this, 0, sizeof *this);
        for (float& score : largest) score = MINUS_INFINITY;
    }

    void add(const Seen& other) {
        for (int at = 0; at < WIDTH; at += LANES) {
            const Floats ours = load_floats(&largest[at]), theirs = load_floats(&other.largest[at]);
            const Floats both = larger(ours, theirs);
            const Floats a = exp2_of(minus(ours, both)), b = exp2_of(minus(theirs, both));
            store_floats(&largest[at], both);
            auto join = [&](float* x, const float* y) {
                store_floats(x, fma(load_floats(x), a, times(load_floats(y), b)));
            };
            join(&weight[at], &other.weight[at]);
            for (int d = 0; d < E; ++d) join(&values[d][at], &other.values[d][at]);
        }
    }
};

// Queries of one KV head in V vectors, [D][lanes] in words, and what they have seen of a segment.
template <class T, int D, int E, int V>
struct alignas(64) Tile {
    uint32_t query[D / T::STEP][V * LANES];
    int32_t first_seen[V * LANES];  // a lane sees tokens [first_seen, end_seen)
    int32_t end_seen[V * LANES];
    Seen<E, V * LANES> seen;
    Seen<E, V * LANES> total;       // of the segments before
};

template <class T, int D, int E, int V, int K>
inline void score_keys(const uint32_t (*keys)[D / T::STEP], const Tile<T, D, E, V>& tile, float (*scores)[V * LANES]) {
    Floats sums[K][V];
    for (int k = 0; k < K; ++k)
        for (int v = 0; v < V; ++v) sums[k][v] = zeros();
    for (int d = 0; d < D / T::STEP; ++d) {
        Words query[V];
        for (int v = 0; v < V; ++v) query[v] = load_words(&tile.query[d][v * LANES]);
#pragma GCC unroll 16
        for (int k = 0; k < K; ++k) {
            const Words key = same_words(keys[k][d]);
#pragma GCC unroll 4
            for (int v = 0; v < V; ++v) sums[k][v] = T::dot(sums[k][v], query[v], key);
        }
    }
    for (int k = 0; k < K; ++k)
        for (int v = 0; v < V; ++v) store_floats(&scores[k][v * LANES], sums[k][v]);
}

// Add W columns of the values, by the weights of `num_words` words of tokens.
template <class T, int E, int V, int W>
inline void add_values(const uint32_t* values, const uint32_t (*weights)[V * LANES], int num_words,
                       float (*seen)[V * LANES]) {
    Floats sums[W][V];
    for (int w = 0; w < W; ++w)
        for (int v = 0; v < V; ++v) sums[w][v] = load_floats(&seen[w][v * LANES]);
    for (int k = 0; k < num_words; ++k, values += E) {
        Words weight[V];
        for (int v = 0; v < V; ++v) weight[v] = load_words(&weights[k][v * LANES]);
#pragma GCC unroll 16
        for (int w = 0; w < W; ++w) {
            const Words value = same_words(values[w]);
#pragma GCC unroll 4
            for (int v = 0; v < V; ++v) sums[w][v] = T::dot(sums[w][v], weight[v], value);
        }
    }
    for (int w = 0; w < W; ++w)
        for (int v = 0; v < V; ++v) store_floats(&seen[w][v * LANES], sums[w][v]);
}

// Tokens [first, first + count) of the sequence are in `block`.
template <class T, int D, int E, int V>
void see_block(const Block<T, D, E>& block, int first, int count, const Scores& how, Tile<T, D, E, V>& tile) {
    constexpr int AT_ONCE = SUM_VECTORS / V;
    alignas(64) float scores[BLOCK][V * LANES];
    for (int k = 0; k < count; k += AT_ONCE) score_keys<T, D, E, V, AT_ONCE>(&block.keys[k], tile, &scores[k]);

    if (how.cap > 0) {
        for (int k = 0; k < count; ++k)
            for (int at = 0; at < V * LANES; at += LANES)
                store_floats(&scores[k][at], how.capped(load_floats(&scores[k][at])));
    }

    auto& seen = tile.seen;
    const Floats scales = same(how.scale);
    bool grows = false;
    Floats largest[V], shrink[V], weight[V];
    for (int v = 0; v < V; ++v) {
        const int at = v * LANES;
        const Words first_seen = load_words(&tile.first_seen[at]);
        const Words end_seen = load_words(&tile.end_seen[at]);
        Floats most = same(MINUS_INFINITY);
        if (is_less(end_seen, same_words(first + count)) |
            is_greater(first_seen, same_words(first))) {
            for (int k = 0; k < count; ++k) {
                const Words token = same_words(first + k);
                const Mask hidden =
                    is_at_most(end_seen, token) | is_greater(first_seen, token);
                store_floats(&scores[k][at], chosen(hidden, same(MINUS_INFINITY), load_floats(&scores[k][at])));
            }
        }
        for (int k = 0; k < count; ++k) most = larger(most, load_floats(&scores[k][at]));
        const Floats before = load_floats(&seen.largest[at]);
        largest[v] = larger(before, times(most, scales));
        shrink[v] = exp2_of(minus(before, largest[v]));
        grows |= differ(largest[v], before);
        store_floats(&seen.largest[at], largest[v]);
        weight[v] = zeros();
    }

    // The weights lie where scores lay that are not needed any more.
    auto* weights = reinterpret_cast<uint32_t(*)[V * LANES]>(&scores[0][0]);
    const int num_words = (count + T::STEP - 1) / T::STEP;
    for (int word = 0; word < num_words; ++word) {
        for (int v = 0; v < V; ++v) {
            auto weight_of = [&](int k) {
                // Rounded as the largest was, so that none is above it.
                const Floats score = times(load_floats(&scores[k][v * LANES]), scales);
                return exp2_of(minus(score, largest[v]));
            };
            const int k = word * T::STEP;
            const Floats one = weight_of(k);
            weight[v] = plus(weight[v], one);
            if constexpr (T::STEP == 1) {
                store_floats(&scores[k][v * LANES], one);
            } else {
                const Floats next = k + 1 < count ? weight_of(k + 1) : zeros();
                weight[v] = plus(weight[v], next);
                store_words(&weights[word][v * LANES], T::paired(one, next));
            }
        }
    }
    for (int v = 0; v < V; ++v) {
        float* sum = &seen.weight[v * LANES];
        store_floats(sum, fma(load_floats(sum), shrink[v], weight[v]));
    }
    if (grows) {  // else it is by 1
        for (int d = 0; d < E; ++d)
            for (int v = 0; v < V; ++v) {
                float* value = &seen.values[d][v * LANES];
                store_floats(value, times(load_floats(value), shrink[v]));
            }
    }
    for (int d = 0; d < E; d += AT_ONCE)
        add_values<T, E, V, AT_ONCE>(&block.values[0][d], weights, num_words, &seen.values[d]);
}

// Read tokens [first, first + count) of a sequence, from wherever they lie: the first is `skip` tokens behind the
// beginning of the first place.
template <class T, int D, int E>
void read_block(const Heads& heads, const Place* place, int64_t kv_head, int64_t skip, int count,
                Block<T, D, E>& block) {
    using value = typename T::value;
    const value* keys = static_cast<const value*>(heads.keys) + kv_head * D;
    const value* values = static_cast<const value*>(heads.values) + kv_head * E;
    const value* value_of[BLOCK];
    while (skip >= place->num_tokens) skip -= place++->num_tokens;
    for (int k = 0; k < count; ++k, ++skip) {
        if (skip == place->num_tokens) {
            ++place;
            skip = 0;
        }
        const value* key = keys + (place->start + skip) * heads.key_stride;
        T::copy(key, D, block.keys[k]);
        value_of[k] = values + (place->start + skip) * heads.value_stride;
        // The next block most often lies behind this one.
        const auto prefetch = [](const value* row, int size) {
            for (int d = 0; d < size; d += 64 / sizeof(value))
                __builtin_prefetch(row + d, 0, 3);
        };
        prefetch(key + BLOCK * heads.key_stride, D);
        prefetch(value_of[k] + BLOCK * heads.value_stride, E);
    }
    // Keys are scored several at a time.
    for (int k = count; k % LANES; ++k) std::memset(block.keys[k], 0, sizeof block.keys[k]);
    if constexpr (T::STEP == 1) {
        for (int k = 0; k < count; ++k) T::copy(value_of[k], E, block.values[k]);
    } else {
        for (int k = 0; k < count; k += 2)
            for (int d = 0; d < E; d += LANES) {
                const auto word_of = [d](const value* row) { return load_first_halves(row + d, 0xffff); };
                Words word = word_of(value_of[k]);
                if (k + 1 < count) word = either(word, shifted_left(word_of(value_of[k + 1]), 16));
                store_words(&block.values[k / 2][d], word);
            }
    }
}

// Some of a span's queries for one KV head: rows of its group's heads, token by token.
struct Item {
    const Span* span;
    const Place* places;
    int64_t kv_head;
    int64_t first_row;
    int num_rows;
};

template <class T, int D, int E, int V>
struct Work {
    using value = typename T::value;
    const Heads& heads;
    const Item& item;

    int64_t position(int row) const { return item.span->position + (item.first_row + row) / heads.group; }
    // Tokens [first_block, num_tokens) have all that the rows see.
    int first_block() const { return heads.first_seen(position(0)) / BLOCK * BLOCK; }
    int num_tokens() const { return position(item.num_rows - 1) + 1; }
    int first_segment() const { return first_block() / SEGMENT; }
    int end_segment() const { return (num_tokens() + SEGMENT - 1) / SEGMENT; }
    int num_tiles() const { return (item.num_rows + V * LANES - 1) / (V * LANES); }
    int64_t head(int row) const { return item.kv_head * heads.group + (item.first_row + row) % heads.group; }

    int64_t offset(int row, int64_t stride, int size) const {
        return (item.span->row + (item.first_row + row) / heads.group) * stride + head(row) * size;
    }

    void load(Tile<T, D, E, V>* tiles) const {
        constexpr int NUM_WORDS = D / T::STEP;
        for (int row = 0; row < num_tiles() * V * LANES; ++row) {
            const int64_t own = position(std::min(row, item.num_rows - 1));
            tiles[row / (V * LANES)].first_seen[row % (V * LANES)] = heads.first_seen(own);
            tiles[row / (V * LANES)].end_seen[row % (V * LANES)] = own + 1;
        }
        for (int row = 0; row < num_tiles() * V * LANES; row += LANES)
            for (int d = 0; d < NUM_WORDS; d += LANES) {
                Words rows[LANES], turned[LANES];
                for (int i = 0; i < LANES; ++i)
                    rows[i] = row + i < item.num_rows
                                  ? T::words(static_cast<const value*>(heads.queries) +
                                                 offset(row + i, heads.query_stride, D) + d * T::STEP,
                                             first_lanes(NUM_WORDS - d))
                                  : zero_words();
                transpose(rows, turned);
                auto* to = &tiles[row / (V * LANES)].query[d];
                for (int i = 0; i < std::min(LANES, NUM_WORDS - d); ++i)
                    store_words(to[i] + row % (V * LANES), turned[i]);
            }
    }

    // What lanes from a row on have seen before the first token: nothing, or their heads' sinks.
    void begin(int first_row, Seen<E, V * LANES>& total) const {
        total.clear();
        if (!heads.sinks) return;
        for (int lane = 0; lane < V * LANES; ++lane) {
            total.largest[lane] = heads.sinks[head(first_row + lane)] * LOG2_E;
            total.weight[lane] = 1;
        }
    }

    // What the tiles see of a segment.
    void see(int segment, Tile<T, D, E, V>* tiles) const {
        static thread_local Block<T, D, E> block;
        const Scores how(heads);
        const int end = std::min((segment + 1) * SEGMENT, num_tokens());
        for (int t = 0; t < num_tiles(); ++t) tiles[t].seen.clear();
        for (int first = std::max(segment * SEGMENT, first_block()); first < end; first += BLOCK) {
            const int count = std::min(BLOCK, end - first);
            read_block<T, D, E>(heads, item.places, item.kv_head, first - item.span->first_token, count, block);
            for (int t = 0; t < num_tiles(); ++t) {
                const int own = position(std::min((t + 1) * V * LANES, item.num_rows) - 1) + 1 - first;  // that it sees
                if (own > 0) see_block(block, first, std::min(count, own), how, tiles[t]);
            }
        }
    }

    void store(int first_row, const Seen<E, V * LANES>& total) const {
        for (int at = 0; at < V * LANES; at += LANES) {
            const Floats weight = load_floats(&total.weight[at]);
            const int count = std::min(LANES, item.num_rows - first_row - at);
            for (int d = 0; d < E; d += LANES) {
                Words values[LANES], turned[LANES];
                for (int i = 0; i < LANES; ++i)
                    values[i] = as_words(over(load_floats(&total.values[d + i][at]), weight));
                transpose(values, turned);
                for (int i = 0; i < count; ++i)
                    T::store(static_cast<value*>(heads.out) + offset(first_row + at + i, heads.out_stride, E) + d,
                             0xffff, as_floats(turned[i]));
            }
        }
    }

    void run() const {
        static thread_local Tile<T, D, E, V> tiles[MOST_TILES];
        load(tiles);
        for (int t = 0; t < num_tiles(); ++t) begin(t * V * LANES, tiles[t].total);
        for (int segment = first_segment(); segment < end_segment(); ++segment) {
            see(segment, tiles);
            for (int t = 0; t < num_tiles(); ++t) tiles[t].total.add(tiles[t].seen);
        }
        for (int t = 0; t < num_tiles(); ++t) store(t * V * LANES, tiles[t].total);
    }
};

// Few items, or one that is far longer than the others: each segment is work of its own. Segments are added up in
// their order all the same. They are taken in waves, so that what they gave needs little room.
template <class T, int D, int E>
void attend_by_segment(const Heads& heads, const std::vector<Item>& items, int num_threads) {
    using Wide = Work<T, D, E, WIDE>;
    using Narrow = Work<T, D, E, 1>;
    struct Part {
        int item, segment;
    };
    constexpr size_t ROOM = size_t(16) << 20;
    const int num_items = items.size();
    // Wide enough for either kind; a narrow one uses the beginning.
    std::vector<Seen<E, WIDE * LANES>> totals(num_items);
    const int wave = std::max<int>(1, ROOM / (num_items * sizeof totals[0]));
    int begin = std::numeric_limits<int>::max(), end = 0;
    for (const Item& item : items) {
        begin = std::min(begin, Narrow{heads, item}.first_segment());
        end = std::max(end, Narrow{heads, item}.end_segment());
    }
    std::vector<Seen<E, WIDE * LANES>> seen(size_t(num_items) * std::min(wave, end - begin));
    std::vector<Part> parts;
    auto narrow = [](auto& wide) -> Seen<E, LANES>& { return reinterpret_cast<Seen<E, LANES>&>(wide); };
    for (int i = 0; i < num_items; ++i) {
        if (items[i].num_rows > LANES)
            Wide{heads, items[i]}.begin(0, totals[i]);
        else
            Narrow{heads, items[i]}.begin(0, narrow(totals[i]));
    }
    for (int first = begin; first < end; first += wave) {
        parts.clear();
        std::vector<int> first_part;
        for (int i = 0; i < num_items; ++i) {
            first_part.push_back(parts.size());
            const Narrow work{heads, items[i]};
            const int last = std::min(first + wave, work.end_segment());
            for (int segment = std::max(first, work.first_segment()); segment < last; ++segment)
                parts.push_back({i, segment});
        }
        first_part.push_back(parts.size());
        for_pieces(parts.size(), num_threads, [&](int64_t p) {
            const Item& item = items[parts[p].item];
            if (item.num_rows > LANES) {
                static thread_local Tile<T, D, E, WIDE> tile;
                Wide{heads, item}.load(&tile);
                Wide{heads, item}.see(parts[p].segment, &tile);
                seen[p] = tile.seen;
            } else {
                static thread_local Tile<T, D, E, 1> tile;
                Narrow{heads, item}.load(&tile);
                Narrow{heads, item}.see(parts[p].segment, &tile);
                narrow(seen[p]) = tile.seen;
            }
        });
        for_pieces(num_items, num_threads, [&](int64_t i) {
            const bool is_last = first + wave >= end;
            for (int p = first_part[i]; p < first_part[i + 1]; ++p) {
                if (items[i].num_rows > LANES)
                    totals[i].add(seen[p]);
                else
                    narrow(totals[i]).add(narrow(seen[p]));
            }
            if (is_last && items[i].num_rows > LANES) Wide{heads, items[i]}.store(0, totals[i]);
            if (is_last && items[i].num_rows <= LANES) Narrow{heads, items[i]}.store(0, narrow(totals[i]));
        });
    }
}

// A span's rows for each KV head, up to `most_rows` in an item.
std::vector<Item> cut(const Heads& heads, const std::vector<const Span*>& spans, const Place* places, int most_rows) {
    std::vector<Item> items;
    for (const Span* span : spans) {
        const int64_t num_rows = span->num_rows * heads.group;
        for (int64_t kv_head = 0; kv_head < heads.num_kv_heads; ++kv_head)
            for (int64_t row = 0; row < num_rows; row += most_rows)
                items.push_back({span, places + span->first_place, kv_head, row,
                                 static_cast<int>(std::min<int64_t>(most_rows, num_rows - row))});
    }
    return items;
}

template <class T, int D, int E>
void attend(const Heads& heads, const std::vector<const Span*>& spans, const Place* places, int num_threads) {
    std::vector<Item> items;
    int num_tiles = MOST_TILES;
    const auto is_even = [&] {  // whether no item has so many tokens and queries that threads would not end together
        int64_t total = 0, largest = 0;
        items = cut(heads, spans, places, num_tiles * WIDE * LANES);
        for (const Item& item : items) {
            const Work<T, D, E, 1> work{heads, item};
            const int64_t size = int64_t(work.num_tiles()) * (work.num_tokens() - work.first_block());
            total += size;
            largest = std::max(largest, size);
        }
        return largest * 4 * std::abs(num_threads) <= total || std::abs(num_threads) == 1;
    };
    while (!is_even())
        if ((num_tiles /= 2) == 1)
            return attend_by_segment<T, D, E>(heads, cut(heads, spans, places, WIDE * LANES), num_threads);
    // The last of a span see the most: they go first, so that threads end together.
    for_pieces(items.size(), num_threads, [&](int64_t piece) {
        const Item& item = items[items.size() - 1 - piece];
        if (item.num_rows > LANES)
            Work<T, D, E, WIDE>{heads, item}.run();
        else
            Work<T, D, E, 1>{heads, item}.run();
    });
}

}  // namespace
}  // namespace penstock

// Whether there is code for the dtype and the heads' sizes; it is run where there are spans.
extern "C" int penstock_attend(int is_bfloat16, int64_t head_dim, const penstock::Heads* heads,
                               const penstock::Span* spans, int64_t num_spans, const penstock::Place* places,
                               int num_threads) {
    using namespace penstock;
    std::vector<const Span*> few, many;
    for (const Span* span = spans; span < spans + num_spans; ++span)
        (span->num_rows * heads->group <= MOST_FEW ? few : many).push_back(span);
    return with_head_dims(head_dim, heads->value_dim, [&](auto size, auto value_size) {
        if (!few.empty()) attend_few(is_bfloat16, head_dim, *heads, few, places, num_threads);
        if (many.empty()) return;
        if (!is_bfloat16) attend<DotFloat32, size, value_size>(*heads, many, places, num_threads);
        if (is_bfloat16) attend<DotBfloat16, size, value_size>(*heads, many, places, num_threads);
    });
}
