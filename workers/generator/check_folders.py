"""Check of the settings and the shapes in folders of diffusers, as JSON on stdout.

`pagemill check`, `models` and `up`, which do not import torch themselves, run `python -m
workers.generator.check_folders FOLDER...`. The answer has the reason of each refusal, or null. The
command reads small files and the headers of weights, and runs no code of a folder.
"""

import contextlib
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from shared.errors import ConfigError
from shared.models.image_folder import read_image_folder
from workers.generator.diffusion.checks import check_folder


def main(folders: Sequence[str]) -> None:
    with contextlib.redirect_stdout(sys.stderr):
        reasons = [find_reason(Path(folder)) for folder in folders]
    sys.stdout.buffer.write(msgspec.json.encode(reasons))


def find_reason(folder: Path) -> str | None:
    """Return the reason to refuse a folder; None for a folder that can be loaded."""
    try:
        check_folder(read_image_folder(folder))
    except ConfigError as error:
        return error.message
    return None


if __name__ == "__main__":
    main(sys.argv[1:])
