"""Names of the Deployments of pools on Kubernetes. Pure."""

import hashlib
import re

from workers.roles import WorkerSpec

# Limit of Kubernetes for a label. Names of pods add up to 17 characters to that of a Deployment.
MAX_LABEL_LEN = 63
MAX_NAME_LEN = MAX_LABEL_LEN - 17
_NOT_IN_NAMES = re.compile("[^a-z0-9]+")


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
