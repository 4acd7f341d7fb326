"""The command `pagemill`; its commands are in `workers.cli.commands`."""

import os
import sys
from importlib.metadata import version

from cyclopts import App

from shared.errors import PagemillError
from workers.cli.commands import configure, dead, logs, observe, preview, requests, serve
from workers.cli.terminal import print_refusal

app = App(
    name="pagemill",
    help="A durable, queue-native serving system for multimodal language models.",
    version=version("pagemill"),
)
for command in (
    serve.up,
    serve.worker,
    requests.ask,
    preview.render,
    preview.tokenize,
    requests.follow,
    requests.cancel,
    requests.where,
    logs.logs,
    observe.top,
    observe.metrics,
    dead.app,
    configure.key,
    configure.check,
):
    app.command(command)


def main() -> None:
    try:
        code = app(result_action="return_value")
    except PagemillError as error:
        print_refusal(error)
        code = 1
    except BrokenPipeError:
        # The reader of the output is gone. Python flushes the rest at exit, into /dev/null.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 1
    sys.exit(code)


if __name__ == "__main__":
    main()
