"""Family of models that paint: one declaration of a pipeline of diffusers, without torch.

Each module in `shared.models.diffusion` declares its family in `FAMILY`. A generator computes it
with the module of the same name in `workers.generator.diffusion`.
"""

from collections.abc import Mapping
from typing import NamedTuple

from shared.protocol.images import SizeRule
from shared.protocol.videos import VideoSpec


class Component(NamedTuple):
    """One part of a pipeline, in a subfolder of the model's folder."""

    class_name: str
    """Class that loads the part. A folder with another class is refused."""
    config: str = "config.json"
    """File with the settings of the part."""
    weights: str | None = None
    """Name of the files of weights, without endings; None for a part without weights."""
    config_class: str = ""
    """Class that the file with the settings names; "" for the same class."""
    is_optional: bool = False
    """Whether a folder may lack the part, or name null as its class."""
    also: frozenset[str] = frozenset()
    """Names of other classes that published folders have for the same part."""


class Fit(NamedTuple):
    """Setting of the transformer that must be the sum of other parts' settings, times a number.

    It is checked if the files of the parts have all of these settings.
    """

    setting: str
    """Setting of the transformer."""
    others: tuple[tuple[str, str], ...]
    """Other parts, and a setting of each."""
    times: int = 1


class ImageFamily(NamedTuple):
    """Declaration of everything that is specific to a kind of pipeline, except its computation."""

    name: str
    """Name for users, and of the built-in graph."""
    pipeline: str
    """`_class_name` in `model_index.json`."""
    components: Mapping[str, Component]
    """Parts by subfolder."""
    float32: frozenset[str]
    """Parts that are loaded in float32 if the model is served in a type of 16 bits."""
    sizes: tuple[str, ...]
    """Sizes of images or videos, in pixels; the first one is the default."""
    size_rule: SizeRule
    """Further sizes, which the networks compute without having been trained with them."""
    steps: int
    """Default number of steps."""
    guidance: float
    """Default scale of the guidance."""
    empty_negative: str | None
    """Text that images without a negative prompt are guided away from; None for models without
    negative prompts."""
    max_prompt_tokens: int
    fits: tuple[Fit, ...] = ()
    """Widths of parts, which read what other parts compute."""
    required: tuple[tuple[str, str], ...] = ()
    """Parts, and settings of them which the pipeline computes with, though they may be null."""
    input_images: int = 0
    """Limit on the images that a request gives to edit; 0 for a model that edits none. A model that
    edits images paints none without."""
    without: tuple[str, str] | None = None
    """A part and a setting of it which is false or missing in the folders of this family, and true
    in folders of another family with the same pipeline."""
    video: VideoSpec | None = None
    """Lengths of the videos; None for a family that paints images."""
    module: str = ""
    """Name of the module with the computation, which is by default the name of the declaration's
    module."""
