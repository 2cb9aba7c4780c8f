"""Requests that run together and begin alike: each gets what there is of its prompt, and waits for what another is
about to read. What they hold of the cache is counted from the pool itself, since they may hold the same blocks."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from penstock.cache import BLOCK_TOKENS, BlockPool
from penstock.engine.job import Job
from penstock.engine.reuse import Prefix
from penstock.plan.step import RequestId


@dataclass(frozen=True)
class PoolLedger:
    """A pool's blocks, as the scheduler asks about them. Idle ones count as free: they are evicted on demand."""

    pool: BlockPool
    jobs: Mapping[RequestId, Job]

    def num_free(self, kept: Mapping[RequestId, int]) -> int:
        if not kept:
            return self.pool.num_available
        released = Counter(
            block
            for request_id, num_blocks in kept.items()
            for block in self.jobs[request_id].cache.blocks.block_ids[num_blocks:]
        )
        return self.pool.num_available + sum(
            self.pool.num_owners(block) == count for block, count in released.items()
        )

    def num_shared(self, request_id: RequestId) -> int:
        job = self.jobs[request_id]
        return 0 if job.prefix is None or job.cache.blocks.num_blocks else job.prefix.num_in_use()


@dataclass(frozen=True)
class Shared:
    """Jobs whose caches hold more of their prompts than before, unread; and those that sit the next step out."""

    gained: tuple[Job, ...] = ()
    held: frozenset[RequestId] = frozenset()


def share(jobs: Iterable[Job], *, in_pieces: bool) -> Shared:
    """Give jobs that read their prompts, in order of arrival, what is there of them by now. A job is held while more
    is being copied from disk, a piece at a time if so asked, and while a job before it is about to read what they
    have in common."""
    gained: list[Job] = []
    held: set[RequestId] = set()
    leaders: list[Job] = []
    for job in jobs:
        if job.prefix is None:
            continue
        if not job.cache.num_in_flight:
            if job.prefix.find_more(in_pieces=in_pieces):
                gained.append(job)
            if job.prefix.has_more_on_disk or _follow(job, job.prefix, leaders):
                held.add(job.id)
        leaders.append(job)
    return Shared(tuple(gained), frozenset(held))


def _follow(job: Job, prefix: Prefix, leaders: Iterable[Job]) -> bool:
    """Let the first of those before it that has yet to read some of what they have in common keep its state where
    they part. False: there is none."""
    if job.cache.state is not None and job.cache.num_tokens % BLOCK_TOKENS:
        return False  # it could not go on from there
    for leader in leaders:
        assert leader.prefix is not None
        common = prefix.num_common(leader.prefix) * BLOCK_TOKENS
        if job.cache.num_tokens <= leader.cache.num_tokens < common:
            leader.prefix.keep_states.add(common)
            return True
    return False
