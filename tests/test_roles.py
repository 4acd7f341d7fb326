"""The workers that `pagemill up` starts."""

from collections import Counter

from shared.config.schema import Config, ModelConfig, StageConfig
from workers.roles import WorkerSpec, default_workers


def test_a_worker_of_all_models_is_started_as_often_as_any_model_asks() -> None:
    two = {"renderer": StageConfig(replicas=2), "engine": StageConfig(replicas=3)}
    config = Config({"a": ModelConfig("a", stages=two), "b": ModelConfig("b", tower="encoder")})
    assert Counter(default_workers(config)) == {
        WorkerSpec("coordinator"): 1,
        WorkerSpec("renderer"): 2,
        WorkerSpec("engine", "a"): 3,
        WorkerSpec("engine", "b"): 1,
        WorkerSpec("encoder", "b"): 1,
    }


def test_a_stage_has_the_role_that_its_own_model_gives_it() -> None:
    stages = {"vision": StageConfig(role="encoder")}, {"vision": StageConfig(role="engine")}
    models = {name: ModelConfig(name, stages=s) for name, s in zip("ab", stages, strict=True)}
    workers = default_workers(Config(models))
    assert WorkerSpec("encoder", "a", "vision") in workers
    assert WorkerSpec("engine", "b", "vision") in workers
