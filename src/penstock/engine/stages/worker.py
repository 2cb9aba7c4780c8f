"""A worker: some layers of a model, and caches of just these. It runs what its driver sends, in the order in which it
comes: no scheduler, no pools, no tokenizer. Which blocks and slots a step has, the driver says.

Messages of the driver, each answered where it says so:

    load    model, layers, dtype, weights, activations   > ready (what was loaded)
    law     how rows are padded, as was measured for the whole model
    probe   measure it here, where this worker differs from its driver   > probed
    group   generation, hops                         > joined (or why not); left, once a neighbour is gone
    meet    generation, hop: how the other end of a hop is reached, as torch.distributed says it
    space   number, blocks of each K/V group, slots: a cache; drop: it is not needed any more
    copy    space, source, target, tokens: from one block to another
    store   folder, size; and a fingerprint: blocks are kept there
    find    ticket, start; and keys                  > found (how many blocks), until forget
    fetch   ticket, space, blocks, windows, slot: what was found is copied; keep, keep_state: the other way
    digest  space, places, slot                      > digests
    step    generation, number, space; and a header  > done (times of several), error
    stop
"""

import logging
import queue
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch

from penstock.cache import BLOCK_TOKENS, TokenRange
from penstock.cache.tensors import CacheTensors
from penstock.cache.transfer import cache_digests, copy_tokens
from penstock.engine.stages.control import Control, Message, tell_failure
from penstock.engine.stages.header import HeaderLimits, read_header
from penstock.engine.stages.joining import common_parts, read_law, tell_shapes
from penstock.engine.stages.link import Link, LinkStore, Receipt
from penstock.engine.stages.store import StageStore
from penstock.errors import StageLostError, is_out_of_memory
from penstock.kernels.device import DeviceKind, device_kind, find_devices
from penstock.kernels.interface import select_kernels
from penstock.kernels.probe import probe
from penstock.layers.forward_batch import ForwardBatch
from penstock.models.decoder import Decoder
from penstock.models.hub import resolve_model
from penstock.models.loading import load_decoder
from penstock.models.opened import open_model
from penstock.plan.settings import EngineSettings
from penstock.process_memory import trim_heap

_log = logging.getLogger("penstock.engine")

# How long the driver waits to hear how long steps took.
_TELL_S = 0.05


@dataclass(frozen=True)
class _Item:
    """A message, and the residual that was asked for when it came."""

    message: Message
    receipt: Receipt | None = None
    batch: ForwardBatch | None = None


def serve_driver(control: Control, *, device: str | None = None) -> None:
    """Serve a driver to its end. Errors other than a step's are raised."""
    Worker(control, EngineSettings.resolve(device=device)).run()


class Worker:
    """Serves one driver. The thread that calls `run` computes; another reads what the driver sends."""

    def __init__(self, control: Control, settings: EngineSettings) -> None:
        self._control = control
        self._settings = settings.on(find_devices())
        self._failure: Exception | None = None
        self._store_part = StageStore(control)
        self._model: Decoder | None = None
        self._spaces: dict[int, CacheTensors] = {}
        self._limits: dict[int, HeaderLimits] = {}
        self._items: queue.SimpleQueue[_Item | None] = queue.SimpleQueue()
        self._stores: dict[tuple[int, int], LinkStore] = {}  # by generation and hop
        self._stores_lock = threading.Lock()
        self._generation = 0
        self._incoming: Link | None = None
        self._outgoing: Link | None = None
        self._done: list[dict[str, float]] = []  # times of steps that the driver has not been told
        self._told_s = 0.0

    def run(self) -> None:
        """Until the driver says stop, or is gone."""
        reader = threading.Thread(target=self._read, name="stage-reader", daemon=True)
        reader.start()
        try:
            while (item := self._next()) is not None:
                try:
                    self._handle(item)
                except StageLostError as error:  # of a neighbour: the driver makes another group
                    self._leave(error)
                    self._tell_lost(self._generation, error)
        finally:
            self._leave(StageLostError(None, self._control.peer, "the driver is gone"))
            self._store_part.close()
        if self._failure is not None:
            raise self._failure

    def _next(self) -> _Item | None:
        if self._done:
            with suppress(queue.Empty):
                return self._items.get(timeout=_TELL_S)
            self._tell_done()
        return self._items.get()

    # The reader's thread

    def _read(self) -> None:
        try:
            self._read_all()
        except StageLostError:
            pass
        except Exception as error:  # what is no message of a driver's
            self._failure = error
            tell_failure(self._control, error)  # before the neighbours see that it is gone
        gone = StageLostError(None, self._control.peer, "the driver is gone")
        with self._stores_lock:
            for store in self._stores.values():
                store.fail(gone)
        self._leave(gone)
        self._items.put(None)

    def _read_all(self) -> None:
        while (message := self._control.receive()).kind != "stop":
            match message.kind:
                case "meet":
                    place = (int(message.about["generation"]), int(message.about["hop"]))
                    self._store(*place).put(str(message.about["key"]), bytes(message.data))
                case "find":
                    self._store_part.find(message)
                case "step":
                    self._items.put(self._asked_for(message))
                case "space" | "drop":
                    # A header is read as it comes, so what it is checked against must be known by then.
                    self._note_space(message.about)
                    self._items.put(_Item(message))
                case _:
                    self._items.put(_Item(message))

    def _asked_for(self, message: Message) -> _Item:
        """A step, whose residual is on its way from now on."""
        about = message.about
        batch = read_header(message.data, self._limits[int(about["space"])])
        incoming = self._incoming
        if incoming is None or about["generation"] != self._generation:
            return _Item(message, None, batch)
        return _Item(message, incoming.expect(int(about["step"]), len(batch.token_ids)), batch)

    def _note_space(self, about: Mapping[str, Any]) -> None:
        number = int(about["space"])
        if "num_blocks" not in about:
            self._limits.pop(number, None)
            return
        assert self._model is not None
        config = self._model.config
        num_places = tuple(int(blocks) * BLOCK_TOKENS for blocks in about["num_blocks"])
        self._limits[number] = HeaderLimits(
            config.vocab_size, config.max_position, num_places, int(about["num_slots"])
        )

    def _store(self, generation: int, hop: int) -> LinkStore:
        about = {"generation": generation, "hop": hop}
        with self._stores_lock:
            key = generation, hop
            if key not in self._stores:
                self._stores = {
                    known: store for known, store in self._stores.items() if known[0] >= generation
                }
                tell = partial(_tell, self._control, about)
                self._stores[key] = LinkStore(tell, self._control.stage_timeout_s)
            return self._stores[key]

    # The thread that computes

    def _handle(self, item: _Item) -> None:
        about = item.message.about
        match item.message.kind:
            case "load":
                self._control.send("ready", self._load(about))
            case "law":
                assert self._model is not None
                self._model.kernels.law = read_law(about)
            case "probe":
                assert self._model is not None
                model = self._model
                law = probe(model.kernels, model.probe_shapes, model.dtype, model.device).bind(model.kernels)
                self._control.send("probed", asdict(law))
            case "group":
                try:
                    self._join(about)
                except StageLostError as error:
                    self._leave(error)
                    self._control.send("joined", {"generation": self._generation, "error": str(error)})
            case "space":
                assert self._model is not None
                self._spaces[int(about["space"])] = CacheTensors.of(
                    self._model.cache_spec,
                    list(map(int, about["num_blocks"])),
                    int(about["num_slots"]),
                    self._model.device,
                )
            case "drop":
                self._spaces.pop(int(about["space"]), None)
            case "copy":
                kv = self._spaces[int(about["space"])].kv
                copy_tokens(kv, int(about["source"]), int(about["target"]), int(about["num_tokens"]))
            case "store":
                assert self._model is not None
                self._store_part.open(about, item.message.data, self._model.cache_spec)
            case "forget":
                self._store_part.forget(int(about["ticket"]))
            case "fetch" | "keep" | "keep_state":
                self._store_part.handle(item.message, self._spaces[int(about["space"])])
            case "digest":
                places = [[TokenRange(start, end) for start, end in group] for group in about["places"]]
                found = cache_digests(self._spaces[int(about["space"])], places, about["slot"])
                self._control.send("digests", asdict(found))
            case "step":
                self._step(item)

    def _load(self, about: Mapping[str, Any]) -> dict[str, object]:
        """Load layers: what the driver is told of them."""
        device = torch.device(self._settings.device.name)
        kind = device_kind(device)
        kind.use()
        kernels = select_kernels(device, self._settings.kernels.effective, about["activations"])
        if kernels.slower:
            _log.warning("slower than it could be: %s kernels run, since %s", kernels.name, kernels.slower)
        path = resolve_model(str(about["model"]))
        opened = open_model(path)
        try:
            model = load_decoder(
                opened.source,
                kernels,
                kind.dtype(str(about["dtype"])),
                device,
                about["weights"],
                range(*map(int, about["layers"])),
            )
        finally:
            opened.source.close()
        trim_heap()
        kind.release()
        self._model = model
        return {
            "parts": common_parts(
                path, model, str(about["weights"]), same_machine=bool(about["same_machine"])
            ),
            "shapes": tell_shapes(model.probe_shapes),
            "weight_bytes": model.num_weight_bytes,
            "free_bytes": kind.free_bytes(),
            "device": str(device),
        }

    def _join(self, about: Mapping[str, Any]) -> None:
        """A new group: hops to the neighbours. Of steps of the one before nothing more is handed on."""
        assert self._model is not None
        model, generation = self._model, int(about["generation"])
        self._leave(StageLostError(None, self._control.peer, "another group was made"))
        self._generation = generation
        hops = {"incoming": about.get("incoming"), "outgoing": about.get("outgoing")}
        links = {
            name: Link(
                self._store(generation, int(hop["number"])),
                sends=name == "outgoing",
                host=self._control.local_host,
                hidden_size=model.config.hidden_size,
                dtype=model.dtype,
                device=model.device,
                kind=hop["kind"],
                on_lost=partial(self._tell_lost, generation),
            )
            for name, hop in hops.items()
            if hop is not None
        }
        self._incoming, self._outgoing = links.get("incoming"), links.get("outgoing")
        self._control.send("joined", {"generation": generation})

    def _tell_lost(self, generation: int, error: StageLostError) -> None:
        with suppress(StageLostError):
            self._control.send("left", {"generation": generation, "error": str(error)})

    def _leave(self, error: Exception) -> None:
        for link in (self._incoming, self._outgoing):
            if link is not None:
                link.close(error)
        self._incoming = self._outgoing = None

    def _step(self, item: _Item) -> None:
        about, batch, model = item.message.about, item.batch, self._model
        if about["generation"] != self._generation or self._outgoing is None:
            return  # it was undone with its group
        assert batch is not None
        assert model is not None
        step, num_rows = int(about["step"]), len(batch.token_ids)
        began_s = time.perf_counter()
        residual = None if item.receipt is None else item.receipt.wait()
        received_s = time.perf_counter()
        if item.receipt is not None and residual is None:  # a stage before this one failed
            self._outgoing.send(step, num_rows, None)
            return
        try:
            out = model.forward(batch, self._spaces[int(about["space"])], residual)
            del residual
            device_kind(model.device).synchronize()
            computed_s = time.perf_counter()
        except Exception as error:
            self._fail(about, error, device_kind(model.device))
            self._outgoing.send(step, num_rows, None)
            return
        self._outgoing.send(step, num_rows, out)
        now = time.perf_counter()
        self._done.append(
            {
                "step": step,
                "waited_s": received_s - began_s,
                "busy_s": computed_s - received_s,
                "link_s": now - computed_s,
            }
        )
        if now > self._told_s + _TELL_S:
            self._tell_done()

    def _tell_done(self) -> None:
        done, self._done, self._told_s = self._done, [], time.perf_counter()
        with suppress(StageLostError):  # that the driver is gone, the next message says
            self._control.send("done", {"steps": done})

    def _fail(self, about: Mapping[str, Any], error: Exception, kind: DeviceKind) -> None:
        _log.warning("a step failed", exc_info=error)
        is_memory = is_out_of_memory(error)
        self._control.send(
            "error",
            {
                "generation": about["generation"],
                "step": about["step"],
                "is_memory": is_memory,
                "text": f"{type(error).__name__}: {error}"[:1000],
            },
        )
        if is_memory:
            kind.release(error)


def _tell(control: Control, about: Mapping[str, object], key: str, value: bytes) -> None:
    control.send("meet", {**about, "key": key}, value)
