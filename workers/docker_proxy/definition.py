"""The definition of a further container, taken from a container of the same service. Pure.

Compose creates containers from the same three parts, so a further one has the rights, the mounts,
the environment and the networks that the compose file gives its service, and no others. See
https://docs.docker.com/reference/api/engine/ (ContainerCreate and ContainerInspect).
"""

from collections.abc import Mapping
from typing import Any

from msgspec import Struct

from shared.errors import ConfigError

PROJECT = "com.docker.compose.project"
SERVICE = "com.docker.compose.service"
NUMBER = "com.docker.compose.container-number"
ONE_OFF = "com.docker.compose.oneoff"
# Compose names in it the container that it replaces by another one.
REPLACE = "com.docker.compose.replace"
# Docker's short form of a container's id, which is its default host name, and an alias.
SHORT_LEN = 12
# Each container has its own.
_OWN = {"Hostname", "MacAddress"}


class Definition(Struct, frozen=True):
    """The definition of a container."""

    name: str
    body: dict[str, Any]
    """The body of the request that creates it, with its first network."""
    networks: dict[str, dict[str, Any]]
    """Its settings in further networks, by their ids; older engines accept one at its creation."""


def define(inspected: Mapping[str, Any], number: int) -> Definition:
    """Return the definition of container `number` of the same service.

    Raises ConfigError for a service that can have one container only.
    """
    short, config = inspected["Id"][:SHORT_LEN], inspected["Config"]
    kept = {key: value for key, value in config.items() if key not in _OWN}
    if config.get("Hostname") and config["Hostname"] != short:
        kept["Hostname"] = config["Hostname"]
    labels = {key: value for key, value in config["Labels"].items() if key != REPLACE}
    body = kept | {
        # The image itself: its name may have gone to another one meanwhile.
        "Image": inspected["Image"],
        "Labels": labels | {NUMBER: str(number)},
        "HostConfig": inspected["HostConfig"],
    }
    networks = _networks(inspected, short)
    if networks:
        mode = inspected["HostConfig"].get("NetworkMode")
        first = mode if mode in networks else next(iter(networks))
        body["NetworkingConfig"] = {"EndpointsConfig": {first: networks.pop(first)[1]}}
    return Definition(_name(inspected, labels, number), body, dict(networks.values()))


def _name(inspected: Mapping[str, Any], labels: Mapping[str, str], number: int) -> str:
    """Return compose's name of the container; its two generations separate the parts otherwise."""
    name, parts = inspected["Name"].lstrip("/"), (labels[PROJECT], labels[SERVICE])
    for separator in "-_":
        prefix = separator.join((*parts, ""))
        if name.removeprefix(prefix).isdecimal() or f"_{prefix}" in name:
            return f"{prefix}{number}"
    raise ConfigError(
        f"service {parts[1]!r}: its container has the name {name!r}; a service with"
        " `container_name` cannot have further containers",
        field="scale.pools",
    )


def _networks(inspected: Mapping[str, Any], short: str) -> dict[str, tuple[str, dict[str, Any]]]:
    """Return id and settings of each network of compose's, by name: others take no settings."""
    return {
        name: (
            seen["NetworkID"],
            {
                "Aliases": [alias for alias in seen.get("Aliases") or [] if alias != short],
                "DriverOpts": seen.get("DriverOpts"),
            },
        )
        for name, seen in inspected["NetworkSettings"]["Networks"].items()
        if name not in ("bridge", "host", "none")
    }
