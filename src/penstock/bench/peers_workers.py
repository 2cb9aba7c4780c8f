"""The processes of the engines: where each is found, what it is told, and that only one computes at a time."""

import sys
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from penstock.bench.peers_process import Answered, PeerProcess
from penstock.bench.peers_workload import Candidate, EngineName

_SERVE = Path(__file__).parent / "peer_workers" / "serve.py"
_MODULES = {
    EngineName.PENSTOCK: "penstock.bench.peers_penstock",
    EngineName.TRANSFORMERS: "penstock.bench.peers_transformers",
    EngineName.LLAMA_CPP: "llama_cpp_engine",
    EngineName.VLLM: "vllm_engine",
}
# Threads of the one before go to sleep in this time.
_SETTLE_S = 0.3


@dataclass(frozen=True)
class Subject:
    """What all engines run."""

    path: Path  # of the model
    dtype: str
    num_threads: int
    most_tokens: int


class Workers:
    """Processes that are started when they are first asked. They end with the `with` block.

    `pythons` has the interpreters of the engines that are there; `folder` is for files that engines need."""

    def __init__(self, subject: Subject, pythons: Mapping[EngineName, Path], folder: Path) -> None:
        self._subject = subject
        self._pythons = pythons
        self._folder = folder
        self._running: dict[Candidate, PeerProcess] = {}
        self._files: dict[tuple[EngineName, str | None], Path] = {}
        self.about: dict[EngineName, str] = {}
        self.weights: dict[EngineName, str] = {}  # how they lie in memory, of engines that tell

    def generate(self, candidate: Candidate, prompt: Sequence[int], num_tokens: int) -> Answered:
        process = self._running.get(candidate) or self._start(candidate)
        time.sleep(_SETTLE_S)
        return process.generate(prompt, num_tokens)

    def close(self, but: Collection[Candidate] = ()) -> None:
        """End the processes, but for some."""
        for candidate in [each for each in self._running if each not in but]:
            self._running.pop(candidate).close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _start(self, candidate: Candidate) -> PeerProcess:
        model = self._model(candidate)
        process = self._open(candidate.engine, candidate.label)
        self._running[candidate] = process
        loaded = process.load({**self._common(), **candidate.settings, "model": str(model)})
        self.about[candidate.engine] = loaded.about
        if loaded.weights is not None:
            self.weights[candidate.engine] = loaded.weights
        return process

    def _open(self, engine: EngineName, label: str) -> PeerProcess:
        return PeerProcess(label, [str(self._pythons[engine]), str(_SERVE), _MODULES[engine]])

    def _common(self) -> dict[str, Any]:
        subject = self._subject
        return {
            "model": str(subject.path),
            "dtype": subject.dtype,
            "threads": subject.num_threads,
            "most_tokens": subject.most_tokens,
        }

    def _model(self, candidate: Candidate) -> Path:
        """The model's file, or what was made of it for this engine."""
        format_name = candidate.settings.get("format")
        if candidate.engine is EngineName.VLLM:
            return self._made(EngineName.TRANSFORMERS, None, "weights")
        if format_name is not None:
            return self._made(EngineName.LLAMA_CPP, format_name, f"{format_name}.gguf")
        return self._subject.path

    def _made(self, by: EngineName, format_name: str | None, name: str) -> Path:
        key, path = (by, format_name), self._folder / name
        if key not in self._files:
            with self._open(by, f"{by.value} (writing {name})") as process:
                process.prepare({**self._common(), "format": format_name, "output": str(path)})
            self._files[key] = path
        return self._files[key]


def find_pythons(folder: Path) -> dict[EngineName, Path]:
    """The interpreters of the engines: this one's own, and those of the environments that are in the folder."""
    found = dict.fromkeys((EngineName.PENSTOCK, EngineName.TRANSFORMERS), Path(sys.executable))
    for engine in (EngineName.LLAMA_CPP, EngineName.VLLM):
        python = folder / engine.value / "bin" / "python"
        if python.exists():
            found[engine] = python.absolute()
    return found
