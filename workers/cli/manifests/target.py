"""Where manifests are to be applied, and names of the objects in them. Pure."""

import hashlib
import re
from typing import Any, Literal

from msgspec import Struct

from workers.roles import WorkerSpec

Manifest = dict[str, Any]
Scaling = Literal["keda", "pagemill", "none"]

APP = "pagemill"
# An object of this name holds the configuration file; so does the volume of a pod.
CONFIG = "pagemill"
# Limit of Kubernetes for a label. Names of pods add up to 17 characters to that of a Deployment.
MAX_LABEL_LEN = 63
MAX_NAME_LEN = MAX_LABEL_LEN - 17
_NOT_IN_NAMES = re.compile("[^a-z0-9]+")


class Target(Struct, frozen=True):
    """A namespace of a Kubernetes cluster, and what is there already."""

    namespace: str = "pagemill"
    image: str = "pagemill"
    scaling: Scaling = "keda"
    models_claim: str = "models"
    """PersistentVolumeClaim with the folders of the models."""
    nats_secret: str = "pagemill-nats"
    """Secret whose key `url` holds the URL of the brokers."""
    nats_service: str = "nats-headless"
    """Headless Service of the brokers, whose pods are named like their servers."""
    nats_account: str = "PAGEMILL"

    @property
    def nats_monitoring(self) -> str:
        """Address of the brokers' monitoring, as KEDA sees it from its own namespace."""
        return f"{self.nats_service}.{self.namespace}.svc.cluster.local:8222"


def name_of(worker: WorkerSpec) -> str:
    """Return the name of a pool's Deployment: lower-case letters, digits and hyphens.

    Two pools never share a name: one that had to be changed or shortened ends with a digest.
    """
    parts = [worker.role, *(part for part in (worker.model, worker.stage) if part is not None)]
    full = "-".join(parts)
    name = _NOT_IN_NAMES.sub("-", full.lower()).strip("-")
    if name == full and len(name) <= MAX_NAME_LEN:
        return name
    digest = hashlib.blake2b("\0".join(parts).encode(), digest_size=4).hexdigest()
    return f"{name[: MAX_NAME_LEN - 9].rstrip('-')}-{digest}"


def labels_of(worker: WorkerSpec) -> dict[str, str]:
    """Return the labels that select the pods of a pool."""
    return {
        "app.kubernetes.io/name": APP,
        "app.kubernetes.io/component": worker.role,
        "app.kubernetes.io/instance": name_of(worker),
    }


def metadata(target: Target, name: str, labels: dict[str, str] | None = None) -> Manifest:
    return {
        "name": name,
        "namespace": target.namespace,
        "labels": labels or {"app.kubernetes.io/name": APP},
    }
