"""Models on this machine: folders in Hugging Face format, and the hub's cache."""

import os
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from shared.errors import ConfigError, NotFound
from shared.models.image_folder import MODEL_INDEX, is_image_folder, list_missing_files
from shared.vision.weight_files import INDEX, read_index


@dataclass(frozen=True, slots=True)
class LocalModel:
    name: str
    folder: Path
    pooling: str | None = None
    """The model's `models.NAME.pooling`."""


def check_endpoint() -> None:
    """Raise ConfigError if the hub's library cannot be imported with this HF_ENDPOINT."""
    try:
        urlsplit(os.environ.get("HF_ENDPOINT", ""))
    except ValueError as error:
        raise ConfigError(f"it is not a URL: {error}", field="HF_ENDPOINT") from error


def check_hub_name(name: str) -> None:
    """Raise NotFound for a name that no hub has, because it has no organization."""
    if "/" not in name:
        raise NotFound(
            f"{name!r} is not a name on the hub such as Qwen/Qwen2-VL-2B-Instruct", field="name"
        )


def list_cached() -> list[LocalModel]:
    """Return the models of the hub's cache, each with the folder of its main branch.

    A model without a main branch there has the folder of its last commit. Raises ConfigError.
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


def is_folder(name: str) -> bool:
    """Return whether this is a path, and not a name in the hub's cache."""
    return name.startswith((".", "/", "~")) or has_model(Path(name))


def has_model(folder: Path) -> bool:
    """Return whether a folder has the description of a model, of transformers or diffusers."""
    return (folder / "config.json").is_file() or is_image_folder(folder)


def find_local(name: str) -> LocalModel | None:
    """Return the model of a folder or of the hub's cache, or None if it is not here.

    The name of a folder is the model's name. Raises ConfigError for a path without a model.
    """
    if is_folder(name):
        try:
            folder = Path(name).expanduser().absolute()
        except RuntimeError as error:
            message = f"{name}: the home directory is unknown"
            raise ConfigError(message, field="models") from error
        if not folder.is_dir():
            raise ConfigError(f"there is no folder {name}", field="models")
        if not has_model(folder):
            raise ConfigError(
                f"{name} is not a Hugging Face model folder (no config.json or {MODEL_INDEX})",
                field="models",
            )
        return LocalModel(folder.resolve().name, folder)
    return next((model for model in list_cached() if model.name == name), None)


def missing_files(folder: Path) -> list[str]:
    """Return the files that serving needs and the folder does not have."""
    if is_image_folder(folder):
        return list_missing_files(folder)
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
    """Return the total size of the files in a folder, and of files that links there lead to."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
