"""What a model's threads become, beside what torch was told before."""

from collections.abc import Iterator

import pytest
import torch

from penstock.engine import llm
from penstock.plan.settings import ThreadsSetting


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """torch as nobody has told it anything, with 3 threads."""
    before = torch.get_num_threads()
    monkeypatch.setattr(llm, "_OWN_THREADS", 3)
    torch.set_num_threads(3)
    yield 3
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        (ThreadsSetting(2, "default", ""), 2),
        (ThreadsSetting(8, "default", ""), 3),
        (ThreadsSetting(5, "argument", ""), 5),
        (ThreadsSetting(5, "environment", ""), 5),
        (ThreadsSetting(None, "environment", "OMP_NUM_THREADS"), 3),
    ],
)
def test_a_setting_applies(own: int, setting: ThreadsSetting, expected: int) -> None:
    llm._set_threads(setting)
    assert torch.get_num_threads() == expected


def test_what_a_caller_told_torch_stays_unless_something_is_asked_for(own: int) -> None:
    torch.set_num_threads(4)
    llm._set_threads(ThreadsSetting(2, "default", ""))
    assert torch.get_num_threads() == 4
    llm._set_threads(ThreadsSetting(2, "argument", ""))
    assert torch.get_num_threads() == 2
