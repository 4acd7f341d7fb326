"""Pipelines of the configured models: the default pipeline with the configured changes."""

from collections.abc import Collection, Iterator, Mapping
from itertools import chain
from typing import get_args

import msgspec

from shared.config.schema import Config, ModelConfig, StageConfig
from shared.errors import ConfigError
from shared.helpers.validation import complaint_of
from shared.protocol.chunks import ChunkSpec
from shared.protocol.images import OTHER_NAMES, ImageParams
from shared.protocol.multimodal import Modality
from shared.protocol.names import NAME_RULE, is_name
from shared.protocol.pipeline import (
    CODES,
    IMAGE_KIND,
    LATENTS,
    REQUEST,
    TEXT,
    TEXTS,
    VIDEO_KIND,
    Edge,
    Fault,
    OutputSpec,
    Pipeline,
    StageSpec,
)
from shared.protocol.pipeline_faults import faults
from shared.protocol.sampling import SamplingParams
from shared.protocol.subjects import LANES, MAX_CONSUMER_LEN, stage_consumer
from shared.protocol.videos import VideoParams
from shared.stage import (
    edge_functions,  # noqa: F401 - registers the functions that edges name
    graphs,
)

RENDERER, ENCODER, PREFILL, ENGINE = "renderer", "encoder", "prefill", "engine"
FORWARDERS = (RENDERER, PREFILL)
"""Roles that forward every task and write no output."""


_PARAMS_OF_KIND: dict[str, type[msgspec.Struct]] = {
    IMAGE_KIND: ImageParams,
    VIDEO_KIND: VideoParams,
}
"""Types of the sampling parameters of stages, by the kind of their output."""


def pipelines_of(config: Config) -> dict[str, Pipeline]:
    """Return the pipeline of each configured model."""
    return {name: pipeline_of(model) for name, model in config.models.items()}


def pipeline_of(model: ModelConfig) -> Pipeline:
    """Return the default pipeline of a model with the changes in its `stages`.

    Renderers send tokens to the engine. With `tower: encoder`, they also send items to encoders,
    and the engine waits for the embeddings. With `prefill: prefill`, long prompts make a detour.
    """
    stages, edges = _default(model)
    for name, changes in model.stages.items():
        if not changes.enabled:
            stages.pop(name, None)
            edges.pop(name, None)
            continue
        stages[name] = _changed(name, stages.get(name), changes)
        if changes.inputs is not None:
            edges[name] = [
                Edge(source.source, name, carries, source.function, source.mode, source.gathered_by)
                for carries, source in changes.inputs.items()
            ]
    return Pipeline(
        tuple(stages.values()), tuple(chain.from_iterable(edges.get(name, []) for name in stages))
    )


def default_stage(pipelines: Mapping[str, Pipeline], role: str, model: str | None) -> str:
    """Return the name of the stage that a worker serves by default.

    It is the only stage of the role in the pipelines, or else the stage with the role's name.
    """
    names = {
        stage.name
        for name, pipeline in pipelines.items()
        if model in (None, name)
        for stage in pipeline.stages
        if stage.role == role
    }
    return names.pop() if len(names) == 1 else role


def check_pipelines(config: Config, roles: Collection[str], source: str) -> None:
    """Raise ConfigError for the first error in a pipeline.

    `roles` are the names of the roles that serve stages, `source` names the configuration file.
    """
    for name, model in config.models.items():
        pipeline = pipeline_of(model)
        naming = (*_faults_of_names(model), *_faults_of_consumers(name, pipeline))
        chunks = (*_faults_of_chunks(pipeline), *_faults_of_sizes(pipeline))
        parts = _faults_of_parts(pipeline)
        engines = [config.engine, *model.pools.values()]
        caches = all(engine.prefix_caching for engine in engines)
        detours = () if caches else _faults_of_detours(pipeline)
        defaults = _faults_of_defaults(pipeline)
        general = (
            *faults(pipeline, roles),
            *defaults,
            *chunks,
            *parts,
            *_faults_of_forwarders(pipeline),
            *detours,
        )
        if model.pools and pipeline.stage(ENGINE) is None:
            general += (Fault("pools", f"the model has no stage {ENGINE!r}, so it has no engines"),)
        for fault in (*naming, *general):
            key = f"models.{name}.{fault.key}"
            raise ConfigError(f"{source}: {key}: {fault.message}", field=key)


def _faults_of_names(model: ModelConfig) -> Iterator[Fault]:
    for stage, changes in model.stages.items():
        if not is_name(stage) or stage == REQUEST:
            message = f"the name of a stage {NAME_RULE}, and is not {REQUEST!r}"
            yield Fault(f"stages.{stage}", message)
        if changes.output is not None and not is_name(changes.output.name):
            # It becomes a token of the subject of the output's log.
            yield Fault(f"stages.{stage}.output", f"the name of an output {NAME_RULE}")


def _faults_of_consumers(model: str, pipeline: Pipeline) -> Iterator[Fault]:
    for stage in pipeline.stages:
        lane, slot = max(LANES, key=len), stage.queue_slots[-1]
        consumer = stage_consumer(stage.name, model, lane, slot)
        if len(consumer) > MAX_CONSUMER_LEN:
            yield Fault(
                f"stages.{stage.name}",
                f"the consumer {consumer} has more than {MAX_CONSUMER_LEN} characters: shorten the"
                " name of the model or of the stage",
            )


def _faults_of_chunks(pipeline: Pipeline) -> Iterator[Fault]:
    for stage in pipeline.stages:
        followed = pipeline.inputs_of(stage.name).get(CODES)
        if stage.chunks is not None and followed is None:
            message = f"only a stage with an input {CODES!r} that follows an output has chunks"
            yield Fault(f"stages.{stage.name}.chunks", message)
        if stage.chunks is not None and stage.chunks.max_ahead < stage.chunks.min_ahead:
            yield Fault(
                f"stages.{stage.name}.chunks.max_ahead",
                f"{stage.chunks.max_ahead} is less than {stage.chunks.min_ahead}, the length of the"
                " longest chunk with the frames after it",
            )
        source = None if followed is None else pipeline.outputs[followed]
        if source is not None and source.output is not None and source.output.kind != CODES:
            yield Fault(
                f"stages.{stage.name}.inputs.{CODES}",
                f"the output of {source.name!r} is of kind {source.output.kind!r}, not {CODES!r}",
            )


def _faults_of_defaults(pipeline: Pipeline) -> Iterator[Fault]:
    for stage in pipeline.stages:
        kind = "" if stage.output is None else stage.output.kind
        try:
            params = _PARAMS_OF_KIND.get(kind, SamplingParams)
            msgspec.convert(stage.sampling_defaults, params)
        except msgspec.ValidationError as error:
            complaint = complaint_of(error, params, f"stages.{stage.name}.sampling_defaults")
            yield Fault(complaint.path, complaint.reason)
        for name in OTHER_NAMES & stage.sampling_defaults.keys():
            message = "only requests have this name of diffusers"
            yield Fault(f"stages.{stage.name}.sampling_defaults.{name}", message)


def _faults_of_sizes(pipeline: Pipeline) -> Iterator[Fault]:
    for stage in pipeline.stages:
        kind = "" if stage.output is None else stage.output.kind
        paints = kind in (IMAGE_KIND, VIDEO_KIND)
        default = stage.sampling_defaults.get("size", "")
        if paints != bool(stage.sizes):
            message = (
                f"a stage has sizes if and only if its output is of kind {IMAGE_KIND!r} or"
                f" {VIDEO_KIND!r}"
            )
            yield Fault(f"stages.{stage.name}.sizes", message)
        elif (kind == VIDEO_KIND) != (stage.video is not None):
            message = f"only the stage of a built-in graph has an output of kind {VIDEO_KIND!r}"
            yield Fault(f"stages.{stage.name}.output", message)
        elif stage.input_images and kind != IMAGE_KIND:
            message = f"only a stage with an output of kind {IMAGE_KIND!r} edits images"
            yield Fault(f"stages.{stage.name}.input_images", message)
        elif paints and default and default not in stage.sizes:
            message = f"{default!r} is not in `sizes`, which has {', '.join(stage.sizes)}"
            yield Fault(f"stages.{stage.name}.sampling_defaults.size", message)


def _faults_of_parts(pipeline: Pipeline) -> Iterator[Fault]:
    for edge in pipeline.edges:
        if edge.carries not in (TEXTS, LATENTS):
            continue
        source = pipeline.stage(edge.source)
        kind = None if source is None or source.output is None else source.output.kind
        is_alone = len(pipeline.edges_into(edge.target)) == 1
        if edge.mode != "fan_out" or kind not in (IMAGE_KIND, VIDEO_KIND) or not is_alone:
            yield Fault(
                f"stages.{edge.target}.inputs.{edge.carries}",
                f"{edge.carries} are the only input of their stage, over a fan-out edge from a"
                " stage that paints",
            )


def _faults_of_forwarders(pipeline: Pipeline) -> Iterator[Fault]:
    for stage in pipeline.stages:
        if stage.role not in FORWARDERS:
            continue
        if not pipeline.onward_edges(stage.name):
            yield Fault(
                f"stages.{stage.name}.role",
                f"workers of the role {stage.role!r} forward every task, and no task edge begins at"
                " this stage: its requests would be lost",
            )
        if stage.output is not None:
            message = f"workers of the role {stage.role!r} write no output"
            yield Fault(f"stages.{stage.name}.output", message)


def _faults_of_detours(pipeline: Pipeline) -> Iterator[Fault]:
    for edge in pipeline.edges:
        if edge.mode == "detour":
            # The engine uses blocks of another worker only through the prefix cache.
            message = "a detour needs engine.prefix_caching: true"
            yield Fault(f"stages.{edge.target}.inputs.{edge.carries}", message)


def _default(model: ModelConfig) -> tuple[dict[str, StageSpec], dict[str, list[Edge]]]:
    stages, edges = _writers(model) if graphs.writes_text(model.graph) else ({}, {})
    for stage, inputs in graphs.stages_of(model.graph, ENGINE, model.stages):
        stages[stage.name], edges[stage.name] = stage, inputs
    return stages, edges


def _writers(model: ModelConfig) -> tuple[dict[str, StageSpec], dict[str, list[Edge]]]:
    """Return the stages that lead to the text of an answer, with their input edges."""
    stages = {RENDERER: StageSpec(RENDERER, RENDERER)}
    edges = {RENDERER: [Edge(REQUEST, RENDERER, "prompt", "prompt")]}
    if model.tower == ENCODER:
        stages[ENCODER] = StageSpec(ENCODER, ENCODER)
        edges[ENCODER] = [
            Edge(RENDERER, ENCODER, modality, "item", "fan_out", gathered_by=ENGINE)
            for modality in get_args(Modality)
        ]
    if model.prefill == PREFILL:
        stages[PREFILL] = StageSpec(PREFILL, PREFILL)
        edges[PREFILL] = [Edge(RENDERER, PREFILL, "tokens", "rendered", "detour")]
    text = OutputSpec(TEXT, "text")
    stages[ENGINE] = StageSpec(ENGINE, ENGINE, output=text, slots=model.slots)
    edges[ENGINE] = [Edge(RENDERER, ENGINE, "tokens", "rendered")]
    return stages, edges


def _changed(name: str, base: StageSpec | None, changes: StageConfig) -> StageSpec:
    base = base or StageSpec(name, name)
    chunks = ChunkSpec() if CODES in (changes.inputs or {}) else base.chunks
    role = changes.role or base.role
    return StageSpec(
        name,
        role,
        changes.path or base.path,
        base.sampling_defaults | changes.sampling_defaults,
        changes.replicas,
        changes.output or base.output,
        changes.chunks or chunks,
        changes.voices or base.voices,
        changes.frames_per_character or base.frames_per_character,
        changes.sizes or base.sizes,
        None if changes.sizes else base.size_rule,
        changes.input_images or base.input_images,
        # Only engines pull from slots.
        base.slots if role == ENGINE else 1,
        changes.max_wait_s,
        base.video,
    )
