"""Tables of plain text, by rich: for every layer that prints some."""

import io
import sys
from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # rich is imported where a table is made: layers that print none of them do without it
    from rich.table import Table


def make_table(titles: Sequence[str], rows: Iterable[Sequence[str]], left: Collection[int] = ()) -> "Table":
    """Numbers to the right, the columns `left` to the left. Cells are taken as they are, without any markup."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, header_style="bold", padding=(0, 2, 0, 0), pad_edge=False)
    for index, title in enumerate(titles):
        table.add_column(Text(title), justify="left" if index in left else "right", no_wrap=True)
    for row in rows:
        table.add_row(*map(Text, row))
    return table


def table_lines(table: "Table") -> list[str]:
    """A table as plain text, however wide."""
    from rich.console import Console

    console = Console(file=io.StringIO(), width=1 << 16, color_system=None)
    with console.capture() as captured:
        console.print(table)
    return [line.rstrip() for line in captured.get().splitlines()]


def show_table(table: "Table") -> None:
    """On standard output: as wide as the terminal, else as wide as it is."""
    from rich.console import Console

    if sys.stdout.isatty():
        Console().print(table)
    else:
        print("\n".join(table_lines(table)))
