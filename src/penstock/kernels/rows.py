"""How many rows a pass over a chunk is padded to, so that no row's bits depend on how many there are."""

from dataclasses import dataclass

# torch splits an element-wise pass over its threads in runs of at least this many elements.
_GRAIN = 32_768
# A run that is no multiple of this ends in scalar code, whose exponential differs in the last bit.
LANES = 64


@dataclass(frozen=True)
class RowRule:
    """Rows are padded up to `floor`, and on until an activation [rows, width] splits over the threads in whole
    vectors. `floor` is measured (see `penstock.kernels.probe`); 1 and no threads mean no padding at all."""

    floor: int = 1
    width: int = LANES
    num_threads: int = 1

    def __post_init__(self) -> None:
        if self.width % LANES:
            raise ValueError(f"width={self.width} is not a multiple of {LANES}")

    def padded(self, num_rows: int) -> int:
        """The number of rows to run for `num_rows` rows of a prompt."""
        rows = max(num_rows, self.floor)
        while not self._splits_evenly(rows):
            rows += 1
        return rows

    def _splits_evenly(self, num_rows: int) -> bool:
        elements = num_rows * self.width
        num_runs = min(self.num_threads, -(-elements // _GRAIN))
        return -(-elements // num_runs) % LANES == 0
