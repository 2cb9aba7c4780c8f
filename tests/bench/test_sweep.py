"""Laws of the sweep: turns really interleave, noise is refused and quiet times are not."""

import gc
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.bench.sweep import time_cells
from penstock.bench.sweep_report import render
from penstock.bench.sweep_results import SweepResults, SweepSettings, Timed
from penstock.bench.sweep_workload import Cell, Configuration, configurations
from penstock.bench.systems import OnToken, SystemName
from penstock.bench.timing import Pass
from penstock.measure.machine import this_machine
from penstock.measure.prompts import shuffled_rounds

SETTINGS = SweepSettings(
    model="a model",
    dtype="float32",
    chunks=(0, 128),
    lengths=(8, 16),
    baselines=(),
    repeats=2,
    decode_tokens=3,
    max_spread=0.15,
    seed=5,
)
MACHINE = this_machine()
CHUNKED = Configuration(SystemName.PENSTOCK, 128)
WHOLE = Configuration(SystemName.PENSTOCK_WHOLE, 0)
CELLS = [Cell(configuration, length) for configuration in (WHOLE, CHUNKED) for length in (8, 16)]


@pytest.fixture(autouse=True)
def _quick_collection() -> Iterator[None]:
    """Garbage is collected before every turn: among what is loaded by now it need not be looked for."""
    gc.freeze()
    yield
    gc.unfreeze()


class Recorder:
    """A system that keeps a common diary of its turns."""

    def __init__(self, configuration: Configuration, diary: list[Cell]) -> None:
        self.name = configuration.system
        self._configuration = configuration
        self._diary = diary

    def generate(self, prompt: Sequence[int], num_tokens: int, on_token: OnToken) -> int:
        self._diary.append(Cell(self._configuration, len(prompt)))
        for token in range(num_tokens):
            on_token(token)
        return 0


def test_every_cell_has_one_turn_in_every_round() -> None:
    diary: list[Cell] = []
    systems = {each: Recorder(each, diary) for each in (WHOLE, CHUNKED)}
    timings = time_cells(CELLS, systems, list(range(16)), SETTINGS, lambda line: None)
    counted = diary[len(systems) :]  # the warm-up aside
    assert [timed.cell for timed in timings] == counted
    assert [timed.index for timed in timings] == list(range(len(CELLS) * SETTINGS.repeats))
    for index in range(SETTINGS.repeats):
        turns = timings[index * len(CELLS) : (index + 1) * len(CELLS)]
        assert {timed.cell for timed in turns} == set(CELLS)
        assert {timed.done.round_index for timed in turns} == {index}
        assert all(len(timed.done.token_ids) == SETTINGS.decode_tokens for timed in turns)


@given(count=st.integers(1, 9), num_rounds=st.integers(1, 8), seed=st.integers(0, 99))
def test_rounds_are_whole_and_repeatable(count: int, num_rounds: int, seed: int) -> None:
    items = list(range(count))
    orders = list(shuffled_rounds(items, num_rounds, seed))
    assert all(sorted(order) == items for order in orders)
    assert orders == list(shuffled_rounds(items, num_rounds, seed))


def test_rounds_have_orders_of_their_own() -> None:
    items = list(range(8))
    orders = [tuple(order) for order in shuffled_rounds(items, 10, 0)]
    assert len(set(orders)) == 10
    assert orders != [tuple(order) for order in shuffled_rounds(items, 10, 1)]


def test_configurations() -> None:
    found = configurations((0, 128, "auto", 128), ("transformers", "llama.cpp"))
    assert [each.label for each in found] == [
        "Penstock, whole",
        "Penstock, chunk 128",
        "Penstock, auto",
        "transformers, whole",
        "transformers, chunk 128",
        "llama.cpp, whole",
        "llama.cpp, batch 128",
    ]
    assert [each.system for each in configurations(("auto",))] == [SystemName.PENSTOCK_AUTO]
    assert len(set(found)) == len(found)


def results_of(seconds: dict[Cell, Sequence[float]], decode_s: Sequence[float] = (0.1,) * 9) -> SweepResults:
    timings = [
        Timed(
            cell,
            index,
            Pass(cell.configuration.system, index, cell.prompt_tokens, (1, 2, 3), value, decode_s[index]),
        )
        for cell, values in seconds.items()
        for index, value in enumerate(values)
    ]
    return SweepResults(MACHINE, SETTINGS, tuple(timings), (), 1.0)


QUIET = (1.0, 1.02, 0.99, 1.01, 1.3)  # one wild value does not move the quartiles
WILD = (1.0, 1.4, 0.9, 1.8, 1.1)


def test_planted_noise_is_refused_where_it_is() -> None:
    noisy_cell, *others = CELLS
    results = results_of({noisy_cell: WILD, **dict.fromkeys(others, QUIET)})
    assert {each.cell for each in results.noisy} == {noisy_cell}
    assert results.figure(noisy_cell, "first_token_s") is None
    page = render(results)
    assert page.count("noisy") >= 3  # in each table, and in the line that says why
    assert "more --repeats" in page
    plain = {
        (each["system"], each["prompt_tokens"]): each
        for each in json.loads(json.dumps(results.to_dict()))["cells"]
    }
    refused = plain[noisy_cell.configuration.system, noisy_cell.prompt_tokens]
    assert refused["first_token_s"]["is_noisy"]
    assert "median" not in refused["first_token_s"]
    assert refused["first_token_s"]["values"] == list(WILD)
    assert refused["tokens_per_s"] is None
    kept = plain[others[0].configuration.system, others[0].prompt_tokens]
    assert kept["first_token_s"]["median"] == 1.01
    assert kept["tokens_per_s"] == pytest.approx(16 / 1.01)


def test_quiet_times_are_reported() -> None:
    results = results_of(dict.fromkeys(CELLS, QUIET))
    assert results.noisy == []
    assert "noisy" not in render(results)
    assert "1.010 (1.000 to 1.020)" in render(results)


def test_noise_of_decoding_alone_spares_the_first_token() -> None:
    results = results_of(dict.fromkeys(CELLS, QUIET), decode_s=(0.1, 2.0, 0.5, 3.0, 0.2))
    assert {each.quantity for each in results.noisy} == {"total_s"}
    assert results.figure(CELLS[0], "first_token_s") is not None


@given(
    values=st.lists(st.floats(0.5, 2.0), min_size=3, max_size=9),
    limit=st.sampled_from([0.01, 0.05, 0.15, 0.5]),
)
def test_the_limit_is_what_decides(values: list[float], limit: float) -> None:
    cell = CELLS[0]
    results = results_of({cell: values})
    results = replace(results, settings=replace(SETTINGS, max_spread=limit))
    spread = results.spread(cell, "first_token_s")
    assert (results.figure(cell, "first_token_s") is None) == (spread.relative > limit)
