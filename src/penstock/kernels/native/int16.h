// Rows as integers of 16 bits, times quants as they are: a part of quantised.cpp, for sets without products of bfloat16.
//
// A block of a row's inputs x becomes a power of two and integers, x = scale * integer, the largest of them below 2^15.
// So bfloat16 is exact that is at least a 128th of its block's largest; what is less is rounded to the steps of that
// 128th. The sum of a group's products is one of integers: it is exact, and no order of its terms makes another. What
// differs between few rows and many is therefore how much is loaded for it, and no bit.
#pragma once

// A block of a row: its integers; the scale; of each of the weight's groups within what its minimum is multiplied with or,
// as an integer, what the zeros of its quants make.
template <class F>
struct HalfBlock {
    uint32_t pairs[BLOCK / 2];
    float scale;
    uint32_t sums[F::GROUPS];
};

template <class F>
int64_t half_row_words(int64_t num_blocks) { return num_blocks * sizeof(HalfBlock<F>) / 4; }

template <class F>
void make_halves(const uint16_t* x, int64_t num_blocks, HalfBlock<F>* block) {
    constexpr int SIZE = BLOCK / F::GROUPS, INFINITE = 255, SMALLEST = 15;  // exponents: no scale is less than a float
    for (int64_t b = 0; b < num_blocks; ++b, ++block, x += BLOCK) {
        uint16_t most = 0;  // in bits, of which those of no number are more than any number's
        for (int k = 0; k < BLOCK; ++k) most = std::max<uint16_t>(most, x[k] & 0x7fff);
        const int exponent = most >> 7, scale = std::max(exponent, SMALLEST) - 14;
        const bool is_finite = exponent < INFINITE;
        block->scale = float_of_bits(is_finite ? scale << 23 : most << 16);
        const Floats inverse = same(is_finite ? float_of_bits((254 - scale) << 23) : 0);
        for (int g = 0; g < F::GROUPS; ++g) {
            Floats total = zeros();  // of whole numbers, which are exact
            for (int k = g * SIZE; k < (g + 1) * SIZE; k += LANES) {
                const Words words = rounded_words(times(Bfloat16::load(x + k, 0xffff), inverse));
                store_first_halves(reinterpret_cast<uint16_t*>(block->pairs) + k, 0xffff, both(words, same_words(0xffff)));
                total = plus(total, converted(words));
            }
            const float sum = sum_of(total), scaled = sum * block->scale;
            if (F::HAS_MINIMUM)
                std::memcpy(block->sums + g, &scaled, sizeof scaled);
            else
                block->sums[g] = -ByteQuants<F>::ZERO * int(sum);
        }
    }
}

// The j-th pair of each output in a load.
template <class F>
inline Words half_quants(const Loaded& loaded, int load, int j) {
    if constexpr (F::BITS <= 4 && F::KIND == Values::NUMBERS)
        return both(moved_right(loaded.low, j * F::LOW_BITS), same_words(((1 << F::LOW_BITS) - 1) * 0x00010001));
    constexpr int PARTS = F::LOAD_PAIRS / 2;
    const Words bytes = byte_quants<F>(loaded, load, j % PARTS);
    return both(moved_right(bytes, j / PARTS * 8), same_words(0x00ff00ff));
}

// All pairs of a panel.
template <class F>
void to_halves(const uint8_t* block, int64_t num_blocks, uint32_t (*out)[PANEL]) {
    for (int64_t b = 0; b < num_blocks; ++b, block += F::BLOCK_BYTES, out += BLOCK / 2) {
        if (b % SHARING == 0) block += F::SHARED_BYTES;
        prefetch<F>(block);
        for (int v = 0; v < VECTORS; ++v)
#pragma GCC unroll 8
            for (int load = 0; load < F::LOADS; ++load) {
                const Loaded loaded = load_quants<F>(block, v, load);
#pragma GCC unroll 8
                for (int j = 0; j < F::LOAD_PAIRS; ++j)
                    store_words(&out[load * F::LOAD_PAIRS + j][v * LANES], half_quants<F>(loaded, load, j));
            }
    }
}

// R rows by V vectors of outputs of a panel, whose pairs may have been made before.
template <class F, bool IsMade, int R, int V>
void multiply_halves(const uint8_t* block, const uint32_t (*made)[PANEL], const Weight& weight, const Rows& rows,
                     const Inputs& inputs, int64_t first, int vector, int64_t panel) {
    constexpr int GROUP_LOADS = F::LOADS / F::GROUPS;
    const bool is_first = first == 0 && vector == 0;  // to read the panel
    const HalfBlock<F>* x[R];
    Floats totals[R][V];
    for (int r = 0; r < R; ++r) {
        x[r] = reinterpret_cast<const HalfBlock<F>*>(inputs.row(first + r));
        for (int v = 0; v < V; ++v) totals[r][v] = zeros();
    }
    Shared<F> shared;
    for (int64_t b = 0; b < blocks_of(weight); ++b, block += F::BLOCK_BYTES, made += BLOCK / 2) {
        shared.read(block, b);
        if (!IsMade && is_first) prefetch<F>(block);
#pragma GCC unroll 2
        for (int g = 0; g < F::GROUPS; ++g) {
            Words sums[R][V];
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r)
                for (int v = 0; v < V; ++v) sums[r][v] = F::HAS_MINIMUM ? zero_words() : same_words(x[r]->sums[g]);
#pragma GCC unroll 8
            for (int load = g * GROUP_LOADS; load < (g + 1) * GROUP_LOADS; ++load) {
                Loaded loads[V];
                for (int v = 0; v < V && !IsMade; ++v) loads[v] = load_quants<F>(block, vector + v, load);
#pragma GCC unroll 8
                for (int j = 0; j < F::LOAD_PAIRS; ++j) {
                    const int pair = load * F::LOAD_PAIRS + j;
                    Words quants[V];
                    for (int v = 0; v < V; ++v)
                        quants[v] = IsMade ? load_words(&made[pair][(vector + v) * LANES])
                                           : half_quants<F>(loads[v], load, j);
#pragma GCC unroll 8
                    for (int r = 0; r < R; ++r) {
                        const Words own = same_words(x[r]->pairs[pair]);
                        for (int v = 0; v < V; ++v) sums[r][v] = dot_of_halves(sums[r][v], quants[v], own);
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
                    Floats& total = totals[r][v];
                    total = fma(scale, times(converted(sums[r][v]), same(x[r]->scale)), total);
                    if constexpr (F::HAS_MINIMUM) total = fma(minimum, as_floats(same_words(x[r]->sums[g])), total);
                }
            }
        }
        for (int r = 0; r < R; ++r) ++x[r];
    }
    for (int r = 0; r < R; ++r)
        for (int v = 0; v < V; ++v)
            store(rows, first + r, panel * PANEL + (vector + v) * LANES, weight.num_out, totals[r][v]);
}

using HalfTile = void (*)(const uint8_t*, const uint32_t (*)[PANEL], const Weight&, const Rows&, const Inputs&, int64_t,
                          int, int64_t);

template <class F, bool IsMade, int V, int... R>
HalfTile half_tile_of(int num_rows, std::integer_sequence<int, R...>) {
    static constexpr HalfTile ALL[] = {multiply_halves<F, IsMade, R + 1, V>...};
    return ALL[num_rows - 1];
}

template <class F, bool IsMade, int V>
void half_rows(const Weight& weight, const Rows& rows, const Inputs& inputs, int64_t panel,
               const uint32_t (*made)[PANEL]) {
    constexpr int MOST = BYTE_SUMS / V;
    const uint8_t* blocks = weight.panels + panel * F::panel_bytes(blocks_of(weight));
    const int64_t num_tiles = (rows.num_rows + MOST - 1) / MOST;
    for (int vector = 0; vector < VECTORS; vector += V)
        for (int64_t tile = 0; tile < num_tiles; ++tile) {
            const int64_t start = tile * rows.num_rows / num_tiles, end = (tile + 1) * rows.num_rows / num_tiles;
            half_tile_of<F, IsMade, V>(end - start, std::make_integer_sequence<int, MOST>{})(
                blocks, made, weight, rows, inputs, start, vector, panel);
        }
}

// All rows by a panel.
template <class F>
void half_rows(const Weight& weight, const Rows& rows, const Inputs& inputs, int64_t panel) {
    constexpr int MOST_UNMADE = 8;  // rows, for which making all pairs first does not pay
    if (rows.num_rows * VECTORS <= BYTE_SUMS) return half_rows<F, false, VECTORS>(weight, rows, inputs, panel, nullptr);
    if (rows.num_rows <= MOST_UNMADE) return half_rows<F, false, BYTE_VECTORS>(weight, rows, inputs, panel, nullptr);
    static thread_local std::vector<uint32_t> room;
    auto* made = panels_in(room, weight.num_in / 2);
    to_halves<F>(weight.panels + panel * F::panel_bytes(blocks_of(weight)), blocks_of(weight), made);
    half_rows<F, true, BYTE_VECTORS>(weight, rows, inputs, panel, made);
}
