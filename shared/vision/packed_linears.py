"""Linears of towers on the C++ kernels, each together with the activation after it."""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shared.native import measuring, tower_kernels, trials
from shared.native.choices import KernelSetting, Option
from shared.native.matrices import PANEL, PackedMatrix
from shared.native.measuring import Trial
from shared.native.tower_kernels import TowerKernels

# Names of a linear and the activation after it in the modules of towers.
ACTIVATED = (
    ("fc1", "act"),
    ("linear_fc1", "act_fn"),
    ("gate_proj", "act_fn"),
    ("0", "1"),
    ("fc1", "activation_fn"),
    ("linear_1", "act"),
)
# Activations by their names in the kernels.
_FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda x: x,
    "quick_gelu": lambda x: x * (1.702 * x).sigmoid(),
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
}


class ChosenKernels:
    """Kernels, and the chosen options for a tower's operations."""

    def __init__(
        self,
        kernels: TowerKernels,
        setting: KernelSetting,
        modules: Sequence[nn.Module],
        others: Sequence[Trial] = (),
    ) -> None:
        """Choose options for the linears of the modules, and for the operations of other trials."""
        self.kernels = kernels
        places = [place for module in modules for place in _find_linears(module)]
        products = [self._trial_of(place.linear, place.activation) for place in places]
        self._options = measuring.select([*products, *others], setting, kernels.key)

    def option_of(self, trial: Trial) -> Option:
        return self._options[trial.operation.name]

    def option_of_linear(self, linear: nn.Linear, activation: str) -> Option:
        return self.option_of(self._trial_of(linear, activation))

    def _trial_of(self, linear: nn.Linear, activation: str) -> Trial:
        sizes = (linear.in_features, linear.out_features)
        return trials.tower_product(self.kernels, *sizes, activation, _FUNCTIONS[activation])


def pack_linears(module: nn.Module, chosen: ChosenKernels) -> None:
    """Replace linears in a module, and the activations after them, by `PackedLinear`.

    The weights of one linear are released before the next one is packed. If torch was chosen for a
    linear, it is not replaced.
    """
    for place in list(_find_linears(module)):
        option = chosen.option_of_linear(place.linear, place.activation)
        if option.implementation == "torch":
            continue
        packed = PackedLinear(place.linear, chosen.kernels, place.activation, option.min_tile_rows)
        setattr(place.parent, place.name, packed)
        if place.follower is not None:
            setattr(place.parent, place.follower, nn.Identity())


class _Place(NamedTuple):
    """Position of a linear in its module. It has no reference to the linear, which is released."""

    parent: nn.Module
    name: str
    activation: str = "none"
    follower: str | None = None
    """Name of the activation's module."""

    @property
    def linear(self) -> nn.Linear:
        linear = getattr(self.parent, self.name)
        assert isinstance(linear, nn.Linear)
        return linear


def _find_linears(module: nn.Module) -> Iterator[_Place]:
    """Find all linears in a module, with the activations after them that the kernels support."""
    activated = {}
    for linear_name, follower_name in ACTIVATED:
        linear, follower = (getattr(module, name, None) for name in (linear_name, follower_name))
        if isinstance(linear, nn.Linear) and isinstance(follower, nn.Module):
            activation = _find_activation(follower)
            if activation is not None:
                activated[linear_name] = _Place(module, linear_name, activation, follower_name)
    for name, child in module.named_children():
        if isinstance(child, nn.Linear):
            yield activated.get(name) or _Place(module, name)
        else:
            yield from _find_linears(child)


def _find_activation(activation: nn.Module) -> str | None:
    """Return the kernels' name of an activation; None if the kernels do not support it.

    Activations are compared by their values, because one function has several classes.
    """
    x = torch.linspace(-6, 6, 101)
    for name, function in _FUNCTIONS.items():
        if name != "none" and torch.allclose(activation(x), function(x), atol=1e-6):
            return name
    return None


class PackedLinear(nn.Module):
    def __init__(
        self, linear: nn.Linear, kernels: TowerKernels, activation: str, min_tile_rows: int
    ) -> None:
        """Pack the weights of a linear, which must have an even number of inputs."""
        super().__init__()
        num_outputs = linear.out_features
        bias = torch.zeros(num_outputs) if linear.bias is None else linear.bias.detach().float()
        self._kernels = kernels
        self._activation = activation
        self._num_outputs = num_outputs
        self._min_tile_rows = min_tile_rows
        # transformers reads the type and the device of a `weight`.
        self.weight = tower_kernels.pack_weight(linear.weight)
        self._bias = F.pad(bias, (0, -num_outputs % PANEL))

    def forward(self, x: Tensor) -> Tensor:  # [..., num_inputs] -> [..., num_outputs]
        return self._kernels.multiply(
            x,
            PackedMatrix(self.weight),
            self._bias,
            self._num_outputs,
            self._activation,
            self._min_tile_rows,
        )
