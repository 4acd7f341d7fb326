"""Steps that an engine reports while it loads a model."""

from shared.config.schema import EngineConfig, ModelConfig
from shared.native import library
from workers.engine.loader import COMPILING, PACKING, READING, load
from workers.settings import DEMO_MODEL


def test_each_step_of_loading_is_named() -> None:
    steps: list[str] = []
    load(ModelConfig(str(DEMO_MODEL)), EngineConfig(kv_cache_mib=64), steps.append)
    packing = [] if library.load() is None else [PACKING]
    assert steps == [
        COMPILING,
        READING,
        COMPILING,
        *packing,
        "warming up",
        "loading the vision tower",
    ]


def test_torch_packs_nothing() -> None:
    steps: list[str] = []
    engine = EngineConfig(kv_cache_mib=64, kernels="torch")
    load(ModelConfig(str(DEMO_MODEL)), engine, steps.append)
    assert steps == [READING, "warming up", "loading the vision tower"]
