"""Reports about model folders: of the engine, from a process that may import transformers, and of
models that paint."""

import itertools
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

from shared.errors import ConfigError
from shared.models.image_folder import (
    check_classes,
    find_family_of,
    is_image_folder,
    read_image_folder,
)

T = TypeVar("T")
DIFFUSERS = "diffusers"
MODULE = "workers.engine.model.check_folders"
IMAGE_MODULE = "workers.generator.check_folders"
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
    ranks: Sequence[int] = (),
    *,
    have_weights: bool = True,
) -> list[Report]:
    """Return a report for each folder. `poolings` are their `models.NAME.pooling`, by default None,
    and `ranks` the numbers of processes that share their models, by default 1.

    The report of the engine needs no weights. Raises ConfigError.
    """
    rows = list(itertools.zip_longest(folders, poolings, ranks))
    others = [(path, pooling, n or 1) for path, pooling, n in rows if not is_image_folder(path)]
    engines = iter(check_by_engine(others))
    images = iter(_check_image_folders(list(filter(is_image_folder, folders)), have_weights))
    return [next(images if is_image_folder(folder) else engines) for folder in folders]


def check_by_engine(rows: Sequence[tuple[Path, str | None, int]]) -> list[Report]:
    """Return the engine's report for each folder, its pooling and its number of ranks.

    Raises ConfigError.
    """
    if not rows:
        return []
    words = [str(word or "") for row in rows for word in row]
    return _run(MODULE, words, list[Report])


def _run(module: str, words: Sequence[str], kind: type[T]) -> T:
    """Return the answer of a module that loads libraries of models. Raises ConfigError."""
    try:
        # Without a terminal, transformers cannot ask whether to run the code of a folder.
        done = subprocess.run(
            [sys.executable, "-P", "-m", module, *words],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            timeout=CHECK_TIMEOUT_S,
            check=False,
        )
        return msgspec.json.decode(done.stdout, type=kind)
    except subprocess.TimeoutExpired as error:
        raise ConfigError(
            f"the check of the models took more than {CHECK_TIMEOUT_S:g} s", field="models"
        ) from error
    except msgspec.MsgspecError as error:
        reason = done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        raise ConfigError(f"the models cannot be checked: {reason}", field="models") from error


def _check_image_folders(folders: Sequence[Path], have_weights: bool) -> list[Report]:
    """Return a report for each folder: from its small files, then from its classes."""
    reports = [_check_image_folder(folder, have_weights) for folder in folders]
    passed = [n for n, report in enumerate(reports) if have_weights and report.reason is None]
    reasons = check_by_generator([folders[n] for n in passed])
    for n, reason in zip(passed, reasons, strict=True):
        if reason is not None:
            reason = _without_name(reason, folders[n])
            reports[n] = msgspec.structs.replace(reports[n], reason=reason)
    return reports


def check_by_generator(folders: Sequence[Path]) -> list[str | None]:
    """Return the generator's reason to refuse each folder of diffusers. Raises ConfigError."""
    words = [str(folder) for folder in folders]
    return _run(IMAGE_MODULE, words, list[str | None]) if folders else []


def _without_name(message: str, folder: Path) -> str:
    """Return the reason of a refusal without the name of the folder."""
    return message.removeprefix("models.path: ").removeprefix(str(folder)).lstrip("/ ")


def _check_image_folder(folder: Path, have_weights: bool) -> Report:
    family = find_family_of(folder)
    name = None if family is None else family.name
    try:
        check_classes(folder)
        if not have_weights:
            return Report(name, DIFFUSERS)
        description = read_image_folder(folder)
    except ConfigError as error:
        return Report(name, DIFFUSERS, _without_name(error.message, folder))
    return Report(name, DIFFUSERS, dtype=description.dtype)
