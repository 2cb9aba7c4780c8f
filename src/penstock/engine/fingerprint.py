"""What a model's cached blocks depend on: blocks are shared only between engines that would compute the same bits."""

import functools
import json
import os
import time
from contextlib import suppress
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path
from typing import Any, Protocol

import torch

import penstock
from penstock.cache import BLOCK_TOKENS
from penstock.engine.profile import profile_key
from penstock.files import read_plain, replace_json
from penstock.home import cache_home
from penstock.models.bytefile import parts_of
from penstock.models.decoder import Decoder
from penstock.plan.grids import RowLaw
from penstock.plan.weight_settings import WeightsSetting

_VERSION = 1  # of what is hashed below
# The code that a block's bits come from, beside libraries and the processor.
_CODE = ("kernels", "layers", "models", "engine/step.py", "engine/graphs", "plan/grids.py")
_SLICE_BYTES = 4 << 20
_MOST_MEMO_BYTES = 1 << 20
_MOST_MEMOS = 1000
# A file that was written this recently may be written again within the clock's tick, and show it by nothing.
_SETTLED_NS = 2 * 10**9


class HasWeights(Protocol):
    """What blocks are kept of: an `LLM`, or anything else that has these."""

    @property
    def path(self) -> Path: ...

    @property
    def model(self) -> Decoder: ...

    @property
    def canon(self) -> RowLaw: ...

    @property
    def weights(self) -> WeightsSetting: ...


def cache_fingerprint(llm: HasWeights) -> bytes:
    """A hash of all that a block's bits depend on, but for its tokens: weights, configuration, dtype, kernels, code,
    libraries, processor and threads."""
    model, kernels = llm.model, llm.model.kernels
    machine = asdict(profile_key(llm))
    del machine["penstock"]  # its code says more
    parts = {
        "version": _VERSION,
        "weights": weights_digest(llm.path).hex(),
        "form": llm.weights.name,
        "config": asdict(model.config),
        "machine": machine,
        "capability": torch.backends.cpu.get_cpu_capability(),
        "features": processor_features(),
        "libraries": kernels.libraries,
        "code": code_digest(),
        "canon": asdict(llm.canon),
        "block_tokens": BLOCK_TOKENS,
    }
    return sha256(json.dumps(parts, sort_keys=True).encode()).digest()


def processor_features() -> dict[str, str]:
    """What libraries choose their code by, as far as it can be seen: instructions, and variables that limit them."""
    limits = {
        name: value
        for name, value in os.environ.items()
        if name.startswith(("ONEDNN_", "DNNL_", "MKL_", "ATEN_CPU_"))
    }
    told: dict[str, object] = getattr(torch.cpu, "get_capabilities", dict)()
    return limits | {name: str(value) for name, value in told.items()}


def weights_digest(path: Path) -> bytes:
    """A hash of the bytes of a GGUF file, or of all safetensors files in a folder. A file's hash is kept in the cache
    folder (`digests.json`) until the file changes."""
    files = _weight_files(path)
    memos = _read_memos()
    known = dict(memos)
    digests = [_file_digest(file.resolve(), memos) for file in files]
    if memos != known:
        _write_memos(memos)
    names = [file.name if path.is_dir() else "" for file in files]
    return sha256(json.dumps(list(zip(names, digests, strict=True))).encode()).digest()


def weights_state(path: Path) -> str:
    """What tells, on one machine, whether weights are the same files as another process has: a hash without a look
    into them."""
    found = [(str(file.resolve()), _state_of(file)) for file in _weight_files(path)]
    return sha256(json.dumps(found).encode()).hexdigest()


def _weight_files(path: Path) -> list[Path]:
    return sorted(filter(Path.is_file, path.glob("*.safetensors") if path.is_dir() else parts_of(path)))


def _file_digest(path: Path, memos: dict[str, Any]) -> str:
    before = _state_of(path)
    memo = memos.get(str(path))
    if isinstance(memo, dict) and memo.get("state") == before and isinstance(memo.get("sha256"), str):
        return str(memo["sha256"])
    digest = sha256()
    buffer = memoryview(bytearray(_SLICE_BYTES))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
    memos.pop(str(path), None)
    if before == _state_of(path) and 0 <= before[1] < time.time_ns() - _SETTLED_NS:
        memos[str(path)] = {"state": before, "sha256": digest.hexdigest()}
    return digest.hexdigest()


def _state_of(path: Path) -> list[int]:
    """What changes when a file does: size, time, and which file it is. A list, as JSON gives it back."""
    found = path.stat()
    return [found.st_size, found.st_mtime_ns, found.st_ino, found.st_dev]


def _memo_path() -> Path:
    return cache_home() / "digests.json"


def _read_memos() -> dict[str, Any]:
    """What is known of files; nothing where the file is damaged. It is read whole and written whole, by a rename, so
    of two processes the later one's counts: a hash that is lost is computed again."""
    try:
        memos = json.loads(read_plain(_memo_path(), _MOST_MEMO_BYTES))
    except (OSError, ValueError, RecursionError):
        return {}
    return memos if isinstance(memos, dict) else {}


def _write_memos(memos: dict[str, Any]) -> None:
    with suppress(OSError):
        replace_json(_memo_path(), dict(list(memos.items())[-_MOST_MEMOS:]))


@functools.cache
def code_digest(*more: str) -> str:
    """A hash of the code that bits come from, and of more of it."""
    root = Path(penstock.__file__).parent
    digest = sha256(penstock.__version__.encode())
    for part in (*_CODE, *more):
        place = root / part
        for file in sorted(place.rglob("*.py")) if place.is_dir() else [place]:
            digest.update(f"\0{file.relative_to(root)}\0".encode())
            digest.update(sha256(file.read_bytes()).digest())
    return digest.hexdigest()
