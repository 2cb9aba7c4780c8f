"""This machine as the system describes it: cores, memory, control groups, processor. `root` is its file system's."""

import os
import platform
import sys
from collections.abc import Collection, Iterator, Mapping
from functools import cache
from pathlib import Path

from penstock.errors import SettingError

_ROOT = Path("/")
# Either names the processors of a core; the second is what older systems call it.
_SIBLINGS = ("core_cpus_list", "thread_siblings_list")
_AMX_FLAGS = frozenset(("amx_tile", "amx_bf16"))
AMX = "amx"  # of the sets below
# Sets of instructions that the native kernels are compiled for, the best first, with what a processor must have.
_AVX2 = ("avx2", "fma", "f16c")
_AVX512 = (*_AVX2, "avx512f", "avx512bw", "avx512dq", "avx512vl")
_AVX512_BF16 = (*_AVX512, "avx512_vnni", "avx512_bf16")
INSTRUCTION_SETS = {
    AMX: (*_AVX512_BF16, *sorted(_AMX_FLAGS), "amx_int8"),
    "avx512_bf16": _AVX512_BF16,
    "avx512": _AVX512,
    "avx2": _AVX2,
    "neon": ("asimd",),
}
_ARM, _ARM_SETS = ("aarch64", "arm64"), ("neon",)
ISA_VARIABLE = "PENSTOCK_ISA"
# What macOS calls those that Linux lists.
_APPLE = {"hw.optional.AdvSIMD": "asimd"}
_ONEDNN_LIMITS = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA")
_ONEDNN_NO_LIMIT = ("", "ALL", "DEFAULT")


def usable_cores(allowed: Collection[int] | None = None, *, root: Path = _ROOT) -> int:
    """Physical cores that this process may run on, or that have some of the `allowed` processors; no more than a
    container's share of time is worth, and at least 1."""
    shares = [share for folder in _group_folders(root) if (share := _time_share(folder)) is not None]
    return max(1, min([len(cores(allowed, root=root)), *map(int, shares)]))


def cores(allowed: Collection[int] | None = None, *, root: Path = _ROOT) -> list[frozenset[int]]:
    """The processors that this process may run on, or the `allowed` ones, by physical core."""
    found: dict[str, set[int]] = {}
    for processor in sorted(_allowed_processors() if allowed is None else allowed):
        found.setdefault(_core_of(processor, root), set()).add(processor)
    return [frozenset(processors) for processors in found.values()]


def memory_bytes(*, root: Path = _ROOT) -> int | None:
    """The machine's memory, or as much of it as a container may have; None where nobody tells."""
    sizes = [size for folder in _group_folders(root) if (size := _number(folder / "memory.max")) is not None]
    total = _meminfo("MemTotal", root)
    return min(sizes if total is None else [*sizes, total], default=None)


def free_memory_bytes(*, root: Path = _ROOT) -> int | None:
    """Memory that could be taken without others having to give it up: of the machine, and of every control group that
    this process is in. None where nobody tells."""
    sizes = [size for folder in _group_folders(root) if (size := _group_free(folder)) is not None]
    available = _meminfo("MemAvailable", root)
    if available is None and root == _ROOT:
        available = _free_pages()
    return min(sizes if available is None else [*sizes, available], default=None)


def processor_flags(*, root: Path = _ROOT) -> frozenset[str]:
    """The features of the first processor; none where the system does not list them."""
    lines = processor_lines("flags", "Features", root=root)
    if not lines and root == _ROOT and sys.platform == "darwin":
        return _apple_flags()
    return frozenset(next((line.partition(":")[2].split() for line in lines), ()))


def processor_name(*, root: Path = _ROOT) -> str:
    """The processor's model and its architecture."""
    names = [line.partition(":")[2].strip() for line in processor_lines("model name", root=root)]
    return f"{names[0] if names else platform.processor() or 'unknown'} ({platform.machine()})"


def processor_lines(*beginnings: str, root: Path = _ROOT) -> list[str]:
    """The lines about all processors that begin with one of these."""
    return [line for line in _text(root / "proc/cpuinfo").splitlines() if line.startswith(beginnings)]


def instruction_sets(kind: str | None = None) -> list[str]:
    """Those that processors of a kind may have, without it of this machine's, the best first."""
    is_arm = (platform.machine() if kind is None else kind) in _ARM
    return [name for name in INSTRUCTION_SETS if (name in _ARM_SETS) == is_arm]


def instruction_set(
    flags: Collection[str], environ: Mapping[str, str] | None = None, kind: str | None = None
) -> str | None:
    """The best set of instructions that a processor with these flags has, and `PENSTOCK_ISA` allows; None: it has
    none of them."""
    names = instruction_sets(kind)
    wanted = (os.environ if environ is None else environ).get(ISA_VARIABLE) or names[0]
    if wanted not in names:
        raise SettingError(ISA_VARIABLE, wanted, f"one of {', '.join(names)}")
    return next(
        (name for name in names[names.index(wanted) :] if {*INSTRUCTION_SETS[name]} <= {*flags}), None
    )


def has_fast_bfloat16(flags: Collection[str], environ: Mapping[str, str] | None = None) -> bool:
    """Whether oneDNN multiplies bfloat16 by AMX: the processor has it, and no variable forbids it."""
    environ = os.environ if environ is None else environ
    limit = next((environ[name].upper() for name in _ONEDNN_LIMITS if name in environ), "")
    return set(flags) >= _AMX_FLAGS and (limit in _ONEDNN_NO_LIMIT or "AMX" in limit)


@cache
def _apple_flags() -> frozenset[str]:
    import subprocess  # which no other system needs here

    try:
        said = subprocess.run(["sysctl", *_APPLE], capture_output=True, text=True).stdout
    except OSError:
        return frozenset()
    found = dict(line.split(": ", 1) for line in said.splitlines() if ": " in line)
    return frozenset(name for key, name in _APPLE.items() if found.get(key) == "1")


def _allowed_processors() -> Collection[int]:
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return range(os.cpu_count() or 1)


def _core_of(processor: int, root: Path) -> str:
    """A name that processors of one core share."""
    folder = root / f"sys/devices/system/cpu/cpu{processor}/topology"
    return next((text for name in _SIBLINGS if (text := _text(folder / name).strip())), str(processor))


def _group_folders(root: Path) -> Iterator[Path]:
    """The control groups that this process is in, the innermost first: each limits those within it."""
    groups = root / "sys/fs/cgroup"
    lines = _text(root / "proc/self/cgroup").splitlines()
    own = next((line.removeprefix("0::/") for line in lines if line.startswith("0::/")), "")
    parts = [part for part in own.split("/") if part not in ("", "..")]
    for length in range(len(parts), -1, -1):
        yield groups.joinpath(*parts[:length])


def _time_share(folder: Path) -> float | None:
    """How many processors' time the group may take; None: no limit."""
    match _text(folder / "cpu.max").split():
        case [quota, period] if quota.isdigit() and period.isdigit() and int(period) > 0:
            return int(quota) / int(period)
    return None


def _group_free(folder: Path) -> int | None:
    """What is left of a group's limit, None: no limit. Pages of files that nobody uses can be evicted."""
    limit, used = _number(folder / "memory.max"), _number(folder / "memory.current")
    if limit is None or used is None:
        return None
    lines = (line.split() for line in _text(folder / "memory.stat").splitlines())
    files = next((int(value) for name, value in lines if name == "inactive_file"), 0)
    return max(limit - used + files, 0)


def _meminfo(field: str, root: Path) -> int | None:
    for line in _text(root / "proc/meminfo").splitlines():
        match line.split():
            case [name, kibibytes, *_] if name == f"{field}:" and kibibytes.isdigit():
                return 1024 * int(kibibytes)
    return None


def _free_pages() -> int | None:
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return None


def _number(path: Path) -> int | None:
    text = _text(path).strip()
    return int(text) if text.isdigit() else None


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError):
        return ""
