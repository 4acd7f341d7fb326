"""Options that several commands share."""

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from shared.bus.login import Login
from shared.config.schema import Config
from shared.protocol import names
from workers import settings
from workers.roles import all_roles

ConfigFile = Annotated[
    Path | None,
    Parameter(
        name=["--config", "-c"],
        help="Configuration file; by default ./pagemill.yaml, or else the settings of a running"
        " `pagemill up MODEL` in this folder, or else the embedded default.",
    ),
]
NatsUrl = Annotated[
    str | None, Parameter(name="--nats", help="URL of the nats-server; by default as configured.")
]
Images = Annotated[
    list[Path] | None,
    Parameter(
        name=["--image", "-i"],
        negative=(),
        help="An image for the question; repeat the option for several.",
    ),
]
Videos = Annotated[
    list[Path] | None,
    Parameter(
        name=["--video", "-v"],
        negative=(),
        help="A video for the question; repeat the option for several.",
    ),
]
Sounds = Annotated[
    list[Path] | None,
    Parameter(
        name=["--audio", "-a"],
        negative=(),
        help="A sound for the question; repeat the option for several.",
    ),
]
ModelName = Annotated[
    str | None, Parameter(help="Name of the model; by default the first one that is configured.")
]
RequestId = Annotated[
    str,
    Parameter(
        help="Id of the request, as the commands and the header X-Request-Id show it. If several"
        " tenants use the id, ID@TENANT names the request of one."
    ),
]


def check_new_id(_: object, request_id: str | None) -> None:
    """Raise ValueError for the id of a part of another request."""
    if request_id is not None and names.PART_MARK in request_id:
        raise ValueError(f"the id of a request {names.REQUEST_ID_RULE}")


NewId = Annotated[str | None, Parameter(validator=check_new_id)]


def check_role(_: object, name: str | None) -> None:
    """Raise ValueError for a role that does not exist."""
    roles = [spec.name for spec in all_roles()]
    if name is not None and name not in roles:
        raise ValueError(f"no role {name!r}; there are: {', '.join(roles)}")


def load(config: Path | None) -> Config:
    """Load a configuration, by default of this folder or its `pagemill up MODEL`.

    Raises ConfigError.
    """
    file = settings.find_config_file(config) or settings.find_running_file()
    return settings.load_config(file)


def find_login(config: Path | None, nats: str | None) -> Login:
    """Return the login of commands at the broker, by default the configured one."""
    return settings.login_of(load(config), given_url=nats)


def find_login_and_model(
    config: Path | None, nats: str | None, model: str | None
) -> tuple[Login, str]:
    """Return the login of commands and the model, by default the first configured one."""
    loaded = load(config)
    login = settings.login_of(loaded, given_url=nats)
    return login, model or next(iter(loaded.models))
