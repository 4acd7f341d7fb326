"""Commands about models: `pagemill pull` and `pagemill models`."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

from rich.filesize import decimal

from shared.bus.login import Login
from shared.errors import PagemillError
from workers import settings
from workers.cli.broker import connected
from workers.cli.models import local, reports
from workers.cli.models.pull_display import PullDisplay
from workers.cli.options import ConfigFile, Json, NatsUrl, load
from workers.cli.terminal import (
    EXIT_INTERRUPTED,
    errors,
    noted,
    print_columns,
    print_json,
    print_line,
)
from workers.roles import all_roles

COLUMNS = ("name", "family", "how", "size", "state")


def pull(
    name: str, /, *, revision: str | None = None, dir: Path | None = None, json: Json = False
) -> int:
    """Download the files of a model that serving needs, or continue an interrupted download.

    HF_ENDPOINT is the address of the hub, and HF_TOKEN the token for gated models. Only
    configuration, tokenizer and safetensors are downloaded, and each file's checksum is compared
    with the hub's.

    Parameters
    ----------
    name
        Name of the model on the hub, such as Qwen/Qwen2-VL-2B-Instruct.
    revision
        Branch, tag or commit; by default the main branch.
    dir
        Folder for the files; by default the hub's cache, which other programs share.
    """
    try:
        folder = pull_model(name, revision, dir)
    except KeyboardInterrupt:
        errors.print("interrupted; the same command continues the download")
        return EXIT_INTERRUPTED
    if json:
        print_json({"name": name, "folder": str(folder)})
        return 0
    # A name stands for the main branch, if that is in the cache.
    served = dir or (folder if revision else name)
    print_line(f"{name} is in {folder}; `pagemill up {served}` serves it")
    return 0


def pull_model(name: str, revision: str | None = None, folder: Path | None = None) -> Path:
    """Download a model and show the progress on stderr. Raises PagemillError."""
    local.check_endpoint()
    local.check_hub_name(name)
    with PullDisplay(errors, live=errors.is_terminal) as display:
        display.say("connecting to the hub …")
        # The hub's client takes a quarter of a second to import, which no other command needs.
        from workers.cli.models.download import download
        from workers.cli.models.hub import find_model

        model = find_model(name, revision)
        display.say(f"{name}: {len(model.files)} files, {decimal(model.size)}")
        return download(model, folder, display)


async def models(*, json: Json = False, config: ConfigFile = None, nats: NatsUrl = None) -> int:
    """List the models that are configured or in the hub's cache, and their state.

    Without a broker, no model is listed as served. This is not an error.
    """
    loaded = load(config)
    configured = [
        local.LocalModel(name, Path(model.path), model.pooling)
        for name, model in loaded.models.items()
    ]
    with noted("checking which models can be served …"):
        served = await _read_served(settings.login_of(loaded, given_url=nats))
        cached = [model for model in local.list_cached() if model.name not in loaded.models]
        rows = await asyncio.to_thread(_describe, configured, cached, served)
    for row in rows:
        entry = loaded.models.get(str(row["name"]))
        if entry is not None and entry.quantization is not None:
            row["quantization"] = entry.quantization
    names = {row["name"] for row in rows}
    rows += [{"name": name, "state": "served"} for name in sorted(served - names)]
    if json:
        for row in rows:
            print_json(row)
        return 0
    print_columns([COLUMNS, *map(_cells, rows)])
    return 0


async def _read_served(login: Login) -> set[str]:
    """Return the models with a worker that serves no other model; none without a broker."""
    roles = {role.name for role in all_roles() if role.one_model}
    try:
        async with connected(login, "models") as bus:
            return {
                name
                for beat in await bus.heartbeats.read()
                if beat.role in roles
                for name in beat.models
            }
    except PagemillError:
        return set()


def _describe(
    configured: Sequence[local.LocalModel], cached: Sequence[local.LocalModel], served: set[str]
) -> list[dict[str, object]]:
    models = [*configured, *cached]
    here = [model for model in models if local.has_model(model.folder)]
    checked = reports.check_folders(
        [model.folder for model in here], [model.pooling for model in here]
    )
    model_to_report = dict(zip(here, checked, strict=True))
    rows: list[dict[str, object]] = []
    for model in models:
        report = model_to_report.get(model)
        missing = local.missing_files(model.folder)
        reason = f"it lacks {', '.join(missing[:3])}" if missing else None
        if report is not None and report.reason is not None:
            reason = report.reason
        state = "configured" if model in configured else "here"
        row: dict[str, object] = {
            "name": model.name,
            "family": None if report is None else report.family,
            "how": None if report is None else report.source,
            "size_bytes": local.size_on_disk(model.folder),
            "state": "refused" if reason else "served" if model.name in served else state,
            "path": str(model.folder),
        }
        if report is not None and report.stored_as is not None:
            row["stored_as"] = report.stored_as
        rows.append(row if reason is None else row | {"reason": reason})
    return rows


def _cells(row: dict[str, object]) -> tuple[str, ...]:
    size = row.get("size_bytes")
    reason = row.get("reason")
    state = ", ".join(str(row[key]) for key in ("state", "quantization") if key in row)
    if "stored_as" in row:
        state += f", stored as {row['stored_as']}"
    return (
        str(row["name"]),
        str(row.get("family") or "-"),
        str(row.get("how") or "-"),
        decimal(size) if isinstance(size, int) else "-",
        f"{state}: {reason}" if reason else state,
    )
