"""The systems that are compared: all run the same weights and choose greedily, here or in a process of their own."""

import json
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any, Literal, Protocol, Self

import torch

from benchmarks.models import open_source
from benchmarks.workers.child import stamped
from penstock.engine.llm import LLM
from penstock.engine.run import Run
from penstock.errors import PenstockError
from penstock.kernels.device import chosen_device, device_kind
from penstock.kernels.interface import select_kernels
from penstock.kernels.probe import probe
from penstock.measure.growth import (
    STEADY_ALLOCATOR,
    WARM_UP_TOKENS,
    MeasurementError,
    grown_bytes,
)
from penstock.models.decoder import Decoder
from penstock.models.loading import load_decoder
from penstock.plan import ChunkedPrefillConfig, ChunkSizer
from penstock.plan.grids import RowLaw

OnToken = Callable[[int], None]
AUTO: Literal["auto"] = "auto"
ROOT = Path(__file__).resolve().parent.parent
_CHILD = Path(__file__).parent / "workers" / "child.py"
# vLLM compiles the model when it is loaded, which on two cores takes minutes.
TIMEOUT_S = 1200.0
_END_TIMEOUT_S = 20.0
_PIECE_BYTES = 1 << 16
_MOST_SHOWN = 300  # characters of what an engine said


@dataclass(frozen=True)
class Spec:
    """A system: an engine and how it reads a prompt, in chunks of so many tokens; 0 is the whole prompt at once."""

    engine: str = "Penstock"
    chunk: int | Literal["auto"] = 0
    is_tiled: bool = True  # attention on the grid of tiles, by which bits do not depend on chunks

    @property
    def is_ours(self) -> bool:
        return self.engine == "Penstock"

    @property
    def label(self) -> str:
        how = {AUTO: "auto", 0: "whole", 1: "token by token"}.get(self.chunk, f"chunk {self.chunk}")
        return f"{self.engine}, {how}{'' if self.is_tiled else ', no tiles'}"


@dataclass(frozen=True)
class Answer:
    """The tokens, and when each came, counted from the call."""

    token_ids: tuple[int, ...]
    stamps_s: tuple[float, ...]
    cache_bytes: int = 0  # keys, values and recurrent states that were cached at the end, where it tells

    @property
    def first_token_s(self) -> float:
        return self.stamps_s[0]

    @property
    def total_s(self) -> float:
        return self.stamps_s[-1]

    @property
    def decode_tokens_per_s(self) -> float | None:
        """Of the tokens after the first; None where there are none."""
        seconds = self.stamps_s[-1] - self.stamps_s[0]
        return (len(self.stamps_s) - 1) / seconds if seconds > 0 else None


class System(Protocol):
    """Something that reads a prompt and generates after it. The answer may tell `cache_bytes`."""

    def generate(
        self, prompt: Sequence[int], num_tokens: int, on_token: OnToken
    ) -> dict[str, Any] | None: ...


def ask(system: "System | Child", prompt: Sequence[int], num_tokens: int) -> Answer:
    """Exactly so many tokens of a system, each stamped as it comes; by a child, with its own clock."""
    if isinstance(system, Child):
        name, reply = system.name, system.ask("generate", prompt=list(prompt), num_tokens=num_tokens)
    else:
        name, reply = type(system).__name__, stamped(system, list(prompt), num_tokens)
    try:
        answer = Answer(
            tuple(map(int, reply["token_ids"])),
            tuple(map(float, reply["stamps_s"])),
            int(reply.get("cache_bytes", 0)),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise PeerError(f"{name} answered what is not understood: {_one_line(str(reply))!r}") from error
    stamps = answer.stamps_s
    if not len(answer.token_ids) == len(stamps) == num_tokens:
        raise PeerError(f"{name} gave {len(answer.token_ids)} tokens where {num_tokens} were asked for")
    if stamps[0] <= 0 or list(stamps) != sorted(stamps):
        raise PeerError(f"{name} gave times that do not follow each other: {stamps[:4]}")
    return answer


class PenstockSystem:
    """Penstock's own run: chunked, whole or token by token, with its tile grid or without. With an `LLM`, chunks are
    its own choice, and it learns from one prompt to the next, as a user's does."""

    def __init__(self, model: Decoder, canon: RowLaw, chunk: int, llm: LLM | None = None) -> None:
        self._model = model
        self._canon = canon
        self._chunk = chunk
        self._llm = llm

    @classmethod
    def auto(cls, llm: LLM) -> Self:
        return cls(llm.model, llm.canon, llm.chunk.effective, llm)

    def generate(self, prompt: Sequence[int], num_tokens: int, on_token: OnToken) -> dict[str, Any]:
        llm, sizer = self._llm, None
        if llm is not None:
            rules = llm.size_rules(llm.device_kind.free_bytes())
            sizer = ChunkSizer(rules, llm.times, llm.activations.step_bytes)
        config = ChunkedPrefillConfig(self._chunk)
        run = Run(self._model, prompt, config=config, canon=self._canon, max_tokens=num_tokens, sizer=sizer)
        while run.finish_reason is None:
            token = run.step().token
            if token is not None:
                on_token(token)
        key_value_bytes = (len(prompt) + num_tokens - 1) * run.model.cache_spec.bytes_per_token
        # A step reads one state and writes another: after two steps both are in memory.
        return {"cache_bytes": key_value_bytes + run.space.tensors.state_bytes}


class TransformersSystem:
    """transformers' `generate`, with `prefill_chunk_size` or without, and its dynamic cache."""

    def __init__(self, model: Any, chunk: int) -> None:
        self._model = model
        self._chunk = chunk or None

    def generate(self, prompt: Sequence[int], num_tokens: int, on_token: OnToken) -> dict[str, Any]:
        from transformers import GenerationConfig

        input_ids = torch.tensor([prompt], device=self._model.device)
        settings = GenerationConfig(
            max_new_tokens=num_tokens,
            do_sample=False,
            use_cache=True,
            prefill_chunk_size=self._chunk,
            pad_token_id=0,
            return_dict_in_generate=True,
        )
        output = self._model.generate(
            input_ids,
            attention_mask=torch.ones_like(input_ids),
            generation_config=settings,
            streamer=_Streamer(on_token),
        )
        layers = output.past_key_values.layers
        return {"cache_bytes": sum(tensor.nbytes for layer in layers for tensor in _cached_tensors(layer))}


def _cached_tensors(layer: Any) -> list[torch.Tensor]:
    """What a layer of transformers' cache has: keys and values, or the states of a linear attention."""
    if hasattr(layer, "keys"):
        return [layer.keys, layer.values]
    return [*layer.conv_states.values(), *layer.recurrent_states.values()]


class _Streamer:
    """Passes on what `generate` streams: the prompt first, then token by token."""

    def __init__(self, on_token: OnToken) -> None:
        self._on_token = on_token
        self._has_prompt = False

    def put(self, value: torch.Tensor) -> None:
        if self._has_prompt:
            self._on_token(int(value))
        self._has_prompt = True

    def end(self) -> None:
        pass


def load_systems(specs: Iterable[Spec], path: Path, dtype: str, llm: LLM | None = None) -> dict[Spec, System]:
    """Each engine's weights are loaded once, and only if it is among them. With an `LLM`, Penstock's are its own."""
    wanted, device = list(specs), chosen_device(None)
    systems: dict[Spec, System] = {}
    device_kind(device).use()
    with closing(open_source(path, device)) as source:
        ours = [spec for spec in wanted if spec.is_ours]
        if ours and llm is None:
            model = load_decoder(source, select_kernels(device), getattr(torch, dtype), device)
            canon = probe(model.kernels, model.probe_shapes, model.dtype, device).bind(model.kernels)
        elif llm is not None:
            model, canon = llm.model, llm.canon
        for spec in ours:
            if spec.chunk == AUTO:
                assert llm is not None, "automatic chunks are an LLM's"
                systems[spec] = PenstockSystem.auto(llm)
            else:
                law = canon if spec.is_tiled else RowLaw(tile_size=0)
                systems[spec] = PenstockSystem(model, law, spec.chunk)
        theirs = [spec for spec in wanted if spec.engine == "transformers"]
        if theirs:
            from penstock.measure.transformers_model import load_transformers

            reference = load_transformers(source, getattr(torch, dtype), device)
            systems |= {spec: TransformersSystem(reference, int(spec.chunk)) for spec in theirs}
    return systems


class PeerError(PenstockError):
    """An engine that ended, failed, or answered what cannot be understood."""


class Child:
    """An engine in a process of its own, that `workers/child.py` serves in lines of JSON. It ends with its `with`
    block, or with this process."""

    def __init__(
        self,
        engine: str,
        name: str,
        python: str | Path = sys.executable,
        env: Mapping[str, str] | None = None,
    ) -> None:
        """`engine` is `module:Class`."""
        self.name = name
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  (closed in `close`)
        self._unread = b""
        environment = {**os.environ, **(env or {})}
        if str(python) == sys.executable:  # others' environments are not to find what this one has
            paths = [str(ROOT), *filter(None, [environment.get("PYTHONPATH")])]
            environment["PYTHONPATH"] = os.pathsep.join(paths)
        command = [str(python), str(_CHILD), engine]
        try:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, env=environment
            )
        except OSError as error:
            self._errors.close()
            raise PeerError(f"{name} cannot be started: {command[0]}: {error.strerror or error}") from error

    def ask(self, what: str, timeout_s: float = TIMEOUT_S, **fields: Any) -> dict[str, Any]:
        """What a method of the engine answers."""
        try:
            self._send({"do": what, **fields})
        except OSError as error:
            raise self._ended() from error
        line = self._read_line(timeout_s).decode(errors="replace")
        try:
            reply = json.loads(line)
        except ValueError:
            reply = None
        if isinstance(reply, dict) and isinstance(reply.get("error"), str):
            raise PeerError(f"{self.name} failed: {_one_line(reply['error'])}")
        if not isinstance(reply, dict) or not isinstance(reply.get("ok"), dict):
            raise PeerError(f"{self.name} answered what is not understood: {_one_line(line)!r}")
        answer: dict[str, Any] = reply["ok"]
        return answer

    def kill(self) -> None:
        """As a crash would: it gets no chance to finish anything."""
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        """Ask it to end; where it does not, end it."""
        if self._errors.closed:
            return
        with suppress(OSError):
            self._send({"do": "close"})
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with suppress(OSError):
                    pipe.close()
        try:
            self._process.wait(_END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.kill()
        self._errors.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _send(self, request: Mapping[str, Any]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request).encode() + b"\n")
        self._process.stdin.flush()

    def _read_line(self, timeout_s: float) -> bytes:
        assert self._process.stdout is not None
        pipe, deadline = self._process.stdout.fileno(), time.monotonic() + timeout_s
        while b"\n" not in self._unread:
            ready, _, _ = select.select([pipe], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise PeerError(f"{self.name} gave no answer in {timeout_s:g} s")
            piece = os.read(pipe, _PIECE_BYTES)
            if not piece:
                raise self._ended()
            self._unread += piece
        line, _, self._unread = self._unread.partition(b"\n")
        return line

    def _ended(self) -> PeerError:
        try:
            status: int | None = self._process.wait(_END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            status = None
        self._errors.seek(0)
        said = self._errors.read().decode(errors="replace").strip().splitlines() or ["it said nothing"]
        how = "stopped answering" if status is None else f"ended (exit {status})"
        return PeerError(f"{self.name} {how}: {_one_line(said[-1])}")


def _one_line(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _MOST_SHOWN else f"{line[:_MOST_SHOWN]}..."


@dataclass(frozen=True)
class Growth:
    """Of one process, during one prefill."""

    growth_bytes: int
    cache_bytes: int

    @property
    def activation_mib(self) -> float:
        return (self.growth_bytes - self.cache_bytes) / 2**20


class GrowthEngine:
    """In a fresh process: heap that earlier work left behind would hide growth."""

    def measure(
        self, model: str, spec: dict[str, Any], dtype: str, threads: int, prompt: list[int]
    ) -> dict[str, int]:
        torch.set_num_threads(threads)
        wanted = Spec(**spec)
        system = load_systems([wanted], Path(model), dtype)[wanted]
        ask(system, prompt[:WARM_UP_TOKENS], 2)
        cached: list[int] = []
        grown = grown_bytes(lambda: cached.append(ask(system, prompt, 1).cache_bytes), chosen_device(None))
        return {"growth_bytes": grown, "cache_bytes": cached[0]}


def growth_of(spec: Spec, path: Path, dtype: str, prompt: Sequence[int]) -> Growth:
    """How much a fresh process grows while it reads a prompt and generates a token."""
    order: dict[str, Any] = {"model": str(path), "spec": asdict(spec), "dtype": dtype, "prompt": list(prompt)}
    try:
        name = f"the process that measures {spec.label}"
        with Child("benchmarks.systems:GrowthEngine", name, env=STEADY_ALLOCATOR) as child:
            return Growth(**child.ask("measure", **order, threads=torch.get_num_threads()))
    except PeerError as error:
        raise MeasurementError(str(error)) from error
