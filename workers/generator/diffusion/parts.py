"""Loading of the parts of a diffusers folder. Weights are read only from safetensors files."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from diffusers.utils.logging import disable_progress_bar

from shared.errors import ConfigError


@contextmanager
def refusing(folder: Path) -> Iterator[None]:
    """Raise ConfigError, which names the folder, for the errors of libraries in a part."""
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:  # Unusable folders make the libraries raise exceptions of any type.
        raise ConfigError(f"models.path: {folder}: {error}", field="models.path") from error


def load_module(model_class: Any, folder: Path, dtype: torch.dtype, device: str) -> Any:
    """Load a network of diffusers for inference. Raises ConfigError."""
    # Without accelerate, diffusers warns that the memory is allocated twice.
    logging.getLogger("diffusers").setLevel(logging.ERROR)
    disable_progress_bar()
    with refusing(folder):
        model, report = model_class.from_pretrained(
            folder,
            torch_dtype=dtype,
            local_files_only=True,
            use_safetensors=True,
            output_loading_info=True,
        )
    # diffusers fills missing weights with random numbers, and ignores weights without a place.
    for kind, names in (("lacks", "missing_keys"), ("has unknown", "unexpected_keys")):
        if report[names]:
            weights = ", ".join(sorted(report[names])[:3])
            message = f"models.path: {folder} {kind} weights: {weights}"
            raise ConfigError(message, field="models.path")
    return model.to(device).eval().requires_grad_(False)
