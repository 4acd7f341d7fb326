"""LoRA adapters in a flat batch: each request's rows go through the adapter that it selects.

An adapter adds b (a x) to a linear layer's output for x (Hu et al., 2021). The rows of a sequence
are adjacent in a batch, so layers process runs of rows; rows without an adapter cost nothing.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor, nn

from shared.errors import UnknownAdapter
from shared.models.language import LanguageAdapter
from workers.engine.model.peft_format import LoraWeights, read_adapter


@dataclass(frozen=True, slots=True)
class AdapterRun:
    """Rows [start, stop) of a batch that use one adapter."""

    adapter: int
    start: int
    stop: int


@dataclass(slots=True)
class AdapterRuns:
    """Adapter runs of the current batch, shared by all layers of a model."""

    runs: list[AdapterRun] = field(default_factory=list)
    num_rows: int = 0


class AdaptedLinear(nn.Module):
    """A linear layer with the low-rank weights of all adapters."""

    a: Tensor  # [num_adapters + 1, max_rank, in_features]; zeros where an adapter has no weights
    b: Tensor  # [num_adapters + 1, out_features, max_rank]

    def __init__(
        self, base: nn.Linear, added: Mapping[int, LoraWeights], num: int, step: AdapterRuns
    ) -> None:
        """`added` has the weights by adapter number, from 1 to `num`; 0 stands for no adapter."""
        super().__init__()
        self.base = base
        self._adapters = frozenset(added)
        self._step = step
        rank = max(len(low_rank.a) for low_rank in added.values())
        self.register_buffer("a", base.weight.new_zeros(num + 1, rank, base.in_features))
        self.register_buffer("b", base.weight.new_zeros(num + 1, base.out_features, rank))
        for adapter, low_rank in added.items():
            self.a[adapter, : len(low_rank.a)] = low_rank.a
            self.b[adapter, :, : len(low_rank.a)] = low_rank.b

    def forward(self, hidden: Tensor) -> Tensor:  # [..., num_rows, in_features]
        output: Tensor = self.base(hidden)
        step = self._step
        if not step.runs:
            return output
        rows = hidden.reshape(-1, hidden.shape[-1])
        changed = output.view(-1, output.shape[-1])
        assert len(rows) == step.num_rows, "an adapted layer must process the whole batch"
        for run in step.runs:
            if run.adapter in self._adapters:
                low = rows[run.start : run.stop] @ self.a[run.adapter].T
                changed[run.start : run.stop].addmm_(low, self.b[run.adapter].T)
        return output


class Adapters:
    """The adapters of one model, by name."""

    def __init__(self, names: Sequence[str] = ()) -> None:
        self.step = AdapterRuns()
        self._numbers = {name: number for number, name in enumerate(names, 1)}

    def __bool__(self) -> bool:
        return bool(self._numbers)

    def check(self, name: str | None) -> None:
        """Raise UnknownAdapter if there is no adapter of this name."""
        if name is not None and name not in self._numbers:
            available = ", ".join(sorted(self._numbers)) or "none"
            raise UnknownAdapter(f"no adapter {name!r}; available: {available}", field="adapter")

    def assign(self, names: Sequence[str | None], query_start_loc: Sequence[int]) -> None:
        """Set the adapter of each sequence of the next batch, until the next call.

        The rows of sequence i are [query_start_loc[i], query_start_loc[i + 1]).
        """
        spans = zip(names, query_start_loc, query_start_loc[1:], strict=False)
        runs = []
        for name, group in itertools.groupby(spans, key=lambda span: span[0]):
            if name is not None:
                rows = list(group)
                runs.append(AdapterRun(self._numbers[name], rows[0][1], rows[-1][2]))
        self.step.runs, self.step.num_rows = runs, query_start_loc[-1]


def load_adapters(family: LanguageAdapter, folders: Mapping[str, str]) -> Adapters:
    """Load adapters from folders by name and insert them into the model. Raises ConfigError."""
    adapters = Adapters(list(folders))
    tower = () if family.tower is None else family.tower.modules
    added: dict[str, dict[int, LoraWeights]] = {}
    for number, (name, folder) in enumerate(folders.items(), 1):
        for module, low_rank in read_adapter(name, Path(folder), family.model, tower).items():
            added.setdefault(module, {})[number] = low_rank
    for module, by_number in added.items():
        linear = family.model.get_submodule(module)
        assert isinstance(linear, nn.Linear)
        adapted = AdaptedLinear(linear, by_number, len(folders), adapters.step)
        family.model.set_submodule(module, adapted)
    return adapters
