"""Pools in the configuration: their names, their workers, and what is refused."""

import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import yaml

from shared.config.parsing import parse_config
from shared.errors import ConfigError
from shared.gpu.devices import DeviceNeeds
from shared.stage.pipelines import check_pipelines
from workers.pools import Pools, deployment_name, pools_of, workers_of
from workers.roles import AUTOSCALER, WorkerSpec, default_workers, device_needs, stage_roles
from workers.settings import of_pool

ONE = {"a": {"path": "a", "tower": "encoder"}}
TWO = {**ONE, "b": {"path": "b"}}


def pools(entries: Sequence[dict[str, Any]], models: dict[str, Any] = ONE, **scale: Any) -> Pools:
    text = yaml.safe_dump({"models": models, "scale": {"pools": list(entries), **scale}})
    return pools_of(parse_config(text, {}, "pagemill.yaml"), "pagemill.yaml")


def test_without_pools_nothing_changes() -> None:
    config = parse_config(yaml.safe_dump({"models": ONE}), {}, "pagemill.yaml")
    assert workers_of(config, pools_of(config)) == default_workers(config)


def test_a_pool_begins_with_its_min_and_has_an_autoscaler() -> None:
    entries = [{"role": "engine", "max": 3}, {"role": "renderer", "min": 2, "max": 4}]
    text = yaml.safe_dump({"models": ONE, "scale": {"pools": entries}})
    config = parse_config(text, {}, "pagemill.yaml")
    assert Counter(workers_of(config, pools_of(config))) == {
        WorkerSpec("coordinator"): 1,
        WorkerSpec("renderer"): 2,
        WorkerSpec("encoder", "a"): 1,
        WorkerSpec(AUTOSCALER): 1,
    }


def test_edges_follow_the_pipeline_between_pools_of_one_model() -> None:
    entries: list[dict[str, Any]] = [
        {"role": "renderer", "min": 1},
        {"role": "encoder", "model": "a"},
        {"role": "engine", "model": "a"},
        {"role": "engine", "model": "b"},
    ]
    layout = pools(entries, TWO)
    assert list(layout.by_name) == ["renderer", "encoder/a", "engine/a", "engine/b"]
    assert layout.by_name["renderer"].models == ("a", "b")
    assert layout.scaling.edges == (("encoder/a", "engine/a"),)


def test_a_stage_with_another_name_has_a_separate_pool() -> None:
    image = {"from": "renderer", "function": "item", "mode": "fan_out"}
    vision = {"role": "encoder", "inputs": {"image": image}}
    models = {"a": {"path": "a", "stages": {"vision": vision}}}
    layout = pools([{"role": "encoder", "stage": "vision"}], models)
    assert layout.by_name["vision/a"].spec == WorkerSpec("encoder", "a", "vision")


def test_a_pool_is_found_by_its_stage_if_it_is_the_only_one() -> None:
    entries = [{"role": "engine", "model": "a"}, {"role": "engine", "model": "b"}]
    assert pools(entries[:1]).resolve("engine").name == "engine/a"
    assert pools(entries, TWO).resolve("engine/b").name == "engine/b"
    with pytest.raises(ConfigError, match="no pool 'engine'; there are: engine/a, engine/b"):
        pools(entries, TWO).resolve("engine")


@pytest.mark.parametrize(
    ("entries", "scale", "expected"),
    [
        (
            [{"role": "engine", "min": 3, "max": 2}],
            {},
            "scale.pools[0]: min: 3 is more than max, 2",
        ),
        ([{"role": "engine", "min": -1}], {}, "scale.pools[0].min: must be at least 0"),
        ([{"role": "engine", "idle_s": -1}], {}, "scale.pools[0].idle_s: must be at least 0"),
        (
            [{"role": "engine", "maximum": 1}],
            {},
            "scale.pools[0].maximum: unknown field",
        ),
        (
            [{"role": "driver"}],
            {},
            "scale.pools[0].role: no role 'driver' that serves a stage; there are"
            " 'renderer', 'encoder', 'prefill', 'engine'",
        ),
        ([{"role": "gateway"}], {}, "scale.pools[0].role: no role 'gateway' that serves a stage"),
        (
            [{"role": "engine", "model": "c"}],
            {},
            "scale.pools[0].model: no model 'c' is configured; there are 'a', 'b'",
        ),
        ([{"role": "engine"}], {}, "scale.pools[0].model: name one of the configured models"),
        (
            [{"role": "renderer", "model": "a", "min": 1}],
            {},
            "scale.pools[0].model: a renderer serves all models, so its pool names none",
        ),
        (
            [{"role": "encoder", "model": "b"}],
            {},
            "scale.pools[0].stage: no stage 'encoder' of role 'encoder' of model 'b'",
        ),
        ([{"role": "renderer"}], {}, "scale.pools[0].min: 0 is less than 1, which renderer needs"),
        (
            [{"role": "engine", "model": "a"}] * 2,
            {},
            "scale.pools[1].role: the pool engine/a is listed twice",
        ),
        (
            [{"role": "renderer", "min": 2, "max": 2}],
            {"budget": 1},
            "scale.budget: 1 is less than the pools' min together, 2",
        ),
    ],
)
def test_an_error_names_the_file_the_key_and_the_limit(
    entries: Sequence[dict[str, Any]], scale: dict[str, Any], expected: str
) -> None:
    with pytest.raises(ConfigError, match="^pagemill.yaml: " + re.escape(expected)):
        pools(entries, TWO, **scale)


DIVIDED = """
models:
  a:
    path: a
    pools:
      large: {device: cuda, devices: [0, 1], replicas: 2}
      small: {device: cpu, max_num_seqs: 4}
  b: {path: b}
engine: {block_size: 32, max_num_seqs: 16}
"""


def test_a_pool_of_engines_has_the_settings_of_all_engines_and_its_own() -> None:
    config = parse_config(DIVIDED, {"PAGEMILL_ENGINE__THREADS": "3"}, "test")
    pools = config.models["a"].pools
    assert {name: pool.max_num_seqs for name, pool in pools.items()} == {"large": 16, "small": 4}
    assert {(pool.block_size, pool.threads) for pool in pools.values()} == {(32, 3)}
    engines = [worker for worker in default_workers(config) if worker.role == "engine"]
    assert Counter(engines) == {
        WorkerSpec("engine", "a", pool="large"): 4,
        WorkerSpec("engine", "a", pool="small"): 1,
        WorkerSpec("engine", "b"): 1,
    }
    needs = {worker.pool: device_needs(config, worker) for worker in engines}
    assert needs["small"] is needs[None] is None
    assert needs["large"] == DeviceNeeds("models.a.pools.large", (0, 1), 0.9)
    assert len({deployment_name(worker) for worker in engines}) == 3


def test_a_worker_of_a_pool_has_its_settings_as_those_of_engines() -> None:
    config = parse_config(DIVIDED, {}, "test")
    assert of_pool(config, WorkerSpec("engine", "a", pool="small")).engine.max_num_seqs == 4
    for worker in (WorkerSpec("engine", "a", "talker"), WorkerSpec("engine", "b")):
        assert of_pool(config, worker) is config
    for model, pool, reason in (
        ("a", None, "the worker needs the name of a pool of its model; there are: large, small"),
        ("a", "big", "'a' has no pool 'big' of engines; there are: large, small"),
        ("b", "small", "'b' has no pool 'small' of engines; there are: none"),
    ):
        with pytest.raises(ConfigError, match=f"^--pool: {reason}$"):
            of_pool(config, WorkerSpec("engine", model, pool=pool))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (("small: {", "small: {replica: 2, "), "models.a.pools.small.replica: unknown field"),
        (("small: {", "small: {devices: [0], "), "models.a.pools.small.devices: devices are GPUs"),
        (
            ("engine: {", "engine: {thread: 1, "),
            "test: engine.thread: unknown field; did you mean threads",
        ),
    ],
)
def test_faults_of_pools_of_engines_are_named(change: tuple[str, str], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        parse_config(DIVIDED.replace(*change), {}, "test")


def test_pools_of_engines_are_scaled_by_name() -> None:
    entries = "{role: engine, model: a, pool: large, min: 1, max: 4}, {role: engine, model: b}"
    config = parse_config(f"{DIVIDED}scale: {{pools: [{entries}]}}", {}, "test")
    scaled = pools_of(config)
    assert {name: pool.spec for name, pool in scaled.by_name.items()} == {
        "engine.large/a": WorkerSpec("engine", "a", pool="large"),
        "engine/b": WorkerSpec("engine", "b"),
    }
    engines = [worker for worker in workers_of(config, scaled) if worker.role == "engine"]
    assert Counter(worker.pool for worker in engines) == {"large": 1, "small": 1}


@pytest.mark.parametrize(
    ("entry", "known"),
    [
        ("model: a", "'large', 'small'"),
        ("model: a, pool: big", "'large', 'small'"),
        ("model: b, pool: big", "none"),
    ],
)
def test_a_scaled_pool_of_engines_is_one_of_the_models(entry: str, known: str) -> None:
    text = f"{DIVIDED}scale: {{pools: [{{role: engine, {entry}}}]}}"
    with pytest.raises(ConfigError, match=rf"scale.pools\[0\].pool: name a pool .*: {known}$"):
        pools_of(parse_config(text, {}, "test"))


def test_a_model_without_engines_has_no_pools_of_them() -> None:
    text = "models: {a: {path: a, graph: qwen-image, pools: {small: {}}}}"
    config = parse_config(text, {}, "test")
    with pytest.raises(ConfigError, match=r"models.a.pools: the model has no stage 'engine'"):
        check_pipelines(config, stage_roles(), "test")
