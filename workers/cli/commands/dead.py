"""Commands about dead letters: `pagemill dead list`, `show` and `requeue`."""

import uvloop
from cyclopts import App

from workers.cli import operate
from workers.cli.options import ConfigFile, NatsUrl, find_url

app = App(name="dead", help="Inspect and requeue the requests that all attempts failed to answer.")


@app.command(name="list")
def list_letters(*, limit: int = 50, config: ConfigFile = None, nats: NatsUrl = None) -> int:
    """List dead letters, the newest first.

    Parameters
    ----------
    limit
        Maximum number of letters.
    """
    return uvloop.run(operate.print_dead(limit, find_url(config, nats)))


@app.command(name="show")
def show_letter(
    request_id: str, /, *, json: bool = False, config: ConfigFile = None, nats: NatsUrl = None
) -> int:
    """Print one dead letter: cause, attempts, traceback, and the request itself."""
    return uvloop.run(operate.print_letter(request_id, find_url(config, nats), as_json=json))


@app.command(name="requeue")
def requeue_letter(
    request_id: str, /, *, edit: bool = False, config: ConfigFile = None, nats: NatsUrl = None
) -> int:
    """Publish the request of a dead letter again, under the same id.

    Parameters
    ----------
    edit
        Open the request in $EDITOR first.
    """
    return uvloop.run(operate.requeue(request_id, find_url(config, nats), edit=edit))
