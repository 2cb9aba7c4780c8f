"""What a chunk's size follows from, and what came of it."""

from dataclasses import dataclass
from math import isfinite
from typing import Literal

from penstock.errors import SettingError
from penstock.plan.checks import check_int
from penstock.plan.config import DEFAULT_CHUNK_SIZE

# What set a size: what the user fixed, the memory budget, a latency target, the profile of this machine, or nothing
# that is known (default); the prompt's end, the wish to leave no sliver there (balanced), memory that ran out
# (halved); or a bound of all automatic sizes (smallest, largest).
SizeRule = Literal[
    "fixed", "memory", "latency", "tuned", "default", "end", "balanced", "halved", "smallest", "largest"
]

SMALLEST_CHUNK = 8
LARGEST_CHUNK = 2048


@dataclass(frozen=True)
class SizeRules:
    """`fixed` is a number of tokens, 0 the whole prompt, None leaves the size to the other rules.

    `max_activation_bytes` is a promise: no step is planned that needs more. `free_bytes` is what the machine has
    free: a step is to need no more than half of it.

    `target_itl_s` bounds a step that tokens of others wait for: it is the time from one of their tokens to the next.
    `target_ttft_s` bounds the time from a prompt's arrival to its first token. Larger chunks read a prompt in less
    time, since each step costs something of its own, so it puts a floor under the chunk; where the two contradict
    each other, the bound of a step holds.

    Sizes are multiples of `grid`, but for a prompt's end. A latency target makes them no smaller than `smallest`.
    """

    fixed: int | None = None
    max_activation_bytes: int | None = None
    free_bytes: int | None = None
    target_itl_s: float | None = None
    target_ttft_s: float | None = None
    grid: int = 1
    smallest: int = SMALLEST_CHUNK
    largest: int = LARGEST_CHUNK
    default: int = DEFAULT_CHUNK_SIZE
    tuned: int | None = None  # the chunk that a profile found to be the fastest

    def __post_init__(self) -> None:
        for name in ("grid", "smallest", "largest", "default"):
            check_int(name, getattr(self, name), 1)
        for name, least in (("fixed", 0), ("max_activation_bytes", 1), ("free_bytes", 0), ("tuned", 1)):
            if getattr(self, name) is not None:
                check_int(name, getattr(self, name), least)
        for name in ("target_itl_s", "target_ttft_s"):
            target = getattr(self, name)
            if target is None:
                continue
            if not isfinite(target) or target <= 0:
                raise SettingError(f"{name}={target!r} is not accepted: give a number of seconds above 0")
            if self.fixed is not None:
                raise SettingError(
                    f"{name}={target!r} contradicts fixed={self.fixed}: a fixed size follows no target, give None"
                )

    @property
    def is_auto(self) -> bool:
        return self.fixed is None

    @property
    def most(self) -> int:
        """The most tokens of an automatic chunk, on the grid."""
        return self.on_grid(max(self.largest, self.tuned or 0, self.default))

    @property
    def budget_bytes(self) -> int | None:
        """The most that a step's activations may need."""
        if self.max_activation_bytes is not None:
            return self.max_activation_bytes
        return None if self.free_bytes is None else self.free_bytes // 2

    def on_grid(self, size: int) -> int:
        """The multiple of the grid at or below `size`, at least one."""
        return max(size // self.grid, 1) * self.grid


@dataclass(frozen=True, slots=True)
class SizeQuestion:
    """A step that is to read a part of a prompt, or of several that share it: then `past` is the mean of theirs and
    `num_left` is what they have left together."""

    past: int
    num_left: int
    longest_past: int = 0
    num_prompts: int = 1
    num_decodes: int = 0  # that run in the step
    decode_pasts: int = 0
    num_held: int = 0  # that wait for it, and run in the next
    held_pasts: int = 0
    keeps_itl: bool = False  # whether target_itl bounds the step though no decode is known to wait for it
    waited_s: float = 0.0  # since the prompt came
    most: int | None = None  # since memory ran out at more


@dataclass(frozen=True, slots=True)
class SizeDecision:
    """How many tokens a step reads and the rule that says so; `because` tells a person more, where there is more to
    tell. What is predicted is of the whole step, decodes included; None where nothing is known."""

    size: int
    rule: SizeRule
    predicted_s: float | None = None
    predicted_bytes: int | None = None
    because: str = ""
