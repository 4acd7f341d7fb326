"""Objects that scale pools: by KEDA, or by the autoscaler of Pagemill. Pure.

KEDA reads a consumer's pending tasks and tasks in flight from the brokers' monitoring, adds them,
and follows the trigger with the highest number: see `pkg/scalers/nats_jetstream_scaler.go` of KEDA.
For a lane with a consumer for each slot, a formula adds up all triggers instead.
"""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from shared.errors import ConfigError
from shared.protocol import subjects
from shared.protocol.pipeline import Pipeline
from shared.scaling.pools import PoolSettings
from workers.cli.manifests.target import Manifest, Target, labels_of, metadata
from workers.pools import deployment_name
from workers.roles import AUTOSCALER, WorkerSpec

POLL_S = 5
# The window in which KEDA and its HorizontalPodAutoscaler wait before they stop pods.
COOLDOWN_S = 120
# A batch task counts a quarter: another engine starts only for several times as many of them.
BATCH_FACTOR = 4
ACCOUNT = f"pagemill-{AUTOSCALER}"


class PoolConsumer(NamedTuple):
    """A durable consumer from which a pool's workers pull."""

    name: str
    lane: str
    has_slot: bool = False


def make_scaled_object(
    worker: WorkerSpec, pool: PoolSettings, consumers: list[PoolConsumer], target: Target
) -> Manifest:
    """Return KEDA's object for a pool with these consumers. Raises ConfigError."""
    if pool.schedule:
        raise ConfigError(
            f"scale.pools: {deployment_name(worker)} has a schedule, which `--scaling keda` cannot"
            " write: remove it, or use `--scaling pagemill`",
            field="scale.pools",
        )
    scale_down = {"scaleDown": {"stabilizationWindowSeconds": COOLDOWN_S}}
    advanced: dict[str, Any] = {"horizontalPodAutoscalerConfig": {"behavior": scale_down}}
    triggers = [_trigger(consumer, pool, target) for consumer in consumers]
    if any(consumer.has_slot for consumer in consumers):
        advanced["scalingModifiers"] = _sum_of_triggers(consumers, pool)
        for number, trigger in enumerate(triggers):
            trigger["name"] = _trigger_name(number)
    return {
        "apiVersion": "keda.sh/v1alpha1",
        "kind": "ScaledObject",
        "metadata": metadata(target, deployment_name(worker), labels_of(worker)),
        "spec": {
            "scaleTargetRef": {"name": deployment_name(worker)},
            "pollingInterval": POLL_S,
            "cooldownPeriod": COOLDOWN_S,
            "minReplicaCount": pool.min,
            "maxReplicaCount": pool.max,
            # Without figures there is one worker, so that no task waits forever.
            "fallback": {"failureThreshold": 3, "replicas": max(1, pool.min)},
            "advanced": advanced,
            "triggers": triggers,
        },
    }


def _trigger_name(number: int) -> str:
    return f"queue_{number}"


def _sum_of_triggers(consumers: list[PoolConsumer], pool: PoolSettings) -> Manifest:
    """Return the formula that adds the tasks of all slots, and a part of the batch lane's tasks."""
    lanes = [
        " + ".join(_trigger_name(i) for i, item in enumerate(consumers) if item.lane == lane)
        for lane in subjects.LANES
    ]
    return {
        "formula": f"{lanes[0]} + ({lanes[1]}) / {BATCH_FACTOR}",
        "target": str(pool.per_engine),
        "activationTarget": "0",
        "metricType": "AverageValue",
    }


def _trigger(consumer: PoolConsumer, pool: PoolSettings, target: Target) -> Manifest:
    is_first = consumer.lane == subjects.LANES[0]
    threshold = pool.per_engine * (1 if is_first else BATCH_FACTOR)
    return {
        "type": "nats-jetstream",
        "metadata": {
            "natsServerMonitoringEndpoint": target.nats_monitoring,
            "account": target.nats_account,
            "stream": subjects.STAGES_STREAM,
            "consumer": consumer.name,
            "lagThreshold": str(threshold),
            "activationLagThreshold": "0",
        },
    }


def consumers_of(worker: WorkerSpec, pipelines: Mapping[str, Pipeline]) -> list[PoolConsumer]:
    """Return the durable consumers from which a pool's workers pull."""
    return [
        PoolConsumer(subjects.stage_consumer(stage.name, model, lane, slot), lane, slot is not None)
        for model, pipeline in pipelines.items()
        if worker.model in (None, model)
        for stage in pipeline.stages
        if stage.role == worker.role and stage.name == (worker.stage or worker.role)
        for lane in subjects.LANES
        for slot in stage.queue_slots
    ]


def make_autoscaler_rights(pools: Iterable[WorkerSpec], target: Target) -> list[Manifest]:
    """Return the autoscaler's account, which may read and set the sizes of these pools alone.

    It lists pods and sets their deletion costs. Names of pods are not known before they exist.
    """
    name = ACCOUNT
    sizes = {
        "apiGroups": ["apps"],
        "resources": ["deployments/scale"],
        "resourceNames": [deployment_name(worker) for worker in pools],
        "verbs": ["get", "patch"],
    }
    costs = {"apiGroups": [""], "resources": ["pods"], "verbs": ["list", "patch"]}
    rbac = "rbac.authorization.k8s.io"
    return [
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": metadata(target, name)},
        {
            "apiVersion": f"{rbac}/v1",
            "kind": "Role",
            "metadata": metadata(target, name),
            "rules": [sizes, costs],
        },
        {
            "apiVersion": f"{rbac}/v1",
            "kind": "RoleBinding",
            "metadata": metadata(target, name),
            "roleRef": {"apiGroup": rbac, "kind": "Role", "name": name},
            "subjects": [{"kind": "ServiceAccount", "name": name, "namespace": target.namespace}],
        },
    ]
