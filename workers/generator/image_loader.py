"""Loading of a model that paints, of diffusers or our own, from its folder."""

import importlib
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

from shared.errors import ConfigError
from shared.models.dtypes import choose_dtype
from shared.models.image_folder import is_image_folder, read_image_folder
from shared.protocol.images import SizeRule
from shared.protocol.pipeline import PAINTING
from workers.generator import diffusion
from workers.generator.core.denoising import ImageModel, VideoModel, noise_shape_of
from workers.generator.painter_model import load_painter


def load_image_model(
    folder: Path,
    dtype: str,
    sizes: Sequence[str],
    key: str,
    device: str = "cpu",
    report: Callable[[str], None] = lambda step: None,
    rule: SizeRule | None = None,
    work: Collection[str] = PAINTING,
) -> ImageModel:
    """Load the model of a folder for these sizes. `report` is called before each part is loaded.

    With `rule`, the model paints further sizes. Only the parts for the `work` of the stage are
    loaded. `key` is the stage's key in the settings. Raises ConfigError.
    """
    if not is_image_folder(folder):
        if work != PAINTING:
            raise ConfigError(
                f"{key}: {folder} is not a folder of diffusers, so one stage does all of its work",
                field=key,
            )
        return load_painter(folder, served_dtype(folder, dtype, device), sizes, key)
    try:
        dtype, description = served_dtype(folder, dtype, device), read_image_folder(folder)
        checks: Any = importlib.import_module(f"{diffusion.__name__}.checks")
        checks.check_folder(description)
        parts = description.parts_for(work)
        description = description._replace(absent=frozenset(description.parts) - parts)
        module = f"{diffusion.__name__}.{description.family.module}"
        computation: Any = importlib.import_module(module)
        model: ImageModel = computation.load(description, dtype, device, sizes, key, report)
    except ConfigError as error:
        if error.field != "models.path":
            raise
        message = error.message.removeprefix("models.path: ")
        raise ConfigError(f"{key}.path: {message}", field=f"{key}.path") from error
    if rule is not None and _has_larger_patches(model, rule.multiple):
        raise ConfigError(
            f"{key}.sizes: the sizes of this model are multiples of more than {rule.multiple}:"
            f" name them here",
            field=f"{key}.sizes",
        )
    return model


def served_dtype(folder: Path, dtype: str, device: str) -> str:
    """Return the type of a model's weights; `dtype` is the setting. Raises ConfigError."""
    if not is_image_folder(folder):
        return choose_dtype(dtype, None, "cpu")
    return choose_dtype(dtype, read_image_folder(folder).dtype, device)


def _has_larger_patches(model: ImageModel, side: int) -> bool:
    """Return whether an image with sides of this length has no patch."""
    frames = 1 if isinstance(model, VideoModel) else None
    return 0 in noise_shape_of(model, (side, side), frames)
