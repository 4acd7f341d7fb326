"""Reports about model folders: of the engine, from a process that may import transformers, and of
models that paint."""

import itertools
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from shared.errors import ConfigError
from shared.models.image_folder import (
    check_classes,
    find_family_of,
    is_image_folder,
    read_image_folder,
)

DIFFUSERS = "diffusers"
MODULE = "workers.engine.model.check_folders"
CHECK_TIMEOUT_S = 120.0


class TalkerReport(msgspec.Struct, frozen=True):
    """The part of a report about the talker of a folder."""

    num_thinker_layers: int
    longest: int
    kv_values_per_token: int


class Report(msgspec.Struct, frozen=True):
    """The report of `workers.engine.model.check_folders` about one folder.

    For a model that paints, the source is `diffusers`, and there are no keys, values and states.
    """

    family: str | None = None
    source: str | None = None
    reason: str | None = None
    dtype: str | None = None
    max_position_embeddings: int = 0
    kv_values_per_token: int = 0
    state_bytes_per_sequence: int = 0
    stored_as: str | None = None
    keeps_numbers: bool = False
    talker: TalkerReport | None = None
    divided: list[str] = []


def check_folders(
    folders: Sequence[Path],
    poolings: Sequence[str | None] = (),
    *,
    have_weights: bool = True,
    num_ranks: int = 1,
) -> list[Report]:
    """Return a report for each folder. `poolings` are their `models.NAME.pooling`, by default None.

    The report of the engine needs no weights. Raises ConfigError.
    """
    pairs = list(itertools.zip_longest(folders, poolings))
    others = [pair for pair in pairs if not is_image_folder(pair[0])]
    engines = iter(check_by_engine(others, num_ranks))
    return [
        _check_image_folder(folder, have_weights) if is_image_folder(folder) else next(engines)
        for folder, _ in pairs
    ]


def check_by_engine(pairs: Sequence[tuple[Path, str | None]], num_ranks: int = 1) -> list[Report]:
    """Return the engine's report for each folder and its pooling. Raises ConfigError."""
    if not pairs:
        return []
    words = [word for folder, pooling in pairs for word in (str(folder), pooling or "")]
    try:
        # Without a terminal, transformers cannot ask whether to run the code of a folder.
        done = subprocess.run(
            [sys.executable, "-P", "-m", MODULE, str(num_ranks), *words],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            timeout=CHECK_TIMEOUT_S,
            check=False,
        )
        return msgspec.json.decode(done.stdout, type=list[Report])
    except subprocess.TimeoutExpired as error:
        raise ConfigError(
            f"the check of the models took more than {CHECK_TIMEOUT_S:g} s", field="models"
        ) from error
    except msgspec.MsgspecError as error:
        reason = done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        raise ConfigError(f"the models cannot be checked: {reason}", field="models") from error


def _check_image_folder(folder: Path, have_weights: bool) -> Report:
    family = find_family_of(folder)
    name = None if family is None else family.name
    try:
        check_classes(folder)
        if not have_weights:
            return Report(name, DIFFUSERS)
        description = read_image_folder(folder)
    except ConfigError as error:
        reason = error.message.removeprefix("models.path: ").removeprefix(f"{folder} ")
        return Report(name, DIFFUSERS, reason)
    return Report(name, DIFFUSERS, dtype=description.dtype)
