"""Deployments of pools of workers, with their Services and disruption budgets. Pure."""

from pathlib import Path

from shared.bus.login import seed_file
from shared.config.schema import Config
from shared.errors import ConfigError
from shared.gpu.devices import DeviceNeeds, find_profile
from workers.cli.manifests.target import CONFIG, Manifest, Target, key_secret, labels_of, metadata
from workers.pools import deployment_name
from workers.roles import WorkerSpec, device_needs

USER = 10001
METRICS_PORT = 9401
BLOBS_PORT = 7070
GATEWAY_PORT = 8000
GATEWAY = "gateway"
"""Role that serves HTTP clients."""
MODELS_PATH = "/models"
CONFIG_PATH = f"/config/{CONFIG}.yaml"
KEYS_PATH = "/keys"
# Readable for the group of the pod, which is the group of its user.
KEYS_MODE = 0o440
# Time for the end of the process, after the time in which a worker drains.
SPARE_S = 10
# A worker that is neither ready nor reports anything is started again after this time.
START_LIMIT_S = 600
PROBE_S = 5
GPU = "nvidia.com/gpu"


def make_deployment(
    worker: WorkerSpec, config: Config, target: Target, digest: str, replicas: int | None
) -> Manifest:
    """Return the Deployment of a pool.

    `digest` is the digest of the configuration: pods are replaced when it changes. `replicas` is
    None for a pool that is scaled, because a second apply would reset its number of pods.
    """
    labels = labels_of(worker)
    spec: Manifest = {
        "selector": {"matchLabels": labels},
        "strategy": {"rollingUpdate": {"maxUnavailable": 0, "maxSurge": 1}},
        "template": {
            "metadata": {
                "labels": labels,
                "annotations": {
                    "pagemill/config": digest,
                    "prometheus.io/scrape": "true",
                    "prometheus.io/port": str(METRICS_PORT),
                },
            },
            "spec": _pod(worker, config, target),
        },
    }
    if replicas is not None:
        spec = {"replicas": replicas} | spec
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": metadata(target, deployment_name(worker), labels),
        "spec": spec,
    }


def _pod(worker: WorkerSpec, config: Config, target: Target) -> Manifest:
    return {
        "terminationGracePeriodSeconds": round(config.delivery.drain_s) + SPARE_S,
        # Kubernetes would add variables such as PAGEMILL_..., which the configuration refuses.
        "enableServiceLinks": False,
        "automountServiceAccountToken": False,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": USER,
            "runAsGroup": USER,
            "fsGroup": USER,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "topologySpreadConstraints": [
            {
                "maxSkew": 1,
                "topologyKey": "kubernetes.io/hostname",
                "whenUnsatisfiable": "ScheduleAnyway",
                "labelSelector": {"matchLabels": labels_of(worker)},
            }
        ],
        "containers": [_container(worker, config, target)],
        "volumes": [
            {"name": "config", "configMap": {"name": CONFIG}},
            {
                "name": "models",
                "persistentVolumeClaim": {"claimName": target.models_claim, "readOnly": True},
            },
            {"name": "keys", "secret": _key(worker)},
            {"name": "data", "emptyDir": {}},
            {"name": "tmp", "emptyDir": {}},
        ],
    }


def _container(worker: WorkerSpec, config: Config, target: Target) -> Manifest:
    container: Manifest = {
        "name": worker.role,
        "image": target.image,
        "args": _arguments(worker),
        "env": _environment(config, target),
        "ports": [
            {"name": "metrics", "containerPort": METRICS_PORT},
            {"name": "blobs", "containerPort": BLOBS_PORT},
        ],
        "startupProbe": _probe("ready", START_LIMIT_S // PROBE_S),
        "livenessProbe": _probe("health", 6),
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": [
            {"name": "config", "mountPath": "/config", "readOnly": True},
            {"name": "models", "mountPath": MODELS_PATH, "readOnly": True},
            {"name": "keys", "mountPath": KEYS_PATH, "readOnly": True},
            {"name": "data", "mountPath": "/data"},
            {"name": "tmp", "mountPath": "/tmp"},
        ],
    }
    if worker.role == GATEWAY:
        container["ports"].append({"name": "http", "containerPort": GATEWAY_PORT})
        container["readinessProbe"] = _probe("ready", 2, "http")
    if (needs := device_needs(config, worker)) is not None:
        container["resources"] = {"limits": {_resource_of(needs): needs.num_devices}}
    return container


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


def _arguments(worker: WorkerSpec) -> list[str]:
    arguments = ["worker", worker.role, "--config", CONFIG_PATH]
    options = {"--model": worker.model, "--stage": worker.stage, "--pool": worker.pool}
    for option, value in options.items():
        if value is not None:
            arguments += [option, value]
    return arguments


def _key(worker: WorkerSpec) -> Manifest:
    """Return the source of a volume with the key of the worker's role, and no other."""
    file = seed_file(Path(), worker.role).name
    return {
        "secretName": key_secret(worker.role),
        "items": [{"key": file, "path": file}],
        "defaultMode": KEYS_MODE,
    }


def _environment(config: Config, target: Target) -> list[Manifest]:
    """Return the settings of a pod that override the configuration file."""
    values = {
        "PAGEMILL_BLOBS__LISTEN": "0.0.0.0",
        "PAGEMILL_BLOBS__PORT": str(BLOBS_PORT),
        "PAGEMILL_GATEWAY__LISTEN": "0.0.0.0",
        "PAGEMILL_GATEWAY__PORT": str(GATEWAY_PORT),
        "PAGEMILL_METRICS__LISTEN": "0.0.0.0",
        "PAGEMILL_METRICS__PORT": str(METRICS_PORT),
        "PAGEMILL_NATS__KEYS": KEYS_PATH,
        "PAGEMILL_NATS__URL": config.nats.url or target.nats_url,
    }
    sources = {
        "PAGEMILL_BLOBS__ADVERTISE": {"fieldRef": {"fieldPath": "status.podIP"}},
    }
    return [
        *({"name": name, "value": value} for name, value in values.items()),
        *({"name": name, "valueFrom": source} for name, source in sources.items()),
    ]


def _probe(check: str, failures: int, port: str = "metrics") -> Manifest:
    return {
        "httpGet": {"path": f"/{check}", "port": port},
        "periodSeconds": PROBE_S,
        "timeoutSeconds": 3,
        "failureThreshold": failures,
    }


def make_service(worker: WorkerSpec, target: Target) -> Manifest:
    """Return the Service of the gateways, which clients connect to."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata(target, deployment_name(worker), labels_of(worker)),
        "spec": {
            "selector": labels_of(worker),
            "ports": [{"name": "http", "port": 80, "targetPort": "http"}],
        },
    }


def make_disruption_budget(worker: WorkerSpec, target: Target) -> Manifest:
    """Return a budget that keeps at least one worker while nodes are drained."""
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": metadata(target, deployment_name(worker), labels_of(worker)),
        "spec": {"minAvailable": 1, "selector": {"matchLabels": labels_of(worker)}},
    }
