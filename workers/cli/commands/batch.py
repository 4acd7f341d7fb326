"""Commands about batches: `pagemill batch run`, `make`, `create`, `list`, `show`, `follow`,
`results` and `cancel`."""

import asyncio
import contextlib
import secrets
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import App, Parameter, validators
from cyclopts.validators import Number

from shared.protocol.names import scoped_id
from shared.state import batch_log
from workers import settings
from workers.cli import batch_lines, batch_runs, batches
from workers.cli.audited import audited
from workers.cli.batch_display import BatchDisplay
from workers.cli.batch_lines import CHAT
from workers.cli.broker import connected
from workers.cli.commands.requests import SamplingOptions
from workers.cli.options import ConfigFile, Json, ModelName, NatsUrl, find_login, find_writer, load
from workers.cli.terminal import (
    format_age,
    format_time,
    print_columns,
    print_json,
    print_line,
    print_note,
    print_rows,
)
from workers.roles import BATCHER, WorkerSpec
from workers.settings import find_config_file, load_config

batch = App(name="batch", help="Run files of requests as durable jobs.")

InputFile = Annotated[Path, Parameter(validator=validators.Path(exists=True, dir_okay=False))]
Endpoint = Annotated[str, Parameter(help="Endpoint that the lines call.")]
Window = Annotated[str, Parameter(help="Time in which the batch must end, such as 90m, 24h or 7d.")]
Tenant = Annotated[str, Parameter(help="Tenant of the batch; by default none.")]
BatchId = Annotated[
    str,
    Parameter(help="Id of the batch. If several tenants use it, ID@TENANT names the batch of one."),
]
BY_DEFAULT = SamplingOptions()
DEFAULT_PAGES = 8
"""Pages in a line for a model that is not configured."""


@batch.command
def run(
    file: InputFile,
    /,
    *,
    output: Annotated[Path, Parameter(name=["--output", "-o"])],
    errors: Path | None = None,
    endpoint: Endpoint = CHAT,
    window: Window = "24h",
    tenant: Tenant = "",
    again: bool = False,
    up: bool = False,
    config: ConfigFile = None,
    nats: NatsUrl = None,
) -> int:
    """Run the requests of a file, and write their answers. After Ctrl-C, the same command continues
    with the requests that have no answer yet.

    The exit code is 0 if every request has an answer, and 2 if any has an error.

    Parameters
    ----------
    file
        JSON lines in the format of OpenAI's batches.
    output
        File for the answers.
    errors
        File for the lines with errors; by default the output with `.errors` before its suffix.
    again
        Run the file again, even if it has been run before.
    up
        Start Pagemill on this machine for this file, unless it is running, and stop it afterwards.
        Without a configuration file, it serves the models that the lines name.
    """
    files = batch_runs.ResultFiles(output, errors or output.with_suffix(f".errors{output.suffix}"))
    files.check()
    starts = up and not batch_runs.is_running(load(config), nats)
    config_file = _config_for(file, config) if starts else find_config_file(config)
    loaded = load_config(config_file)
    sha256 = batches.check_file(file, endpoint, loaded)
    order = batch_runs.Order(file, sha256, endpoint, window, tenant, again)
    if starts:
        from workers.cli.commands.serve import local_cluster

        cluster = local_cluster(loaded, config_file, nats, WorkerSpec(BATCHER))
        return batch_runs.run_in_cluster(order, files, loaded, cluster)
    login = settings.login_of(loaded, given_url=nats)
    return asyncio.run(batch_runs.run_until_interrupted(order, files, loaded, login))


def _config_for(file: Path, config: Path | None) -> Path | None:
    """Return the configuration with which Pagemill is started for a file of requests.

    Without a configuration file, it is generated if lines name models that the embedded default
    does not have. Raises PagemillError.
    """
    config_file = find_config_file(config)
    if config_file is not None:
        return config_file
    models = batches.models_in(file)
    if models <= set(load_config(None).models):
        return None
    # The configuration of models imports their libraries, which takes seconds.
    from workers.cli.commands.serve import generate
    from workers.cli.models.generated import Wishes

    return generate(sorted(models), None, Wishes(), may_pull=False)


@batch.command
async def make(
    *files: Path,
    prompt: str,
    model: ModelName = None,
    system: str | None = None,
    schema: Path | None = None,
    sampling: SamplingOptions = BY_DEFAULT,
    pages_per_line: Annotated[int | None, Parameter(validator=Number(gt=0))] = None,
    upload: bool = False,
    tenant: Tenant = "",
    config: ConfigFile = None,
    nats: NatsUrl = None,
) -> int:
    """Print the lines of a batch: one request for each image, sound, video and PDF file.

    Parameters
    ----------
    files
        Files, or folders. The files of a folder are used in the order of their names.
    prompt
        The text of every request.
    system
        System message of every request.
    schema
        File with a JSON schema. Every answer conforms to it.
    pages_per_line
        Pages of a PDF file in one line; by default as many as a request of the model may have.
    upload
        Store the files at Pagemill, even if they are small enough to be part of the lines.
    """
    loaded = load(config)
    model = model or find_writer(loaded)
    model_config = loaded.models.get(model)
    pages = pages_per_line or (
        DEFAULT_PAGES if model_config is None else max(1, model_config.max_images)
    )
    sources = batch_lines.sources_of(files, pages)
    answer_format = None if schema is None else batch_lines.read_schema(schema)
    question = batch_lines.Question(model, prompt, system, answer_format, sampling.given())
    limits = loaded.batch
    reason = batch_lines.upload_reason(sources, question, limits.max_file_mib, limits.max_line_mib)
    async with contextlib.AsyncExitStack() as stack:
        send: batch_lines.Upload | None = None
        if upload or reason is not None:
            print_note(f"storing the files at Pagemill{f': {reason}' if reason else ''}")
            bus = await stack.enter_async_context(
                connected(settings.login_of(loaded, given_url=nats), "batch")
            )
            send = batches.uploads(bus, tenant, limits)
        async for line in batch_lines.lines_about(sources, question, send):
            print_json(line)
    return 0


@batch.command
async def create(
    file: InputFile,
    /,
    *,
    endpoint: Endpoint = CHAT,
    window: Window = "24h",
    tenant: Tenant = "",
    json: Json = False,
    config: ConfigFile = None,
    nats: NatsUrl = None,
) -> int:
    """Begin a batch, and print its id.

    Parameters
    ----------
    file
        JSON lines in the format of OpenAI's batches.
    """
    loaded = load(config)
    batches.check_file(file, endpoint, loaded)
    async with connected(settings.login_of(loaded, given_url=nats), "batch") as bus:
        batch_id = f"batch_{secrets.token_hex(8)}"
        await batches.begin(bus, batch_id, file, endpoint, window, tenant, loaded)
    print_json({"batch": batch_id}) if json else print_line(batch_id)
    return 0


@batch.command(name="list")
async def list_batches(
    *,
    limit: Annotated[int, Parameter(validator=Number(gt=0))] = 50,
    tenant: str | None = None,
    json: Json = False,
    config: ConfigFile = None,
    nats: NatsUrl = None,
) -> int:
    """List the batches of all tenants, the newest first.

    Parameters
    ----------
    limit
        Maximum number of batches.
    tenant
        List only the batches of this tenant.
    """
    columns = ("status", "lines", "answers", "errors", "batch")
    rows: list[tuple[float, tuple[str | int, ...]]] = []
    async with connected(find_login(config, nats), "batch") as bus:
        orders = await batch_log.list_begun(bus, tenant, limit)
        for state in await batch_log.open_batches(bus, orders):
            now = state.checkpoint
            counts = (now.num_lines, now.num_answered, now.num_refused)
            batch_id = scoped_id(state.begun.batch_id, state.begun.tenant)
            rows.append((state.begun.created_s, (state.status, *counts, batch_id)))
        now_s = bus.now_ms() / 1000
    if json:
        for created_s, row in rows:
            created = {"created": format_time(1000 * created_s)}
            print_json(created | dict(zip(columns, row, strict=True)))
        return 0
    cells = [[format_age(now_s - created_s), *map(str, row)] for created_s, row in rows]
    print_columns([("age", *columns), *cells]) if rows else print_line("no batches")
    return 0


@batch.command
async def show(
    batch_id: BatchId,
    /,
    *,
    json: Json = False,
    tenant: Tenant = "",
    config: ConfigFile = None,
    nats: NatsUrl = None,
) -> int:
    """Print the state of a batch."""
    async with connected(find_login(config, nats), "batch") as bus:
        state = await batches.find_any_tenant(bus, batch_id, tenant)
        paused = await batches.find_pause(bus, state)
    begun, now = state.begun, state.checkpoint
    rows = {
        "batch": scoped_id(begun.batch_id, begun.tenant),
        "status": state.status,
        "paused": paused,
        "endpoint": begun.endpoint,
        "lines": now.num_lines,
        "answers": now.num_answered,
        "errors": now.num_refused,
        "tokens": now.usage.prompt_tokens + now.usage.completion_tokens,
        "created": format_time(1000 * begun.created_s),
        "window": f"{begun.window}, until {format_time(1000 * begun.deadline_s)}",
        "ended": None if state.ended is None else format_time(1000 * state.ended.at_s),
    }
    print_json(rows) if json else print_rows(rows)
    batches.print_errors(state)
    return 0


@batch.command
async def follow(
    batch_id: BatchId, /, *, tenant: Tenant = "", config: ConfigFile = None, nats: NatsUrl = None
) -> int:
    """Print the results of a batch as they arrive, until it has ended."""
    return await _print_results(batch_id, tenant, config, nats, which="all", follow=True)


@batch.command
async def results(
    batch_id: BatchId,
    /,
    *,
    which: Literal["all", "answers", "errors"] = "all",
    tenant: Tenant = "",
    config: ConfigFile = None,
    nats: NatsUrl = None,
) -> int:
    """Print the results of a batch so far, as JSON lines.

    Parameters
    ----------
    which
        Print only answers, or only errors.
    """
    return await _print_results(batch_id, tenant, config, nats, which=which, follow=False)


async def _print_results(
    batch_id: str,
    tenant: str,
    config: Path | None,
    nats: str | None,
    *,
    which: Literal["all", "answers", "errors"],
    follow: bool,
) -> int:
    login = find_login(config, nats)
    async with connected(login, "batch") as bus:
        state = await batches.find_any_tenant(bus, batch_id, tenant)
        async for _, records in batches.follow(bus, state, to_end=follow):
            for record in records:
                answers = record.output if which != "errors" else []
                refusals = record.errors if which != "answers" else []
                for line in (*answers, *refusals):
                    print_json(line)
    return 0


@batch.command
async def cancel(
    batch_id: BatchId,
    /,
    *,
    tenant: Tenant = "",
    json: Json = False,
    config: ConfigFile = None,
    nats: NatsUrl = None,
) -> int:
    """Cancel a batch, and wait until it has ended. Its finished lines keep their results."""
    async with connected(find_login(config, nats), "batch") as bus:
        state = await batches.find_any_tenant(bus, batch_id, tenant)
        if state.ended is None:
            async with audited(bus, "cancel", state.begun.batch_id, state.begun.tenant):
                await batch_log.cancel(bus, state.begun)
            with BatchDisplay() as display:
                async for latest, _ in batches.follow(bus, state):
                    display.update(state := latest)
    print_json({"batch": batch_id, "status": state.status}) if json else print_line(state.status)
    batches.print_errors(state)
    return 0 if state.status == "cancelled" else batch_runs.EXIT_UNSUCCESSFUL
