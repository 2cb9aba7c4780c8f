"""The sizes that bits, memory estimates and kernels share. Each has its home here, and how they hang together."""

from dataclasses import dataclass

# Tokens of a block of the cache: what is found, shared, stored and given out as one.
BLOCK_TOKENS = 64
# Rows of experts, each counted once for each of its experts, that a processor has at a time, unless there are more in
# a pass.
EXPERT_PLACES = 2048
# Rows of a product that are rounded to 8 bits at a time, and the bytes that one of their inputs takes: its own, and
# its share of two words of a group of 32.
ROUNDED_ROWS = 512
ROUNDED_BYTES = 1.25
# Recurrent state passes through a prompt in blocks of so many tokens: chunks cut between blocks change no bits.
STATE_GRID = 64
# A chunk that shares its step with others is a multiple of so many tokens, but for a prompt's end: smaller ones would
# pay more for padding than for tokens.
SHARE_GRID = 64
assert STATE_GRID % BLOCK_TOKENS == 0  # a state is kept where a block ends

# Prompt tokens of a step, unless something else is known; on a GPU, which a few hundred rows do not fill, more.
DEFAULT_CHUNK_SIZE, GPU_CHUNK_SIZE = 512, 2048

# Elements of a whole number of vectors, whatever the dtype: no vector unit works on more at once.
LANES = 64


def whole_lanes(width: int) -> int:
    """The width in whole vectors. Columns that are added to fill one up are zero and change nothing."""
    return -(-width // LANES) * LANES


# Of the longest vector. A library may sum in another order what begins inside of one.
VECTOR_BYTES = 64
# Positions of a rotary table that are made at a time.
ROTARY_PAGE = 1024
# A decode's past of no more tokens than this is copied together where it lies in several places: that takes less time
# than to attend to each and merge.
JOINED_TOKENS = 1024

# Rows of products. More than a few are padded to a multiple of the grid: libraries keep code and plans for every
# number that they meet, and a service would meet all of them.
FEW_ROWS, ROW_GRID = 16, 8
# On a GPU the grid is this, and so many times coarser beyond so many rows.
GPU_ROW_GRID, COARSER, FINE_ROWS = 64, 8, 2560
# The rows that feed-forward blocks have at a time on a GPU, and the most of a chunk that is recorded as graphs: a
# GPU is busy long enough with the kernels of more.
FEED_ROWS = GRAPH_ROWS = FINE_ROWS
# Products of no more rows have a kernel of their own on a GPU.
GPU_FEW_ROWS = 64
# Rows of the output head at a time, where their number must not matter.
HEAD_ROWS, GPU_HEAD_ROWS = 8, 32
assert FINE_ROWS % GPU_ROW_GRID == 0
assert GPU_ROW_GRID > ROW_GRID  # which is how a GPU's grid is told

# The reference's attention: the tiles of a prompt, counted from its first token; the squares of a tile's causal part;
# the rows modulo which a query keeps its bits.
TILE, SQUARE, QUERY_GRID = 512, 256, 64
assert TILE % SQUARE == SQUARE % QUERY_GRID == 0
# Rows of a gated norm that are taken at once: what they hold in float32 stays in a processor's cache.
NORM_ROWS = 256
# Blocks of the delta rule are prepared several at once where that gives every thread so many elements of a token.
# More would only take more memory, which a processor's cache does not hold.
ELEMENTS_PER_THREAD, MOST_STATE_BLOCKS = 2048, 8

# Native attention sums keys in such blocks, and blocks in such segments (as `kernels/native/attention.h` states).
NATIVE_BLOCK, NATIVE_SEGMENT = 64, 256
assert NATIVE_SEGMENT % NATIVE_BLOCK == BLOCK_TOKENS % NATIVE_BLOCK == 0

# A GPU's attention: tiles; programs that share a decode's past, whatever its length, since where it is cut must not
# depend on others; heads times parts of a chunk's past, for 512 queries to give every multiprocessor something to do;
# numbers of queries that cuDNN is given, which makes a plan for each that it meets.
GPU_TILE, SPLITS, HEADS_AND_PARTS, QUERY_BUCKETS = 1024, 64, 32, (64, 128, 256, 512)
# After so many tokens, the rest of a tile is attended at the same time as the next one: else it is over before the
# host has said so.
LONG_PAST = 4096
assert GPU_TILE % BLOCK_TOKENS == 0
# A span of a delta net runs in pieces of so many tokens, which bounds what it takes beside its inputs and outputs.
PIECE_TOKENS = 64 * STATE_GRID


@dataclass(frozen=True)
class RowLaw:
    """The shapes on which prompts run, so that a row's bits do not depend on what stands beside it."""

    tile_size: int  # of attention's grid; 0: no grid
    row_floor: int = 1  # products of fewer rows give a row other bits: they are padded up to it
    row_slab: int = 0  # products of more rows run as several, of this many each; 0: as one
    row_grid: int = ROW_GRID  # more than a few rows are padded to a multiple of this
    avoided_rows: tuple[int, ...] = ()  # numbers of rows on the grid whose products have other bits
    expert_slab: int = 0  # as `row_slab` for experts, which have few rows each; 0: as for all others
    free_decodes: int = 0  # up to so many decodes, in a pass of their own, give each the same bits as alone
    few_rows: int = (
        0  # products of up to so many rows, the head's too, have the bits of those of many: unpadded
    )

    def frees(self, num_decodes: int) -> bool:
        """Whether so many decodes take no longer at once where each has the bits that it has alone."""
        return self.few_rows > 0 or num_decodes <= self.free_decodes

    def padded_rows(self, num_rows: int) -> int:
        """How many rows a product must have for `num_rows` of them to have the same bits as among any others."""
        if num_rows <= self.few_rows:
            return num_rows
        return self._padded(num_rows, self.row_floor, self.row_slab)

    def prompt_rows(self, num_rows: int) -> int:
        """How many rows a pass with prompts has: few take as long as any fewer, and are recorded as one."""
        return max(self.padded_rows(num_rows), self.few_rows)

    def padded_expert_rows(self, num_rows: int) -> int:
        slab = self.expert_slab or self.row_slab
        return self._padded(num_rows, slab or self.row_floor, slab)

    def _padded(self, num_rows: int, floor: int, slab: int) -> int:
        grid = slab or (self._grid_of(num_rows) if num_rows > FEW_ROWS else 1)
        count = max(floor, -(-num_rows // grid) * grid)
        while count in self.avoided_rows:
            count += slab or self._grid_of(count + 1)
        return count

    def _grid_of(self, num_rows: int) -> int:
        """What many rows are padded to a multiple of. A GPU's products were tried on all of its grid, and are padded
        to a coarser one from some number on."""
        return COARSER * self.row_grid if self.row_grid > ROW_GRID and num_rows > FINE_ROWS else self.row_grid

    def slabs(self, num_rows: int, most: int) -> list[slice]:
        """Rows in parts of `most` or fewer, all of them of numbers whose products have a row's usual bits; none where
        there are no such parts."""
        num_parts = -(-num_rows // most)
        least = -(-num_rows // num_parts // self.row_grid) * self.row_grid
        # The largest power of two is what a GPU's processors share out best.
        for size in (1 << most.bit_length() - 1, *range(least, most + 1, self.row_grid)):
            slabs = [slice(start, min(start + size, num_rows)) for start in range(0, num_rows, size)]
            sizes = {slab.stop - slab.start for slab in slabs}
            if min(sizes) >= self.row_floor and not sizes & set(self.avoided_rows):
                return slabs
        return []
