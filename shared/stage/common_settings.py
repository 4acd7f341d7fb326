"""Settings that must be equal in all workers of a cluster.

A starting worker compares its settings with the settings of a running worker, and logs each
difference. It starts in any case, because old and new workers run at the same time while an
operator changes the configuration.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from shared.bus.bus import Bus
from shared.config.schema import Config, ModelConfig
from shared.errors import Unavailable
from shared.protocol import subjects
from shared.protocol.encoding import to_json
from shared.protocol.json_limits import json_limit_error
from shared.protocol.messages import CommonSettings, decode_common_settings
from shared.telemetry.logs import Logger

GROUP = "workers"
ANSWER_S = 1.0
# Limit on a logged value: any client of the broker may answer.
MAX_VALUE_LEN = 1000

# Folders differ between machines, and only `pagemill up` reads the number of replicas.
_OWN_OF_A_MODEL = ("path", "hash_model_id", "adapters", "stages", "pools")
_OWN_OF_A_STAGE = ("path", "replicas")
# Each worker applies its own limit to its drain.
_OWN_OF_DELIVERY = ("drain_s",)


def common_settings(config: Config) -> dict[str, Any]:
    """Return the settings by key, as JSON has them."""
    settings: dict[str, Any] = msgspec.json.decode(to_json(dict(_settings(config))))
    return settings


def differences(own: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Return the keys that differ. A model or setting that only one worker has is not compared."""
    return [key for key in own if key in other and own[key] != other[key]]


async def compare_settings(bus: Bus, worker: str, config: Config, log: Logger) -> None:
    """Log differences from a running worker, and answer the workers that start later.

    Raises Unavailable when the broker does not answer.
    """
    own = common_settings(config)
    try:
        other = decode_common_settings(await bus.request(subjects.SETTINGS, b"", ANSWER_S))
    except (TimeoutError, Unavailable):
        other = None  # This is the first worker, or the others are of an older version.
    if other is not None:
        for key in differences(own, other.settings):
            log.warning(
                "setting_differs",
                key=key,
                value=own[key],
                other_worker=other.worker,
                other_value=_loggable(other.settings[key]),
            )
    answer = to_json(CommonSettings(worker, own))

    async def respond(*_: object) -> bytes:
        return answer

    await bus.add_group_responder(subjects.SETTINGS, GROUP, respond)


def _loggable(value: Any) -> Any:
    """Return a short value unchanged, and a long one as a string, which the log cuts off."""
    # The log's encoder is recursive, so a deep value could exceed the interpreter's limit.
    if reason := json_limit_error(value):
        return reason
    text = to_json(value).decode()
    return value if len(text) <= MAX_VALUE_LEN else text


def _settings(config: Config) -> Iterator[tuple[str, Any]]:
    for name, model in config.models.items():
        yield from _of_model(f"models.{name}", model)
    for key, value in _fields(config.delivery, _OWN_OF_DELIVERY).items():
        yield f"delivery.{key}", value
    yield "nats.replicas", config.nats.replicas
    yield "embeddings.storage", config.embeddings.storage
    yield "scale.pools", msgspec.to_builtins(config.scale.pools)
    yield "scale.budget", config.scale.budget


def _of_model(prefix: str, model: ModelConfig) -> Iterator[tuple[str, Any]]:
    for key, value in _fields(model, _OWN_OF_A_MODEL).items():
        yield f"{prefix}.{key}", value
    yield f"{prefix}.adapters", sorted(model.adapters)
    stages = {name: _fields(stage, _OWN_OF_A_STAGE) for name, stage in model.stages.items()}
    yield f"{prefix}.stages", stages


def _fields(section: msgspec.Struct, without: tuple[str, ...]) -> dict[str, Any]:
    fields: dict[str, Any] = msgspec.to_builtins(section)
    return {key: value for key, value in fields.items() if key not in without}
