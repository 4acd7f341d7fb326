"""Values of the Helm chart for a configuration: its text and its pools of workers. Pure."""

from collections import Counter
from collections.abc import Mapping
from pathlib import PurePosixPath
from posixpath import normpath
from typing import Any

from shared.config.schema import Config
from shared.errors import ConfigError
from shared.gpu.devices import DeviceNeeds, find_profile
from shared.protocol import subjects
from shared.protocol.pipeline import Pipeline
from shared.stage.pipelines import pipelines_of
from workers.pools import deployment_name, pools_of
from workers.roles import (
    AGENT,
    BATCHER,
    GATEWAY,
    WorkerSpec,
    default_workers,
    device_needs,
    role_of,
)

Values = dict[str, Any]

# Folders in a pod that may contain models: the claim of the models, and the image's own.
MODELS_PATHS = ("/models", "/opt/pagemill")
GPU = "nvidia.com/gpu"


def make_values(config: Config, text: str, source: str) -> Values:
    """Return the values of the chart that come from a configuration.

    `text` is the text of its file, and `source` its name in errors. Raises ConfigError for settings
    that cannot work in a pod.
    """
    check_for_pods(config)
    values: Values = {
        "config": text,
        "drainSeconds": round(config.delivery.drain_s),
        "workers": _workers(config, source),
    }
    if config.nats.url is not None:
        values["nats"] = {"enabled": False, "url": config.nats.url}
    return values


def _workers(config: Config, source: str) -> Values:
    """Return the pools by the names of their Deployments.

    Roles that serve all models have at least two workers, so that one is left while the other is
    replaced.
    """
    numbers = Counter(default_workers(config))
    numbers.update(WorkerSpec(role) for role in (GATEWAY, AGENT, BATCHER))
    pools = {pool.spec: pool for pool in pools_of(config, source).by_name.values()}
    pipelines = pipelines_of(config)
    workers = {}
    for worker in dict.fromkeys((*numbers, *pools)):
        entry = {name: getattr(worker, name) for name in ("role", "model", "stage", "pool")}
        if (pool := pools.get(worker)) is not None:
            size = pool.settings
            entry |= {"min": size.min, "max": size.max, "scaled": True}
            entry |= {"perEngine": size.per_engine, "queues": queues_of(worker, pipelines)}
            if size.schedule:
                entry["scheduled"] = True
        else:
            number = numbers[worker]
            number = number if role_of(worker.role).one_model else max(2, number)
            entry |= {"min": number, "max": number}
        if (needs := device_needs(config, worker)) is not None:
            entry["device"] = {"resource": _resource_of(needs), "count": needs.num_devices}
        workers[deployment_name(worker)] = {k: v for k, v in entry.items() if v is not None}
    return workers


def queues_of(worker: WorkerSpec, pipelines: Mapping[str, Pipeline]) -> dict[str, list[str]]:
    """Return the durable consumers from which a pool's workers pull, by lane."""
    return {
        lane: [
            subjects.stage_consumer(stage.name, model, lane, slot)
            for model, pipeline in pipelines.items()
            if worker.model in (None, model)
            for stage in pipeline.stages
            if stage.role == worker.role and stage.name == (worker.stage or worker.role)
            for slot in stage.queue_slots
        ]
        for lane in subjects.LANES
    }


def _resource_of(needs: DeviceNeeds) -> str:
    """Return the resource of Kubernetes for a worker's device. Raises ConfigError for several."""
    profiles = {find_profile(name) for name in needs.names} or {None}
    if len(profiles) > 1:
        field = f"{needs.section}.devices"
        raise ConfigError(
            f"{field}: all pods of a Deployment have the same kind of device: name one MIG profile",
            field=field,
        )
    (profile,) = profiles
    # Labels of resources have no plus sign; NVIDIA's plugin writes a point.
    return GPU if profile is None else f"nvidia.com/mig-{profile.replace('+', '.')}"


def check_for_pods(config: Config) -> None:
    """Raise ConfigError for a setting that cannot work in a pod."""
    for key, path in _files(config).items():
        if not any(PurePosixPath(normpath(path)).is_relative_to(place) for place in MODELS_PATHS):
            message = f"{path} is not below {MODELS_PATHS[0]}, where pods have the volume of models"
            raise ConfigError(f"{key}: {message}", field=key)
    # A user without a password is a token.
    if "@" in (config.nats.url or ""):
        raise ConfigError(
            "nats.url: it contains a user or a password, which would be in a ConfigMap: remove"
            " them, because pods log in with the key of their role",
            field="nats.url",
        )
    for name in ("password_file", "keys", "tls_ca", "tls_cert", "tls_key"):
        if (path := getattr(config.nats, name)) is not None:
            raise ConfigError(
                f"nats.{name}: pods have no file {path}: remove the setting, because pods log in"
                " with the key of their role, from a Secret",
                field=f"nats.{name}",
            )
    gateway = config.gateway
    if not gateway.api_keys and not gateway.allow_anonymous:
        raise ConfigError(
            "gateway.api_keys: a gateway that others can reach needs at least one key: create it"
            " with `pagemill key` (or set gateway.allow_anonymous)",
            field="gateway.api_keys",
        )


def _files(config: Config) -> dict[str, str]:
    """Return the paths in a configuration that pods read, by setting."""
    files = {
        "gateway.tls_cert": config.gateway.tls_cert,
        "gateway.tls_key": config.gateway.tls_key,
        "embeddings.path": config.embeddings.path,
    }
    for name, model in config.models.items():
        files[f"models.{name}.path"] = model.path
        files |= {f"models.{name}.adapters.{key}": path for key, path in model.adapters.items()}
        files |= {f"models.{name}.stages.{key}.path": s.path for key, s in model.stages.items()}
    return {key: path for key, path in files.items() if path is not None}
