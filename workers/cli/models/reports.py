"""Reports of the engine about model folders, from a process that may import transformers."""

import itertools
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from shared.errors import ConfigError

MODULE = "workers.engine.model.check_folders"
CHECK_TIMEOUT_S = 120.0


class TalkerReport(msgspec.Struct, frozen=True):
    """The part of a report about the talker of a folder."""

    num_thinker_layers: int
    longest: int
    kv_values_per_token: int


class Report(msgspec.Struct, frozen=True):
    """The report of `workers.engine.model.check_folders` about one folder."""

    family: str | None
    source: str | None
    reason: str | None
    dtype: str | None
    max_position_embeddings: int
    kv_values_per_token: int
    state_bytes_per_sequence: int
    stored_as: str | None
    keeps_numbers: bool
    talker: TalkerReport | None


def check_folders(folders: Sequence[Path], poolings: Sequence[str | None] = ()) -> list[Report]:
    """Return a report for each folder. `poolings` are their `models.NAME.pooling`, by default None.

    Raises ConfigError.
    """
    if not folders:
        return []
    pairs = itertools.zip_longest(map(str, folders), (pooling or "" for pooling in poolings))
    try:
        # Without a terminal, transformers cannot ask whether to run the code of a folder.
        done = subprocess.run(
            [sys.executable, "-P", "-m", MODULE, *(word or "" for pair in pairs for word in pair)],
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
