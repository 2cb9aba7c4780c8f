"""Where a pipeline's workers are, and how a driver comes by them: children of this process, or processes that listen.
Nothing of torch is imported here: a child is pinned and has its number of threads before that."""

import contextlib
import ctypes
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from typing import Any, NoReturn

from penstock import machine
from penstock.engine.stages.control import (
    DEFAULT_STAGE_TIMEOUT_S,
    Address,
    Control,
    Listener,
    connect,
    tell_failure,
)
from penstock.errors import SettingError, StageError, StageLostError

# What runs in a worker for one driver, by name, since a child has to find it: `serve(control, device=...)`.
SERVE = "penstock.engine.stages.worker:serve_driver"
_START = "from penstock.engine.stages.workers import run_child; run_child()"
_START_S = 60.0  # a process has to import torch before it says anything
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class StageShare:
    """What one of several stages has of this machine."""

    threads: int
    processors: frozenset[int] | None = None  # that it is pinned to; None: to none

    def pin(self) -> None:
        """The calling thread, and those that it starts."""
        if self.processors is not None and hasattr(os, "sched_setaffinity"):
            with contextlib.suppress(OSError):  # taken from this process since
                os.sched_setaffinity(0, self.processors)


def divide_machine(num_stages: int, threads: int | None = None) -> list[StageShare]:
    """Equal shares of so many threads, by default one for each core. Bits of float32 may depend on the number, so
    none has one more. Each share has cores of its own where there are enough for that."""
    cores = machine.cores()
    total = machine.usable_cores() if threads is None else threads
    each = max(1, total // num_stages)
    if num_stages * each > len(cores):
        return [StageShare(each)] * num_stages
    per_stage = len(cores) // num_stages if total >= len(cores) else each
    return [
        StageShare(each, frozenset().union(*cores[at * per_stage : (at + 1) * per_stage]))
        for at in range(num_stages)
    ]


class WorkerPlace(ABC):
    """Where a stage's worker is, or is to be: opened again after it was lost."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._control: Control | None = None

    def open(
        self,
        stage: int,
        *,
        timeout_s: float = DEFAULT_STAGE_TIMEOUT_S,
        stage_timeout_s: float = DEFAULT_STAGE_TIMEOUT_S,
    ) -> Control:
        """A connection to a worker that has no model yet. Raises StageLostError where there is none in time,
        StageRefusedError where it is another's."""
        self._end()
        try:
            self._control = self._connect(timeout_s, stage_timeout_s)
        except StageError as error:
            raise type(error)(stage, error.address, error.reason) from None
        self._control.stage = stage
        return self._control

    def close(self) -> None:
        """Nothing of it is left here."""
        self._end()

    @abstractmethod
    def _connect(self, timeout_s: float, stage_timeout_s: float) -> Control: ...

    def _end(self) -> None:
        """Of what was opened before."""
        if self._control is not None:
            self._control.close()


class ListeningWorker(WorkerPlace):
    """A process that listens, on this machine or another, and is not ours to start. Its address may be a function,
    asked at each connection, where whoever starts it may start it elsewhere."""

    def __init__(self, address: str | Callable[[], str], token: bytes) -> None:
        if isinstance(address, str):
            Address.parse(address)
        super().__init__(address if isinstance(address, str) else "a worker")
        self._address = address
        self._token = token

    def _connect(self, timeout_s: float, stage_timeout_s: float) -> Control:
        if not isinstance(self._address, str):
            self.name = self._address()
        return connect(self.name, self._token, timeout_s=timeout_s, stage_timeout_s=stage_timeout_s)


class LocalWorker(WorkerPlace):
    """A child of this process. It ends with the connection, one end of a socket pair that it inherits, and by the
    kernel's hand when its parent ends: also one that is stopped, also where the parent is killed."""

    def __init__(self, share: StageShare, *, device: str | None = None, serve: str = SERVE) -> None:
        super().__init__("a child")
        self._about = {
            "device": device,
            "serve": serve,
            "threads": share.threads,
            "processors": None if share.processors is None else sorted(share.processors),
        }
        self._process: subprocess.Popen[bytes] | None = None
        # The kernel ends a child when the thread that started it does: this one stays.
        self._starter = ThreadPoolExecutor(1, thread_name_prefix="stage-starter")

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def _connect(self, timeout_s: float, stage_timeout_s: float) -> Control:
        try:
            self._process, ours = self._starter.submit(self._start, stage_timeout_s).result()
        except OSError as error:
            raise StageLostError(None, self.name, f"it cannot be started: {error}") from None
        self.name = f"process {self._process.pid}"
        patience_s = max(timeout_s, _START_S)
        return Control(ours, self.name, stage_timeout_s=stage_timeout_s, patience_s=patience_s)

    def close(self) -> None:
        super().close()
        self._starter.shutdown()

    def _start(self, stage_timeout_s: float) -> tuple[subprocess.Popen[bytes], socket.socket]:
        ours, theirs = socket.socketpair()
        with theirs:
            about = {
                **self._about,
                "descriptor": theirs.fileno(),
                "parent": os.getpid(),
                "timeout_s": stage_timeout_s,
            }
            environment = {
                **os.environ,
                "PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path)),
                "OMP_NUM_THREADS": str(self._about["threads"]),
            }
            try:
                process = subprocess.Popen(
                    [sys.executable, "-c", _START, json.dumps(about)],
                    stdin=subprocess.DEVNULL,
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,  # an interrupt is for this process alone
                    env=environment,
                )
            except BaseException:
                ours.close()
                raise
        return process, ours

    def _end(self) -> None:
        super()._end()
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()


def run_child() -> None:
    """The whole life of a local worker."""
    about = json.loads(sys.argv[1])
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != about["parent"]:
        return
    processors = about["processors"]
    StageShare(about["threads"], None if processors is None else frozenset(processors)).pin()
    serve = _find(about["serve"])  # before the first beat: while libraries are loaded no other thread runs
    connected = socket.socket(fileno=about["descriptor"])
    control = Control(connected, "the driver", stage_timeout_s=about["timeout_s"])
    control.when_lost(lambda _: os._exit(1))  # whatever the other threads wait for
    _serve(control, serve, about["device"])
    end_worker()


def end_worker() -> NoReturn:
    """The end of a process that was a worker: threads of a library that wait for a peer are no reason to stay, and
    one that frees what it had while Python ends takes the process along."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def run_worker(
    listener: Listener,
    *,
    device: str | None = None,
    threads: int | None = None,
    serve: str = SERVE,
    once: bool = False,
    tell: Callable[[str], None] = lambda _: None,
) -> None:
    """Serve drivers, one after the other, until the listener is closed; or one alone. On any thread."""
    found = _find(serve)
    if threads is not None:
        import torch

        torch.set_num_threads(threads)  # of the calling thread, which computes
    while True:
        tell(f"waiting for a driver at {listener.address}")
        try:
            control = listener.accept()
        except EOFError:
            return
        tell(f"serving the driver at {control.peer}")
        why = _serve(control, found, device)
        tell(
            f"the driver at {control.peer} is served"
            if why is None
            else f"the driver at {control.peer}: {why}"
        )
        if once:
            return


def _find(serve: str) -> Callable[..., None]:
    module, _, function = serve.partition(":")
    found: Callable[..., None] = getattr(importlib.import_module(module), function)
    return found


def _serve(control: Control, serve: Callable[..., None], device: str | None) -> str | None:
    """Serves one driver to its end. What goes wrong is told to it; the reason is returned."""
    with control:
        try:
            serve(control, device=device)
            return None
        except StageLostError as error:
            return error.reason
        except Exception as error:
            return tell_failure(control, error)


@dataclass(frozen=True)
class Ranks:
    """This process among those that torchrun, or whoever sets its variables, has started. The last one drives."""

    rank: int
    world_size: int
    store_host: str
    store_port: int
    generation: str  # of processes: torchrun starts all of them anew where one ends

    @property
    def drives(self) -> bool:
        return self.rank == self.world_size - 1

    @classmethod
    def find(cls, environ: Mapping[str, str] = os.environ) -> "Ranks | None":
        """None outside of torchrun, or where it has started one process alone."""
        names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        if not all(environ.get(name) for name in names):
            return None
        numbers = []
        for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"):
            text = environ[name]
            if not (text.isascii() and text.isdigit()):
                raise SettingError(name, text, "a number, as torchrun sets it")
            numbers.append(int(text))
        rank, world_size, port = numbers
        if rank >= world_size:
            raise SettingError("RANK", rank, f"a number below WORLD_SIZE, {world_size}")
        generation = (
            f"{environ.get('TORCHELASTIC_RUN_ID', '')}/{environ.get('TORCHELASTIC_RESTART_COUNT', 0)}"
        )
        return cls(rank, world_size, environ["MASTER_ADDR"], port, generation) if world_size > 1 else None

    def listen(self, token: bytes) -> Listener:
        """A worker's: it tells its address to the driver by torchrun's store."""
        listener = Listener(Address(_interface_to(self.store_host, self.store_port), 0), token)
        self._store.set(self._key(self.rank), str(listener.address))
        return listener

    def workers(self, token: bytes) -> list[ListeningWorker]:
        """The driver's: all others, in the order of their layers."""
        store = self._store

        def address_of(rank: int) -> Callable[[], str]:
            return lambda: bytes(store.get(self._key(rank))).decode()

        return [ListeningWorker(address_of(rank), token) for rank in range(self.world_size - 1)]

    def _key(self, rank: int) -> str:
        return f"penstock/{self.generation}/{rank}"

    @cached_property
    def _store(self) -> Any:
        """It serves the others where this process is the first and no agent of torchrun's does."""
        from torch import distributed

        serves = self.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        timeout = timedelta(seconds=_START_S)
        place = (self.store_host, self.store_port)
        try:
            return distributed.TCPStore(  # type: ignore[attr-defined]
                *place, is_master=serves, wait_for_workers=False, timeout=timeout
            )
        except RuntimeError as error:
            reason = str(error).partition("\n")[0]
            raise StageLostError(None, str(Address(*place)), f"torchrun's store: {reason}") from None


def _interface_to(host: str, port: int) -> str:
    """The address of this machine by which another reaches it: the one that packets to it have. None is sent."""
    family, kind, protocol, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(place)
        return str(probe.getsockname()[0])
