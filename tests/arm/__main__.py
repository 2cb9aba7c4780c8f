"""`python -m tests.arm`: the native kernels compiled for ARM, and their tests, on an emulated processor.

What is emulated is the processor alone, and one thread at a time sees memory as x86 orders it: neither speed nor
what threads of ARM may see of each other is tried."""

import hashlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import penstock.kernels.native
from penstock.kernels.native.build import _FLAGS, _TARGETS

HERE = Path(__file__).parent
REPOSITORY = HERE.parents[1]
KERNELS = Path(penstock.kernels.native.__file__).parent
BUILT = REPOSITORY / "build" / "arm"
COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
PACKAGES = {COMPILER: "g++-aarch64-linux-gnu", EMULATOR: "qemu-user"}
# The set of instructions, and a processor that has no others.
INSTRUCTIONS, PROCESSOR = "neon", "cortex-a53"
PROGRAM, HEAP = f"penstock-{INSTRUCTIONS}", "heap.so"
HEAD_DIMS = (16, 32, 64)
NUM_WORKERS = 2
# Optimised less than what users have: that takes minutes to compile.
_FEWER_FLAGS = ("-O1", *(flag for flag in _FLAGS if flag not in ("-O3", "-shared", "-fPIC")))
# Those that take the longest are compiled first.
_LONG = ("few_queries", "quantised", "attention")

_KERNELS, _WINDOWS = "tests/kernels/test_native_kernels.py", "tests/kernels/test_windows.py"
_CHUNKS = f"{_WINDOWS}::test_a_chunk_has_the_bits_of_the_whole_with_no_numbers_behind_its_window"
_DECODES = f"{_WINDOWS}::test_decodes_have_a_chunks_bits_and_may_lack_what_is_behind_their_window"
TESTS = (
    # Takes half of the time, so it begins: a loaded model is measured first.
    "tests/engine/test_quantised_weights.py::test_layers_in_one_call_are_the_layers[llama]",
    "tests/kernels/test_quantised.py",
    "tests/kernels/test_rounded_rows.py",
    f"{_KERNELS}::test_bits_do_not_depend_on_chunks_places_neighbours_or_threads",
    f"{_KERNELS}::test_scores_of_any_size",
    f"{_KERNELS}::test_norms",
    f"{_KERNELS}::test_activation",
    f"{_KERNELS}::test_heads_on_their_way_to_the_cache",
    f"{_KERNELS}::test_a_rotation_has_the_references_bits",
    f"{_KERNELS}::test_experts",
    f"{_KERNELS}::test_rows_go_to_the_experts_of_the_reference",
    f"{_KERNELS}::test_quantised_experts_are_those_one_by_one",
    f"{_WINDOWS}::test_it_is_what_formulas_say_beside_anybody",
    f"{_CHUNKS}[native-all-float32]",
    f"{_CHUNKS}[native-all-bfloat16]",
    f"{_DECODES}[3-1-float32]",
    f"{_DECODES}[3-1-bfloat16]",
)
# What is of other libraries, or of Python alone; and what takes minutes when it is emulated.
_OTHERS = ("torch-", "amx", "nearest", "products_refuse", "probe", "every_number")


def built() -> Path:
    """The folder with the kernels as a program, and with the library that makes a process share its heap; compiled
    where they are not there."""
    files = [path for folder in (KERNELS, HERE) for path in sorted(folder.glob("*.[ch]*"))]
    texts = {path.name: path.read_bytes() for path in files}
    texts["attention.h"] = _with_fewer_heads(texts["attention.h"].decode()).encode()
    compiler = (COMPILER, *_TARGETS[INSTRUCTIONS], *_FEWER_FLAGS)
    digest = hashlib.sha256(b"\0".join([*map(str.encode, compiler), *texts.values()])).hexdigest()
    folder = BUILT / digest[:16]
    if (folder / PROGRAM).exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        (folder / name).write_bytes(text)
    shared = ("c++", "-O2", "-std=c++17", "-shared", "-fPIC", "-o", HEAP, "heap.cpp")
    others = {path.stem for path in files if path.suffix == ".cpp"} - {*_LONG, "heap"}
    names = [*_LONG, *sorted(others)]
    commands = [*((*compiler, "-c", f"{name}.cpp") for name in names), shared]
    with ThreadPoolExecutor(NUM_WORKERS) as pool:
        list(pool.map(lambda command: subprocess.run(command, cwd=folder, check=True), commands))
    objects = (f"{name}.o" for name in names)
    subprocess.run((COMPILER, "-static", "-pthread", "-o", "partial", *objects), cwd=folder, check=True)
    (folder / "partial").replace(folder / PROGRAM)
    return folder


def _with_fewer_heads(text: str) -> str:
    """All sizes of heads take minutes to compile."""
    some = " || ".join(f"alike(std::integral_constant<int, {size}>{{}})" for size in HEAD_DIMS)
    text, count = re.subn(r"return alike\(.*?;", f"return {some};", text, flags=re.DOTALL)
    assert count == 1, "attention.h lists sizes of heads in another way"
    return text


def main(arguments: Sequence[str]) -> int:
    """The status of pytest, which takes the arguments, too; 2 where there is nothing to compile or emulate with."""
    if missing := [tool for tool in PACKAGES if shutil.which(tool) is None]:
        packages = " ".join(PACKAGES[tool] for tool in missing)
        print(f"there is no {' and no '.join(missing)}: apt-get install {packages}", file=sys.stderr)
        return 2
    environ = {
        name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", "PENSTOCK"))
    }
    folder = built()
    environ |= {
        "PENSTOCK_TEST_EMULATED": f"{EMULATOR} -cpu {PROCESSOR} {folder / PROGRAM}",
        "LD_PRELOAD": str(folder / HEAP),
        "PYTHONMALLOC": "malloc",
        "OMP_NUM_THREADS": "1",
    }
    command = [
        *(sys.executable, "-m", "pytest", "-p", "tests.arm.emulated", "-p", "no:cacheprovider"),
        *("--numprocesses", str(NUM_WORKERS), "--dist", "worksteal", "--durations", "5", *TESTS),
        *("-k", " and ".join(f"not {name}" for name in _OTHERS)),
        *arguments,
    ]
    return subprocess.run(command, cwd=REPOSITORY, env=environ).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
