"""The cache in which a request runs: one of its own, or one that requests share one after the other."""

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING

from penstock.cache.space import CacheSpace
from penstock.cache.store.block_store import BlockStore
from penstock.engine.reuse import MAX_SNAPSHOTS, Reuse, kept_windows
from penstock.engine.run import Run
from penstock.models.decoder import Decoder
from penstock.plan.admission import WindowRoom

if TYPE_CHECKING:  # loads torch.distributed
    from penstock.engine.stages.caches import WorkerCaches

# A cache over which passes are recorded has room for a multiple of so many tokens.
_RECORDED_GRID = 4096


class RequestSpace:
    """A cache for one request at a time, and what is known of prompts in it, where that is kept."""

    def __init__(self, space: CacheSpace, reuse: Reuse | None = None) -> None:
        self.space = space
        self.reuse = reuse
        self._run: weakref.ref[Run] | None = None  # the last one, which may still be in it

    @property
    def is_taken(self) -> bool:
        run, blocks = None if self._run is None else self._run(), self.space.blocks
        is_running = run is not None and run.finish_reason is None
        # A stream that was dropped before its first step still has what it had found.
        return is_running or blocks.num_available < blocks.num_blocks

    def enter(self, run: Run) -> None:
        """A request begins in this cache."""
        self._run = weakref.ref(run)

    def has_room(self, num_tokens: int, num_slots: int) -> bool:
        return not self.is_taken and self.space.has_room(num_tokens, num_slots)


class RequestSpaces:
    """Chooses a cache for each request of a model: the one of `reuse_tokens` where that has room, else a new one.

    Passes are recorded over a cache, so where the model records them, requests that follow on each other have the
    same one, `recorded`; with a store, what is known in it stays known.
    """

    def __init__(
        self,
        model: Decoder,
        store: BlockStore | None,
        fingerprint: bytes | None,
        *,
        num_slots: int,
        step_tokens: int,
        reuse_tokens: int,
        stages: "WorkerCaches | None" = None,
    ) -> None:
        """A request needs `num_slots` recurrent states, and its steps in flight write so many tokens, or all (0)."""
        self._model = model
        self._stages = stages
        self._num_slots = num_slots
        self._step_tokens = step_tokens
        self._store = store
        self._fingerprint = fingerprint
        self._asked = self._with_reuse(reuse_tokens) if reuse_tokens else None
        self.recorded: RequestSpace | None = None

    def take(self, prompt: Sequence[int], max_tokens: int) -> RequestSpace:
        """For a request that is about to begin."""
        num_tokens, asked = len(prompt) + max_tokens, self._asked
        if asked is not None and asked.has_room(num_tokens, self._num_slots):
            return asked
        if self._model.can_record and (asked is None or self._store is None):
            return self._take_recorded(prompt, num_tokens)
        return self._new(num_tokens)

    def _take_recorded(self, prompt: Sequence[int], num_tokens: int) -> RequestSpace:
        """A request that begins before another has ended gets a new one, which the next ones take."""
        kept = self.recorded
        if kept is None or not kept.has_room(num_tokens, self._num_slots):
            rounded = -(-num_tokens // _RECORDED_GRID) * _RECORDED_GRID
            kept = self.recorded = None  # what it held may be needed
            kept = self.recorded = self._new(min(rounded, self._model.config.max_position))
        if kept.reuse is not None:
            kept.reuse.keep_only(kept.reuse.open(prompt, kept.space.new_sequence()))
        return kept

    def _new(self, num_tokens: int) -> RequestSpace:
        if self._store is not None:
            return self._with_reuse(num_tokens)
        # The last token generated is never run, so it needs no place.
        windows = WindowRoom(1, self._step_tokens)
        space = CacheSpace.for_tokens(self._model, num_tokens - 1, num_slots=self._num_slots, windows=windows)
        return RequestSpace(space)

    def _with_reuse(self, num_tokens: int) -> RequestSpace:
        # A step reads a state and writes another, and some more that are kept.
        num_slots = self._num_slots + 2 * MAX_SNAPSHOTS
        num_kept = kept_windows(self._model.cache_spec, MAX_SNAPSHOTS)
        windows = WindowRoom(1, self._step_tokens, num_kept)
        space = CacheSpace.for_tokens(self._model, num_tokens, num_slots=num_slots, windows=windows)
        reuse = Reuse(
            space,
            fingerprint=self._fingerprint,
            store=self._store,
            clean_only=True,
            max_snapshots=MAX_SNAPSHOTS,
            stages=self._stages,
        )
        return RequestSpace(space, reuse)
