"""Who may run: what a request needs of the cache, how many blocks there are, and the line of those that wait."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from typing import Protocol

from penstock.plan.checks import check_bool, check_int
from penstock.plan.step import RequestId, SpanKind

# The most tokens of a replay: each attends on its own, which takes several times as long as in a chunk.
REPLAY_TOKENS = 64


@dataclass(frozen=True)
class CacheLimits:
    """The cache that requests share. `keeps_prefix` says whether a sequence may be cut back to a shorter one; models
    with recurrent state or windows keep all of it or nothing."""

    num_blocks: int
    block_tokens: int
    keeps_prefix: bool

    def __post_init__(self) -> None:
        check_int("num_blocks", self.num_blocks, 1)
        check_int("block_tokens", self.block_tokens, 1)
        check_bool("keeps_prefix", self.keeps_prefix)

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_tokens)


@dataclass(frozen=True)
class WindowRoom:
    """What the blocks of layers with a window are to suffice for: the windows of sequences, all tokens that steps in
    flight write, and windows that are kept for sequences to come."""

    num_sequences: int = 1
    step_tokens: int = 0  # 0: as many as the longest sequence has
    num_kept: int = 0

    def num_blocks(self, window: int, block_tokens: int, most: int) -> int:
        """Never more than `most`, which sequences take that are not freed behind their window."""
        if not self.step_tokens:
            return most
        # Before the last whole block; then one that is filled, and one more.
        own = -(-(window - 1) // block_tokens)
        written = -(-self.step_tokens // block_tokens)
        return min(most, self.num_sequences * (own + 2) + written + self.num_kept * own)


@dataclass(slots=True, eq=False)
class TrackedRequest:
    """One request's place in the line and in the cache.

        tokens [0, num_run)             committed: in the cache
        tokens [num_run, num_issued)    in flight: spans of issued steps write them
        tokens [num_issued, num_tokens) known, and not in any step yet

    It holds `num_held` blocks, those in flight included, and wants `num_wanted` more for its known tokens and the
    next one. Its next span begins `num_again` tokens before `num_issued`: chunks may overlap. Where it `is_expected`,
    the last of its tokens is not known yet: a step in flight samples it.
    """

    id: RequestId
    arrival: int
    num_prompt: int
    max_tokens: int
    limits: CacheLimits = field(repr=False)
    owner: str = ""  # owners take turns; requests without one have the same
    priority: int = 0  # of one owner's, the lowest go first
    num_tokens: int = 0
    num_run: int = 0
    num_issued: int = 0
    num_held: int = 0
    num_wanted: int = 0
    num_again: int = 0
    kind: SpanKind = SpanKind.CHUNK  # of its next span
    is_running: bool = False
    is_expected: bool = False
    # The smaller, the longer ago its last chunk was, or its last decode where decodes take turns.
    turn: int = 0
    num_steps_at_token: int = 0  # that were committed when its last token was sampled
    num_overtakes: int = 0
    num_preemptions: int = 0

    def __post_init__(self) -> None:
        self.stand_at(num_run=0, num_issued=0, num_tokens=self.num_prompt)

    @property
    def can_run(self) -> bool:
        """Whether a token is known that no step has: else its next one is sampled by a step in flight."""
        return self.num_issued < self.num_tokens

    @property
    def num_known(self) -> int:
        return self.num_tokens - self.is_expected

    @property
    def next_start(self) -> int:
        return self.num_issued - self.num_again

    @property
    def most_run(self) -> int:
        """The most of its tokens that are ever in the cache: the last one of the answer is never run."""
        return self.num_prompt + self.max_tokens - 1

    @property
    def furthest_end(self) -> int:
        """Where its next span ends at the latest: prompt and answer do not share one."""
        if self.num_issued < self.num_prompt:
            return self.num_prompt
        return min(self.num_tokens, self.num_issued + REPLAY_TOKENS)

    def stand_at(self, num_run: int, num_issued: int, num_tokens: int) -> None:
        self.num_run = num_run
        self.num_issued = num_issued
        self.num_tokens = num_tokens
        blocks_for, most = self.limits.blocks_for, self.most_run
        self.num_held = blocks_for(num_issued)
        self.num_wanted = blocks_for(num_tokens + 1 if num_tokens < most else most) - self.num_held
        if num_issued < self.num_prompt:
            self.kind = SpanKind.CHUNK
        else:
            self.kind = SpanKind.REPLAY if num_tokens - num_issued > 1 else SpanKind.DECODE


class BlockLedger(Protocol):
    """Answers how many blocks of a cache can be had. Requests that begin alike may hold some of the same blocks, so
    what one gives up is not always free."""

    def num_free(self, kept: Mapping[RequestId, int]) -> int:
        """Blocks that nobody holds, once each request in `kept` holds no more than its first so many blocks."""

    def num_writable(self, kept: Mapping[RequestId, int]) -> int:
        """The same of those that a step may write. Layers with a window have fewer than others: they suffice for the
        requests that run, not for all that those will read."""

    def num_shared(self, request_id: RequestId) -> int:
        """Blocks that a request which holds none would share with others that hold them."""


@dataclass(frozen=True)
class PlainLedger:
    """Blocks that nobody shares, by the scheduler's own count."""

    num_blocks: int
    requests: Mapping[RequestId, TrackedRequest]

    def num_free(self, kept: Mapping[RequestId, int]) -> int:
        return self.num_blocks - sum(request.num_held for request in self.requests.values())

    def num_writable(self, kept: Mapping[RequestId, int]) -> int:
        return self.num_free(kept)

    def num_shared(self, request_id: RequestId) -> int:
        return 0


def fair_line(
    waiting: Sequence[TrackedRequest],
    running: Sequence[TrackedRequest],
    max_running_per_key: int | None = None,
) -> Sequence[TrackedRequest]:
    """`waiting` in the order of turns: next is the owner of whom the fewest run, or stand in line already; of one
    owner by priority, and of as much, and of owners with as many, in order of arrival. With `max_running_per_key`, no
    more of one owner than that are in line or run."""
    waiting = sorted(waiting, key=lambda request: request.priority)  # in order of arrival before
    queues: dict[str, list[TrackedRequest]] = {}
    for request in waiting:
        queues.setdefault(request.owner, []).append(request)
    if len(queues) <= 1 and max_running_per_key is None:
        return waiting
    nums_running = Counter(request.owner for request in running)
    line: list[TrackedRequest] = []
    turns = [(nums_running[owner], queue[0].arrival, owner, 0) for owner, queue in queues.items()]
    heapify(turns)
    while turns:
        num_before, _, owner, index = heappop(turns)
        if max_running_per_key is not None and num_before >= max_running_per_key:
            continue
        queue = queues[owner]
        line.append(queue[index])
        if index + 1 < len(queue):
            heappush(turns, (num_before + 1, queue[index + 1].arrival, owner, index + 1))
    return line


def choose_admissions(
    waiting: Sequence[TrackedRequest],
    num_places: int,
    num_room: int,
    max_overtakes: int,
    num_shared: Callable[[RequestId], int] = lambda request_id: 0,
) -> list[TrackedRequest]:
    """Those that may run from now on, of `waiting` in the order of the line, where there are `num_places` and
    `num_room` blocks that nobody else wants; what a request shares with those that run takes no room. Counts the
    overtakes that it grants: one that has no room lets later ones pass that have, `max_overtakes` of them in its
    life, so that it cannot wait forever."""
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
