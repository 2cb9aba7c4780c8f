"""The driver's side of a model in stages. The driver is the last stage: it samples, so logits do not travel.

A step is issued to all workers at once; what is handed on between neighbours is the residual. Each stage runs steps
in the order in which they were issued, so a step that is undone needs no message: it runs on, and is forgotten.
A worker that is gone ends the *generation*: whatever waits has its StageLostError, and so has all that is issued,
until `begin_generation` has made another group.
"""

import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from penstock.cache import SequenceCache
from penstock.cache.keys import BlockKey
from penstock.cache.space import CacheSpace
from penstock.cache.transfer import CacheDigests, cache_digests
from penstock.engine.stages.control import DEFAULT_STAGE_TIMEOUT_S, Control, Message, read_token
from penstock.engine.stages.header import write_header
from penstock.engine.stages.joining import check_parts, common_parts, join_laws, read_law
from penstock.engine.stages.link import Link, LinkKind, LinkStore, Receipt
from penstock.engine.stages.store import Ticket, joined_keys, stage_fingerprint
from penstock.engine.stages.workers import (
    ListeningWorker,
    LocalWorker,
    Ranks,
    StageShare,
    WorkerPlace,
    divide_machine,
    run_worker,
)
from penstock.engine.status import StageStatus
from penstock.errors import PenstockError, SettingError, StageError, StageLostError, StageRefusedError
from penstock.kernels.probe import ProbeShapes, ProductShape
from penstock.layers.forward_batch import ForwardBatch
from penstock.models.decoder import Decoder
from penstock.plan.grids import BLOCK_TOKENS, RowLaw
from penstock.plan.model import ModelConfig
from penstock.plan.settings import EngineSettings
from penstock.plan.stage_settings import StagesSetting


def open_pipeline(
    path: Path, config: ModelConfig, settings: EngineSettings, stages: StagesSetting
) -> "Pipeline":
    """Start the workers of a model, or connect to them. Raises StageLostError, StageRefusedError. Of torchrun's
    processes the last goes on; the others are its workers, and end with it (SystemExit)."""
    places: list[WorkerPlace] = []
    share = None
    if stages.addresses:
        token = read_token(stages.token_file or "")
        places += [ListeningWorker(address, token) for address in stages.addresses]
    elif (ranks := Ranks.find()) is not None:
        if stages.token_file is None:
            raise SettingError("stages", stages.num_stages, needs=("token_file",), where="under torchrun")
        if ranks.world_size != stages.num_stages:
            raise SettingError("stages", stages.num_stages, str(ranks.world_size), where="under torchrun")
        token = read_token(stages.token_file)
        if not ranks.drives:
            run_worker(ranks.listen(token), device=settings.device.name, once=True)
            raise SystemExit(0)
        places += ranks.workers(token)
    else:
        share, *shares = divide_machine(stages.num_stages, settings.threads.count)
        torch.set_num_threads(share.threads)
        places += [LocalWorker(own, device=settings.device.name) for own in shares]
    pipeline = Pipeline(
        path,
        places,
        stages.cut(config),
        stage_timeout_s=stages.timeout_s,
        same_machine=share is not None,
        mixed=stages.mixed,
    )
    pipeline.share = share
    return pipeline


# How long a worker's own reason is waited for, where a link has ended.
_REASON_S = 0.5
# How long a worker has to write what it was to keep.
_WRITE_S = 30.0
# How long one that was lost is looked for at a time.
_REOPEN_S = 1.0
# Steps of which it is known how long each stage took.
_STEPS_KEPT = 512


@dataclass(frozen=True)
class LoadedStage:
    """What a worker says of its layers."""

    layers: range
    weight_bytes: int
    bytes_per_token: int
    bytes_per_slot: int
    free_bytes: int | None
    device: str


@dataclass
class StageTimes:
    """Of one stage, in seconds, since it was loaded."""

    num_steps: int = 0
    busy_s: float = 0.0
    waited_s: float = 0.0  # for a residual
    link_s: float = 0.0  # to hand a residual on

    def count(self, *, busy_s: float, waited_s: float, link_s: float) -> None:
        self.num_steps += 1
        self.busy_s += busy_s
        self.waited_s += waited_s
        self.link_s += link_s


@dataclass(frozen=True)
class Issued:
    """A step that the workers run."""

    number: int
    receipt: Receipt


@dataclass(eq=False)
class _Peer:
    """A worker, as the driver knows it."""

    stage: int
    control: Control
    layers: range
    replies: "queue.SimpleQueue[Message | StageLostError]" = field(default_factory=queue.SimpleQueue)
    found: "queue.SimpleQueue[Message]" = field(default_factory=queue.SimpleQueue)
    loaded: LoadedStage | None = None
    times: StageTimes = field(default_factory=StageTimes)
    shapes: ProbeShapes | None = None
    num_restarts: int = 0
    differs: bool = False  # its bits may be others than the driver's

    def count_found(self, round_number: int) -> int:
        """The answer to a question for what is on disk."""
        while True:
            try:
                about = self.found.get(timeout=_REASON_S).about
            except queue.Empty:
                if not self.control.is_alive:
                    raise StageLostError(self.stage, self.control.peer, "it is not connected") from None
                continue
            if about["round"] == round_number:
                return int(about["num_blocks"])

    def reply(self, kind: str) -> Message:
        """The answer to what was asked of it last."""
        while True:
            message = self.replies.get()
            if isinstance(message, StageLostError):
                self.replies.put(message)
                raise message
            if message.kind == "failed":
                raise StageRefusedError(self.stage, self.control.peer, str(message.about.get("error")))
            if message.kind == kind:
                return message


class Pipeline:
    """Workers that hold the layers before the driver's own."""

    def __init__(
        self,
        path: Path,
        places: Sequence[WorkerPlace],
        layers: Sequence[range],
        *,
        stage_timeout_s: float = DEFAULT_STAGE_TIMEOUT_S,
        same_machine: bool = True,
        mixed: bool = False,
    ) -> None:
        """`layers` are of all stages, the driver's last. Workers on the same machine have the very files that the
        driver has. `mixed` lets workers in whose bits may be others."""
        assert len(places) + 1 == len(layers)
        self.layers = tuple(layers)
        self.places = tuple(places)
        self.share: StageShare | None = None  # of this machine, where workers have other parts of it
        self.on_lost: Callable[[], None] = lambda: None  # called on another thread
        self._path = path
        self._same_machine = same_machine
        self._mixed = mixed
        self._parts: dict[str, str] | None = None  # what workers must have in common with the driver
        self._own_times = StageTimes()
        self._step_times: dict[int, list[float | None]] = {}  # seconds by stage; None: not known yet
        self.is_closed = False
        self.generation = 0
        self.same_bits = True  # False: stages differ, and were let in all the same
        self._stage_timeout_s = stage_timeout_s
        self._model: Decoder | None = None
        self._law: RowLaw | None = None
        self._num_issued = 0
        self._num_spaces = 0
        self._spaces: dict[int, tuple[int, weakref.finalize[..., Any]]] = {}  # by id of their tensors
        self._space_sizes: dict[int, dict[str, int]] = {}
        self._dropped: deque[int] = deque()
        self._fingerprint: bytes | None = None  # of the whole model, where blocks are kept on disk
        self._store_about: dict[str, object] = {}
        self._asking = threading.Lock()
        self._num_asked = 0
        self._errors: dict[int, Exception] = {}  # of steps that workers failed in
        self._changed = threading.Condition()
        self._lost: StageError | None = None
        self._incoming: Link | None = None
        self._store: LinkStore | None = None
        self._peers: list[_Peer] = []
        try:
            for stage, place in enumerate(places):
                self._peers.append(_Peer(stage, self._open(stage, place), self.layers[stage]))
        except BaseException:
            self.close()
            raise
        for peer in self._peers:
            self._listen(peer)

    @property
    def num_stages(self) -> int:
        return len(self.layers)

    @property
    def depth(self) -> int:
        """Steps in flight: one for each stage, and one that waits for the first."""
        return self.num_stages + 1

    @property
    def stages(self) -> tuple[LoadedStage, ...]:
        """Those that were loaded by workers."""
        return tuple(peer.loaded for peer in self._peers if peer.loaded is not None)

    @property
    def times(self) -> tuple[StageTimes, ...]:
        """Of the workers' stages."""
        return tuple(replace(peer.times) for peer in self._peers)

    def pin(self) -> None:
        """Pin the calling thread, which is to run steps, beside the workers' processors."""
        if self.share is not None:
            self.share.pin()

    def status(self) -> tuple[StageStatus, ...]:
        """Of all stages, the driver's last."""
        found = []
        for peer in tuple(self._peers):
            trouble = None if peer.control.is_alive else "it is lost"
            if (lost := self._lost) is not None and lost.stage == peer.stage:
                trouble = lost.reason
            found.append((peer.stage, peer.control.peer, trouble, peer.times, peer.num_restarts))
        found.append((len(self._peers), "this process", None, self._own_times, 0))
        return tuple(
            StageStatus(
                stage,
                self.layers[stage].start,
                self.layers[stage].stop - 1,
                where,
                trouble,
                num_restarts=num_restarts,
                **asdict(times),
            )
            for stage, where, trouble, times, num_restarts in found
        )

    def step_times(self, step: int | None) -> list[float | None]:
        """The seconds that each stage computed in a step, by the number it was issued with; none of an old one."""
        return self._step_times.get(-1 if step is None else step, [])

    @property
    def lost(self) -> StageError | None:
        """What ended the generation, if something did."""
        return self._lost

    # Loading

    def load(self, *, dtype: str, weights: str) -> None:
        """Tell the workers to load their layers. They do so while the driver loads its own."""
        self._load_about = {
            "model": str(self._path),
            "dtype": dtype,
            "weights": weights,
            "same_machine": self._same_machine,
        }
        for peer in self._peers:
            self._tell_load(peer)

    def loaded(self, model: Decoder) -> ProbeShapes:
        """Wait for the workers, once the driver has loaded its own layers: what is to be probed of all of them."""
        self._model = model
        self._parts = common_parts(
            self._path, model, str(self._load_about["weights"]), same_machine=self._same_machine
        )
        for peer in self._peers:
            self._take_ready(peer)
        return joined_shapes(
            [model.probe_shapes, *(peer.shapes for peer in self._peers if peer.shapes)], model
        )

    def begin(self, law: RowLaw) -> RowLaw:
        """Tell the workers by which law rows are padded, and connect all stages. It is the driver's, or one that
        holds also on workers that differ from it, as far as there is one."""
        for peer in self._peers:
            if peer.differs:
                peer.control.send("probe")
                theirs = read_law(peer.reply("probed").about)
                with suppress(
                    ValueError
                ):  # then chunks of another size have other bits there, which is said anyway
                    law = join_laws([law, theirs])
        self._law = law
        for peer in self._peers:
            peer.control.send("law", asdict(law))
        self.begin_generation()
        return law

    def restore(self) -> None:
        """Bring back the workers that are gone, and connect all stages: what the caches held is lost. Raises
        StageLostError or StageRefusedError where that cannot be done now; then it may be tried again."""
        if self.is_closed:
            raise StageLostError(None, "the driver", "it has ended")
        try:
            for peer in tuple(self._peers):
                if not peer.control.is_alive:
                    self.reopen(peer.stage)
            self.begin_generation()
        except StageError as error:
            with self._changed:
                self._lost = error
            self._end(StageLostError(error.stage, error.address, error.reason))
            raise

    def reopen(self, stage: int) -> None:
        """A worker that was lost is connected to once more, or started again: it loads the same layers, and has the
        same caches, empty. Then `begin_generation` goes on. Raises StageLostError."""
        before = self._peers[stage]
        control = self._open(stage, self.places[stage], timeout_s=min(_REOPEN_S, self._stage_timeout_s))
        peer = self._peers[stage] = _Peer(
            stage, control, self.layers[stage], times=before.times, num_restarts=before.num_restarts + 1
        )
        self._listen(peer)
        self._tell_load(peer)
        self._take_ready(peer)
        assert self._law is not None
        control.send("law", asdict(self._law))
        self._tell_store(peer)
        for number, sizes in self._space_sizes.items():
            control.send("space", {"space": number, **sizes})

    def begin_generation(self) -> None:
        """Connect the stages anew. Steps of the generation before are forgotten. Raises StageLostError."""
        assert self._model is not None
        self._end(StageLostError(None, "a neighbour", "another group was made"))
        with self._changed:
            self.generation += 1
            self._lost = None
            self._errors.clear()
            last_hop = len(self._peers) - 1
            tell = partial(self._tell_meet, last_hop)
            self._store = LinkStore(tell, self._stage_timeout_s)
        if gone := next((peer for peer in self._peers if not peer.control.is_alive), None):
            error = StageLostError(gone.stage, gone.control.peer, "it is not connected")
            self._lose(error)
            raise error
        kinds = self._link_kinds()
        for peer in self._peers:
            about: dict[str, object] = {"generation": self.generation}
            if peer.stage:
                about["incoming"] = {"number": peer.stage - 1, "kind": kinds[peer.stage - 1]}
            about["outgoing"] = {"number": peer.stage, "kind": kinds[peer.stage]}
            peer.control.send("group", about)
        model = self._model
        host = self._peers[-1].control.local_host
        self._incoming = Link(
            self._store,
            sends=False,
            host=host,
            hidden_size=model.config.hidden_size,
            dtype=model.dtype,
            device=model.device,
            kind=kinds[-1],
        )
        for peer in self._peers:
            while (joined := peer.reply("joined").about)["generation"] != self.generation:
                pass
            if (why := joined.get("error")) is not None:
                raise StageLostError(peer.stage, peer.control.peer, str(why))

    def close(self) -> None:
        """End the workers. More than once is allowed."""
        self.is_closed = True
        # First, and on this thread: a group that another takes apart while the process ends takes it along.
        self._lose(StageLostError(None, "the driver", "it has ended"))
        for peer in self._peers:
            with suppress(PenstockError):
                peer.control.send("stop")
        for peer in self._peers if self._fingerprint is not None else ():
            peer.control.wait_closed(_WRITE_S)  # what waits is written
        for place in self.places:
            place.close()

    def _open(self, stage: int, place: WorkerPlace, timeout_s: float | None = None) -> Control:
        timeout_s = self._stage_timeout_s if timeout_s is None else timeout_s
        return place.open(stage, timeout_s=timeout_s, stage_timeout_s=self._stage_timeout_s)

    # Caches

    def open_space(self, space: CacheSpace) -> int:
        """The number of a cache among the workers' own, which have as many blocks and slots."""
        tensors = space.tensors
        known = self._spaces.get(id(tensors))
        if known is not None and known[1].alive:
            return known[0]
        self._drop_spaces()
        self._num_spaces += 1
        number = self._num_spaces
        sizes = {
            "num_blocks": space.blocks.num_blocks,
            "num_slots": space.slots.num_slots if space.slots else 0,
            "block_tokens": BLOCK_TOKENS,
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
        return stage_fingerprint(fingerprint, self.layers[-1])

    def _tell_store(self, peer: _Peer) -> None:
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
            ticket = ticket or Ticket(round_number, self.generation)
            about = {"ticket": ticket.number, "start": start, "round": round_number}
            for peer in self._peers:
                peer.control.send("find", about, joined_keys(keys))
            return ticket, [peer.count_found(round_number) for peer in self._peers]

    def is_current(self, ticket: Ticket) -> bool:
        return ticket.generation == self.generation

    def forget(self, ticket: Ticket) -> None:
        """Give up what was found."""
        if self.is_current(ticket):
            self._tell("forget", None, {"ticket": ticket.number})

    def fetch(
        self, ticket: Ticket, space: CacheSpace, first: int, blocks: Sequence[int], slot: int | None
    ) -> None:
        """Copy what was found, from its block `first` on, into these blocks of a cache, and its state into a slot."""
        about = {"ticket": ticket.number, "first": first, "blocks": list(blocks), "slot": slot}
        self._tell("fetch", space, about)

    def keep_blocks(
        self, space: CacheSpace, start: int, keys: Sequence[BlockKey], blocks: Sequence[int]
    ) -> None:
        """Blocks [start, start + len(keys)) of a sequence are to go to disk."""
        self._tell("keep", space, {"start": start, "blocks": list(blocks)}, joined_keys(keys))

    def keep_state(self, space: CacheSpace, index: int, key: BlockKey, slot: int) -> None:
        self._tell("keep_state", space, {"index": index, "slot": slot}, key)

    def digests(self, space: CacheSpace, cache: SequenceCache) -> CacheDigests:
        """Of what all stages have of a sequence, in the order of layers."""
        places = cache.blocks.locate(0, cache.num_tokens)
        slot = None if cache.state is None else cache.state.slot
        about = {"space": self.open_space(space), "places": [(each.start, each.end) for each in places]}
        for peer in self._peers:
            peer.control.send("digest", {**about, "slot": slot})
        found = [CacheDigests(**peer.reply("digests").about) for peer in self._peers]
        found.append(cache_digests(space.tensors, places, slot))
        return CacheDigests(
            tuple(digest for part in found for digest in part.kv),
            tuple(digest for part in found for digest in part.states),
        )

    def _drop_spaces(self) -> None:
        while self._dropped:
            number = self._dropped.popleft()
            del self._space_sizes[number]
            self._tell("drop", None, {"space": number})

    # Steps

    def issue(self, batch: ForwardBatch, space: int) -> Issued:
        """Tell all workers of a step. Raises StageLostError."""
        incoming = self._incoming
        if self._lost is not None or incoming is None:
            raise self._lost_error()
        self._drop_spaces()
        self._num_issued += 1
        number, header = self._num_issued, write_header(batch)
        about = {"generation": self.generation, "step": number, "space": space}
        for peer in self._peers:
            peer.control.send("step", about, header)
        self._step_times[number] = [None] * self.num_stages
        self._step_times.pop(number - _STEPS_KEPT, None)
        return Issued(number, incoming.expect(number, len(batch.token_ids)))

    def receive(self, issued: Issued) -> Tensor:
        """The residual that a step leaves the last worker with. Raises StageLostError, or what a worker failed
        with."""
        try:
            residual = issued.receipt.wait()
        except StageLostError as error:
            # A neighbour of the one that is gone sees it first, and not why.
            with self._changed:
                self._changed.wait_for(lambda: self._lost is not None, _REASON_S)
            self._lose(error)
            raise self._lost_error() from error
        if residual is not None:
            return residual
        with self._changed:
            self._changed.wait_for(
                lambda: issued.number in self._errors or self._lost is not None, self._stage_timeout_s
            )
            if issued.number in self._errors:
                raise self._errors.pop(issued.number)
            if self._lost is None:
                raise RuntimeError("a stage failed, and did not say why")
            raise self._lost_error()

    def run(self, issued: Issued, layers: Callable[[Tensor], Tensor | None]) -> Tensor | None:
        """The driver's own part of a step, its last layers."""
        began_s = time.perf_counter()
        residual = self.receive(issued)
        received_s = time.perf_counter()
        out = layers(residual)
        busy_s = time.perf_counter() - received_s
        self._own_times.count(busy_s=busy_s, waited_s=received_s - began_s, link_s=0.0)
        if (times := self._step_times.get(issued.number)) is not None:
            times[-1] = busy_s
        return out

    def _lost_error(self) -> StageLostError:
        lost = self._lost or StageError(None, "a neighbour", "the stages are not connected")
        return StageLostError(lost.stage, lost.address, lost.reason)

    # What workers say

    def _listen(self, peer: _Peer) -> None:
        peer.control.stage = peer.stage
        threading.Thread(target=self._read, args=(peer,), name=f"stage-{peer.stage}", daemon=True).start()

    def _read(self, peer: _Peer) -> None:
        try:
            while True:
                self._take(peer, peer.control.receive())
        except StageLostError as error:
            peer.replies.put(error)
            if self._peers[peer.stage] is peer:
                self._lose(error)

    def _take(self, peer: _Peer, message: Message) -> None:
        about = message.about
        match message.kind:
            case "found":
                peer.found.put(message)
            case "done":
                seconds = {name: float(about[name]) for name in ("busy_s", "waited_s", "link_s")}
                peer.times.count(**seconds)
                if (times := self._step_times.get(int(about["step"]))) is not None:
                    times[peer.stage] = seconds["busy_s"]
            case "left":  # it lost a neighbour
                if about["generation"] == self.generation:
                    self._lose(StageLostError(peer.stage, peer.control.peer, str(about["error"])))
            case "failed":
                peer.replies.put(message)
                self._lose(StageLostError(peer.stage, peer.control.peer, str(about.get("error"))))
            case "error":
                error = _error_of(peer.stage, about)
                with self._changed:
                    if about["generation"] == self.generation:
                        self._errors[int(about["step"])] = error
                        self._changed.notify_all()
            case "meet":
                if about["generation"] != self.generation:
                    return
                # From one end of the hop to the other.
                hop = int(about["hop"])
                target = hop if hop != peer.stage else hop + 1
                if target < len(self._peers):
                    self._peers[target].control.send("meet", about, bytes(message.data))
                elif self._store is not None:
                    self._store.put(str(about["key"]), bytes(message.data))
            case _:
                peer.replies.put(message)

    def _tell_meet(self, hop: int, key: str, value: bytes) -> None:
        about = {"generation": self.generation, "hop": hop, "key": key}
        self._peers[hop].control.send("meet", about, value)

    def _lose(self, error: StageLostError) -> None:
        with self._changed:
            self._lost = self._lost or error
            self._changed.notify_all()
        self._end(error)
        self.on_lost()

    def _end(self, error: StageLostError) -> None:
        """Whoever waits for the group has this error."""
        link, store, self._incoming = self._incoming, self._store, None
        if store is not None:
            store.fail(error)
        if link is not None:
            link.close(error)

    def _tell_load(self, peer: _Peer) -> None:
        peer.control.send("load", {**self._load_about, "layers": [peer.layers.start, peer.layers.stop]})

    def _take_ready(self, peer: _Peer) -> None:
        assert self._model is not None
        assert self._parts is not None
        model, about = self._model, peer.reply("ready").about
        differ = check_parts(peer.stage, peer.control.peer, self._parts, about["parts"], mixed=self._mixed)
        if differ:
            peer.differs, self.same_bits = True, False
        peer.shapes = _shapes_of(about["shapes"], model)
        peer.loaded = LoadedStage(
            peer.layers,
            int(about["weight_bytes"]),
            int(about["bytes_per_token"]),
            int(about["bytes_per_slot"]),
            about["free_bytes"],
            str(about["device"]),
        )

    def _link_kinds(self) -> list[LinkKind]:
        """Of each hop. NCCL needs a GPU at either end, and not the same one: only remote workers are sure to have
        another."""
        devices = [*(stage.device for stage in self.stages), str(self._model.device if self._model else "")]
        hosts = [*(peer.control.peer.rpartition(":")[0] for peer in self._peers), "driver"]
        both = list(zip(devices, hosts, strict=True))
        return [
            "nccl"
            if one[0].startswith("cuda")
            and other[0].startswith("cuda")
            and one[1] != other[1]
            and _has_nccl()
            else "gloo"
            for one, other in pairwise(both)
        ]


def joined_shapes(parts: Sequence[ProbeShapes], model: Decoder) -> ProbeShapes:
    """What is probed of a whole model, from what is of its stages; the first is the last stage's, which has the
    head."""

    def union(name: str) -> tuple[Any, ...]:
        return tuple(sorted({each for part in parts for each in getattr(part, name)}, key=_by_fields))

    config = model.config
    return replace(
        parts[0],
        products=union("products"),
        mlp_widths=union("mlp_widths"),
        expert_products=union("expert_products"),
        recurrent=config.recurrent,
        num_experts=config.experts.num_experts if config.experts else 0,
    )


def _by_fields(item: Any) -> Any:
    return item if isinstance(item, int) else tuple(asdict(item).values())


def _shapes_of(about: Mapping[str, Any], model: Decoder) -> ProbeShapes:
    """What a worker said of its products; all else is the model's."""
    return replace(
        model.probe_shapes,
        products=tuple(ProductShape(**each) for each in about["products"]),
        mlp_widths=tuple(int(width) for width in about["mlp_widths"]),
        expert_products=tuple(ProductShape(**each) for each in about["expert_products"]),
    )


def _error_of(stage: int, about: Mapping[str, Any]) -> Exception:
    text = f"stage {stage}: {about['text']}"
    return torch.OutOfMemoryError(text) if about["is_memory"] else RuntimeError(text)


def _has_nccl() -> bool:
    return torch.distributed.is_nccl_available()
