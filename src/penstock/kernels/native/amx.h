// Tiles of AMX: registers of up to 16 rows of 64 bytes, and sums of products of pairs of bfloat16 in them. They are a
// thread's own, and hold what it last configured.
//
// With PENSTOCK_EMULATED_AMX all of it is computed as Intel's manual (volume 2, TDPBF16PS) says, on any processor that
// has AVX-512, and what a processor would refuse ends the process.
#pragma once

#include <cstdint>

#ifdef PENSTOCK_EMULATED_AMX
#include <immintrin.h>

#include <cstring>
#endif

namespace penstock::tiles {

constexpr int NUM_TILES = 8;
constexpr int MOST_ROWS = 16;
constexpr int ROW_BYTES = 64;

// How many rows each tile has, and bytes in a row, as the processor reads it; none of either where it is not used.
struct alignas(64) Shapes {
    uint8_t palette = 1;
    uint8_t start_row = 0;
    uint8_t reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};

    void set(int tile, int num_rows, int num_bytes) {
        rows[tile] = num_rows;
        row_bytes[tile] = num_bytes;
    }
};
static_assert(sizeof(Shapes) == 64, "as the processor reads it");

#ifndef PENSTOCK_EMULATED_AMX

// Assembly, since some compilers' functions take a tile's number only as it is written, not as an argument of a template,
// and do not say what memory they read.
inline void configure(const Shapes& shapes) { asm volatile("ldtilecfg %0" ::"m"(shapes)); }
inline void release() { asm volatile("tilerelease"); }

template <int Tile>
inline void zero() {
    asm volatile("tilezero %%tmm%c0" ::"i"(Tile));
}

template <int Tile>
inline void load(const void* from, int64_t stride) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(Tile) : "memory");
}

template <int Tile>
inline void store(void* to, int64_t stride) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(stride), "i"(Tile) : "memory");
}

// Sums [rows, outputs] of rows [rows, pairs] by weights [pairs, outputs] are added to those that are there.
template <int Sums, int Rows, int Weights>
inline void dot() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(Sums), "i"(Rows), "i"(Weights));
}

#else

struct Registers {
    Shapes shapes;
    bool are_configured = false;
    alignas(64) uint8_t bytes[NUM_TILES][MOST_ROWS][ROW_BYTES];
};

inline Registers& registers() {
    static thread_local Registers own;
    return own;
}

inline void require(bool is_allowed) {
    if (!is_allowed) __builtin_trap();
}

inline void configure(const Shapes& shapes) {
    require(shapes.palette == 1 && shapes.start_row == 0);
    for (uint8_t byte : shapes.reserved) require(byte == 0);
    for (int tile = 0; tile < 16; ++tile) {
        const int rows = shapes.rows[tile], row_bytes = shapes.row_bytes[tile];
        require(rows <= MOST_ROWS && row_bytes <= ROW_BYTES && (rows == 0) == (row_bytes == 0));
        require(tile < NUM_TILES || rows == 0);
    }
    Registers& own = registers();
    own.shapes = shapes;
    own.are_configured = true;
    std::memset(own.bytes, 0, sizeof own.bytes);
}

inline void release() {
    Registers& own = registers();
    own.are_configured = false;
    std::memset(own.bytes, 0, sizeof own.bytes);
}

inline void require_used(int tile) {
    const Registers& own = registers();
    require(own.are_configured && own.shapes.rows[tile] > 0);
}

template <int Tile>
inline void zero() {
    require_used(Tile);
    std::memset(registers().bytes[Tile], 0, sizeof registers().bytes[Tile]);
}

template <int Tile>
inline void load(const void* from, int64_t stride) {
    zero<Tile>();
    Registers& own = registers();
    for (int row = 0; row < own.shapes.rows[Tile]; ++row)
        std::memcpy(own.bytes[Tile][row], static_cast<const uint8_t*>(from) + row * stride, own.shapes.row_bytes[Tile]);
}

template <int Tile>
inline void store(void* to, int64_t stride) {
    require_used(Tile);
    const Registers& own = registers();
    for (int row = 0; row < own.shapes.rows[Tile]; ++row)
        std::memcpy(static_cast<uint8_t*>(to) + row * stride, own.bytes[Tile][row], own.shapes.row_bytes[Tile]);
}

// The first inputs of all pairs make one sum, the second ones another, each from zero and each product added as it is;
// then both are added, and then that to what is there. All is rounded to nearest even; denormals are zero.
template <int Sums, int Rows, int Weights>
__attribute__((noinline)) void dot() {
    static_assert(Sums != Rows && Sums != Weights && Rows != Weights, "the processor refuses it");
    for (int tile : {Sums, Rows, Weights}) require_used(tile);
    Registers& own = registers();
    const uint8_t* rows = own.shapes.rows;
    const uint16_t* row_bytes = own.shapes.row_bytes;
    for (int tile : {Sums, Rows, Weights}) require(row_bytes[tile] % 4 == 0);
    require(rows[Sums] == rows[Rows] && row_bytes[Sums] == row_bytes[Weights] && row_bytes[Rows] / 4 == rows[Weights]);
    // All that is computed comes from memory and goes there, which no compiler moves across these.
    const unsigned before = _mm_getcsr();
    _mm_setcsr(_MM_MASK_MASK | _MM_ROUND_NEAREST | _MM_FLUSH_ZERO_ON | 0x40);
    const __m512i upper = _mm512_set1_epi32(0xffff0000);
    for (int row = 0; row < rows[Sums]; ++row) {
        __m512 first = _mm512_setzero_ps(), second = _mm512_setzero_ps();
        for (int pair = 0; pair < rows[Weights]; ++pair) {
            uint32_t word;
            std::memcpy(&word, own.bytes[Rows][row] + 4 * pair, sizeof word);
            const __m512i x = _mm512_set1_epi32(word), weights = _mm512_load_si512(own.bytes[Weights][pair]);
            first = _mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_slli_epi32(x, 16)),
                                    _mm512_castsi512_ps(_mm512_slli_epi32(weights, 16)), first);
            second = _mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_and_si512(x, upper)),
                                     _mm512_castsi512_ps(_mm512_and_si512(weights, upper)), second);
        }
        uint8_t* sums = own.bytes[Sums][row];
        const __m512 sum = _mm512_add_ps(_mm512_load_ps(reinterpret_cast<float*>(sums)), _mm512_add_ps(first, second));
        const __mmask16 columns = (1u << row_bytes[Sums] / 4) - 1;
        _mm512_store_ps(reinterpret_cast<float*>(sums), _mm512_maskz_mov_ps(columns, sum));
    }
    _mm_setcsr(before);
}

#endif

}  // namespace penstock::tiles
