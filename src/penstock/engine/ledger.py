"""The scheduler's view of the blocks that its requests hold: the pool itself, since requests may share some."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from penstock.cache import BLOCK_TOKENS, BlockPool
from penstock.engine.job import Job
from penstock.plan.step import RequestId


@dataclass(frozen=True)
class PoolLedger:
    """Blocks that are kept for requests to come count as free: they are given up when they are needed.

    What a request is to give up it gives up at once, after `on_cut` was told. What it is to have more of, the engine
    takes when it begins the step; until then it is only counted.
    """

    pool: BlockPool
    jobs: Mapping[RequestId, Job]
    on_cut: Callable[[Job, int], None]
    count_shared: Callable[[Job], int]
    _wanted: dict[RequestId, int] = field(default_factory=dict)

    @property
    def num_free(self) -> int:
        num_to_come = sum(max(wanted - self._has(name), 0) for name, wanted in self._wanted.items())
        return self.pool.num_available - num_to_come

    def num_held(self, request_id: RequestId) -> int:
        return max(self._wanted.get(request_id, 0), self._has(request_id))

    def hold(self, request_id: RequestId, num_blocks: int) -> None:
        job = self.jobs[request_id]
        if num_blocks < self._has(request_id):
            self.on_cut(job, num_blocks)
            job.cache.cut(num_blocks * BLOCK_TOKENS)
        if num_blocks > self._has(request_id):
            self._wanted[request_id] = num_blocks
        else:
            self._wanted.pop(request_id, None)

    def num_shared(self, request_id: RequestId) -> int:
        return self.count_shared(self.jobs[request_id]) if not self._has(request_id) else 0

    def forget(self, request_id: RequestId) -> None:
        self._wanted.pop(request_id, None)

    def _has(self, request_id: RequestId) -> int:
        job = self.jobs.get(request_id)
        return 0 if job is None else job.cache.blocks.num_blocks
