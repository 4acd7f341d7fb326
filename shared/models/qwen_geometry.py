"""Geometry of the patches in Qwen's vision towers. It depends on the grids of a batch alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from shared.helpers.lru import ByteLRU

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Geometry = Mapping[str, "Tensor"]
"""Arguments of transformers' vision models: positions and segments of patches, and their windows.
"""

MAX_BYTES = 2**24
"""Size of the cached geometries: of 50 images of 1280 x 720 pixels with interpolation weights."""


class Geometries:
    """Geometries of the last batches. For a tower that one thread uses at a time."""

    def __init__(self) -> None:
        self._cache: ByteLRU[tuple[torch.device, tuple[int, ...]], Geometry] = ByteLRU(MAX_BYTES)

    def get(self, visual: Any, grids: Tensor) -> Geometry:
        """Return the geometry of grids [num_items, 3], which are on the CPU.

        The bounds of segments stay there, because layers need them as numbers. Other tensors are on
        the device of `visual`.
        """
        key = visual.device, tuple(grids.flatten().tolist())
        geometry = self._cache.get(key)
        if geometry is None:
            geometry = {
                name: value if name.startswith("cu_") else value.to(visual.device)
                for name, value in _compute(visual, grids).items()
            }
            self._cache.put(key, geometry, sum(value.nbytes for value in geometry.values()))
        return geometry


def _compute(visual: Any, grids: Tensor) -> Geometry:
    # These functions need torch, which may be hidden when this module is imported.
    from transformers import vision_utils

    merge: int = visual.spatial_merge_size
    geometry: dict[str, Tensor] = {
        "position_ids": vision_utils.get_vision_position_ids(grids, merge),
        "cu_seqlens": vision_utils.get_vision_cu_seqlens(grids),
    }
    if hasattr(visual, "window_size"):
        window_index, cu_window_seqlens = vision_utils.get_vision_window_index(
            grids, merge, visual.window_size, visual.patch_size
        )
        geometry |= {"window_index": window_index, "cu_window_seqlens": cu_window_seqlens}
    if hasattr(visual, "num_grid_per_side"):
        indices, weights = vision_utils.get_vision_interpolation_indices_and_weights(
            grids,
            visual.num_grid_per_side,
            visual.interpolation_mode,
            visual.interpolation_align_corners,
            merge,
        )
        geometry |= {"interp_indices": indices, "interp_weights": weights}
    return geometry
