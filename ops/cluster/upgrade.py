"""`make upgrade IMAGE=…`: change the compose cluster to another image without a failed request.

Each container is replaced by a new one: brokers one after the other, and then every role. A new
worker starts before an old one drains, unless it needs a device. A container that does not start is
removed, and the old one continues. An upgrade that was interrupted continues where it was.
"""

import argparse
import fcntl
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from ops.cluster.compose import (
    FOLDER,
    ONCE,
    POLL_S,
    PROXY,
    CheckFailed,
    Compose,
    Container,
    NotPossible,
    check_engine,
    is_broker,
    run,
)

# Tasks reach a worker that is at least as new as their writer.
FIRST = ("generator", "talker", "engine", "pool", "prefill", "encoder")
LAST = ("renderer", "coordinator", "autoscaler", "batcher", "agent", "metrics", "gateway")
IMAGES = ("IMAGE", "GPU_IMAGE")
"""Variables of the compose files with the images of workers."""
START_S = 600.0
CURRENT_S = 300.0
MAX_RESTARTS = 3
LOG_LINES = 10
HASH_LABEL = "com.docker.compose.config-hash"
# Unlike the health check of the container, it also asks whether each stream follows its leader.
ASK_BROKER = "import urllib.request as u; u.urlopen('http://127.0.0.1:8222/healthz', timeout=4)"


def say(text: str) -> None:
    sys.stdout.write(f"upgrade: {text}\n")
    sys.stdout.flush()


def order_of(service: str) -> tuple[int, int, str]:
    """Return the sort key of a service: brokers, then the roles from the last stage to the first.

    Stages of other names come after the engines.
    """
    if is_broker(service):
        return (0, 0, service)
    for number, names in ((1, FIRST), (3, LAST)):
        if service in names:
            return (number, names.index(service), service)
    return (2, 0, service)


class Upgrade:
    """Upgrade of a running cluster to the images that the variables of `compose` name."""

    def __init__(self, compose: Compose, counts: dict[str, int]) -> None:
        """Raises CheckFailed if the compose file lacks one of the services."""
        self._compose = compose
        self._counts = counts
        """Containers of each service before the upgrade."""
        self._services: dict[str, dict[str, Any]] = compose.config["services"]
        if missing := ", ".join(sorted(counts.keys() - self._services.keys())):
            raise CheckFailed(
                f"the compose file has lost {missing} since the interrupted upgrade: run it again"
            )
        self._hashes = dict(line.split() for line in compose.hashes().splitlines())
        names = {str(self._services[name]["image"]) for name in (*counts, "secrets")}
        self._images = {name: image_id(name) for name in names}

    def run(self) -> int:
        """Replace every container that differs. Return how many were replaced.

        Raises CheckFailed if a new container does not start. The old one then continues.
        """
        services = sorted(self._counts, key=order_of)
        outdated = [name for name in services if self._split(name)[0]]
        self._check(services)
        if outdated:
            self._make_keys()
        num_replaced = sum(self._replace_all(name) for name in outdated if name != PROXY)
        # Services that the old compose file did not have. Containers that run stay as they are.
        self._compose.up(**self._counts)
        if PROXY in outdated:
            say(
                "proxy: differs, and continues unchanged; `docker compose up --detach proxy`"
                " restarts it, which interrupts open answers"
            )
        return num_replaced

    def _split(self, service: str) -> tuple[list[Container], list[Container]]:
        """Return the containers that differ from the compose file, and those that do not."""
        wanted = (self._images[self._services[service]["image"]], self._hashes[service])
        old: list[Container] = []
        new: list[Container] = []
        for container in self._compose.containers(service):
            description = container.description
            has = (description["Image"], description["Config"]["Labels"].get(HASH_LABEL))
            (new if has == wanted else old).append(container)
        return old, new

    def _check(self, services: list[str]) -> None:
        """Raise CheckFailed unless all containers are healthy.

        A service with a container too many was being upgraded, and is not checked.
        """
        for service in services:
            containers = self._compose.containers(service)
            ill = [c.name for c in containers if not c.is_healthy]
            if ill and len(containers) <= self._counts[service]:
                raise CheckFailed(
                    f"{', '.join(ill)} is not healthy, so nothing was changed: see `docker logs"
                    f" {ill[0]}`"
                )

    def _make_keys(self) -> None:
        """Renew what the keys permit, as the new version needs it. Brokers read it when they start.

        Raises CheckFailed if the image does not start.
        """
        self._compose.command("up", "--detach", "--no-deps", "secrets")
        (container,) = self._compose.containers("secrets")
        if run(["docker", "wait", container.id]).strip() != "0":
            raise CheckFailed(
                f"the keys cannot be renewed, so nothing was changed:\n{container.log(LOG_LINES)}"
            )
        say("secrets: the keys permit what the new version needs")

    def _replace_all(self, service: str) -> int:
        count = 0
        while (parts := self._split(service))[0]:
            old, new = parts
            # An interrupted upgrade may have created the next one.
            has_next = new and len(old) + len(new) > self._counts[service]
            self._replace(old[0], new[-1] if has_next else self._create(service))
            count += 1
            if is_broker(service):
                self._wait_current()
        return count

    def _create(self, service: str) -> Container:
        """Create a container of the new image, which does not run yet."""
        there = self._compose.containers(service)
        scale = f"{service}={len(there) + 1}"
        options = ["--no-start", "--no-deps", "--no-recreate", "--scale", scale]
        self._compose.command("up", *options, service)
        ids = {container.id for container in there}
        (new,) = (c for c in self._compose.containers(service) if c.id not in ids)
        return new

    def _replace(self, old: Container, new: Container) -> None:
        starts_first = not is_broker(old.service) and not self._needs_device(old.service)
        began = time.monotonic()
        if not starts_first:
            run(["docker", "stop", old.id])
        run(["docker", "start", new.id])
        try:
            wait_started(self._compose, new)
        except CheckFailed:
            run(["docker", "rm", "--force", "--volumes", new.id])
            run(["docker", "start", old.id])
            say(f"{old.service}: {new.name} does not start, so {old.name} continues")
            raise
        if starts_first:
            run(["docker", "stop", old.id])
        run(["docker", "rm", "--volumes", old.id])
        seconds = time.monotonic() - began
        say(f"{old.service}: {new.name} in place of {old.name} after {seconds:.0f} s")

    def _needs_device(self, service: str) -> bool:
        deploy = self._services[service].get("deploy") or {}
        return bool(deploy.get("resources", {}).get("reservations", {}).get("devices"))

    def _wait_current(self) -> None:
        """Wait until every broker follows its cluster: only then may another one stop."""
        deadline = time.monotonic() + CURRENT_S
        for service in filter(is_broker, self._counts):
            while not is_current(self._compose, service):
                if time.monotonic() > deadline:
                    raise CheckFailed(f"{service} does not follow its cluster: see its log")
                time.sleep(POLL_S)


def is_current(compose: Compose, service: str) -> bool:
    try:
        compose.inside(service, "python3", "-Sc", ASK_BROKER)
    except CheckFailed:
        return False
    return True


def wait_started(compose: Compose, new: Container) -> None:
    """Wait until a container is healthy. Raises CheckFailed with its log if it will not be."""
    deadline = time.monotonic() + START_S
    while True:
        (now,) = (c for c in compose.containers(new.service) if c.id == new.id)
        if now.is_healthy:
            return
        has_ended = now.description["State"]["Status"] in ("exited", "dead")
        if has_ended or now.description["RestartCount"] >= MAX_RESTARTS:
            raise CheckFailed(f"{new.name} ends at its start:\n{new.log(LOG_LINES)}")
        if time.monotonic() > deadline:
            raise CheckFailed(f"{new.name} is not healthy:\n{new.log(LOG_LINES)}")
        time.sleep(POLL_S)


def image_id(name: str) -> str:
    """Return the id of an image of this machine. Raises CheckFailed."""
    command = ["docker", "image", "inspect", "--format", "{{.Id}}", name]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise CheckFailed(
            f"this machine has no image {name}: pull it, or build it by `make image IMAGE={name}`"
        )
    return done.stdout.strip()


def upgrade(compose: Compose, progress: Path) -> int:
    """Upgrade the cluster of `compose`. Return how many containers were replaced.

    While it runs, the file `progress` has the number of containers of each service, with which an
    upgrade that was interrupted continues. Raises CheckFailed.
    """
    with progress.open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise CheckFailed("another upgrade of this cluster is running") from error
        file.seek(0)
        try:
            if text := file.read():
                say("continues an upgrade that was interrupted")
            else:
                text = json.dumps(count_containers(compose))
            work = Upgrade(compose, json.loads(text))
            file.truncate(0)
            file.write(text)
            file.flush()
            num_replaced = work.run()
        except CheckFailed:
            progress.unlink()
            raise
        progress.unlink()
        return num_replaced


def count_containers(compose: Compose) -> dict[str, int]:
    """Return the number of containers of each service that has any. Raises CheckFailed."""
    names = compose.config["services"].keys() - ONCE
    counts = {name: len(compose.containers(name)) for name in sorted(names)}
    counts = {name: count for name, count in counts.items() if count}
    if not counts:
        raise CheckFailed("no container of the cluster exists: start it by `docker compose up`")
    return counts


def keep_images(env: dict[str, str]) -> None:
    """Write the images into compose/.env, from which the next `docker compose up` takes them."""
    file = FOLDER / ".env"
    text = file.read_text(encoding="utf-8")
    for name in IMAGES:
        if name in env:
            text = set_variable(text, name, env[name])
    file.write_text(text, encoding="utf-8")


def set_variable(text: str, name: str, value: str) -> str:
    """Return the text of a file of variables with another value of one of them."""
    line = re.compile(f"^{name}=.*$", re.MULTILINE)
    new = f"{name}={value}"
    return line.sub(lambda _: new, text) if line.search(text) else f"{text}{new}\n"


def main() -> int:
    parser = argparse.ArgumentParser(prog="make upgrade", description=__doc__)
    parser.add_argument("image", help="the new image of workers and brokers")
    image = parser.parse_args().image
    began = time.monotonic()
    try:
        check_engine()
        compose = Compose({"IMAGE": image})
        num_replaced = upgrade(compose, FOLDER / ".upgrade")
        keep_images(os.environ | {"IMAGE": image})
    except (NotPossible, CheckFailed, subprocess.TimeoutExpired) as error:
        say(str(error))
        return 1
    except KeyboardInterrupt:
        say("interrupted: the same command continues")
        return 130
    seconds = time.monotonic() - began
    say(f"{num_replaced} containers replaced in {seconds:.0f} s; compose/.env has IMAGE={image}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
