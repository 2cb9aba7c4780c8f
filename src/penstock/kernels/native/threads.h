// Work that several threads share: pieces that are claimed one after the other, so that no thread waits for one that
// the system has put aside before it began.
#pragma once

#include <cstdint>

namespace penstock {

// Call `run(work, first, end)` for ranges that make up [0, num_pieces), on up to `num_threads` threads; a negative number
// is of torch's threads, which beside its operations are awake and would leave others no processor. Which thread has
// which piece is left to chance: a piece's bits must not depend on it. Up to `at_a_time` are claimed together. Returns
// when all are done.
void share(int64_t num_pieces, int64_t at_a_time, int num_threads, void (*run)(const void*, int64_t, int64_t), const void* work);

// The same as `share` for a function of the piece.
template <class Piece>
void for_pieces(int64_t num_pieces, int num_threads, const Piece& piece, int64_t at_a_time = 1) {
    share(
        num_pieces, at_a_time, num_threads,
        [](const void* work, int64_t first, int64_t end) {
            for (int64_t index = first; index < end; ++index) (*static_cast<const Piece*>(work))(index);
        },
        &piece);
}

}  // namespace penstock
