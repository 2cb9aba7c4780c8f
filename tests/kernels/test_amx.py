"""Products by tiles of AMX: the processor's order of sums, any shape, and what runs where tiles cannot be had."""

import re
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from penstock.kernels.experts import Router
from penstock.kernels.native import build, kernels
from penstock.kernels.native.build import native_library
from penstock.kernels.native.kernels import NativeKernels
from penstock.kernels.native.quantised import NativeProducts
from penstock.kernels.probe import Random
from penstock.kernels.quantised import Q4_K, Q8_0, QuantisedWeight, quantise
from penstock.machine import AMX, INSTRUCTION_SETS, ISA_VARIABLE, processor_flags
from penstock.plan.model import ExpertsConfig
from tests.kernels.emulated import BELOW, EMULATED, use_emulated_amx
from tests.kernels.parity import ROUTERS, ExpertRows, Subject, check_experts, check_experts_alone

AMX_FLAGS = frozenset(INSTRUCTION_SETS[AMX])


@pytest.fixture
def amx(monkeypatch: pytest.MonkeyPatch) -> NativeKernels:
    """This processor's own, where it has tiles."""
    if not (processor_flags() >= AMX_FLAGS and build.allows_tiles()):
        use_emulated_amx(monkeypatch)
    made = NativeKernels()
    assert (made.instructions, made.slower) == (AMX, None)
    return made


def in_the_processors_order(x: Tensor, weight: Tensor) -> Tensor:
    """x [rows, in] times weight [out, in], as Intel's manual has it: of each 32 inputs the even ones are summed, and
    the odd ones; then both, and that to what was there. A product of two bfloat16 is exact in float32."""
    values, weights = x.float().numpy(), weight.float().numpy()
    total = np.zeros((len(values), len(weights)), np.float32)
    for start in range(0, values.shape[1], 32):
        first, second = np.zeros_like(total), np.zeros_like(total)
        for k in range(start, start + 32, 2):
            first += values[:, None, k] * weights[None, :, k]
            second += values[:, None, k + 1] * weights[None, :, k + 1]
        total += first + second
    return torch.from_numpy(total).bfloat16()


def test_sums_have_the_processors_order(amx: NativeKernels) -> None:
    """Seen in what is zero but for rounding."""
    assert amx.quantised is not None
    random = Random(torch.bfloat16, torch.device("cpu"))
    weight, x = random.cancelling(70, 1024, 1), random.cancelling(37, 1024, -1)
    ours = amx.quantised.linear(x, amx.quantised.packed(weight), None, is_canonical=True)
    assert torch.equal(ours, in_the_processors_order(x, weight))
    assert not torch.equal(ours, in_the_processors_order(x.flip(1), weight.flip(1)))


@pytest.mark.parametrize("num_in", [32, 96])
@pytest.mark.parametrize("num_out", [1, 16, 31, 33, 150])
@pytest.mark.parametrize("has_bias", [False, True])
def test_any_shape(amx: NativeKernels, num_out: int, num_in: int, has_bias: bool) -> None:
    generator = torch.Generator().manual_seed(num_out)
    values, x = (torch.randn(size, num_in, generator=generator).bfloat16() for size in (num_out, 70))
    weight = amx.quantised.zeros(Q8_0, num_out, num_in)  # type: ignore[union-attr]
    amx.quantised.place(weight, torch.arange(num_out), quantise(values, Q8_0))  # type: ignore[union-attr]
    stored = amx.embed(torch.arange(num_out), weight).double()
    bias = torch.linspace(-3, 3, num_out).bfloat16() if has_bias else None
    exact = x.double() @ stored.T + (0 if bias is None else bias.double())
    terms = x.double().abs() @ stored.abs().T
    whole = amx.linear(x, weight, bias)
    assert bool(((whole.double() - exact).abs() <= 2**-8 * exact.abs() + 2**-16 * terms).all())
    for start, end in ((0, 1), (3, 8), (5, 20), (0, 16), (9, 26), (1, 33), (0, 48), (20, 69)):
        assert torch.equal(amx.linear(x[start:end], weight, bias), whole[start:end])


def test_inputs_that_do_not_fill_tiles_go_another_way(amx: NativeKernels) -> None:
    assert amx.quantised is not None
    values, x = torch.randn(40, 34).bfloat16(), torch.randn(20, 34).bfloat16()
    weight = amx.quantised.packed(values)
    whole = amx.linear(x, weight)
    exact = x.double() @ values.double().T
    assert bool(((whole.double() - exact).abs() <= 2**-8 * exact.abs() + 2**-18).all())
    assert torch.equal(amx.linear(x[7:8], weight), whole[7:8])


@pytest.mark.parametrize("router", ROUTERS)
def test_experts(amx: NativeKernels, router: str) -> None:
    rows = ExpertRows(Subject(amx, torch.bfloat16), ROUTERS[router], 200)
    check_experts(rows)
    check_experts_alone(rows, (1, 7, 100))


def test_quantised_experts(amx: NativeKernels) -> None:
    """A row has the same bits with 1 row as with many that visit the same expert."""
    assert amx.quantised is not None
    config = ExpertsConfig(1, 4, 64, num_active=2)
    random = Random(torch.bfloat16, torch.device("cpu"))
    weights: list[list[QuantisedWeight]] = [[], []]
    for own, (num_out, num_in) in zip(weights, ((128, 256), (256, 64)), strict=True):
        form = Q4_K if num_in == 256 else Q8_0
        for _ in range(config.num_experts):
            own.append(amx.quantised.zeros(form, num_out, num_in))
            blocks = random.cancelling_blocks(num_out, num_in // form.block_size, form.block_bytes)
            amx.quantised.place(own[-1], torch.arange(num_out), blocks)
    experts = amx.quantised_experts(Router(config), weights[0], weights[1])
    x, scores = random.normal(60, 256), random.normal(60, config.num_experts)
    whole = experts.run(x, scores, None)
    for row in (0, 17, 59):
        assert torch.equal(experts.run(x[row : row + 1], scores[row : row + 1], None)[0], whole[row])


# Where tiles cannot be had


def test_wrong_products_are_noticed_and_the_next_lower_set_runs(
    amx: NativeKernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    products, linear = amx.quantised, NativeProducts.linear
    assert products is not None
    assert products.are_right()

    def one_wrong(
        self: NativeProducts, x: Tensor, weight: QuantisedWeight, bias: Tensor | None, is_canonical: bool
    ) -> Tensor:
        out = linear(self, x, weight, bias, is_canonical)
        out[-1, -1] += 64
        return out

    monkeypatch.setattr(NativeProducts, "linear", one_wrong)
    assert not products.are_right()
    best = amx._library
    monkeypatch.setattr(kernels, "_is_right", kernels._is_right.__wrapped__)  # which has been asked before
    monkeypatch.setattr(kernels, "allows_tiles", lambda: True)
    monkeypatch.setattr(
        kernels, "native_library", lambda with_tiles=True: best if with_tiles else native_library()
    )
    below = NativeKernels()
    assert below.instructions == BELOW
    assert "wrong" in str(below.slower)


def test_where_the_system_refuses_tiles_the_next_lower_set_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    if not {*INSTRUCTION_SETS[BELOW]} <= processor_flags():
        pytest.skip(f"the processor has no {BELOW}")
    monkeypatch.delenv(ISA_VARIABLE, raising=False)
    for module in (build, kernels):
        monkeypatch.setattr(module, "processor_flags", lambda: AMX_FLAGS)
        monkeypatch.setattr(module, "allows_tiles", lambda: False)
    native_library.cache_clear()
    try:
        refused = NativeKernels()
        assert refused.instructions == BELOW
        assert "does not let this process" in str(refused.slower)
        native_library.cache_clear()
        monkeypatch.setenv(ISA_VARIABLE, BELOW)
        assert f"{ISA_VARIABLE}={BELOW} keeps them" in str(NativeKernels().slower)
    finally:
        native_library.cache_clear()


def test_without_the_processors_tiles_the_system_allows_none() -> None:
    if not processor_flags() >= AMX_FLAGS:
        assert not build.allows_tiles()


# The processor's own instructions, which most machines that run this have not

_BOTH = """
#include "amx.h"
#include <immintrin.h>
using namespace penstock::tiles;
extern "C" void ours(const Shapes& shapes, const void* from, void* to) {
    configure(shapes); zero<1>(); load<4>(from, 64); load<7>(from, 128); dot<1, 4, 7>(); store<1>(to, 64); release();
}
extern "C" void theirs(const Shapes& shapes, const void* from, void* to) {
    _tile_loadconfig(&shapes); _tile_zero(1); _tile_loadd(4, from, 64); _tile_loadd(7, from, 128);
    _tile_dpbf16ps(1, 4, 7); _tile_stored(1, to, 64); _tile_release();
}
"""


def compiled(source: Path, *options: str) -> str:
    """What the compiler makes of it for processors with AMX, as text."""
    command = [build._compiler(), *build._TARGETS[AMX], "-std=c++17", "-w", "-O1", *options, str(source)]
    run = subprocess.run([*command, "-o", "-"], capture_output=True, text=True, cwd=build.SOURCES)
    assert run.returncode == 0, run.stderr
    return run.stdout


@pytest.fixture
def compiler() -> str:
    try:
        return build._compiler()
    except build.NativeUnavailableError as error:
        pytest.skip(str(error))


def test_its_instructions_are_those_of_the_compilers_own_functions(compiler: str, tmp_path: Path) -> None:
    (tmp_path / "both.cpp").write_text(_BOTH)
    text = compiled(tmp_path / "both.cpp", "-S", f"-I{build.SOURCES}")
    lines = re.findall(r"^\s+((?:ldtilecfg|tile\w+|tdp\w+)\b.*)$", text, re.MULTILINE)
    instructions = [re.sub(r"%r\w+", "%register", " ".join(line.split())) for line in lines]
    assert len(instructions) == 14
    assert instructions[:7] == instructions[7:]


def test_the_products_source_compiles_for_it(compiler: str, tmp_path: Path) -> None:
    text = compiled(build.SOURCES / "quantised.cpp", "-S")
    for instruction in ("ldtilecfg", "tileloadd", "tdpbf16ps", "tilestored", "tilerelease"):
        assert instruction in text
    assert "tdpbf16ps" not in compiled(build.SOURCES / "quantised.cpp", "-S", EMULATED)
    (tmp_path / "products.s").write_text(text)
    object_file = tmp_path / "products.o"  # the assembler takes it, too
    assert subprocess.run([compiler, "-c", tmp_path / "products.s", "-o", object_file]).returncode == 0
