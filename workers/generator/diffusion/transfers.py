"""Copies of several tensors between the host and the device of a model at once."""

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from shared.codec.envelope import TensorData
from shared.codec.tensors import from_torch, to_torch
from workers.generator.core.denoising import Progress, Step, Stepped


class State(NamedTuple):
    """The progress of an image on the device, as in `Progress`."""

    latents: Tensor
    solver: Mapping[str, Tensor]


def upload(arrays: Sequence[TensorData], device: torch.device) -> list[Tensor]:
    """Return stored tensors on the device, in one copy."""
    tensors = list(map(to_torch, arrays))
    if device.type == "cpu":
        return tensors
    return _unpack(_pack(tensors).to(device), tensors)


def upload_states(steps: Sequence[Step], device: torch.device) -> list[State]:
    """Return the progress of images on the device, in one copy."""
    progress = [step.progress for step in steps]
    arrays = chain.from_iterable([p.latents, *p.solver.values()] for p in progress)
    tensors = iter(upload(list(arrays), device))
    return [State(next(tensors), {name: next(tensors) for name in p.solver}) for p in progress]


def download(states: Sequence[State], finished: Sequence[Tensor]) -> list[Stepped]:
    """Return the progress of images and their finished latents on the host, which waits once."""
    on_device = [*chain.from_iterable([s.latents, *s.solver.values()] for s in states), *finished]
    if on_device[0].device.type != "cpu":
        on_device = _unpack(_pack(on_device).cpu(), on_device)
    arrays = map(from_torch, on_device)
    progress = [Progress(next(arrays), {name: next(arrays) for name in s.solver}) for s in states]
    return list(map(Stepped, progress, arrays))


def _pack(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in tensors])


def _unpack(packed: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the packed tensors, which have the shapes and dtypes of `tensors`."""
    parts = torch.split(packed, [tensor.nbytes for tensor in tensors])
    # A clone is aligned for its dtype.
    return [
        part.clone().view(tensor.dtype).view(tensor.shape)
        for part, tensor in zip(parts, tensors, strict=True)
    ]
