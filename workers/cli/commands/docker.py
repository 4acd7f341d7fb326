"""The command `pagemill docker-proxy`."""

from pathlib import Path

from shared.errors import ConfigError
from shared.stage.runtime import EXIT_CONFIG
from shared.telemetry import logs
from workers.cli.options import ConfigFile, load
from workers.cli.terminal import print_refusal
from workers.docker_proxy import server

DOCKER_SOCKET = Path("/var/run/docker.sock")


async def docker_proxy(
    *, socket: Path = DOCKER_SOCKET, project: str | None = None, config: ConfigFile = None
) -> int:
    """Start and stop containers of pools for autoscalers, which have no access to Docker's socket.

    It listens on `scale.docker_proxy`, and touches nothing but containers of one compose project
    and of the services of `scale.pools`. The exit code is 78 for a configuration that will never
    work.

    Parameters
    ----------
    socket
        Socket of the Docker engine.
    project
        The compose project; by default that of the container in which the command runs.
    """
    try:
        loaded = load(config)
        logs.configure_logging(loaded.log_level, role="docker-proxy")
        await server.run(loaded, str(socket), project)
    except ConfigError as error:
        print_refusal(error)
        return EXIT_CONFIG
    return 0
