"""Objects that scale pools: by KEDA, or by the autoscaler of Pagemill. Pure.

KEDA adds pending tasks and those in flight of one consumer, asks the brokers' monitoring for both,
and takes the trigger that wants most: see `pkg/scalers/nats_jetstream_scaler.go` of KEDA.
"""

from collections.abc import Iterable, Mapping

from shared.protocol import subjects
from shared.protocol.pipeline import Pipeline
from shared.scaling.pools import PoolSettings
from workers.cli.manifests.target import Manifest, Target, labels_of, metadata
from workers.deployment_names import name_of
from workers.roles import AUTOSCALER, WorkerSpec

POLL_S = 5
# The window in which KEDA and its HorizontalPodAutoscaler wait before they stop pods.
COOLDOWN_S = 120
# An engine has work for several steps of its batch lane before another one is worth its start.
BATCH_FACTOR = 4
ACCOUNT = f"pagemill-{AUTOSCALER}"


def make_scaled_object(
    worker: WorkerSpec, pool: PoolSettings, consumers: Iterable[tuple[str, str]], target: Target
) -> Manifest:
    """Return KEDA's object for a pool with these consumers, each with its lane."""
    return {
        "apiVersion": "keda.sh/v1alpha1",
        "kind": "ScaledObject",
        "metadata": metadata(target, name_of(worker), labels_of(worker)),
        "spec": {
            "scaleTargetRef": {"name": name_of(worker)},
            "pollingInterval": POLL_S,
            "cooldownPeriod": COOLDOWN_S,
            "minReplicaCount": pool.min,
            "maxReplicaCount": pool.max,
            # Without figures there is a worker, so that nothing waits for ever.
            "fallback": {"failureThreshold": 3, "replicas": max(1, pool.min)},
            "advanced": {
                "horizontalPodAutoscalerConfig": {
                    "behavior": {"scaleDown": {"stabilizationWindowSeconds": COOLDOWN_S}}
                }
            },
            "triggers": [_trigger(name, lane, pool, target) for name, lane in consumers],
        },
    }


def _trigger(consumer: str, lane: str, pool: PoolSettings, target: Target) -> Manifest:
    threshold = pool.per_engine * (1 if lane == subjects.LANES[0] else BATCH_FACTOR)
    return {
        "type": "nats-jetstream",
        "metadata": {
            "natsServerMonitoringEndpoint": target.nats_monitoring,
            "account": target.nats_account,
            "stream": subjects.STAGES_STREAM,
            "consumer": consumer,
            "lagThreshold": str(threshold),
            "activationLagThreshold": "0",
        },
    }


def consumers_of(worker: WorkerSpec, pipelines: Mapping[str, Pipeline]) -> list[tuple[str, str]]:
    """Return the durable consumers from which a pool's workers pull, each with its lane."""
    return [
        (subjects.stage_consumer(stage.name, model, lane), lane)
        for model, pipeline in pipelines.items()
        if worker.model in (None, model)
        for stage in pipeline.stages
        if stage.role == worker.role and worker.stage in (None, stage.name)
        for lane in subjects.LANES
    ]


def make_autoscaler_rights(pools: Iterable[WorkerSpec], target: Target) -> list[Manifest]:
    """Return the autoscaler's account, which may only read and set the sizes of these pools."""
    name = ACCOUNT
    rule = {
        "apiGroups": ["apps"],
        "resources": ["deployments/scale"],
        "resourceNames": [name_of(worker) for worker in pools],
        "verbs": ["get", "patch"],
    }
    rbac = "rbac.authorization.k8s.io"
    return [
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": metadata(target, name)},
        {
            "apiVersion": f"{rbac}/v1",
            "kind": "Role",
            "metadata": metadata(target, name),
            "rules": [rule],
        },
        {
            "apiVersion": f"{rbac}/v1",
            "kind": "RoleBinding",
            "metadata": metadata(target, name),
            "roleRef": {"apiGroup": rbac, "kind": "Role", "name": name},
            "subjects": [{"kind": "ServiceAccount", "name": name, "namespace": target.namespace}],
        },
    ]
