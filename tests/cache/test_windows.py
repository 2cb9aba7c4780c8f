"""Groups with a window: they hold what the next token sees and no more, are gone on with, and kept with states."""

from contextlib import closing
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.cache import BLOCK_TOKENS, BlockPool, PrefixIndex, SequenceCache
from penstock.cache.space import CacheSpace
from penstock.cache.store.block_store import StoredState
from penstock.cache.tensors import CacheSpec, CacheTensors, KVSpec
from penstock.cache.transfer import copy_kept_in, copy_kept_out
from penstock.plan.admission import WindowRoom
from tests.cache.storing import HYBRID, PLAIN, bytes_in, keys_of, kv_of, open_store, state_of
from tests.cache.test_groups import Model, tokens_of, write

WINDOWS = [1, 2, 63, 64, 65, 66, 100, 128, 129, 130, 200]


def windowed(*windows: int, recurrent: bool = False) -> CacheSpec:
    """A group of all tokens, and one of another shape for each window."""
    others = (
        KVSpec(num_layers=1, num_kv_heads=2, head_dim=4, dtype=torch.float32, window=w, value_dim=3)
        for w in windows
    )
    return CacheSpec((*PLAIN.kv_groups, *others), HYBRID.recurrent if recurrent else None)


def blocks_before(token: int, window: int) -> int:
    """Whole blocks before a token that begins one, of which it sees some."""
    return len({seen // BLOCK_TOKENS for seen in range(max(token - window + 1, 0), token)})


@pytest.mark.parametrize("window", WINDOWS)
def test_a_window_takes_the_blocks_of_which_it_shows_some(window: int) -> None:
    _, spec = windowed(window).kv_groups
    assert spec.window_blocks == blocks_before(1024, window)
    assert PLAIN.kv.window_blocks == 0


@settings(deadline=None, max_examples=100)
@given(data=st.data(), windows=st.lists(st.sampled_from(WINDOWS), min_size=1, max_size=2))
def test_a_window_holds_what_comes_next_sees_and_no_more(data: st.DataObject, windows: list[int]) -> None:
    """Whatever is in flight, and wherever the next step begins again."""
    space = CacheSpace.for_tokens(Model(windowed(*windows)), 40 * BLOCK_TOKENS)
    cache = space.new_sequence()
    assert (space.keeps_prefix, cache.keeps_prefix, cache.is_long) == (False, False, False)
    ends = [0]  # of the committed tokens, then of each step in flight
    starts: list[int] = []
    firsts = [0] * len(windows)
    for _ in range(data.draw(st.integers(1, 14))):
        action = data.draw(st.sampled_from(["reserve", "reserve", "commit", "commit", "withdraw", "abort"]))
        if action == "reserve" and len(starts) < 3:
            # A step may run tokens of the one before it again, behind what is committed.
            start = data.draw(st.integers(max(ends[0], ends[-1] - 8), ends[-1]))
            starts.append(start)
            ends.append(ends[-1] + data.draw(st.integers(1, 300)))
            cache.reserve(start, [ends[-1]])
            write(space, cache, start, ends[-1])
        elif action == "commit" and starts:
            starts.pop(0)
            ends.pop(0)
            cache.commit(ends[0])
            last = ends[0] // BLOCK_TOKENS * BLOCK_TOKENS
            again = data.draw(st.none() | st.integers(max(last - 70, 0), ends[0]))
            cache.slide(again)
            begins = min([last, *starts, *([] if again is None else [again])])
            for place, window in enumerate(windows):
                firsts[place] = max(firsts[place], max(begins - window + 1, 0) // BLOCK_TOKENS)
        elif action == "withdraw" and starts:
            starts.pop()
            ends.pop()
            cache.withdraw()
        elif action == "abort":
            del starts[:], ends[1:]
            cache.abort()
        held = -(-ends[-1] // BLOCK_TOKENS)
        assert [group.num_gone for group in cache.kv_groups] == [0, *firsts]
        assert [len(group.block_ids) for group in cache.kv_groups] == [
            held,
            *(held - gone for gone in firsts),
        ]
        assert [sum(map(len, places)) for places in cache.places] == [
            cache.num_tokens - min(gone * BLOCK_TOKENS, cache.num_tokens) for gone in [0, *firsts]
        ]
        for group, tensors, pool in zip(cache.kv_groups, space.tensors.kv_groups, space.pools, strict=True):
            pool.check_integrity()
            assert pool.num_blocks - pool.num_free == len(group.block_ids)
            first = min(group.num_gone * BLOCK_TOKENS, ends[0])
            for layer in tensors.layers:
                expected = tokens_of(layer, first, ends[0])
                read = layer.read(group.locate(first, ends[0]))
                assert torch.equal(read.keys, expected)
                assert torch.equal(read.values, expected[..., : read.values.shape[-1]] + 1)
            if first:
                with pytest.raises(ValueError, match="no places"):
                    group.locate(first - 1, ends[0])
    cache.free()
    assert all(pool.num_free == pool.num_blocks for pool in space.pools)
    assert [group.num_gone for group in cache.kv_groups] == [0] * (len(windows) + 1)


def test_behind_a_window_there_is_no_way_back_but_to_nothing() -> None:
    space = CacheSpace.for_tokens(Model(windowed(65)), 8 * BLOCK_TOKENS)
    cache = space.new_sequence()
    cache.reserve(0, [300])
    cache.commit(300)
    cache.cut(299)  # nothing is gone yet
    cache.slide()
    for refused in (1, 64, 256, 298):
        with pytest.raises(ValueError, match="window is gone"):
            cache.cut(refused)
    cache.cut(299)
    cache.cut(0)
    assert [group.num_blocks for group in cache.kv_groups] == [0, 0]


@pytest.mark.parametrize("window", WINDOWS)
def test_another_goes_on_from_any_block_with_as_many_as_its_window_needs(window: int) -> None:
    space = CacheSpace.for_tokens(Model(windowed(window)), 20 * BLOCK_TOKENS)
    whole, own = space.pools
    first, second = space.new_sequence(), space.new_sequence()
    for start, end in pairwise((0, 64, 320)):
        first.reserve(start, [end])
        write(space, first, start, end)
        first.commit(end)
        held, kept = first.blocks.block_ids, first.windows[0].block_ids
        num_new, needed = (end - start) // BLOCK_TOKENS, blocks_before(end, window)
        last = kept[len(kept) - needed :]
        for wrong in (kept[len(kept) - needed - 1 :] if needed < len(kept) else [], last[1:]):
            if len(wrong) != needed:
                with pytest.raises(ValueError, match="as many"):
                    second.adopt([held[-num_new:], wrong], None)
        second.adopt([held[-num_new:], last], None)
        assert second.num_tokens == end
        assert (second.blocks.block_ids, second.windows[0].block_ids) == (held, last)
        assert second.windows[0].num_gone == end // BLOCK_TOKENS - needed
    first.free()
    assert (whole.num_free, own.num_free) == (15, 20 - len(last))
    begin = second.windows[0].num_gone * BLOCK_TOKENS
    for layer in space.tensors.kv_groups[1].layers:
        assert torch.equal(
            layer.read(second.windows[0].locate(begin, 320)).keys, tokens_of(layer, begin, 320)
        )


def test_half_a_block_or_a_free_one_is_no_window() -> None:
    pool = BlockPool(6)
    cache = SequenceCache([BlockPool(6), pool], windows=[0, 65])
    blocks = cache.windows[0]
    taken = pool.allocate(2)
    for num_tokens, given_ in ((100, [0]), (64, [0, 1]), (128, [5])):
        with pytest.raises(ValueError, match=r"cannot adopt|is free"):
            blocks.adopt_window(num_tokens, given_)
        assert (blocks.num_tokens, blocks.num_blocks, blocks.num_gone) == (0, 0, 0)
    blocks.adopt_window(128, [1])
    assert (blocks.num_gone, pool.num_owners(1)) == (1, 2)
    blocks.reserve(129)
    with pytest.raises(ValueError, match="nothing is reserved"):
        blocks.adopt_window(192, [0])
    blocks.unreserve(128)
    pool.release(taken)
    assert pool.num_free == 5


def test_pools_of_windows_have_room_for_those_who_run() -> None:
    """Sequences' windows, with a block that is filled and one more; what steps write; and what is kept."""
    model = Model(windowed(100))
    for room, blocks in (
        (None, 50),
        (WindowRoom(step_tokens=130), 2 + 2 + 3),
        (WindowRoom(3, 64, 2), 3 * 4 + 1 + 2 * 2),
        (WindowRoom(3, 64 * 60, 2), 50),
    ):
        space = CacheSpace.for_tokens(model, 50 * BLOCK_TOKENS, windows=room)
        assert [pool.num_blocks for pool in space.pools] == [50, blocks]
        assert space.windows == space.pools[1:]
    space.pools[1].allocate(50)  # whoever runs has a window's room
    assert space.has_room(50 * BLOCK_TOKENS, 0)
    assert not space.has_room(50 * BLOCK_TOKENS + 1, 0)


class Index:
    """Three windows of two blocks each that are kept and idle, and have no block in common."""

    def __init__(self, max_snapshots: int = 3) -> None:
        self.pools = [BlockPool(12), BlockPool(6)]
        self.index = PrefixIndex(self.pools[0], max_snapshots=max_snapshots, windows=self.pools[1:])
        self.keys = [keys_of(2, name) for name in "abc"]
        for keys in self.keys:
            self.keep(keys)

    def keep(self, keys: list[bytes]) -> None:
        cache = SequenceCache(self.pools, windows=[0, 129])
        cache.reserve(0, [128])
        cache.commit(128)
        self.index.insert(keys, cache.blocks.block_ids, 2)
        assert self.index.find(keys).num_tokens == 0  # not before its window is kept
        assert self.index.snapshot(keys, None, [cache.windows[0].block_ids])
        self.check()
        cache.free()
        self.check()

    def known(self) -> list[bool]:
        hits = [self.index.find(keys) for keys in self.keys]
        for hit in hits:
            assert [len(blocks) for blocks in hit.windows] == ([2] if hit.blocks else [])
        self.check()
        return [hit.num_tokens == 128 for hit in hits]

    def check(self) -> None:
        self.index.check_integrity()
        for pool in self.pools:
            pool.check_integrity()


@pytest.mark.parametrize(("num_blocks", "num_lost"), [(1, 1), (2, 1), (3, 2), (4, 2), (5, 3), (6, 3)])
def test_as_many_windows_go_as_somebody_needs_and_the_least_recently_used_first(
    num_blocks: int, num_lost: int
) -> None:
    index = Index()
    assert index.known() == [True, True, True]
    index.index.find(index.keys[0])  # the last to be used
    index.pools[1].release(index.pools[1].allocate(num_blocks))
    assert index.index.num_evicted_snapshots == num_lost
    assert index.index.num_snapshots == 3 - num_lost
    assert index.known() == [num_lost < 3, False, num_lost < 2]
    assert index.index.num_evicted_blocks == 0
    assert index.index.num_idle_snapshots == 0  # of slots, which it has none of


def test_a_window_in_use_is_not_given_up_and_a_block_of_two_stays_for_the_other() -> None:
    index = Index(max_snapshots=4)
    in_use = SequenceCache(index.pools, windows=[0, 129])
    hit = index.index.find(index.keys[0])
    in_use.adopt([hit.blocks, *hit.windows], hit.slot)
    index.keys.append(keys_of(2, "d"))  # another text, of which it is said that it has the same window
    (extent,) = index.pools[0].allocate(2)
    index.index.insert(index.keys[3], range(extent.start, extent.end), 2)
    assert index.index.snapshot(index.keys[3], None, hit.windows)
    index.check()
    index.pools[1].release(index.pools[1].allocate(4))
    assert index.known() == [True, False, False, True]
    in_use.free()
    index.pools[1].release(index.pools[1].allocate(5))
    assert index.known() == [False, False, False, False]
    assert index.pools[1].num_free == 6


def test_no_more_windows_are_kept_than_snapshots() -> None:
    index = Index(max_snapshots=2)
    assert index.known() == [False, True, True]
    assert index.index.num_evicted_snapshots == 1
    assert index.pools[1].num_free == 2
    index.index.clear()
    index.check()
    assert [pool.num_free for pool in index.pools] == [12, 6]


@pytest.mark.parametrize("num_held", [0, 1, 2])
@pytest.mark.parametrize("recurrent", [False, True])
def test_windows_and_states_are_copied_out_and_in_again_to_the_bit(num_held: int, recurrent: bool) -> None:
    """A sequence that is shorter than its window has fewer blocks: zeros stand before them."""
    spec = windowed(100, recurrent=recurrent)
    tensors = CacheTensors.of(spec, [6, 6], 3, torch.device("cpu"))
    (group,) = tensors.window_groups
    blocks = [4, 1][:num_held]
    for block in range(6):
        for layer in group.layers:
            for part, cached in enumerate(layer.parts):
                cached[block * 64 : block * 64 + 64].fill_(block + part / 2 + 1)
    slot = 1 if recurrent else None
    if tensors.recurrent is not None:
        tails, matrices = state_of(b"a state", spec)
        for own, tail, matrix in zip(tensors.states.layers, tails, matrices, strict=True):
            own.tail_out(1).copy_(tail)
            own.matrix_out(1).copy_(matrix)
    kept = copy_kept_out(tensors, [blocks], slot)
    (stored,) = kept.windows
    assert len(stored) == 2
    for place, own in enumerate(stored):
        held = place - (2 - num_held)
        values = {0.0} if held < 0 else {blocks[held] + 1.0, blocks[held] + 1.5}
        assert set(own.flatten().tolist()) == values
    assert (kept.tails.numel() > 0, kept.matrices.numel() > 0) == (recurrent, recurrent)
    other = CacheTensors.of(spec, [6, 6], 3, torch.device("cpu"))
    new = [2, 3][:num_held]
    copy_kept_in(other, [new], 2 if recurrent else None, kept)
    again = copy_kept_out(other, [new], 2 if recurrent else None)
    assert [bytes_in(own) for own in again.windows] == [bytes_in(own) for own in kept.windows]
    assert (bytes_in(again.tails), bytes_in(again.matrices)) == (
        bytes_in(kept.tails),
        bytes_in(kept.matrices),
    )
    untouched = [block for block in range(6) if block not in new]
    for layer in other.window_groups[0].layers:
        for cached in layer.parts:
            assert not cached.view(6, -1)[untouched].any()


@pytest.mark.parametrize("recurrent", [False, True])
def test_a_store_finds_windows_again_beside_states(tmp_path: Path, recurrent: bool) -> None:
    spec = windowed(100, 2, recurrent=recurrent)
    keys, whole = keys_of(3), replace(spec, kv_groups=spec.kv_groups[:1])
    sizes = [(kv.window_blocks, kv.block_elements) for kv in spec.kv_groups[1:]]
    windows = [torch.randn(size) for size in sizes]
    state = dict(zip(("tails", "matrices"), state_of(keys[1], spec), strict=True)) if recurrent else {}
    with closing(open_store(tmp_path, spec)) as store:
        assert store.keeps_states
        assert store.put_blocks(0, keys, kv_of(keys, whole))
        store.put_state(2, keys[1], StoredState(windows=tuple(windows), **state))
        with pytest.raises(ValueError, match="must be"):
            store.put_state(3, keys[2], StoredState(windows=(windows[0][1:], windows[1]), **state))
        assert store.flush(60)
    with closing(open_store(tmp_path, spec)) as store:
        found = store.find(keys, 0, needs_state=True)
        assert found is not None
        with closing(found):
            assert found.num_blocks == 2
            assert found.state is not None
            assert [bytes_in(own) for own in found.state.windows] == [bytes_in(own) for own in windows]
            for name, given_ in state.items():
                assert bytes_in(getattr(found.state, name)) == bytes_in(given_)
