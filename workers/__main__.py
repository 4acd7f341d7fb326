"""The command `pagemill`; its commands are in `workers.cli.commands`."""

from importlib.metadata import version

from cyclopts import App

from workers.cli.commands import (
    chat,
    configure,
    dead,
    kubernetes,
    listing,
    logs,
    models,
    observe,
    preview,
    requests,
    scale,
    serve,
)
from workers.cli.terminal import run_app

app = App(
    name="pagemill",
    help="A durable, queue-native serving system for multimodal language models.",
    version=version("pagemill"),
)
for command in (
    serve.up,
    serve.worker,
    models.pull,
    models.models,
    requests.ask,
    chat.chat,
    preview.render,
    preview.tokenize,
    requests.follow,
    requests.cancel,
    requests.where,
    listing.requests,
    logs.logs,
    observe.top,
    observe.metrics,
    scale.scale,
    dead.app,
    configure.key,
    configure.check,
    kubernetes.manifests,
):
    app.command(command)


def main() -> None:
    run_app(app)


if __name__ == "__main__":
    main()
