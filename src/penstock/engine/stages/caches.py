"""The caches of a model in stages: workers have as many blocks and slots as the driver, of their own layers. Which of
them a sequence has, the driver says, so all that it does with its own cache beside steps is told to them: blocks that
are copied, kept on disk, and found there."""

import threading
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any

from penstock.cache import SequenceCache
from penstock.cache.keys import BlockKey
from penstock.cache.space import CacheSpace
from penstock.cache.transfer import CacheDigests, cache_digests
from penstock.engine.stages.peer import Peer
from penstock.engine.stages.store import Ticket, joined_keys, stage_fingerprint
from penstock.errors import StageLostError


class WorkerCaches:
    """The driver's hold on them."""

    def __init__(self, peers: Sequence[Peer], own_layers: range, generation: Callable[[], int]) -> None:
        """`peers` are those of the moment: what a worker held is gone with its generation."""
        self._peers = peers
        self._own_layers = own_layers
        self._generation = generation
        self._num_spaces = 0
        self._spaces: dict[int, tuple[int, weakref.finalize[..., Any]]] = {}  # by id of their tensors
        self._space_sizes: dict[int, dict[str, object]] = {}
        self._dropped: deque[int] = deque()
        self._fingerprint: bytes | None = None  # of the whole model, where blocks are kept on disk
        self._store_about: dict[str, object] = {}
        self._asking = threading.Lock()
        self._num_asked = 0

    @property
    def has_store(self) -> bool:
        return self._fingerprint is not None

    def tell_again(self, peer: Peer) -> None:
        """A worker was started anew: the same caches, empty, and the same store."""
        self._tell_store(peer)
        for number, sizes in self._space_sizes.items():
            peer.control.send("space", {"space": number, **sizes})

    def open_space(self, space: CacheSpace) -> int:
        """The number of a cache among the workers' own, which have as many blocks and slots."""
        tensors = space.tensors
        known = self._spaces.get(id(tensors))
        if known is not None and known[1].alive:
            return known[0]
        self.drop_unused()
        self._num_spaces += 1
        number = self._num_spaces
        sizes = {
            "num_blocks": [pool.num_blocks for pool in space.pools],
            "num_slots": space.slots.num_slots if space.slots else 0,
        }
        self._space_sizes[number] = sizes
        self._tell("space", None, {"space": number, **sizes})
        # A cache may end on any thread, also on one that is about to send: its workers are told before the next step.
        dropped = weakref.finalize(tensors, self._dropped.append, number)
        dropped.atexit = False
        self._spaces[id(tensors)] = number, dropped
        return number

    def copy_tokens(self, space: CacheSpace, source: int, target: int, num_tokens: int) -> None:
        """Copy the first tokens of one block of a cache to another, as the driver has done with its own."""
        self._tell("copy", space, {"source": source, "target": target, "num_tokens": num_tokens})

    def _tell(
        self, kind: str, space: CacheSpace | None, about: Mapping[str, object], data: bytes = b""
    ) -> None:
        """Tell all workers. One that is gone has lost what it is told of, too: the next step says so."""
        own = {} if space is None else {"space": self.open_space(space)}
        for peer in self._peers:
            with suppress(StageLostError):
                peer.control.send(kind, {**own, **about}, data)

    # What is on disk: each stage has a part of every block

    def open_store(
        self, folder: Path, fingerprint: bytes, *, max_bytes: int, about: Mapping[str, str]
    ) -> bytes:
        """Let workers keep their part in this folder, too. The fingerprint of the driver's."""
        self._store_about = {"folder": str(folder), "max_bytes": max_bytes, "about": dict(about)}
        self._fingerprint = fingerprint
        for peer in self._peers:
            self._tell_store(peer)
        return stage_fingerprint(fingerprint, self._own_layers)

    def _tell_store(self, peer: Peer) -> None:
        if self._fingerprint is not None:
            own = stage_fingerprint(self._fingerprint, peer.layers)
            peer.control.send("store", self._store_about, own)

    def find_stored(
        self, ticket: Ticket | None, keys: Sequence[BlockKey], start: int
    ) -> tuple[Ticket, list[int]]:
        """How many blocks from `start` on each worker has on disk; by a ticket they hold them. On any thread."""
        with self._asking:
            self._num_asked += 1
            round_number = self._num_asked
            ticket = ticket or Ticket(round_number, self._generation())
            about = {"ticket": ticket.number, "start": start, "round": round_number}
            for peer in self._peers:
                peer.control.send("find", about, joined_keys(keys))
            return ticket, [peer.count_found(round_number) for peer in self._peers]

    def is_current(self, ticket: Ticket) -> bool:
        return ticket.generation == self._generation()

    def forget(self, ticket: Ticket) -> None:
        """Give up what was found."""
        if self.is_current(ticket):
            self._tell("forget", None, {"ticket": ticket.number})

    def fetch(
        self,
        ticket: Ticket,
        space: CacheSpace,
        first: int,
        blocks: Sequence[int],
        windows: Sequence[Sequence[int]],
        slot: int | None,
    ) -> None:
        """Copy what was found, from its block `first` on, into these blocks of a cache, and what follows it into
        windows of these blocks and a slot."""
        about = {"ticket": ticket.number, "first": first, "blocks": list(blocks)}
        self._tell("fetch", space, {**about, "windows": windows, "slot": slot})

    def keep_blocks(
        self, space: CacheSpace, start: int, keys: Sequence[BlockKey], blocks: Sequence[int]
    ) -> None:
        """Blocks [start, start + len(keys)) of a sequence are to go to disk."""
        self._tell("keep", space, {"start": start, "blocks": list(blocks)}, joined_keys(keys))

    def keep_state(
        self,
        space: CacheSpace,
        index: int,
        key: BlockKey,
        windows: Sequence[Sequence[int]],
        slot: int | None,
    ) -> None:
        """What a sequence goes on with after `index` blocks: windows in these blocks, and a state in a slot."""
        self._tell("keep_state", space, {"index": index, "windows": windows, "slot": slot}, key)

    def digests(self, space: CacheSpace, cache: SequenceCache) -> CacheDigests:
        """Of what all stages have of a sequence."""
        places, slot = cache.places, None if cache.state is None else cache.state.slot
        ranges = [[(each.start, each.end) for each in group] for group in places]
        about = {"space": self.open_space(space), "places": ranges, "slot": slot}
        for peer in self._peers:
            peer.control.send("digest", about)
        found = [CacheDigests(**peer.reply("digests").about) for peer in self._peers]
        found.append(cache_digests(space.tensors, places, slot))
        return CacheDigests(
            tuple(tuple(chain(*group)) for group in zip(*(part.kv for part in found), strict=True)),
            tuple(chain(*(part.states for part in found))),
        )

    def drop_unused(self) -> None:
        while self._dropped:
            number = self._dropped.popleft()
            del self._space_sizes[number]
            self._tell("drop", None, {"space": number})
