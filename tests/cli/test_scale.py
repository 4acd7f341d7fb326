"""The command `pagemill scale`: what it refuses, and what it stores."""

from pathlib import Path

import pytest

import workers.__main__  # noqa: F401 - registers the functions of edges
from shared.bus.bus import Bus
from shared.bus.embedded_server import EmbeddedServer
from shared.errors import ConfigError, Unavailable
from shared.protocol import subjects
from shared.protocol.encoding import to_json
from shared.protocol.messages import PoolPlan, ScaleOrders, ScalePlan, StartReport
from shared.state import scale_state
from workers.cli.commands.scale import scale
from workers.settings import DEMO_MODEL

CONFIG = f"""
models: {{demo: {{path: {DEMO_MODEL}}}}}
scale:
  pools:
  - {{role: engine, max: 4}}
  - {{role: renderer, min: 1, max: 2}}
"""

# As coordinators publish it.
REFUSAL = StartReport(
    "engine", "engine_demo", "1", 0, "refused", "demo", "engine", refused="no weights"
)


def write(file: Path, before: str = "", after: str = "") -> Path:
    file.write_text(CONFIG.replace(before, after))
    return file


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return write(tmp_path / "pagemill.yaml")


@pytest.fixture
async def led(bus: Bus) -> None:
    await bus.purge(subjects.SCALE_STREAM, ">")
    plan = ScalePlan(
        "autoscaler-1", {"engine/demo": PoolPlan(0, reason="demand", why="0 workers for 0 tasks")}
    )
    await bus.publish_without_id(subjects.SCALE_PLAN, to_json(plan))


@pytest.mark.parametrize(
    ("size", "message"),
    [
        ("engine", "'engine' is neither POOL=N nor POOL=auto"),
        ("engine=-1", "'engine=-1' is neither"),
        ("engine=5", "engine=5: a pool engine/demo has 0 to 4 workers"),
        ("renderer=0", "renderer=0: a pool renderer has 1 to 2 workers"),
        ("driver=1", "no pool 'driver'; there are: engine/demo, renderer"),
    ],
)
async def test_sizes_that_cannot_be_are_refused(config: Path, size: str, message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{message}"):
        await scale(size, config=config, nats="nats://127.0.0.1:1")


async def test_orders_are_merged_until_they_are_released(
    config: Path, broker: EmbeddedServer, bus: Bus, led: None, capsys: pytest.CaptureFixture[str]
) -> None:
    for sizes, paused, expected in (
        (["engine=2"], None, ScaleOrders({"engine/demo": 2})),
        (["renderer=2"], True, ScaleOrders({"engine/demo": 2, "renderer": 2}, True)),
        (["engine/demo=auto"], None, ScaleOrders({"renderer": 2}, True)),
        ([], False, ScaleOrders({"renderer": 2}, False)),
    ):
        await bus.heartbeats.publish_start("engine_demo", to_json(REFUSAL))
        options = {"pause": paused is True, "resume": paused is False}
        await scale(*sizes, **options, config=config, nats=broker.url)
        assert await scale_state.read_orders(bus) == expected
    output = capsys.readouterr().out
    assert "at zero" in output
    assert "\n  0 workers for 0 tasks\n  no worker starts: no weights\n" in output


@pytest.mark.parametrize(
    ("before", "after", "reason"),
    [
        ("max: 4", "max: 2", "its max is 2"),
        ("scale:", "scale:\n  budget: 3", "the budget leaves no more"),
    ],
)
async def test_what_holds_of_an_order_is_shown_after_the_configuration_has_changed(
    config: Path,
    tmp_path: Path,
    broker: EmbeddedServer,
    bus: Bus,
    led: None,
    capsys: pytest.CaptureFixture[str],
    before: str,
    after: str,
    reason: str,
) -> None:
    await scale("engine=4", config=config, nats=broker.url)
    assert "hold" not in capsys.readouterr().err
    await scale(config=write(tmp_path / "new.yaml", before, after), nats=broker.url)
    output = capsys.readouterr()
    assert f"engine/demo is set to 4, and gets 2: {reason}" in output.err
    (row,) = [line for line in output.out.splitlines() if line.startswith("engine/demo")]
    assert row.split()[4] == "2"


async def test_without_a_leader_the_order_is_stored_and_that_is_said(
    config: Path, broker: EmbeddedServer, bus: Bus
) -> None:
    await bus.purge(subjects.SCALE_STREAM, ">")
    with pytest.raises(Unavailable, match="no autoscaler leads"):
        await scale("engine=1", config=config, nats=broker.url)
    assert await scale_state.read_orders(bus) == ScaleOrders({"engine/demo": 1})
    await bus.purge(subjects.SCALE_STREAM, ">")
