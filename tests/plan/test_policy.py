from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import SettingError
from penstock.plan import ScheduleConfig, SchedulePolicy


def test_defaults() -> None:
    config = ScheduleConfig()
    assert config.policy is SchedulePolicy.MIXED
    assert (config.chunk_size, config.step_tokens, config.grid, config.auto_chunk) == (512, None, 1, False)
    assert (config.max_running, config.max_waiting) == (16, 256)
    assert (config.max_chunk_steps, config.max_decode_steps, config.max_overtakes) == (64, 8, 8)


def test_the_least_that_is_accepted() -> None:
    ScheduleConfig(
        chunk_size=1, max_running=1, max_waiting=1, max_chunk_steps=1, max_decode_steps=1, max_overtakes=0
    )
    assert ScheduleConfig(step_tokens=17).chunk_budget(16) == 1
    assert ScheduleConfig(max_running=1, step_tokens=2).chunk_budget(1) == 1


def test_a_sizer_may_let_a_step_have_one_prompt_only() -> None:
    assert ScheduleConfig(auto_chunk=True).longest_prompt_gap == 16
    with pytest.raises(SettingError, match=r"auto_chunk=True contradicts chunk_size=0"):
        ScheduleConfig(auto_chunk=True, chunk_size=0)


def test_decodes_leave_room_for_fewer_prompts() -> None:
    # Of 271 tokens 15 are decodes: 256 are left for four prompts; one less, and there is room for three.
    assert ScheduleConfig(step_tokens=271, chunk_size=256).longest_prompt_gap == 4
    assert ScheduleConfig(step_tokens=270, chunk_size=256).longest_prompt_gap == 6
    other = ScheduleConfig(policy=SchedulePolicy.INTERLEAVED, step_tokens=270, chunk_size=256)
    assert other.longest_prompt_gap == 2 * 4


@pytest.mark.parametrize("policy", SchedulePolicy)
def test_policies_have_names(policy: SchedulePolicy) -> None:
    assert policy.value == policy.name.lower().replace("_", "-")
    assert SchedulePolicy.parse(policy) is policy
    assert SchedulePolicy.parse(policy.value.replace("-", "_")) is policy
    assert ScheduleConfig(policy=policy.value).policy is policy  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        *(("policy", value) for value in ("", "fair", "Mixed", 1, None)),
        *(("chunk_size", value) for value in (-1, 1.0, "512", True, None)),
        *(("step_tokens", value) for value in (0, -1, 16, 600.0, True, "600")),
        *(
            (name, value)
            for name in ("max_running", "max_waiting", "max_chunk_steps", "max_decode_steps", "grid")
            for value in (0, -1, 1.0, True, None)
        ),
        *(("max_overtakes", value) for value in (-1, 1.0, True, None)),
    ],
)
def test_an_unaccepted_value_is_named_in_the_error(setting: str, value: Any) -> None:
    with pytest.raises(SettingError, match="give") as error:
        ScheduleConfig(**{setting: value})
    assert f"{setting}={value!r}" in str(error.value)


def test_settings_that_contradict_each_other() -> None:
    with pytest.raises(SettingError, match=r"chunk_size=100 .* grid=64"):
        ScheduleConfig(chunk_size=100, grid=64)
    with pytest.raises(SettingError, match=r"step_tokens=600 contradicts chunk_size=0"):
        ScheduleConfig(chunk_size=0, step_tokens=600)
    with pytest.raises(SettingError, match="at least 80"):
        ScheduleConfig(step_tokens=79, grid=64)
    assert ScheduleConfig(step_tokens=80, grid=64).chunk_budget(num_decodes=15) == 64


def test_budget_by_hand() -> None:
    assert ScheduleConfig().chunk_budget(16) == 512
    assert ScheduleConfig(step_tokens=512).chunk_budget(0) == 512
    assert ScheduleConfig(step_tokens=512).chunk_budget(5) == 507
    assert ScheduleConfig(step_tokens=512, grid=64).chunk_budget(5) == 448
    assert ScheduleConfig(chunk_size=0).chunk_budget(3) is None


@pytest.mark.parametrize(
    ("chunk_size", "grid", "expected"),
    [
        (512, 1, 128),
        (512, 64, 128),
        (2048, 1, 512),
        (300, 1, 64),
        (100, 1, 64),
        (7, 1, 64),
        (512, 256, 256),
        (480, 48, 96),
    ],
)
def test_shares_by_hand(chunk_size: int, grid: int, expected: int) -> None:
    assert ScheduleConfig(chunk_size=chunk_size, grid=grid).min_share == expected


@pytest.mark.parametrize(
    ("policy", "decode_gap", "prompt_gap"),
    [
        # 16 requests at most, 4 prompts in a step of 512: the last of 16 prompts is in the fourth step of chunks
        (SchedulePolicy.MIXED, 1, 4),
        (SchedulePolicy.INTERLEAVED, 2, 2 * 4),
        (SchedulePolicy.DECODE_PRIORITY, 2, (5 + 1) * 4),
        (SchedulePolicy.PREFILL_FIRST, 3 + 1, 4 + 2),  # decodes before the first and the fourth
    ],
)
def test_gaps_by_hand(policy: SchedulePolicy, decode_gap: int, prompt_gap: int) -> None:
    config = ScheduleConfig(policy=policy, max_chunk_steps=3, max_decode_steps=5)
    assert (config.longest_decode_gap, config.longest_prompt_gap) == (decode_gap, prompt_gap)


def test_whole_prompts_are_served_one_by_one() -> None:
    assert ScheduleConfig(chunk_size=0).longest_prompt_gap == 16
    assert ScheduleConfig(chunk_size=7).longest_prompt_gap == 16


configs = st.builds(
    ScheduleConfig,
    policy=st.sampled_from(SchedulePolicy),
    chunk_size=st.integers(0, 40).map(lambda units: 64 * units),
    max_running=st.integers(1, 40),
    max_chunk_steps=st.integers(1, 9),
    max_decode_steps=st.integers(1, 9),
    grid=st.sampled_from([1, 64]),
)


@given(configs, st.integers(0, 39))
def test_a_prompt_always_gets_a_chunk_of_a_step(config: ScheduleConfig, num_decodes: int) -> None:
    budget = config.chunk_budget(min(num_decodes, config.max_running - 1))
    assert budget is None or config.grid <= budget <= config.chunk_size
    assert budget is None or budget % config.grid == 0
    assert config.min_share % 64 == 0 == config.min_share % config.grid
    assert config.longest_decode_gap >= 1
    assert config.longest_prompt_gap <= config.max_running * max(2, config.max_decode_steps + 1)
