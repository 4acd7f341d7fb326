"""Tables of measured values on the terminal or in a file."""

from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table

from ops.harness import machine

FILE_WIDTH = 150

console = Console(highlight=False)
if not console.is_terminal:
    console.width = FILE_WIDTH


def print_table(
    title: str, columns: Sequence[str], rows: Iterable[Sequence[object]], num_texts: int = 1
) -> None:
    """Print a table, with the machine, its load and the commit that was measured.

    The first `num_texts` columns are texts, the others numbers.
    """
    table = Table(title=title, title_justify="left")
    for number, name in enumerate(columns):
        table.add_column(name, justify="left" if number < num_texts else "right")
    for row in rows:
        table.add_row(*map(str, row))
    console.print(table)
    console.print(machine.describe(), style="dim")
