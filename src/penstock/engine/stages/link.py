"""Residuals on their way from one stage to the next, over torch.distributed: a group of two processes for each hop.

gloo carries them between processors, and between GPUs through pinned memory. NCCL carries them where each of two
stages has a GPU of its own; it has not been run on two cards. The group's rendezvous is told through the driver
(`LinkStore`), so nothing listens but the two ends of a hop, each on the one interface that it reaches its driver by.

That a neighbour is gone is seen by its driver. That the way to it is gone is seen by the two ends alone: beside the
group they have a connection that beats, as each has to its driver, and one that is silent has lost its neighbour.
"""

import threading
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Literal

import torch
from torch import Tensor
from torch import distributed as dist

from penstock.engine.stages.control import Address, Control, Listener, connect, new_token
from penstock.errors import StageLostError
from penstock.kernels.device import device_kind
from penstock.models.reading import first_line

LinkKind = Literal["gloo", "nccl"]

# Step and status, before the residual. A residual begins where torch's allocator would have put it.
_HEAD_BYTES = 64
_FINE, _FAILED = 0, 1
_BEATS = "beats"
# How long a stage computes has no bound, nor has a slow link: beats tell that there is one.
_NEVER = timedelta(days=7)


class LinkStore(dist.Store):  # type: ignore[name-defined, misc]
    """What the two ends of a hop tell each other before they are connected. `tell` takes it to the other end, which
    has it from `put`."""

    def __init__(self, tell: Callable[[str, bytes], None], timeout_s: float) -> None:
        super().__init__()
        self._tell = tell
        self.timeout_s = timeout_s
        self._known: dict[str, bytes] = {}
        self._changed = threading.Condition()
        self._error: Exception | None = None

    def put(self, key: str, value: bytes) -> None:
        with self._changed:
            self._known[key] = value
            self._changed.notify_all()

    def fail(self, error: Exception) -> None:
        """Nothing more will come."""
        with self._changed:
            self._error = error
            self._changed.notify_all()

    # What groups call.

    def set(self, key: str, value: bytes) -> None:
        self.put(key, bytes(value))
        self._tell(key, bytes(value))

    def get(self, key: str) -> bytes:
        with self._changed:
            self._changed.wait_for(lambda: key in self._known or self._error is not None, self.timeout_s)
            if key not in self._known:
                raise RuntimeError(
                    f"the other end of a link has not said {key}: {self._error or 'timed out'}"
                )
            return self._known[key]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        for key in keys:
            self.get(key)

    def check(self, keys: list[str]) -> bool:
        with self._changed:
            return all(key in self._known for key in keys)

    def set_timeout(self, timeout: timedelta) -> None:
        pass


class Receipt:
    """A residual that is awaited, or what is made of it."""

    def __init__(self, then: "Then | None" = None) -> None:
        self._then = then
        self._settling = threading.Lock()
        self._done = threading.Event()
        self._found: Tensor | None = None
        self._error: Exception | None = None

    def settle(self, found: Tensor | None) -> None:
        """It has come: `then` is run, on the calling thread."""
        with self._settling:
            if self._done.is_set():
                return
            try:
                self._found = found if self._then is None else self._then(found)
            except Exception as error:
                self._error = error
            self._done.set()

    def fail(self, error: Exception) -> None:
        """It will not come. One that has come is settled all the same."""
        if self._settling.acquire(blocking=False):
            try:
                if not self._done.is_set():
                    self._error = error
                    self._done.set()
            finally:
                self._settling.release()

    def drop(self) -> None:
        """Nobody wants it: `then` is not run any more when this returns."""
        with self._settling:
            self._done.set()

    def wait(self) -> Tensor | None:
        """The residual [rows, hidden], or what `then` made of it; None where a stage before this one failed. Raises
        StageLostError, or what `then` raised."""
        self._done.wait()
        if self._error is not None:
            raise self._error
        found, self._found = self._found, None  # no other name for what may be written over
        return found


# What is made of a residual; of None, where a stage before this one failed.
Then = Callable[[Tensor | None], Tensor | None]


class Link:
    """One end of a hop. Either sends or receives; what is sent in one order is received in that order.

    A residual that is awaited is asked for at once (`expect`), so that it is transferred while the stage computes.
    """

    def __init__(
        self,
        store: LinkStore,
        *,
        sends: bool,
        host: str,
        hidden_size: int,
        dtype: torch.dtype,
        device: torch.device,
        kind: LinkKind = "gloo",
        on_lost: Callable[[StageLostError], None] = lambda _: None,
        on_thread: Callable[[], None] = lambda: None,
    ) -> None:
        """Returns when both ends are there. `on_lost` is called on another thread, if they part before `close`. The
        thread that receives begins with `on_thread`."""
        self._hidden_size = hidden_size
        self._dtype = dtype
        self._device = device
        self._wire = device if kind == "nccl" else torch.device("cpu")
        self._pins = kind == "gloo" and device_kind(device).copies_pinned
        self._peer = 1 if sends else 0
        self._group = _new_group(store, 1 - self._peer, host, kind)
        self._beats = _connected(store, host, listens=not sends)
        self._on_lost = on_lost
        self._on_thread = on_thread
        self._sent: deque[tuple[Any, Tensor]] = deque()  # until they are gone
        self._closing = threading.Lock()
        self._awaited: deque[tuple[int, Any, Tensor, Receipt]] = deque()
        self._changed = threading.Condition()
        self._error: Exception | None = None
        self._receiver = threading.Thread(target=self._receive, name="stage-receive", daemon=True)
        self._beats.when_lost(self._lose)
        if not sends:
            self._receiver.start()

    def send(self, step: int, num_rows: int, residual: Tensor | None) -> None:
        """Hand on a residual [rows, hidden], or say that there is none, since the step failed."""
        buffer = self._buffer(num_rows)
        head = torch.tensor([step, _FINE if residual is not None else _FAILED])
        buffer[: 2 * head.itemsize].view(torch.int64).copy_(head)
        if residual is not None:
            self._residual_of(buffer).copy_(residual)
        if (group := self._group) is None:  # closed on another thread
            raise StageLostError(None, "the next stage", "the link was closed")
        try:
            while self._sent and (len(self._sent) > _MOST_SENT or self._sent[0][0].is_completed()):
                self._sent.popleft()[0].wait(_NEVER)
            self._sent.append((group.send([buffer], self._peer, 0), buffer))
        except RuntimeError as error:
            raise StageLostError(None, "the next stage", first_line(error)) from error

    def expect(self, step: int, num_rows: int, then: Then | None = None) -> Receipt:
        """Ask for the residual of a step. `then` is run when it has come, on the thread that receives: one after the
        other, in the order in which they were asked for."""
        receipt, buffer = Receipt(then), self._buffer(num_rows)
        with self._changed:
            if self._error is not None:
                receipt.fail(self._error)
                return receipt
            try:
                work = self._group.recv([buffer], self._peer, 0)
            except RuntimeError as error:
                receipt.fail(_lost(error))
                return receipt
            self._awaited.append((step, work, buffer, receipt))
            self._changed.notify_all()
        return receipt

    def close(self, error: Exception) -> None:
        """Nothing is awaited any more: whoever waits has this error."""
        with self._changed:
            self._error = self._error or error
            for *_, receipt in self._awaited:
                receipt.fail(self._error)
            self._changed.notify_all()
        with self._closing:
            self._sent.clear()
            self._group = None
        self._beats.close()

    @property
    def is_open(self) -> bool:
        """Whether it has a thread that waits, or may be told to end."""
        return self._receiver.is_alive()

    def wait_closed(self, timeout_s: float) -> None:
        """Until nothing of torch is left with another thread, once this end was closed and the other has gone: what
        is freed there while Python ends takes the process along."""
        with self._closing:
            pass
        if self.is_open:
            self._receiver.join(timeout_s)

    def _lose(self, error: StageLostError) -> None:
        self.close(error)
        self._on_lost(error)

    def _receive(self) -> None:
        self._on_thread()
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._awaited or self._error is not None)
                if self._error is not None:
                    return
                step, work, buffer, receipt = self._awaited[0]
            try:
                work.wait(_NEVER)
                sent, status = buffer[:16].view(torch.int64).tolist()
                if sent != step:
                    raise RuntimeError(f"step {sent} came in place of step {step}")
            except RuntimeError as error:
                self._lose(_lost(error))
                return
            found = None
            if status == _FINE:
                found = self._residual_of(buffer).to(self._device, non_blocking=True)
            with self._changed:
                if self._awaited:
                    self._awaited.popleft()
            del work, buffer
            receipt.settle(found)
            del receipt, found

    def _buffer(self, num_rows: int) -> Tensor:
        num_bytes = _HEAD_BYTES + num_rows * self._hidden_size * self._dtype.itemsize
        return torch.empty(num_bytes, dtype=torch.uint8, device=self._wire, pin_memory=self._pins)

    def _residual_of(self, buffer: Tensor) -> Tensor:
        return buffer[_HEAD_BYTES:].view(self._dtype).view(-1, self._hidden_size)


# Residuals that are on their way before the next is handed on.
_MOST_SENT = 8


def _connected(store: LinkStore, host: str, *, listens: bool) -> Control:
    """A connection between the two ends, who tell each other the way as they do for the group."""
    timeout_s = store.timeout_s
    try:
        if not listens:
            token, _, address = store.get(_BEATS).decode().partition(" ")
            return connect(address, token.encode(), timeout_s=timeout_s, stage_timeout_s=timeout_s)
        token = new_token().decode()
        with Listener(Address(host, 0), token.encode()) as listener:
            store.set(_BEATS, f"{token} {listener.address}".encode())
            return listener.accept(timeout_s)
    except (RuntimeError, TimeoutError) as error:
        raise _lost(error) from error


def _new_group(store: LinkStore, rank: int, host: str, kind: LinkKind) -> Any:
    try:
        if kind == "nccl":
            options = dist.ProcessGroupNCCL.Options()
            return dist.ProcessGroupNCCL(store, rank, 2, options)
        gloo: Any = dist.ProcessGroupGloo
        options = gloo._Options()
        options._timeout = timedelta(seconds=store.timeout_s)  # to be connected; what is awaited has none
        options._devices = [gloo.create_device(hostname=host)]
        return gloo(store, rank, 2, options)
    except RuntimeError as error:
        raise _lost(error) from error


def _lost(error: Exception) -> StageLostError:
    return StageLostError(None, "a neighbour", first_line(error))
