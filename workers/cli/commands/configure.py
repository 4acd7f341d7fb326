"""Commands about the configuration: `pagemill key` and `pagemill check`."""

import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from textwrap import indent
from typing import NamedTuple

import msgspec
import yaml
from rich.console import Console
from rich.filesize import decimal

from shared.config.schema import Config, EngineConfig, Right
from shared.errors import ConfigError
from shared.models.dtypes import choose_dtype
from shared.models.image_folder import is_image_folder, read_image_folder
from shared.native import library
from shared.native.measuring import read_records
from shared.protocol.names import NAME_RULE, is_name
from shared.protocol.pipeline import Pipeline
from shared.stage.graphs import CODE2WAV, ORPHEUS
from shared.stage.hybrids import check_settings
from shared.stage.pipelines import ENGINE, pipeline_of, pipelines_of
from shared.stage.ranks import check_rank_settings
from shared.vision.rank_plan import FIELD
from workers import settings
from workers.cli.models import reports
from workers.cli.models.cache_sizes import describe_caches
from workers.cli.models.local import has_model
from workers.cli.models.stage_weights import (
    can_keep_numbers,
    count_codec,
    count_rank_weights,
    count_weights,
)
from workers.cli.options import ConfigFile, Json
from workers.cli.terminal import print_json
from workers.gateway.http.auth import digest, make_key
from workers.roles import device_settings, worker_of
from workers.supervisor.gpus import describe_gpus


def key(
    name: str,
    /,
    *,
    tenant: str | None = None,
    right: list[Right] | None = None,
    json: Json = False,
) -> int:
    """Create an API key for the gateway, and print the key and its configuration.

    Parameters
    ----------
    name
        Name of the key in logs, such as the name of its owner.
    tenant
        Tenant that the key belongs to. Keys of one tenant share caches and requests. By default
        the tenant has the name of the key.
    right
        Right of the key: requests (the default), or metrics for `/metrics`. Repeat the
        option for both.
    """
    for field, value in (("NAME", name), ("--tenant", tenant)):
        if value is not None and not is_name(value):
            raise ConfigError(f"{field}: {value!r} {NAME_RULE}", field=field)
    stderr = Console(stderr=True)
    secret = make_key()
    entry: dict[str, object] = {"name": name, "sha256": digest(secret)}
    entry |= {} if tenant is None else {"tenant": tenant}
    entry |= {} if right is None else {"rights": right}
    if json:
        print_json({"key": secret, "gateway": {"api_keys": [entry]}})
        return 0
    lines = indent(yaml.safe_dump([entry], sort_keys=False), "    ")
    stderr.print("This key is not stored and cannot be printed again. Pass it to its owner:")
    sys.stdout.write(f"{secret}\n")
    stderr.print("\nAdd this to `gateway:` of the configuration, or to its `api_keys:`")
    stderr.print(f"\n  api_keys:\n{lines}", highlight=False)
    return 0


def check(*, kernels: bool = False, json: Json = False, config: ConfigFile = None) -> int:
    """Print each pipeline and the effective configuration, or the configuration's first error.

    A model folder that the engine refuses is an error, too.

    Parameters
    ----------
    kernels
        Print instead the times of kernels on this machine, and which of them were chosen.
    """
    if kernels:
        return _print_kernels(json)
    file = settings.find_config_file(config)
    loaded = settings.load_config(file)
    settings.check_paths(loaded)
    models = [*_check_models(loaded), *describe_gpus(loaded)]
    if json:
        graphs = {name: _graph_lines(each) for name, each in pipelines_of(loaded).items()}
        name = None if file is None else str(file)
        print_json({"file": name, "models": models, "pipelines": graphs, "settings": loaded})
        return 0
    Console(stderr=True).print(f"[green]ok[/]: {file or 'embedded default'}")
    sys.stdout.writelines(f"# {line}\n" for line in models)
    for name, pipeline in pipelines_of(loaded).items():
        lines = [f"pipeline of {name}", *(f"  {line}" for line in _graph_lines(pipeline))]
        sys.stdout.writelines(f"# {line}\n" for line in lines)
    sys.stdout.write(yaml.safe_dump(msgspec.to_builtins(loaded), sort_keys=False))
    return 0


class _Folder(NamedTuple):
    """A folder that the workers of a stage load, with the settings of its engines."""

    model: str
    field: str
    path: Path
    pooling: str | None
    section: str
    """Key of `engine`, which is another one for a pool."""
    engine: EngineConfig


def _folders_of(config: Config) -> Iterator[_Folder]:
    """Yield each folder that an engine loads, for each pool of engines, and each of diffusers."""
    for name, pipeline in pipelines_of(config).items():
        model = config.models[name]
        for stage in pipeline.stages:
            path = Path(stage.path or model.path)
            if stage.role != ENGINE and not is_image_folder(path):
                continue
            field, pooling = f"models.{name}.path", model.pooling
            if stage.path is not None:
                field, pooling = f"models.{name}.stages.{stage.name}.path", None
            pools = model.pools if stage.name == ENGINE else {}
            engines: dict[str, EngineConfig] = {ENGINE: config.engine} if not pools else {}
            engines |= {f"models.{name}.pools.{pool}": each for pool, each in pools.items()}
            for section, engine in engines.items():
                yield _Folder(name, field, path, pooling, section, engine)


def _check_folders(folders: Sequence[_Folder]) -> list[tuple[_Folder, reports.Report]]:
    checked = reports.check_folders(
        [folder.path for folder in folders],
        [folder.pooling for folder in folders],
        [folder.engine.tensor_parallel for folder in folders],
    )
    return list(zip(folders, checked, strict=True))


def describe_folders(config: Config) -> Iterator[tuple[str, str | None]]:
    """Yield a description of each folder that is loaded, and the reason if it is refused."""
    existing = []
    for folder in _folders_of(config):
        if has_model(folder.path):
            existing.append(folder)
        else:
            yield f"{folder.field}: {folder.path}", "it has no config.json or model_index.json"
    for folder, report in _check_folders(existing):
        yield f"{folder.field}: {report.family} ({report.source})", report.reason


def _check_models(config: Config) -> list[str]:
    """Return a line about the family and the weights of each folder that an engine loads, and of
    each folder of diffusers.

    Raises ConfigError for a folder that is refused.
    """
    checked = _check_folders(list(_folders_of(config)))
    lines = []
    for folder, report in checked:
        field, model, section = folder.field, config.models[folder.model], folder.section
        if report.reason is not None:
            reason = report.reason.replace(FIELD, f"{section}.tensor_parallel")
            raise ConfigError(f"{field}: {folder.path} {reason}", field=field)
        if report.source != reports.DIFFUSERS:
            check_rank_settings(model, folder.engine, folder.model, section)
        if report.state_bytes_per_sequence:
            check_settings(model, folder.engine, folder.model, section)
        place = "" if section == ENGINE else f" in {section}"
        stored = "" if report.stored_as is None else f", stored as {report.stored_as}"
        memory = _describe_memory(folder, report, config)
        lines.append(f"{field}{place}: {report.family} ({report.source}){stored}{memory}")
    # Several stages may load one folder.
    caches = [
        line
        for folder, report in checked
        if report.source != reports.DIFFUSERS and folder.field == f"models.{folder.model}.path"
        for line in describe_caches(config, folder.model, folder.section, folder.engine, report)
    ]
    return list(dict.fromkeys([*lines, *caches]))


def _describe_memory(folder: _Folder, report: reports.Report, config: Config) -> str:
    """Return the size of the weights in a worker of each stage that loads the folder."""
    path, model, engine = folder.path, config.models[folder.model], folder.engine
    if is_image_folder(path):
        description, pipeline = read_image_folder(path), pipeline_of(model)
        num_bytes: dict[str, dict[str, int]] = {}
        for stage in pipeline.stages:
            if Path(stage.path or model.path) == path:
                section = device_settings(config, worker_of(folder.model, stage))
                device = "cpu" if section is None else section[1].device
                dtype = choose_dtype(model.dtype, description.dtype, device)
                size = description.work_bytes(pipeline.painting_of(stage.name), dtype)
                if size:
                    num_bytes.setdefault(dtype, {})[stage.name] = size
        return "".join(_describe_sizes(sizes, dtype) for dtype, sizes in num_bytes.items())
    dtype = choose_dtype(model.dtype, report.dtype, engine.device)
    if report.divided:
        first, other = count_rank_weights(path, report, engine.tensor_parallel)
        sizes = {"rank 0": first.num_bytes(dtype), "each other rank": other.num_bytes(dtype)}
        return _describe_sizes(sizes, dtype)
    keeps = can_keep_numbers(engine) and not model.adapters
    weights = count_weights(path, report, rounds=model.quantization is not None, keeps=keeps)
    codec = model.stages.get(CODE2WAV)
    if model.graph == ORPHEUS and codec is not None and codec.path is not None:
        weights[CODE2WAV] = count_codec(Path(codec.path))
    return _describe_sizes({stage: part.num_bytes(dtype) for stage, part in weights.items()}, dtype)


def _describe_sizes(num_bytes: Mapping[str, int], dtype: str) -> str:
    sizes = [f"{stage} {decimal(size)}" for stage, size in num_bytes.items() if size]
    return f"; weights in memory: {', '.join(sizes)} as {dtype}"


def _print_kernels(as_json: bool) -> int:
    try:
        records = read_records(library.cache_folder())
    except OSError as error:
        raise ConfigError(
            f"the folder of measured kernels cannot be read: {error}", field="XDG_CACHE_HOME"
        ) from error
    here = [record for record in records if record.key.processor == library.processor_name()]
    if not here and not as_json:
        sys.stdout.write("# nothing has been measured on this processor\n")
    for record in here:
        rows = {
            name: {
                "chosen": str(measurement.option),
                "rounds": measurement.num_rounds,
                "microseconds": {
                    implementation: {rows: round(s * 1e6, 1) for rows, s in by_rows.items()}
                    for implementation, by_rows in measurement.least_s.items()
                },
            }
            for name, measurement in sorted(record.measured.items())
        }
        entry = {**msgspec.to_builtins(record.key), "operations": rows}
        print_json(entry) if as_json else sys.stdout.write(yaml.safe_dump([entry], sort_keys=False))
    return 0


def _graph_lines(pipeline: Pipeline) -> list[str]:
    """Return the pipeline as text: a line for each edge, each chunked stage, and each output."""
    lines = []
    for edge in pipeline.edges:
        arrow = {"task": "──▶", "stream": "~~▶", "fan_out": "══▶", "detour": "··▶"}[edge.mode]
        gathered = f", gathered by {edge.gathered_by}" if edge.gathered_by else ""
        mode = edge.mode.replace("_", "-")
        lines.append(f"{edge.source} {arrow} {edge.target}  ({mode}: {edge.carries}{gathered})")
    lines += [f"{s.name} in chunks of {s.chunks}" for s in pipeline.stages if s.chunks is not None]
    for name, stage in pipeline.outputs.items():
        assert stage.output is not None
        lines.append(f"{stage.name} ──▷ output {name} ({stage.output.kind})")
    return lines
