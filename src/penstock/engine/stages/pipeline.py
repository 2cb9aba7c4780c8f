"""The driver's side of a model in stages. The driver is the last stage: it samples, so logits do not travel.

A step is issued to all workers at once; what is handed on between neighbours is the residual. Each stage runs steps
in the order in which they were issued, so a step that is undone needs no message: it runs on, and is forgotten.
A worker that is gone ends the *generation*: whatever waits has its StageLostError, and so has all that is issued,
until `begin_generation` has made another group.
"""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from penstock.engine.stages.caches import WorkerCaches
from penstock.engine.stages.control import DEFAULT_STAGE_TIMEOUT_S, Control, Message, read_token
from penstock.engine.stages.header import write_header
from penstock.engine.stages.joining import (
    check_parts,
    common_parts,
    join_laws,
    joined_shapes,
    read_law,
    read_shapes,
)
from penstock.engine.stages.link import Link, LinkKind, LinkStore, Receipt, Then
from penstock.engine.stages.peer import LoadedStage, Peer, StageTimes
from penstock.engine.stages.workers import (
    ListeningWorker,
    LocalWorker,
    Ranks,
    StageShare,
    WorkerPlace,
    divide_machine,
    end_worker,
    run_worker,
)
from penstock.engine.status import StageStatus
from penstock.errors import PenstockError, SettingError, StageError, StageLostError
from penstock.kernels.device import device_kind
from penstock.kernels.probe import ProbeShapes
from penstock.layers.forward_batch import ForwardBatch
from penstock.models.decoder import Decoder, cache_spec_of
from penstock.plan.grids import RowLaw
from penstock.plan.model import ModelConfig
from penstock.plan.settings import EngineSettings
from penstock.plan.stage_settings import StagesSetting

# How long a worker's own reason is waited for, where a link has ended.
_REASON_S = 0.5
# How long a thread has to end whose worker was told to.
_END_S = 5.0
# How long a worker has to write what it was to keep.
_WRITE_S = 30.0
# How long one that was lost is looked for at a time.
_REOPEN_S = 1.0
# Steps of which it is known how long each stage took.
_STEPS_KEPT = 512


# The driver's own, from a residual to logits, where some are wanted.
Layers = Callable[[Tensor], Tensor | None]


@dataclass(frozen=True)
class Issued:
    """A step that the workers run."""

    number: int
    receipt: Receipt
    then: Then | None  # what is left to do with the residual


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
        self._own_ended_s = 0.0  # when the driver's part of the last step was done
        self._step_times: dict[int, list[float | None]] = {}  # seconds by stage; None: not known yet
        self.is_closed = False
        self.generation = 0
        self.same_bits = True  # False: stages differ, and were let in all the same
        self._stage_timeout_s = stage_timeout_s
        self._model: Decoder | None = None
        self._law: RowLaw | None = None
        self._num_issued = 0
        self._errors: dict[int, Exception] = {}  # of steps that workers failed in
        self._changed = threading.Condition()
        self._lost: StageError | None = None
        self._incoming: Link | None = None
        self._links: list[Link] = []  # all that may still have a thread
        self._store: LinkStore | None = None
        self._peers: list[Peer] = []
        self.caches = WorkerCaches(self._peers, self.layers[-1], lambda: self.generation)
        try:
            for stage, place in enumerate(places):
                self._peers.append(Peer(stage, self._open(stage, place), self.layers[stage]))
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
        """Steps in flight: one in each stage, and one on each link. More are of no use (`run_pipeline`)."""
        return 2 * self.num_stages - 1

    @property
    def stages(self) -> tuple[LoadedStage, ...]:
        """Those that were loaded by workers."""
        return tuple(peer.loaded for peer in self._peers if peer.loaded is not None)

    @property
    def times(self) -> tuple[StageTimes, ...]:
        """Of the workers' stages."""
        return tuple(replace(peer.times) for peer in self._peers)

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

    def load(self, *, dtype: str, weights: str, activations: str) -> None:
        """Tell the workers to load their layers. They do so while the driver loads its own."""
        self._load_about = {
            "model": str(self._path),
            "dtype": dtype,
            "weights": weights,
            "activations": activations,
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
                # Where there is none, chunks of another size have other bits there, which is said anyway.
                with suppress(ValueError):
                    law = join_laws([law, theirs])
        self._law = law
        self._num_threads = torch.get_num_threads()
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
                if peer.loaded is None or not peer.control.is_alive:
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
        peer = self._peers[stage] = Peer(
            stage, control, self.layers[stage], times=before.times, num_restarts=before.num_restarts + 1
        )
        self._listen(peer)
        self._tell_load(peer)
        self._take_ready(peer)
        assert self._law is not None
        control.send("law", asdict(self._law))
        self.caches.tell_again(peer)

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
        # All are waited for, also where one fails: who still waits for a neighbour would miss the next generation.
        errors: list[StageError] = []
        for join in (
            partial(self._join, kinds[-1]),
            *(partial(self._await_joined, peer) for peer in self._peers),
        ):
            try:
                join()
            except StageError as error:
                errors.append(error)
        if errors:
            raise errors[-1]

    def _join(self, kind: LinkKind) -> None:
        """The driver's end of the last hop."""
        assert self._model is not None
        assert self._store is not None
        model = self._model
        self._links = [link for link in self._links if link.is_open]
        self._incoming = Link(
            self._store,
            sends=False,
            host=self._peers[-1].control.local_host,
            hidden_size=model.config.hidden_size,
            dtype=model.dtype,
            device=model.device,
            kind=kind,
            on_lost=partial(self._lose_link, self.generation),
            on_thread=self._begin_thread,
        )
        self._links.append(self._incoming)

    def _begin_thread(self) -> None:
        """One that runs the driver's layers: beside the workers' processors, and with as many threads of its own."""
        if self.share is not None:
            self.share.pin()
        torch.set_num_threads(self._num_threads)

    def _await_joined(self, peer: Peer) -> None:
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
        for peer in self._peers if self.caches.has_store else ():
            peer.control.wait_closed(_WRITE_S)  # what waits is written
        for place in self.places:
            place.close()
        for link in self._links:
            link.wait_closed(_END_S)

    def _open(self, stage: int, place: WorkerPlace, timeout_s: float | None = None) -> Control:
        timeout_s = self._stage_timeout_s if timeout_s is None else timeout_s
        return place.open(stage, timeout_s=timeout_s, stage_timeout_s=self._stage_timeout_s)

    # Steps

    def issue(self, batch: ForwardBatch, space: int, layers: Layers) -> Issued:
        """Tell all workers of a step. The driver's own part, its last `layers`, is run as soon as the residual is
        there: by the link's thread, where the host computes, while the calling thread goes on. Raises
        StageLostError."""
        incoming, model = self._incoming, self._model
        if self._lost is not None or incoming is None:
            raise self.lost_error()
        assert model is not None
        self.caches.drop_unused()
        self._num_issued += 1
        number, header = self._num_issued, write_header(batch)
        about = {"generation": self.generation, "step": number, "space": space}
        try:
            for peer in self._peers:
                peer.control.send("step", about, header)
        except StageLostError as error:
            self._lose(error)
            raise
        self._step_times[number] = [None] * self.num_stages
        self._step_times.pop(number - _STEPS_KEPT, None)
        then = partial(self._run, number, time.perf_counter(), layers)
        is_host = device_kind(model.device).is_host
        receipt = incoming.expect(number, len(batch.token_ids), then if is_host else None)
        return Issued(number, receipt, None if is_host else then)

    def finish(self, issued: Issued) -> Tensor | None:
        """What the last layers gave. Raises StageLostError, or what a stage failed with."""
        try:
            found = issued.receipt.wait()
        except StageLostError as error:
            self._lose_link(self.generation, error)
            raise self.lost_error() from error
        return found if issued.then is None else issued.then(found)

    def _run(self, number: int, issued_s: float, layers: Layers, residual: Tensor | None) -> Tensor | None:
        if residual is None:
            raise self._error_of(number)
        began_s = time.perf_counter()
        out = layers(residual)
        ended_s = time.perf_counter()
        waited_s = began_s - max(issued_s, self._own_ended_s)
        self._own_ended_s = ended_s
        self._own_times.count(busy_s=ended_s - began_s, waited_s=waited_s, link_s=0.0)
        if (times := self._step_times.get(number)) is not None:
            times[-1] = ended_s - began_s
        return out

    def _error_of(self, number: int) -> Exception:
        """What a worker failed with in a step."""
        with self._changed:
            self._changed.wait_for(
                lambda: number in self._errors or self._lost is not None, self._stage_timeout_s
            )
            if number in self._errors:
                return self._errors.pop(number)
        if self._lost is None:
            return RuntimeError("a stage failed, and did not say why")
        return self.lost_error()

    def lost_error(self) -> StageLostError:
        """What whoever needs the stages has, until they are connected again."""
        lost = self._lost or StageError(None, "a neighbour", "the stages are not connected")
        return StageLostError(lost.stage, lost.address, lost.reason)

    # What workers say

    def _listen(self, peer: Peer) -> None:
        peer.control.stage = peer.stage
        threading.Thread(target=self._read, args=(peer,), name=f"stage-{peer.stage}", daemon=True).start()

    def _read(self, peer: Peer) -> None:
        try:
            while True:
                self._take(peer, peer.control.receive())
        except StageLostError as error:
            peer.replies.put(error)
            if self._peers[peer.stage] is peer:
                self._lose(error)

    def _take(self, peer: Peer, message: Message) -> None:
        about = message.about
        match message.kind:
            case "found":
                peer.found.put(message)
            case "done":
                for step in about["steps"]:
                    seconds = {name: float(step[name]) for name in ("busy_s", "waited_s", "link_s")}
                    peer.times.count(**seconds)
                    if (times := self._step_times.get(int(step["step"]))) is not None:
                        times[peer.stage] = seconds["busy_s"]
            case "left":  # it lost a neighbour, or the way to it
                lost = StageLostError(peer.stage, peer.control.peer, str(about["error"]))
                self._lose_link(int(about["generation"]), lost)
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
                    with suppress(StageLostError):  # of the other one, whose own reader says so
                        self._peers[target].control.send("meet", about, bytes(message.data))
                elif self._store is not None:
                    self._store.put(str(about["key"]), bytes(message.data))
            case _:
                peer.replies.put(message)

    def _tell_meet(self, hop: int, key: str, value: bytes) -> None:
        about = {"generation": self.generation, "hop": hop, "key": key}
        self._peers[hop].control.send("meet", about, value)

    def _lose_link(self, generation: int, error: StageLostError) -> None:
        """A link of this generation has ended. A neighbour of a stage that is gone sees it first, and not why, which
        is waited for."""
        with self._changed:
            self._changed.wait_for(lambda: self._lost or generation != self.generation, _REASON_S)
        if generation == self.generation:
            self._lose(error)

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

    def _tell_load(self, peer: Peer) -> None:
        peer.control.send("load", {**self._load_about, "layers": [peer.layers.start, peer.layers.stop]})

    def _take_ready(self, peer: Peer) -> None:
        assert self._model is not None
        assert self._parts is not None
        model, about = self._model, peer.reply("ready").about
        differ = check_parts(peer.stage, peer.control.peer, self._parts, about["parts"], mixed=self._mixed)
        if differ:
            peer.differs, self.same_bits = True, False
        peer.shapes = read_shapes(about["shapes"], model)
        layers = model.config.of_layers(peer.layers.start, peer.layers.stop)
        peer.loaded = LoadedStage(
            peer.layers,
            cache_spec_of(layers, model.dtype),
            int(about["weight_bytes"]),
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


def open_pipeline(
    path: Path, config: ModelConfig, settings: EngineSettings, stages: StagesSetting
) -> "Pipeline":
    """Start the workers of a model, or connect to them. Raises StageLostError, StageRefusedError. Of torchrun's
    processes the last goes on; the others are its workers, and end with it."""
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
            end_worker()
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


def _error_of(stage: int, about: Mapping[str, Any]) -> Exception:
    text = f"stage {stage}: {about['text']}"
    return torch.OutOfMemoryError(text) if about["is_memory"] else RuntimeError(text)


def _has_nccl() -> bool:
    return torch.distributed.is_nccl_available()
