"""Arithmetic of `ops.bench.gpu`, and its message on a machine without a GPU."""

import sys

import pytest
import torch

from ops.bench import gpu
from ops.gpu.load import Load, Rates, rates_of
from ops.gpu.timing import idle_share


def test_idle_time_is_time_without_a_kernel() -> None:
    assert idle_share([]) == 1
    assert idle_share([(0, 4)]) == 0
    # From 0 to 10 nothing runs in [3, 4] and [6, 9]; kernels may overlap, and come in any order.
    assert idle_share([(4, 6), (0, 3), (1, 2), (9, 10)]) == pytest.approx(0.4)


def test_decoding_counts_while_all_streams_decode() -> None:
    # The second stream has its first token at 3, the first ends at 7.
    rates = rates_of(Load(2, 30, 5), 1.0, [[2, 4, 5, 6, 7], [3, 5, 7, 9, 11]])
    assert rates == Rates(prefill=30.0, decode=6 / 4)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu"])
    with pytest.raises(SystemExit, match="no CUDA device here; try --dry-run"):
        gpu.main()
