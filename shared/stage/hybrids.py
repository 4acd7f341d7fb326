"""Settings that hybrid models refuse: their layers keep a state for each sequence.

A state holds all tokens so far. It cannot be divided into blocks, nor taken back by a token.
"""

from shared.config.schema import EngineConfig, ModelConfig
from shared.errors import ConfigError
from shared.stage.pipelines import ENGINE, pipeline_of


def check_settings(
    model: ModelConfig, engine: EngineConfig, name: str = "NAME", section: str = ENGINE
) -> None:
    """Raise ConfigError for a setting that does not work with states.

    `section` is the key of `engine`, which is another one for a pool.
    """
    detours = any(edge.mode == "detour" for edge in pipeline_of(model).edges)
    refused = {
        f"models.{name}.adapters": bool(model.adapters)
        and "a hybrid model takes no LoRA adapters: remove them",
        f"models.{name}.prefill": detours
        and "a hybrid model has states besides its KV blocks, which prefill workers do not send:"
        " remove the setting",
        f"{section}.kv_events": engine.kv_events
        and "a hybrid model caches no prefixes, so it has no KV events: set it to false",
        f"{section}.speculative.num_tokens": engine.speculative.num_tokens > 0
        and "the states of a hybrid model cannot take back drafted tokens: set it to 0",
    }
    for field, reason in refused.items():
        if reason:
            raise ConfigError(f"{field}: {reason}", field=field)
