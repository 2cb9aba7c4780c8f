"""The options of `bench gpu`."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from penstock.bench.gpu_workload import GPU, Section
from penstock.bench.options import count

_OUTPUT = Path("bench-results") / f"{GPU}.json"
_USUAL = tuple(section for section in Section if section is not Section.SWEEP)


def parse_gpu_options(arguments: Sequence[str]) -> argparse.Namespace:
    """Sections are in the order in which they run. Where results come from files, they go beside the first."""
    options = _parser().parse_args(arguments)
    wanted = {*options.cases, *([Section.SWEEP] if options.sweep else [])}
    options.sections = [section for section in Section if section in wanted]
    options.output = options.output or (options.plot_from[0] if options.plot_from else _OUTPUT)
    return options


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"python -m penstock.bench {GPU}",
        description="Penstock on one NVIDIA GPU, in bfloat16, with random weights of published shapes: time to the "
        "first token beside transformers, decodes, memory, starting, the same bits, what tiles cost, and where "
        "the time goes. Takes about eight minutes on an H200.",
    )
    add = parser.add_argument
    add(
        "--cases",
        type=_sections,
        default=_USUAL,
        metavar="C,C",
        help=f"of {', '.join(Section)} (all but {Section.SWEEP})",
    )
    add("--sweep", action="store_true", help="more chunk sizes, too, for the picture")
    add("--repeats", type=count, default=5, metavar="N", help="of every prompt (%(default)s)")
    add("--no-peer", action="store_true", help="without transformers")
    add(
        "--peer-limit",
        type=count,
        default=65_536,
        metavar="N",
        help="tokens of the longest prompt that transformers reads (%(default)s: of 131,072 it takes 24 s a pass)",
    )
    add("--check", action="store_true", help="exit with 1 where a bar is missed or was not measured")
    add("--out", dest="output", type=Path, metavar="FILE", help=f"results as JSON ({_OUTPUT})")
    add(
        "--plot", type=Path, metavar="FILE", help="a picture (beside the JSON, where matplotlib is installed)"
    )
    add(
        "--plot-from",
        nargs="+",
        type=Path,
        metavar="FILE",
        help="measure nothing: table and picture of these results, the later ones' sections before the earlier ones'",
    )
    return parser


def _sections(text: str) -> tuple[Section, ...]:
    try:
        return tuple(Section(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a list of some of {', '.join(Section)}, with commas between"
        ) from None
