"""The command `pagemill run`: pulls and serves a model, and asks it or talks with it."""

import asyncio
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import uvloop

from shared.errors import ConfigError
from workers import settings
from workers.cli.batch_runs import is_running
from workers.cli.commands.chat import chat
from workers.cli.commands.requests import ask
from workers.cli.commands.serve import cluster_with_gateway, generate
from workers.cli.models.generated import Wishes
from workers.cli.models.local import find_local, is_folder
from workers.cli.options import ConfigFile, find_writer, load
from workers.cli.terminal import EXIT_INTERRUPTED
from workers.cli.up import run_until_stopped

# Ctrl-C ends a command that is still importing its modules, without a traceback.
START = """
import signal
signal.signal(signal.SIGINT, signal.SIG_DFL)
from workers.__main__ import main
signal.signal(signal.SIGINT, signal.default_int_handler)
main()
"""


def run(model: str | None = None, /, *prompt: str, config: ConfigFile = None) -> int:
    """Serve a model on this machine and talk with it, or get one answer; then stop everything.

    This is `pagemill up --pull MODEL` with `pagemill chat`, or with `pagemill ask PROMPT`, in one
    terminal. If Pagemill runs here already and serves the model, it answers.

    Parameters
    ----------
    model
        A name on the hub, which is downloaded unless it is in the hub's cache, a folder, or the
        name of a configured model; by default the only configured one that writes text.
    prompt
        One question, with @FILE for files, as for `pagemill ask`; by default a conversation.
    """
    loaded = load(config)
    name = _name_of(model) or find_writer(loaded)
    if is_running(loaded, None):
        if name not in loaded.models:
            served = ", ".join(loaded.models)
            raise ConfigError(
                f"Pagemill runs here already, and serves {served}: stop it to run {name}",
                field="model",
            )
        if prompt:
            return asyncio.run(ask(" ".join(prompt), model=name, config=config))
        return chat(model=name, config=config)
    loaded = settings.load_config(settings.find_config_file(config))
    if model is not None and name not in loaded.models:
        config = generate([model], config, Wishes(), may_pull=True)
    file = settings.find_config_file(config)
    loaded = settings.load_config(file)
    with cluster_with_gateway(loaded, file) as cluster:

        async def work() -> int:
            return await _in_terminal(_command(name, prompt, file, cluster.url))

        return uvloop.run(run_until_stopped(cluster, loaded, work))


def _name_of(model: str | None) -> str | None:
    """Return the name under which a model is served. Raises ConfigError for a wrong path."""
    if model is None or not is_folder(model):
        return model
    local = find_local(model)
    return None if local is None else local.name


def _command(name: str, prompt: Sequence[str], file: Path | None, url: str) -> list[str]:
    """Return the command that asks the model, or talks with it."""
    options = [f"--model={name}", "--nats", url]  # The name may begin with a hyphen.
    options += [] if file is None else ["--config", str(file)]
    command = ["ask", *options, "--", " ".join(prompt)] if prompt else ["chat", *options]
    return [sys.executable, "-c", START, *command]


async def _in_terminal(command: Sequence[str]) -> int:
    """Run a command that handles Ctrl-C itself, and return its exit code."""
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGINT, lambda: None)
    process = await asyncio.create_subprocess_exec(*command)
    try:
        code = await process.wait()
        return code if code >= 0 else EXIT_INTERRUPTED  # A signal has ended it.
    except asyncio.CancelledError:
        process.terminate()
        await process.wait()
        raise
    finally:
        # From now on, Ctrl-C means the same as SIGTERM again.
        loop.add_signal_handler(signal.SIGINT, signal.raise_signal, signal.SIGTERM)
