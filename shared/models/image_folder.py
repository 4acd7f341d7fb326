"""Model folders in the format of diffusers: a `model_index.json` and a subfolder for each part.

A folder is checked before anything of it is loaded, and no code of it is run: classes are compared
with the declaration of the family, and only names of that declaration are imported.
"""

import importlib.util
import json
import math
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from shared.errors import ConfigError
from shared.helpers.validation import reason_of
from shared.models.image_family import Component, Fit, ImageFamily
from shared.models.image_registry import list_image_families
from shared.protocol.pipeline import LATENTS, STEPS, TEXTS
from shared.vision.quantized import read_quantized
from shared.vision.weight_files import read_header, read_index

MODEL_INDEX = "model_index.json"
EXTRA = "diffusers"
"""Extra of the package that serving such folders needs."""
VIDEO_EXTRA = "video"
"""Extra that folders of models for videos need as well."""
ITEM_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
TOKENIZER_CONFIG = "tokenizer_config.json"
VOCABULARIES = (("tokenizer.json",), ("vocab.json", "merges.txt"), ("spiece.model",))
"""Files with the vocabulary of a tokenizer, any of which is enough. Without one, transformers loads
a tokenizer that reads all texts alike."""
LIBRARIES = ("diffusers", "transformers")
# Names of types in safetensors.
_DTYPES = {"F64": "float64", "F32": "float32", "BF16": "bfloat16", "F16": "float16"}


class Part(NamedTuple):
    """Weights of one part."""

    num_parameters: int
    dtype: str
    """Type of the saved weights."""


class ImageFolder(NamedTuple):
    """Description of a folder that can be served."""

    folder: Path
    family: ImageFamily
    parts: Mapping[str, Part]
    """Parts with weights, by subfolder."""
    settings: Mapping[str, Any]
    """Content of `model_index.json`."""
    absent: frozenset[str] = frozenset()
    """Parts that are not loaded, because other stages compute with them."""

    def parts_for(self, work: Collection[str]) -> frozenset[str]:
        """Return the parts that a stage loads for its work, which is TEXTS, STEPS or LATENTS."""
        # The encoder of texts to edit images also makes the latents of these images.
        needs_vae = LATENTS in work or (TEXTS in work and self.family.input_images > 0)
        return frozenset(
            part
            for part in self.parts
            if (part.startswith("text_encoder") and TEXTS in work)
            or (part.startswith("transformer") and STEPS in work)
            or (part == "vae" and needs_vae)
        )

    def work_bytes(self, work: Collection[str], dtype: str) -> int:
        """Return the bytes of the weights of a stage, in a model that is served with `dtype`."""
        return sum(self.num_bytes(part, dtype) for part in self.parts_for(work))

    @property
    def components(self) -> Mapping[str, Component]:
        """Parts of the family that the folder has, by subfolder."""
        return _components_of(self.family, self.settings)

    def weight_files(self, name: str) -> list[Path]:
        """Return the files of a part's weights. Raises ConfigError."""
        weights = self.family.components[name].weights
        return [] if weights is None else _weight_files(self.folder / name, weights)

    @property
    def dtype(self) -> str:
        """Type of the largest part's saved weights."""
        return max(self.parts.values()).dtype

    def served_dtype(self, name: str, dtype: str) -> str:
        """Return the type of a part's weights in a model that is served with `dtype`."""
        is_half = ITEM_BYTES[dtype] == 2
        return "float32" if is_half and name in self.family.float32 else dtype

    def num_bytes(self, name: str, dtype: str) -> int:
        """Return the bytes of a part's weights in a model that is served with `dtype`."""
        return self.parts[name].num_parameters * ITEM_BYTES[self.served_dtype(name, dtype)]


def is_image_folder(folder: Path) -> bool:
    """Return whether a folder has the format of diffusers."""
    return (folder / MODEL_INDEX).is_file()


def find_family_of(folder: Path) -> ImageFamily | None:
    """Return the family that a folder names; None for another class, and without a readable file.

    The settings of a part are read only to distinguish families of one pipeline. Nothing else of
    the folder is checked.
    """
    try:
        name = _read(folder, MODEL_INDEX).get("_class_name")
    except ConfigError:
        return None
    families = [family for family in list_image_families() if family.pipeline == name]
    special = [f for f in families if f.without is not None and _lacks(folder, *f.without)]
    general = [family for family in families if family.without is None]
    return next(iter(special + general), None)


def read_image_folder(folder: Path) -> ImageFolder:
    """Return the description of a folder from its small files and the headers of its weights.

    Raises ConfigError with one sentence if the folder cannot be served, or not without the extra.
    """
    family = check_classes(folder)
    for file in list_missing_files(folder):
        raise _refusal(folder, f"lacks {file}")
    index = _read(folder, MODEL_INDEX)
    for name in family.components:
        if (folder / name / VOCABULARIES[0][0]).exists():
            _read(folder, f"{name}/{VOCABULARIES[0][0]}")
    parts = {
        name: _read_part(folder, name, component.weights)
        for name, component in _components_of(family, index).items()
        if component.weights is not None
    }
    return ImageFolder(folder, family, parts, index)


def check_classes(folder: Path) -> ImageFamily:
    """Return the family of a folder from its small files; weights may be missing.

    Raises ConfigError with one sentence if the folder cannot be served, or not without the extra.
    """
    index = _read(folder, MODEL_INDEX)
    family = find_family_of(folder)
    if family is None:
        names = ", ".join(family.pipeline for family in list_image_families())
        raise _refusal(
            folder,
            f"has the pipeline {index.get('_class_name')!r}, which is not supported; supported:"
            f" {names}",
        )
    for name, value in index.items():
        if isinstance(value, list) and any(value) and name not in family.components:
            raise _refusal(folder, f"has a part {name!r}, which {family.pipeline} does not have")
    components = _components_of(family, index)
    for name, component in components.items():
        tokenizer = name.replace("text_encoder", "tokenizer")
        if tokenizer in family.components and tokenizer not in components:
            raise _refusal(folder, f"has a part {name!r} without {tokenizer!r}")
        _check_class(folder, name, component, index)
    for fit in family.fits:
        _check_fit(folder, fit, components)
    for package in _list_packages(folder, family):
        if not _is_installed(package):
            raise _refusal(folder, f"needs {package}: pip install 'pagemill[{EXTRA}]'")
    if family.video is not None and not _is_installed("av"):
        raise _refusal(folder, f"needs PyAV for its videos: pip install 'pagemill[{VIDEO_EXTRA}]'")
    return family


def list_missing_files(folder: Path) -> list[str]:
    """Return the files that the parts of a folder need and the folder does not have.

    The list is empty for a folder of an unsupported class.
    """
    family = find_family_of(folder)
    components = {} if family is None else _components_of(family, _read(folder, MODEL_INDEX))
    return [
        f"{name}/{file}"
        for name, component in components.items()
        for file in _missing_of(folder / name, component)
    ]


def _components_of(family: ImageFamily, index: Mapping[str, Any]) -> dict[str, Component]:
    """Return the parts of a family without the optional ones that a folder does not have."""
    return {
        name: component
        for name, component in family.components.items()
        if not component.is_optional or any(index.get(name) or ())
    }


def _lacks(folder: Path, name: str, setting: str) -> bool:
    """Return whether a setting of a part is missing or false, and its file can be read."""
    try:
        return not _read(folder, f"{name}/config.json").get(setting)
    except ConfigError:
        return False


def _missing_of(part: Path, component: Component) -> Iterator[str]:
    if not (part / component.config).is_file():
        yield component.config
    if component.config == TOKENIZER_CONFIG and not any(
        all((part / file).is_file() for file in files) for files in VOCABULARIES
    ):
        yield VOCABULARIES[0][0]
    if component.weights is None:
        return
    try:
        files = _weight_files(part, component.weights)
    except ConfigError:
        yield f"a readable {component.weights}.safetensors.index.json"
        return
    yield from (file.name for file in files if not file.is_file())


def _list_packages(folder: Path, family: ImageFamily) -> list[str]:
    """Return the packages of the extra that serving a folder needs."""
    needs_conversion = any(
        (folder / name / "spiece.model").is_file()
        and not (folder / name / "tokenizer.json").is_file()
        for name in family.components
    )
    return ["diffusers", *(("sentencepiece", "google.protobuf") if needs_conversion else ())]


def _is_installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:  # It has a parent, which is missing.
        return False


def _check_class(folder: Path, name: str, component: Component, index: Mapping[str, Any]) -> None:
    """Raise ConfigError for a part without config, of another class, or with quantized weights."""
    entry = index.get(name)
    if not isinstance(entry, list) or len(entry) != 2:
        raise _refusal(folder, f"has no part {name!r} in {MODEL_INDEX}")
    if entry[0] not in LIBRARIES:
        raise _refusal(folder, f"has a {name} of {entry[0]!r}, whose code is not run")
    if not (folder / name / component.config).is_file():
        raise _refusal(folder, f"lacks {name}/{component.config}")
    config = _read(folder, f"{name}/{component.config}")
    architectures = config.get("architectures")
    config_class = (
        config.get("_class_name")
        or config.get("tokenizer_class")
        or config.get("image_processor_type")
        or (architectures[0] if isinstance(architectures, list) and architectures else None)
    )
    for file, class_name, supported in (
        (MODEL_INDEX, entry[1], component.class_name),
        (
            f"{name}/{component.config}",
            config_class,
            component.config_class or component.class_name,
        ),
    ):
        # transformers 4 had two classes of each tokenizer and image processor.
        name_of_class = str(class_name).removesuffix("Fast")
        if name_of_class != supported and name_of_class not in component.also:
            raise _refusal(
                folder,
                f"has a {name} of class {class_name!r} in {file}, and only {supported} is"
                " supported",
            )
    quantized = None if component.weights is None else read_quantized(folder / name)
    if quantized is not None:
        raise _refusal(folder, f"has quantized weights in {name} ({quantized.label})")


def _check_fit(folder: Path, fit: Fit, components: Mapping[str, Component]) -> None:
    """Raise ConfigError if the transformer has another width than the parts that it reads."""
    if not all(name in components for name, _ in fit.others):
        return
    width = _read_setting(folder, "transformer", fit.setting)
    widths = [_read_setting(folder, name, setting) for name, setting in fit.others]
    numbers = [value for value in (width, *widths) if isinstance(value, int)]
    if len(numbers) == 1 + len(widths) and width != fit.times * sum(numbers[1:]):
        others = " and ".join(
            f"{setting} of {value} in {name}"
            for (name, setting), value in zip(fit.others, widths, strict=True)
        )
        raise _refusal(
            folder,
            f"has parts that do not fit: {fit.setting} of {width} in transformer needs"
            f" {fit.times * sum(numbers[1:])}, because of {others}",
        )


def _read_setting(folder: Path, name: str, setting: str) -> Any:
    """Return a setting of a part or of its language model; None if its file does not have it."""
    config = _read(folder, f"{name}/config.json")
    text_config = config.get("text_config")
    nested = text_config if isinstance(text_config, dict) else {}
    return config.get(setting, nested.get(setting))


def _read_part(folder: Path, name: str, weights: str) -> Part:
    num_parameters, dtypes = 0, set[str]()
    for file in _weight_files(folder / name, weights):
        for tensor_name, tensor in read_header(file):
            num_parameters += math.prod(tensor.shape)
            dtypes.add(tensor.dtype)
            if tensor.dtype not in _DTYPES:
                raise _refusal(
                    folder, f"has {tensor_name} of the type {tensor.dtype} in {name}/{file.name}"
                )
    if len(dtypes) == 1:
        return Part(num_parameters, _DTYPES[dtypes.pop()])
    return Part(num_parameters, "float32")


def _weight_files(part: Path, weights: str) -> list[Path]:
    """Return the files of a part's weights, which may be missing. Raises ConfigError."""
    index = read_index(part, f"{weights}.safetensors.index.json")
    shards = set(index.weight_map.values()) or {f"{weights}.safetensors"}
    return sorted(part / shard for shard in shards)


def _read(folder: Path, name: str) -> dict[str, Any]:
    try:
        # Settings of schedulers have infinities, which are not in the standard of JSON.
        content = json.loads((folder / name).read_bytes())
    except (OSError, ValueError) as error:
        raise _refusal(folder, f"has a {name} that cannot be read: {reason_of(error)}") from error
    if not isinstance(content, dict):
        raise _refusal(folder, f"has a {name} that cannot be read: it must be an object")
    return content


def _refusal(folder: Path, reason: str) -> ConfigError:
    return ConfigError(f"models.path: {folder} {reason}", field="models.path")
