"""No prompt is read twice: what was read of one is found for the next that begins alike, in memory and on disk."""

import logging
import os
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.cache import BLOCK_TOKENS, BlockPool, Extent, SequenceCache, SequenceState
from penstock.cache.keys import BlockKey, KeyChain, root_key
from penstock.cache.prefix import PrefixHit, PrefixIndex
from penstock.cache.space import CacheSpace
from penstock.cache.store.block_store import BlockStore, StoredPrefix
from penstock.cache.tensors import CacheSpec
from penstock.cache.transfer import (
    copy_in,
    copy_kept_in,
    copy_kept_out,
    copy_out,
    copy_tokens,
)
from penstock.engine.status import ReuseStatus
from penstock.errors import StageLostError

if TYPE_CHECKING:  # loads torch.distributed
    from penstock.engine.stages.caches import WorkerCaches
    from penstock.engine.stages.store import Ticket

_log = logging.getLogger("penstock.engine")

# A model with recurrent state or windows can go on only where those were kept: every so many tokens, where its prompt
# ends, and where it parts from another that waits for it.
SNAPSHOT_TOKENS = 1024
MAX_SNAPSHOTS = 16
# What windows that nobody needs at the moment may take of a cache.
KEPT_WINDOW_BYTES = 1 << 30
# What is copied to or from the disk's files at once, between two steps: some 20 ms.
PIECE_BYTES = 64 << 20
# Blocks that one request has mapped from files: the rest is looked for when these are copied.
MOST_FOUND = 512


def kept_windows(spec: CacheSpec, most: int) -> int:
    """How many of them a cache is to have room for."""
    return min(most, max(KEPT_WINDOW_BYTES // max(spec.bytes_per_window, 1), 1)) if spec.windows else 0


class Reuse:
    """The prefixes of one cache: its index in memory, its store on disk, and how much of prompts came from them. Not
    safe for threads, but for `Prefix.search`, which looks on disk."""

    def __init__(
        self,
        space: CacheSpace,
        *,
        fingerprint: bytes | None = None,
        store: BlockStore | None = None,
        clean_only: bool = False,
        max_snapshots: int = 0,
        stages: "WorkerCaches | None" = None,
    ) -> None:
        """With `clean_only`, what decoding left is not shared: a cold engine would have read it as a prompt, whose
        last bits may differ. `fingerprint` names the model to a store; without one nobody else needs its name."""
        self.space = space
        self.stages = stages  # that have the same blocks, of other layers
        self.store = store
        self.clean_only = clean_only
        self.has_state = space.slots is not None
        self.goes_on_anywhere = space.keeps_prefix
        self.index = PrefixIndex(
            space.blocks, space.slots, max_snapshots=max_snapshots, windows=space.windows
        )
        self.stored_every = _stored_every(space) if store is not None else SNAPSHOT_TOKENS
        self.block_bytes = BLOCK_TOKENS * space.tensors.kv.spec.bytes_per_token
        self.piece_blocks = max(PIECE_BYTES // max(self.block_bytes, 1), 1)
        self.memory_tokens = self.disk_tokens = self.missed_tokens = 0
        self._fingerprint = fingerprint or os.urandom(32)
        self._has_failed = False
        self._num_hits = self._num_misses = 0

    def open(
        self, prompt: Sequence[int], cache: SequenceCache, salt: str = "", *, reads_all: bool = False
    ) -> "Prefix":
        """A handle on what an empty sequence of this cache may share with others. Prompts of another salt share
        nothing with it. One that `reads_all` gives, and takes nothing."""
        chain = KeyChain(root_key(self._fingerprint, salt, is_long=cache.is_long))
        chain.extend(prompt)
        return Prefix(self, cache, chain, len(prompt), reads_all=reads_all)

    def find_stored(
        self, keys: Sequence[BlockKey], start: int
    ) -> tuple[StoredPrefix | None, "Ticket | None"]:
        """What is on disk of the blocks from `start` on: as far as all stages have it, where there are several."""
        assert self.store is not None
        needs_state = self.store.keeps_states
        if self.stages is None:
            return self.store.find(keys, start, needs_state=needs_state), None
        end, ticket = len(keys), None
        try:
            while end > start and (stored := self.store.find(keys[:end], start, needs_state=needs_state)):
                end = start + stored.num_blocks
                ticket, counts = self.stages.find_stored(ticket, keys[:end], start)
                if min(counts) == stored.num_blocks:
                    return stored, ticket
                end = start + min(counts)
                stored.close()
        except StageLostError:
            return None, None
        if ticket is not None:
            self.stages.forget(ticket)
        return None, None

    def count(self, num_cached: int) -> None:
        """A request begins to read its prompt, of which so much was there."""
        if num_cached:
            self._num_hits += 1
        else:
            self._num_misses += 1

    def keep_only(self, prefix: "Prefix") -> None:
        """Evict all idle blocks but those that a prompt begins with. The rest of it then goes right behind those: a
        sequence in several places would be copied together, which takes time and memory."""
        num_known = prefix.num_in_memory()  # they are used now, so the others go first
        reclaim = self.space.blocks.reclaim
        assert reclaim is not None
        reclaim(self.space.blocks.num_idle - num_known)

    def status(self) -> ReuseStatus:
        disk = self.store.stats() if self.store is not None else None
        return ReuseStatus(
            is_on=True,
            memory_tokens=self.memory_tokens,
            disk_tokens=self.disk_tokens,
            missed_tokens=self.missed_tokens,
            num_hits=self._num_hits,
            num_misses=self._num_misses,
            num_evicted_blocks=self.index.num_evicted_blocks,
            num_evicted_states=self.index.num_evicted_snapshots,
            disk_bytes=disk.bytes_on_disk if disk else None,
            disk_limit_bytes=disk.max_bytes if disk else None,
            num_disk_written=disk.num_written if disk else 0,
            num_disk_evicted=disk.num_evicted if disk else 0,
            num_disk_damaged=disk.num_damaged if disk else 0,
            num_disk_dropped=disk.num_dropped if disk else 0,
        )

    @contextmanager
    def unharmed(self) -> Iterator[None]:
        """The disk is a help: where there is no memory for a copy, or anything else fails, the request goes on."""
        try:
            yield
        except Exception as error:
            if not self._has_failed:
                _log.warning("some of what was read could not be kept on disk", exc_info=error)
            self._has_failed = True


class Prefix:
    """One sequence's handle on what it shares with others.

    blocks [0, num_shareable)   of its prompt, that may come from memory or disk; the last token is always read,
                                since its logits are wanted
    blocks [0, num_clean)       hold the bits that a cold engine's would; None: all do
    blocks [0, num_noted)       are in the index
    blocks [0, num_stored)      are on disk, or on their way there
    """

    def __init__(
        self, reuse: Reuse, cache: SequenceCache, chain: KeyChain, num_prompt: int, *, reads_all: bool = False
    ) -> None:
        self._reads_all = reads_all
        self._reuse = reuse
        self._cache = cache
        self._chain = chain
        self.num_prompt = num_prompt
        self.keep_states: set[int] = set()  # positions that others will go on from
        self._stored: StoredPrefix | None = None  # found on disk, to be copied into the cache
        self._ticket: Ticket | None = None  # by which other stages hold their part of it
        self._num_clean: int | None = None
        self._num_noted = 0
        self._num_stored = 0
        self._num_searched_from = 0  # blocks that memory had when the disk was looked at
        self._needs_search = reuse.store is not None  # there may be more on disk than is known
        self._has_more = False  # the last search did not go to the end

    @property
    def num_shareable(self) -> int:
        return 0 if self._reads_all else (self.num_prompt - 1) // BLOCK_TOKENS

    @property
    def is_in_flight(self) -> bool:
        """Whether a step of the sequence is."""
        return self._cache.num_in_flight > 0

    @property
    def has_more_on_disk(self) -> bool:
        """Whether more was found there, or may be, that is not in the cache yet."""
        return self._stored is not None or self._needs_search

    def num_common(self, other: "Prefix") -> int:
        """Blocks, of those that may come from the cache, that this prompt has in common with another."""
        mine, others = self._chain.keys, other._chain.keys
        # A key stands for all before it, so they agree up to some block, and from there on nowhere.
        most = min(self.num_shareable, len(others))
        return bisect_left(range(most), True, key=lambda index: mine[index] != others[index])

    def follow(self, leaders: Iterable["Prefix"]) -> bool:
        """Let the first of those before it that has yet to read some of what they have in common keep its state where
        they part. False: there is none."""
        num_tokens = self._cache.num_tokens
        if not self._cache.keeps_prefix and num_tokens % BLOCK_TOKENS:
            return False  # it could not go on from there
        for leader in leaders:
            common = self.num_common(leader) * BLOCK_TOKENS
            if num_tokens <= leader._cache.num_tokens < common:
                leader.keep_states.add(common)
                return True
        return False

    def num_in_memory(self) -> int:
        """Blocks that the sequence would find in memory now."""
        return len(self._find().blocks)

    def num_in_use(self) -> int:
        """Blocks of its prompt that are in memory and held by others: to have them takes no space."""
        blocks = self._reuse.space.blocks
        return sum(not blocks.is_idle(block) for block in self._find().blocks)

    def find_more(self, *, in_pieces: bool) -> bool:
        """Put what is in memory and on disk of the prompt into the cache, all of it or, from disk, the next piece.
        Whether there was any."""
        if self._reads_all:
            self._needs_search = False
            return False
        before = self._cache.num_tokens
        self._adopt()
        while True:
            num_blocks = self._cache.num_tokens // BLOCK_TOKENS
            if self._needs_search or num_blocks < self._num_searched_from:
                self.search(num_blocks)
            self._load(in_pieces=in_pieces)
            if in_pieces or not self._needs_search:
                return self._cache.num_tokens > before

    def search(self, num_known: int) -> None:
        """Look on disk for what comes after the first `num_known` blocks. Takes a while; on any thread."""
        self._needs_search = False
        self._num_searched_from = num_known
        if self._reuse.store is None or self._reads_all:
            return
        # Every block that was found is a mapping, of which a process may have only so many.
        end = min(self.num_shareable, num_known + MOST_FOUND)
        self._has_more = end < self.num_shareable
        keys = self._chain.keys[:end]
        self._stored, self._ticket = self._reuse.find_stored(keys, num_known)

    def states_to_keep(self, start: int, end: int, num_free: int) -> list[int]:
        """Positions in (start, end) at which the state of the prompt is worth a slot, of `num_free`; ascending."""
        if not self._reuse.has_state or start % BLOCK_TOKENS:
            return []
        inside = [position for position in self._worth_keeping(start, end) if position < end]
        # Those that are furthest on save the most.
        return inside[max(len(inside) - num_free, 0) :]

    def note(self, tokens: Sequence[int], start: int, *, is_chunk: bool) -> None:
        """A step of the sequence was committed, from token `start` on, as a part of its prompt or not."""
        num_tokens = self._cache.num_tokens
        if is_chunk:
            self._reuse.missed_tokens += num_tokens - start
            if self._reuse.has_state and start % BLOCK_TOKENS:
                self._taint(start // BLOCK_TOKENS)
        else:
            self._taint(self.num_prompt // BLOCK_TOKENS)
            if num_tokens // BLOCK_TOKENS > len(self._chain.keys):
                self._chain.extend(tokens[:num_tokens])
        self._publish(start)

    def offer(self) -> None:
        """Offer the disk what it has not, as it had no room for it or nobody had told it."""
        num_clean = self._num_clean_of(self._cache.num_tokens // BLOCK_TOKENS)
        if self._reuse.store is not None and num_clean > self._num_stored:
            self._put(self._reuse.store, num_clean)

    def leave(self, num_kept: int = 0) -> None:
        """The sequence is about to give up all blocks but the first `num_kept`: where it stands stays known."""
        self._insert(self._num_noted, 0)
        self._num_noted = min(self._num_noted, num_kept)
        self._needs_search = self._reuse.store is not None
        state, position = self._cache.state, self._cache.num_tokens
        if state is None:  # a window reaches back from the last whole block
            position -= position % BLOCK_TOKENS
        if not self._reuse.goes_on_anywhere and self._is_clean_at(position):
            self._snapshot(position, None if state is None else state.slot)

    def begin_again(self) -> None:
        """A stage is lost, and with it what the cache held, and what it was about to write."""
        self._num_noted = self._num_stored = 0
        self._needs_search = self._reuse.store is not None
        self.close()

    def _snapshot(
        self, position: int, slot: int | None, *, on_disk: bool = False, in_memory: bool = True
    ) -> None:
        """Keep what goes on from a position: the state in this slot, and the windows, if they are all there."""
        reuse, keys = self._reuse, self._chain.keys[: position // BLOCK_TOKENS]
        windows: list[list[int]] = []
        for own, group in zip(self._cache.kv_groups, reuse.space.tensors.kv_groups, strict=True):
            if not group.spec.window:
                continue
            first = max(len(keys) - group.spec.window_blocks, 0) - own.num_gone
            if first < 0:
                return
            windows.append(own.block_ids[first : len(keys) - own.num_gone])
        if not keys:
            return
        if in_memory:
            reuse.index.snapshot(keys, slot, windows)
        if on_disk and reuse.store is not None:
            with reuse.unharmed():
                if reuse.store.keeps_states:
                    kept = copy_kept_out(reuse.space.tensors, windows, slot)
                    reuse.store.put_state(len(keys), keys[-1], kept)
                if reuse.stages is not None:
                    reuse.stages.keep_state(reuse.space, len(keys), keys[-1], windows, slot)

    def end(self) -> None:
        """The request is over, and gives up all that it holds."""
        self.leave()
        self.close()
        store = self._reuse.store
        num_full = min(self.num_prompt, self._cache.num_tokens) // BLOCK_TOKENS
        num_lost = self._num_clean_of(num_full) - self._num_stored
        if store is not None and store.is_usable and num_lost > 0:
            store.give_up(num_lost)

    def close(self) -> None:
        if self._stored is not None:
            self._stored.close()
            self._stored = None
        if self._ticket is not None and self._reuse.stages is not None:
            self._reuse.stages.forget(self._ticket)
            self._ticket = None

    @property
    def _last_blocks(self) -> tuple[int, ...]:
        """Where the same prompt would go on, and where one would that begins with all of it."""
        return tuple(end // BLOCK_TOKENS * BLOCK_TOKENS for end in (self.num_prompt - 1, self.num_prompt))

    def _worth_keeping(self, start: int, end: int) -> list[int]:
        """Positions in (start, end] from which others may go on; ascending."""
        every = self._reuse.stored_every
        wanted = {*range(start - start % every, end + 1, every), *self._last_blocks, *self.keep_states}
        return sorted(position for position in wanted if start < position <= end)

    def _taint(self, num_blocks: int) -> None:
        """Blocks after the first `num_blocks` do not hold the bits that a cold engine's would."""
        self._num_clean = self._num_clean_of(num_blocks)

    def _num_clean_of(self, num_blocks: int) -> int:
        return num_blocks if self._num_clean is None else min(self._num_clean, num_blocks)

    def _is_clean_at(self, position: int) -> bool:
        """Whether a state after so many tokens is one that a cold engine would have, between two blocks."""
        num_blocks, rest = divmod(position, BLOCK_TOKENS)
        is_clean = self._num_clean is None or num_blocks <= self._num_clean
        return rest == 0 and position <= self.num_prompt and is_clean

    def _find(self) -> PrefixHit:
        keys = self._chain.keys[: self.num_shareable]
        return self._reuse.index.find(keys, clean_only=self._reuse.clean_only)

    def _adopt(self) -> None:
        """Go on with what is in memory, where that is more than the sequence has."""
        cache, start = self._cache, self._cache.num_tokens
        num_held, rest = divmod(start, BLOCK_TOKENS)
        if num_held >= self.num_shareable:
            if not rest:
                self._copy_last()
            return
        if rest and not self._reuse.goes_on_anywhere:
            return
        if not self._reuse.index.knows(self._chain.keys[num_held]):
            return
        hit = self._find()
        if hit.num_tokens <= start:
            return
        if rest:  # the block that it was about to fill is there whole
            self._num_noted = min(self._num_noted, num_held)
            cache.cut(num_held * BLOCK_TOKENS)
        cache.adopt([hit.blocks[num_held:], *hit.windows], hit.slot)
        if hit.num_clean < len(hit.blocks):
            self._taint(hit.num_clean)
        # What is in memory was given to the disk when it was read.
        self._num_stored = max(self._num_stored, len(hit.blocks))
        self._reuse.memory_tokens += cache.num_tokens - start
        self._copy_last()

    def _copy_last(self) -> None:
        """Of a prompt that ends with a block, and is there to its end, only the last token is to be read: the tokens
        before it are copied, since a block that is known is not written."""
        cache, blocks = self._cache, self._reuse.space.blocks
        start, end = cache.num_tokens, self.num_prompt - 1
        keys = self._chain.keys[: self.num_prompt // BLOCK_TOKENS]
        is_next = self.num_prompt % BLOCK_TOKENS == 0 and start == end - (BLOCK_TOKENS - 1)
        if not self._reuse.goes_on_anywhere or not is_next:
            return
        hit = self._reuse.index.find(keys, clean_only=self._reuse.clean_only)
        if len(hit.blocks) < len(keys):
            return
        source = hit.blocks[-1]
        pinned = [Extent(source, source + 1)]
        blocks.retain(pinned)  # or the new block might be this one
        try:
            if not blocks.can_allocate(1):
                return
            cache.reserve(start, [end])
            target = cache.blocks.block_ids[-1]
            copy_tokens(self._reuse.space.tensors.kv, source, target, end - start)
            if self._reuse.stages is not None:
                self._reuse.stages.copy_tokens(self._reuse.space, source, target, end - start)
            cache.commit(end)
        finally:
            blocks.release(pinned)
        if hit.num_clean < len(hit.blocks):
            self._taint(hit.num_clean)
        self._reuse.memory_tokens += end - start

    def _load(self, *, in_pieces: bool) -> None:
        """Copy what was found on disk into the cache, all or the next piece of it. Where it has no place, or does not
        follow on what the sequence has, it is given up."""
        stored, cache, reuse = self._stored, self._cache, self._reuse
        if stored is None:
            return
        start, end = cache.num_tokens, (stored.start + stored.num_blocks) * BLOCK_TOKENS
        first = start // BLOCK_TOKENS
        num_blocks = stored.start + stored.num_blocks - first
        follows = start % BLOCK_TOKENS == 0 and num_blocks > 0
        is_lost = self._ticket is not None and not (reuse.stages and reuse.stages.is_current(self._ticket))
        groups = reuse.space.tensors.window_groups
        windows = [min(group.spec.window_blocks, first + num_blocks) for group in groups]
        pools = (reuse.space.blocks, *reuse.space.windows)
        wanted = zip(pools, (num_blocks, *windows), strict=True)
        if is_lost or not follows or not all(pool.can_allocate(count) for pool, count in wanted):
            # Where memory has all of it by now, there may be more.
            self._needs_search = is_lost or (num_blocks <= 0 and self._has_more)
            self.close()
            return
        most_blocks = num_blocks
        if in_pieces and reuse.goes_on_anywhere:  # else what it goes on with belongs to the end only
            most_blocks = min(num_blocks, reuse.piece_blocks)
            end = (first + most_blocks) * BLOCK_TOKENS
        try:
            self._copy_in(stored, first, most_blocks, windows)
        except Exception as error:
            _log.warning("what is on disk of a prompt could not be used: it is read again", exc_info=error)
            self.close()
            return
        if most_blocks == num_blocks:
            self._needs_search = self._has_more
            self.close()
        self._num_stored = max(self._num_stored, first + most_blocks)
        reuse.disk_tokens += end - start
        self._publish(start)

    def _copy_in(self, stored: StoredPrefix, first: int, num_blocks: int, windows: Sequence[int]) -> None:
        """Go on with stored blocks from `first` on and what is stored after them: windows of so many blocks. All or
        nothing."""
        cache, space, stages = self._cache, self._reuse.space, self._reuse.stages
        skipped, state = first - stored.start, stored.state
        after = cache.blocks.extents[-1].end if cache.blocks.extents else None
        with ExitStack() as given_back:  # the sequence's own references remain

            def allocated(pool: BlockPool, num_blocks: int, after: int | None = None) -> list[int]:
                extents = pool.allocate(num_blocks, after)
                given_back.callback(pool.release, extents)
                return [block for extent in extents for block in range(extent.start, extent.end)]

            own = allocated(space.blocks, num_blocks, after)
            copy_in(space.tensors, [own], stored.blocks[skipped:][:num_blocks])
            kept = [allocated(pool, count) for pool, count in zip(space.windows, windows, strict=True)]
            slot = None
            if space.slots is not None:
                (slot,) = space.slots.allocate(1)
                given_back.callback(space.slots.release, slot)
            if state is not None:
                copy_kept_in(space.tensors, kept, slot, state)
            if self._ticket is not None and stages is not None:
                stages.fetch(self._ticket, space, skipped, own, kept, slot)
            cache.adopt([own, *kept], slot)

    def _publish(self, start: int) -> None:
        """Tell the index and the disk of blocks that are full, and of states and windows that are worth it, those
        after token `start`."""
        cache, reuse = self._cache, self._reuse
        num_full = cache.num_tokens // BLOCK_TOKENS
        num_clean = self._num_clean_of(num_full)
        # A state is kept of clean tokens only, and without one blocks are of no use.
        num_told = num_clean if reuse.clean_only or not reuse.goes_on_anywhere else num_full
        if num_told > self._num_noted:
            self._insert(num_told, self._num_noted)
            self._num_noted = num_told
        self.offer()
        if cache.state is not None:
            self._publish_states(cache.state)
        elif not reuse.goes_on_anywhere:
            for position in self._worth_keeping(start, cache.num_tokens):
                self._keep(position, None)

    def _insert(self, num_blocks: int, start: int) -> None:
        """Let others find the sequence's first blocks, from `start` on."""
        keys, blocks = self._chain.keys[:num_blocks], self._cache.blocks.block_ids[:num_blocks]
        self._reuse.index.insert(keys, blocks, self._num_clean_of(num_blocks), start)

    def _put(self, store: BlockStore, end: int) -> None:
        """Give blocks up to `end` to the disk, as far as it has room for them by now; the rest is offered again."""
        reuse = self._reuse
        while (start := self._num_stored) < end:
            stop = min(start + reuse.piece_blocks, end)
            if not store.has_room((stop - start) * reuse.block_bytes):
                return
            with reuse.unharmed():
                blocks, keys = self._cache.blocks.block_ids[start:stop], self._chain.keys[start:stop]
                store.put_blocks(start, keys, copy_out(reuse.space.tensors, [blocks]))
                if reuse.stages is not None:
                    reuse.stages.keep_blocks(reuse.space, start, keys, blocks)
            self._num_stored = stop

    def _publish_states(self, state: SequenceState) -> None:
        for position, slot in state.slots.items():
            self._keep(position, slot)
        state.keep_last()

    def _keep(self, position: int, slot: int | None) -> None:
        """Keep what goes on from a position, if it is clean, where that is worth it: in memory, on disk."""
        if self._is_clean_at(position):
            is_wanted = position in self.keep_states or position in self._last_blocks
            self._snapshot(
                position,
                slot,
                in_memory=is_wanted or position % SNAPSHOT_TOKENS == 0,
                on_disk=is_wanted or position % self._reuse.stored_every == 0,
            )


@dataclass(frozen=True)
class Shared:
    """Prefixes whose sequences hold more of their prompts than before, unread; and those that sit the next step
    out."""

    gained: tuple[Prefix, ...] = ()
    waiting: frozenset[Prefix] = frozenset()


def share(prefixes: Iterable[Prefix], *, in_pieces: bool) -> Shared:
    """Give sequences that read their prompts, in order of arrival, what is there of them by now. One waits while more
    is being copied from disk, a piece at a time if so asked, and while one before it is about to read what they have
    in common."""
    gained: list[Prefix] = []
    waiting: set[Prefix] = set()
    leaders: list[Prefix] = []
    for prefix in prefixes:
        if not prefix.is_in_flight:
            if prefix.find_more(in_pieces=in_pieces):
                gained.append(prefix)
            if prefix.has_more_on_disk or prefix.follow(leaders):
                waiting.add(prefix)
        leaders.append(prefix)
    return Shared(tuple(gained), frozenset(waiting))


def _stored_every(space: CacheSpace) -> int:
    """Tokens from one state on disk to the next. A process that is killed loses no more than that; states and windows
    take no more space than keys and values do, unless that would be too far apart."""
    if space.keeps_prefix:
        return SNAPSHOT_TOKENS
    tensors = space.tensors
    kept_bytes = tensors.recurrent.spec.bytes_per_slot if tensors.recurrent else 0
    for group in tensors.window_groups:
        kept_bytes += group.spec.window_blocks * BLOCK_TOKENS * group.spec.bytes_per_token
    num_blocks = -(-kept_bytes // max(tensors.kv.spec.bytes_per_token * BLOCK_TOKENS, 1))
    return min(max(num_blocks, 1) * BLOCK_TOKENS, SNAPSHOT_TOKENS)
