"""What is read of a machine, from folders that are made up as the system has them."""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from penstock import machine
from penstock.errors import SettingError
from penstock.machine import (
    INSTRUCTION_SETS,
    ISA_VARIABLE,
    free_memory_bytes,
    has_fast_bfloat16,
    instruction_set,
    instruction_sets,
    memory_bytes,
    processor_flags,
    processor_name,
    usable_cores,
)

AMX = ("avx512f", "amx_bf16", "amx_tile", "amx_int8")


def system(root: Path, files: Mapping[str, str], siblings: Sequence[str] = ()) -> Path:
    """`siblings` are, for each processor, those of its core."""
    found = dict(files)
    for processor, text in enumerate(siblings):
        found[f"sys/devices/system/cpu/cpu{processor}/topology/core_cpus_list"] = f"{text}\n"
    for name, text in found.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


HYPERTHREADS = ("0,4", "1,5", "2,6", "3,7", "0,4", "1,5", "2,6", "3,7")


@pytest.mark.parametrize(
    ("allowed", "quota", "cores"),
    [
        (range(8), "max 100000", 4),
        ((0, 4), "max 100000", 1),  # both of one core
        ((0, 1, 2), "max 100000", 3),
        (range(8), "250000 100000", 2),  # rounded down
        (range(8), "50000 100000", 1),  # but not to nothing
        (range(8), "800000 100000", 4),
        (range(8), "nonsense", 4),
        (range(8), "100000 0", 4),
    ],
)
def test_cores_that_may_be_used(tmp_path: Path, allowed: Sequence[int], quota: str, cores: int) -> None:
    root = system(tmp_path, {"sys/fs/cgroup/cpu.max": f"{quota}\n"}, HYPERTHREADS)
    assert usable_cores(allowed, root=root) == cores


def test_older_names_and_no_names_of_siblings(tmp_path: Path) -> None:
    assert usable_cores(range(6), root=tmp_path) == 6  # nothing is known: each may be a core
    for processor in range(4):
        name = f"sys/devices/system/cpu/cpu{processor}/topology/thread_siblings_list"
        system(tmp_path, {name: f"{processor // 2 * 2}-{processor // 2 * 2 + 1}\n"})
    assert usable_cores(range(4), root=tmp_path) == 2


def test_the_strictest_group_counts(tmp_path: Path) -> None:
    groups = {
        "proc/self/cgroup": "0::/machine/box\n",
        "proc/meminfo": "MemTotal:       16777216 kB\nMemFree: 1 kB\n",
        "sys/fs/cgroup/machine/cpu.max": "200000 100000\n",
        "sys/fs/cgroup/machine/box/cpu.max": "400000 100000\n",
        "sys/fs/cgroup/machine/memory.max": f"{8 << 30}\n",
        "sys/fs/cgroup/machine/box/memory.max": "max\n",
    }
    root = system(tmp_path, groups, HYPERTHREADS)
    assert usable_cores(range(8), root=root) == 2
    assert memory_bytes(root=root) == 8 << 30


def test_memory_of_the_whole_machine(tmp_path: Path) -> None:
    assert memory_bytes(root=tmp_path) is None
    assert memory_bytes(root=system(tmp_path, {"proc/meminfo": "MemTotal: 2048 kB\n"})) == 2 << 20


@pytest.mark.parametrize(("limit", "expected"), [("1000000", 750_000), ("max", None), ("nonsense", None)])
def test_a_group_has_what_its_limit_leaves(tmp_path: Path, limit: str, expected: int | None) -> None:
    group = "sys/fs/cgroup/slice"
    assert free_memory_bytes(root=tmp_path) is None
    files = {
        "proc/self/cgroup": "0::/slice\n",
        f"{group}/memory.max": f"{limit}\n",
        f"{group}/memory.current": "300000\n",
        f"{group}/memory.stat": "anon 1\ninactive_file 50000\nactive_file 7\n",
    }
    assert free_memory_bytes(root=system(tmp_path, files)) == expected


def test_free_memory_is_the_least_of_machine_and_groups(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/slice/job\n",
        "proc/meminfo": "MemTotal: 4096 kB\nMemAvailable: 2048 kB\n",
        "sys/fs/cgroup/slice/memory.max": f"{3 << 20}\n",
        "sys/fs/cgroup/slice/memory.current": "4096\n",
    }
    assert free_memory_bytes(root=system(tmp_path, files)) == 2 << 20
    system(tmp_path, {"sys/fs/cgroup/slice/memory.current": f"{2 << 20}\n"})
    assert free_memory_bytes(root=tmp_path) == 1 << 20


def test_the_name_of_the_processor(tmp_path: Path) -> None:
    assert "(" in processor_name(root=tmp_path)
    text = "processor : 0\nmodel name : A fast one\nprocessor : 1\nmodel name : A fast one\n"
    assert processor_name(root=system(tmp_path, {"proc/cpuinfo": text})).startswith("A fast one (")


def test_flags_of_the_processor(tmp_path: Path) -> None:
    assert processor_flags(root=tmp_path) == frozenset()
    text = "processor\t: 0\nflags\t\t: fpu amx_tile\n\nprocessor\t: 1\nflags\t\t: fpu\n"
    assert processor_flags(root=system(tmp_path, {"proc/cpuinfo": text})) == {"fpu", "amx_tile"}


def test_flags_of_a_processor_of_arm(tmp_path: Path) -> None:
    text = "processor\t: 0\nBogoMIPS\t: 50.00\nFeatures\t: fp asimd atomics asimdrdm bf16\nCPU implementer\t: 0x41\n"
    flags = processor_flags(root=system(tmp_path, {"proc/cpuinfo": text}))
    assert flags == {"fp", "asimd", "atomics", "asimdrdm", "bf16"}
    assert instruction_set(flags, {ISA_VARIABLE: "neon"}, "aarch64") == "neon"
    assert instruction_set(flags - {"bf16"}, {}, "arm64") == "neon"
    assert instruction_set(flags, {}, "x86_64") is None


def test_flags_of_a_mac(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It lists them by a command; a name that it does not know is an error that it goes on after."""
    command = tmp_path / "sysctl"
    command.write_text(
        "#!/bin/sh\necho hw.optional.other: 1\necho 'sysctl: unknown oid' >&2\necho hw.optional.AdvSIMD: 1\nexit 1\n"
    )
    command.chmod(0o755)
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(machine, "_ROOT", tmp_path)  # it has no /proc
    for path, flags in ((str(tmp_path), {"asimd"}), ("", set())):
        monkeypatch.setenv("PATH", path)
        machine._apple_flags.cache_clear()
        assert processor_flags(root=tmp_path) == flags
    machine._apple_flags.cache_clear()
    assert instruction_set({"asimd"}, {}, "arm64") == "neon"


@pytest.mark.parametrize("kind", ["x86_64", "aarch64"])
def test_sets_of_instructions_are_of_a_kind_of_processor(kind: str) -> None:
    """No set of another kind is taken for a lower one."""
    names = instruction_sets(kind)
    others = [name for name in INSTRUCTION_SETS if name not in names]
    assert others
    for at, name in enumerate(names):
        assert instruction_set(INSTRUCTION_SETS[name], {}, kind) == name
        assert instruction_set(INSTRUCTION_SETS[names[0]], {ISA_VARIABLE: name}, kind) == name
        assert instruction_set(INSTRUCTION_SETS[name], {ISA_VARIABLE: names[0]}, kind) == names[at]
    for name in others:
        with pytest.raises(SettingError, match=f"PENSTOCK_ISA='{name}' is not accepted"):
            instruction_set(INSTRUCTION_SETS[names[0]], {ISA_VARIABLE: name}, kind)


@pytest.mark.parametrize(
    ("flags", "environ", "is_fast"),
    [
        (AMX, {}, True),
        (("avx512f", "avx512_bf16"), {}, False),
        (("amx_tile", "amx_int8"), {}, False),
        (AMX, {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"}, False),
        (AMX, {"ONEDNN_MAX_CPU_ISA": "avx512_core_amx"}, True),
        (AMX, {"DNNL_MAX_CPU_ISA": "AVX2"}, False),
        (AMX, {"ONEDNN_MAX_CPU_ISA": "DEFAULT", "DNNL_MAX_CPU_ISA": "AVX2"}, True),
    ],
)
def test_whether_bfloat16_is_fast(flags: Sequence[str], environ: dict[str, str], is_fast: bool) -> None:
    assert has_fast_bfloat16(flags, environ) is is_fast


def test_this_machine_tells_something() -> None:
    assert usable_cores() >= 1
