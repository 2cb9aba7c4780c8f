"""`python -m benchmarks.pipeline docs/distributed.png`: what the clock says of up to 64 machines and a million
tokens, as a table for docs/distributed.md and a picture. Arithmetic alone: it needs no model and no torch."""

import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from penstock.pictures import COLOURS, finish, new_figure, plain
from penstock.plan import StepTimeCoefficients, Workspace
from penstock.plan.model import ModelConfig
from penstock.plan.pipeline import Link, Machine, coefficients_of_speed, work_of_pair, work_of_token
from penstock.plan.stage_plan import StagePlan, StageQuestion, make_stage_plan
from penstock.plan.units import format_rate, parse_rate

EIGHT_B = ModelConfig(36, 4096, 12_288, 32, 8, 128, 151_936)  # Qwen3 8B
SEVENTY_B = ModelConfig(80, 8192, 28_672, 64, 8, 128, 128_256)  # Llama 3 70B
# Fitted to what an H200 was measured to take for 8,192, 32,768 and 131,072 tokens of the 8B: 0.22, 1.24 and 11.1 s.
H200 = StepTimeCoefficients(1.5e-3, 2.23e-5, 9.5e-10)
LINKS = ("1Gb/s", "10Gb/s", "100Gb/s")
_COLOURS = dict(zip(("100 Mb/s", "1 Gb/s", "10 Gb/s", "100 Gb/s"), COLOURS, strict=False))


@dataclass(frozen=True)
class Case:
    """A model on machines of one kind, a prompt, and the links to try."""

    name: str
    config: ModelConfig
    times: StepTimeCoefficients
    prompt_tokens: int
    num_stages: int
    links: tuple[str, ...] = LINKS

    @property
    def title(self) -> str:
        return f"{self.name}, {self.prompt_tokens:,} tokens"

    def plan(self, link: str) -> StagePlan:
        machines = (Machine(),) * self.num_stages
        joined = Link(parse_rate(link))
        return make_stage_plan(
            StageQuestion(
                self.config,
                self.prompt_tokens,
                machines,
                Workspace("cuda"),
                joined,
                coefficients=self.times,
            )
        )


def _scaled(times: StepTimeCoefficients, config: ModelConfig, other: ModelConfig) -> StepTimeCoefficients:
    """The same machine with another model, as far as work goes."""
    return StepTimeCoefficients(
        times.constant * other.num_layers / config.num_layers,
        times.per_token * work_of_token(other) / work_of_token(config),
        times.per_token_past * work_of_pair(other) / work_of_pair(config),
    )


def cases() -> list[Case]:
    million = 1 << 20
    slow = coefficients_of_speed(EIGHT_B, 60, 32_768)
    return [
        Case("8B, CPUs at 60 tokens/s", EIGHT_B, slow, 32_768, 32, ("100Mb/s", "1Gb/s")),
        *(Case("8B, H200s", EIGHT_B, H200, num_tokens, 32) for num_tokens in (32_768, 131_072, million)),
        Case("70B, H200s", SEVENTY_B, _scaled(H200, EIGHT_B, SEVENTY_B), million, 64),
    ]


def table(plans: Sequence[tuple[Case, StagePlan]]) -> Iterator[str]:
    """Lines of Markdown: a row for each case and link, a column for each number of stages."""
    counts = sorted({row.num_stages for _, plan in plans for row in plan.times if row.num_stages > 1})
    yield "| | one machine | link | " + " | ".join(f"{count} stages" for count in counts) + " |"
    yield "|" + "---|" * (len(counts) + 3)
    for case, plan in plans:
        by_count = {row.num_stages: row for row in plan.times}
        cells = [
            f"{by_count[count].speed_up:.2f}x{' (link)' * by_count[count].is_link_bound}"
            if count in by_count
            else ""
            for count in counts
        ]
        assert plan.link_bytes_per_s is not None
        first = [
            case.title,
            f"{plan.times[0].first_token_s:,.{0 if plan.times[0].first_token_s >= 100 else 2}f} s",
            format_rate(plan.link_bytes_per_s),
        ]
        yield "| " + " | ".join([*first, *cells]) + " |"


def picture(plans: Sequence[tuple[Case, StagePlan]], path: Path) -> None:
    """A panel for each case, both axes in powers of two: a line for each link, and what is ideal."""
    titles = list(dict.fromkeys(case.title for case, _ in plans))
    figure = new_figure(3.2 * len(titles), 4.6)
    axes = figure.subplots(1, len(titles), sharey=True)
    for axis, title in zip(axes, titles, strict=True):
        shown = [plan for case, plan in plans if case.title == title]
        counts = [row.num_stages for row in shown[0].times]
        axis.plot(counts, counts, ":", color="#777777", linewidth=1.2, label="as many times as fast")
        for plan in shown:
            assert plan.link_bytes_per_s is not None
            rate = format_rate(plan.link_bytes_per_s)
            speed_ups = [row.speed_up for row in plan.times]
            how = {"color": _COLOURS[rate], "marker": "o", "markersize": 4, "linewidth": 1.6}
            axis.plot(counts, speed_ups, label=f"{rate} between stages", **how)
        axis.set_xscale("log", base=2)
        axis.set_xticks(counts, [str(count) for count in counts])
        plain(axis)
        axis.set_yscale("log", base=2)
        axis.yaxis.set_major_formatter(lambda value, _: f"{value:g}x")
        axis.set_title(title.replace(", ", "\n"), fontsize=9, fontweight="bold")
        axis.set_xlabel("stages")
    title = "How many times as soon as on one machine the first token comes, by the pipeline's clock"
    finish(figure, axes, title, path)


def main(arguments: Sequence[str]) -> int:
    begun = time.perf_counter()
    plans = [(case, case.plan(link)) for case in cases() for link in case.links]
    seconds = time.perf_counter() - begun
    print("\n".join(table(plans)))
    print(f"{len(plans)} plans in {seconds:.2f} s", file=sys.stderr)
    for argument in arguments[:1]:
        picture(plans, Path(argument))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
