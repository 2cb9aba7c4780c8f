"""How steps are shared among many requests: the policy, the budgets, and the waits that follow from them."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Self

from penstock.errors import SettingError
from penstock.plan.checks import check_bool, check_int, check_member
from penstock.plan.grids import DEFAULT_CHUNK_SIZE, SHARE_GRID

# So many prompts share a step, or a few more where the chunk size is no multiple of as many units; others take turns.
MOST_SHARES = 4


def share_unit(grid: int) -> int:
    """What a shared chunk is a multiple of, so that it lies on the grid, too."""
    return -(-SHARE_GRID // grid) * grid


def half_of(num_tokens: int, grid: int) -> int:
    """Half of a chunk, rounded up; up to the grid where the chunk is longer than that, which is still shorter."""
    half = -(-num_tokens // 2)
    return half if num_tokens <= grid else -(-half // grid) * grid


class SchedulePolicy(StrEnum):
    """Who runs in a step where some requests have prompt left to read and others a token to decode.

    With `mixed` every step takes all decodes, and chunks with what is left of its budget. With the others a step is
    either chunks or decodes: prefill-first takes chunks as long as there are any, interleaved takes turns, and
    decode-priority takes decodes. None goes on forever: `max_chunk_steps` and `max_decode_steps` bound them.
    """

    PREFILL_FIRST = "prefill-first"
    INTERLEAVED = "interleaved"
    DECODE_PRIORITY = "decode-priority"
    MIXED = "mixed"

    @classmethod
    def parse(cls, name: object) -> Self:
        """The member of this name, such as `decode-priority` or `decode_priority`."""
        return check_member("policy", name, cls)


@dataclass(frozen=True)
class ScheduleConfig:
    """Budgets of a step and of the queue.

    `chunk_size` is the most prompt tokens of a step, all its prompts together; 0 runs a prompt whole, one in a step.
    `step_tokens` is the most tokens of a step, decodes included; None is room for a chunk and every decode.
    `grid` is what chunks end on, other than at a prompt's end: 64 for models with recurrent state.
    With `auto_chunk` a sizer settles each step's budget, at most `chunk_size` and as little as it has to be; with
    `keeps_itl` its target between tokens bounds every step, though no decode is known to wait.
    `overlap`, of one request at a time, is how many tokens a chunk runs again that the one before it ran.
    """

    policy: SchedulePolicy = SchedulePolicy.MIXED
    chunk_size: int = DEFAULT_CHUNK_SIZE
    step_tokens: int | None = None
    max_running: int = 16  # requests in progress at once
    max_running_per_key: int | None = None  # of one owner; None: as many as there are places for
    max_waiting: int = 256  # requests in the queue, beside those that there are places for
    max_chunk_steps: int = 64  # prefill-first: steps of chunks in a row while a decode waits
    max_decode_steps: int = 8  # decode-priority: steps of decodes in a row while a prompt waits
    max_overtakes: int = 8  # later requests that may be admitted before one that has no room yet
    grid: int = 1
    auto_chunk: bool = False
    keeps_itl: bool = False
    overlap: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "policy", SchedulePolicy.parse(self.policy))
        check_int("chunk_size", self.chunk_size, 0)
        for name in ("max_running", "max_waiting", "max_chunk_steps", "max_decode_steps", "grid"):
            check_int(name, getattr(self, name), 1)
        check_int("max_overtakes", self.max_overtakes, 0)
        if self.max_running_per_key is not None:
            check_int("max_running_per_key", self.max_running_per_key, 1)
        if check_bool("auto_chunk", self.auto_chunk) and self.chunk_size == 0:
            raise SettingError(
                "auto_chunk",
                True,
                contradicts={"chunk_size": 0},
                because="prompts are run whole",
            )
        if self.chunk_size % self.grid:
            raise SettingError("chunk_size", self.chunk_size, "a multiple of it", beside={"grid": self.grid})
        check_bool("keeps_itl", self.keeps_itl)
        if check_int("overlap", self.overlap, 0) and self.max_running > 1:
            raise SettingError(
                "overlap", self.overlap, "0, which loses nothing", beside={"max_running": self.max_running}
            )
        if self.step_tokens is None:
            return
        if self.chunk_size == 0:
            raise SettingError(
                "step_tokens",
                self.step_tokens,
                contradicts={"chunk_size": 0},
                because="prompts are run whole",
            )
        least = self.max_running + self.grid
        if check_int("step_tokens", self.step_tokens, 1) < least:
            raise SettingError(
                "step_tokens",
                self.step_tokens,
                f"at least {least}, a token for every request and a chunk of {self.grid}",
                beside={"max_running": self.max_running},
            )

    def chunk_budget(self, num_decodes: int) -> int | None:
        """The most prompt tokens of a step that has so many decodes; None is no limit, and one prompt."""
        if self.chunk_size == 0:
            return None
        if self.step_tokens is None:
            return self.chunk_size
        return min(self.chunk_size, (self.step_tokens - num_decodes) // self.grid * self.grid)

    @property
    def min_share(self) -> int:
        """What a prompt gets at least of a step that it shares with others, but for its end."""
        return self.min_share_of(self.chunk_size)

    def min_share_of(self, budget: int) -> int:
        """The same, of a step that has so many prompt tokens to share."""
        unit = share_unit(self.grid)
        return max(budget // MOST_SHARES // unit * unit, unit)

    @property
    def longest_decode_gap(self) -> int:
        """The most steps from one token of a running request to its next, the latter's included."""
        match self.policy:
            case SchedulePolicy.MIXED:
                return 1
            case SchedulePolicy.PREFILL_FIRST:
                return self.max_chunk_steps + 1
            case SchedulePolicy.INTERLEAVED | SchedulePolicy.DECODE_PRIORITY:
                return 2

    @property
    def longest_prompt_gap(self) -> int:
        """The most steps from one chunk of a running request to its next, the latter's included; from its admission
        to its first, as well. Steps that are shrunk for want of memory serve fewer, and are not counted on; nor is it
        counted on that a sizer lets a step have more than one prompt."""
        budget = self.chunk_budget(self.max_running - 1 if self.policy is SchedulePolicy.MIXED else 0)
        served = 1 if budget is None or self.auto_chunk else max(budget // self.min_share, 1)
        num_chunk_steps = -(-self.max_running // served)
        match self.policy:
            case SchedulePolicy.MIXED:
                return num_chunk_steps
            case SchedulePolicy.PREFILL_FIRST:  # a step of decodes before each run of chunks
                return num_chunk_steps + -(-num_chunk_steps // self.max_chunk_steps)
            case SchedulePolicy.INTERLEAVED:
                return 2 * num_chunk_steps
            case SchedulePolicy.DECODE_PRIORITY:
                return (self.max_decode_steps + 1) * num_chunk_steps


@dataclass(frozen=True, slots=True)
class Turns:
    """Whose turn the next step is, where some requests have prompt to read and others a token to decode."""

    config: ScheduleConfig
    chunks_were_last: bool = False
    num_chunk_steps: int = 0  # in a row, while a decode waited
    num_decode_steps: int = 0  # in a row, while a prompt waited

    def takes_decodes(self) -> bool:
        match self.config.policy:
            case SchedulePolicy.MIXED:
                return True
            case SchedulePolicy.PREFILL_FIRST:
                return self.num_chunk_steps >= self.config.max_chunk_steps
            case SchedulePolicy.INTERLEAVED:
                return self.chunks_were_last
            case SchedulePolicy.DECODE_PRIORITY:
                return self.num_decode_steps < self.config.max_decode_steps

    def takes_chunks(self) -> bool:
        return self.config.policy is SchedulePolicy.MIXED or not self.takes_decodes()

    def after(
        self, *, has_decodes: bool, has_chunks: bool, decodes_wait: bool, prompts_wait: bool
    ) -> "Turns":
        """The turn after a step that has these, while these have to wait."""
        num_chunk_steps = self.num_chunk_steps + 1 if decodes_wait and not has_decodes else 0
        num_decode_steps = self.num_decode_steps + 1 if prompts_wait and not has_chunks else 0
        return Turns(self.config, has_chunks, num_chunk_steps, num_decode_steps)
