"""Who may run: what a request needs of the cache, and the line of those that wait."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from penstock.plan.checks import check_bool, check_int
from penstock.plan.step import RequestId, SpanKind

# The most tokens of a replay: each attends on its own, which takes several times as long as in a chunk.
REPLAY_TOKENS = 64


@dataclass(frozen=True)
class CacheLimits:
    """The cache that requests share. `keeps_prefix` says whether a sequence may be cut back to a shorter one; models
    with recurrent state keep all of it or nothing."""

    num_blocks: int
    block_tokens: int
    keeps_prefix: bool

    def __post_init__(self) -> None:
        check_int("num_blocks", self.num_blocks, 1)
        check_int("block_tokens", self.block_tokens, 1)
        check_bool("keeps_prefix", self.keeps_prefix)

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_tokens)


@dataclass(slots=True, eq=False)
class TrackedRequest:
    """One request's place in the line and in the cache: tokens [0, num_tokens) are known, [0, num_run) are in the
    cache, in `num_held` blocks. It wants `num_wanted` more for its known tokens and the next one."""

    id: RequestId
    arrival: int
    num_prompt: int
    max_tokens: int
    limits: CacheLimits = field(repr=False)
    num_tokens: int = 0
    num_run: int = 0
    num_held: int = 0
    num_wanted: int = 0
    kind: SpanKind = SpanKind.CHUNK  # of its next span
    is_running: bool = False
    turn: int = 0  # the smaller, the longer ago its last chunk was
    num_overtakes: int = 0
    num_preemptions: int = 0

    def __post_init__(self) -> None:
        self.stand_at(num_run=0, num_tokens=self.num_prompt)

    @property
    def most_run(self) -> int:
        """The most of its tokens that are ever in the cache: the last one of the answer is never run."""
        return self.num_prompt + self.max_tokens - 1

    @property
    def furthest_end(self) -> int:
        """Where its next span ends at the latest: prompt and answer do not share one."""
        if self.num_run < self.num_prompt:
            return self.num_prompt
        return min(self.num_tokens, self.num_run + REPLAY_TOKENS)

    def stand_at(self, num_run: int, num_tokens: int) -> None:
        self.num_run = num_run
        self.num_tokens = num_tokens
        self.num_held = self.limits.blocks_for(num_run)
        self.num_wanted = self.limits.blocks_for(min(num_tokens + 1, self.most_run)) - self.num_held
        if num_run < self.num_prompt:
            self.kind = SpanKind.CHUNK
        else:
            self.kind = SpanKind.REPLAY if num_tokens - num_run > 1 else SpanKind.DECODE


def choose_admissions(
    waiting: Sequence[TrackedRequest],
    num_places: int,
    num_room: int,
    max_overtakes: int,
    num_shared: Callable[[RequestId], int] = lambda request_id: 0,
) -> list[TrackedRequest]:
    """Those that may run from now on, of `waiting` in order of arrival, where there are `num_places` and `num_room`
    blocks that nobody else wants; what a request shares with those that run takes no room. Counts the overtakes that
    it grants: one that has no room lets later ones pass that have, `max_overtakes` of them in its life, so that it
    cannot wait forever."""
    admitted: list[TrackedRequest] = []
    passed: list[TrackedRequest] = []
    for request in waiting:
        if len(admitted) == num_places:
            break
        num_wanted = request.num_wanted
        if num_wanted > num_room:
            num_wanted -= num_shared(request.id)
        if num_wanted > num_room:
            passed.append(request)
            if request.num_overtakes >= max_overtakes:
                break
            continue
        admitted.append(request)
        num_room -= num_wanted
        for earlier in passed:
            earlier.num_overtakes += 1
        if any(earlier.num_overtakes >= max_overtakes for earlier in passed):
            break
    return admitted
