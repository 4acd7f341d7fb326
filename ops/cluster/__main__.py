"""`make cluster`: start the compose cluster, and check the claims of docs/operate/deploy.md.

The image is built unless it exists. The cluster has a separate project name, port and volumes, and
is removed at the end. Where no container engine can be started, the test is skipped with the
reason. With `--old IMAGE`, the cluster starts with an older image, from which the step `upgrade`
changes to the image. `--config` then names a configuration that the older image can read, such as
compose/pagemill.yaml of its commit.
"""

import argparse
import asyncio
import contextlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import yaml

from ops.cluster import checks
from ops.cluster.compose import (
    FILE,
    FOLDER,
    CheckFailed,
    Compose,
    NotPossible,
    check_engine,
    find_compose,
)
from ops.cluster.door import Door
from ops.cluster.upgrade import LOG_LINES
from shared.bus.embedded_server import free_port

PROJECT = "pagemill-check"
IMAGE = f"pagemill:{version('pagemill')}"
ENGINES = 3
STEPS = ("answers", "transports", "speech", "upgrade", "refused", "rolling", "drain", "starting")
VOICE = FOLDER.parent / "ops" / "demo_voice"


def say(text: str) -> None:
    sys.stdout.write(f"cluster: {text}\n")
    sys.stdout.flush()


def has_image(image: str) -> bool:
    command = ["docker", "image", "inspect", image]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def ensure_image(image: str) -> None:
    """Build the image unless it is there. Raises CheckFailed."""
    if not has_image(image):
        say(f"there is no image {image}; building it")
        dockerfile = str(FOLDER / "Dockerfile")
        build = ["docker", "build", "--file", dockerfile, "--tag", image, str(FOLDER.parent)]
        if subprocess.run(build, check=False).returncode != 0:
            raise CheckFailed(f"the image {image} cannot be built")


def write_config(folder: Path, source: Path) -> Path:
    """Write the configuration `source` with encoders and a voice.

    All payloads are outside messages.
    """
    config = yaml.safe_load(source.read_text(encoding="utf-8"))
    voice = yaml.safe_load((VOICE / "pagemill.yaml").read_text(encoding="utf-8"))
    stages = voice["models"]["demo"]["stages"]
    for stage in stages.values():
        stage["path"] = str(Path("/models", stage["path"]))
    config["models"]["demo"] |= {"tower": "encoder", "stages": stages}
    config["blobs"]["inline_kib"] = 1
    file = folder / "pagemill.yaml"
    file.write_text(yaml.safe_dump(config), encoding="utf-8")
    # The workers' user is another one.
    folder.chmod(0o755)
    file.chmod(0o644)
    return file


def derive_image(image: str, name: str, line: str) -> str:
    """Build an image with one more line, and return its name."""
    new = f"{PROJECT}:{name}"
    command = ["docker", "build", "--quiet", "--tag", new, "-"]
    text = f"FROM {image}\n{line}\n"
    subprocess.run(command, input=text, capture_output=True, text=True, check=True)
    return new


def start(compose: Compose) -> None:
    """Start all services. Raises CheckFailed with their logs."""
    try:
        compose.up()
    except CheckFailed as error:
        raise CheckFailed(f"{error}\n{compose.logs(LOG_LINES)}") from None


@contextlib.contextmanager
def running(image: str, source: Path, keep: bool) -> Iterator[tuple[Compose, int]]:
    """Start the cluster, and yield it with the door's port once all containers are healthy."""
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="pagemill-cluster-") as folder:
        config = write_config(Path(folder), source)
        env = {
            "COMPOSE_PROJECT_NAME": PROJECT,
            "COMPOSE_FILE": FILE.name,
            "COMPOSE_PROFILES": "encoder,speech",
            "IMAGE": image,
            "PORT": str(port),
            "CONFIG": str(config),
            "MODELS": str(VOICE),
        }
        compose = Compose(env)
        compose.down()
        try:
            began = time.monotonic()
            start(compose)
            compose.wait_healthy(checks.START_S)
            say(f"{checks.versions(compose)}: healthy after {time.monotonic() - began:.0f} s")
            yield compose, port
        finally:
            if not keep:
                compose.down()


async def check(compose: Compose, port: int, image: str, steps: list[str]) -> None:
    """Run the steps, and print the figures of each. Raises CheckFailed."""
    door = Door(port)
    progress = Path(compose.env["CONFIG"]).with_name("upgrade")
    try:
        report(checks.check_isolation(compose, port))
        report(checks.check_keys(compose))
        if "answers" in steps:
            report(await checks.check_answers(door))
            began = time.monotonic()
            compose.up(engine=ENGINES)
            compose.wait_healthy(checks.START_S, "engine")
            say(f"--scale engine={ENGINES}: healthy after {time.monotonic() - began:.0f} s")
            report(await checks.check_answers(door, rounds=ENGINES))
        if "transports" in steps:
            report(await checks.check_transports(compose))
        if "speech" in steps:
            report(await checks.check_speech(compose, door))
        if "upgrade" in steps:
            report(await checks.check_upgrade(compose, door, image, progress))
        if "refused" in steps:
            broken = derive_image(image, "refused", "ENTRYPOINT []")
            report(await checks.check_refused_upgrade(compose, door, broken, progress))
        if "rolling" in steps:
            report(await checks.check_rolling_restart(compose, door))
        if "drain" in steps:
            report(await checks.check_drain(compose, door))
        if "starting" in steps:
            report(checks.check_stop_while_starting(compose))
    finally:
        await door.close()


def report(step: checks.Step) -> None:
    say(f"{step.title}: {step.figures}")


def main() -> int:
    parser = argparse.ArgumentParser(prog="make cluster", description=__doc__)
    parser.add_argument("--image", default=IMAGE, help=f"the image to test, by default {IMAGE}")
    parser.add_argument("--old", help="an older image, with which the cluster starts")
    parser.add_argument("--config", type=Path, default=FOLDER / "pagemill.yaml", metavar="FILE")
    parser.add_argument("--step", action="append", choices=STEPS, help="by default all")
    parser.add_argument("--keep", action="store_true", help="leave the cluster running")
    arguments = parser.parse_args()
    began = time.monotonic()
    try:
        check_engine()
        find_compose()
    except NotPossible as reason:
        say(f"skipped: {reason}")
        return 0
    try:
        ensure_image(arguments.image)
        if arguments.old is not None and not has_image(arguments.old):
            raise CheckFailed(f"--old: there is no image {arguments.old}")
        # Without an older image, the same one with another name.
        old = arguments.old or derive_image(arguments.image, "old", "LABEL version=old")
        with running(old, arguments.config, arguments.keep) as (compose, port):
            asyncio.run(check(compose, port, arguments.image, arguments.step or list(STEPS)))
    except (CheckFailed, RuntimeError, subprocess.SubprocessError) as error:
        say(f"failed: {error}")
        return 1
    say(f"passed in {time.monotonic() - began:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
