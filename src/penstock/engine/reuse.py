"""No prompt is read twice: what was read of one is found for the next that begins alike, in memory and on disk."""

import logging
import os
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from penstock.cache import BLOCK_TOKENS, Extent, SequenceCache
from penstock.cache.keys import KeyChain, root_key
from penstock.cache.prefix import PrefixHit, PrefixIndex
from penstock.cache.space import CacheSpace
from penstock.cache.store.block_store import BlockStore, StoredPrefix
from penstock.cache.transfer import copy_in, copy_out, copy_state_in, copy_state_out, copy_tokens
from penstock.engine.status import ReuseStatus

_log = logging.getLogger("penstock.engine")

# A model with recurrent state can go on only where a state was kept: every so many tokens, where its prompt ends, and
# where it parts from another that waits for it.
SNAPSHOT_TOKENS = 1024
MAX_SNAPSHOTS = 16
# What is copied to or from the disk's files at once, between two steps: some 20 ms.
PIECE_BYTES = 64 << 20
# Blocks that one request has mapped from files: the rest is looked for when these are copied.
MOST_FOUND = 512


@dataclass
class Prefix:
    """What one request shares with others: the keys of its blocks, and how far these are as a cold engine's are."""

    chain: KeyChain
    num_prompt: int
    stored: StoredPrefix | None = None  # found on disk, to be copied into the cache
    num_clean: int | None = None  # of its blocks, from the first on; None: all
    num_noted: int = 0  # blocks that the index was told of
    num_stored: int = 0  # blocks that the disk has, or was given
    num_searched_from: int = 0  # blocks that memory had when the disk was looked at
    needs_search: bool = False  # there may be more on disk than is known
    has_more: bool = False  # the last search did not go to the end
    keep_states: set[int] = field(default_factory=set)  # positions that others will go on from

    @property
    def num_shareable(self) -> int:
        """Blocks that may come from the cache: the last token is always read, since its logits are wanted."""
        return (self.num_prompt - 1) // BLOCK_TOKENS

    @property
    def last_blocks(self) -> tuple[int, int]:
        """Where the same prompt would go on, and where one would that begins with all of it."""
        return self.num_shareable * BLOCK_TOKENS, self.num_prompt // BLOCK_TOKENS * BLOCK_TOKENS

    def num_common(self, other: "Prefix") -> int:
        """Blocks, of those that may come from the cache, that this prompt has in common with another."""
        mine, others = self.chain.keys, other.chain.keys
        # A key stands for all before it, so they agree up to some block, and from there on nowhere.
        most = min(self.num_shareable, len(others))
        return bisect_left(range(most), True, key=lambda index: mine[index] != others[index])

    def taint(self, num_blocks: int) -> None:
        """Blocks after the first `num_blocks` do not hold the bits that a cold engine's would."""
        self.num_clean = self.num_clean_of(num_blocks)

    def num_clean_of(self, num_blocks: int) -> int:
        """How many of its first `num_blocks` blocks hold just those bits."""
        return num_blocks if self.num_clean is None else min(self.num_clean, num_blocks)

    def close(self) -> None:
        if self.stored is not None:
            self.stored.close()
            self.stored = None


class Reuse:
    """The prefixes of one cache. Not safe for threads, but for `search`, which looks on disk."""

    def __init__(
        self,
        space: CacheSpace,
        *,
        fingerprint: bytes | None = None,
        store: BlockStore | None = None,
        clean_only: bool = False,
        max_snapshots: int = 0,
    ) -> None:
        """With `clean_only`, what decoding left is not shared: a cold engine would have read it as a prompt, whose
        last bits may differ. `fingerprint` names the model to a store; without one nobody else needs its name."""
        self._space = space
        self._fingerprint = fingerprint or os.urandom(32)
        self._store = store
        self._clean_only = clean_only
        self.index = PrefixIndex(space.blocks, space.slots, max_snapshots=max_snapshots)
        self._stored_every = _stored_every(space) if store is not None else SNAPSHOT_TOKENS
        self._block_bytes = BLOCK_TOKENS * space.tensors.kv.spec.bytes_per_token
        self._piece_blocks = max(PIECE_BYTES // self._block_bytes, 1)
        self._has_failed = False
        self._memory_tokens = self._disk_tokens = self._missed_tokens = 0
        self._num_hits = self._num_misses = 0

    def open(self, prompt: Sequence[int], salt: str = "") -> Prefix:
        chain = KeyChain(root_key(self._fingerprint, salt))
        chain.extend(prompt)
        return Prefix(chain, len(prompt))

    def fetch(self, prompt: Sequence[int], cache: SequenceCache) -> Prefix:
        """Put all that is there of a prompt, in memory and on disk, into an empty sequence of this cache."""
        prefix = self.open(prompt)
        self.adopt(prefix, cache)
        prefix.needs_search = True
        while prefix.needs_search:
            self.search(prefix, cache.num_tokens // BLOCK_TOKENS)
            self.load(prefix, cache)
        self.count(cache.num_tokens)
        return prefix

    def num_in_memory(self, prefix: Prefix) -> int:
        """Blocks that `adopt` would find now."""
        return len(self._find(prefix).blocks)

    def search(self, prefix: Prefix, num_known: int) -> None:
        """Look on disk for what comes after the first `num_known` blocks. Takes a while; on any thread."""
        prefix.needs_search = False
        prefix.num_searched_from = num_known
        if self._store is None:
            return
        # Every block that was found is a mapping, of which a process may have only so many.
        end = min(prefix.num_shareable, num_known + MOST_FOUND)
        prefix.has_more = end < prefix.num_shareable
        keys = prefix.chain.keys[:end]
        prefix.stored = self._store.find(keys, num_known, needs_state=self._has_state)

    def adopt(self, prefix: Prefix, cache: SequenceCache) -> int:
        """Go on with what is in memory, where that is more than the sequence has: the tokens that it gained."""
        start = cache.num_tokens
        num_held, rest = divmod(start, BLOCK_TOKENS)
        if num_held >= prefix.num_shareable:
            return self._copy_last(prefix, cache) if not rest else 0
        if rest and self._has_state:
            return 0
        hit = self._find(prefix)
        if hit.num_tokens <= start:
            return 0
        if rest:  # the block that it was about to fill is there whole
            prefix.num_noted = min(prefix.num_noted, num_held)
            cache.cut(num_held * BLOCK_TOKENS)
        cache.adopt([hit.blocks[num_held:]], hit.slot)
        if hit.num_clean < len(hit.blocks):
            prefix.taint(hit.num_clean)
        # What is in memory was given to the disk when it was read.
        prefix.num_stored = max(prefix.num_stored, len(hit.blocks))
        self._memory_tokens += cache.num_tokens - start
        self._copy_last(prefix, cache)
        return cache.num_tokens - start

    def _copy_last(self, prefix: Prefix, cache: SequenceCache) -> int:
        """Of a prompt that ends with a block, and is there to its end, only the last token is to be read: the tokens
        before it are copied, since a block that is known is not written."""
        start, end = cache.num_tokens, prefix.num_prompt - 1
        keys = prefix.chain.keys[: prefix.num_prompt // BLOCK_TOKENS]
        is_next = prefix.num_prompt % BLOCK_TOKENS == 0 and start == end - (BLOCK_TOKENS - 1)
        if self._has_state or not is_next:
            return 0
        hit = self.index.find(keys, clean_only=self._clean_only)
        if len(hit.blocks) < len(keys):
            return 0
        source = hit.blocks[-1]
        held = [Extent(source, source + 1)]
        self._space.blocks.retain(held)  # or the new block might be this one
        try:
            if not self._space.blocks.can_allocate(1):
                return 0
            cache.reserve(start, [end])
            copy_tokens(self._space.tensors.kv, source, cache.blocks.block_ids[-1], end - start)
            cache.commit(end)
        finally:
            self._space.blocks.release(held)
        if hit.num_clean < len(hit.blocks):
            prefix.taint(hit.num_clean)
        self._memory_tokens += end - start
        return end - start

    def load(self, prefix: Prefix, cache: SequenceCache, *, in_pieces: bool = False) -> int:
        """Copy what was found on disk into the cache, all or the next piece of it: the tokens that the sequence
        gained. Where it has no place, or does not follow on what the sequence has, it is given up."""
        stored = prefix.stored
        if stored is None:
            return 0
        start, end = cache.num_tokens, (stored.start + stored.num_blocks) * BLOCK_TOKENS
        first = start // BLOCK_TOKENS
        num_blocks = stored.start + stored.num_blocks - first
        follows = start % BLOCK_TOKENS == 0 and stored.start <= first and num_blocks > 0
        if not follows or not self._space.blocks.can_allocate(num_blocks):
            prefix.needs_search = stored.start > first  # memory has given up what was before it
            prefix.close()
            return 0
        most_blocks = num_blocks
        if in_pieces and not self._has_state:  # a state belongs to the end only
            most_blocks = min(num_blocks, self._piece_blocks)
            end = (first + most_blocks) * BLOCK_TOKENS
        step = cache.reserve(start, [end])
        try:
            blocks = cache.blocks.block_ids[first : first + most_blocks]
            copy_in(self._space.tensors, [blocks], stored.blocks[first - stored.start :][:most_blocks])
            if step is not None:
                assert stored.state is not None
                copy_state_in(self._space.tensors, step.writes[0].slot, stored.state)
        except Exception as error:
            _log.warning("what is on disk of a prompt could not be used: it is read again", exc_info=error)
            cache.abort()
            prefix.close()
            return 0
        cache.commit(end)
        if most_blocks == num_blocks:
            prefix.needs_search = prefix.has_more
            prefix.close()
        prefix.num_stored = max(prefix.num_stored, first + most_blocks)
        self._disk_tokens += end - start
        self._note(prefix, cache)
        return end - start

    def states_to_keep(self, prefix: Prefix, start: int, end: int, num_free: int) -> list[int]:
        """Positions in (start, end) at which the state of a prompt is worth a slot, of `num_free`; ascending."""
        if not self._has_state or start % BLOCK_TOKENS:
            return []
        grid = range(start - start % self._stored_every, end, self._stored_every)
        wanted = {*grid, *prefix.last_blocks, *prefix.keep_states}
        inside = sorted(position for position in wanted if start < position < end)
        # Those that are furthest on save the most.
        return inside[max(len(inside) - num_free, 0) :]

    def note(
        self, prefix: Prefix, cache: SequenceCache, tokens: Sequence[int], start: int, *, is_chunk: bool
    ) -> None:
        """A step of the sequence was committed, from token `start` on, as a part of its prompt or not."""
        if is_chunk:
            self._missed_tokens += cache.num_tokens - start
            if self._has_state and start % BLOCK_TOKENS:
                prefix.taint(start // BLOCK_TOKENS)
        else:
            prefix.taint(prefix.num_prompt // BLOCK_TOKENS)
            if cache.num_tokens // BLOCK_TOKENS > len(prefix.chain.keys):
                prefix.chain.extend(tokens[: cache.num_tokens])
        self._note(prefix, cache)

    def leave(self, prefix: Prefix, cache: SequenceCache, num_kept: int = 0) -> None:
        """The sequence is about to give up all blocks but the first `num_kept`: where it stands stays known."""
        prefix.num_noted = min(prefix.num_noted, num_kept)
        prefix.needs_search = self._store is not None
        if cache.state is None or not self._is_clean_at(prefix, cache.num_tokens):
            return
        keys = prefix.chain.keys[: cache.num_tokens // BLOCK_TOKENS]
        if keys:
            self.index.snapshot(keys, cache.state.slot)

    def end(self, prefix: Prefix, cache: SequenceCache) -> None:
        """The request is over, and gives up all that it holds."""
        self.leave(prefix, cache)
        prefix.close()
        num_full = min(prefix.num_prompt, cache.num_tokens) // BLOCK_TOKENS
        num_lost = prefix.num_clean_of(num_full) - prefix.num_stored
        if self._store is not None and self._store.is_usable and num_lost > 0:
            self._store.give_up(num_lost)

    def num_in_use(self, prefix: Prefix) -> int:
        """Blocks of a prompt that are in memory and held by others: to have them takes no space."""
        blocks = self._space.blocks
        return sum(not blocks.is_idle(block) for block in self._find(prefix).blocks)

    def count(self, num_cached: int) -> None:
        """A request begins to read its prompt, of which so much was there."""
        if num_cached:
            self._num_hits += 1
        else:
            self._num_misses += 1

    def status(self) -> ReuseStatus:
        disk = self._store.stats() if self._store is not None else None
        return ReuseStatus(
            is_on=True,
            memory_tokens=self._memory_tokens,
            disk_tokens=self._disk_tokens,
            missed_tokens=self._missed_tokens,
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

    @property
    def _has_state(self) -> bool:
        return self._space.slots is not None

    def _find(self, prefix: Prefix) -> PrefixHit:
        return self.index.find(prefix.chain.keys[: prefix.num_shareable], clean_only=self._clean_only)

    def _note(self, prefix: Prefix, cache: SequenceCache) -> None:
        """Tell the index and the disk of blocks that are full, and of states that were kept."""
        num_full = cache.num_tokens // BLOCK_TOKENS
        num_clean = prefix.num_clean_of(num_full)
        # A state is kept of clean tokens only, and without one blocks are of no use.
        num_told = num_clean if self._clean_only or self._has_state else num_full
        keys = prefix.chain.keys
        if num_told > prefix.num_noted:
            self.index.insert(keys[:num_told], cache.blocks.block_ids[:num_told], num_clean)
            prefix.num_noted = num_told
        if self._store is not None and num_clean > prefix.num_stored:
            self._put(self._store, prefix, cache, num_clean)
        if cache.state is not None:
            self._note_states(prefix, cache)

    def _put(self, store: BlockStore, prefix: Prefix, cache: SequenceCache, end: int) -> None:
        """Give blocks up to `end` to the disk, as far as it has room for them by now; the rest is offered again."""
        while (start := prefix.num_stored) < end:
            stop = min(start + self._piece_blocks, end)
            if not store.has_room((stop - start) * self._block_bytes):
                return
            with self._unharmed():
                copied = copy_out(self._space.tensors, [cache.blocks.block_ids[start:stop]])
                store.put_blocks(start, prefix.chain.keys[start:stop], copied)
            prefix.num_stored = stop

    @contextmanager
    def _unharmed(self) -> Iterator[None]:
        """The disk is a help: where there is no memory for a copy, or anything else fails, the request goes on."""
        try:
            yield
        except Exception as error:
            if not self._has_failed:
                _log.warning("some of what was read could not be kept on disk", exc_info=error)
            self._has_failed = True

    def _note_states(self, prefix: Prefix, cache: SequenceCache) -> None:
        assert cache.state is not None
        for position, slot in cache.state.slots.items():
            if not self._is_clean_at(prefix, position):
                continue
            is_wanted = position in prefix.keep_states or position in prefix.last_blocks
            keys = prefix.chain.keys[: position // BLOCK_TOKENS]
            if is_wanted or position % SNAPSHOT_TOKENS == 0:
                self.index.snapshot(keys, slot)
            if self._store is not None and (is_wanted or position % self._stored_every == 0):
                with self._unharmed():
                    self._store.put_state(len(keys), keys[-1], *copy_state_out(self._space.tensors, slot))
        cache.state.keep_last()

    def _is_clean_at(self, prefix: Prefix, position: int) -> bool:
        """Whether a state after so many tokens is one that a cold engine would have, between two blocks."""
        num_blocks, rest = divmod(position, BLOCK_TOKENS)
        return (
            rest == 0
            and position <= prefix.num_prompt
            and (prefix.num_clean is None or num_blocks <= prefix.num_clean)
        )


def _stored_every(space: CacheSpace) -> int:
    """Tokens from one state on disk to the next. A process that is killed loses no more than that; states take no
    more space than keys and values do, unless that would be too far apart."""
    states = space.tensors.recurrent
    if states is None:
        return SNAPSHOT_TOKENS
    num_blocks = -(-states.spec.bytes_per_slot // (space.tensors.kv.spec.bytes_per_token * BLOCK_TOKENS))
    return min(num_blocks * BLOCK_TOKENS, SNAPSHOT_TOKENS)
