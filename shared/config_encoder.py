"""The part of the configuration about encoders, and the embeddings that they make."""

from typing import Annotated, Literal

from msgspec import Meta, Struct

from shared.config_stages import Positive
from shared.native.choices import KernelSetting

Seconds = Annotated[float, Meta(gt=0)]


class EncoderConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """The encoder: device and batches."""

    device: str = "cpu"
    """`cpu`, or `cuda` for an NVIDIA GPU."""
    threads: Annotated[int, Meta(ge=0)] = 0
    """Number of torch threads; 0 leaves it to torch."""
    kernels: KernelSetting = "measured"
    """What computes on a CPU, see `engine.kernels`."""
    max_batch_tokens: Positive = 4096
    """Limit on the embeddings of one batch, which may hold items of several requests. A larger
    item gets a batch of its own."""
    max_tasks: Positive = 32
    """Limit on tasks in flight."""
    step_timeout_s: Seconds = 120.0
    """A batch that takes longer counts as hung, and the process ends."""


class EmbeddingsConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """Storage in which encoders leave embeddings for engines."""

    storage: Literal["memory", "directory"] = "memory"
    """The encoder's memory, read through the transports of `blobs`; or a directory of safetensors
    files."""
    path: str | None = None
    """Directory that all workers share, relative to the configuration file."""
    ttl_s: Seconds = 600.0
    """Time for which embeddings are stored."""
    max_mib: Positive = 4096
    """Limit on the files of one model in the directory. In memory the limit is
    `blobs.arena_mib`."""
