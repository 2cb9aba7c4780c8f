"""Requests that run together and begin alike: each is given what there is of its prompt, and waits for what another
is about to read."""

from collections.abc import Callable, Iterable

from penstock.cache import BLOCK_TOKENS, SlotPool
from penstock.engine.job import Job
from penstock.engine.reuse import Prefix, Reuse
from penstock.plan.request import Span
from penstock.plan.step import RequestId


class PrefixSharing:
    """What `Reuse` does for one sequence, for the jobs of a batcher at each turn of their lives. Without reuse, and
    for jobs that have no prefix, nothing happens."""

    def __init__(self, reuse: Reuse | None, slots: SlotPool | None, on_gain: Callable[[Job], None]) -> None:
        """`on_gain` is told when a job's cache has more of its prompt than it had, without its being read."""
        self._reuse = reuse
        self._slots = slots
        self._on_gain = on_gain

    def share(self, jobs: Iterable[Job], *, in_pieces: bool) -> set[RequestId]:
        """Give jobs that read their prompts, in order of arrival, what is there of them by now: those that are to sit
        the next step out, since they wait for more. That is what is being copied from disk, a piece at a time if so
        asked, and what a job before them is about to read."""
        if self._reuse is None:
            return set()
        held: set[RequestId] = set()
        leaders: list[Job] = []
        for job in jobs:
            if job.prefix is None:
                continue
            self._find_more(self._reuse, job, job.prefix, in_pieces=in_pieces)
            if job.prefix.stored is not None or self._follow(job, job.prefix, leaders):
                held.add(job.id)
            leaders.append(job)
        return held

    def start(self, job: Job) -> None:
        """The job's first step begins."""
        if self._reuse is not None:
            self._reuse.count(job.num_cached)

    def states_to_keep(self, job: Job, chunk: Span, num_spans: int) -> list[int]:
        """Where the state is to be kept within a chunk. So many spans of the step need a slot for their ends."""
        if self._reuse is None or job.prefix is None or self._slots is None:
            return []
        num_free = self._slots.num_free - num_spans
        return self._reuse.states_to_keep(job.prefix, chunk.start, chunk.end, num_free)

    def note(self, job: Job, start: int, *, is_chunk: bool) -> None:
        """A step of the job was committed, from token `start` on, as a part of its prompt or not."""
        if self._reuse is not None and job.prefix is not None:
            self._reuse.note(job.prefix, job.cache, job.tokens, start, is_chunk=is_chunk)

    def num_shared(self, job: Job) -> int:
        """Blocks that a job which waits would share with others that hold them."""
        return 0 if self._reuse is None or job.prefix is None else self._reuse.num_in_use(job.prefix)

    def leave(self, job: Job, num_kept: int) -> None:
        """The job is about to give up all blocks but the first `num_kept`."""
        if self._reuse is not None and job.prefix is not None:
            self._reuse.leave(job.prefix, job.cache, num_kept)

    def end(self, job: Job) -> None:
        """The job is over, and about to give up all that it holds."""
        if self._reuse is not None and job.prefix is not None:
            self._reuse.end(job.prefix, job.cache)

    def _find_more(self, reuse: Reuse, job: Job, prefix: Prefix, *, in_pieces: bool) -> None:
        if reuse.adopt(prefix, job.cache):
            self._on_gain(job)
        num_blocks = job.cache.num_tokens // BLOCK_TOKENS
        if prefix.needs_search or num_blocks < prefix.num_searched_from:
            reuse.search(prefix, num_blocks)
        if reuse.load(prefix, job.cache, in_pieces=in_pieces):
            self._on_gain(job)

    def _follow(self, job: Job, prefix: Prefix, leaders: Iterable[Job]) -> bool:
        """Let the first of those before it that has yet to read some of what they have in common keep its state where
        they part. False: there is none."""
        if self._slots is not None and job.cache.num_tokens % BLOCK_TOKENS:
            return False  # it could not go on from there
        for leader in leaders:
            assert leader.prefix is not None
            common = prefix.num_common(leader.prefix) * BLOCK_TOKENS
            if job.cache.num_tokens <= leader.cache.num_tokens < common:
                leader.prefix.keep_states.add(common)
                return True
        return False
