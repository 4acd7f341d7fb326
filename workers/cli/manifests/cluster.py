"""All manifests of a cluster. Pure."""

import hashlib
from collections import Counter
from collections.abc import Mapping
from pathlib import PurePosixPath
from posixpath import normpath

from shared.config.schema import Config
from shared.errors import ConfigError
from shared.scaling.pools import PoolSettings
from shared.stage.pipelines import pipelines_of
from workers.cli.manifests.deployments import (
    CONFIG_PATH,
    GATEWAY,
    MODELS_PATH,
    make_deployment,
    make_disruption_budget,
    make_service,
)
from workers.cli.manifests.scaling import (
    ACCOUNT,
    consumers_of,
    make_autoscaler_rights,
    make_scaled_object,
)
from workers.cli.manifests.target import CONFIG, Manifest, Target, metadata
from workers.pools import pools_of
from workers.roles import AGENT, AUTOSCALER, BATCHER, WorkerSpec, default_workers, role_of

Sizes = Mapping[WorkerSpec, PoolSettings]


def make_manifests(config: Config, text: str, sizes: Sizes, target: Target) -> list[Manifest]:
    """Return the manifests of all pools of a configuration. `text` is the text of its file.

    Raises ConfigError for settings that cannot work in a pod.
    """
    check_for_pods(config)
    digest = hashlib.sha256(text.encode()).hexdigest()
    manifests: list[Manifest] = [
        {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": metadata(target, CONFIG),
            "data": {PurePosixPath(CONFIG_PATH).name: text},
        }
    ]
    for worker, size in sizes.items():
        manifests += _make_pool(worker, size, config, target, digest)
    if target.scaling == "pagemill":
        pools = [pool.spec for pool in pools_of(config).by_name.values()]
        manifests += make_autoscaler_rights(pools, target)
        manifests.append(_make_autoscaler(config, target, digest))
    return manifests


def sizes_of(config: Config, source: str) -> dict[WorkerSpec, PoolSettings]:
    """Return the sizes of all pools of a configuration. `source` names its file in errors.

    Roles that serve all models have at least two workers, so that one is left while the other is
    replaced. Raises ConfigError.
    """
    fixed = Counter(default_workers(config))
    fixed.update(WorkerSpec(role) for role in (GATEWAY, AGENT, BATCHER))
    sizes = {
        worker: PoolSettings(min=size, max=size)
        for worker, num in fixed.items()
        if (size := num if role_of(worker.role).one_model else max(2, num))
    }
    scaled = {pool.spec: pool.settings for pool in pools_of(config, source).by_name.values()}
    return sizes | scaled


def _make_pool(
    worker: WorkerSpec, size: PoolSettings, config: Config, target: Target, digest: str
) -> list[Manifest]:
    is_fixed = size.min == size.max or target.scaling == "none"
    if target.scaling == "pagemill":
        is_fixed = worker not in {pool.spec for pool in pools_of(config).by_name.values()}
    replicas = max(1, size.min) if is_fixed else None
    manifests = [make_deployment(worker, config, target, digest, replicas)]
    if worker.role == GATEWAY:
        manifests.append(make_service(worker, target))
    if size.min > 1:
        manifests.append(make_disruption_budget(worker, target))
    if target.scaling == "keda" and not is_fixed:
        consumers = consumers_of(worker, pipelines_of(config))
        manifests.append(make_scaled_object(worker, size, consumers, target))
    return manifests


def _make_autoscaler(config: Config, target: Target, digest: str) -> Manifest:
    """Return the Deployment of two autoscalers: one leads, and the other takes its place."""
    deployment = make_deployment(WorkerSpec(AUTOSCALER), config, target, digest, 2)
    pod = deployment["spec"]["template"]["spec"]
    pod["serviceAccountName"] = ACCOUNT
    pod["automountServiceAccountToken"] = True
    pod["containers"][0]["env"].append({"name": "PAGEMILL_SCALE__ACTUATOR", "value": "kubernetes"})
    return deployment


def check_for_pods(config: Config) -> None:
    """Raise ConfigError for a setting that cannot work in a pod."""
    for key, path in _files(config).items():
        if not PurePosixPath(normpath(path)).is_relative_to(MODELS_PATH):
            message = f"{path} is not below {MODELS_PATH}, where pods have the claim of the models"
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
