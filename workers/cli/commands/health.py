"""The command `pagemill health`. Health checks run it every few seconds, so it imports little."""

import http.client
from collections.abc import Iterator
from typing import Annotated

from cyclopts import Parameter

from shared.config.schema import METRICS_PORTS, MetricsConfig
from shared.errors import ConfigError
from shared.protocol.versions import range_words
from shared.protocol.worker_status import WorkerStatus, decode_status
from workers.cli.options import ConfigFile, Json, check_role, load
from workers.cli.terminal import print_json, print_line

# Longer than a worker waits for its own event loop.
TIMEOUT_S = 8.0


def health(
    role: Annotated[str | None, Parameter(validator=check_role)] = None,
    /,
    *,
    ready: bool = False,
    json: Json = False,
    config: ConfigFile = None,
) -> int:
    """Check the workers of this machine or container, at `metrics.listen` and `metrics.port`.

    The exit code is 0 if there are workers and all of them are healthy, and otherwise 1.

    Parameters
    ----------
    role
        Check the workers of this role only.
    ready
        Also check whether the workers accept work.
    """
    metrics = load(config).metrics
    if metrics.listen is None or metrics.port == 0:
        raise ConfigError(
            "health: workers answer only if metrics.listen and metrics.port are set; the gateway's"
            " path /ready needs neither",
            field="metrics.port",
        )
    answers = _ask_all(metrics, "ready" if ready else "health")
    statuses = [status for status in answers if role is None or status.role in (role, "")]
    for status in statuses:
        if json:
            print_json(status)
            continue
        about = [status.status]
        if status.reads is not None:
            about.append(
                f"version {status.version} reads messages of versions {range_words(status.reads)}"
            )
        print_line(f"{status.worker}: {', '.join(about)}")
    if not statuses and not json:
        print_line(f"no {role or 'worker'} answers at {metrics.listen} from port {metrics.port} on")
    return 0 if statuses and all(status.is_ok for status in statuses) else 1


def _ask_all(config: MetricsConfig, probe: str) -> Iterator[WorkerStatus]:
    """Yield the status of each worker, without a role if the worker does not answer."""
    for port in range(config.port, min(config.port + METRICS_PORTS, 65536)):
        # A connection to the address 0.0.0.0 or :: reaches this machine.
        connection = http.client.HTTPConnection(config.listen or "", port, timeout=TIMEOUT_S)
        try:
            connection.request("GET", f"/{probe}")
            if (status := decode_status(connection.getresponse().read())) is not None:
                yield status
        except TimeoutError:
            yield WorkerStatus("", f"{config.listen}:{port}", "no answer")
        except (OSError, http.client.HTTPException):
            continue  # No listener, or a listener of another program.
        finally:
            connection.close()
