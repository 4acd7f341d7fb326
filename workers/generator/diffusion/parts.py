"""Loading of the parts of a diffusers folder. Weights are read only from safetensors files."""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from diffusers import DPMSolverMultistepScheduler, FlowMatchEulerDiscreteScheduler
from diffusers.utils.logging import disable_progress_bar

from shared.errors import ConfigError, first_sentence
from shared.models.image_folder import ImageFolder
from shared.vision.weights import load_weights
from workers.generator.diffusion import dpm_solver, flow_match
from workers.generator.diffusion.text_encoders import FixedTokenizer

MAX_TOKENS = 4096
"""Most tokens of a text with a fixed length. Published models have 77 to 512."""


class PartLoader:
    """Loads the parts of a folder. Its methods raise ConfigError, which names the part's folder.

    A part that is absent gets settings and a dtype, and no weights: its device is `meta`.
    """

    def __init__(
        self, folder: ImageFolder, dtype: str, device: str, report: Callable[[str], None]
    ) -> None:
        """`report` is called with one line before weights are loaded."""
        self._folder, self._dtype, self._device = folder, dtype, device
        self._report = report

    def load_network(self, model_class: Any, name: str) -> Any:
        """Load a network of diffusers."""
        if name in self._folder.absent:
            with refusing(self._folder.folder / name), torch.device("meta"):
                settings = model_class.load_config(self._folder.folder / name)
                return model_class.from_config(settings).to(self._dtype_of(name))
        return load_module(model_class, *self._announce(name))

    def load_text_encoder(self, model_class: Any, name: str, without: Sequence[str] = ()) -> Any:
        """Load a network of transformers, without these submodules."""
        folder = self._folder.folder / name
        with refusing(folder):
            if name in self._folder.absent:
                with torch.device("meta"):
                    config = model_class.config_class.from_pretrained(folder, local_files_only=True)
                    return model_class(config).to(self._dtype_of(name))
            return load_weights(model_class, *self._announce(name), without=without)

    def load_tokenizer(self, tokenizer_class: Any, name: str) -> Any:
        """Load a tokenizer as `tokenizers.Tokenizer`, which any thread may call."""
        with refusing(self._folder.folder / name):
            return _plain(self._open_tokenizer(tokenizer_class, name))

    def load_fixed_tokenizer(
        self, tokenizer_class: Any, name: str, length: int | None = None
    ) -> FixedTokenizer:
        """Load a tokenizer of texts with this length, by default the `model_max_length` it has."""
        with refusing(self._folder.folder / name):
            tokenizer = self._open_tokenizer(tokenizer_class, name)
            # A tokenizer without this setting has a number of 30 digits.
            num_tokens: int = length or tokenizer.model_max_length
            if num_tokens > MAX_TOKENS:
                raise ValueError(
                    f"model_max_length: {num_tokens} is over the limit of {MAX_TOKENS}"
                )
            if tokenizer.pad_token_id is None:
                raise ValueError("pad_token is missing")
            return FixedTokenizer(_plain(tokenizer), tokenizer.pad_token_id, num_tokens)

    def load_image_processor(self, processor_class: Any, name: str) -> Any:
        """Load an image processor of transformers."""
        with refusing(self._folder.folder / name):
            return processor_class.from_pretrained(
                self._folder.folder / name, local_files_only=True
            )

    def load_flow_match(self) -> Any:
        """Load the scheduler of a model of flow matching."""
        folder = self._folder.folder / "scheduler"
        with refusing(folder):
            scheduler = FlowMatchEulerDiscreteScheduler.from_pretrained(
                folder, local_files_only=True
            )
            flow_match.check_scheduler(scheduler)
        return scheduler

    def load_dpm_solver(self) -> Any:
        """Load the scheduler of a model with a DPM-Solver."""
        folder = self._folder.folder / "scheduler"
        with refusing(folder):
            scheduler = DPMSolverMultistepScheduler.from_pretrained(folder, local_files_only=True)
            dpm_solver.check_scheduler(scheduler)
        return scheduler

    def read_settings(self, model_class: Any, name: str) -> dict[str, Any]:
        """Return the settings of a network of diffusers before it is loaded."""
        folder = self._folder.folder / name
        with refusing(folder):
            settings: dict[str, Any] = model_class.load_config(folder, local_files_only=True)
        parameters = inspect.signature(model_class.__init__).parameters
        return {key: value.default for key, value in parameters.items()} | settings

    def refuse_settings(self, network: Any, name: str, settings: Sequence[str]) -> None:
        """Raise ConfigError if the config of a part has one of these settings, and not as false."""
        for setting in settings:
            if network.config.get(setting):
                raise ConfigError(
                    f"models.path: {self._folder.folder}: {setting} of the {name} is not supported",
                    field="models.path",
                )

    def _open_tokenizer(self, tokenizer_class: Any, name: str) -> Any:
        return tokenizer_class.from_pretrained(self._folder.folder / name, local_files_only=True)

    def _announce(self, name: str) -> tuple[Path, torch.dtype, str]:
        mib = self._folder.num_bytes(name, self._dtype) / 2**20
        self._report(f"loading the {name.replace('_', ' ')}, {mib:.0f} MiB")
        return self._folder.folder / name, self._dtype_of(name), self._device

    def _dtype_of(self, name: str) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self._folder.served_dtype(name, self._dtype))
        return dtype


def _plain(tokenizer: Any) -> Any:
    """Return a tokenizer as `tokenizers.Tokenizer`, which neither cuts texts nor fills them up."""
    backend = tokenizer.backend_tokenizer
    # A change of these settings is not thread-safe.
    backend.no_truncation()
    backend.no_padding()
    return backend


@contextmanager
def refusing(folder: Path) -> Iterator[None]:
    """Raise ConfigError, which names the folder, for the errors of libraries in a part."""
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:  # Unusable folders make the libraries raise exceptions of any type.
        message = f"models.path: {folder}: {first_sentence(error)}"
        raise ConfigError(message, field="models.path") from error


def load_module(model_class: Any, folder: Path, dtype: torch.dtype, device: str) -> Any:
    """Load a network of diffusers for inference, tensor by tensor. Raises ConfigError."""
    disable_progress_bar()
    with refusing(folder):
        try:
            model, report = _read_module(model_class, folder, dtype, device)
        except NotImplementedError:
            # Weights that are missing, or have another shape, stay on `meta`, and cannot be moved
            # to a device. With all weights on `meta`, diffusers returns its report.
            _check_report(folder, _read_module(model_class, folder, dtype, "meta")[1])
            raise
    _check_report(folder, report)
    if dtype == torch.float64:
        # diffusers keeps some layers in float32, with results that depend on the batch.
        model = model.to(dtype)
    return model.eval().requires_grad_(False)


def _read_module(
    model_class: Any, folder: Path, dtype: torch.dtype, device: str
) -> tuple[Any, Mapping[str, Any]]:
    """Return a network and the report of diffusers about its weights."""
    model, report = model_class.from_pretrained(
        folder,
        torch_dtype=dtype,
        device_map={"": device},
        local_files_only=True,
        use_safetensors=True,
        output_loading_info=True,
        ignore_mismatched_sizes=True,
    )
    return model, report


def _check_report(folder: Path, report: Mapping[str, Any]) -> None:
    """Raise ConfigError if diffusers lacks weights, or has ignored some."""
    for kind, names in (("lacks", "missing_keys"), ("has unknown", "unexpected_keys")):
        if report[names]:
            weights = ", ".join(sorted(report[names])[:3])
            message = f"models.path: {folder} {kind} weights: {weights}"
            raise ConfigError(message, field="models.path")
    for name, shape, required in sorted(report["mismatched_keys"]):
        raise ConfigError(
            f"models.path: {folder}: {name} has the shape {list(shape)}, but config.json requires"
            f" {list(required)}",
            field="models.path",
        )
