"""Target of manifests: a namespace of a cluster, and the names of its objects. Pure."""

from typing import Any, Literal

from msgspec import Struct

from workers.pools import deployment_name
from workers.roles import WorkerSpec

Manifest = dict[str, Any]
Scaling = Literal["keda", "pagemill", "none"]

APP = "pagemill"
# Name of the ConfigMap with the configuration file, and of the volume in a pod.
CONFIG = "pagemill"


class Target(Struct, frozen=True):
    """Namespace of a Kubernetes cluster, and objects that exist in it already."""

    namespace: str = "pagemill"
    image: str = "pagemill"
    scaling: Scaling = "keda"
    models_claim: str = "models"
    """PersistentVolumeClaim with the folders of the models."""
    nats_service: str = "nats-headless"
    """Headless Service of the brokers."""
    nats_account: str = "PAGEMILL"

    @property
    def nats_url(self) -> str:
        """URL of the brokers' Service for clients."""
        return f"nats://{self.nats_service.removesuffix('-headless')}.{self.namespace}:4222"

    @property
    def nats_monitoring(self) -> str:
        """Address of the brokers' monitoring, as KEDA sees it from its own namespace."""
        return f"{self.nats_service}.{self.namespace}.svc.cluster.local:8222"


def key_secret(role: str) -> str:
    """Return the name of the Secret with the key of a role."""
    return f"{APP}-key-{role}"


def labels_of(worker: WorkerSpec) -> dict[str, str]:
    """Return the labels that select the pods of a pool."""
    return {
        "app.kubernetes.io/name": APP,
        "app.kubernetes.io/component": worker.role,
        "app.kubernetes.io/instance": deployment_name(worker),
    }


def metadata(target: Target, name: str, labels: dict[str, str] | None = None) -> Manifest:
    return {
        "name": name,
        "namespace": target.namespace,
        "labels": labels or {"app.kubernetes.io/name": APP},
    }
