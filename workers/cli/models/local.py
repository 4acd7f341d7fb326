"""Models on this machine: folders in Hugging Face format, and those of the hub's cache."""

import math
import os
import re
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from shared.errors import ConfigError
from shared.vision.weight_files import INDEX, read_headers, read_index

# Names of weights: the matrices in a decoder's layers are its linear layers.
_IN_DECODER = re.compile(r"(^|\.)layers\.\d+\.")
_IN_TOWER = re.compile(r"(^|\.)(visual|vision_)")


@dataclass(frozen=True, slots=True)
class LocalModel:
    name: str
    folder: Path
    pooling: str | None = None
    """The model's `models.NAME.pooling`."""


def check_endpoint() -> None:
    """Raises ConfigError for an HF_ENDPOINT with which the hub's library cannot be imported."""
    try:
        urlsplit(os.environ.get("HF_ENDPOINT", ""))
    except ValueError as error:
        raise ConfigError(f"it is no URL: {error}", field="HF_ENDPOINT") from error


def list_cached() -> list[LocalModel]:
    """Return the models of the hub's cache, each with the commit that is served.

    Raises ConfigError.
    """
    check_endpoint()
    from huggingface_hub import CacheNotFound, scan_cache_dir

    try:
        repos = scan_cache_dir().repos
    except (CacheNotFound, ValueError):
        return []
    models = []
    for repo in sorted(repos, key=lambda repo: repo.repo_id):
        revisions = sorted(
            repo.revisions, key=lambda revision: ("main" in revision.refs, revision.last_modified)
        )
        if repo.repo_type == "model" and revisions:
            models.append(LocalModel(repo.repo_id, revisions[-1].snapshot_path))
    return models


def is_folder(given: str) -> bool:
    """Return whether this is a path, and not a name in the hub's cache."""
    return given.startswith((".", "/", "~")) or (Path(given) / "config.json").is_file()


def find_local(given: str) -> LocalModel | None:
    """Return the model of a folder or of the hub's cache; None for one that is not here.

    A folder is served under its own name. Raises ConfigError for a path that is no model.
    """
    if is_folder(given):
        try:
            folder = Path(given).expanduser().absolute()
        except RuntimeError as error:
            message = f"{given}: the home directory is not known"
            raise ConfigError(message, field="models") from error
        if not (folder / "config.json").is_file():
            raise ConfigError(
                f"{given} is not a Hugging Face model folder (no config.json)", field="models"
            )
        return LocalModel(folder.resolve().name, folder)
    return next((model for model in list_cached() if model.name == given), None)


def missing_files(folder: Path) -> list[str]:
    """Return what a folder lacks of the files that serving needs."""
    missing = [name for name in ("config.json", "tokenizer.json") if not (folder / name).is_file()]
    if (folder / INDEX).is_file():
        try:
            shards = set(read_index(folder).weight_map.values())
        except ConfigError:
            return [*missing, f"a readable {INDEX}"]
        missing += sorted(shard for shard in shards if not (folder / shard).is_file())
    elif not any(folder.glob("*.safetensors")):
        missing.append("*.safetensors")
    return missing


def size_on_disk(folder: Path) -> int:
    """Return the bytes of the files of a folder, where links lead."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def count_parameters(folder: Path) -> int:
    """Return how many numbers the weights of a folder are. Raises ConfigError."""
    return sum(math.prod(tensor.shape) for _, tensor in read_headers(folder))


def count_int8_parameters(folder: Path) -> int:
    """Return how many of them an engine with `quantization: int8` rounds. Raises ConfigError."""
    return sum(
        math.prod(tensor.shape)
        for name, tensor in read_headers(folder)
        if len(tensor.shape) == 2 and _IN_DECODER.search(name) and not _IN_TOWER.search(name)
    )
