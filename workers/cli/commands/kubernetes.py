"""The command `pagemill manifests`."""

import sys
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console

import workers
from shared.errors import ConfigError
from shared.helpers.validation import reason_of
from workers import settings
from workers.cli.chart_values import Values, make_values
from workers.cli.options import ConfigFile

CHART = Path(workers.__file__).parents[1] / "compose" / "helm" / "pagemill"


class _Dumper(yaml.SafeDumper):
    """Writes texts of several lines as blocks."""


def _represent_text(dumper: _Dumper, text: str) -> yaml.ScalarNode:
    style = "|" if "\n" in text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style)


_Dumper.add_representer(str, _represent_text)


def manifests(
    *,
    values: list[Path] | None = None,
    namespace: str = "pagemill",
    first: bool = False,
    for_helm: bool = False,
    config: ConfigFile = None,
) -> int:
    """Write the chart's manifests for Kubernetes: `pagemill manifests | kubectl apply -f -`.

    Helm's library renders them: install pagemill[helm]. `--for-helm` does without it.

    Parameters
    ----------
    values
        A file with values of the chart; repeat the option for several.
    namespace
        Namespace of all objects, which is among them.
    first
        Start each scaled pool with its `min`. Otherwise its number of pods stays as it is.
    for_helm
        Write the values of this configuration instead, for `helm install --values FILE`.
    """
    file = settings.find_config_file(config)
    if file is None:
        raise ConfigError("no pagemill.yaml here: name one with --config", field="--config")
    loaded = settings.load_config(file)
    own = make_values(loaded, file.read_text(encoding="utf-8"), str(file))
    if loaded.nats.replicas == 1:
        Console(stderr=True).print("nats.replicas is 1: with three brokers, set it to 3.")
    if for_helm:
        yaml.dump(own, sys.stdout, Dumper=_Dumper, sort_keys=False, width=100)
        return 0
    for path in values or ():
        own = _merged(own, _read_values(path))
    sys.stdout.write(render({"createNamespace": True} | own, namespace, is_install=first))
    return 0


def render(values: Values, namespace: str, *, is_install: bool) -> str:
    """Return the chart's manifests as YAML documents. Raises ConfigError for wrong values."""
    try:
        import helm_python
    except ImportError:
        raise ConfigError(
            "manifests: Helm's library is missing: install pagemill[helm], or write values with"
            " --for-helm and run `helm template`",
            field="--for-helm",
        ) from None
    try:
        with helm_python.Chart.load(CHART) as chart:
            chart.validate_schema(values)
            texts = chart.render(
                values,
                name="pagemill",
                namespace=namespace,
                is_install=is_install,
                is_upgrade=not is_install,
            )
    except helm_python.HelmError as error:
        raise ConfigError(f"--values: {error}", field="--values") from error
    manifests = [
        texts[name].strip().removeprefix("---\n")
        for name in sorted(texts)
        if name.endswith(".yaml")
    ]
    return "".join(f"---\n{text}\n" for text in manifests if text)


def _read_values(file: Path) -> Any:
    try:
        return yaml.safe_load(file.read_text(encoding="utf-8")) or {}
    except (OSError, ValueError, yaml.YAMLError) as error:
        message = f"--values: {file}: cannot be read: {reason_of(error)}"
        raise ConfigError(message, field="--values") from error


def _merged(values: Any, changes: Any) -> Any:
    """Return values with changes. Mappings are merged, as in Helm."""
    if not isinstance(values, dict) or not isinstance(changes, dict):
        return changes
    return values | {name: _merged(values.get(name), change) for name, change in changes.items()}
