"""The command `pagemill`."""

import importlib
import os
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import uvloop
import yaml
from cyclopts import App, Parameter
from cyclopts.validators import Number
from rich.console import Console
from rich.markup import escape

from shared.client import new_request_id
from shared.errors import PagemillError
from shared.protocol.pipeline import graph_lines
from shared.stage import runtime
from shared.stage.pipelines import pipelines_of
from shared.telemetry import logs
from workers.cli import metrics as exporting
from workers.cli import operate, settings
from workers.cli import top as watching
from workers.cli.ask import AskOptions, ask_and_print, follow_and_print
from workers.cli.local_cluster import LocalCluster
from workers.cli.preview import render_and_print, tokenize_and_print
from workers.cli.up import run_until_stopped
from workers.gateway.http.auth import digest, make_key
from workers.roles import WorkerSpec, all_roles, default_workers, role_of

ConfigFile = Annotated[
    Path | None,
    Parameter(
        name=["--config", "-c"],
        help="Configuration file; by default pagemill.yaml here, else the embedded default.",
    ),
]
NatsUrl = Annotated[
    str | None,
    Parameter(name="--nats", help="URL of the nats-server; by default as configured."),
]

app = App(
    name="pagemill",
    help="A durable, queue-native serving system for multimodal language models.",
    version=version("pagemill"),
)
errors = Console(stderr=True)


@app.command
def up(*, config: ConfigFile = None, nats: NatsUrl = None) -> int:
    """Run all roles on this machine, with an embedded nats-server unless one is configured.

    Ctrl-C drains: requests in hand are finished or handed back before the processes end. A second
    Ctrl-C hands them back at once.
    """
    file = settings.find_config_file(config)
    loaded = settings.load_config(file)
    settings.check_paths(loaded)
    logs.configure_logging(loaded.log_level, role="up")
    workers = [*default_workers(loaded), WorkerSpec("gateway")]
    cluster = LocalCluster(loaded, file, workers, nats)
    return uvloop.run(run_until_stopped(cluster))


def _check_role(_: type[str], name: str) -> None:
    names = [spec.name for spec in all_roles()]
    if name not in names:
        raise ValueError(f"no role {name!r}; there are: {', '.join(names)}")


@app.command
def worker(
    role: Annotated[str, Parameter(validator=_check_role)],
    /,
    *,
    model: str | None = None,
    stage: str | None = None,
    config: ConfigFile = None,
    nats: NatsUrl = None,
) -> int:
    """Run one worker of a role, until SIGTERM or Ctrl-C drains it.

    Parameters
    ----------
    role
        The kind of worker: coordinator, renderer, encoder, engine or gateway.
    model
        The model that an engine or an encoder serves; needed only when several are configured.
    stage
        The stage of the model's pipeline that it serves; by default the one named like its role.
    """
    loaded = settings.load_config(settings.find_config_file(config))
    if model is None and len(loaded.models) == 1:
        model = next(iter(loaded.models))
    # Threads of torch's that wait for work would keep the processors from those that do it: from
    # the engine's own kernels, and from other workers. Read when torch is loaded.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    module = importlib.import_module(role_of(role).module)
    url = nats or settings.nats_url(loaded)
    return runtime.run(role, module.main, loaded, url, model, stage)


@app.command
def ask(
    question: str,
    /,
    *,
    image: Annotated[list[Path] | None, Parameter(name=["--image", "-i"])] = None,
    model: str | None = None,
    adapter: str | None = None,
    max_tokens: int | None = None,
    temperature: float | None = None,
    seed: int | None = None,
    timeout: float | None = None,
    json: bool = False,
    durable: bool = False,
    request_id: str | None = None,
    config: ConfigFile = None,
    nats: NatsUrl = None,
) -> int:
    """Ask a running Pagemill, and stream the answer to the terminal. Ctrl-C cancels.

    Parameters
    ----------
    question
        What to ask.
    image
        A picture that the question is about; may be given several times.
    model
        By default the first one configured.
    adapter
        One of the model's LoRA adapters; by default none.
    max_tokens
        The most tokens that the answer may have.
    temperature
        0 is greedy; by default what is configured for the model.
    seed
        Makes a sampled answer repeatable.
    timeout
        Seconds from acceptance to the end of the answer; by default as configured.
    json
        Print the records of the token log, one JSON object a line.
    durable
        Ctrl-C leaves the request to go on.
    request_id
        Name the request; the same id again reads the answer of the first.
    """
    loaded = settings.load_config(settings.find_config_file(config))
    asked = AskOptions(
        model=model or next(iter(loaded.models)),
        text=question,
        images=image or [],
        sampling={"max_tokens": max_tokens, "temperature": temperature, "seed": seed},
        timeout_s=timeout,
        adapter=adapter,
    )
    request_id = request_id or new_request_id()
    url = nats or settings.nats_url(loaded)
    return uvloop.run(ask_and_print(asked, request_id, url, as_json=json, durable=durable))


@app.command
def render(
    question: str,
    /,
    *,
    image: Annotated[list[Path] | None, Parameter(name=["--image", "-i"])] = None,
    model: str | None = None,
    json: bool = False,
    config: ConfigFile = None,
    nats: NatsUrl = None,
) -> int:
    """Print what an engine would be given: token ids, and each picture's place and tensors.

    Parameters
    ----------
    question
        What to ask.
    image
        A picture that the question is about; may be given several times.
    model
        By default the first one configured.
    json
        One JSON object, token ids included.
    """
    loaded = settings.load_config(settings.find_config_file(config))
    asked = AskOptions(model or next(iter(loaded.models)), question, image or [], {})
    url = nats or settings.nats_url(loaded)
    return uvloop.run(render_and_print(asked, url, as_json=json))


@app.command
def tokenize(
    text: str,
    /,
    *,
    model: str | None = None,
    json: bool = False,
    config: ConfigFile = None,
    nats: NatsUrl = None,
) -> int:
    """Print the tokens of a text as it is, without the model's chat template.

    Parameters
    ----------
    model
        By default the first one configured.
    json
        One JSON object.
    """
    loaded = settings.load_config(settings.find_config_file(config))
    url = nats or settings.nats_url(loaded)
    name = model or next(iter(loaded.models))
    return uvloop.run(tokenize_and_print(name, text, url, as_json=json))


@app.command
def follow(
    request_id: str,
    /,
    *,
    start: Annotated[int, Parameter(name=["--from"])] = 0,
    json: bool = False,
    config: ConfigFile = None,
    nats: NatsUrl = None,
) -> int:
    """Print the answer of a request that was asked before, and what is still to come of it.

    Parameters
    ----------
    start
        The index of the first record to print.
    json
        Print the records of the token log, one JSON object a line.
    """
    return uvloop.run(follow_and_print(request_id, start, _url(config, nats), as_json=json))


@app.command
def cancel(request_id: str, /, *, config: ConfigFile = None, nats: NatsUrl = None) -> int:
    """End a request, wherever it is; its answer then ends with the error `cancelled`."""
    return uvloop.run(operate.cancel_request(request_id, _url(config, nats)))


@app.command
def where(
    request_id: str, /, *, json: bool = False, config: ConfigFile = None, nats: NatsUrl = None
) -> int:
    """Tell where a request is: stage, worker, attempt, how long it waits, and why."""
    return uvloop.run(operate.print_where(request_id, _url(config, nats), as_json=json))


@app.command
def top(
    *,
    once: bool = False,
    json: bool = False,
    interval: Annotated[float, Parameter(validator=Number(gt=0))] = 1.0,
    config: ConfigFile = None,
    nats: NatsUrl = None,
) -> int:
    """Watch a running Pagemill: pools, queues, tokens a second, KV use, latencies. Ctrl-C ends it.

    Parameters
    ----------
    once
        Print one frame, of one interval, and end.
    json
        One JSON object a frame.
    interval
        Seconds between two frames.
    """
    url = _url(config, nats)
    return uvloop.run(watching.watch(url, interval, once=once, as_json=json))


@app.command
def metrics(*, listen: str | None = None, config: ConfigFile = None, nats: NatsUrl = None) -> int:
    """Print the metrics of all workers and queues in Prometheus' text format.

    Parameters
    ----------
    listen
        Serve them over HTTP instead, on this address and port, such as 127.0.0.1:9400.
    """
    url = _url(config, nats)
    if listen is None:
        return uvloop.run(exporting.print_metrics(url))
    return uvloop.run(exporting.serve_metrics(url, listen))


dead = App(name="dead", help="Requests that were given up: look at them, send them again.")
app.command(dead)


@dead.command(name="list")
def dead_list(*, limit: int = 50, config: ConfigFile = None, nats: NatsUrl = None) -> int:
    """List dead letters, the newest first."""
    return uvloop.run(operate.print_dead(limit, _url(config, nats)))


@dead.command(name="show")
def dead_show(
    request_id: str, /, *, json: bool = False, config: ConfigFile = None, nats: NatsUrl = None
) -> int:
    """Print one dead letter: cause, attempts, traceback, and the request itself."""
    return uvloop.run(operate.print_letter(request_id, _url(config, nats), as_json=json))


@dead.command(name="requeue")
def dead_requeue(
    request_id: str, /, *, edit: bool = False, config: ConfigFile = None, nats: NatsUrl = None
) -> int:
    """Send the request of a dead letter on its way again, under the same id.

    Parameters
    ----------
    edit
        Open the request in $EDITOR before.
    """
    return uvloop.run(operate.requeue(request_id, _url(config, nats), edit=edit))


def _url(config: Path | None, nats: str | None) -> str:
    return nats or settings.nats_url(settings.load_config(settings.find_config_file(config)))


@app.command
def key(name: str, /, *, tenant: str | None = None) -> int:
    """Make an API key for the gateway: print it, this once, and the configuration for it.

    Parameters
    ----------
    name
        Whose it is, for the log.
    tenant
        Whose caches and requests it shares; by default those of nobody else.
    """
    made = make_key()
    entry: dict[str, object] = {"name": name, "sha256": digest(made)}
    entry |= {} if tenant is None else {"tenant": tenant}
    lines = yaml.safe_dump({"gateway": {"api_keys": [entry]}}, sort_keys=False)
    errors.print("This key is kept nowhere; give it to its owner:")
    sys.stdout.write(f"{made}\n")
    errors.print(
        f"\nIn the configuration, beside those that are there:\n\n{lines}", highlight=False
    )
    return 0


@app.command
def check(*, config: ConfigFile = None) -> int:
    """Print each pipeline and the effective configuration, or what is wrong with it."""
    file = settings.find_config_file(config)
    loaded = settings.load_config(file)
    settings.check_paths(loaded)
    Console(stderr=True).print(f"[green]ok[/]: {file or 'embedded default'}")
    for name, pipeline in pipelines_of(loaded).items():
        lines = [f"pipeline of {name}", *(f"  {line}" for line in graph_lines(pipeline))]
        sys.stdout.writelines(f"# {line}\n" for line in lines)
    sys.stdout.write(yaml.safe_dump(settings.as_tree(loaded), sort_keys=False))
    return 0


def main() -> None:
    try:
        code = app(result_action="return_value")
    except PagemillError as error:
        errors.print(f"[red]error[/] {error.code}: {escape(error.message)}", highlight=False)
        code = 1
    except BrokenPipeError:
        # Whoever read has seen enough; what Python would still flush goes nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 1
    sys.exit(code)


if __name__ == "__main__":
    main()
