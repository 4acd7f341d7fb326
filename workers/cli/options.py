"""Options that several commands share."""

import os
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from msgspec.structs import replace

from shared.bus.login import Login
from shared.config.schema import Config
from shared.errors import InvalidRequest
from shared.protocol import names
from shared.protocol.pipeline import TEXT
from shared.stage.pipelines import pipelines_of
from workers import settings
from workers.roles import all_roles

ConfigFile = Annotated[
    Path | None,
    Parameter(
        name=["--config", "-c"],
        help="Configuration file; by default the settings of a running `pagemill up` in this"
        " folder, or else ./pagemill.yaml, or else the embedded default.",
    ),
]
NatsUrl = Annotated[
    str | None, Parameter(name="--nats", help="URL of the nats-server; by default as configured.")
]
ModelName = Annotated[
    str | None,
    Parameter(
        help="Name of the model; by default the only one that can do what is asked, among the"
        " configured ones, or for text among those that are served."
    ),
]
Json = Annotated[bool, Parameter(help="Print one JSON object, or for a list one in each line.")]
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


def find_file(config: Path | None) -> Path | None:
    """Return the file of a configuration, by default of a running `pagemill up`, or of this folder.

    None stands for the embedded default.
    """
    return config or settings.find_running_file() or settings.find_config_file(None)


def load(config: Path | None) -> Config:
    """Load the configuration in `find_file`. Raises ConfigError.

    A `pagemill up` with this configuration in this folder decides the port of the broker.
    """
    loaded, port = settings.load_config(find_file(config)), settings.find_running_port()
    is_other = config is not None and config.resolve() != settings.find_running_file()
    is_set = loaded.nats.port != 0 and settings.NATS_PORT in os.environ
    if port is None or is_other or is_set:
        return loaded
    return replace(loaded, nats=replace(loaded.nats, port=port))


def find_login(config: Path | None, nats: str | None) -> Login:
    """Return the login of commands at the broker, by default the configured one."""
    return settings.login_of(load(config), given_url=nats)


def find_writer(config: Config, served: Collection[str] = ()) -> str:
    """Return the model that writes text: the only configured one, or else the only served one.

    A configured model is not chosen if only others are in `served`. Raises InvalidRequest if there
    is none or several.
    """
    outputs = {name: pipeline.outputs for name, pipeline in pipelines_of(config).items()}
    writers = [name for name in outputs if TEXT in outputs[name]]
    # A model that is not configured here is expected to write text.
    writing = sorted(name for name in served if name not in outputs or name in writers)
    configured = [name for name in writers if name in writing]
    return only_model(configured or writing or writers, "write text")


def only_model(names: Iterable[str], does: str) -> str:
    """Return the only name. Raises InvalidRequest if there is none or several.

    `does` says what the models can do.
    """
    candidates = list(names)
    if not candidates:
        raise InvalidRequest(f"no configured model can {does}; see `pagemill check`", field="model")
    if len(candidates) > 1:
        raise InvalidRequest(
            f"--model is required, because several models can {does}: {', '.join(candidates)}",
            field="model",
        )
    return candidates[0]
