"""Tables of measured values on the terminal or in a file."""

from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table

from ops.harness import machine

FILE_WIDTH = 150

console = Console(highlight=False)
if not console.is_terminal:
    console.width = FILE_WIDTH


def make_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> Table:
    """Return a table whose first column is text and whose other columns are numbers."""
    table = Table(title=title, title_justify="left")
    for number, name in enumerate(columns):
        table.add_column(name, justify="right" if number else "left")
    for row in rows:
        table.add_row(*map(str, row))
    return table


def print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print a table, with the machine, its load and the commit that was measured."""
    console.print(make_table(title, columns, rows))
    console.print(machine.describe(), style="dim")
