"""Tower adapter: the part of a family's tower that does not need the weights.

A tower is the part of a multimodal model that converts media to embeddings. It runs in an engine,
together with the language model, or in an encoder. An engine checks its items with the adapter in
both cases.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from transformers import PreTrainedConfig

from shared.errors import InvalidRequest
from shared.models.lazy_module import LazyModule
from shared.native.choices import KernelSetting

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from transformers import PreTrainedModel
else:
    torch = LazyModule("torch")

Fields = Mapping[str, "Tensor"]


class TowerAdapter:
    """Fields that a family's tower accepts, and embeddings that it returns."""

    @property
    def modules(self) -> tuple[str, ...]:
        """Return the names of the submodules that compute embeddings."""
        raise NotImplementedError

    @property
    def language_modules(self) -> tuple[str, ...]:
        """Return the names of the other submodules; the default is transformers' naming."""
        return ("model.language_model", "lm_head")

    metadata: tuple[str, ...] = ()
    """Names of the fields that the language model needs too, for its positions."""

    def __init__(self, config: PreTrainedConfig) -> None:
        self._config: Any = config
        self.hidden_size: int = config.get_text_config().hidden_size
        self.num_levels = 0
        """Number of further levels of features after each embedding, for the decoder's first
        layers (DeepStack)."""

    @property
    def width(self) -> int:
        """Size of an embedding with all its levels."""
        return (1 + self.num_levels) * self.hidden_size

    def count(self, fields: Fields) -> int:
        """Return the number of embeddings of an item, which depends only on its metadata.

        Raises InvalidRequest.
        """
        raise NotImplementedError

    def check(self, fields: Fields) -> None:
        """Raise InvalidRequest for fields that `encode` does not accept."""
        raise NotImplementedError

    def encode(self, model: Any, batch: Sequence[Fields]) -> list[Tensor]:
        """Return the embeddings of each item, [count, width]."""
        raise NotImplementedError

    def split(self, fields: Fields, max_count: int) -> list[Fields]:
        """Return parts of an item, in order. `join` combines their embeddings.

        Each part has at most `max_count` embeddings if the tower's attention allows it.
        """
        return [fields]

    def join(self, fields: Fields, parts: Sequence[Tensor]) -> Tensor:
        """Return the embeddings of an item, from the embeddings of all its parts."""
        return parts[0] if len(parts) == 1 else torch.cat(list(parts))

    def optimize_layers(self, model: Any, kernels: KernelSetting = "measured") -> None:
        """Replace layers of the tower by faster ones with the same results, if there are any."""

    def sample(self) -> Fields:
        """Return a small item for the warm-up."""
        raise NotImplementedError

    def samples(self) -> list[Fields]:
        """Return a small item of each modality for the warm-up."""
        return [self.sample()]

    def check_embedding(self, fields: Fields, embedding: Tensor) -> None:
        """Check embeddings from another worker. Raises InvalidRequest."""
        shape = (self.count(fields), self.width)
        if not embedding.is_floating_point() or tuple(embedding.shape) != shape:
            refuse(
                f"the embeddings are {embedding.dtype} {list(embedding.shape)}; expected"
                f" {list(shape)}"
            )
        check_finite(embedding)


def get_field(fields: Fields, name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """Return the field; -1 in `shape` allows any length.

    Raises InvalidRequest for a missing field, or one of another type or shape.
    """
    tensor = fields.get(name)
    if not isinstance(tensor, torch.Tensor):
        refuse(f"{name} is missing")
    actual = tuple(tensor.shape)
    fits = len(actual) == len(shape) and all(
        want in (-1, have) for have, want in zip(actual, shape, strict=True)
    )
    if tensor.dtype != dtype or not fits:
        refuse(f"{name} is {tensor.dtype} {list(actual)}; expected {dtype} {list(shape)}")
    return tensor


def look_up(pixels: Tensor, table: Tensor, tower: PreTrainedModel | None = None) -> Tensor:
    """Return the values of pixels [..., channels, num_pixels] uint8, as float32.

    With a `tower`, they are on its device and in its type. Only pixels and the table are copied
    there: a rounded table has the rounded values.
    """
    if tower is not None:
        pixels, table = pixels.to(tower.device), table.to(tower.device, tower.dtype)
    # One flat table: the values of channel c start at 256 * c.
    starts = 256 * torch.arange(len(table), dtype=torch.int32, device=table.device)
    entry = pixels.int() + starts[:, None]
    return table.flatten().index_select(0, entry.flatten()).view(pixels.shape)


def check_table(table: Tensor) -> None:
    if not bool(table.isfinite().all()):
        refuse("pixel_table holds values that are not finite")


def check_finite(*embeddings: Tensor) -> None:
    """Raise InvalidRequest unless all values are finite. The host waits for a device once."""
    if not bool(torch.stack([embedding.isfinite().all() for embedding in embeddings]).all()):
        refuse("the embeddings hold values that are not finite")


def refuse(message: str) -> NoReturn:
    raise InvalidRequest(message, field="items")
