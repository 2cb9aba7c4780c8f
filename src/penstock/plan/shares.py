"""How the prompt tokens of one step are shared among the prompts that want them."""

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.plan.policy import share_unit


@dataclass(frozen=True, slots=True)
class Want:
    """A request could run [start, end) now, or less of it."""

    start: int
    end: int

    def __len__(self) -> int:
        return self.end - self.start


def share_chunks(wants: Sequence[Want], budget: int | None, *, min_share: int, grid: int) -> list[int]:
    """Where the span of each of `wants` ends in this step; it is empty where it ends at its start. The first comes
    first: it is the one that was served longest ago. `budget` is None for one want, whole.

    As many as have room for `min_share` tokens share the budget equally, and what one does not need goes to the
    others; what is left then goes to the rest in their order. Spans end on the grid, or where the want ends. Those
    that share are multiples of `share_unit(grid)`, or end where the want ends. A budget below it leaves the grid.
    """
    ends = [want.start for want in wants]
    if not wants:
        return ends
    if budget is None:
        return [wants[0].end, *ends[1:]]
    unit = share_unit(grid)
    num_sharing = min(max(budget // min_share, 1), len(wants))
    lengths = _fill([len(want) for want in wants[:num_sharing]], budget, unit)
    left = budget
    for index, length in enumerate(lengths):
        ends[index] = _reach(wants[index], wants[index].start, length, grid)
        left -= ends[index] - wants[index].start
    for index, want in enumerate(wants):
        if left == 0:
            break
        whole = left if want.end - ends[index] <= left else left // unit * unit
        if whole and ends[index] < want.end:
            end = _reach(want, ends[index], whole, grid)
            left -= end - ends[index]
            ends[index] = end
    return ends


def _fill(needs: Sequence[int], budget: int, unit: int) -> list[int]:
    """The budget in equal parts of whole units, but for those that need less. A single one takes all it can."""
    lengths = [0] * len(needs)
    by_need = sorted(range(len(needs)), key=needs.__getitem__)
    while by_need and needs[by_need[0]] <= budget // len(by_need):
        index = by_need.pop(0)
        lengths[index] = needs[index]
        budget -= needs[index]
    if len(by_need) == 1 == len(needs):
        lengths[0] = budget
    elif by_need:
        units, num_extra = divmod(budget // unit, len(by_need))
        for place, index in enumerate(sorted(by_need)):
            lengths[index] = unit * (units + (place < num_extra))
    return lengths


def _reach(want: Want, start: int, num_tokens: int, grid: int) -> int:
    """How far so many tokens reach from `start`: to the want's end, or back to the grid if that is a way forward."""
    end = start + num_tokens
    if end >= want.end:
        return want.end
    on_grid = end // grid * grid
    return on_grid if on_grid > start else end
