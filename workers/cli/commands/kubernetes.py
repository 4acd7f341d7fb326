"""The command `pagemill manifests`."""

import sys
from importlib.metadata import version
from pathlib import Path

from rich.console import Console

from shared.errors import ConfigError
from workers import settings
from workers.cli.manifests.cluster import make_manifests, sizes_of
from workers.cli.manifests.output import to_chart, to_yaml
from workers.cli.manifests.target import Scaling, Target
from workers.cli.options import ConfigFile


def manifests(
    *,
    image: str = "pagemill",
    namespace: str = "pagemill",
    scaling: Scaling = "keda",
    models_claim: str = "models",
    chart: Path | None = None,
    config: ConfigFile = None,
) -> int:
    """Write manifests for Kubernetes: `pagemill manifests | kubectl apply -f -`.

    The brokers are not among them, see the guide to Kubernetes.

    Parameters
    ----------
    image
        The image of all workers, which is built by compose/Dockerfile.
    namespace
        Namespace of all objects, and of the brokers' Service `nats-headless`.
    scaling
        `keda` writes a ScaledObject for each pool whose `max` is more than its `min`, `pagemill`
        runs the autoscaler, `none` keeps each pool at its `min`.
    models_claim
        PersistentVolumeClaim with the folders of the models, which pods mount at /models.
    chart
        Write a Helm chart into this folder instead, whose only value is `image`.
    """
    file = settings.find_config_file(config)
    if file is None:
        raise ConfigError("no pagemill.yaml here: name one with --config", field="--config")
    loaded = settings.load_config(file)
    target = Target(namespace, image, scaling, models_claim)
    sizes = sizes_of(loaded, str(file))
    objects = make_manifests(loaded, file.read_text(encoding="utf-8"), sizes, target)
    if loaded.nats.replicas == 1:
        Console(stderr=True).print("nats.replicas is 1: with three brokers, set it to 3.")
    if chart is None:
        sys.stdout.write(to_yaml(objects))
        return 0
    for name, text in to_chart(objects, target, version("pagemill")).items():
        path = chart / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return 0
