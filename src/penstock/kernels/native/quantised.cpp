// Products with weights that stay in memory as a file has them: a few bits a value, in groups with a scale each.
//
// A weight [num_out, num_in] lies in panels of 32 outputs. A panel is a row of blocks of 32 inputs, and a block holds
// the lowest bits of its quants, then the others, then the scales of its groups, then their minimums where it has any.
// Scales of a byte are multiples of one that 8 blocks share, which lies before them. Lanes are outputs throughout: each
// lane's sum runs over the inputs in their order, whatever the number of rows and whichever thread does it.
//
// Few rows are multiplied with the quants themselves, and a group's sum is scaled once: what counts there is how fast
// weights come from memory. For many, a panel is made bfloat16 first, and then is a weight like any other. int8.h and
// int16.h multiply any number of rows that are made integers first.
#include <algorithm>
#include <cmath>
#include <utility>
#include <vector>

#include "calls.h"

#if defined(__AMX_BF16__) || defined(PENSTOCK_EMULATED_AMX)
#define PENSTOCK_TILES
#include "amx.h"
#endif

namespace penstock {
namespace {

constexpr int PANEL = 32;  // outputs
constexpr int BLOCK = 32;  // inputs
constexpr int VECTORS = PANEL / LANES;

inline int64_t panels_of(const Weight& weight) { return (weight.num_out + PANEL - 1) / PANEL; }
inline int64_t blocks_of(const Weight& weight) { return weight.num_in / BLOCK; }

// How scales and minimums are stored: as float16, as float32, or as bytes with a sign, times a float16 that blocks share.
enum class Scale { HALF, FLOAT, SHARED };
constexpr int SHARING = 8;  // blocks

// What a quant of 4 bits stands for: its number; a float (a sign, two bits of exponent, one of mantissa), counted as twice
// that, which is an integer; or a level.
enum class Values { NUMBERS, FLOATS, LEVELS };

// value = scale * (quant - zero) + minimum. Quants of 8 bits are -128 to 127, of fewer 0 and more.
template <int Bits, int GroupSize, bool HasMinimum, Scale Stored, int Zero, Values Kind = Values::NUMBERS>
struct Form {
    static constexpr int value_of(int quant) {  // of less than 8 bits
        constexpr int FLOATS[] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
        constexpr int LEVELS[] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
        return Kind == Values::NUMBERS ? quant - Zero : Kind == Values::FLOATS ? FLOATS[quant] : LEVELS[quant];
    }
    static constexpr int BITS = Bits;
    static constexpr int GROUPS = BLOCK / GroupSize;
    static constexpr bool HAS_MINIMUM = HasMinimum;
    static constexpr bool IS_SHARED = Stored == Scale::SHARED;
    static constexpr bool IS_WIDE = Stored == Scale::FLOAT;
    static constexpr int ZERO = Zero;
    static constexpr Values KIND = Kind;
    // Up to so many rows, where any way will do, quants are multiplied as they are. For 8 bits that takes two products;
    // 5 and 6 bits take many instructions, which pay where many rows share them.
    static constexpr int MOST_ROWS = Bits <= 4 || (Bits < 8 && SUM_VECTORS >= 16) ? 32 : Bits == 8 ? 16 : 8;
    static constexpr int LOW_BITS = Bits == 8 ? 8 : Bits == 2 ? 2 : 4, EXTRA_BITS = Bits - LOW_BITS;
    static constexpr int VECTOR_BYTES = LANES * BLOCK * LOW_BITS / 8;  // the lowest bits of 16 outputs
    static constexpr int LOADS = VECTOR_BYTES / 64;
    static constexpr int LOAD_PAIRS = 16 / LOW_BITS;  // pairs of inputs to a load
    static constexpr int SCALE_BYTES = PANEL * (IS_SHARED ? 1 : IS_WIDE ? 4 : 2);
    static constexpr int EXTRA_AT = VECTORS * VECTOR_BYTES;
    static constexpr int SCALES_AT = EXTRA_AT + PANEL * BLOCK * EXTRA_BITS / 8;
    static constexpr int MINIMUMS_AT = SCALES_AT + GROUPS * SCALE_BYTES;
    static constexpr int BLOCK_BYTES = MINIMUMS_AT + (HasMinimum ? GROUPS * SCALE_BYTES : 0);
    static constexpr int SHARED_BYTES = IS_SHARED ? PANEL * 2 * (1 + HasMinimum) : 0;  // before so many blocks

    static int64_t block_at(int64_t b) { return b * BLOCK_BYTES + (b / SHARING + 1) * SHARED_BYTES; }
    static int64_t panel_bytes(int64_t num_blocks) {
        return num_blocks * BLOCK_BYTES + (num_blocks + SHARING - 1) / SHARING * SHARED_BYTES;
    }
};

using Q4_1 = Form<4, 32, true, Scale::HALF, 0>;
using Q4_0 = Form<4, 32, false, Scale::HALF, 8>;
using Q8_0 = Form<8, 32, false, Scale::HALF, 0>;
using Q4_K = Form<4, 32, true, Scale::SHARED, 0>;
using Q5_K = Form<5, 32, true, Scale::SHARED, 0>;
using Q6_K = Form<6, 16, false, Scale::SHARED, 32>;
using MXFP4 = Form<4, 32, false, Scale::FLOAT, 0, Values::FLOATS>;
using Q5_0 = Form<5, 32, false, Scale::HALF, 16>;
using Q5_1 = Form<5, 32, true, Scale::HALF, 0>;
using Q2_K = Form<2, 16, true, Scale::SHARED, 0>;
using Q3_K = Form<4, 16, false, Scale::SHARED, 4>;  // of 3 bits
using IQ4_NL = Form<4, 32, false, Scale::HALF, 0, Values::LEVELS>;
using IQ4_XS = Form<4, 32, false, Scale::SHARED, 0, Values::LEVELS>;

// Calls `body` with the form of that number; false where there is none.
template <class Body>
bool with_form(int form, const Body& body) {
    switch (form) {
        case 0: body(Q4_1{}); return true;
        case 1: body(Q4_0{}); return true;
        case 2: body(Q8_0{}); return true;
        case 3: body(Q4_K{}); return true;
        case 4: body(Q5_K{}); return true;
        case 5: body(Q6_K{}); return true;
        case 9: body(MXFP4{}); return true;
        case 10: body(Q5_0{}); return true;
        case 11: body(Q5_1{}); return true;
        case 12: body(Q3_K{}); return true;
        case 13: body(IQ4_NL{}); return true;
        case 14: body(IQ4_XS{}); return true;
        case 15: body(Q2_K{}); return true;
    }
    return false;
}

// What the scales and minimums of some blocks are multiples of.
template <class F>
struct Shared {
    Floats scales[VECTORS], minimums[VECTORS];

    // `block` is the address of block `b` but for what lies before it, which is passed.
    void read(const uint8_t*& block, int64_t b) {
        if (!F::IS_SHARED || b % SHARING) return;
        for (int v = 0; v < VECTORS; ++v) {
            scales[v] = load_float16(block + v * LANES * 2);
            if (F::HAS_MINIMUM) minimums[v] = load_float16(block + (PANEL + v * LANES) * 2);
        }
        block += F::SHARED_BYTES;
    }
    Floats scale(const uint8_t* block, int group, int v) const { return load(block + F::SCALES_AT, group, v, scales); }
    Floats minimum(const uint8_t* block, int group, int v) const {
        return load(block + F::MINIMUMS_AT, group, v, minimums);
    }

    // The integers that they multiply.
    static Words whole_scale(const uint8_t* block, int group, int v) { return load_whole(block + F::SCALES_AT, group, v); }
    static Words whole_minimum(const uint8_t* block, int group, int v) {
        return load_whole(block + F::MINIMUMS_AT, group, v);
    }

   private:
    static Words load_whole(const uint8_t* from, int group, int v) {
        return load_signed_bytes(from + group * F::SCALE_BYTES + v * LANES);
    }
    static Floats load(const uint8_t* from, int group, int v, const Floats* shared) {
        if constexpr (F::IS_SHARED) return times(shared[v], converted(load_whole(from, group, v)));
        from += group * F::SCALE_BYTES + v * (F::SCALE_BYTES / VECTORS);
        if constexpr (F::IS_WIDE) return load_floats(reinterpret_cast<const float*>(from));
        return load_float16(from);
    }
};

// Where the lowest bits of input k of a block lie in the word that a load has for an output.
template <class F>
inline int bit_of(int k) {
    return k % 2 * 16 + k % (2 * F::LOAD_PAIRS) / 2 * F::LOW_BITS;  // in pairs, the second 16 bits from the first
}

// Where the other bits of input k of a block lie: the word of an output, and the bit in it.
template <class F>
inline int extra_word(int k) { return k * F::EXTRA_BITS / 32; }
template <class F>
inline int extra_bit(int k) {  // as far from each other as the lowest bits of inputs that are bytes apart
    return k % 2 * 16 + k % 8 / 4 * 8 + k % 4 / 2 * F::EXTRA_BITS + k / 8 * 2 * F::EXTRA_BITS % 8;
}

// Words of 16 outputs with some of their inputs.
struct Loaded {
    Words low, extra;
};

template <class F>
inline Loaded load_quants(const uint8_t* block, int vector, int load) {
    Loaded loaded{load_words(block + vector * F::VECTOR_BYTES + load * 64), zero_words()};
    const int word = extra_word<F>(load * 2 * F::LOAD_PAIRS);
    if (F::EXTRA_BITS) loaded.extra = load_words(block + F::EXTRA_AT + (vector * F::EXTRA_BITS + word) * 64);
    return loaded;
}

// How far ahead of its turn a block is asked of memory. By itself a processor asks for what lies in a row, up to the end
// of a page; a block is read by vectors, and its planes in turn.
constexpr int64_t AHEAD = 12288;

template <class F>
inline void prefetch(const uint8_t* block) {
#pragma GCC unroll 32
    for (int at = 0; at < F::BLOCK_BYTES; at += 64) __builtin_prefetch(block + AHEAD + at);
}

inline Words moved_right(Words x, int bits) {
    return bits > 0 ? shifted_right(x, bits) : bits < 0 ? shifted_left(x, -bits) : x;
}

// Input k of a block of less than 8 bits, and those that are bytes apart from it, as bytes.
template <class F>
inline Words bytes_of(const Loaded& loaded, int k) {
    const uint32_t low_mask = F::LOW_BITS == 2 ? 0x03030303 : 0x0f0f0f0f;
    const Words low = both(moved_right(loaded.low, bit_of<F>(k) % 8), same_words(low_mask));
    if constexpr (F::EXTRA_BITS == 0) return low;
    const uint32_t mask = F::EXTRA_BITS == 1 ? 0x10101010 : 0x30303030;
    return either(low, both(moved_right(loaded.extra, extra_bit<F>(k) % 8 - 4), same_words(mask)));
}

// Input k of a block, one of those in `loaded`, as floats; but for the zero.
template <class F>
inline Floats bits_of(const Loaded& loaded, int k) {
    const int bit = bit_of<F>(k);
    if constexpr (F::BITS == 8) return converted(shifted_signed(shifted_left(loaded.low, 24 - bit), 24));
    const Words quant = byte_of(bytes_of<F>(loaded, k), bit / 8);
    if constexpr (F::KIND != Values::NUMBERS) {
        float values[16];
        for (int i = 0; i < 16; ++i) values[i] = F::value_of(i);
        return looked_up(quant, values);
    }
    return converted(quant);
}

template <class F>
inline Floats quant_of(const Loaded& loaded, int k) {
    const Floats quant = bits_of<F>(loaded, k);
    return F::ZERO ? minus(quant, same(F::ZERO)) : quant;
}

// From a file's blocks to panels.

struct Unpacked {
    int quants[BLOCK];
    float scales[2], minimums[2];               // by group
    float shared_scale = 0, shared_minimum = 0;  // what they are multiples of, where blocks share it
};

inline float half_at(const uint8_t* from) {
    uint16_t bits;
    std::memcpy(&bits, from, sizeof bits);
    return float_of_half(bits);
}

// The 6-bit scale and minimum of group `g` of 8, out of the 12 bytes that hold them.
inline void k_scale(const uint8_t* packed, int g, int* scale, int* minimum) {
    if (g < 4) {
        *scale = packed[g] & 63;
        *minimum = packed[g + 4] & 63;
    } else {
        *scale = (packed[g + 4] & 15) | (packed[g - 4] >> 6) << 4;
        *minimum = (packed[g + 4] >> 4) | (packed[g] >> 6) << 4;
    }
}

// Quants of 32 inputs in 16 bytes, and the fifth bits of those that have them.
inline void unpack_halves(const uint8_t* from, uint32_t fifths, Unpacked* out) {
    for (int k = 0; k < BLOCK; ++k)
        out->quants[k] = (from[k % 16] >> (k / 16 * 4) & 15) | (fifths >> k & 1) << 4;
}

// Block `b` of 32 inputs of a row as the file has it.
inline void unpack(Q4_1, const uint8_t* row, int64_t b, Unpacked* out) {
    const uint8_t* from = row + b * 20;
    out->scales[0] = half_at(from);
    out->minimums[0] = half_at(from + 2);
    unpack_halves(from + 4, 0, out);
}

inline void unpack(Q4_0, const uint8_t* row, int64_t b, Unpacked* out) {
    const uint8_t* from = row + b * 18;
    out->scales[0] = half_at(from);
    unpack_halves(from + 2, 0, out);
}

inline uint32_t word_at(const uint8_t* from) {
    uint32_t word;
    std::memcpy(&word, from, sizeof word);
    return word;
}

inline void unpack(Q5_0, const uint8_t* row, int64_t b, Unpacked* out) {
    const uint8_t* from = row + b * 22;
    out->scales[0] = half_at(from);
    unpack_halves(from + 6, word_at(from + 2), out);
}

inline void unpack(Q5_1, const uint8_t* row, int64_t b, Unpacked* out) {
    const uint8_t* from = row + b * 24;
    out->scales[0] = half_at(from);
    out->minimums[0] = half_at(from + 2);
    unpack_halves(from + 8, word_at(from + 4), out);
}

inline void unpack(IQ4_NL, const uint8_t* row, int64_t b, Unpacked* out) {
    const uint8_t* from = row + b * 18;
    out->scales[0] = half_at(from);
    unpack_halves(from + 2, 0, out);
}

inline void unpack(IQ4_XS, const uint8_t* row, int64_t b, Unpacked* out) {
    const uint8_t* from = row + b / 8 * 136;
    const int g = b % 8;
    const int high = from[2 + g / 4] >> (g % 4 * 2) & 3, low = from[4 + g / 2] >> (g % 2 * 4) & 15;
    out->scales[0] = (low | high << 4) - 32;
    out->shared_scale = half_at(from);
    unpack_halves(from + 8 + g * 16, 0, out);
}

inline void unpack(Q2_K, const uint8_t* row, int64_t b, Unpacked* out) {
    const uint8_t* from = row + b / 8 * 84;
    out->shared_scale = half_at(from + 80);
    out->shared_minimum = -half_at(from + 82);
    for (int g = 0; g < 2; ++g) {
        const uint8_t both_of = from[b % 8 * 2 + g];
        out->scales[g] = both_of & 15;
        out->minimums[g] = both_of >> 4;
    }
    for (int k = 0; k < BLOCK; ++k) out->quants[k] = from[16 + b % 8 / 4 * 32 + k] >> (b % 4 * 2) & 3;
}

inline void unpack(Q3_K, const uint8_t* row, int64_t b, Unpacked* out) {
    const uint8_t *from = row + b / 8 * 110, *packed = from + 96;
    out->shared_scale = half_at(from + 108);
    for (int g = 0; g < 2; ++g) {
        const int at = b % 8 * 2 + g;  // of 16
        const int low = packed[at % 8] >> (at / 8 * 4) & 15, high = packed[8 + at % 4] >> (at / 4 * 2) & 3;
        out->scales[g] = (low | high << 4) - 32;
    }
    for (int k = 0; k < BLOCK; ++k) {
        const int low = from[32 + b % 8 / 4 * 32 + k] >> (b % 4 * 2) & 3;
        out->quants[k] = low | (from[k] >> (b % 8) & 1) << 2;
    }
}

inline void unpack(MXFP4, const uint8_t* row, int64_t b, Unpacked* out) {
    const uint8_t* from = row + b * 17;
    out->scales[0] = std::ldexp(1.0f, from[0] - 128);  // quants count twice
    unpack_halves(from + 1, 0, out);
}

inline void unpack(Q8_0, const uint8_t* row, int64_t b, Unpacked* out) {
    const uint8_t* from = row + b * 34;
    out->scales[0] = half_at(from);
    for (int k = 0; k < BLOCK; ++k) out->quants[k] = static_cast<int8_t>(from[2 + k]);
}

inline void unpack(Q4_K, const uint8_t* row, int64_t b, Unpacked* out) {
    const uint8_t* from = row + b / 8 * 144;
    const int g = b % 8;
    int scale, minimum;
    k_scale(from + 4, g, &scale, &minimum);
    out->scales[0] = scale;
    out->minimums[0] = minimum;
    out->shared_scale = half_at(from);
    out->shared_minimum = -half_at(from + 2);
    for (int k = 0; k < BLOCK; ++k) out->quants[k] = from[16 + g / 2 * 32 + k] >> (g % 2 * 4) & 15;
}

inline void unpack(Q5_K, const uint8_t* row, int64_t b, Unpacked* out) {
    const uint8_t* from = row + b / 8 * 176;
    const int g = b % 8;
    int scale, minimum;
    k_scale(from + 4, g, &scale, &minimum);
    out->scales[0] = scale;
    out->minimums[0] = minimum;
    out->shared_scale = half_at(from);
    out->shared_minimum = -half_at(from + 2);
    for (int k = 0; k < BLOCK; ++k)
        out->quants[k] = (from[48 + g / 2 * 32 + k] >> (g % 2 * 4) & 15) | (from[16 + k] >> g & 1) << 4;
}

inline void unpack(Q6_K, const uint8_t* row, int64_t b, Unpacked* out) {
    const uint8_t* from = row + b / 8 * 210;
    const int half = b % 8 / 4, quarter = b % 4;  // 128 inputs, and 32 of those
    out->shared_scale = half_at(from + 208);
    for (int g = 0; g < 2; ++g) out->scales[g] = static_cast<int8_t>(from[192 + half * 8 + quarter * 2 + g]);
    for (int k = 0; k < BLOCK; ++k) {
        const int low = from[half * 64 + quarter % 2 * 32 + k] >> (quarter / 2 * 4) & 15;
        const int high = from[128 + half * 32 + k] >> (quarter * 2) & 3;
        out->quants[k] = low | high << 4;
    }
}

inline void store_half(uint8_t* to, float value) {
    const uint16_t bits = half_of_float(value);
    std::memcpy(to, &bits, sizeof bits);
}

template <class F>
void store_scale(uint8_t* block, int at, int group, int column, float value) {
    uint8_t* to = block + at + group * F::SCALE_BYTES + column * (F::SCALE_BYTES / PANEL);
    if (F::IS_SHARED)
        *to = static_cast<int8_t>(value);
    else if (F::IS_WIDE)
        std::memcpy(to, &value, sizeof value);
    else
        store_half(to, value);
}

template <class F>
void pack_row(const Weight& weight, const uint8_t* row, int64_t num_in, int64_t out) {
    const int column = out % PANEL, vector = column / LANES, lane = column % LANES;
    uint8_t* panel = weight.panels + out / PANEL * F::panel_bytes(blocks_of(weight));
    Unpacked unpacked;
    for (int64_t b = 0; b < num_in / BLOCK; ++b) {
        unpack(F{}, row, b, &unpacked);
        uint8_t* block = panel + F::block_at(b);
        constexpr int LOAD_INPUTS = 2 * F::LOAD_PAIRS;
        for (int load = 0; load < F::LOADS; ++load) {
            uint32_t word = 0;
#pragma GCC unroll 8
            for (int k = load * LOAD_INPUTS; k < (load + 1) * LOAD_INPUTS; ++k)
                word |= (uint32_t(unpacked.quants[k]) & ((1u << F::LOW_BITS) - 1)) << bit_of<F>(k);
            std::memcpy(block + vector * F::VECTOR_BYTES + load * 64 + lane * 4, &word, 4);
        }
        if (F::EXTRA_BITS) {
            uint32_t words[2] = {};
#pragma GCC unroll 32
            for (int k = 0; k < BLOCK; ++k)
                words[extra_word<F>(k)] |= uint32_t(unpacked.quants[k] >> F::LOW_BITS) << extra_bit<F>(k);
            for (int word = 0; word < F::EXTRA_BITS; ++word)
                std::memcpy(block + F::EXTRA_AT + (vector * F::EXTRA_BITS + word) * 64 + lane * 4, &words[word], 4);
        }
        for (int g = 0; g < F::GROUPS; ++g) {
            store_scale<F>(block, F::SCALES_AT, g, column, unpacked.scales[g]);
            if (F::HAS_MINIMUM) store_scale<F>(block, F::MINIMUMS_AT, g, column, unpacked.minimums[g]);
        }
        if (F::IS_SHARED && b % SHARING == 0) {
            store_half(block - F::SHARED_BYTES + column * 2, unpacked.shared_scale);
            if (F::HAS_MINIMUM) store_half(block - PANEL * 2 + column * 2, unpacked.shared_minimum);
        }
    }
}

// Output `out` of the weight as floats.
template <class F>
void unpack_row(const Weight& weight, int64_t out, float* to) {
    const int column = out % PANEL, vector = column / LANES, lane = column % LANES;
    const uint8_t* block = weight.panels + out / PANEL * F::panel_bytes(blocks_of(weight));
    Shared<F> shared;
    for (int64_t b = 0; b < blocks_of(weight); ++b, block += F::BLOCK_BYTES) {
        shared.read(block, b);
        for (int k = 0; k < BLOCK; ++k) {
            const int group = k * F::GROUPS / BLOCK;
            const Floats quant = quant_of<F>(load_quants<F>(block, vector, k / (2 * F::LOAD_PAIRS)), k);
            Floats value = times(shared.scale(block, group, vector), quant);
            if (F::HAS_MINIMUM) value = plus(value, shared.minimum(block, group, vector));
            alignas(64) float values[LANES];
            store_floats(values, value);
            *to++ = values[lane];
        }
    }
}

// How rows and panels are multiplied: in words of pairs of bfloat16, or of floats.
using T = DotBfloat16;

// Rows in such words.
struct Inputs {
    const uint32_t* words;
    int64_t stride;

    const uint32_t* row(int64_t index) const { return words + index * stride; }
};

inline void store(const Rows& rows, int64_t row, int64_t first_out, int64_t num_out, Floats sum) {
    if (first_out >= num_out) return;
    const Mask lanes = first_lanes(num_out - first_out);
    if (rows.bias) sum = plus(sum, Bfloat16::load(rows.bias + first_out, lanes));
    Bfloat16::store(rows.out + row * rows.out_stride + first_out, lanes, sum);
}

// Room for so many words of each output of some panels.
inline uint32_t (*panels_in(std::vector<uint32_t>& room, int64_t num_words))[PANEL] {
    room.resize(num_words * PANEL + LANES);
    return reinterpret_cast<uint32_t (*)[PANEL]>((reinterpret_cast<uintptr_t>(room.data()) + 63) / 64 * 64);
}

#include "int8.h"
#ifdef PENSTOCK_DOTS_HALVES
#include "int16.h"
#endif

#ifdef __AVX512BF16__

inline uint16_t bfloat16_of(int value) {
    const float x = value;  // exact in 8 bits
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    return bits >> 16;
}

// Quants as pairs of bfloat16, looked up by their bits; by more of them, which are no matter. One of 8 bits is the sum of
// two.
template <class F>
struct Quants {
    static constexpr int PART_BITS = F::LOW_BITS == 2 ? 2 : 4, PARTS = 16 / PART_BITS;  // of a load
    static constexpr int ZERO = 0;   // that parts are counted from
    Words low, high;

    struct Tables {
        alignas(64) uint16_t low[32], high[32];
        Tables() {
            for (int i = 0; i < 32; ++i) {
                low[i] = bfloat16_of(F::BITS == 8 ? i % 16 : F::value_of(i % (1 << F::BITS)));
                high[i] = bfloat16_of(F::BITS == 8 ? (i % 16 < 8 ? i % 16 * 16 : i % 16 * 16 - 256)
                                                   : F::value_of((32 + i) % (1 << F::BITS)));
            }
        }
    };
    static Quants make() {
        static const Tables tables;  // made once: a panel of a small weight is read in less time than they take
        return {load_words(tables.low), load_words(tables.high)};
    }
    // Of load `load` of a block.
    Words part(const Loaded& loaded, int load, int j) const {
        Words bits = moved_right(loaded.low, PART_BITS * j);
        if constexpr (F::EXTRA_BITS > 0) {
            const Words extra = moved_right(loaded.extra, extra_bit<F>(load * 8 + 2 * j) - 4);
            bits = _mm512_ternarylogic_epi32(same_words(0x000f000f), bits, extra, 0xca);  // the mask chooses
        }
        if constexpr (F::BITS == 6) return _mm512_permutex2var_epi16(low, bits, high);
        return _mm512_permutexvar_epi16(bits, F::BITS == 8 && j % 2 ? high : low);
    }
    static int word(int j) { return F::BITS == 8 ? j / 2 : j; }
};

// Panels in bfloat16: for each pair of inputs, the pairs of all outputs.
template <class F>
void to_words(const uint8_t* block, int64_t num_blocks, uint32_t (*out)[PANEL]) {
    const auto quants = Quants<F>::make();
    constexpr int GROUP_LOADS = F::LOADS / F::GROUPS;
    Shared<F> shared;
    for (int64_t b = 0; b < num_blocks; ++b, block += F::BLOCK_BYTES, out += BLOCK / 2) {
        shared.read(block, b);
#pragma GCC unroll 2
        for (int v = 0; v < VECTORS; ++v) {
#pragma GCC unroll 2
            for (int g = 0; g < F::GROUPS; ++g) {
                const Floats scale = shared.scale(block, g, v);
                Floats minimum = zeros();
                if constexpr (F::HAS_MINIMUM) minimum = shared.minimum(block, g, v);
                auto value = [&](Floats quant) {
                    return F::HAS_MINIMUM ? fma(scale, quant, minimum) : times(scale, quant);
                };
#pragma GCC unroll 8
                for (int load = g * GROUP_LOADS; load < (g + 1) * GROUP_LOADS; ++load) {
                    const Loaded loaded = load_quants<F>(block, v, load);
#pragma GCC unroll 4
                    for (int j = 0; j < F::LOAD_PAIRS; ++j) {
                        Floats even, odd;
                        if constexpr (F::BITS == 8) {
                            even = quant_of<F>(loaded, 2 * j);
                            odd = quant_of<F>(loaded, 2 * j + 1);
                        } else {
                            const Words pair = quants.part(loaded, load, j);
                            even = as_floats(shifted_left(pair, 16));
                            odd = as_floats(both(pair, same_words(0xffff0000)));
                        }
                        store_words(&out[load * F::LOAD_PAIRS + j][v * LANES], T::paired(value(even), value(odd)));
                    }
                }
            }
        }
    }
}

#elif !defined(PENSTOCK_DOTS_HALVES)

// Quants as floats.
template <class F>
struct Quants {
    static constexpr int PARTS = 2 * F::LOAD_PAIRS;  // of a load
    static constexpr int ZERO = F::ZERO;             // that parts are counted from

    static Quants make() { return {}; }
    Words part(const Loaded& loaded, int load, int j) const {
        return as_words(bits_of<F>(loaded, load * PARTS + j));
    }
    static int word(int j) { return j; }
};

// Panels in float32, rounded to bfloat16: for each input, that of all outputs.
template <class F>
void to_words(const uint8_t* block, int64_t num_blocks, uint32_t (*out)[PANEL]) {
    constexpr int INPUTS = 2 * F::LOAD_PAIRS;  // of a load
    constexpr int GROUP_LOADS = F::LOADS / F::GROUPS;
    Shared<F> shared;
    for (int64_t b = 0; b < num_blocks; ++b, block += F::BLOCK_BYTES, out += BLOCK) {
        shared.read(block, b);
        for (int v = 0; v < VECTORS; ++v)
#pragma GCC unroll 2
            for (int g = 0; g < F::GROUPS; ++g) {
                const Floats scale = shared.scale(block, g, v);
                Floats minimum = zeros();
                if constexpr (F::HAS_MINIMUM) minimum = shared.minimum(block, g, v);
#pragma GCC unroll 8
                for (int load = g * GROUP_LOADS; load < (g + 1) * GROUP_LOADS; ++load) {
                    const Loaded loaded = load_quants<F>(block, v, load);
#pragma GCC unroll 8
                    for (int j = 0; j < INPUTS; ++j) {
                        const Floats quant = quant_of<F>(loaded, load * INPUTS + j);
                        const Floats value = F::HAS_MINIMUM ? fma(scale, quant, minimum) : times(scale, quant);
                        store_words(&out[load * INPUTS + j][v * LANES], as_words(Bfloat16::rounded(value)));
                    }
                }
            }
    }
}

#endif

#ifndef PENSTOCK_DOTS_HALVES

// Few rows

// Rows that share the reading of a panel, as many as registers hold the sums of; quants of 8 bits take more of those.
template <class F>
constexpr int MOST_FEW = F::BITS == 8 ? std::min(6, SUM_VECTORS / VECTORS) : SUM_VECTORS / VECTORS;

// Whether a group's sum is multiplied, too: with the minimum, or with the zero. No form has both.
template <class F>
constexpr bool TAKES_SUMS = F::HAS_MINIMUM || Quants<F>::ZERO != 0;

template <class F, int R>
inline void multiply_few(const uint8_t* block, int64_t num_blocks, const uint32_t* const* x,
                         const float* const* group_sums, const Quants<F>& quants, Floats (*out)[VECTORS]) {
    Floats totals[R][VECTORS];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
        for (int v = 0; v < VECTORS; ++v) totals[r][v] = zeros();
    constexpr int GROUP_LOADS = F::LOADS / F::GROUPS;
    Shared<F> shared;
    for (int64_t b = 0; b < num_blocks; ++b, block += F::BLOCK_BYTES) {
        shared.read(block, b);
        prefetch<F>(block);
#pragma GCC unroll 2
        for (int g = 0; g < F::GROUPS; ++g) {
            Floats sums[R][VECTORS];
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r)
                for (int v = 0; v < VECTORS; ++v) sums[r][v] = zeros();
#pragma GCC unroll 8
            for (int load = g * GROUP_LOADS; load < (g + 1) * GROUP_LOADS; ++load) {
                Loaded loads[VECTORS];
                for (int v = 0; v < VECTORS; ++v) loads[v] = load_quants<F>(block, v, load);
#pragma GCC unroll 8
                for (int j = 0; j < quants.PARTS; ++j) {
                    Words values[VECTORS];
                    for (int v = 0; v < VECTORS; ++v) values[v] = quants.part(loads[v], load, j);
                    const int64_t word = (b * BLOCK + load * 2 * F::LOAD_PAIRS) / T::STEP + quants.word(j);
#pragma GCC unroll 8
                    for (int r = 0; r < R; ++r) {
                        const Words own = same_words(x[r][word]);
                        for (int v = 0; v < VECTORS; ++v) sums[r][v] = T::dot(sums[r][v], values[v], own);
                    }
                }
            }
#pragma GCC unroll 2
            for (int v = 0; v < VECTORS; ++v) {
                const Floats scale = shared.scale(block, g, v);
#pragma GCC unroll 8
                for (int r = 0; r < R; ++r) totals[r][v] = fma(scale, sums[r][v], totals[r][v]);
                if constexpr (TAKES_SUMS<F>) {
                    const Floats minimum =
                        F::HAS_MINIMUM ? shared.minimum(block, g, v) : times(scale, same(-Quants<F>::ZERO));
#pragma GCC unroll 8
                    for (int r = 0; r < R; ++r)
                        totals[r][v] = fma(minimum, same(group_sums[r][b * F::GROUPS + g]),
                                                       totals[r][v]);
                }
            }
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
        for (int v = 0; v < VECTORS; ++v) out[r][v] = totals[r][v];
}

template <class F>
using MultiplyFew = void (*)(const uint8_t*, int64_t, const uint32_t* const*, const float* const*, const Quants<F>&,
                             Floats (*)[VECTORS]);

template <class F, int... R>
MultiplyFew<F> multiply_few_of(int num_rows, std::integer_sequence<int, R...>) {
    static constexpr MultiplyFew<F> ALL[] = {multiply_few<F, R + 1>...};
    return ALL[num_rows - 1];
}

// The sums of a row's groups.
template <class F>
void sum_groups(const uint16_t* x, int64_t num_in, float* sums) {
    constexpr int SIZE = BLOCK / F::GROUPS;
    for (int64_t at = 0; at < num_in; at += SIZE) {
        Floats sum = zeros();
        for (int k = 0; k < SIZE; k += LANES) sum = plus(sum, Bfloat16::load(x + at + k, 0xffff));
        *sums++ = sum_of(sum);
    }
}

// The sums of all rows' groups, where they are multiplied.
template <class F>
void sum_groups(const Weight& weight, const Rows& rows, std::vector<float>& sums) {
    if (!TAKES_SUMS<F>) return;
    const int64_t row_sums = blocks_of(weight) * F::GROUPS;
    sums.resize(rows.num_rows * row_sums);
    for (int64_t row = 0; row < rows.num_rows; ++row)
        sum_groups<F>(rows.x + row * rows.x_stride, weight.num_in, sums.data() + row * row_sums);
}

template <class F>
void few_rows(const Weight& weight, const Rows& rows, const Inputs& inputs, const std::vector<float>& sums,
              int64_t panel) {
    const int64_t num_blocks = blocks_of(weight), row_sums = TAKES_SUMS<F> ? num_blocks * F::GROUPS : 0;
    const auto quants = Quants<F>::make();
    const uint8_t* blocks = weight.panels + panel * F::panel_bytes(num_blocks);
    constexpr int MOST = MOST_FEW<F>;
    for (int64_t first = 0; first < rows.num_rows; first += MOST) {
        const int count = std::min<int64_t>(MOST, rows.num_rows - first);
        const uint32_t* x[MOST];
        const float* own_sums[MOST];
        for (int r = 0; r < count; ++r) {
            x[r] = inputs.row(first + r);
            own_sums[r] = sums.data() + (first + r) * row_sums;
        }
        Floats out[MOST][VECTORS];
        multiply_few_of<F>(count, std::make_integer_sequence<int, MOST>{})(blocks, num_blocks, x, own_sums, quants,
                                                                              out);
        for (int r = 0; r < count; ++r)
            for (int v = 0; v < VECTORS; ++v)
                store(rows, first + r, panel * PANEL + v * LANES, weight.num_out, out[r][v]);
    }
}

#endif

// Many rows

constexpr int SUMS = SUM_VECTORS * 3 / 2;  // vectors in registers, of rows by outputs

// The words of a row, and how many of them make up one sum; sums of several are added in their order.
struct Inner {
    int64_t count, together;
};

// R rows by V vectors of outputs, from a vector of the panels on.
template <int V, int R>
void multiply_many(const uint32_t (*panels)[PANEL], Inner words, const Rows& rows, const Inputs& inputs, int64_t first,
                   int vector, int64_t first_out, int64_t num_out) {
    Floats totals[R][V];
    const uint32_t* x = inputs.row(first);
    const int64_t stride = inputs.stride;
    for (int64_t start = 0; start < words.count; start += words.together) {
        const int64_t end = std::min(words.count, start + words.together);
        Floats sums[R][V];
        for (int r = 0; r < R; ++r)
            for (int v = 0; v < V; ++v) sums[r][v] = zeros();
        for (int64_t k = start; k < end; ++k) {
            Words values[V];
            for (int v = 0; v < V; ++v)
                values[v] = load_words(&panels[(vector + v) / VECTORS * words.count + k][(vector + v) % VECTORS * LANES]);
#pragma GCC unroll 12
            for (int r = 0; r < R; ++r) {
                const Words own = same_words(x[r * stride + k]);
#pragma GCC unroll 6
                for (int v = 0; v < V; ++v) sums[r][v] = T::dot(sums[r][v], values[v], own);
            }
        }
        for (int r = 0; r < R; ++r)
            for (int v = 0; v < V; ++v) totals[r][v] = start ? plus(totals[r][v], sums[r][v]) : sums[r][v];
    }
    for (int r = 0; r < R; ++r)
        for (int v = 0; v < V; ++v) store(rows, first + r, first_out + (vector + v) * LANES, num_out, totals[r][v]);
}

using MultiplyMany = void (*)(const uint32_t (*)[PANEL], Inner, const Rows&, const Inputs&, int64_t, int, int64_t,
                              int64_t);

template <int V, int... R>
MultiplyMany multiply_many_of(int num_rows, std::integer_sequence<int, R...>) {
    static constexpr MultiplyMany ALL[] = {multiply_many<V, R + 1>...};
    return ALL[num_rows - 1];
}

// All rows by P panels, as many at a time as registers hold the sums of.
template <int P>
void multiply_rows(const uint32_t (*panels)[PANEL], Inner words, const Rows& rows, const Inputs& inputs,
                   int64_t first_out, int64_t num_out) {
    constexpr int V = SUMS < P * VECTORS * 4 ? 1 : P * VECTORS, MOST = SUMS / V;
    const int64_t num_tiles = (rows.num_rows + MOST - 1) / MOST;
    for (int vector = 0; vector < P * VECTORS; vector += V)
        for (int64_t tile = 0; tile < num_tiles; ++tile) {
            const int64_t start = tile * rows.num_rows / num_tiles, end = (tile + 1) * rows.num_rows / num_tiles;
            multiply_many_of<V>(end - start, std::make_integer_sequence<int, MOST>{})(
                panels, words, rows, inputs, start, vector, first_out, num_out);
        }
}

// How many panels are taken together, so that threads end at about the same time: two, which is the fastest, unless
// others save a sixteenth.
inline int64_t panels_together(int64_t num_panels, int num_threads) {
    auto longest = [&](int64_t size) {
        const int64_t groups = (num_panels + size - 1) / size;
        return (groups + num_threads - 1) / num_threads * size;
    };
    int64_t best = 2;
    for (int64_t size : {3, 1})
        if (longest(size) * 16 < longest(best) * 15) best = size;
    return best;
}

// `count` panels from `panel` on in words; made for the thread that asks, unless they are so in memory.
const uint32_t (*word_panels(const Weight& weight, int64_t panel, int64_t count))[PANEL] {
    const int64_t num_blocks = blocks_of(weight), num_pairs = weight.num_in / 2, num_words = weight.num_in / T::STEP;
    const auto* pairs = reinterpret_cast<const uint32_t (*)[PANEL]>(weight.panels) + panel * num_pairs;
    const bool is_bfloat16 = weight.form == BFLOAT16 || weight.form == PACKED;
    if (is_bfloat16 && T::STEP == 2) return pairs;
    static thread_local std::vector<uint32_t> made;
    auto* panels = panels_in(made, count * num_words);
    if (is_bfloat16)
        for (int64_t pair = 0; pair < count * num_pairs; ++pair)
            for (int at = 0; at < PANEL; at += LANES) {
                const Words both_inputs = load_words(&pairs[pair][at]);
                store_words(&panels[2 * pair][at], shifted_left(both_inputs, 16));
                store_words(&panels[2 * pair + 1][at], both(both_inputs, same_words(0xffff0000)));
            }
#ifndef PENSTOCK_DOTS_HALVES
    with_form(weight.form, [&](auto form) {
        using F = decltype(form);
        for (int64_t index = 0; index < count; ++index)
            to_words<F>(weight.panels + (panel + index) * F::panel_bytes(num_blocks), num_blocks,
                        panels + index * num_words);
    });
#endif
    return panels;
}

#ifdef PENSTOCK_TILES

static_assert(T::STEP == 2 && LANES == 16, "tiles are of pairs of inputs, and of a vector's outputs");

// R times `height` rows from `first` on, by all panels. Tiles 0 to 3 have sums, 4 and 5 rows, 6 and 7 weights.
template <int R>
void multiply_in_tiles(const uint32_t (*panels)[PANEL], int64_t count, int height, const Weight& weight, const Rows& rows,
                       const Inputs& inputs, const int64_t* first, int64_t first_out) {
    const int64_t num_pairs = weight.num_in / 2, row_stride = inputs.stride * 4;
    for (int64_t panel = 0; panel < count; ++panel, panels += num_pairs, first_out += PANEL) {
        tiles::zero<0>(), tiles::zero<1>();
        if constexpr (R == 2) tiles::zero<2>(), tiles::zero<3>();
        for (int64_t pair = 0; pair < num_pairs; pair += BLOCK / 2) {
            tiles::load<6>(panels[pair], sizeof *panels);
            tiles::load<7>(panels[pair] + LANES, sizeof *panels);
            tiles::load<4>(inputs.row(first[0]) + pair, row_stride);
            tiles::dot<0, 4, 6>(), tiles::dot<1, 4, 7>();
            if constexpr (R == 2) {
                tiles::load<5>(inputs.row(first[1]) + pair, row_stride);
                tiles::dot<2, 5, 6>(), tiles::dot<3, 5, 7>();
            }
        }
        alignas(64) float sums[R][tiles::MOST_ROWS][PANEL];
        tiles::store<0>(sums[0][0], sizeof sums[0][0]), tiles::store<1>(sums[0][0] + LANES, sizeof sums[0][0]);
        if constexpr (R == 2)
            tiles::store<2>(sums[1][0], sizeof sums[1][0]), tiles::store<3>(sums[1][0] + LANES, sizeof sums[1][0]);
        for (int r = 0; r < R; ++r)
            for (int row = 0; row < height; ++row)
                for (int at = 0; at < PANEL; at += LANES)
                    store(rows, first[r] + row, first_out + at, weight.num_out, load_floats(&sums[r][row][at]));
    }
}

// All rows by panels. A row's sums have one order wherever it is in a tile: where fewer rows are left than a tile has,
// it has some of those before again; and where there are fewer in all, tiles are lower.
void multiply_in_tiles(const uint32_t (*panels)[PANEL], int64_t count, const Weight& weight, const Rows& rows,
                       const Inputs& inputs, int64_t first_out) {
    const int height = std::min<int64_t>(tiles::MOST_ROWS, rows.num_rows);
    tiles::Shapes shapes;
    for (int tile : {0, 1, 2, 3, 4, 5}) shapes.set(tile, height, tiles::ROW_BYTES);
    for (int tile : {6, 7}) shapes.set(tile, BLOCK / 2, tiles::ROW_BYTES);
    tiles::configure(shapes);
    for (int64_t start = 0; start < rows.num_rows; start += 2 * height) {
        const int64_t last = rows.num_rows - height, first[] = {std::min(start, last), std::min(start + height, last)};
        const auto multiply = start < last ? multiply_in_tiles<2> : multiply_in_tiles<1>;
        multiply(panels, count, height, weight, rows, inputs, first, first_out);
    }
    tiles::release();  // so that the system need not keep them where it stops this thread
}

#endif

// oneDNN sums up to 1024 inputs of several rows at a time; 512, where there are no more than 1024. Of one row it would
// always be 512.
int64_t summed_together(const Weight& weight) {
    if (weight.form != PACKED) return weight.num_in;
    return weight.num_in <= 1024 ? 512 : 1024;
}

void many_rows(const Weight& weight, const Rows& rows, const Inputs& inputs, int64_t panel, int64_t count) {
    const Inner words{weight.num_in / T::STEP, summed_together(weight) / T::STEP};
    const auto* panels = word_panels(weight, panel, count);
#ifdef PENSTOCK_TILES
    if (weight.form != PACKED && weight.num_in % BLOCK == 0)
        return multiply_in_tiles(panels, count, weight, rows, inputs, panel * PANEL);
#endif
    switch (count) {
        case 1: return multiply_rows<1>(panels, words, rows, inputs, panel * PANEL, weight.num_out);
        case 2: return multiply_rows<2>(panels, words, rows, inputs, panel * PANEL, weight.num_out);
        default: return multiply_rows<3>(panels, words, rows, inputs, panel * PANEL, weight.num_out);
    }
}

// Whether so few rows have a way of their own, where they need not be canonical.
bool is_few(const Weight& weight, int64_t num_rows) {
    bool found = false;
#ifndef PENSTOCK_DOTS_HALVES
    with_form(weight.form, [&](auto form) { found = num_rows <= decltype(form)::MOST_ROWS; });
#endif
    return found;
}

// Rows become integers of 8 or of 16 bits, or few rows are multiplied with quants, or any number with panels made words.
enum class Way { BYTES, HALVES, FEW, MANY };

Way way_of(const Weight& weight, int64_t num_rows, bool is_canonical) {
    if (weight.rounds_rows) return Way::BYTES;
#ifdef PENSTOCK_DOTS_HALVES
    if (with_form(weight.form, [](auto) {})) return Way::HALVES;
#endif
    return !is_canonical && is_few(weight, num_rows) ? Way::FEW : Way::MANY;
}

// What is made of each row before it is multiplied: nothing where it can be as it is.
int64_t made_words(const Weight& weight, Way way) {
    int64_t num_words = T::STEP == 1 ? weight.num_in : 0;
    with_form(weight.form, [&](auto form) {
        if (way == Way::BYTES) num_words = byte_row_words<decltype(form)>(blocks_of(weight));
#ifdef PENSTOCK_DOTS_HALVES
        if (way == Way::HALVES) num_words = half_row_words<decltype(form)>(blocks_of(weight));
#endif
    });
    return num_words;
}

void make_words(const Weight& weight, Way way, const uint16_t* x, uint32_t* to) {
    if (way == Way::FEW || way == Way::MANY) return T::copy(x, weight.num_in, to);
    with_form(weight.form, [&](auto form) {
        using F = decltype(form);
        if (way == Way::BYTES) round_row<F>(x, blocks_of(weight), reinterpret_cast<ByteGroup<F>*>(to));
#ifdef PENSTOCK_DOTS_HALVES
        if (way == Way::HALVES) make_halves<F>(x, blocks_of(weight), reinterpret_cast<HalfBlock<F>*>(to));
#endif
    });
}

}  // namespace

void multiply(const Weight* weights, const Rows* rows, int64_t count, bool is_canonical, int num_threads) {
    struct Product {
        Inputs inputs;
        std::vector<float> sums;
        int64_t first_piece, step;  // panels of a piece
        Way way;
    };
    int64_t num_panels = 0, num_made = 0, num_pieces = 0;
    for (int64_t index = 0; index < count; ++index) {
        num_panels += panels_of(weights[index]);
        const Way way = way_of(weights[index], rows[index].num_rows, is_canonical);
        num_made += rows[index].num_rows * made_words(weights[index], way);
    }
    const int64_t together = panels_together(num_panels, std::abs(num_threads));
    static thread_local std::vector<uint32_t> made;  // bytes or floats of all rows
    static thread_local std::vector<Product> own_products;
    made.resize(num_made);
    if (int64_t(own_products.size()) < count) own_products.resize(count);
    uint32_t* to = made.data();
    Product* const products = own_products.data();
    for (int64_t index = 0; index < count; ++index) {
        const Weight& weight = weights[index];
        const Rows& own_rows = rows[index];
        Product& product = products[index];
        product.way = way_of(weight, own_rows.num_rows, is_canonical);
        product.inputs = {reinterpret_cast<const uint32_t*>(own_rows.x), own_rows.x_stride / 2};
        if (const int64_t size = made_words(weight, product.way)) {
            product.inputs = {to, size};
            for_pieces(own_rows.num_rows, own_rows.num_rows > 16 ? num_threads : 1, [&](int64_t row) {
                make_words(weight, product.way, own_rows.x + row * own_rows.x_stride, to + row * size);
            }, 16);
            to += own_rows.num_rows * size;
        }
        product.step = product.way == Way::MANY ? together : 1;
#ifndef PENSTOCK_DOTS_HALVES
        if (product.way == Way::FEW)
            with_form(weight.form, [&](auto form) { sum_groups<decltype(form)>(weight, own_rows, product.sums); });
#endif
        product.first_piece = num_pieces;
        num_pieces += (panels_of(weight) + product.step - 1) / product.step;
    }
    for_pieces(num_pieces, num_threads, [=](int64_t piece) {
        const auto is_before = [](int64_t at, const Product& product) { return at < product.first_piece; };
        const Product& product = std::upper_bound(products, products + count, piece, is_before)[-1];
        const int64_t index = &product - products, panel = (piece - product.first_piece) * product.step;
        const Weight& weight = weights[index];
        if (product.way == Way::MANY)
            return many_rows(weight, rows[index], product.inputs, panel,
                             std::min(product.step, panels_of(weight) - panel));
        with_form(weight.form, [&](auto form) {
            using F = decltype(form);
            if (product.way == Way::BYTES) return byte_rows<F>(weight, rows[index], product.inputs, panel);
#ifdef PENSTOCK_DOTS_HALVES
            half_rows<F>(weight, rows[index], product.inputs, panel);
#else
            few_rows<F>(weight, rows[index], product.inputs, product.sums, panel);
#endif
        });
    });
}

}  // namespace penstock

using namespace penstock;

// Bytes of a weight's panels; 0 where there is no such form.
extern "C" int64_t penstock_quantised_bytes(const Weight* weight) {
    int64_t bytes = 0;
    with_form(weight->form, [&](auto form) {
        bytes = panels_of(*weight) * decltype(form)::panel_bytes(blocks_of(*weight));
    });
    return bytes;
}

// Rows of blocks, as a file has them, become the first `num_in` inputs of `outputs`.
extern "C" void penstock_quantised_pack(const Weight* weight, const uint8_t* rows, int64_t num_rows,
                                        int64_t row_bytes, int64_t num_in, const int64_t* outputs, int num_threads) {
    with_form(weight->form, [&](auto form) {
        for_pieces(num_rows, num_threads, [&](int64_t row) {
            pack_row<decltype(form)>(*weight, rows + row * row_bytes, num_in, outputs[row]);
        }, 16);
    });
}

// Outputs as rows [num_rows, num_in] of bfloat16 or float32; false where the weight has not all of them.
extern "C" int penstock_quantised_rows(const Weight* weight, const int64_t* outputs, int64_t num_rows,
                                       int is_bfloat16, void* to, int num_threads) {
    for (int64_t row = 0; row < num_rows; ++row)
        if (outputs[row] < 0 || outputs[row] >= weight->num_out) return 0;
    return with_form(weight->form, [&](auto form) {
        const int64_t size = weight->num_in;
        for_pieces(num_rows, num_rows > 16 ? num_threads : 1, [&](int64_t row) {
            if (!is_bfloat16)
                return unpack_row<decltype(form)>(*weight, outputs[row], static_cast<float*>(to) + row * size);
            std::vector<float> values(size);
            unpack_row<decltype(form)>(*weight, outputs[row], values.data());
            for (int64_t at = 0; at < size; at += LANES)
                Bfloat16::store(static_cast<uint16_t*>(to) + row * size + at, 0xffff,
                                load_floats(values.data() + at));
        });
    });
}

// Whether there is code for products.
extern "C" int penstock_quantised_linear(const Weight* weight, const uint16_t* x, uint16_t* out, const uint16_t* bias,
                                         int64_t num_rows, int64_t x_stride, int64_t out_stride, int is_canonical,
                                         int num_threads) {
    // Where something is made of rows, some at a time: they need no room that grows with a chunk.
    const int64_t most = weight->rounds_rows ? 512 : T::STEP == 2 ? num_rows : 256;
    const bool is_many = is_canonical || !is_few(*weight, num_rows);
    for (int64_t first = 0; first < num_rows; first += most) {
        const Rows rows{x + first * x_stride, out + first * out_stride, bias, std::min(most, num_rows - first), x_stride,
                        out_stride};
        multiply(weight, &rows, 1, is_many, num_threads);
    }
    return 1;
}
