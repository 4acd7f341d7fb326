"""Settings that engines of several ranks refuse."""

from shared.config.schema import EngineConfig, ModelConfig
from shared.errors import ConfigError
from shared.stage.pipelines import ENGINE, pipeline_of


def check_rank_settings(
    model: ModelConfig, engine: EngineConfig, name: str = "NAME", section: str = ENGINE
) -> None:
    """Raise ConfigError for a setting that does not work with several ranks.

    `section` is the key of `engine`, which is another one for a pool.
    """
    if engine.tensor_parallel == 1:
        return
    detours = any(edge.mode == "detour" for edge in pipeline_of(model).edges)
    ranks = f"{section}.tensor_parallel"
    refused = {
        f"models.{name}.adapters": (bool(model.adapters), "LoRA adapters"),
        f"models.{name}.quantization": (model.quantization is not None, "quantized weights"),
        f"models.{name}.prefill": (detours, "prefill workers"),
        f"{section}.kernels": (engine.kernels in ("vector", "tiles"), "C++ kernels"),
    }
    for field, (is_set, feature) in refused.items():
        if is_set:
            raise ConfigError(
                f"{field}: {feature} are not supported with {ranks} {engine.tensor_parallel}:"
                f" remove the setting, or set {ranks} to 1",
                field=field,
            )
