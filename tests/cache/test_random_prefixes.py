"""Random lives of sequences that share what they read, against an oracle that knows what is in every block."""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from penstock.cache import (
    BLOCK_TOKENS,
    BlockKey,
    BlockPool,
    KeyChain,
    PrefixHit,
    PrefixIndex,
    SequenceCache,
    SlotPool,
    root_key,
)
from penstock.errors import CacheFullError

NUM_SEQUENCES = 3
ROOT = root_key(b"model")

# Each letter is a block of one token, over and over: few texts, so that many begin alike.
letters = st.sampled_from([1, 1, 1, 2])
texts = st.lists(letters, min_size=2, max_size=6)
counts = st.sampled_from([64, 128, 320, 1, 30, 63, 65, 200])
picks = st.integers(0, NUM_SEQUENCES - 1)


def tokens_of(text: Sequence[int]) -> list[int]:
    return [letter for letter in text for _ in range(BLOCK_TOKENS)]


def keys_of(tokens: Sequence[int]) -> list[BlockKey]:
    chain = KeyChain(ROOT)
    chain.extend(tokens)
    return chain.keys


def marks_of(tokens: Sequence[int]) -> list[int]:
    """What is written for each token: it depends on all before it, as keys and values do."""
    marks: list[int] = []
    for token in tokens:
        marks.append(hash((marks[-1] if marks else 0, token)))
    return marks


@dataclass(frozen=True)
class Written:
    """What is in one place of the cache, or, for a slot, the state after that token."""

    mark: int
    is_clean: bool


@dataclass(eq=False)
class Life:
    """A sequence, its tokens, what it is going to read, and how many of its first tokens are clean."""

    cache: SequenceCache
    tokens: list[int]
    prompt: list[int]
    num_clean: int


@dataclass
class Known:
    """What the index should know by a key."""

    block: int
    is_clean: bool
    before: list[BlockKey]  # those that it continues
    used: int  # when it was used last
    marks: list[int]


class PrefixMachine(RuleBasedStateMachine):
    @initialize(
        num_blocks=st.integers(4, 20), has_state=st.booleans(), max_snapshots=st.sampled_from([2, 1, 4, 0])
    )
    def start(self, num_blocks: int, has_state: bool, max_snapshots: int) -> None:
        self.pool = BlockPool(num_blocks)
        # A state for each sequence, one that is being written, and the snapshots: no more is ever needed.
        self.slots = SlotPool(NUM_SEQUENCES + 1 + max_snapshots) if has_state else None
        self.index = PrefixIndex(self.pool, self.slots, max_snapshots=max_snapshots)
        self.max_snapshots = max_snapshots
        self.lives = [self.new_life() for _ in range(NUM_SEQUENCES)]
        self.places: list[list[Written | None]] = [[None] * BLOCK_TOKENS for _ in range(num_blocks)]
        self.states: dict[int, Written] = {}
        self.known: dict[BlockKey, Known] = {}
        self.snapshots: OrderedDict[BlockKey, int] = OrderedDict()
        self.now = 0

    # What the oracle does.

    def new_life(self) -> Life:
        return Life(SequenceCache([self.pool], self.slots), [], [], 0)

    def held(self) -> set[int]:
        return {block for life in self.lives for block in life.cache.blocks.block_ids}

    def idle(self) -> list[BlockKey]:
        """In the order in which they should be given up."""
        held = self.held()
        idle = [key for key, known in self.known.items() if known.block not in held]
        return sorted(idle, key=lambda key: (self.known[key].used, -len(self.known[key].before)))

    def forget(self, num_blocks: int) -> None:
        """Blocks are to be allocated: give up the idle ones that are needed beyond those that are free."""
        idle = self.idle()
        num_free = self.pool.num_blocks - len(self.held()) - len(idle)
        num_given_up = max(0, num_blocks - num_free)
        for index, key in enumerate(idle[:num_given_up]):
            assert not any(key in self.known[later].before for later in idle[index:]), (
                "an end outlives its beginning"
            )
            del self.known[key]
            self.snapshots.pop(key, None)

    def use(self, keys: Sequence[BlockKey]) -> None:
        self.now += 1
        for key in keys:
            self.known[key].used = self.now

    def expected(self, keys: Sequence[BlockKey], clean_only: bool) -> PrefixHit:
        blocks: list[Known] = []
        num_usable = 0
        for key in keys:
            if key not in self.known or (clean_only and not self.known[key].is_clean):
                break
            blocks.append(self.known[key])
            if self.slots is None or key in self.snapshots:
                num_usable = len(blocks)
        clean = [known.is_clean for known in blocks[:num_usable]]
        slot = self.snapshots[keys[num_usable - 1]] if self.slots is not None and num_usable else None
        ids = tuple(known.block for known in blocks[:num_usable])
        return PrefixHit(ids, (*clean, False).index(False), slot)

    # What sequences do.

    def look_up(self, tokens: list[int], clean_only: bool) -> PrefixHit:
        """Find, and see that it is just what these tokens need."""
        keys = keys_of(tokens)
        hit = self.index.find(keys, clean_only=clean_only)
        assert hit == self.expected(keys, clean_only)
        marks = marks_of(tokens[: hit.num_tokens])
        found = [written for block in hit.blocks for written in self.places[block]]
        assert [written and written.mark for written in found] == marks
        assert all(written and written.is_clean for written in found[: hit.num_clean * BLOCK_TOKENS])
        assert hit.num_clean == len(hit.blocks) or not clean_only
        if hit.slot is not None:
            assert self.states[hit.slot] == Written(marks[-1], is_clean=True)
        num_used = len(hit.blocks)
        self.use(keys[:num_used])
        if hit.slot is not None:
            self.snapshots.move_to_end(keys[num_used - 1])
        return hit

    def write(self, life: Life, tokens: list[int], is_clean: bool, commits: bool = True) -> None:
        """A step: reserve, write, and commit or abort. It must work exactly when there are enough blocks."""
        start, end = len(life.tokens), len(life.tokens) + len(tokens)
        cache = life.cache
        num_new = max(0, -(-end // BLOCK_TOKENS) - cache.blocks.num_blocks)
        num_before = (self.pool.num_free, self.pool.num_idle)
        if not self.pool.can_allocate(num_new):
            with pytest.raises(CacheFullError):
                cache.reserve(start, [end])
            assert (self.pool.num_free, self.pool.num_idle) == num_before
            assert cache.num_tokens == start
            return
        self.forget(num_new)
        step = cache.reserve(start, [end])
        is_clean &= life.num_clean == start
        marks = marks_of(life.tokens + tokens)
        others = {
            block for other in self.lives if other is not life for block in other.cache.blocks.block_ids
        }
        position = start
        for part in cache.blocks.locate(start, end):
            for place in range(part.start, part.end):
                block = place // BLOCK_TOKENS
                assert block not in others
                assert not self.pool.is_kept(block)
                self.places[block][place % BLOCK_TOKENS] = Written(marks[position], is_clean)
                position += 1
        if step is not None:
            (written,) = step.writes
            self.states[written.slot] = Written(marks[-1], is_clean)
        if not commits:
            cache.abort()
            return
        cache.commit(end)
        life.tokens += tokens
        if is_clean:
            life.num_clean = end

    def tell(self, life: Life, num_blocks: int) -> None:
        """The index is told of this many blocks, and of the state, if it is after them."""
        keys, blocks = keys_of(life.tokens)[:num_blocks], life.cache.blocks.block_ids[:num_blocks]
        num_clean = life.num_clean // BLOCK_TOKENS
        self.index.insert(keys, blocks, num_clean)
        marks, held = marks_of(life.tokens), self.held()
        for depth, (key, block) in enumerate(zip(keys, blocks, strict=True)):
            is_clean, known = depth < num_clean, self.known.get(key)
            stays = known is not None and (
                known.is_clean > is_clean or (known.is_clean == is_clean and known.block in held)
            )
            if not stays:
                own = marks[depth * BLOCK_TOKENS : (depth + 1) * BLOCK_TOKENS]
                self.known[key] = Known(block, is_clean, keys[:depth], 0, own)
        self.use(keys)
        if self.slots is not None and num_blocks * BLOCK_TOKENS == len(life.tokens):
            self.keep_state(life)

    def keep_state(self, life: Life) -> None:
        length = len(life.tokens)
        if length == 0 or length % BLOCK_TOKENS or life.num_clean < length:
            return
        assert life.cache.state is not None
        keys, slot = keys_of(life.tokens), life.cache.state.slot
        is_kept = self.index.snapshot(keys, slot)
        assert is_kept == (keys[-1] in self.known and self.max_snapshots > 0)
        if is_kept:
            self.snapshots.setdefault(keys[-1], slot)
            self.snapshots.move_to_end(keys[-1])
            if len(self.snapshots) > self.max_snapshots:
                self.snapshots.popitem(last=False)

    def read_on(self, life: Life, count: int, commits: bool = True) -> None:
        start = len(life.tokens)
        chunk = life.prompt[start : start + count]
        if chunk and life.tokens == life.prompt[:start]:
            self.write(life, chunk, is_clean=True, commits=commits)

    @rule(pick=picks, text=texts, clean_only=st.booleans(), count=counts, tells=st.booleans())
    def begin(self, pick: int, text: list[int], clean_only: bool, count: int, tells: bool) -> None:
        """A new prompt in place of an old one: go on with what is there of it."""
        life = self.lives[pick]
        life.cache.free()
        prompt = tokens_of(text)
        self.lives[pick] = life = Life(life.cache, [], prompt, 0)
        hit = self.look_up(prompt, clean_only)
        life.cache.adopt([hit.blocks], hit.slot)
        life.tokens = prompt[: hit.num_tokens]
        life.num_clean = hit.num_clean * BLOCK_TOKENS
        self.read_on(life, count)
        if tells:
            self.tell(life, len(life.tokens) // BLOCK_TOKENS)

    @rule(pick=picks)
    def adopt_more(self, pick: int) -> None:
        """Another has read on meanwhile: go on with that, behind blocks of one's own."""
        life = self.lives[pick]
        num_held = len(life.tokens) // BLOCK_TOKENS
        if len(life.tokens) % BLOCK_TOKENS or life.tokens != life.prompt[: len(life.tokens)]:
            return
        hit = self.look_up(life.prompt, clean_only=False)
        if len(hit.blocks) <= num_held or set(hit.blocks[num_held:]) & set(life.cache.blocks.block_ids):
            return
        life.cache.adopt([hit.blocks[num_held:]], hit.slot)
        if life.num_clean == len(life.tokens):
            life.num_clean = max(min(hit.num_clean, len(hit.blocks)) * BLOCK_TOKENS, life.num_clean)
        life.tokens = life.prompt[: hit.num_tokens]

    @rule(pick=picks, count=counts, commits=st.sampled_from([True, True, False]), tells=st.booleans())
    def read(self, pick: int, count: int, commits: bool, tells: bool) -> None:
        life = self.lives[pick]
        self.read_on(life, count, commits)
        if tells:
            self.tell(life, len(life.tokens) // BLOCK_TOKENS)

    @rule(pick=picks, letter=letters, count=counts, tells=st.booleans())
    def decode(self, pick: int, letter: int, count: int, tells: bool) -> None:
        life = self.lives[pick]
        self.write(life, [letter] * count, is_clean=False)
        if tells:
            self.tell(life, len(life.tokens) // BLOCK_TOKENS)

    @rule(pick=picks, data=st.data())
    def insert(self, pick: int, data: st.DataObject) -> None:
        life = self.lives[pick]
        self.tell(life, data.draw(st.integers(0, len(life.tokens) // BLOCK_TOKENS)))

    @precondition(lambda self: self.slots is not None)
    @rule(pick=picks)
    def snapshot(self, pick: int) -> None:
        self.keep_state(self.lives[pick])

    @precondition(lambda self: self.slots is None)
    @rule(pick=picks, data=st.data())
    def cut(self, pick: int, data: st.DataObject) -> None:
        """To a whole block always; within one only if what is there is of no concern to anybody else."""
        life = self.lives[pick]
        length = data.draw(st.integers(0, len(life.tokens)))
        if data.draw(st.booleans()):
            length -= length % BLOCK_TOKENS
        if length % BLOCK_TOKENS and length < len(life.tokens):
            block = life.cache.blocks.block_ids[length // BLOCK_TOKENS]
            is_known = any(known.block == block for known in self.known.values())
            if is_known or any(
                block in other.cache.blocks.block_ids for other in self.lives if other is not life
            ):
                with pytest.raises(ValueError, match="is shared"):
                    life.cache.cut(length)
                return
        life.cache.cut(length)
        del life.tokens[length:]
        life.num_clean = min(life.num_clean, length)

    @rule(pick=picks)
    def free(self, pick: int) -> None:
        self.lives[pick].cache.free()
        self.lives[pick] = self.new_life()

    @rule(data=st.data())
    def press(self, data: st.DataObject) -> None:
        """Somebody needs more blocks than are free, all that nobody owns if need be, and gives them back."""
        num_blocks = self.pool.num_free + data.draw(st.integers(0, self.pool.num_idle))
        self.forget(num_blocks)
        held = self.held()
        extents = self.pool.allocate(num_blocks)
        for extent in extents:
            for block in range(extent.start, extent.end):
                assert block not in held
                self.places[block] = [None] * BLOCK_TOKENS
        self.pool.release(extents)

    @rule(is_due=st.sampled_from([False] * 9 + [True]))
    def clear(self, is_due: bool) -> None:
        if not is_due:
            return
        self.index.clear()
        self.known.clear()
        self.snapshots.clear()

    # What holds after each of those.

    @invariant()
    def all_agree(self) -> None:
        self.pool.check_integrity()
        self.index.check_integrity()
        idle, held = self.idle(), self.held()
        assert self.pool.num_idle == len(idle)
        assert self.pool.num_free == self.pool.num_blocks - len(held) - len(idle)
        assert self.pool.num_available == self.pool.num_blocks - len(held)
        assert (self.index.num_blocks, self.index.num_snapshots) == (len(self.known), len(self.snapshots))
        if self.slots is not None:
            self.slots.check_integrity()
            states = {life.cache.state.slot for life in self.lives if life.cache.state and life.tokens}
            assert self.slots.num_free == self.slots.num_slots - len(states | set(self.snapshots.values()))

    @invariant()
    def every_block_that_is_held_or_known_is_as_it_was_written(self) -> None:
        for life in self.lives:
            assert life.cache.num_tokens == len(life.tokens)
            written = [mark for block in life.cache.blocks.block_ids for mark in self.places[block]]
            marks = [there and there.mark for there in written[: len(life.tokens)]]
            assert marks == marks_of(life.tokens)
            if life.cache.state is not None and life.tokens:
                assert self.states[life.cache.state.slot].mark == marks[-1]
        for known in self.known.values():
            assert [there and there.mark for there in self.places[known.block]] == known.marks
            assert all(there and there.is_clean for there in self.places[known.block]) or not known.is_clean

    def teardown(self) -> None:
        """Every idle block can be given up, one after the other, each after those that continue it."""
        if not hasattr(self, "pool"):
            return
        for num_left in range(self.pool.num_idle, 0, -1):
            self.forget(self.pool.num_free + 1)
            self.pool.release(self.pool.allocate(self.pool.num_free + 1))
            assert self.pool.num_idle == num_left - 1
            self.all_agree()
        self.every_block_that_is_held_or_known_is_as_it_was_written()
        for life in self.lives:
            life.cache.free()
        self.index.clear()
        assert self.pool.num_free == self.pool.num_blocks
        assert self.slots is None or self.slots.num_free == self.slots.num_slots


PrefixMachine.TestCase.settings = settings(max_examples=75, stateful_step_count=40, deadline=None)
TestPrefixesUnderRandomOperations = PrefixMachine.TestCase
