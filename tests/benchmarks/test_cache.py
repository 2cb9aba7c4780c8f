"""The prefix cache: whole runs on tiny models, and made-up numbers."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import pytest

from benchmarks.harness import NOISY, NOISY_SHARE, RATIOS, Results
from benchmarks.suites import cache
from benchmarks.suites.cache import (
    COLD,
    DISK,
    FIRST_TOKEN,
    MEMORY,
    RESUMED,
    WAYS,
    WRITING,
    Workload,
    file_system,
)
from tests.benchmarks.made_up import results_of, run

GOOD = {
    COLD: (10.0, 10.2, 10.4),
    WRITING: (10.3, 10.4, 10.6),
    RESUMED: (6.0, 6.1, 6.1),
    DISK: (0.5, 0.51, 0.51),
    MEMORY: (0.15, 0.15, 0.16),
}


@pytest.mark.parametrize("family", ["llama", "hybrid"])
def test_every_way_to_a_first_token(family: str, tiny: Path, tiny_hybrid: Path, tmp_path: Path) -> None:
    model = tiny if family == "llama" else tiny_hybrid
    arguments = ["cache", "--model", str(model), "--prompt-tokens", "320", "--chunk", "64", "--repeats", "1"]
    status, results = run([*arguments, "--dtype", "float32", "--check"], tmp_path / "cache.json")
    assert status == 0
    assert [figure.system for figure in results.of(FIRST_TOKEN)] == list(WAYS)
    assert len(results.facts) == 10  # tokens from the cache, and answers, of each way
    assert [fact.name for fact in results.facts if not fact.holds] == []
    assert len(results.of(RATIOS)) == 4
    assert results.bars == []
    assert "answers" not in results.traces


def made_up(prompt_tokens: int = 8000, **changes: Sequence[float]) -> Results:
    results = results_of("cache", workload=asdict(Workload(prompt_tokens)))
    values = {**GOOD, **{globals()[name]: numbers for name, numbers in changes.items()}}
    for way, numbers in values.items():
        for index, seconds in enumerate(numbers):
            results.add(
                FIRST_TOKEN, "seconds", "s", seconds, system=way, round_index=index, most_spread=NOISY_SHARE
            )
    cache.compare(results)
    results.bars = cache._bars(results)
    return results


@pytest.mark.parametrize(
    ("changes", "missed"),
    [
        ({}, []),
        ({"MEMORY": (0.21,) * 3}, [cache.COLD_OVER_MEMORY]),
        ({"DISK": (1.1,) * 3}, [cache.COLD_OVER_DISK]),
        ({"WRITING": (10.6, 10.8, 11.0)}, [cache.WRITING_OVER_COLD]),
    ],
)
def test_bars_are_missed_one_by_one(changes: dict[str, tuple[float, ...]], missed: list[str]) -> None:
    results = made_up(8000, **changes)
    assert len(results.bars) == 3
    assert [bar.name for bar in results.bars if not bar.is_met] == missed
    assert made_up(7999, **changes).bars == []


def test_noise_is_an_exit_status_and_writing_is_judged_by_less() -> None:
    assert made_up().status(check=True) == 0
    loud = made_up(8000, DISK=(0.4, 0.5, 0.6))
    assert [figure.system for figure in loud.noisy] == [DISK]
    assert loud.status(check=True) == NOISY
    # Ratios of 0.95, 1.0 and 1.1: near enough for anything else.
    cost = made_up(8000, COLD=(10.0,) * 3, WRITING=(9.5, 10.0, 11.0))
    assert [figure.system for figure in cost.noisy] == [cache.WRITING_OVER_COLD]
    assert made_up(7999, COLD=(10.0,) * 3, WRITING=(9.5, 10.0, 11.0)).noisy == []


def test_an_answer_that_differs_from_the_cold_one_is_seen() -> None:
    results = made_up()
    answers = [[0, COLD, [1, 2]], [0, DISK, [1, 2]], [1, COLD, [3, 4]], [1, DISK, [3, 5]]]
    results.traces["answers"] = answers
    cache._judge_answers(results)
    assert [fact.name for fact in results.facts if not fact.holds] == [
        f"{DISK}, round 2: the answer is that of the cold run"
    ]


def test_tokens_that_can_come_from_the_cache() -> None:
    """Whole blocks of 64, and never the last token."""
    assert [Workload(n, 64).shareable_tokens for n in (128, 129, 192, 193)] == [64, 128, 128, 192]
    assert Workload(192, 64).remembered_tokens(has_state=False) == 191
    assert Workload(192, 64).remembered_tokens(has_state=True) == 128
    assert Workload(200, 64).remembered_tokens(has_state=False) == 192


def test_the_kind_of_a_file_system(tmp_path: Path) -> None:
    mounts = tmp_path / "mounts"
    mounts.write_text(f"a / ext4 rw\nb {tmp_path} tmpfs rw\nc {tmp_path}/other xfs rw\nshort\n")
    assert file_system(tmp_path / "folder", mounts) == "tmpfs"
    assert file_system(Path("/"), mounts) == "ext4"
    assert file_system(tmp_path, tmp_path / "nowhere") is None
