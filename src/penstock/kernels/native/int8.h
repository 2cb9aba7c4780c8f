// Rows rounded to 8 bits by group, times quants as they are: a part of quantised.cpp.
//
// A row's group of inputs x becomes a scale and bytes, x = scale * byte: 32 inputs, or 256 where so many of the weight's
// share what their scales are multiples of. With quants that count from 0, the sum of a group's products is one of
// integers: it is exact, and no order of its terms makes another. So is the sum of those by scales that are integers.
// What differs between few rows and many is therefore how much is loaded for it, and no bit.
#pragma once

// What a form's quants are as bytes from 0 to MOST, and what counts as 0 of those.
template <class F>
struct ByteQuants {
    static constexpr int ZERO = F::KIND == Values::NUMBERS ? F::ZERO : F::KIND == Values::FLOATS ? 12 : 127;
    static constexpr int MOST = F::KIND == Values::NUMBERS ? (1 << F::BITS) - 1 : F::KIND == Values::FLOATS ? 24 : 255;
};
template <>
struct ByteQuants<Q8_0> {
    static constexpr int ZERO = 128, MOST = 255;
};

// Blocks of a row that share a scale.
template <class F>
constexpr int ROUNDED = F::IS_SHARED ? SHARING : 1;

// A row's group in words: bytes, in the order in which `byte_quants` takes them; the scale; of each of the weight's
// groups within what its minimum is multiplied with, as a float, or as 16 bits where minimums are integers. Where the
// form has none: what the zeros of its quants make, as an integer.
template <class F>
struct ByteGroup {
    static constexpr int GROUPS = ROUNDED<F> * F::GROUPS;
    static constexpr bool HAS_PAIRS = F::IS_SHARED && F::HAS_MINIMUM;
    uint32_t bytes[ROUNDED<F>][BLOCK / 4];
    float scale;
    uint32_t sums[HAS_PAIRS ? GROUPS / 2 : GROUPS];
};

template <class F>
int64_t byte_row_words(int64_t num_blocks) {
    return (num_blocks + ROUNDED<F> - 1) / ROUNDED<F> * sizeof(ByteGroup<F>) / 4;
}

template <class F>
void round_row(const uint16_t* x, int64_t num_blocks, ByteGroup<F>* group) {
    uint8_t order[16];  // of each byte, the input of 16
    for (int k = 0; k < 16; ++k) {
        constexpr int INPUTS = 2 * F::LOAD_PAIRS;  // of a word of quants
        const int bit = bit_of<F>(k % INPUTS);
        order[k / INPUTS * INPUTS + bit % 8 / F::LOW_BITS * 4 + bit / 8] = k;
    }
    constexpr int SIZE = BLOCK / F::GROUPS;
    for (int64_t b = 0; b < num_blocks; b += ROUNDED<F>, ++group, x += ROUNDED<F> * BLOCK) {
        const int count = std::min<int64_t>(ROUNDED<F>, num_blocks - b) * BLOCK;
        if (count < ROUNDED<F> * BLOCK) std::memset(group, 0, sizeof *group);
        uint16_t most = 0;  // in bits, of which those of no number are more than any number's
        for (int k = 0; k < count; ++k) most = std::max<uint16_t>(most, x[k] & 0x7fff);
        const uint32_t bits = uint32_t(most) << 16;
        float size;
        std::memcpy(&size, &bits, sizeof size);
        const Floats inverse = same(size > 1e-30f ? 127 / size : 0);
        group->scale = size / 127;
        for (int g = 0; g < count / SIZE; ++g) {
            Floats total = zeros();  // of whole numbers, which are exact
            for (int k = g * SIZE; k < (g + 1) * SIZE; k += LANES) {
                const Words words = rounded_words(times(Bfloat16::load(x + k, 0xffff), inverse));
                store_bytes(reinterpret_cast<int8_t*>(group->bytes) + k, words, order);
                total = plus(total, converted(words));
            }
            const float sum = sum_of(total);
            if (ByteGroup<F>::HAS_PAIRS) {
                reinterpret_cast<int16_t*>(group->sums)[g] = sum;
            } else if (F::HAS_MINIMUM) {
                std::memcpy(group->sums + g, &sum, sizeof sum);
            } else {
                group->sums[g] = -ByteQuants<F>::ZERO * int(sum);
            }
        }
    }
}

// The j-th four quants of each output in a load, of which there are 4 or 8.
template <class F>
inline Words byte_quants(const Loaded& loaded, int load, int j) {
    if constexpr (F::BITS == 8) return sum_of_bytes(loaded.low, same_words(ByteQuants<F>::ZERO * 0x01010101u));
    const Words quants = bytes_of<F>(loaded, load * 2 * F::LOAD_PAIRS + 2 * j);
    if constexpr (F::KIND != Values::NUMBERS) {
        alignas(16) uint8_t values[16];
        for (int i = 0; i < 16; ++i) values[i] = F::value_of(i) + ByteQuants<F>::ZERO;
        return looked_up_bytes(quants, values);
    }
    return quants;
}

template <class F>
using GroupSum = ByteSum<ByteQuants<F>::MOST>;

// The sums of group `g` of a block, R rows by V vectors of outputs of a panel; they begin as `sums` are.
template <class F, int R, int V>
__attribute__((always_inline)) inline void add_group(const uint8_t* block, int vector, int g,
                                                     const uint32_t* const (&bytes)[R], GroupSum<F> (&sums)[R][V]) {
    constexpr int GROUP_LOADS = F::LOADS / F::GROUPS, PARTS = F::LOAD_PAIRS / 2, STEPS = GROUP_LOADS * PARTS;
#pragma GCC unroll 8
    for (int load = 0; load < GROUP_LOADS; ++load) {
        Loaded loads[V];
        for (int v = 0; v < V; ++v) loads[v] = load_quants<F>(block, vector + v, g * GROUP_LOADS + load);
#pragma GCC unroll 2
        for (int j = 0; j < PARTS; ++j) {
            Words quants[V];
            for (int v = 0; v < V; ++v) quants[v] = byte_quants<F>(loads[v], g * GROUP_LOADS + load, j);
            const int step = load * PARTS + j;
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r) {
                const Words own = same_words(bytes[r][g * STEPS + step]);
                for (int v = 0; v < V; ++v) sums[r][v].add(quants[v], own, step, STEPS);
            }
        }
    }
}

// R rows by V vectors of outputs of a panel.
template <class F, int R, int V>
inline void multiply_bytes(const uint8_t* block, int64_t num_blocks, const Inputs& inputs, int64_t first, int vector,
                           Floats (*totals)[V]) {
    const bool is_first = first == 0 && vector == 0;  // to read the panel
    const ByteGroup<F>* x[R];
    for (int r = 0; r < R; ++r) {
        x[r] = reinterpret_cast<const ByteGroup<F>*>(inputs.row(first + r));
        for (int v = 0; v < V; ++v) totals[r][v] = zeros();
    }
    Shared<F> shared;
    for (int64_t b = 0; b < num_blocks; b += ROUNDED<F>) {
        shared.read(block, b);
        Floats of_blocks[R][V];
        if constexpr (F::IS_SHARED) {
            const int count = std::min<int64_t>(ROUNDED<F>, num_blocks - b);
            Words scaled[R][V], low[R][V];
            for (int r = 0; r < R; ++r)
                for (int v = 0; v < V; ++v) scaled[r][v] = low[r][v] = zero_words();
            for (int i = 0; i < count; ++i) {
                const uint8_t* own = block + i * F::BLOCK_BYTES;
                if (is_first) prefetch<F>(own);
#pragma GCC unroll 2
                for (int g = 0; g < F::GROUPS; ++g) {
                    GroupSum<F> sums[R][V];
                    const uint32_t* bytes[R];
#pragma GCC unroll 8
                    for (int r = 0; r < R; ++r) {
                        bytes[r] = x[r]->bytes[i];
                        for (int v = 0; v < V; ++v)
                            sums[r][v].begin(F::HAS_MINIMUM ? zero_words() : same_words(x[r]->sums[i * F::GROUPS + g]));
                    }
                    add_group<F, R, V>(own, vector, g, bytes, sums);
#pragma GCC unroll 2
                    for (int v = 0; v < V; ++v) {
                        const Words scale = Shared<F>::whole_scale(own, g, vector + v);
#pragma GCC unroll 8
                        for (int r = 0; r < R; ++r)
                            scaled[r][v] = sum_of_words(scaled[r][v], product_of_words(sums[r][v].words, scale));
                    }
                }
            }
            if constexpr (F::HAS_MINIMUM)
                for (int g = 0; g < count * F::GROUPS; g += 2)
#pragma GCC unroll 2
                    for (int v = 0; v < V; ++v) {
                        const auto minimum = [&](int of) {
                            const uint8_t* own = block + of / F::GROUPS * F::BLOCK_BYTES;
                            return Shared<F>::whole_minimum(own, of % F::GROUPS, vector + v);
                        };
                        Words pair = both(minimum(g), same_words(0xffff));
                        if (g + 1 < count * F::GROUPS) pair = either(pair, shifted_left(minimum(g + 1), 16));
#pragma GCC unroll 8
                        for (int r = 0; r < R; ++r)
                            low[r][v] = sum_of_words(low[r][v], sum_of_pairs(pair, same_words(x[r]->sums[g / 2])));
                    }
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r)
                for (int v = 0; v < V; ++v) {
                    of_blocks[r][v] = times(shared.scales[vector + v], converted(scaled[r][v]));
                    if constexpr (F::HAS_MINIMUM)
                        of_blocks[r][v] = fma(shared.minimums[vector + v], converted(low[r][v]), of_blocks[r][v]);
                }
            block += count * F::BLOCK_BYTES;
        } else {
            if (is_first) prefetch<F>(block);
#pragma GCC unroll 2
            for (int g = 0; g < F::GROUPS; ++g) {
                GroupSum<F> sums[R][V];
                const uint32_t* bytes[R];
#pragma GCC unroll 8
                for (int r = 0; r < R; ++r) {
                    bytes[r] = x[r]->bytes[0];
                    for (int v = 0; v < V; ++v)
                        sums[r][v].begin(F::HAS_MINIMUM ? zero_words() : same_words(x[r]->sums[g]));
                }
                add_group<F, R, V>(block, vector, g, bytes, sums);
#pragma GCC unroll 2
                for (int v = 0; v < V; ++v) {
                    const Floats scale = shared.scale(block, g, vector + v);
                    Floats minimum;
                    if constexpr (F::HAS_MINIMUM) minimum = shared.minimum(block, g, vector + v);
#pragma GCC unroll 8
                    for (int r = 0; r < R; ++r) {
                        const Floats sum = converted(sums[r][v].words);
                        if constexpr (F::HAS_MINIMUM) {
                            const Floats own = as_floats(same_words(x[r]->sums[g]));
                            of_blocks[r][v] = fma(scale, sum, times(minimum, own));
                        } else {
                            of_blocks[r][v] = g ? fma(scale, sum, of_blocks[r][v]) : times(scale, sum);
                        }
                    }
                }
            }
            block += F::BLOCK_BYTES;
        }
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
            for (int v = 0; v < V; ++v) totals[r][v] = fma(same(x[r]->scale), of_blocks[r][v], totals[r][v]);
            ++x[r];
        }
    }
}

template <class F, int R, int V>
void byte_tile(const uint8_t* blocks, const Weight& weight, const Rows& rows, const Inputs& inputs, int64_t first,
               int vector, int64_t panel) {
    Floats out[R][V];
    multiply_bytes<F, R, V>(blocks, blocks_of(weight), inputs, first, vector, out);
    for (int r = 0; r < R; ++r)
        for (int v = 0; v < V; ++v)
            store(rows, first + r, panel * PANEL + (vector + v) * LANES, weight.num_out, out[r][v]);
}

using ByteTile = void (*)(const uint8_t*, const Weight&, const Rows&, const Inputs&, int64_t, int, int64_t);

template <class F, int V, int... R>
ByteTile byte_tile_of(int num_rows, std::integer_sequence<int, R...>) {
    static constexpr ByteTile ALL[] = {byte_tile<F, R + 1, V>...};
    return ALL[num_rows - 1];
}

// All rows by a panel.
template <class F>
void byte_rows(const Weight& weight, const Rows& rows, const Inputs& inputs, int64_t panel) {
    constexpr int V = BYTE_VECTORS, MOST = BYTE_SUMS / V;
    const uint8_t* blocks = weight.panels + panel * F::panel_bytes(blocks_of(weight));
    const int64_t num_tiles = (rows.num_rows + MOST - 1) / MOST;
    for (int vector = 0; vector < VECTORS; vector += V)
        for (int64_t tile = 0; tile < num_tiles; ++tile) {
            const int64_t start = tile * rows.num_rows / num_tiles, end = (tile + 1) * rows.num_rows / num_tiles;
            byte_tile_of<F, V>(end - start, std::make_integer_sequence<int, MOST>{})(blocks, weight, rows, inputs, start,
                                                                                     vector, panel);
        }
}
