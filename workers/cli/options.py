"""Options that several commands share."""

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from shared.config import Config
from workers.cli import settings
from workers.roles import all_roles

ConfigFile = Annotated[
    Path | None,
    Parameter(
        name=["--config", "-c"],
        help="Configuration file; by default ./pagemill.yaml, or else the embedded default.",
    ),
]
NatsUrl = Annotated[
    str | None, Parameter(name="--nats", help="URL of the nats-server; by default as configured.")
]
Images = Annotated[
    list[Path] | None,
    Parameter(
        name=["--image", "-i"], help="An image for the question; repeat the option for several."
    ),
]
ModelName = Annotated[
    str | None, Parameter(help="Name of the model; by default the first one that is configured.")
]


def check_role(_: object, name: str | None) -> None:
    """Raise ValueError for a role that does not exist."""
    names = [spec.name for spec in all_roles()]
    if name is not None and name not in names:
        raise ValueError(f"no role {name!r}; there are: {', '.join(names)}")


def load(config: Path | None) -> Config:
    """Load the given configuration file, or the default. Raises ConfigError."""
    return settings.load_config(settings.find_config_file(config))


def find_url(config: Path | None, nats: str | None) -> str:
    """Return the broker's URL; reads the configuration only when none is given."""
    return nats or settings.nats_url(load(config))


def find_url_and_model(config: Path | None, nats: str | None, model: str | None) -> tuple[str, str]:
    """Return the broker's URL and the model to ask, by default the first one configured."""
    loaded = load(config)
    return nats or settings.nats_url(loaded), model or next(iter(loaded.models))
