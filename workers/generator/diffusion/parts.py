"""Loading of the parts of a diffusers folder. Weights are read only from safetensors files."""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from diffusers.utils.logging import disable_progress_bar

from shared.errors import ConfigError
from shared.models.image_folder import ImageFolder
from shared.vision.weights import load_weights


class PartLoader:
    """Loads the parts of a folder. Its methods raise ConfigError, which names the part's folder."""

    def __init__(
        self, folder: ImageFolder, dtype: str, device: str, report: Callable[[str], None]
    ) -> None:
        """`report` is called with one line before weights are loaded."""
        self._folder, self._dtype, self._device = folder, dtype, device
        self._report = report

    def load_network(self, model_class: Any, name: str) -> Any:
        """Load a network of diffusers."""
        return load_module(model_class, *self._announce(name))

    def load_text_encoder(self, model_class: Any, name: str, without: Sequence[str] = ()) -> Any:
        """Load a network of transformers, without these submodules."""
        return load_weights(model_class, *self._announce(name), without=without)

    def load_tokenizer(self, tokenizer_class: Any, name: str) -> Any:
        """Load a tokenizer as `tokenizers.Tokenizer`, which any thread may call."""
        with refusing(self._folder.folder / name):
            tokenizer = tokenizer_class.from_pretrained(
                self._folder.folder / name, local_files_only=True
            ).backend_tokenizer
            # A change of these settings is not thread-safe.
            tokenizer.no_truncation()
            tokenizer.no_padding()
        return tokenizer

    def load_flow_match(self) -> Any:
        """Load the scheduler of a model of flow matching."""
        folder = self._folder.folder / "scheduler"
        with refusing(folder):
            scheduler = FlowMatchEulerDiscreteScheduler.from_pretrained(
                folder, local_files_only=True
            )
            if scheduler.config.stochastic_sampling:
                raise ValueError("stochastic_sampling is not supported")
        return scheduler

    def refuse_settings(self, network: Any, name: str, settings: Sequence[str]) -> None:
        """Raise ConfigError if the config of a part has one of these settings, and not as false."""
        for setting in settings:
            if network.config.get(setting):
                raise ConfigError(
                    f"models.path: {self._folder.folder}: {setting} of the {name} is not supported",
                    field="models.path",
                )

    def _announce(self, name: str) -> tuple[Path, torch.dtype, str]:
        mib = self._folder.num_bytes(name, self._dtype) / 2**20
        self._report(f"loading the {name.replace('_', ' ')}, {mib:.0f} MiB")
        dtype = getattr(torch, self._folder.served_dtype(name, self._dtype))
        return self._folder.folder / name, dtype, self._device


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
    if dtype == torch.float64:
        # diffusers keeps some layers in float32, with results that depend on the batch.
        model = model.to(dtype)
    return model.to(device).eval().requires_grad_(False)
