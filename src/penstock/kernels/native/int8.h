// Rows rounded to 8 bits by group, times quants as they are: a part of quantised.cpp.
//
// A row's group of 32 inputs x becomes a scale and 32 bytes, x = scale * byte. With quants that count from 0, the sum of
// a group's products is one of integers: it is exact, and no order of its terms makes another. What differs between few
// rows and many is therefore how much is loaded for it, and no bit.
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

// A row's blocks in words: bytes, in the order in which `byte_quants` takes them; the scale; of each group what its
// minimum is multiplied with, as a float, or where the form has none what the zeros of its quants make, as an integer.
template <class F>
struct ByteBlock {
    uint32_t bytes[BLOCK / 4];
    float scale;
    uint32_t sums[F::GROUPS];
};

template <class F>
int64_t byte_row_words(int64_t num_blocks) {
    return num_blocks * sizeof(ByteBlock<F>) / 4;
}

template <class F>
void round_row(const uint16_t* x, int64_t num_blocks, ByteBlock<F>* block) {
    uint8_t order[16];  // of each byte, the input of 16
    for (int k = 0; k < 16; ++k) {
        constexpr int INPUTS = 2 * F::LOAD_PAIRS;  // of a word of quants
        const int bit = bit_of<F>(k % INPUTS);
        order[k / INPUTS * INPUTS + bit % 8 + bit / 8] = k;
    }
    for (const ByteBlock<F>* end = block + num_blocks; block < end; ++block, x += BLOCK) {
        uint16_t most = 0;  // in bits, of which those of no number are more than any number's
        for (int k = 0; k < BLOCK; ++k) most = std::max<uint16_t>(most, x[k] & 0x7fff);
        const uint32_t bits = uint32_t(most) << 16;
        float size;
        std::memcpy(&size, &bits, sizeof size);
        const Floats inverse = same(size > 1e-30f ? 127 / size : 0);
        block->scale = size / 127;
        Floats sums[F::GROUPS];  // whole numbers, which are exact
        for (int k = 0; k < BLOCK; k += LANES) {
            const Words words = rounded_words(times(Bfloat16::load(x + k, 0xffff), inverse));
            store_bytes(reinterpret_cast<int8_t*>(block->bytes) + k, words, order);
            Floats& sum = sums[k * F::GROUPS / BLOCK];
            sum = k * F::GROUPS % BLOCK ? plus(sum, converted(words)) : converted(words);
        }
        for (int g = 0; g < F::GROUPS; ++g) {
            const float sum = sum_of(sums[g]);
            const int of_zeros = -ByteQuants<F>::ZERO * int(sum);
            std::memcpy(block->sums + g, F::HAS_MINIMUM ? static_cast<const void*>(&sum) : &of_zeros, 4);
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

// R rows by V vectors of outputs of a panel.
template <class F, int R, int V>
inline void multiply_bytes(const uint8_t* block, int64_t num_blocks, const Inputs& inputs, int64_t first, int vector,
                           Floats (*totals)[V]) {
    using Sum = ByteSum<ByteQuants<F>::MOST>;
    constexpr int GROUP_LOADS = F::LOADS / F::GROUPS, PARTS = F::LOAD_PAIRS / 2, STEPS = GROUP_LOADS * PARTS;
    const ByteBlock<F>* x[R];
    for (int r = 0; r < R; ++r) {
        x[r] = reinterpret_cast<const ByteBlock<F>*>(inputs.row(first + r));
        for (int v = 0; v < V; ++v) totals[r][v] = zeros();
    }
    Shared<F> shared;
    for (int64_t b = 0; b < num_blocks; ++b, block += F::BLOCK_BYTES) {
        shared.read(block, b);
        Floats of_block[R][V];
#pragma GCC unroll 2
        for (int g = 0; g < F::GROUPS; ++g) {
            Sum sums[R][V];
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r)
                for (int v = 0; v < V; ++v)
                    sums[r][v].begin(F::HAS_MINIMUM ? zero_words() : same_words(x[r][b].sums[g]));
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
                        const Words own = same_words(x[r][b].bytes[g * STEPS + step]);
                        for (int v = 0; v < V; ++v) sums[r][v].add(quants[v], own, step, STEPS);
                    }
                }
            }
#pragma GCC unroll 2
            for (int v = 0; v < V; ++v) {
                const Floats scale = shared.scale(block, g, vector + v);
                Floats minimum;
                if constexpr (F::HAS_MINIMUM) minimum = shared.minimum(block, g, vector + v);
#pragma GCC unroll 8
                for (int r = 0; r < R; ++r) {
                    const Floats sum = converted(sums[r][v].words);
                    if constexpr (F::HAS_MINIMUM) {
                        const Floats own = as_floats(same_words(x[r][b].sums[g]));
                        of_block[r][v] = fma(scale, sum, times(minimum, own));
                    } else {
                        of_block[r][v] = g ? fma(scale, sum, of_block[r][v]) : times(scale, sum);
                    }
                }
            }
        }
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r)
            for (int v = 0; v < V; ++v) totals[r][v] = fma(same(x[r][b].scale), of_block[r][v], totals[r][v]);
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
