"""Reader of sentence-transformers' files about a model's pooling.

`modules.json` lists the decoder and the steps after it. The configuration of the pooling is in the
folder of its step, by default `1_Pooling`. A model without these files pools the last token.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta, Struct

from shared.errors import ConfigError
from shared.helpers.validation import reason_of
from workers.engine.core.sequence import Pooling

MODULES, POOLING_FOLDER = "modules.json", "1_Pooling"
_PREFIX = "pooling_mode_"
# Modes by the ends of their keys, and by the values of the newer key `pooling_mode`.
_MODES: Mapping[str, Literal["last", "mean"]] = {
    "mean_tokens": "mean",
    "mean": "mean",
    "lasttoken": "last",
}
_SERVED_STEPS = frozenset({"Transformer", "Pooling", "Normalize"})

T = TypeVar("T")


class _Step(Struct, frozen=True):
    type: Annotated[str, Meta(min_length=1)]
    """Dotted name of a class."""
    path: str = ""

    @property
    def name(self) -> str:
        return self.type.rpartition(".")[2]


def read_pooling(folder: Path, configured: Literal["last", "mean"] | None) -> Pooling:
    """Return the pooling of the model in `folder`; `configured` overrides the mode in its files.

    Raises ConfigError, with the file and the key, for pooling that the engine does not support.
    """
    modules, normalize, path = folder / MODULES, True, POOLING_FOLDER
    if modules.is_file():
        steps = _read(modules, list[_Step])
        for number, step in enumerate(steps):
            if Path(step.path).is_absolute() or ".." in Path(step.path).parts:
                raise _refusal(modules, f"[{number}].path", "must be within the model's folder")
            if step.name not in _SERVED_STEPS:
                raise _refusal(modules, f"[{number}].type", f"{step.name} is not supported")
        normalize = any(step.name == "Normalize" for step in steps)
        pooled = [step.path for step in steps if step.name == "Pooling"]
        path = pooled[0] if pooled else ""
    if configured is not None:
        return Pooling(configured, normalize)
    file = folder / path / "config.json"
    if not path or not (modules.is_file() or file.is_file()):
        return Pooling("last", normalize)
    return Pooling(_read_mode(file), normalize)


def _read_mode(file: Path) -> Literal["last", "mean"]:
    settings = _read(file, dict[str, Any])
    key, value = "pooling_mode", settings.get("pooling_mode")
    modes = {
        name.removeprefix(_PREFIX): name
        for name, is_set in settings.items()
        if name.startswith(_PREFIX) and is_set is True
    }
    if value is not None:
        names = value if isinstance(value, list) else [value]
        if not all(isinstance(name, str) for name in names):
            raise _refusal(file, key, "must be the name of a mode, or a list of names")
        modes = dict.fromkeys(names, key)
    if len(modes) != 1:
        several = ", ".join(modes.values()) or "none"
        raise _refusal(
            file, next(iter(modes.values()), key), f"exactly one mode must be set, not {several}"
        )
    ((mode, key),) = modes.items()
    if mode not in _MODES:
        raise _refusal(
            file, key, "the engine pools the last token or the mean; models.pooling may set either"
        )
    return _MODES[mode]


def _read(file: Path, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(file.read_bytes(), type=kind)
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"models.path: {file} cannot be read: {reason_of(error)}", field="models.path"
        ) from error


def _refusal(file: Path, key: str, reason: str) -> ConfigError:
    return ConfigError(f"models.path: {file}: {key}: {reason}", field="models.path")
