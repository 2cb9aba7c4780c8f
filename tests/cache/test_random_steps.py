"""Several steps of a sequence in flight end as one at a time do: the same tokens, keys, values and states."""

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.cache import BLOCK_TOKENS, BlockPool, SequenceCache, SlotPool
from penstock.cache.tensors import KVCache, KVSpec, RecurrentCache
from penstock.errors import CacheFullError
from tests.cache.test_random_states import SPEC, check_state, run

KV_SPEC = KVSpec(num_layers=1, num_kv_heads=1, head_dim=1, dtype=torch.float32)
NUM_BLOCKS, NUM_SLOTS = 12, 8


@dataclass(frozen=True)
class Chunk:
    start: int
    ends: tuple[int, ...]  # where states are kept


class Subject:
    """A sequence with tensors of its own. What is written is a function of the tokens and of what is read."""

    def __init__(self, has_state: bool) -> None:
        self.blocks, self.slots = BlockPool(NUM_BLOCKS), SlotPool(NUM_SLOTS)
        self.kv, self.states = KVCache(KV_SPEC, NUM_BLOCKS), RecurrentCache(SPEC, NUM_SLOTS)
        self.cache = SequenceCache([self.blocks], self.slots if has_state else None)
        self.in_flight: list[Chunk] = []

    def issue(self, chunk: Chunk, tokens: Sequence[int]) -> None:
        end = chunk.ends[-1]
        step = self.cache.reserve(chunk.start, chunk.ends)
        places = self.cache.blocks.locate(chunk.start, end)
        written = torch.tensor(tokens[chunk.start : end], dtype=torch.float32).view(-1, 1, 1)
        self.kv.layer(0).write(places, written, -written)
        if step is not None:
            run(self.states, step, chunk.start, tokens[chunk.start : end])
        self.in_flight.append(chunk)

    def commit(self) -> Chunk:
        chunk = self.in_flight.pop(0)
        self.cache.commit(chunk.ends[-1])
        return chunk

    def check(self, tokens: Sequence[int]) -> None:
        """The committed tokens are these, and no block or slot is held for anything else than them and the steps."""
        cache = self.cache
        self.blocks.check_integrity()
        self.slots.check_integrity()
        assert (cache.num_tokens, cache.num_in_flight) == (len(tokens), len(self.in_flight))
        held = self.kv.layer(0).read(cache.blocks.locate(0, cache.num_tokens))
        assert held.keys.flatten().tolist() == list(tokens)
        assert held.values.flatten().tolist() == [-token for token in tokens]
        end = max([len(tokens), *(chunk.ends[-1] for chunk in self.in_flight)])
        assert NUM_BLOCKS - self.blocks.num_free == -(-end // BLOCK_TOKENS)
        if cache.state is None:
            return
        for position, slot in cache.state.slots.items():
            check_state(self.states, slot, tokens[:position])
        assert cache.state.num_tokens == len(tokens)
        writes = sum(len(chunk.ends) for chunk in self.in_flight)
        assert NUM_SLOTS - self.slots.num_free == len(cache.state.slots) + writes


@settings(deadline=None, max_examples=200)
@given(depth=st.integers(1, 4), has_state=st.booleans(), data=st.data())
def test_steps_in_flight_end_as_one_at_a_time(depth: int, has_state: bool, data: st.DataObject) -> None:
    ahead, alone = Subject(has_state), Subject(has_state)
    tokens = list(range(1, NUM_BLOCKS * BLOCK_TOKENS + 100))
    actions = data.draw(st.lists(st.sampled_from(("issue",) * 4 + ("commit",) * 3 + ("abort", "withdraw"))))
    for action in actions:
        if action == "issue" and len(ahead.in_flight) < depth:
            before = ahead.in_flight[-1].ends if ahead.in_flight else (ahead.cache.num_tokens,)
            start = data.draw(st.sampled_from(before)) if has_state and ahead.in_flight else before[-1]
            lengths = data.draw(st.lists(st.integers(1, 150), min_size=1, max_size=2))
            first = max(start + lengths[0], before[-1])  # no step ends before the one before it
            ends = (first, *(first + length for length in lengths[1:]))
            needed = -(-ends[-1] // BLOCK_TOKENS) - ahead.cache.blocks.num_blocks
            if needed <= ahead.blocks.num_free and (not has_state or len(ends) <= ahead.slots.num_free):
                ahead.issue(Chunk(start, ends), tokens)
            else:
                with pytest.raises(CacheFullError):
                    ahead.cache.reserve(start, ends)
        elif action == "commit" and ahead.in_flight:
            chunk = ahead.commit()
            alone.issue(chunk, tokens)
            alone.commit()
        elif action == "abort":
            ahead.cache.abort()
            ahead.in_flight.clear()
        elif action == "withdraw" and ahead.in_flight:
            ahead.cache.withdraw()
            ahead.in_flight.pop()
        ahead.check(tokens[: ahead.cache.num_tokens])
        alone.check(tokens[: ahead.cache.num_tokens])
        if ahead.cache.state is not None and alone.cache.state is not None:
            assert ahead.cache.state.positions == alone.cache.state.positions
    ahead.cache.free()
    assert (ahead.blocks.num_free, ahead.slots.num_free) == (NUM_BLOCKS, NUM_SLOTS)
    assert ahead.cache.num_in_flight == 0


def test_so_many_steps_need_so_many_slots_and_one_more() -> None:
    for depth in range(1, 5):
        slots = SlotPool(depth + 1)
        cache = SequenceCache([BlockPool(8)], slots)
        for step in range(20):
            cache.reserve(step, [step + 1])
            if cache.num_in_flight == depth:
                cache.commit(cache.num_tokens + 1)
        while cache.num_in_flight:
            cache.commit(cache.num_tokens + 1)
        assert cache.num_tokens == 20
        assert slots.num_free == depth


def test_steps_are_committed_in_their_order() -> None:
    for slots in (None, SlotPool(4)):
        cache = SequenceCache([BlockPool(4)], slots)
        cache.reserve(0, [64])
        cache.reserve(64, [128])
        with pytest.raises(ValueError, match="accepted is 64"):
            cache.commit(128)
        cache.commit(64)
        cache.commit(128)
        with pytest.raises(ValueError, match="cannot withdraw"):
            cache.withdraw()
        assert cache.num_tokens == 128


def test_nothing_is_cut_under_a_step() -> None:
    cache = SequenceCache([BlockPool(4)])
    cache.reserve(0, [64])
    cache.commit(64)
    cache.reserve(64, [128])
    with pytest.raises(ValueError, match="a step is reserved"):
        cache.cut(0)
    cache.abort()
    cache.cut(0)
    assert cache.blocks.num_blocks == 0
