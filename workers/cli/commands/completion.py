"""The command `pagemill completion`."""

from typing import Literal

from workers.__main__ import app
from workers.cli.terminal import write_text


def completion(shell: Literal["bash", "zsh", "fish"], /) -> None:
    """Print the script that completes commands and options in a shell.

    Parameters
    ----------
    shell
        Shell that reads the script.
    """
    write_text(app.generate_completion(shell=shell))
