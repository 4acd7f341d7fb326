"""Images of generic families: each image alone goes through the model's own processor.

Processors of transformers return numpy arrays without torch if their image processor works with
Pillow. Those that accept videos ask for a video processor, which needs torchvision.
"""

import importlib
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import numpy as np
import structlog
import transformers
from PIL import Image
from transformers import AutoTokenizer
from transformers.models.auto import processing_auto

from shared.codec.arrays import from_numpy, to_numpy
from shared.codec.envelope import TensorData
from shared.codec.vllm_kwargs import WireField
from shared.errors import ConfigError, InvalidMedia, UnsupportedContent
from shared.models import layout
from shared.models.media import DecodedImage
from shared.protocol.multimodal import Placement

# transformers does not declare this table as public.
PROCESSORS: dict[str, str] = vars(processing_auto)["PROCESSOR_MAPPING_NAMES"]
"""Names of the classes of processors by model type."""
REPLACEMENT = "replacement"
IMAGE_GRID = "image_grid_thw"
TEXT_FIELDS = frozenset(
    {
        "input_ids",
        "attention_mask",
        "token_type_ids",
        "mm_token_type_ids",
        "position_ids",
        "text_replacement_offsets",
    }
)
_NEIGHBOURS = ("a", " ", "\n", ":")
"""Texts that may stand next to an image in a prompt."""
_SAMPLE_SIZE = (48, 64)
# Processors raise these for an image or a setting that they do not accept.
ERRORS = (ValueError, TypeError, LookupError, ArithmeticError, AttributeError)

_log = structlog.get_logger()

# transformers leaves this function without types.
_load_tokenizer: Any = AutoTokenizer.from_pretrained


class GenericImageLayout(layout.ImageLayout):
    """Fields with the names that the family's processor gives them, and the image's tokens.

    replacement  int64 [num_tokens], the tokens that replace the image's marker in the prompt
    """

    metadata = (REPLACEMENT, IMAGE_GRID)

    def __init__(self, folder: Path, config: Any) -> None:
        self._processor, settings = open_processor(folder, config.model_type)
        # A call changes settings of the processor's tokenizer.
        self._lock = threading.Lock()
        # Chat templates of Qianfan-OCR write another token than the placeholder.
        other = getattr(self._processor, "image_placeholder_token", None)
        self._marker: str = other or self._processor.image_token
        self.marker_id = self._processor.tokenizer.convert_tokens_to_ids(self._marker)
        self.embed_ids = (config.image_token_id,)
        self.fingerprint = layout.fingerprint(
            self._processor.image_processor,
            config.model_type,
            sorted(settings.items()),
            (folder / "tokenizer.json").read_bytes(),
        )
        try:
            _, replacement = self._run(sample_image())
        except ERRORS as error:
            raise ConfigError(
                f"{folder}: the processor of {config.model_type!r} fails for an image: {error}",
                field="path",
            ) from error
        if getattr(self._processor.image_processor, "do_pan_and_scan", None):
            raise ConfigError(
                f"{folder}: the processor adds crops of an image (do_pan_and_scan), which is not"
                " supported",
                field="path",
            )
        before, text, after = _split_space(replacement)
        self.around = before, after
        self._check_tokens(folder, before + self._marker + after, text, replacement)

    def process(self, media: DecodedImage, field: str) -> tuple[dict[str, TensorData], int]:
        layout.check_aspect_ratio(media.image, field)
        try:
            arrays, replacement = self._run(media.image)
        except ERRORS as error:
            _log.info("image_refused", reason=str(error))
            width, height = media.image.size
            raise InvalidMedia(
                f"the model's processor refuses an image of {width} x {height} pixels", field=field
            ) from error
        _, text, _ = _split_space(replacement)
        token_ids = self._encode(text)
        fields = {name: from_numpy(array) for name, array in arrays.items()}
        fields[REPLACEMENT] = from_numpy(np.array(token_ids))
        return fields, sum(token_id in self.embed_ids for token_id in token_ids)

    def place(
        self, metadata: Mapping[str, TensorData], encode: Callable[[str], list[int]]
    ) -> Placement | None:
        token_ids: list[int] = to_numpy(metadata[REPLACEMENT]).tolist()
        return Placement(token_ids, self.embed_ids)

    def to_wire(self, fields: Mapping[str, TensorData]) -> dict[str, WireField]:
        raise UnsupportedContent(
            "images of this model are not exchanged with other servers", field="features"
        )

    def from_wire(
        self, wire: Mapping[str, WireField], field: str
    ) -> tuple[dict[str, TensorData], int]:
        raise UnsupportedContent(
            "images of this model are not accepted from other servers", field=field
        )

    def _run(self, image: Image.Image) -> tuple[dict[str, Any], str]:
        """Return the processor's arrays for one image, and the text that replaces its marker."""
        with self._lock:
            output = self._processor(
                text=[self._marker],
                images=[image],
                return_tensors="np",
                return_text_replacement_offsets=True,
            )
        (replaced,) = output["text_replacement_offsets"][0]
        arrays = {
            name: np.asarray(array) for name, array in output.items() if name not in TEXT_FIELDS
        }
        return arrays, replaced["replacement"]

    def _encode(self, text: str) -> list[int]:
        with self._lock:
            token_ids: list[int] = self._processor.tokenizer.encode(text, add_special_tokens=False)
        return token_ids

    def _check_tokens(self, folder: Path, marker: str, image: str, replacement: str) -> None:
        """Raise ConfigError unless an image has the same tokens in any text."""
        token_ids = self._encode(image)
        if not set(token_ids) & set(self.embed_ids):
            raise ConfigError(
                f"{folder}: the processor writes no token {self.embed_ids[0]}, which config.json"
                " names as image_token_id",
                field="path",
            )
        for text in _NEIGHBOURS:
            expanded: list[int] = []
            for token_id in self._encode(text + marker + text):
                expanded += token_ids if token_id == self.marker_id else [token_id]
            if expanded != self._encode(text + replacement + text):
                raise ConfigError(
                    f"{folder}: the tokenizer merges the text of an image with the text next to it",
                    field="path",
                )


def _split_space(text: str) -> tuple[str, str, str]:
    """Return the white space before a text, the text, and the white space after it."""
    start = len(text) - len(text.lstrip())
    stop = len(text.rstrip())
    return text[:start], text[start:stop], text[stop:]


def sample_image() -> Image.Image:
    """Return a small image with many different values."""
    rows, columns = np.indices(_SAMPLE_SIZE, dtype=np.uint8)
    raster = np.stack([4 * columns, 5 * rows, columns + rows], axis=-1)
    return Image.fromarray(raster)


class _Unused:
    """Replacement for a part of a processor that images do not use, such as the video processor."""

    model_input_names: ClassVar[list[str]] = []
    merge_size = temporal_patch_size = 2
    patch_size = 14


def open_processor(
    folder: Path, model_type: str, media_parts: Mapping[str, Any] | None = None
) -> tuple[Any, dict[str, Any]]:
    """Return the processor of a model folder, and its own settings. Raises ConfigError.

    `media_parts` are the parts for media by their names, by default the image processor.
    """
    try:
        kind = _find_processor(PROCESSORS[model_type])
        # transformers would check the classes of the parts, and write all of them to its log.
        changes = {"check_argument_for_proper_class": lambda *_: None, "__repr__": object.__repr__}
        accepting: Any = type(kind.__name__, (kind,), changes)
        file = folder / "processor_config.json"
        settings = msgspec.json.decode(file.read_bytes()) if file.is_file() else {}
        media_parts = media_parts or {
            "image_processor": layout.load_image_processor(folder, object)
        }
        parts = {"tokenizer": _load_tokenizer(folder, local_files_only=True), **media_parts}
        names = kind.get_attributes()
        processor = accepting.from_args_and_dict(
            [parts.get(name) or _Unused() for name in names], settings
        )
    except ConfigError:
        raise
    except Exception as error:  # Unusable folders make transformers raise exceptions of any type.
        raise ConfigError(
            f"{folder}: the processor of {model_type!r} cannot be opened: {error}", field="path"
        ) from error
    return processor, settings


def _find_processor(name: str) -> Any:
    """Return a class of processors, whose module may import more than images need."""
    # Without torchvision, the attribute is a placeholder with the name of the module.
    module_name: str = getattr(transformers, name).__module__
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError:
        # Pixtral's module imports a function from the image processor for torchvision. The image
        # processor for Pillow has the function, too.
        package, _, kind = module_name.rpartition(".processing_")
        image_processing = f"{package}.image_processing_{kind}"
        sys.modules[image_processing] = importlib.import_module(
            f"{package}.image_processing_pil_{kind}"
        )
        try:
            module = importlib.import_module(module_name)
        finally:
            del sys.modules[image_processing]
    if getattr(module, "num2words", "") is None:
        # SmolVLM's processor needs this package at its start, but uses it only for videos.
        vars(module)["num2words"] = str
    return getattr(module, name)
