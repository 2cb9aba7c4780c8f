"""What of a prompt is found again, and what that holds: by the books alone, no model computes."""

import tempfile
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.cache import BLOCK_TOKENS, SequenceCache
from penstock.cache.space import CacheSpace
from penstock.cache.store.block_store import BlockStore
from penstock.cache.tensors import CacheSpec
from penstock.engine import reuse as reuse_module
from penstock.engine.batcher import PoolLedger
from penstock.engine.reuse import Prefix, Reuse, kept_windows, share
from penstock.engine.status import ReuseStatus
from tests.cache.storing import FINGERPRINT, HYBRID, PLAIN, open_store
from tests.cache.test_groups import Model, tokens_of, write
from tests.cache.test_windows import windowed

SPECS = {
    "plain": PLAIN,
    "state": HYBRID,
    "window": windowed(100),
    "windows": windowed(1, 130),
    "both": windowed(100, recurrent=True),
}
EVERY = 128  # tokens from one state in memory to the next


@pytest.fixture(autouse=True, scope="module")
def _often() -> object:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reuse_module, "SNAPSHOT_TOKENS", EVERY)
        yield


@dataclass
class Reader:
    """A sequence that reads a prompt as the engine does, and what is to be found of it by then."""

    reuse: Reuse
    prompt: list[int]
    salt: str = ""
    reads_all: bool = False
    tokens: list[int] = field(init=False)
    cache: SequenceCache = field(init=False)
    prefix: Prefix = field(init=False)
    kept: set[int] = field(default_factory=set)  # positions that a state or windows go on from
    on_disk: set[int] = field(default_factory=set)
    num_clean: int | None = None  # blocks

    def __post_init__(self) -> None:
        self.tokens = list(self.prompt)
        self.cache = self.reuse.space.new_sequence()
        self.prefix = self.reuse.open(self.prompt, self.cache, self.salt, reads_all=self.reads_all)

    def run(self, end: int, *, is_chunk: bool = True) -> None:
        """A step up to a token, as a part of the prompt or as a decode."""
        space, start = self.reuse.space, self.cache.num_tokens
        ends = {end}
        if is_chunk and space.slots is not None:
            ends |= {*self.prefix.states_to_keep(start, end, space.slots.num_free - 1)}
        state = self.cache.reserve(start, sorted(ends))
        write(space, self.cache, start, end)
        if state is not None:
            for written in state.writes:
                for layer in space.tensors.states.layers:
                    layer.tail_out(written.slot).fill_(written.end % 251)
                    layer.matrix_out(written.slot).fill_(written.end)
        self.cache.commit(end)
        self._expect(start, end, ends, is_chunk=is_chunk)
        self.prefix.note(self.tokens, start, is_chunk=is_chunk)
        self.cache.slide()

    def answer(self, num_tokens: int) -> None:
        for _ in range(num_tokens):
            self.tokens.append(len(self.tokens) + 7)
            self.run(len(self.tokens), is_chunk=False)

    def end(self) -> None:
        position, has_state = self.cache.num_tokens, self.reuse.has_state
        if not has_state:
            position -= position % BLOCK_TOKENS
        if self._is_clean(position):
            self.kept.add(position)
        self.prefix.end()
        self.cache.free()

    def _expect(self, start: int, end: int, ends: set[int], *, is_chunk: bool) -> None:
        length, every = len(self.prompt), self.reuse.stored_every
        last = {(length - 1) // 64 * 64, length // 64 * 64}
        if not is_chunk:
            self._taint(length // 64)
        elif self.reuse.has_state and start % 64:  # a state's bits depend on where its blocks began
            self._taint(start // 64)
        for position in range(start + 1, end + 1):
            is_there = not self.reuse.has_state or position in ends
            if is_there and self._is_clean(position):
                self.kept |= {position} if position % EVERY == 0 or position in last else set()
                self.on_disk |= {position} if position % every == 0 or position in last else set()
        if is_chunk and self.reuse.has_state and start % 64 == 0:
            wanted = {*range(0, end, every), *last}
            assert {*ends} - {end} == {position for position in wanted if start < position < end}

    def _taint(self, num_blocks: int) -> None:
        self.num_clean = num_blocks if self.num_clean is None else min(num_blocks, self.num_clean)

    def _is_clean(self, position: int) -> bool:
        clean = len(self.prompt) // 64 if self.num_clean is None else self.num_clean
        return position % 64 == 0 and 0 < position <= min(len(self.prompt), clean * 64)

    def num_known(self, *, clean_only: bool, on_disk: bool = False) -> int:
        """Blocks of it that are there for others."""
        num_full = self.cache.num_tokens // 64
        clean = num_full if self.num_clean is None else min(self.num_clean, num_full)
        return clean if clean_only or on_disk or not self.reuse.goes_on_anywhere else num_full


def check(reader: Reader) -> None:
    """A sequence holds the keys, values and state that belong where it stands."""
    space, cache = reader.reuse.space, reader.cache
    for blocks, tensors in zip(cache.kv_groups, space.tensors.kv_groups, strict=True):
        first, end = min(blocks.num_gone * 64, cache.num_tokens), cache.num_tokens
        for layer in tensors.layers:
            read = layer.read(blocks.locate(first, end))
            expected = tokens_of(layer, first, end)
            assert torch.equal(read.keys, expected)
            assert torch.equal(read.values, expected[..., : read.values.shape[-1]] + 1)
    if cache.state is not None and cache.num_tokens:
        for own in space.tensors.states.layers:
            assert float(own.matrix(cache.state.slot)[0, 0, 0]) == cache.num_tokens
            assert int(own.tail(cache.state.slot)[0, 0]) == cache.num_tokens % 251
    for pool in space.pools:
        pool.check_integrity()
    reader.reuse.index.check_integrity()


def new_reuse(spec: CacheSpec, *, clean_only: bool = False, store: BlockStore | None = None) -> Reuse:
    space = CacheSpace.for_tokens(Model(spec), 60 * BLOCK_TOKENS, num_slots=40)
    return Reuse(space, fingerprint=FINGERPRINT, clean_only=clean_only, max_snapshots=16, store=store)


def first_that_reads(data: st.DataObject, reuse: Reuse) -> Reader:
    length = data.draw(st.integers(1, 10).map(lambda blocks: blocks * 64) | st.integers(1, 640))
    first = Reader(reuse, [data.draw(st.integers(0, 3)), *range(1, length)])
    num_read = data.draw(st.just(len(first.prompt)) | st.integers(1, len(first.prompt)))
    while first.cache.num_tokens < num_read:
        sizes = st.sampled_from([64, 128, 192, 256]) | st.integers(1, 300)
        first.run(min(first.cache.num_tokens + data.draw(sizes), num_read))
        check(first)
    if num_read == len(first.prompt):
        first.answer(data.draw(st.integers(0, 130)))
        check(first)
    return first


def prompt_like(data: st.DataObject, tokens: Sequence[int]) -> tuple[list[int], int]:
    """A prompt, and how many tokens it has in common with these."""
    ends = st.integers(1, len(tokens)) | st.integers(1, len(tokens) // 64 + 1).map(
        lambda blocks: min(blocks * 64, len(tokens))
    )
    common = data.draw(ends)
    other = [99] * data.draw(st.sampled_from([0, 0, 1, 63, 64, 200]))
    return [*tokens[:common], *other], common


@pytest.mark.parametrize("clean_only", [False, True])
@pytest.mark.parametrize("kind", SPECS)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_what_is_in_memory_is_found_as_far_as_it_can_be_gone_on_with(
    kind: str, clean_only: bool, data: st.DataObject
) -> None:
    reuse = new_reuse(SPECS[kind], clean_only=clean_only)
    first = first_that_reads(data, reuse)
    missed = reuse.missed_tokens
    assert missed == min(first.cache.num_tokens, len(first.prompt))
    num_known = first.num_known(clean_only=clean_only)
    tokens = first.tokens[: first.cache.num_tokens]
    is_there = data.draw(st.booleans())  # while the other is still here
    if not is_there:
        first.end()
    prompt, common = prompt_like(data, tokens)
    second = Reader(reuse, prompt)
    most = min(common // 64, num_known, (len(prompt) - 1) // 64) * 64
    expected = most
    if not reuse.goes_on_anywhere:
        expected = max((position for position in first.kept if position <= most), default=0)
    elif len(prompt) % 64 == 0 and common == len(prompt) <= num_known * 64:
        expected = len(prompt) - 1  # all but the token whose logits are wanted
    assert second.prefix.num_in_memory() * 64 == expected // 64 * 64
    assert second.prefix.num_in_use() * 64 == (expected // 64 * 64 if is_there else 0)
    assert second.prefix.num_common(first.prefix) == min(
        common // 64, (len(prompt) - 1) // 64, len(tokens) // 64
    )
    assert second.prefix.find_more(in_pieces=data.draw(st.booleans())) == (expected > 0)
    assert second.cache.num_tokens == expected
    assert not second.prefix.has_more_on_disk
    assert not second.prefix.find_more(in_pieces=False)
    assert (reuse.memory_tokens, reuse.disk_tokens, reuse.missed_tokens) == (expected, 0, missed)
    check(second)
    if is_there:
        first.end()
    reuse.count(expected)
    told = reuse.status()
    assert (told.num_hits, told.num_misses) == ((1, 0) if expected else (0, 1))
    assert (told.memory_tokens, told.missed_tokens, told.is_on) == (expected, missed, True)
    assert told == ReuseStatus(  # of a disk there is nothing to tell
        True, expected, 0, missed, told.num_hits, told.num_misses, num_evicted_states=told.num_evicted_states
    )
    second.end()
    for salted in (Reader(reuse, prompt, "another"), Reader(reuse, prompt, reads_all=True)):
        assert not salted.prefix.find_more(in_pieces=False)
        assert salted.cache.num_tokens == 0
        assert salted.prefix.num_in_memory() == 0
    reuse.index.clear()
    assert all(pool.num_free == pool.num_blocks for pool in reuse.space.pools)


@pytest.mark.parametrize("kind", SPECS)
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_what_is_on_disk_is_found_by_another_process(kind: str, data: st.DataObject) -> None:
    spec = SPECS[kind]
    with tempfile.TemporaryDirectory() as folder, closing(open_store(Path(folder), spec)) as store:
        first = first_that_reads(data, new_reuse(spec, store=store))
        num_known = first.num_known(clean_only=True, on_disk=True)
        tokens, on_disk = first.tokens[: first.cache.num_tokens], first.on_disk
        first.end()
        assert store.flush(60)
        assert store.stats().num_dropped == 0
        reuse = new_reuse(spec, store=store)
        prompt, common = prompt_like(data, tokens)
        second = Reader(reuse, prompt)
        reuse.piece_blocks = data.draw(st.integers(1, 4))
        in_pieces = data.draw(st.booleans())
        most = min(common // 64, num_known, (len(prompt) - 1) // 64) * 64
        expected = most if reuse.goes_on_anywhere else max((p for p in on_disk if p <= most), default=0)
        steps = [0]
        while second.prefix.has_more_on_disk:
            assert second.prefix.find_more(in_pieces=in_pieces) == (second.cache.num_tokens > steps[-1])
            steps.append(second.cache.num_tokens)
            check(second)
        assert steps[-1] == expected
        assert (reuse.memory_tokens, reuse.disk_tokens, reuse.missed_tokens) == (0, expected, 0)
        if in_pieces and reuse.goes_on_anywhere:
            piece = reuse.piece_blocks * 64
            assert steps == ([*range(0, expected, piece), expected] if expected else [0, 0])
        else:
            assert len(steps) == 2
        # What came from the disk is in memory now, and on disk already.
        third = Reader(reuse, prompt)
        third.prefix.find_more(in_pieces=False)
        assert third.cache.num_tokens == (expected if reuse.goes_on_anywhere else third.cache.num_tokens)
        written = store.stats().num_written
        second.end()
        third.end()
        assert store.flush(60)
        assert store.stats().num_written == written


@pytest.mark.parametrize("kind", SPECS)
def test_what_memory_has_by_now_is_not_copied_from_disk_and_what_comes_after_it_is(
    kind: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(reuse_module, "MOST_FOUND", 2)
    prompt = [*range(5 * 64)]
    with tempfile.TemporaryDirectory() as folder, closing(open_store(Path(folder), SPECS[kind])) as store:
        first = Reader(new_reuse(SPECS[kind], store=store), prompt)
        first.run(5 * 64)
        first.end()
        assert store.flush(60)
        reuse = new_reuse(SPECS[kind], store=store)
        second, third = Reader(reuse, prompt), Reader(reuse, prompt)
        second.prefix.search(0)
        third.run(2 * 64)
        assert second.prefix.find_more(in_pieces=False)
        assert second.cache.num_tokens == 4 * 64
        assert (reuse.memory_tokens, reuse.disk_tokens) == (2 * 64, 2 * 64)
        check(second)
    assert not caplog.records


@pytest.mark.parametrize("kind", SPECS)
def test_what_memory_has_given_up_by_now_comes_from_disk(kind: str) -> None:
    prompt = [*range(5 * 64)]
    with tempfile.TemporaryDirectory() as folder, closing(open_store(Path(folder), SPECS[kind])) as store:
        reuse = new_reuse(SPECS[kind], store=store)
        first = Reader(reuse, prompt)
        first.run(5 * 64)
        first.end()
        assert store.flush(60)
        second = Reader(reuse, prompt)
        second.prefix.search(2)
        reuse.index.clear()
        assert second.prefix.find_more(in_pieces=False)
        assert second.cache.num_tokens == 4 * 64
        assert (reuse.memory_tokens, reuse.disk_tokens) == (0, 4 * 64)
        check(second)


def test_a_prompt_that_was_read_in_steps_gives_up_its_end_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each step tells of what it read alone; when the prompt is over, all of it was used last."""
    reuse = new_reuse(PLAIN)
    told: list[tuple[int, int]] = []
    insert = reuse.index.insert

    def noted(keys: Sequence[Any], blocks: Sequence[int], num_clean: int, start: int = 0) -> None:
        told.append((start, len(blocks)))
        insert(keys, blocks, num_clean, start)

    monkeypatch.setattr(reuse.index, "insert", noted)
    first = Reader(reuse, [*range(6 * 64)])
    for end in (64, 200, 256, 384):
        first.run(end)
    assert told == [(0, 1), (1, 3), (3, 4), (4, 6)]
    first.end()
    assert told[4:] == [(0, 6)]
    other = reuse.space.new_sequence()
    other.reserve(0, [64 * (reuse.space.blocks.num_free + 2)])
    again = Reader(reuse, [*range(6 * 64)])
    assert again.prefix.num_in_memory() == 4
    reuse.index.check_integrity()


def test_tokens_between_states_on_disk_are_as_many_as_take_their_space() -> None:
    for kind, expected in (("plain", EVERY), ("window", EVERY), ("state", 64)):
        with tempfile.TemporaryDirectory() as folder, closing(open_store(Path(folder), SPECS[kind])) as store:
            reuse = new_reuse(SPECS[kind], store=store)
            assert reuse.stored_every == expected, kind
            assert new_reuse(SPECS[kind]).stored_every == EVERY
            block = 64 * SPECS[kind].kv.bytes_per_token
            assert (reuse.block_bytes, reuse.piece_blocks) == (block, (64 << 20) // block)


def test_as_many_windows_are_kept_as_a_part_of_a_cache_holds() -> None:
    assert kept_windows(PLAIN, 16) == kept_windows(HYBRID, 16) == 0
    assert kept_windows(windowed(100), 16) == 16
    large = windowed(1 << 21)
    assert kept_windows(large, 16) == (1 << 30) // large.bytes_per_window
    assert kept_windows(windowed(1 << 26), 16) == 1


class Waiting(Reader):
    """As the batcher sees it: a job with an id."""

    @property
    def id(self) -> str:
        return self.salt + str(id(self))


def shared(*readers: Waiting) -> tuple[list[int], list[int]]:
    """Who gained, and who waits, by their places."""
    found = share([reader.prefix for reader in readers], in_pieces=False)
    return (
        [place for place, reader in enumerate(readers) if reader.prefix in found.gained],
        [place for place, reader in enumerate(readers) if reader.prefix in found.waiting],
    )


@pytest.mark.parametrize("num_common", [0, 1, 2, 5])
@pytest.mark.parametrize("kind", SPECS)
def test_a_prompt_waits_for_the_one_before_it_as_far_as_they_are_alike(kind: str, num_common: int) -> None:
    reuse = new_reuse(SPECS[kind])
    tokens = [*range(num_common * 64)]
    first, second = (Waiting(reuse, [*tokens, *[other] * 200]) for other in (7, 8))
    assert shared(first, second) == ([], [1] if num_common else [])
    assert first.prefix.keep_states == ({num_common * 64} if num_common else set())
    ends = [*range(64, num_common * 64 + 1, 64), num_common * 64 + 100]
    for end in ends:
        first.cache.reserve(first.cache.num_tokens, [end])  # what is in flight is let alone
        is_behind = first.cache.num_tokens < num_common * 64
        gained, held = shared(first, second)
        assert held == ([1] if is_behind else [])
        first.cache.abort()
        first.run(end)
        gained, held = shared(first, second)
        is_there = end >= num_common * 64
        if reuse.goes_on_anywhere:
            assert gained == ([1] if num_common and end <= num_common * 64 else [])
            assert second.cache.num_tokens == min(end // 64, num_common) * 64
        assert held == ([] if is_there else [1])
        if is_there:
            assert second.cache.num_tokens == num_common * 64
            check(second)
    second.cache.reserve(second.cache.num_tokens, [second.cache.num_tokens + 1])
    assert shared(first, second) == ([], [])
    for reader in (first, second):
        reader.end()


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_blocks_that_would_be_free_are_those_that_are_free_then(data: st.DataObject) -> None:
    """Whoever gives up how much: a block of several is free when the last of them gives it up."""
    reuse = new_reuse(PLAIN)
    tokens = [*range(6 * 64)]
    readers = []
    for name in "abc":
        reader = Waiting(reuse, [*tokens[: data.draw(st.integers(0, 6)) * 64], *[ord(name)] * 130])
        in_use = reader.prefix.num_in_use()
        ledger = PoolLedger(reuse.space.pools, {reader.id: reader})  # type: ignore[dict-item]
        assert ledger.num_shared(reader.id) == in_use
        reader.prefix.find_more(in_pieces=False)
        assert (ledger.num_shared(reader.id) == 0) or not reader.cache.blocks.num_blocks
        reader.run(data.draw(st.integers(reader.cache.num_tokens + 1, len(reader.prompt))))
        readers.append(reader)
    ledger = PoolLedger(reuse.space.pools, {reader.id: reader for reader in readers})  # type: ignore[misc]
    assert ledger.num_free({}) == ledger.num_writable({}) == reuse.space.blocks.num_available
    kept = {
        reader.id: data.draw(st.integers(0, reader.cache.num_tokens // 64))
        for reader in readers
        if data.draw(st.booleans())
    }
    expected = ledger.num_free(kept)
    assert ledger.num_writable(kept) == expected
    for reader in readers:
        if reader.id in kept:
            reader.prefix.leave(kept[reader.id])
            reader.cache.cut(kept[reader.id] * 64)
    assert reuse.space.blocks.num_available == expected
