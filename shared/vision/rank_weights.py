"""Weights of one rank: a model with smaller matrices, and the parts of the files that fill them."""

from functools import partial
from pathlib import Path
from types import EllipsisType
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    Transpose,
    WeightConverter,
    WeightRenaming,
    rename_source_key,
)

from shared.vision.rank_plan import (
    COLWISE,
    EXPERTS,
    ROWWISE,
    SUMMED,
    Share,
    read_plan,
    refuse,
    set_local_heads,
    style_of,
)
from shared.vision.weight_files import list_model_files


class Cut(NamedTuple):
    """The part of a weight that a rank has."""

    dim: int
    """Dimension, counted from the last, as expert weights are stacked."""
    size: int
    """Size of the whole weight in this dimension."""
    part: int
    num_parts: int
    num_packed: int
    """Number of matrices in the weight, each of which is divided."""

    def ranges(self, size: int) -> list[slice]:
        """Return the part of a dimension that holds all of the packed matrices, or one of them."""
        num_packed = self.num_packed if size == self.size else 1
        length = size // num_packed // self.num_parts
        starts = (size // num_packed * i + self.part * length for i in range(num_packed))
        return [slice(start, start + length) for start in starts]


class RankShare:
    """The share of a rank in the decoder of a model, which is on the device "meta"."""

    def __init__(self, whole: Any, share: Share) -> None:
        """Raise ConfigError for a model that the ranks cannot share."""
        self.share = share
        decoder = whole.get_decoder()
        self._styles = _Styles(whole)
        self._whole = whole
        config = decoder.config
        num_heads = config.num_attention_heads
        self._num_kv_heads = getattr(config, "num_key_value_heads", None) or num_heads
        self._cuts = {
            name: cut
            for name, parameter in whole.named_parameters()
            if (cut := self._cut_of(name, parameter.shape)) is not None
        }

    def _cut_of(self, name: str, shape: torch.Size) -> Cut | None:
        owner, num_ranks = self._styles.of(name.rpartition(".")[0]), self.share.num_ranks
        style = self._styles.of(name) or owner
        if owner == EXPERTS and style == EXPERTS:
            refuse(f"the plan does not divide {name}")
        if style not in COLWISE | ROWWISE or (style in ROWWISE and len(shape) == 1):
            return None
        dim = -1 if style in ROWWISE or len(shape) == 1 else -2
        num_packed = 2 if style.startswith("packed") else 1
        num_parts = num_ranks
        if name.split(".")[-2] in ("k_proj", "v_proj"):
            num_parts = min(num_ranks, self._num_kv_heads)
        if shape[dim] % (num_parts * num_packed):
            refuse(f"{num_ranks} ranks cannot share {name} of shape {list(shape)} equally")
        part = self.share.rank * num_parts // num_ranks
        return Cut(dim, shape[dim], part, num_parts, num_packed)

    def shrink(self, model: Any) -> None:
        """Replace the weights of an equal model on "meta" by weights of this rank's sizes."""
        for name, cut in self._cuts.items():
            owner, _, attribute = name.rpartition(".")
            module = model.get_submodule(owner)
            shape = list(getattr(module, attribute).shape)
            shape[cut.dim] //= cut.num_parts
            setattr(module, attribute, torch.nn.Parameter(torch.empty(shape, device="meta")))

    def absent_modules(self) -> list[str]:
        """Return the names of the modules that only rank 0 has: the embeddings and the head."""
        if self.share.rank == 0:
            return []
        ends = (self._whole.get_input_embeddings(), self._whole.get_output_embeddings())
        return [name for name, module in self._whole.named_modules() if module in ends]

    def finish(self, model: Any) -> None:
        """Complete a loaded model of this rank."""
        for name in self.absent_modules():
            owner, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(owner), attribute, torch.nn.Identity())
        if self.share.rank:
            for module in summed_modules(model):
                bias = getattr(module, "bias", None)
                if isinstance(bias, Tensor):
                    # The sum over the ranks has the bias once.
                    bias.zero_()
        set_local_heads(model.get_decoder().config, self.share.num_ranks)

    def open_weights(self, folder: Path) -> dict[str, Any]:
        """Return the weights of this rank by their names in the files. Raises ConfigError.

        Each is read when it is indexed. A file is closed with its last weight.
        """
        conversions = get_model_conversion_mapping(self._whole)
        renamings = [c for c in conversions if isinstance(c, WeightRenaming)]
        converters = [c for c in conversions if isinstance(c, WeightConverter)]
        by_pattern = {pattern: c for c in converters for pattern in c.source_patterns}
        state, base = self._whole.state_dict(), self._whole.base_model_prefix
        rename = partial(rename_source_key, base_model_prefix=base, meta_state_dict=state)
        weights: dict[str, Any] = {}
        for path in list_model_files(folder):
            file: Any = safe_open(path, framework="pt")
            for name in file.keys():  # noqa: SIM118
                target, pattern = rename(name, renamings, converters)
                if target not in state and name in state:
                    target, pattern = rename(name, [], [])
                stored = file.get_slice(name)
                if (cut := self._cuts.get(target)) is not None:
                    operations = [] if pattern is None else by_pattern[pattern].operations
                    stored = _PartOfWeight(name, stored, cut, operations, state[target].shape)
                weights[name] = stored
        return weights


def summed_modules(model: Any) -> list[torch.nn.Module]:
    """Return the modules with outputs to be summed over the ranks."""
    styles = _Styles(model)
    return [module for name, module in model.named_modules() if styles.of(name) in SUMMED]


class _Styles:
    """Styles of the modules and weights of a model with a decoder. May raise ConfigError."""

    def __init__(self, model: Any) -> None:
        decoder = model.get_decoder()
        (name,) = (name for name, module in model.named_modules() if module is decoder)
        self._prefix = f"{name}." if name else ""
        self._plan = read_plan(decoder.config)

    def of(self, name: str) -> str | None:
        if not name.startswith(self._prefix):
            return None
        return style_of(self._plan, name.removeprefix(self._prefix))


class _PartOfWeight:
    """A part of a weight of a file, in the form in which transformers reads whole ones."""

    def __init__(
        self, name: str, stored: Any, cut: Cut, operations: list[Any], shape: torch.Size
    ) -> None:
        """`shape` is the shape of the weight in the model, which `operations` make of it."""
        self._stored, self._cut = stored, cut
        stored_shape = stored.get_shape()
        turns = [op for op in operations if isinstance(op, Transpose) and op.check_dims]
        self._is_turned = bool(turns) and stored_shape != list(shape)
        self._dim = -3 - cut.dim if self._is_turned else cut.dim
        is_readable = all(
            op in turns or isinstance(op, Concatenate | MergeModulelist) for op in operations
        )
        sizes = {cut.size, cut.size // cut.num_packed}
        if not is_readable or stored_shape[self._dim] not in sizes:
            refuse(f"{name} is stored in a form that ranks cannot read in parts")

    def __getitem__(self, index: EllipsisType) -> Tensor:
        size = self._stored.get_shape()[self._dim]
        rest = (slice(None),) * (-1 - self._dim)
        pieces = [self._stored[(..., r, *rest)] for r in self._cut.ranges(size)]
        tensor = torch.cat(pieces, self._dim)
        # transformers would compare the shapes to find out whether to transpose.
        return tensor.mT if self._is_turned else tensor
