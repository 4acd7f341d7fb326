"""The held-out workloads, and the ratios of their report."""

import random
from pathlib import Path

from ops.bench.gateway.transports import Times
from ops.bench.heldout import workloads
from ops.bench.heldout.__main__ import rows
from ops.bench.peers.workloads import Maker
from ops.harness.samples import Samples


def maker(seed: int) -> Maker:
    return Maker(random.Random(seed), 768, Path())


def test_a_round_has_the_same_requests_for_every_server() -> None:
    first, second = (workloads.poisson(maker(5), random.Random(5)) for _ in range(2))
    assert first == second
    assert first != workloads.poisson(maker(6), random.Random(6))
    assert len(first) == 64
    times = [arrival.after_s for arrival in first]
    assert times == sorted(times)
    assert 4 < times[-1] < 16
    lengths = [len(arrival.prepared.request.token_ids) for arrival in first]
    assert min(lengths) < 64 < 256 < max(lengths)


def test_sampled_requests_have_penalties_and_some_a_grammar() -> None:
    fields = [arrival.prepared.fields for arrival in workloads.sampled(maker(1))]
    assert sum("structured_outputs" in each for each in fields) == 8
    assert all(each.keys() >= workloads.SAMPLING.keys() for each in fields)


def test_a_prompt_fits_the_model() -> None:
    for max_model_len, length in ((1024, 1016), (8192, 4096)):
        prepared = workloads.long_prompt(maker(1), 4096, max_model_len).prepared
        assert len(prepared.request.token_ids) == length
        assert length + prepared.request.max_tokens <= max_model_len


def test_requests_have_several_images(tmp_path: Path) -> None:
    arrivals = workloads.images(Maker(random.Random(1), 768, tmp_path))
    assert [len(arrival.prepared.urls) for arrival in arrivals] == [4] * 4


def test_gaps_are_those_of_all_decodes() -> None:
    times = [Times(0.1, 1.0, (0.1,) * 99), Times(0.1, 1.0, (0.1, 0.9))]
    figures = dict(workloads.gaps(times))
    assert figures["longest gap of decodes p50_s"] == 0.5
    assert figures["gap of decodes p99_s"] == 0.1
    assert figures["gap p99 to its median_s"] == 1.0


def test_ratios_above_one_are_better() -> None:
    assert workloads.ratio("tokens per second", 100, 50) == 2
    assert workloads.ratio("first token p50_s", 0.1, 0.3) == 0.3 / 0.1
    times = [Times(0.1, 1.0, (0.2, 0.1)), Times(0.3, 1.0, (0.4,))]
    figures = dict(workloads.figures(times, 90, 3.0))
    assert figures["tokens per second"] == 30
    assert figures["first token p50_s"] == 0.2
    alone = {"pagemill": {"first token_s": Samples([1.0, 3.0])}}
    figure = "tokens per second"
    both = {"pagemill": {figure: Samples([4.0])}, "vllm": {figure: Samples([2.0])}}
    cells = [row[2:] for row in rows({"long": both, "beside": alone}, "vllm")]
    assert cells == [("4", "2", "2.00"), ("2", "-", "-")]
