"""Linear layers whose weights stay numbers of 8 or 4 bits, with scales in float32.

A value is `(number - zero) * scale`. Each output channel has one scale, or one for each group of
inputs. The C++ kernels read these numbers; elsewhere torch converts them for each product.
"""

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shared.vision.dequantize import MIDDLE, KeptNumbers

# torch's product of bfloat16 rows with int8 weights reads half the bytes of a product in bfloat16,
# but does not tile rows: with more rows it is slower than converting the weights. Its products in
# other types are not vectorised.
MAX_PACKED_ROWS = 16
# Number of inputs that its loops process at a time.
PACKED_STEP = 32
# Channels that are converted at a time, so that the result is in a cache when it is read.
CHUNK_CHANNELS = 1024


class QuantizedLinear(nn.Module):
    """A linear layer with quantized weights; the output has the type of the input."""

    weight: Tensor
    """[out_features, in_features] int8 or float8_e4m3fn, or [out_features, in_features / 2] uint8
    with two 4-bit numbers in each byte, the first one in the lower bits."""
    scale: Tensor  # [out_features, num_groups] float32
    zero: Tensor | None  # the same; for 4-bit numbers, less MIDDLE
    is_rounded: bool
    """Whether the numbers are rounded weights; else they are the numbers of a folder."""
    error = 0.0
    """Error of rounded weights, relative to their norm."""
    found_shape: torch.Size | None = None
    """Shape of the weights that were read, if it is not the layer's."""

    def __init__(self, linear: nn.Linear, numbers: KeptNumbers | None = None) -> None:
        """Make a layer in the shape of `linear`, which may be on the meta device.

        Its numbers are of the form of `numbers`; by default the layer has rounded weights.
        """
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bias = linear.bias
        self.is_rounded = numbers is None
        dtype = torch.int8 if numbers is None else numbers.dtype
        self.group_size = linear.in_features if numbers is None else numbers.group_size
        num_bytes = self.in_features // (2 if dtype == torch.uint8 else 1)
        num_groups = -(-self.in_features // self.group_size)
        empty = partial(linear.weight.new_empty, requires_grad=False)
        self.register_buffer("weight", empty((self.out_features, num_bytes), dtype=dtype))
        for name in ("scale", "zero"):
            is_stored = name == "scale" or (numbers is not None and numbers.zero is not None)
            shape = (self.out_features, num_groups)
            self.register_buffer(name, empty(shape, dtype=torch.float32) if is_stored else None)

    def forward(self, hidden: Tensor) -> Tensor:  # [..., in_features] -> [..., out_features]
        rows = hidden.reshape(-1, self.in_features)
        if _has_packed_product(rows, self.weight):
            ones = rows.new_ones(self.out_features)
            output: Tensor = torch.ops.aten._weight_int8pack_mm(
                rows.contiguous(), self.weight, ones
            )
        else:
            output = self._multiply_converted(rows)
        if self._scales_sums:
            output = (output * self.scale[:, 0]).to(rows.dtype)
        if self.bias is not None:
            output += self.bias
        return output.view(*hidden.shape[:-1], self.out_features)

    def values(self, part: slice = slice(None)) -> Tensor:
        """Return the weights of some output channels in float32."""
        exact = self._numbers(part, torch.float32)
        if self.zero is not None:
            exact -= self._spread(self.zero[part])
        return exact.mul_(self._spread(self.scale[part]))

    @property
    def _scales_sums(self) -> bool:
        # The numbers are exact in either type; scaling the sums rounds once less than scaling the
        # weights.
        return self.scale.shape[1] == 1 and self.zero is None

    def _numbers(self, part: slice, dtype: torch.dtype) -> Tensor:
        numbers = self.weight[part]
        if numbers.dtype == torch.uint8:
            return torch.stack([numbers & 15, numbers >> 4], -1).flatten(1).to(dtype) - MIDDLE
        return numbers.to(dtype)

    def _spread(self, groups: Tensor) -> Tensor:
        """Repeat the value of each group for its inputs."""
        if groups.shape[1] == 1:
            return groups
        return groups.repeat_interleave(self.group_size, 1)[:, : self.in_features]

    def _multiply_converted(self, rows: Tensor) -> Tensor:
        step = CHUNK_CHANNELS if rows.device.type == "cpu" else self.out_features
        output = rows.new_empty(len(rows), self.out_features)
        for first in range(0, self.out_features, step):
            part = slice(first, first + step)
            if self._scales_sums:
                weight = self._numbers(part, rows.dtype)
            else:
                weight = self.values(part).to(rows.dtype)
            output[:, part] = F.linear(rows, weight)
        return output


def _has_packed_product(rows: Tensor, weight: Tensor) -> bool:
    return (
        rows.device.type == "cpu"
        and rows.dtype == torch.bfloat16
        and weight.dtype == torch.int8
        and len(rows) <= MAX_PACKED_ROWS
        and rows.shape[1] % PACKED_STEP == 0
    )
