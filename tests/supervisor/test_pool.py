"""Roles and workers of a pool in a container."""

from pathlib import Path

import pytest

from shared.config.schema import Config, ModelConfig, NatsConfig, PoolConfig, ScaleConfig
from shared.errors import ConfigError
from tests import preloaded
from workers.roles import WorkerSpec
from workers.supervisor.pool import plan_workers, read_roles

URL = "nats://127.0.0.1:4222"
CONFIG = Config(
    {"demo": ModelConfig("demo", tower="encoder")},
    nats=NatsConfig(url=URL),
    scale=ScaleConfig([PoolConfig(role="engine", min=2, max=4)]),
)


def test_a_pool_has_the_min_of_its_pools_and_the_replicas_of_other_stages() -> None:
    workers, pools = plan_workers(CONFIG, ["engine", "encoder"])
    engine, encoder = WorkerSpec("engine", "demo"), WorkerSpec("encoder", "demo")
    assert workers == [encoder, engine, engine]
    assert [pool.name for pool in pools] == ["engine/demo"]
    assert plan_workers(CONFIG, ["encoder"]) == ([encoder], [])


def test_roles_are_separated_by_commas() -> None:
    assert read_roles("engine,encoder,engine", CONFIG, None) == ["engine", "encoder"]


@pytest.mark.parametrize("names", [None, "", "gateway", "engine,prefill", "engine, encoder"])
def test_a_role_without_a_stage_is_refused(names: str | None) -> None:
    with pytest.raises(ConfigError, match=r"^--roles: .* encoder, engine, renderer$") as refused:
        read_roles(names, CONFIG, None)
    assert refused.value.field == "roles"


def test_a_pool_needs_the_url_of_its_broker() -> None:
    config = Config(CONFIG.models)
    with pytest.raises(ConfigError, match=r"^nats\.url: "):
        read_roles("engine", config, None)
    assert read_roles("engine", config, URL) == ["engine"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["pool", "--roles", "gateway"], "no stage of role 'gateway'"),
        (["pool", "--roles", "engine"], "nats.url"),
        (["engine", "--roles", "engine"], "--roles belongs to the role `pool`"),
    ],
)
def test_a_refused_pool_ends_with_78(tmp_path: Path, arguments: list[str], message: str) -> None:
    if "gateway" in arguments:
        arguments = [*arguments, "--nats", URL]
    done = preloaded.run("worker", *arguments, cwd=tmp_path)
    assert done.returncode == 78
    assert message in done.stderr
