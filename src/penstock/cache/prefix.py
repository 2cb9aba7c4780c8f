"""The prefix index: full blocks, states and windows that are there for a prompt that begins the same way."""

from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from heapq import heapify, heappop, heappush

from penstock.cache.blocks import BlockPool
from penstock.cache.keys import BlockKey
from penstock.cache.states import SlotPool
from penstock.plan.grids import BLOCK_TOKENS

# Entries of the eviction order that may be out of date before it is made anew.
_STALE_ENTRIES = 64


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """The longest usable beginning of a prompt. It holds no references: adopt it before anything else is done."""

    blocks: tuple[int, ...]
    num_clean: int  # of these, from the first on, are as a cold engine's prefill would have written them
    slot: int | None  # the state after them; None where the model has none, or nothing was found
    windows: tuple[
        tuple[int, ...], ...
    ] = ()  # blocks of the groups that have one, the last before the prefix's end

    @property
    def num_tokens(self) -> int:
        return len(self.blocks) * BLOCK_TOKENS


@dataclass(frozen=True, slots=True)
class _Snapshot:
    """What a sequence goes on with after a block, beside the blocks."""

    slot: int | None
    windows: tuple[tuple[int, ...], ...]


@dataclass(slots=True)
class _Node:
    """A block that is known by a key, and when that key was used last."""

    key: BlockKey
    depth: int  # blocks before it
    block: int
    is_clean: bool
    tick: int


class PrefixIndex:
    """Blocks by what they hold, over one pool; for models with recurrent state also slots, for those with windows
    also blocks of other pools.

    A block stays known when its last owner goes, and is given up when the pool needs space: the least recently used
    goes first, and the end of a chain before its beginning. A state takes a slot, so there are few: at most
    `max_snapshots`, and the least recently used goes first, without its block. A window is a state as well: what of
    the other pools' blocks it takes stays as long as it does, and goes when those pools need space.

    Time is a count of calls. A call uses a chain from its first block on, so a block was never used later than those
    before it, and in the order of (tick, deepest first) no block comes before an idle one that continues it. A block
    in use may well outlive an idle one before it, where two sequences had read the same text at the same time: it is
    not found until that place is filled again, which its owner does with its next `insert`. So nothing hinders
    eviction: every idle block can be given up.
    """

    def __init__(
        self,
        blocks: BlockPool,
        slots: SlotPool | None = None,
        *,
        max_snapshots: int = 0,
        windows: Sequence[BlockPool] = (),
    ) -> None:
        if max_snapshots < 0:
            raise ValueError(f"max_snapshots is {max_snapshots}: accepted is 0 or more")
        if any(pool.reclaim is not None for pool in (blocks, *windows)):
            raise ValueError("the pool has an index already: accepted is one for each pool")
        self._blocks = blocks
        self._slots = slots
        self._windows = tuple(windows)
        # Of each pool's blocks, snapshots that have them.
        self._in_windows = tuple(Counter[int]() for _ in windows)
        self._goes_on_anywhere = slots is None and not windows
        self._max_snapshots = 0 if self._goes_on_anywhere else max_snapshots
        self._nodes: dict[BlockKey, _Node] = {}
        self._node_of: dict[int, _Node] = {}  # by block
        self._snapshots: OrderedDict[BlockKey, _Snapshot] = OrderedDict()  # the least recently used first
        # (tick, -depth, block) of every idle block, and of others that were: those are passed over.
        self._order: list[tuple[int, int, int]] = []
        self._tick = 0
        self.num_evicted_blocks = 0
        self.num_evicted_snapshots = 0
        blocks.reclaim = self._reclaim
        blocks.on_idle = self._on_idle
        for index, pool in enumerate(self._windows):
            pool.reclaim = partial(self._reclaim_windows, index)

    @property
    def num_blocks(self) -> int:
        return len(self._nodes)

    @property
    def num_snapshots(self) -> int:
        return len(self._snapshots)

    @property
    def num_idle_snapshots(self) -> int:
        """Those whose slots nobody else holds."""
        slots = self._slots
        held = (kept.slot for kept in self._snapshots.values())
        return sum(slots.num_owners(slot) == 1 for slot in held if slot is not None) if slots else 0

    def find(self, keys: Sequence[BlockKey], *, clean_only: bool = False) -> PrefixHit:
        """The longest usable prefix of these keys, which counts as used now: blocks for each of them and, for models
        with state, a snapshot at the end."""
        nodes: list[_Node] = []
        num_usable = 0
        for key in keys:
            node = self._nodes.get(key)
            if node is None or (clean_only and not node.is_clean):
                break
            nodes.append(node)
            if self._goes_on_anywhere or key in self._snapshots:
                num_usable = len(nodes)
        del nodes[num_usable:]
        self._tick += 1
        for node in nodes:
            self._use(node)
        kept = _Snapshot(None, ())
        if nodes and not self._goes_on_anywhere:
            kept = self._snapshots[nodes[-1].key]
            self._snapshots.move_to_end(nodes[-1].key)
        num_clean = next((index for index, node in enumerate(nodes) if not node.is_clean), num_usable)
        return PrefixHit(tuple(node.block for node in nodes), num_clean, kept.slot, kept.windows)

    def knows(self, key: BlockKey) -> bool:
        """Whether there is a block of it: else there is none of those after it."""
        return key in self._nodes

    def insert(self, keys: Sequence[BlockKey], blocks: Sequence[int], num_clean: int, start: int = 0) -> None:
        """Blocks [start, len(blocks)) of a sequence that holds them hold what these keys say, full, and are not
        written again; the first `num_clean` are clean. Those before were inserted already, and are once more before
        the sequence gives them up: then they count as used.

        Those that are known already stay as they are, with two exceptions: a clean block takes the place of one that
        is not, and else one in use that of an idle one, which is free then.
        """
        if len(blocks) > len(keys):
            raise ValueError(f"{len(blocks)} blocks have {len(keys)} keys: accepted is a key for each")
        self._tick += 1
        for depth, (key, block) in enumerate(zip(keys[start:], blocks[start:], strict=False), start):
            is_clean = depth < num_clean
            node = self._nodes.get(key)
            if node is None:
                self._blocks.keep(block)
                node = self._nodes[key] = self._node_of[block] = _Node(
                    key, depth, block, is_clean, self._tick
                )
            elif node.block != block and self._should_replace(node, is_clean):
                self._replace(node, block, is_clean)
            self._use(node)

    def snapshot(
        self, keys: Sequence[BlockKey], slot: int | None, windows: Sequence[Sequence[int]] = ()
    ) -> bool:
        """The state after the blocks of these keys is in this slot, and their windows in these blocks, which the
        caller holds, and which are not written again. It is a clean one: what a cold engine's prefill would have come
        to.

        False, and nothing is retained, if the last block is not known, or no snapshots are to be kept.
        """
        node = self._nodes.get(keys[-1]) if keys else None
        if node is None or not self._max_snapshots:
            return False
        if node.key not in self._snapshots:
            if slot is not None:
                assert self._slots is not None
                self._slots.retain(slot)
            for pool, counts, blocks in zip(self._windows, self._in_windows, windows, strict=True):
                for block in blocks:
                    if not counts[block]:
                        pool.keep(block)
                    counts[block] += 1
            self._snapshots[node.key] = _Snapshot(slot, tuple(map(tuple, windows)))
        self._snapshots.move_to_end(node.key)
        if len(self._snapshots) > self._max_snapshots:
            self._forget_snapshot(next(iter(self._snapshots)))
            self.num_evicted_snapshots += 1
        return True

    def clear(self) -> None:
        """Forget everything: idle blocks are free, and slots are released."""
        for node in tuple(self._nodes.values()):
            self._forget(node)
        self._order.clear()

    def check_integrity(self) -> None:
        """Raise AssertionError unless the index, the pool and the order of eviction agree."""
        assert len(self._nodes) == len(self._node_of), "two keys have one block"
        idle = 0
        current = set(self._order)
        for key, node in self._nodes.items():
            assert node.key == key, f"block {node.block} is known by another key"
            assert self._node_of.get(node.block) is node, f"block {node.block} is not known by its number"
            assert self._blocks.is_kept(node.block), f"block {node.block} is known, but not kept"
            if self._blocks.is_idle(node.block):
                idle += 1
                assert _entry(node) in current, (
                    f"block {node.block} is idle, but not in the order of eviction"
                )
        assert idle == self._blocks.num_idle, (
            f"{self._blocks.num_idle} blocks are idle, {idle} of them are known"
        )
        assert len(self._snapshots) <= self._max_snapshots, "more snapshots than there is room for"
        assert self._snapshots.keys() <= self._nodes.keys(), "a snapshot has no block"
        for index, pool in enumerate(self._windows):
            counted = Counter(block for kept in self._snapshots.values() for block in kept.windows[index])
            assert counted == self._in_windows[index], "blocks of windows are counted wrongly"
            kept_blocks = {block for block in range(pool.num_blocks) if pool.is_kept(block)}
            assert kept_blocks == counted.keys(), "a window's pool keeps other blocks than the snapshots have"

    def _should_replace(self, node: _Node, is_clean: bool) -> bool:
        if is_clean != node.is_clean:
            return is_clean
        return self._blocks.is_idle(node.block)

    def _replace(self, node: _Node, block: int, is_clean: bool) -> None:
        self._blocks.keep(block)
        self._blocks.drop(node.block)
        del self._node_of[node.block]
        self._node_of[block] = node
        node.block, node.is_clean = block, is_clean

    def _use(self, node: _Node) -> None:
        """It is used now, and so is each before it in its chain."""
        node.tick = self._tick
        if self._blocks.is_idle(node.block):
            self._put_in_order(node)

    def _on_idle(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            self._put_in_order(self._node_of[block])

    def _put_in_order(self, node: _Node) -> None:
        heappush(self._order, _entry(node))
        if len(self._order) > 2 * self._blocks.num_idle + _STALE_ENTRIES:
            self._order = [entry for entry in set(self._order) if self._is_current(entry)]
            heapify(self._order)

    def _is_current(self, entry: tuple[int, int, int]) -> bool:
        node = self._node_of.get(entry[2])
        return node is not None and self._blocks.is_idle(node.block) and entry == _entry(node)

    def _reclaim(self, num_blocks: int) -> None:
        while num_blocks and self._order:
            entry = heappop(self._order)
            if self._is_current(entry):
                self.num_evicted_snapshots += self._forget(self._node_of[entry[2]])
                self.num_evicted_blocks += 1
                num_blocks -= 1

    def _forget(self, node: _Node) -> bool:
        """Give a block up; say whether a snapshot went with it."""
        del self._nodes[node.key]
        del self._node_of[node.block]
        self._blocks.drop(node.block)
        return self._forget_snapshot(node.key)

    def _forget_snapshot(self, key: BlockKey) -> bool:
        kept = self._snapshots.pop(key, None)
        if kept is None:
            return False
        if kept.slot is not None:
            assert self._slots is not None
            self._slots.release(kept.slot)
        for pool, counts, blocks in zip(self._windows, self._in_windows, kept.windows, strict=True):
            for block in blocks:
                counts[block] -= 1
                if not counts[block]:
                    del counts[block]
                    pool.drop(block)
        return True

    def _reclaim_windows(self, index: int, num_blocks: int) -> None:
        """Free so many idle blocks of a window's pool."""
        pool = self._windows[index]
        wanted = pool.num_free + num_blocks
        for key, kept in tuple(self._snapshots.items()):
            if pool.num_free >= wanted:
                return
            if any(pool.is_idle(block) for block in kept.windows[index]):
                self._forget_snapshot(key)
                self.num_evicted_snapshots += 1


def _entry(node: _Node) -> tuple[int, int, int]:
    """Where a block stands in the order of eviction: the least recently used first, of one chain the last first."""
    return (node.tick, -node.depth, node.block)
