"""Whatever a worker's bits depend on is its driver's, or it is refused by name; and one law of rows holds for all."""

import shutil
from pathlib import Path

import pytest
import torch

from penstock.engine import fingerprint
from penstock.engine.stages import joining
from penstock.engine.stages.joining import BITS_ALONE, check_parts, common_parts, join_laws
from penstock.errors import StageRefusedError
from penstock.plan.grids import RowLaw
from tests.oracle import load_model, make_oracle

FLOOR_4, FLOOR_16 = RowLaw(512, 4), RowLaw(512, 16)
GPU = RowLaw(512, 16, row_grid=16)


def test_a_worker_like_the_driver_is_let_in_and_any_other_refused_by_name(tmp_path: Path) -> None:
    model = load_model(make_oracle("llama").folder)
    folder = Path(shutil.copytree(make_oracle("llama").folder, tmp_path / "copy"))
    ours = common_parts(make_oracle("llama").folder, model, "auto", same_machine=False)
    theirs = common_parts(folder, model, "auto", same_machine=False)
    assert check_parts(0, "host:1", ours, theirs, mixed=False) == ()  # the same bytes elsewhere
    for name in ours:
        for changed in ({**theirs, name: "another"}, {key: theirs[key] for key in theirs if key != name}):
            with pytest.raises(StageRefusedError, match=f"other {name} ") as refused:
                check_parts(0, "host:1", ours, changed, mixed=False)
            assert (refused.value.stage, refused.value.address) == (0, "host:1")
            if name in BITS_ALONE:
                assert check_parts(0, "host:1", ours, changed, mixed=True) == (name,)
            else:
                with pytest.raises(StageRefusedError, match=name):
                    check_parts(0, "host:1", ours, changed, mixed=True)


def test_each_part_tells_what_it_is_called_after(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Path(shutil.copytree(make_oracle("llama").folder, tmp_path / "copy"))
    model = load_model(folder)

    def differing(form: str = "auto", *, same_machine: bool = True) -> set[str]:
        again = common_parts(folder, model, form, same_machine=same_machine)
        return {name for name in before if again[name] != before[name]}

    before = common_parts(folder, model, "auto", same_machine=True)
    assert differing() == set()
    assert differing("int8") == {"form of weights"}
    with monkeypatch.context() as patch:
        patch.setattr(joining, "code_digest", lambda *more: "other")
        assert differing() == {"code"}
    with monkeypatch.context() as patch:
        patch.setattr(joining, "processor_features", lambda: {"ONEDNN_MAX_CPU_ISA": "AVX2"})
        assert differing() == {"processor"}
    with monkeypatch.context() as patch:
        patch.setattr(model.kernels, "libraries", "other", raising=False)
        assert differing() == {"libraries"}
    # Another file in its place, of the same bytes: on one machine that is noticed without a look into it.
    weights = folder / "model.safetensors"
    content = weights.read_bytes()
    weights.unlink()
    weights.write_bytes(content)
    assert differing() == {"weights"}
    before = common_parts(folder, model, "auto", same_machine=False)
    assert differing(same_machine=False) == set()
    weights.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert differing(same_machine=False) == {"weights"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_threads_count_where_bits_may_depend_on_them(dtype: torch.dtype) -> None:
    model = load_model(make_oracle("llama").folder, dtype)
    folder, num_threads = make_oracle("llama").folder, torch.get_num_threads()
    before = common_parts(folder, model, "auto", same_machine=True)
    try:
        torch.set_num_threads(num_threads + 1)
        after = common_parts(folder, model, "auto", same_machine=True)
    finally:
        torch.set_num_threads(num_threads)
    assert (before == after) == (dtype == torch.bfloat16)


def test_the_code_of_stages_counts() -> None:
    assert fingerprint.code_digest() != fingerprint.code_digest("engine/stages")


@pytest.mark.parametrize(
    "laws",
    [
        [FLOOR_4, FLOOR_4],
        [FLOOR_4, FLOOR_16, FLOOR_4],
        [
            RowLaw(512, 32, avoided_rows=(48, 96), row_grid=16),
            RowLaw(512, 48, avoided_rows=(64,), row_grid=16),
        ],
        [FLOOR_16, RowLaw(512, 128, row_slab=128)],
        [FLOOR_16, RowLaw(512, 128, row_slab=128, expert_slab=32)],
    ],
)
def test_a_joined_law_holds_on_every_stage(laws: list[RowLaw]) -> None:
    joined = join_laws(laws)
    assert joined == join_laws([*reversed(laws)]) == join_laws([joined, *laws])
    for num_rows in range(1, 700):
        for padded in (joined.padded_rows(num_rows), joined.padded_expert_rows(num_rows)):
            assert padded >= num_rows
            for law in laws:
                has_slab = law.row_slab or (law.expert_slab and joined.expert_slab == law.expert_slab)
                assert padded not in law.avoided_rows
                assert padded % (joined.expert_slab or joined.row_slab or 1) == 0 if has_slab else True
                assert has_slab or padded >= law.row_floor


@pytest.mark.parametrize(
    "laws",
    [
        [FLOOR_4, RowLaw(256, 4)],
        [FLOOR_4, GPU],
        [RowLaw(512, 128, row_slab=128), RowLaw(512, 256, row_slab=256)],
        [RowLaw(512, 128, row_slab=128), RowLaw(512, 256)],
        [RowLaw(512, 128, row_slab=128, expert_slab=32), RowLaw(512, 64)],
    ],
)
def test_laws_without_a_common_one_are_refused(laws: list[RowLaw]) -> None:
    with pytest.raises(ValueError, match=r"differ|slabs"):
        join_laws(laws)
