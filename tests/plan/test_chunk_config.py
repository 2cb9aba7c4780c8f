import dataclasses
from typing import Any

import pytest

from penstock.errors import SettingError
from penstock.plan import ChunkedPrefillConfig, PrefillPriority, Span


def test_defaults() -> None:
    config = ChunkedPrefillConfig()
    assert (config.chunk_size, config.overlap, config.max_decode_steps) == (512, 0, 8)
    assert config.priority is PrefillPriority.PREFILL_FIRST
    assert (config.num_state_slots, config.with_overlap(1).num_state_slots) == (2, 4)


def test_the_whole_prompt_in_one_chunk_is_accepted() -> None:
    assert ChunkedPrefillConfig(chunk_size=0).chunk_size == 0


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        *(("chunk_size", value) for value in (-1, 1.0, 512.5, "512", True, False, None)),
        *(("overlap", value) for value in (-1, 1.0, "1", True, None, 512, 513)),
        *(("max_decode_steps", value) for value in (0, -1, 8.0, True, "8")),
        *(("priority", value) for value in ("", "fastest", "Interleaved", "prefill first", 1, None)),
    ],
)
def test_an_unaccepted_value_is_named_in_the_error(setting: str, value: Any) -> None:
    with pytest.raises(SettingError, match="give") as error:
        ChunkedPrefillConfig(**{setting: value})
    assert f"{setting}={value!r}" in str(error.value)


@pytest.mark.parametrize("chunk_size", [1, 2, 7])
def test_overlap_must_be_smaller_than_the_chunk(chunk_size: int) -> None:
    ChunkedPrefillConfig(chunk_size=chunk_size, overlap=chunk_size - 1)
    with pytest.raises(SettingError, match=f"overlap={chunk_size} .*chunk_size={chunk_size}"):
        ChunkedPrefillConfig(chunk_size=chunk_size, overlap=chunk_size)


def test_overlap_contradicts_a_whole_prompt() -> None:
    with pytest.raises(SettingError, match="overlap=3 contradicts chunk_size=0"):
        ChunkedPrefillConfig(chunk_size=0, overlap=3)
    with pytest.raises(SettingError, match="contradicts"):
        ChunkedPrefillConfig(chunk_size=0).with_overlap(1)


def test_with_returns_a_new_value_and_keeps_the_rest() -> None:
    config = ChunkedPrefillConfig(chunk_size=100, max_decode_steps=3)
    changed = config.with_overlap(10).with_priority("decode_priority")
    assert changed == ChunkedPrefillConfig(100, 10, PrefillPriority.DECODE_PRIORITY, 3)
    assert config == ChunkedPrefillConfig(chunk_size=100, max_decode_steps=3)
    with pytest.raises(SettingError, match="overlap=100"):
        config.with_overlap(100)
    with pytest.raises(SettingError, match="priority='no'"):
        config.with_priority("no")


def test_config_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        ChunkedPrefillConfig().chunk_size = 1  # type: ignore[misc]


@pytest.mark.parametrize("priority", PrefillPriority)
def test_priorities_have_names(priority: PrefillPriority) -> None:
    assert priority.value == priority.name.lower().replace("_", "-")
    assert PrefillPriority.parse(priority) is priority
    assert PrefillPriority.parse(priority.value) is priority
    assert PrefillPriority.parse(priority.value.replace("-", "_")) is priority


def test_an_unknown_priority_lists_the_known_ones() -> None:
    with pytest.raises(SettingError, match="prefill-first, interleaved, decode-priority"):
        PrefillPriority.parse("first")


def test_span_length() -> None:
    assert len(Span(3, 10)) == 7
    assert len(Span(9, 10)) == 1


@pytest.mark.parametrize(("start", "end"), [(-1, 2), (3, 3), (4, 3), (0, 1.0), (True, 2), ("0", 1)])
def test_span_refuses(start: Any, end: Any) -> None:
    with pytest.raises(SettingError, match="is not accepted"):
        Span(start, end)
