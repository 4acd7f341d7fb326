"""The command `pagemill`; its commands are in `workers.cli.commands`."""

import sys
from importlib.metadata import version

from cyclopts import App, CoercionError, CycloptsError, CycloptsPanel
from rich.panel import Panel

from shared.helpers.validation import TYPES
from shared.stage import signals
from workers.cli.terminal import run_app

# A command's module is imported when the command runs. All of them together take half a second of
# processor time, and a container's health check runs every few seconds.
COMMANDS = (
    "workers.cli.commands.run:run",
    "workers.cli.commands.serve:up",
    "workers.cli.commands.worker:worker",
    "workers.cli.commands.models:pull",
    "workers.cli.commands.models:models",
    "workers.cli.commands.requests:ask",
    "workers.cli.commands.speech:say",
    "workers.cli.commands.painting:draw",
    "workers.cli.commands.chat:chat",
    "workers.cli.commands.preview:render",
    "workers.cli.commands.preview:tokenize",
    "workers.cli.commands.requests:follow",
    "workers.cli.commands.requests:cancel",
    "workers.cli.commands.requests:where",
    "workers.cli.commands.listing:requests",
    "workers.cli.commands.batch:batch",
    "workers.cli.commands.logs:logs",
    "workers.cli.commands.observe:top",
    "workers.cli.commands.observe:metrics",
    "workers.cli.commands.health:health",
    "workers.cli.commands.scale:scale",
    "workers.cli.commands.migrate:migrate",
    "workers.cli.commands.dead:dead",
    "workers.cli.commands.audit:audit",
    "workers.cli.commands.backup:backup",
    "workers.cli.commands.backup:restore",
    "workers.cli.commands.configure:key",
    "workers.cli.commands.keys:keys",
    "workers.cli.commands.configure:check",
    "workers.cli.commands.kubernetes:manifests",
)


def show_error(error: CycloptsError) -> Panel:
    """Return an error of an option in the words of the other errors."""
    if isinstance(error, CoercionError) and error.token is not None and error.msg is None:
        name = getattr(error.target_type, "__name__", "")
        if name in TYPES:
            error.msg = f'must be {TYPES[name]}, not "{error.token.value}"'
    return CycloptsPanel(error)


app = App(
    error_formatter=show_error,
    name="pagemill",
    help="A durable, queue-native serving system for multimodal language models.",
    version=version("pagemill"),
)
for command in COMMANDS:
    app.command(command)


def main() -> None:
    if sys.argv[1:2] == ["worker"]:
        signals.end_at_once()
    if not sys.argv[1:] or sys.argv[1].startswith("-"):
        app.resolved_commands()  # The help has one line for each command.
    run_app(app)


if __name__ == "__main__":
    main()
