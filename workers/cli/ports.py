"""Check of all ports that `pagemill up` needs, before anything starts."""

import re
import shlex
import sys
from typing import get_args
from urllib.parse import urljoin

import httpx2
import msgspec

from shared.bus.embedded_server import check_port
from shared.bus.local_keys import find_keys
from shared.config.schema import Config
from shared.errors import Unavailable
from shared.net.listening import bind, is_in_use
from shared.stage.listeners import Section, check_address

HTTP_TIMEOUT_S = 1.0


class Ready(msgspec.Struct):
    """The body of `/ready`, as far as it is read here."""

    status: str
    models: dict[str, str] = {}


def check_ports(config: Config, nats: str | None = None) -> None:
    """Check that the broker and the workers of this machine can listen. Raises ConfigError.

    Ports in use raise one Unavailable, which names all of them and has the command with other
    ports. `nats` is the URL of a broker that runs already.
    """
    ports: dict[str, tuple[str, int]] = {}
    first: Unavailable | None = None
    for section in ("nats", *get_args(Section)):
        try:
            if section != "nats":
                check_address(config, section)
            elif nats is None and config.nats.url is None:
                check_port(config.nats.port)
        except Unavailable as error:
            if not is_in_use(error):
                raise
            first = first or error
            listen = "127.0.0.1" if section == "nats" else getattr(config, section).listen
            ports[section] = (listen, getattr(config, section).port)
    if first is None:
        return
    places = [f"{name}.port: port {port} of {host}" for name, (host, port) in ports.items()]
    verb = "is in use" if len(places) == 1 else "are in use"
    raise Unavailable(
        f"{' and '.join(places)} {verb}: {_describe_holder(ports)}: stop it, or use other ports:\n"
        f"  {_command(ports)}",
        field=first.field,
    ) from first


def _describe_holder(ports: dict[str, tuple[str, int]]) -> str:
    """Return who listens: Pagemill with its models and its folder, as far as they are known."""
    models, keys = [], None
    if "gateway" in ports:
        host, port = ports["gateway"]
        try:
            page = urljoin(f"http://{host}:{port}", "ready")
            answer = httpx2.get(page, timeout=HTTP_TIMEOUT_S)
            models = list(msgspec.json.decode(answer.content, type=Ready).models)
        except (httpx2.HTTPError, httpx2.InvalidURL, msgspec.DecodeError):
            pass
    if "nats" in ports:
        keys = find_keys("nats://{}:{}".format(*ports["nats"]))
    if not models and keys is None:
        return "maybe Pagemill runs already, or another program"
    serves = f" and serves {', '.join(models)}" if models else ""
    place = f", with its data in {keys.parent}" if keys is not None else ""
    return f"Pagemill runs already{serves}{place}"


def _command(ports: dict[str, tuple[str, int]]) -> str:
    """Return the typed command with a variable for a free port for each of `ports`."""
    pairs = [
        f"PAGEMILL_{name.upper()}__PORT={_next_free(host, port)}"
        for name, (host, port) in ports.items()
    ]
    typed = re.sub(r" --port[ =]\d+", "", shlex.join(sys.argv[1:]))  # It comes before variables.
    return " ".join([*pairs, "pagemill", typed])


def _next_free(host: str, port: int) -> int:
    """Return the first free port after `port`, or 0, which lets the system choose."""
    for candidate in range(port + 1, 65536):
        try:
            bind("", host, candidate).close()
        except Unavailable:
            continue
        return candidate
    return 0
