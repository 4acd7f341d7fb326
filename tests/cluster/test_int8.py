"""An engine with int8 weights answers, says so in its log, and is listed with it."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.conftest import CONFIG, ROOT, Cluster, run, start_cluster, stop_cluster

RED = ROOT / "ops" / "demo_images" / "red.png"


@pytest.fixture
def rounded(tmp_path: Path) -> Iterator[Cluster]:
    setting = "  demo:\n    quantization: int8\n    dtype: bfloat16\n"
    running = start_cluster(tmp_path, CONFIG.replace("  demo:\n", setting))
    yield running
    stop_cluster(running)


def test_an_engine_with_int8_weights_answers_and_is_listed(rounded: Cluster) -> None:
    answer = run(rounded, "ask", f"What color is this image? @{RED}")
    assert "red" in answer.lower()
    (event,) = [line for line in rounded.log.read_text().splitlines() if "weights_qu" in line]
    assert "mean_weight_error" in event
    listed = [line for line in run(rounded, "models").splitlines() if line.startswith("demo ")]
    assert listed[0].endswith("served, int8")
