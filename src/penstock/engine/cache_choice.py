"""The cache in which a request runs: one of its own, or one that was kept."""

import weakref
from collections.abc import Sequence
from dataclasses import dataclass

from penstock.cache import BLOCK_TOKENS
from penstock.cache.space import CacheSpace
from penstock.cache.store.block_store import BlockStore
from penstock.engine.reuse import MAX_SNAPSHOTS, Reuse
from penstock.engine.run import Run
from penstock.models.decoder import Decoder
from penstock.plan import ChunkedPrefillConfig

# A cache over which passes are recorded has room for a multiple of so many tokens.
_RECORDED_GRID = 4096


@dataclass(frozen=True)
class RequestSpace:
    """A cache, and what is known of prompts in it, where that is kept."""

    space: CacheSpace
    reuse: Reuse | None = None


class RequestSpaces:
    """Chooses a cache for each request of a model: the one of `reuse_tokens` where that has room, else a new one.

    Passes are recorded over a cache, so where the model records them, requests that follow on each other have the
    same one, `recorded`; with a store, what is known in it stays known.
    """

    def __init__(
        self,
        model: Decoder,
        config: ChunkedPrefillConfig,
        store: BlockStore | None,
        fingerprint: bytes | None,
        *,
        reuse_tokens: int,
    ) -> None:
        self._model = model
        self._num_slots = config.num_state_slots
        self._store = store
        self._fingerprint = fingerprint
        self._asked = self._with_reuse(reuse_tokens) if reuse_tokens else None
        self.recorded: RequestSpace | None = None
        self._last_run: weakref.ref[Run] | None = None  # which may still be in it

    def take(self, prompt: Sequence[int], max_tokens: int) -> RequestSpace | None:
        """For a request that is about to begin; None: a cache of its own, of which nothing is kept."""
        num_tokens, asked = len(prompt) + max_tokens, self._asked
        if asked is not None and asked.space.blocks.num_available * BLOCK_TOKENS >= num_tokens:
            return asked
        if self._store is not None and (asked is not None or not self._model.can_record):
            return self._with_reuse(num_tokens)
        return self._take_recorded(prompt, num_tokens) if self._model.can_record else None

    def enter(self, run: Run) -> None:
        """A request has begun, in the cache that was taken for it."""
        if self.recorded is not None and run.space is self.recorded.space:
            self._last_run = weakref.ref(run)

    def _take_recorded(self, prompt: Sequence[int], num_tokens: int) -> RequestSpace:
        """A request that begins before another has ended gets a new one, which the next ones take."""
        kept = self.recorded
        if kept is None or self._is_taken(kept) or not kept.space.has_room(num_tokens, self._num_slots):
            rounded = -(-num_tokens // _RECORDED_GRID) * _RECORDED_GRID
            kept = self.recorded = self._last_run = None  # what it held may be needed
            kept = self.recorded = self._new(min(rounded, self._model.config.max_position))
        if kept.reuse is not None:
            _keep_only(kept.space, kept.reuse, prompt)
        return kept

    def _is_taken(self, kept: RequestSpace) -> bool:
        last = self._last_run() if self._last_run is not None else None
        is_running = last is not None and last.finish_reason is None
        # A stream that was dropped before its first step still has what it had found.
        return is_running or kept.space.blocks.num_available < kept.space.blocks.num_blocks

    def _new(self, num_tokens: int) -> RequestSpace:
        if self._store is not None:
            return self._with_reuse(num_tokens)
        return RequestSpace(CacheSpace.for_tokens(self._model, num_tokens, num_slots=self._num_slots))

    def _with_reuse(self, num_tokens: int) -> RequestSpace:
        # A step reads a state and writes another, and some more that are kept.
        num_slots = self._num_slots + 2 * MAX_SNAPSHOTS
        space = CacheSpace.for_tokens(self._model, num_tokens, num_slots=num_slots)
        return RequestSpace(
            space,
            Reuse(
                space,
                fingerprint=self._fingerprint,
                store=self._store,
                clean_only=True,
                max_snapshots=MAX_SNAPSHOTS,
            ),
        )


def _keep_only(space: CacheSpace, reuse: Reuse, prompt: Sequence[int]) -> None:
    """Give up all that is known, in a cache that nobody is in, but what the prompt begins with. The rest of it then
    goes right behind that: a sequence in several places would be copied together, which takes time and memory."""
    num_known = reuse.num_in_memory(reuse.open(prompt))  # they are used now, so the others go first
    reclaim = space.blocks.reclaim
    assert reclaim is not None
    reclaim(space.blocks.num_idle - num_known)
