"""What a prompt finds of those before it, what is given up for whom, and in which order."""

import pytest

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

NOTHING = PrefixHit((), 0, None)


def keys_of(text: str, salt: str = "") -> list[BlockKey]:
    """The keys of a prompt in which each letter is a block."""
    chain = KeyChain(root_key(b"model", salt))
    chain.extend([ord(letter) for letter in text for _ in range(BLOCK_TOKENS)])
    return chain.keys


class Engine:
    """Sequences over one pool, which read text of a block a letter and leave it in the index."""

    def __init__(self, num_blocks: int, num_slots: int = 0, max_snapshots: int = 0) -> None:
        self.blocks = BlockPool(num_blocks)
        self.slots = SlotPool(num_slots) if num_slots else None
        self.index = PrefixIndex(self.blocks, self.slots, max_snapshots=max_snapshots)

    def sequence(self) -> SequenceCache:
        return SequenceCache([self.blocks], self.slots)

    def read(self, text: str, num_clean: int | None = None, states: str = "") -> SequenceCache:
        """A sequence with blocks of its own for this text, known to the index, and the states after `states`."""
        sequence = self.sequence()
        ends = sorted({len(text), *([len(states)] if states else [])})
        sequence.reserve(0, [end * BLOCK_TOKENS for end in ends])
        sequence.commit(len(text) * BLOCK_TOKENS)
        self.insert(sequence, text, num_clean)
        if sequence.state is not None and states:
            assert self.index.snapshot(keys_of(states), sequence.state.slots[len(states) * BLOCK_TOKENS])
        return sequence

    def insert(self, sequence: SequenceCache, text: str, num_clean: int | None = None) -> None:
        self.index.insert(
            keys_of(text),
            sequence.blocks.block_ids[: len(text)],
            len(text) if num_clean is None else num_clean,
        )

    def leave(self, text: str, num_clean: int | None = None, states: str = "") -> None:
        self.read(text, num_clean, states).free()

    def known(self, *texts: str) -> list[str]:
        """How much of each of these is found. Asking makes it used."""
        return [text[: len(self.index.find(keys_of(text)).blocks)] for text in texts]

    def need(self, num_blocks: int) -> None:
        """Somebody needs so many blocks for a moment."""
        self.blocks.release(self.blocks.allocate(num_blocks))
        self.check()

    def check(self) -> None:
        self.blocks.check_integrity()
        self.index.check_integrity()
        if self.slots is not None:
            self.slots.check_integrity()


def test_what_was_read_is_found_and_shared() -> None:
    engine = Engine(8)
    first = engine.read("abc")
    ids = first.blocks.block_ids
    hit = engine.index.find(keys_of("abd"))
    assert hit == PrefixHit(tuple(ids[:2]), 2, None)
    assert hit.num_tokens == 128
    second = engine.sequence()
    second.adopt([hit.blocks], hit.slot)
    first.free()
    assert (engine.blocks.num_idle, engine.blocks.num_free, engine.blocks.num_available) == (1, 5, 6)
    assert engine.known("abc") == ["abc"]
    second.free()
    assert (engine.blocks.num_idle, engine.index.num_blocks) == (3, 3)
    engine.check()


@pytest.mark.parametrize("text", ["", "b", "ba", "xabc"])
def test_another_beginning_finds_nothing(text: str) -> None:
    engine = Engine(8)
    engine.leave("abc")
    assert engine.index.find(keys_of(text)) == NOTHING


def test_another_salt_finds_nothing() -> None:
    engine = Engine(8)
    engine.leave("abc")
    assert engine.index.find(keys_of("abc", "tenant")) == NOTHING


def test_a_chain_loses_its_end_first() -> None:
    engine = Engine(6)
    engine.leave("abcdef")
    for num_left in (5, 4, 3, 2, 1, 0):
        engine.blocks.allocate(1)
        assert engine.known("abcdef") == ["abcdef"[:num_left]]
    engine.check()
    assert engine.index.num_evicted_blocks == 6


def test_what_was_used_least_recently_goes_first() -> None:
    engine = Engine(9)
    for text in ("abc", "def", "ghi"):
        engine.leave(text)
    assert engine.known("abc") == ["abc"]  # now d, e and f are the oldest
    engine.blocks.allocate(4)
    assert engine.known("def", "ghi", "abc") == ["", "gh", "abc"]


def test_a_beginning_that_was_used_alone_outlives_its_end() -> None:
    engine = Engine(6)
    engine.leave("abcd")
    engine.leave("xy")
    assert engine.known("ab") == ["ab"]
    engine.need(3)
    assert engine.known("abcd", "xy") == ["ab", "x"]


def test_what_branches_off_goes_before_what_it_branches_off_from() -> None:
    engine = Engine(4)
    engine.leave("ab")
    trunk = engine.index.find(keys_of("ab"))
    for letter in "cd":
        branch = engine.sequence()
        branch.adopt([trunk.blocks], None)
        branch.reserve(128, [192])
        branch.commit(192)
        engine.insert(branch, "ab" + letter)
        branch.free()
    engine.need(1)
    assert engine.known("abc", "abd") == ["ab", "abd"]
    engine.need(3)
    assert engine.known("abd") == ["a"]


def test_a_block_in_use_is_never_given_up() -> None:
    engine = Engine(6)
    held = engine.read("abc")
    engine.leave("xyz")
    with pytest.raises(CacheFullError):
        engine.blocks.allocate(4)
    assert engine.index.num_evicted_blocks == 0
    engine.need(3)
    assert engine.known("abc", "xyz") == ["abc", ""]
    held.free()


def test_a_block_that_was_idle_and_is_in_use_again_is_not_given_up() -> None:
    engine = Engine(6)
    engine.leave("abc")
    adopted = engine.sequence()
    adopted.adopt([engine.index.find(keys_of("abc")).blocks], None)
    engine.leave("xyz")  # used later, and idle
    engine.need(3)
    assert engine.known("abc", "xyz") == ["abc", ""]
    assert engine.index.num_evicted_blocks == 3


def test_free_blocks_are_enough_for_nothing_to_be_given_up() -> None:
    engine = Engine(8)
    engine.leave("abc")
    engine.need(5)
    assert engine.known("abc") == ["abc"]


def test_two_that_read_the_same_at_once_keep_a_block_each_and_one_is_known() -> None:
    engine = Engine(8)
    first, second = engine.read("ab"), engine.read("abc")
    assert engine.index.num_blocks == 3
    assert engine.index.find(keys_of("ab")).blocks == tuple(first.blocks.block_ids)
    second.free()
    assert (engine.blocks.num_idle, engine.blocks.num_free) == (1, 5)
    first.free()
    assert (engine.blocks.num_idle, engine.blocks.num_free) == (3, 5)


def test_an_idle_block_before_one_in_use_can_be_given_up_and_its_place_filled_again() -> None:
    """The first of two that read the same ends: what it leaves stands before what the second goes on with."""
    engine = Engine(8)
    first, second = engine.read("ab"), engine.read("abc")
    first.free()
    assert (engine.blocks.num_idle, engine.blocks.num_available) == (2, 5)
    engine.need(5)
    assert engine.index.num_blocks == 1
    assert engine.known("abc") == [""]
    engine.insert(second, "abc")
    assert engine.known("abc") == ["abc"]
    engine.check()


def test_an_idle_block_makes_room_for_one_in_use_with_the_same_tokens() -> None:
    engine = Engine(8)
    engine.leave("ab")
    own = engine.read("abc")
    assert engine.index.find(keys_of("abc")).blocks == tuple(own.blocks.block_ids)
    assert (engine.blocks.num_idle, engine.blocks.num_free) == (0, 5)


def test_what_decoding_filled_is_found_unless_only_clean_blocks_will_do() -> None:
    engine = Engine(8)
    engine.leave("abcd", num_clean=2)
    assert engine.index.find(keys_of("abcd")).num_clean == 2
    assert len(engine.index.find(keys_of("abcd")).blocks) == 4
    strict = engine.index.find(keys_of("abcd"), clean_only=True)
    assert (len(strict.blocks), strict.num_clean) == (2, 2)


def test_a_clean_block_takes_the_place_of_one_that_is_not() -> None:
    engine = Engine(10)
    decoded = engine.read("abcd", num_clean=1)
    clean = engine.read("abc")
    hit = engine.index.find(keys_of("abcd"))
    assert hit.num_clean == 3
    assert hit.blocks == (
        decoded.blocks.block_ids[0],
        *clean.blocks.block_ids[1:],
        decoded.blocks.block_ids[3],
    )
    decoded.free()
    engine.insert(clean, "abc", num_clean=0)  # never the other way round
    assert engine.index.find(keys_of("abcd")).num_clean == 3
    engine.check()


def test_an_idle_clean_block_stays_where_one_in_use_is_not_clean() -> None:
    engine = Engine(8)
    engine.leave("ab")
    engine.read("ab", num_clean=0)
    assert engine.index.find(keys_of("ab")).num_clean == 2
    assert engine.blocks.num_idle == 2


def test_a_hit_ends_where_a_state_is() -> None:
    engine = Engine(8, num_slots=4, max_snapshots=2)
    sequence = engine.read("abcd", states="ab")
    assert sequence.state is not None
    slot = sequence.state.slots[128]
    sequence.free()
    hit = engine.index.find(keys_of("abcd"))
    assert hit == PrefixHit((0, 1), 2, slot)
    assert engine.index.find(keys_of("a")) == NOTHING
    other = engine.sequence()
    other.adopt([hit.blocks], hit.slot)
    assert (other.num_tokens, other.state and other.state.slot) == (128, slot)
    engine.check()


def test_blocks_without_a_state_are_of_no_use_and_not_used() -> None:
    engine = Engine(6, num_slots=4, max_snapshots=2)
    engine.leave("abcd", states="ab")
    engine.leave("xy", states="xy")
    assert engine.known("abcd") == ["ab"]  # c and d are the oldest still
    engine.need(2)
    assert engine.known("xy", "ab") == ["xy", "ab"]


def test_the_state_that_was_used_least_recently_goes_first_and_its_block_stays() -> None:
    engine = Engine(12, num_slots=4, max_snapshots=2)
    assert engine.slots is not None
    for text in ("ab", "cd"):
        engine.leave(text, states=text)
    assert engine.known("ab") == ["ab"]
    engine.leave("ef", states="ef")
    assert engine.known("ab", "cd", "ef") == ["ab", "", "ef"]
    assert (engine.index.num_snapshots, engine.index.num_evicted_snapshots) == (2, 1)
    assert (engine.index.num_blocks, engine.index.num_evicted_blocks) == (6, 0)
    assert engine.slots.num_free == 2
    engine.check()


def test_a_state_goes_with_its_block() -> None:
    engine = Engine(4, num_slots=4, max_snapshots=2)
    assert engine.slots is not None
    engine.leave("abcd", states="abcd")
    assert engine.slots.num_free == 3
    engine.need(1)
    assert engine.slots.num_free == 4
    assert (engine.index.num_snapshots, engine.index.num_evicted_snapshots) == (0, 1)


def test_a_state_that_is_adopted_outlives_its_place_in_the_index() -> None:
    engine = Engine(8, num_slots=4, max_snapshots=1)
    engine.leave("ab", states="ab")
    hit = engine.index.find(keys_of("ab"))
    sequence = engine.sequence()
    sequence.adopt([hit.blocks], hit.slot)
    engine.leave("cd", states="cd")
    assert engine.known("ab") == [""]
    assert sequence.state is not None
    assert sequence.state.slot == hit.slot
    assert hit.slot not in (engine.index.find(keys_of("cd")).slot, None)
    engine.check()


def test_no_state_is_kept_unless_asked_for() -> None:
    blocks, slots = BlockPool(2), SlotPool(2)
    index = PrefixIndex(blocks, slots)
    sequence = SequenceCache([blocks], slots)
    sequence.reserve(0, [64])
    sequence.commit(64)
    index.insert(keys_of("a"), sequence.blocks.block_ids, 1)
    assert sequence.state is not None
    assert not index.snapshot(keys_of("a"), sequence.state.slot)
    assert index.find(keys_of("a")) == NOTHING
    with pytest.raises(ValueError, match="accepted is 0 or more"):
        PrefixIndex(BlockPool(1), max_snapshots=-1)


def test_a_state_is_kept_once() -> None:
    engine = Engine(8, num_slots=4, max_snapshots=2)
    assert engine.slots is not None
    engine.leave("ab", states="ab")
    slot = engine.index.find(keys_of("ab")).slot
    engine.leave("ab", states="ab")
    assert engine.index.find(keys_of("ab")).slot == slot
    assert (engine.index.num_snapshots, engine.slots.num_free) == (1, 3)


def test_a_state_without_a_block_or_without_room_is_not_kept() -> None:
    engine, stateless = Engine(8, num_slots=4, max_snapshots=0), Engine(8, max_snapshots=3)
    assert engine.slots is not None
    slot = engine.slots.allocate(1)[0]
    engine.read("ab")
    stateless.read("ab")
    assert not engine.index.snapshot(keys_of("ab"), slot)
    assert not stateless.index.snapshot(keys_of("ab"), slot)
    roomy = Engine(8, num_slots=4, max_snapshots=2)
    for keys in ([], keys_of("xy")):
        assert not roomy.index.snapshot(keys, 0)
    roomy.read("ab")
    with pytest.raises(ValueError, match="slot 3: it is free"):
        roomy.index.snapshot(keys_of("a"), 3)
    assert roomy.index.num_snapshots == 0
    roomy.check()


def test_clear_forgets_everything_and_takes_nothing_from_who_holds_it() -> None:
    engine = Engine(8, num_slots=4, max_snapshots=2)
    assert engine.slots is not None
    engine.leave("abcd", states="ab")
    held = engine.read("xy", states="xy")
    engine.index.clear()
    engine.check()
    assert (engine.index.num_blocks, engine.index.num_snapshots) == (0, 0)
    assert (engine.blocks.num_free, engine.blocks.num_idle, engine.slots.num_free) == (6, 0, 3)
    assert engine.known("abcd", "xy") == ["", ""]
    engine.insert(held, "xy")
    held.free()
    assert engine.blocks.num_idle == 2
    engine.need(8)


def test_the_order_of_eviction_is_not_made_anew_at_every_use() -> None:
    engine = Engine(4)
    engine.leave("a")
    for _ in range(10):
        engine.index.find(keys_of("a"))
    assert len(engine.index._order) == 11
    engine.check()


def test_the_order_of_eviction_does_not_grow_with_use() -> None:
    engine = Engine(8)
    engine.leave("abcd")
    for _ in range(200):
        hit = engine.index.find(keys_of("abcd"))
        sequence = engine.sequence()
        sequence.adopt([hit.blocks], hit.slot)
        sequence.free()
        engine.index.check_integrity()
    assert len(engine.index._order) < 100
    engine.need(6)
    assert engine.known("abcd") == ["ab"]


def test_nonsense_is_an_error() -> None:
    engine = Engine(8)
    with pytest.raises(ValueError, match="an index already"):
        PrefixIndex(engine.blocks)
    with pytest.raises(ValueError, match="max_snapshots is -1"):
        PrefixIndex(BlockPool(1), max_snapshots=-1)
    with pytest.raises(ValueError, match="2 blocks have 1 keys"):
        engine.index.insert(keys_of("a"), [0, 1], 0)
    with pytest.raises(ValueError, match="block 0: it is free"):
        engine.index.insert(keys_of("a"), [0], 0)
    held = engine.read("a")
    with pytest.raises(ValueError, match="it is kept"):
        engine.insert(held, "b")
    engine.check()


def test_integrity_check_sees_damage() -> None:
    def broken(what: str) -> PrefixIndex:
        engine = Engine(8, num_slots=2, max_snapshots=1)
        engine.leave("ab", states="ab")
        index = engine.index
        match what:
            case "not in the order":
                index._order.clear()
            case "not kept":
                engine.blocks.drop(1)
            case "of them are known":
                node = index._nodes.pop(keys_of("ab")[1])
                del index._node_of[node.block]
            case "has no block":
                index._snapshots[b"other"] = index._snapshots.popitem()[1]
            case "than there is room for":
                index._max_snapshots = 0
        return index

    for what in (
        "not in the order",
        "not kept",
        "of them are known",
        "has no block",
        "than there is room for",
    ):
        with pytest.raises(AssertionError, match=what):
            broken(what).check_integrity()
