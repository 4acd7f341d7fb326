"""All manifests of a cluster. Pure."""

import hashlib
from collections import Counter
from collections.abc import Mapping
from pathlib import PurePosixPath
from posixpath import normpath
from urllib.parse import urlsplit

from shared.config import Config
from shared.errors import ConfigError
from shared.scaling.pools import PoolSettings
from shared.stage.pipelines import pipelines_of
from workers.cli.manifests.deployments import (
    CONFIG_PATH,
    MODELS_PATH,
    make_deployment,
    make_disruption_budget,
    make_service,
)
from workers.cli.manifests.scaling import (
    AUTOSCALER,
    consumers_of,
    make_autoscaler_rights,
    make_cpu_scaler,
    make_scaled_object,
)
from workers.cli.manifests.target import CONFIG, Manifest, Target, metadata
from workers.roles import WorkerSpec, default_workers, role_of

Pools = Mapping[WorkerSpec, PoolSettings]


def make_manifests(config: Config, text: str, pools: Pools, target: Target) -> list[Manifest]:
    """Return the manifests of all pools of a configuration, whose file has this text.

    Raises ConfigError for settings that cannot hold in a pod.
    """
    check_for_pods(config)
    pipelines = pipelines_of(config)
    digest = hashlib.sha256(text.encode()).hexdigest()
    manifests: list[Manifest] = [
        {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": metadata(target, CONFIG),
            "data": {PurePosixPath(CONFIG_PATH).name: text},
        }
    ]
    scaled: list[WorkerSpec] = []
    for worker, pool in pools.items():
        consumers = consumers_of(worker, pipelines)
        is_scaled = pool.min < pool.max and target.scaling != "none"
        replicas = None if is_scaled else max(1, pool.min)
        manifests.append(make_deployment(worker, config, target, digest, replicas))
        if worker.role == "gateway":
            manifests.append(make_service(worker, target))
        if pool.min > 1:
            manifests.append(make_disruption_budget(worker, target))
        if is_scaled and not consumers:
            manifests.append(make_cpu_scaler(worker, pool, target))
        elif is_scaled and target.scaling == "keda":
            manifests.append(make_scaled_object(worker, pool, consumers, target))
        elif is_scaled:
            scaled.append(worker)
    if scaled:
        manifests += make_autoscaler_rights(scaled, target)
        autoscaler = make_deployment(WorkerSpec(AUTOSCALER), config, target, digest, 2)
        pod = autoscaler["spec"]["template"]["spec"]
        pod |= {"serviceAccountName": f"pagemill-{AUTOSCALER}"}
        pod |= {"automountServiceAccountToken": True}
        manifests.append(autoscaler)
    return manifests


def pools_of(config: Config) -> dict[WorkerSpec, PoolSettings]:
    """Return the pools of a configuration: two doors, two coordinators, and the pipelines' stages.

    Two of a kind, because one is there while the other is replaced.
    """
    sizes = Counter(default_workers(config))
    sizes[WorkerSpec("gateway")] = 1
    return {
        worker: PoolSettings(min=size, max=size)
        for worker, num in sizes.items()
        if (size := num if role_of(worker.role).one_model else max(2, num))
    }


def check_for_pods(config: Config) -> None:
    """Refuse settings that would not hold in a pod. Raises ConfigError, which names the setting."""
    for key, path in _files(config).items():
        if not PurePosixPath(normpath(path)).is_relative_to(MODELS_PATH):
            message = f"{path} is not below {MODELS_PATH}, where pods have the claim of the models"
            raise ConfigError(f"{key}: {message}", field=key)
    if config.nats.url is not None and urlsplit(config.nats.url.split(",")[0]).password:
        raise ConfigError(
            "nats.url: it holds a password, which would be in a ConfigMap: leave it out, because"
            " pods take the URL from a Secret",
            field="nats.url",
        )
    gateway = config.gateway
    if not gateway.api_keys and not gateway.allow_anonymous:
        raise ConfigError(
            "gateway.api_keys: none, and a gateway that others can reach needs one: `pagemill key`"
            " makes it (or set gateway.allow_anonymous)",
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
