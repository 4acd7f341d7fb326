"""The command `pagemill completion`."""

from importlib import import_module
from typing import Literal

from workers.cli.terminal import write_text


def completion(shell: Literal["bash", "zsh", "fish"], /) -> None:
    """Print the script that completes commands and options in a shell.

    Parameters
    ----------
    shell
        Shell that reads the script.
    """
    # The application imports this module by its name, so an import at the top would be a cycle.
    app = import_module("workers.__main__").app
    write_text(app.generate_completion(shell=shell))
