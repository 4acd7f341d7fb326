"""Configuration of `pagemill up MODEL`, written to a file that all workers read."""

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from shared.config.parsing import parse_config
from shared.config.schema import Config
from shared.errors import ConfigError
from shared.helpers.validation import reason_of
from shared.models.image_folder import is_image_folder, read_image_folder
from shared.stage.graphs import CODE2WAV, ORPHEUS, ORPHEUS_CODEC, graph_of_folder
from workers.cli.models.local import LocalModel, find_local, is_folder, missing_files
from workers.cli.models.memory import (
    ModelNeeds,
    PainterNeeds,
    Plan,
    Weights,
    available_bytes,
    check_painters,
    make_plan,
)
from workers.cli.models.reports import Report, check_folders
from workers.cli.models.stage_weights import (
    can_keep_numbers,
    count_codec,
    count_rank_weights,
    count_weights,
)
from workers.generation_config import FILE as GENERATION_FILE
from workers.generation_config import read_sampling_defaults

FILE = "pagemill-up-{digest}.yaml"
NUM_SEQS = "PAGEMILL_ENGINE__MAX_NUM_SEQS"
HEADER = "# Written by `pagemill up`. Copy it to pagemill.yaml to change it.\n"


@dataclass(frozen=True, slots=True)
class Wishes:
    """Settings of the command line, for every model."""

    dtype: str | None = None
    max_model_len: int | None = None
    quantization: str | None = None


def find_models(names_or_folders: Sequence[str]) -> list[LocalModel]:
    """Return the models of these names and folders. Raises ConfigError if a model is missing."""
    models = []
    for name in names_or_folders:
        model = find_local(name)
        if model is None:
            raise ConfigError(
                f"{name} is not here: run `pagemill pull {name}`, or `pagemill up --pull {name}`",
                field="models",
            )
        if missing := missing_files(model.folder):
            place, remedy = model.name, f"run `pagemill pull {model.name}`"
            if is_folder(name):
                place, remedy = str(model.folder), "copy the missing files into the folder"
            raise ConfigError(
                f"{place} is incomplete, it lacks {', '.join(missing[:3])}: {remedy}",
                field="models",
            )
        models.append(model)
    names = [model.name for model in models]
    if twice := {name for name in names if names.count(name) > 1}:
        raise ConfigError(f"two models have the name {', '.join(sorted(twice))}", field="models")
    return models


def write_config(models: Sequence[LocalModel], wishes: Wishes) -> tuple[Path, list[str]]:
    """Write the configuration of `models`. Return its file and lines that describe the choices.

    Raises ConfigError for a model that is refused, and if there is not enough memory.
    """
    base = _parse({model.name: {"path": str(model.folder)} for model in models})
    reports = check_folders(
        [model.folder for model in models], ranks=[base.engine.tensor_parallel] * len(models)
    )
    for model, report in zip(models, reports, strict=True):
        if report.reason is not None:
            raise ConfigError(f"{model.name} is refused: {report.reason}", field="models")
        if wishes.quantization is not None and is_image_folder(model.folder):
            raise ConfigError(
                f"quantization: {model.name} paints, and only decoders of text are quantized",
                field="quantization",
            )
    tree, lines = _choose(models, reports, wishes, base)
    for model in models:
        if graph_of_folder(model.folder) == ORPHEUS:
            stages = {CODE2WAV: {"path": str(_find_codec(model).folder)}}
            tree["models"][model.name]["stages"] = stages
    for model in models:
        if defaults := read_sampling_defaults(model.folder):
            tree["models"][model.name]["sampling_defaults"] = defaults
            stated = ", ".join(f"{name} {value:g}" for name, value in defaults.items())
            lines.append(f"{model.name}: {stated} by default, from its {GENERATION_FILE}")
    lines += [
        f"{model.name}: weights are stored as {report.stored_as}"
        for model, report in zip(models, reports, strict=True)
        if report.stored_as is not None
    ]
    text = HEADER + yaml.safe_dump(tree, sort_keys=False)
    # Restarted workers of another `pagemill up` read its file again, so it must not be overwritten.
    digest = hashlib.sha256(text.encode()).hexdigest()
    file = Path(base.nats.store_dir).absolute() / FILE.format(digest=digest)
    draft = file.with_name(f"{file.name}.{os.getpid()}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        draft.write_text(text, encoding="utf-8")
        draft.replace(file)
    except OSError as error:
        raise ConfigError(
            f"{file} cannot be written: {reason_of(error)}", field="nats.store_dir"
        ) from error
    return file, [*lines, f"settings are in {file}; PAGEMILL_… variables and options override them"]


def _find_codec(model: LocalModel) -> LocalModel:
    """Return the codec of an Orpheus model in the hub's cache. Raises ConfigError without one."""
    codec = find_local(ORPHEUS_CODEC)
    if codec is None:
        raise ConfigError(
            f"{model.name} needs its codec: run `hf download {ORPHEUS_CODEC}`, or write a"
            f" configuration with the folder in models.NAME.stages.{CODE2WAV}.path",
            field="models",
        )
    return codec


def _choose(
    models: Sequence[LocalModel], reports: Sequence[Report], wishes: Wishes, base: Config
) -> tuple[dict[str, Any], list[str]]:
    """Return the configuration, and a line about each model."""
    entries: dict[str, dict[str, Any]] = {
        # Unlike its path, the name of a model is the same on other machines.
        model.name: {"path": str(model.folder), "hash_model_id": model.name}
        for model in models
    }
    if base.engine.device == "cuda":
        options = {
            "dtype": wishes.dtype,
            "max_model_len": wishes.max_model_len,
            "quantization": wishes.quantization,
        }
        for entry in entries.values():
            entry.update({name: value for name, value in options.items() if value is not None})
        _parse(entries)
        return {"models": entries}, [f"engines compute on {base.engine.device}"]
    available = available_bytes()
    painters = [
        _painter_needs(model, report, wishes)
        for model, report in zip(models, reports, strict=True)
        if is_image_folder(model.folder)
    ]
    check_painters(painters, available)
    for painter in painters:
        entries[painter.name]["dtype"] = painter.dtype
    lines = [painter.line(available) for painter in painters]
    if len(painters) == len(models):
        return {"models": entries}, lines
    available -= sum(painter.weights_bytes for painter in painters)
    plan = _plan(models, reports, wishes, base, available)
    for share in plan.shares:
        entries[share.name] |= {"dtype": share.dtype, "max_model_len": share.max_model_len}
        if wishes.quantization is not None:
            entries[share.name]["quantization"] = wishes.quantization
    engine = {"kv_cache_mib": plan.kv_cache_mib}
    if plan.max_num_seqs < base.engine.max_num_seqs:
        engine["max_num_seqs"] = plan.max_num_seqs
    return {"models": entries, "engine": engine}, [*lines, *plan.lines()]


def _painter_needs(model: LocalModel, report: Report, wishes: Wishes) -> PainterNeeds:
    """Return the needs of a model that paints, by default in bfloat16 if it was saved so."""
    dtype = wishes.dtype or ("bfloat16" if report.dtype == "bfloat16" else "float32")
    folder = read_image_folder(model.folder)
    return PainterNeeds(
        model.name, dtype, {part: folder.num_bytes(part, dtype) for part in folder.parts}
    )


def _plan(
    models: Sequence[LocalModel],
    reports: Sequence[Report],
    wishes: Wishes,
    base: Config,
    available: int,
) -> Plan:
    """Return the plan of the models with an engine."""
    needs = [
        _needs_of(model, report, wishes, base)
        for model, report in zip(models, reports, strict=True)
        if not is_image_folder(model.folder)
    ]
    is_set = "PAGEMILL_ENGINE__KV_CACHE_MIB" in os.environ
    plan = make_plan(
        needs,
        available,
        base.engine.kv_cache_mib if is_set else None,
        base.engine.max_num_seqs,
    )
    if NUM_SEQS in os.environ and plan.max_num_seqs < base.engine.max_num_seqs:
        raise ConfigError(
            f"{NUM_SEQS}: the states of {plan.max_num_seqs} sequences fit into the memory: lower it"
            " to this number",
            field="engine.max_num_seqs",
        )
    return plan


def _needs_of(model: LocalModel, report: Report, wishes: Wishes, base: Config) -> ModelNeeds:
    keeps = can_keep_numbers(base.engine)
    rounds = wishes.quantization is not None
    weights = [*count_weights(model.folder, report, rounds=rounds, keeps=keeps).values()]
    talker, num_ranks = report.talker, base.engine.tensor_parallel
    if num_ranks > 1:
        first, other = count_rank_weights(model.folder, report, num_ranks)
        weights = [first, *[other] * (num_ranks - 1)]
    if graph_of_folder(model.folder) == ORPHEUS:
        weights.append(count_codec(_find_codec(model).folder))
    return ModelNeeds(
        model.name,
        Weights(*map(sum, zip(*weights, strict=True))),
        max(report.kv_values_per_token, talker.kv_values_per_token if talker else 0),
        report.max_position_embeddings,
        report.dtype,
        wishes.dtype,
        wishes.max_model_len,
        report.state_bytes_per_sequence,
        num_engines=2 if talker else num_ranks,
    )


def _parse(models: dict[str, dict[str, Any]]) -> Config:
    """Return the configuration of these models with the settings of the environment."""
    return parse_config(yaml.safe_dump({"models": models}), os.environ, "command line")
