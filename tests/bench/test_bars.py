"""What a bar says of chosen numbers."""

import pytest

from penstock.bench.bars import Bar, check_bars
from penstock.bench.suites import SuiteName
from penstock.bench.systems import SystemName
from tests.bench.made_up import good_results, made_up_results

OURS, THEIRS = SystemName.PENSTOCK, SystemName.TRANSFORMERS


def missed(bars: list[Bar]) -> list[str]:
    return [bar.name for bar in bars if not bar.is_met]


def test_limits_are_kept_when_reached() -> None:
    assert Bar("b", 0.95, 0.95, is_lower_limit=True).is_met
    assert not Bar("b", 0.949, 0.95, is_lower_limit=True).is_met
    assert Bar("b", 1.05, 1.05, is_lower_limit=False).is_met
    assert not Bar("b", 1.051, 1.05, is_lower_limit=False).is_met


def test_good_results_meet_every_bar() -> None:
    bars = check_bars(good_results())
    assert missed(bars) == []
    # Three ratios against transformers and the tiles' cost at three lengths, memory, and the tokens.
    assert len(bars) == 4 * 3 + 1 + 3
    assert len({bar.name for bar in bars}) == len(bars)


def test_a_good_hybrid_meets_every_bar() -> None:
    bars = check_bars(good_results(SuiteName.HYBRID))
    assert missed(bars) == []
    # Token by token and transformers at one length, memory, and the tokens at two.
    assert len(bars) == 2 + 1 + 2


@pytest.mark.parametrize(
    ("name", "their_speed", "expected"),
    [
        (SystemName.PENSTOCK_TOKENWISE, 0.25, "Penstock over token by token, 1,000 tokens"),
        (SystemName.TRANSFORMERS, 1.02, "Penstock over transformers whole, 1,000 tokens"),
    ],
)
def test_a_slow_hybrid_is_missed(name: SystemName, their_speed: float, expected: str) -> None:
    def bars(length: int) -> list[Bar]:
        seconds = {(OURS, length): [1.0] * 3, (name, length): [1.0 / their_speed] * 3}
        return check_bars(made_up_results(seconds, suite=SuiteName.HYBRID))

    assert missed(bars(1000)) == [f"prefill tokens/s, {expected}"]
    # At other lengths it is a figure without a bar.
    assert missed(bars(4000)) == []


def test_a_hybrids_activations_must_not_grow() -> None:
    def bars(longer: float) -> list[Bar]:
        activations = {(OURS, 2000): [100.0] * 3, (OURS, 8000): [longer] * 3}
        return check_bars(made_up_results({}, activations=activations, suite=SuiteName.HYBRID))

    assert missed(bars(109)) == []
    assert missed(bars(111)) == ["activation memory, Penstock, 8,000 over 2,000 tokens"]


@pytest.mark.parametrize(
    ("ours", "theirs", "expected"),
    [
        (1.0, {SystemName.TRANSFORMERS: 0.9}, "over transformers whole, 2,048"),
        (1.0, {SystemName.TRANSFORMERS_CHUNKED: 1.05}, "over transformers chunked, 2,048"),
        (1.0, {SystemName.PENSTOCK_UNTILED: 0.9}, "tile grid over without, 2,048"),
    ],
)
def test_a_slow_prefill_is_missed(ours: float, theirs: dict[SystemName, float], expected: str) -> None:
    seconds = {(OURS, 2048): [ours] * 3} | {(name, 2048): [value] * 3 for name, value in theirs.items()}
    (name,) = missed(check_bars(made_up_results(seconds)))
    assert expected in name


def test_a_slow_decode_is_missed() -> None:
    seconds = {(OURS, 2048): [1.0] * 3, (THEIRS, 2048): [1.0] * 3}
    decode_s = {(OURS, 2048): [0.6] * 3, (THEIRS, 2048): [1.0] * 3}
    assert missed(check_bars(made_up_results(seconds, decode_s))) == [
        "decode tokens/s, Penstock over transformers, 2,048 tokens"
    ]


def test_activations_that_grow_with_the_prompt_are_missed() -> None:
    def bars(shorter: float, longer: float) -> list[Bar]:
        activations = {(OURS, 2048): [shorter] * 3, (OURS, 8000): [longer] * 3}
        return check_bars(made_up_results({}, activations=activations))

    assert missed(bars(20, 29)) == []
    assert len(missed(bars(20, 31))) == 1
    # Below what can be measured, in either direction.
    assert missed(bars(-0.3, 0.2)) == []
    assert len(missed(bars(-0.3, 20))) == 1


def test_memory_is_compared_only_where_both_lengths_were_measured() -> None:
    assert check_bars(made_up_results({}, activations={(OURS, 8000): [1.0]})) == []


def test_noise_is_passed_on() -> None:
    seconds = {(OURS, 512): [1.0, 2.0, 4.0], (THEIRS, 512): [8.0, 8.0, 8.0]}
    ratio, tokens = check_bars(made_up_results(seconds))
    assert (ratio.is_met, ratio.noise) == (True, "noisy")
    assert (tokens.is_met, tokens.noise) == (True, "")


def test_another_first_token_is_missed() -> None:
    seconds = {(name, 512): [1.0] * 3 for name in (OURS, SystemName.PENSTOCK_WHOLE)}
    results = made_up_results(seconds, token_ids={OURS: (5,), SystemName.PENSTOCK_WHOLE: (6,)})
    (name,) = missed(check_bars(results))
    assert "same first token" in name


def test_token_by_token_may_round_to_another_token() -> None:
    seconds = {(name, 512): [1.0] * 3 for name in (OURS, SystemName.PENSTOCK_TOKENWISE)}
    tokens = {OURS: (5,), SystemName.PENSTOCK_TOKENWISE: (6,)}
    assert missed(check_bars(made_up_results(seconds, token_ids=tokens))) == []


def test_limits_hold_for_the_settings_they_were_made_for() -> None:
    slow = {(OURS, 256): [9.0] * 3, (THEIRS, 256): [1.0] * 3}
    assert missed(check_bars(made_up_results(slow))) == []
    slow = {(OURS, 512): [9.0] * 3, (THEIRS, 512): [1.0] * 3}
    assert missed(check_bars(made_up_results(slow, chunk=64))) == []
    assert missed(check_bars(made_up_results(slow, dtype="float32"))) == []
    assert len(missed(check_bars(made_up_results(slow)))) == 1
