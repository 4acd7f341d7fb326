"""The command `pagemill doctor`: checks of this machine and of its broker."""

import asyncio
import os
import platform
import shutil
import subprocess
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Literal, NamedTuple

import httpx2
import msgspec
from rich.filesize import decimal

from shared.blobs.server import host_id
from shared.bus.bus import Bus
from shared.bus.embedded_server import find_binary, is_listening
from shared.bus.store_room import measure_folder, measure_servers
from shared.config.schema import Config
from shared.errors import ConfigError, PagemillError
from shared.gpu.nvml import read_gpus
from shared.native import library
from shared.protocol.messages import Heartbeat
from shared.stage.runtime import VERSION
from workers import settings
from workers.cli.broker import connected
from workers.cli.commands.configure import describe_folders
from workers.cli.models.memory import available_bytes
from workers.cli.options import ConfigFile, Json, NatsUrl, find_file, load
from workers.cli.ports import Ready, check_ports
from workers.cli.terminal import print_json, print_line
from workers.pools import pools_of, workers_of
from workers.roles import GATEWAY, device_needs
from workers.supervisor.gpus import plan_gpus, read_needed_gpus
from workers.supervisor.start import read_signs

HTTP_TIMEOUT_S = 8.0
State = Literal["ok", "note", "failed"]


class Finding(NamedTuple):
    check: str
    state: State
    """A note does not keep Pagemill from working."""
    text: str
    remedy: str = ""
    """Remedy, unless the text names it."""


async def doctor(*, json: Json = False, config: ConfigFile = None, nats: NatsUrl = None) -> int:
    """Check versions, kernels, devices, disk, keys, models, broker, ports and page.

    Each line is a finding, with the remedy if there is one. The exit code is 1 if a check failed.
    Nothing is changed.
    """
    code = 0
    async for finding in examine(config, nats):
        remedy = f": {finding.remedy}" if finding.remedy else ""
        line = f"{finding.state:<7} {finding.check:<9} {finding.text}{remedy}"
        print_json(finding._asdict()) if json else print_line(line)
        code = max(code, int(finding.state == "failed"))
    return code


async def examine(config: Path | None, nats: str | None) -> AsyncGenerator[Finding, None]:
    """Yield the findings of all checks, at least one for each."""
    for finding in [*_run("versions", _check_versions), *_run("kernels", _check_kernels)]:
        yield finding
    try:
        loaded = load(config)
    except ConfigError as error:
        yield Finding("settings", "failed", error.message)
        return
    yield Finding("settings", "ok", str(find_file(config) or "the embedded default"))
    for check, function in CHECKS:
        for finding in await asyncio.to_thread(_run, check, function, loaded):
            yield finding
    async for finding in _examine_cluster(loaded, nats):
        yield finding


async def _examine_cluster(config: Config, nats: str | None) -> AsyncIterator[Finding]:
    """Yield the findings about the broker, and about Pagemill or its ports on this machine."""
    beats: list[Heartbeat] = []
    async for finding in _check_broker(config, nats, beats):
        yield finding
    here = [beat for beat in beats if beat.may_run_on(host_id())]
    urls = [beat.url for beat in here if beat.role == GATEWAY and beat.url is not None]
    findings = [] if here else _run("ports", _check_ports, config, nats)
    for url in urls:
        findings += await asyncio.to_thread(_run, "gateway", _check_gateway, url, config)
    for finding in findings:
        yield finding


def _run(
    check: str, function: Callable[..., Iterator[Finding]], *arguments: object
) -> list[Finding]:
    """Return the findings of a check. An error becomes a finding with the state `failed`."""
    findings: list[Finding] = []
    try:
        findings.extend(function(*arguments))
    except (PagemillError, OSError, httpx2.HTTPError) as error:
        text = error.message if isinstance(error, PagemillError) else str(error)
        findings.append(Finding(check, "failed", text))
    return findings


def _check_versions() -> Iterator[Finding]:
    packages = f"pagemill {VERSION}, Python {platform.python_version()}, torch {version('torch')}"
    server = subprocess.run([find_binary(), "--version"], capture_output=True, check=False)
    yield Finding("versions", "ok", f"{packages}, {server.stdout.decode().strip()}")


def _check_kernels() -> Iterator[Finding]:
    folder = library.cache_folder()
    if library.can_load():
        yield Finding("kernels", "ok", f"C++ kernels; compiled and measured in {folder}")
    elif "avx512f" in library.processor_flags():
        yield Finding("kernels", "note", "models run on torch, slower", "install g++ or clang++")
    else:
        yield Finding("kernels", "note", "models run on torch: the processor has no AVX-512")


def _check_devices(config: Config) -> Iterator[Finding]:
    cores, memory = len(os.sched_getaffinity(0)), decimal(available_bytes())
    name = library.processor_name() or platform.machine()
    yield Finding("devices", "ok", f"{cores} cores of {name}, {memory} of memory available")
    workers = workers_of(config, pools_of(config))
    for title, place in plan_gpus(config, workers, read_needed_gpus(config, workers)):
        yield Finding("devices", "ok", f"{title}: {place}")
    if all(device_needs(config, worker) is None for worker in workers):
        try:
            gpus = read_gpus()
        except PagemillError:
            return  # A machine without a GPU has no driver.
        for gpu in gpus:
            remedy = "set engine: {device: cuda}"
            yield Finding("devices", "note", f"no worker uses the GPU {gpu.name}", remedy)


def _check_disk(config: Config) -> Iterator[Finding]:
    if config.nats.url is not None:
        return  # The broker's machine has the disk.
    folder = existing = Path(config.nats.store_dir).absolute()
    while not existing.exists():
        existing = existing.parent
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        fault = "cannot be written" if existing.is_dir() else "is not a folder"
        remedy = "set nats.store_dir to a folder of this user"
        yield Finding("disk", "failed", f"{existing} {fault}", remedy)
        return
    for store in measure_folder(existing, config.nats):
        numbers = f"{decimal(store.free_bytes)} free, of {decimal(store.min_free_bytes)} required"
        remedy = "delete files, or lower nats.min_free_percent"
        yield Finding("disk", "failed", f"{folder} has {numbers}", remedy)
    free = decimal(shutil.disk_usage(existing).free)
    yield Finding("disk", "ok", f"{free} free for {folder}")


def _check_keys(config: Config) -> Iterator[Finding]:
    nats = config.nats
    if nats.url is not None and nats.keys is None:
        yield Finding("keys", "ok", "the settings name no keys for the broker")
        return
    folder = settings.keys_folder(config)
    files = sorted(folder.rglob("*.nk"))
    if not files:
        state: State = "note" if nats.url is None else "failed"
        remedy = "`pagemill up` makes them" if nats.url is None else "run `pagemill keys make`"
        yield Finding("keys", state, f"{folder} has no keys", remedy)
        return
    for file in files:
        if file.stat().st_mode & 0o077:
            remedy = f"run `chmod 600 {file}`, and `pagemill keys rotate` if others have read it"
            yield Finding("keys", "failed", f"other users can read {file}", remedy)
    login = settings.login_of(config)
    if login.seed_file is None:
        yield Finding("keys", "failed", f"{folder} has no operator.nk", "run `pagemill keys make`")
        return
    login.check_seed()
    yield Finding("keys", "ok", f"{len(files)} in {folder}")


def _check_models(config: Config) -> Iterator[Finding]:
    for description, reason in describe_folders(config):
        if reason is None:
            yield Finding("models", "ok", description)
        else:
            remedy = "name another folder, or run `pagemill pull`"
            yield Finding("models", "failed", f"{description}: {reason}", remedy)


CHECKS: tuple[tuple[str, Callable[[Config], Iterator[Finding]]], ...] = (
    ("devices", _check_devices),
    ("disk", _check_disk),
    ("keys", _check_keys),
    ("models", _check_models),
)


def _check_ports(config: Config, nats: str | None) -> Iterator[Finding]:
    """Check that `pagemill up` could start here."""
    check_ports(config, nats)
    ports = [f"gateway {config.gateway.port}"]
    if nats is None and config.nats.url is None:
        ports.append(f"nats {config.nats.port}")
    yield Finding("ports", "ok", f"free: {', '.join(ports)}")


async def _check_broker(
    config: Config, nats: str | None, beats: list[Heartbeat]
) -> AsyncIterator[Finding]:
    """Yield findings about the broker and its workers, and add the workers to `beats`."""
    if nats is None and config.nats.url is None and not is_listening(config.nats.port):
        text = f"nothing listens on port {config.nats.port}"
        yield Finding("broker", "note", text, "`pagemill up` starts a broker")
        return
    try:
        async with connected(settings.login_of(config, given_url=nats), "doctor") as bus:
            async for finding in _check_streams(bus, config):
                yield finding
            beats += (await read_signs(bus))[0]
            for finding in await _check_workers(bus, beats):
                yield finding
    except PagemillError as error:
        remedy = "start it, or correct nats.url, nats.port or nats.keys"
        yield Finding("broker", "failed", error.message, remedy)


async def _check_streams(bus: Bus, config: Config) -> AsyncIterator[Finding]:
    await bus.streams.check_server(config.nats)
    yield Finding("broker", "ok", f"nats-server {bus.connection.server_version}")
    if config.nats.url is not None:
        for store in await measure_servers(bus, config.nats):
            text = f"{store.name} has {decimal(store.free_bytes)} left of max_file_store"
            yield Finding("broker", "failed", text, "raise it, or lower delivery.max_token_log_mib")
    bus.streams.configure(config.nats, config.delivery, config.agent, config.batch)
    changes = await bus.streams.find_changes(bus.now_ms())
    missing = {change.difference.stream for change in changes if not change.difference.setting}
    if missing:
        remedy = "the first coordinator creates them"
        yield Finding("streams", "note", f"the broker lacks {len(missing)}", remedy)
    different = {change.difference.stream for change in changes} - missing
    if different:
        text = f"different from the settings: {', '.join(sorted(different))}"
        yield Finding("streams", "note", text, "run `pagemill migrate`")
    if not changes:
        yield Finding("streams", "ok", "as configured")


async def _check_workers(bus: Bus, beats: list[Heartbeat]) -> list[Finding]:
    findings = []
    counts = Counter(beat.role for beat in beats)
    text = ", ".join(f"{number} {role}" for role, number in sorted(counts.items()))
    others = sorted({beat.version for beat in beats} - {VERSION})
    if not beats:
        findings.append(Finding("workers", "note", "none runs", "start `pagemill up`"))
    elif others:
        remedy = "see `pagemill upgrade`"
        text = f"{text}; this is version {VERSION}, and some run {', '.join(others)}"
        findings.append(Finding("workers", "note", text, remedy))
    else:
        findings.append(Finding("workers", "ok", text))
    for report in await bus.heartbeats.read_refusals() if beats else []:
        text = f"{report.role} {report.model} refuses to start: {report.refused}"
        findings.append(Finding("workers", "failed", text))
    return findings


def _check_gateway(url: str, config: Config) -> Iterator[Finding]:
    # The certificate is for the name that clients use, and not for this address.
    with httpx2.Client(base_url=url, verify=False, timeout=HTTP_TIMEOUT_S, trust_env=False) as http:
        try:
            ready = msgspec.json.decode(http.get("ready").content, type=Ready)
        except (msgspec.DecodeError, httpx2.HTTPError) as error:
            text = f"{url} does not answer as a gateway does: {error}"
            yield Finding("gateway", "failed", text, "see what listens there")
            return
        page = http.get("").status_code if config.gateway.page else None
    remedy = "see `pagemill logs --level warning`"
    if ready.status == "ok":
        yield Finding("gateway", "ok", f"{url} accepts requests")
    else:
        yield Finding("gateway", "failed", f"{url} refuses requests: {ready.status}", remedy)
    for name, state in ready.models.items():
        if state != "ok":
            yield Finding("gateway", "failed", f"{name}: {state}", remedy)
    if page is not None:
        yield Finding("page", "ok" if page == 200 else "failed", f"{url}/ answers {page}")
