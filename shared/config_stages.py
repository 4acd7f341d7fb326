"""The part of a model's configuration that changes or extends its pipeline."""

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct, field

from shared.protocol.chunks import ChunkSpec
from shared.protocol.images import ImageSize
from shared.protocol.pipeline import EdgeMode, OutputSpec

Graph = Literal["qwen3-omni", "qwen2.5-omni", "none"]
"""A talker and a vocoder, which load their parts of the model's folder; see `stage.graphs`."""
Positive = Annotated[int, Meta(ge=1)]
Voice = Annotated[str, Meta(pattern="^[A-Za-z0-9_-]{1,64}$")]
# Each is a consumer of the broker in each lane, and two pulls a second of each engine.
MAX_SLOTS = 64


class InputConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """An input of a stage: an edge of the model's pipeline."""

    source: str = field(name="from")
    """The stage that the input comes from, or `request`."""
    function: str
    """Name of the edge function that makes the stage's input from the source's result."""
    mode: EdgeMode = "task"
    """`task`: the source hands its result over. `stream`: the stage follows the source's output.
    `fan_out`: the source publishes a task for each item. `detour`: the source may hand its result
    to this stage first, which hands it over the source's task edge."""
    gathered_by: str | None = None
    """The stage that waits for the results of a fan-out input; by default its source."""


class StageConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """One stage of a model's pipeline. A field that is not set keeps the value that the stage has
    in the default pipeline."""

    enabled: bool = True
    """Whether the stage is part of the pipeline."""
    role: str | None = None
    """The role whose workers serve the stage; by default the role of the stage's name."""
    path: str | None = None
    """Folder of the model part that the stage runs, relative to the configuration file; by default
    the model's own folder."""
    sampling_defaults: dict[str, Any] = {}
    """Sampling parameters of this stage that requests do not set."""
    replicas: Positive = 1
    """Workers that `pagemill up` starts for the stage."""
    max_wait_s: Annotated[float, Meta(gt=0)] = 300.0
    """Requests for the stage's output are refused while a task has waited for a worker for longer
    than this, in seconds. The stage that writes the text has no such limit."""
    inputs: dict[str, InputConfig] | None = None
    """By what they carry, such as `tokens` or `image`."""
    output: OutputSpec | None = None
    """The output that the stage writes."""
    chunks: ChunkSpec | None = None
    """How the stage cuts the codes that it follows, for a stage with the input `codes`."""
    voices: list[Voice] = []
    """Names of the voices of a stage that speaks; the first one is the default. The model has a
    token `<|voice_NAME|>` for each."""
    frames_per_character: Annotated[float, Meta(gt=0)] | None = None
    """For a stage that speaks a whole text: how many codec frames a character of it has on average.
    By this, an output of sound that is `timed` tells how much of the text has been spoken."""
    sizes: list[ImageSize] = []
    """Sizes of image, such as `96x96`, of a stage with an output of kind `image`; the first one is
    the default."""
