"""A model's pipeline: its stages and the edges between them, as data.

A stage is a queue that the workers of one role serve. The mode of an edge defines how its target
gets its input:

task      The source forwards its result. The edge's function turns the result into the target's
          task.
stream    The target gets its task when the source writes its first record, and follows the
          source's output while it grows.
fan_out   The source publishes any number of item tasks, each under the hash of its content, so
          that requests which need the same result share one task. Another stage, `gathered_by`,
          waits for the results.
detour    The source may forward its result to this stage first. The stage adds data that saves
          work, and forwards the result over the source's task edge. No request needs it.

Outputs have names and kinds, and one stage writes each. The output `text` is the request's own
token log; every other output has a separate log. This module is pure: it contains the names of
roles and edge functions, and imports neither workers nor the bus.
"""

from collections.abc import Callable, Collection, Mapping
from functools import cached_property
from typing import Any, Literal, NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from shared.protocol.chunks import ChunkSpec
from shared.protocol.images import SizeRule
from shared.protocol.videos import VideoSpec

REQUEST = "request"
"""The source of the edges that begin at the client's request."""
TEXT = "text"
"""The name of the output that is the request's own token log."""
ANY = "*"
"""For edge functions that accept results of any kind."""
ENDS = "ends"
"""Stands for the list of ended outputs, in place of an output's name."""
RESERVED_OUTPUTS = frozenset({ENDS})
"""Names of records that are not an output."""

OutputKind = Literal["text", "codes", "audio", "image", "video"]
CODES: OutputKind = "codes"
"""Frames of a codec, which a later stage turns into sound."""
AUDIO: OutputKind = "audio"
"""Sound."""
IMAGE_KIND: OutputKind = "image"
"""Painted images."""
VIDEO_KIND: OutputKind = "video"
"""A video."""
TEXTS = "texts"
"""Texts of a stage that paints. Another stage encodes them."""
LATENTS = "latents"
"""Latents of a stage that paints. Another stage decodes them."""
STEPS = "steps"
"""Denoising steps, which a stage that paints computes itself."""
PAINTING = frozenset({TEXTS, STEPS, LATENTS})
"""All work on an image or a video."""
ANSWER = "answer"
"""Edge function for a stage that speaks a text and also reads the prompt of the text."""
EdgeMode = Literal["task", "stream", "fan_out", "detour"]


class OutputSpec(Struct, frozen=True, forbid_unknown_fields=True):
    """Output of a stage, which requests select by its name."""

    name: str
    """Name of the output; `text` is the request's own token log."""
    kind: OutputKind
    """Kind of its records."""
    timed: bool = False
    """Whether records of sound have an `end_token`, the position in the text at their end."""


class StageSpec(Struct, frozen=True):
    """Stage: the name of a queue, and the role of the workers that serve it."""

    name: str
    role: str
    path: str | None = None
    """Folder with the stage's part of the model; None for the model's own folder."""
    sampling_defaults: dict[str, Any] = {}
    replicas: int = 1
    """Number of workers that `pagemill up` starts for the stage."""
    output: OutputSpec | None = None
    chunks: ChunkSpec | None = None
    """Sizes of the chunks into which the stage cuts its input of codes; None without codes."""
    voices: list[str] = []
    """Voices of a stage that speaks; the first one is the default."""
    frames_per_character: float | None = None
    """Mean number of frames for a character of spoken text, if it is known."""
    sizes: list[str] = []
    """Sizes of the images or videos that the stage makes; the first one is the default."""
    size_rule: SizeRule | None = None
    """Further sizes; None if there are none but `sizes`."""
    input_images: int = 0
    """Limit on the images that a request gives to a stage that edits images; 0 for other stages."""
    slots: int = 1
    """Number of queues in each lane; see `shared.stage.slots`."""
    max_wait_s: float = 300.0
    """Limit on the age of the oldest waiting task. Beyond it, requests for the stage's output are
    refused. The stage that writes the request's text has no such limit."""
    video: VideoSpec | None = None
    """Lengths of the videos that the stage makes; None for other stages."""

    @property
    def queue_slots(self) -> list[int | None]:
        """Slots of the stage's queues. The first one is None, for tasks without a slot."""
        return [None, *(range(self.slots) if self.slots > 1 else ())]


class Edge(Struct, frozen=True):
    """Input of the stage `target` from `source`, which is a stage or REQUEST."""

    source: str
    target: str
    carries: str
    """Kind of the transferred data, such as `prompt`, `tokens` or `image`."""
    function: str
    """Name of the registered function that creates the target's input."""
    mode: EdgeMode = "task"
    gathered_by: str | None = None
    """Stage that waits for the results of a fan-out edge; None for the source itself."""


class Pipeline(Struct, frozen=True, dict=True):
    """Stages of a model, and the edges between them."""

    stages: tuple[StageSpec, ...]
    edges: tuple[Edge, ...]

    @cached_property
    def _stages(self) -> dict[str, StageSpec]:
        return {stage.name: stage for stage in self.stages}

    def stage(self, name: str) -> StageSpec | None:
        return self._stages.get(name)

    def slots_of(self, stage: str) -> int:
        """Return the number of slots of a stage; 1 for a stage without slots."""
        spec = self.stage(stage)
        return 1 if spec is None else spec.slots

    def edges_from(self, source: str, mode: EdgeMode) -> list[Edge]:
        return [edge for edge in self.edges if edge.source == source and edge.mode == mode]

    def edges_into(self, target: str) -> list[Edge]:
        return [edge for edge in self.edges if edge.target == target]

    def gathered_by(self, stage: str) -> list[Edge]:
        """Return the fan-out edges with results that this stage waits for."""
        fan_outs = (edge for edge in self.edges if edge.mode == "fan_out")
        return [edge for edge in fan_outs if (edge.gathered_by or edge.source) == stage]

    def painting_of(self, stage: str) -> frozenset[str]:
        """Return the work of a stage on images or videos; a stage that paints does the rest."""
        incoming = {e.carries for e in self.edges_into(stage) if e.mode == "fan_out"} & PAINTING
        outgoing = {edge.carries for edge in self.edges_from(stage, "fan_out")}
        return frozenset(incoming) or PAINTING - outgoing

    def readers_of(self, stage: str) -> set[str]:
        """Return the stages that read payloads of this stage, directly or as gathered results."""
        targets = {edge.target for edge in self.edges if edge.source == stage}
        targets |= {edge.target for edge in self.onward_edges(stage)}
        fan_outs = (edge for edge in self.edges_into(stage) if edge.mode == "fan_out")
        return targets | {edge.gathered_by or edge.source for edge in fan_outs}

    def detour_from(self, stage: str) -> Edge | None:
        """Return the detour edge of `stage`, if it has one."""
        return next(iter(self.edges_from(stage, "detour")), None)

    def onward_edges(self, stage: str) -> list[Edge]:
        """Return the task edges over which a stage forwards. A detour uses its source's edges."""
        detours = (edge for edge in self.edges_into(stage) if edge.mode == "detour")
        sources = {stage} | {edge.source for edge in detours}
        return [edge for edge in self.edges if edge.source in sources and edge.mode == "task"]

    def inputs_of(self, stage: str) -> dict[str, str]:
        """Return the stream inputs of a stage: the output to follow, by the carried kind."""
        edges = (edge for edge in self.edges_into(stage) if edge.mode == "stream")
        followed = {edge.carries: self.stage(edge.source) for edge in edges}
        return {
            carries: source.output.name
            for carries, source in followed.items()
            if source is not None and source.output is not None
        }

    def followers_of(self, stage: str) -> list[Edge]:
        """Return the stream edges from this stage to targets without a task edge."""
        edges = self.edges_from(stage, "stream")
        return [e for e in edges if all(i.mode != "task" for i in self.edges_into(e.target))]

    def chunks_behind(self, stage: str) -> dict[str, ChunkSpec]:
        """Return the chunks of the stages that follow this one, by the names of their outputs."""
        targets = (self.stage(edge.target) for edge in self.edges_from(stage, "stream"))
        return {
            spec.output.name: spec.chunks
            for spec in targets
            if spec is not None and spec.chunks is not None and spec.output is not None
        }

    @cached_property
    def outputs(self) -> dict[str, StageSpec]:
        """Stages that write an output, by the name of the output."""
        return {stage.output.name: stage for stage in self.stages if stage.output is not None}

    def output_of(self, kind: OutputKind) -> OutputSpec | None:
        """Return the first output of a kind, if there is any."""
        specs = (stage.output for stage in self.stages if stage.output is not None)
        return next((spec for spec in specs if spec.kind == kind), None)

    @cached_property
    def default_outputs(self) -> list[str]:
        """Outputs of a request that names none: the text, or without a text all outputs."""
        return [TEXT] if TEXT in self.outputs else list(self.outputs)

    @property
    def voices(self) -> list[str]:
        """Voices of the stage that speaks; empty without such a stage."""
        return next((stage.voices for stage in self.stages if stage.voices), [])

    @property
    def painter(self) -> StageSpec | None:
        """Stage that paints images, if there is one."""
        return self._writer_of(IMAGE_KIND)

    @property
    def video_maker(self) -> StageSpec | None:
        """Stage that makes videos, if there is one."""
        return self._writer_of(VIDEO_KIND)

    def _writer_of(self, kind: OutputKind) -> StageSpec | None:
        outputs = self.outputs.values()
        return next((s for s in outputs if s.output and s.output.kind == kind), None)

    def part_for(self, outputs: Collection[str], *, text_given: bool = False) -> "Pipeline":
        """Return the part that runs for a request with these outputs.

        A request without named outputs gets its text. If it gives the text itself, it gets all
        outputs that are made from the text.
        """
        whole = self.with_text_given if text_given else self
        return whole.restricted_to(outputs or whole.default_outputs)

    @cached_property
    def with_text_given(self) -> "Pipeline":
        """Pipeline of requests that give their text themselves, so that no stage writes it.

        Stages that follow the text take it from the request, if their edge function can. Outputs
        that need other stages are missing.
        """
        writer = self.outputs.get(TEXT)
        if writer is None:
            return self._only(self._leading_to([n for n in self.outputs if self._reads_text(n)]))
        whole = Pipeline(
            self.stages,
            tuple(
                replace(edge, source=REQUEST, mode="task")
                if edge.source == writer.name and edge.mode == "stream" and _takes_text(edge)
                else edge
                for edge in self.edges
            ),
        )
        outputs = [name for name in self.outputs if writer.name not in whole._leading_to([name])]
        return whole._only(whole._leading_to(outputs))

    @property
    def speaks_given_texts(self) -> bool:
        """Whether a stage reads the given text of a request, and no text of another stage."""
        return any(edge.source == REQUEST and _takes_text(edge) for edge in self.edges)

    def _reads_text(self, output: str) -> bool:
        """Return whether an output is made from the text of a request alone."""
        stages = self._leading_to([output])
        begins = [e for e in self.edges if e.source == REQUEST and e.target in stages]
        return all(_takes_text(edge) for edge in begins)

    def restricted_to(self, outputs: Collection[str]) -> "Pipeline":
        """Return the part of the pipeline that leads to `outputs`."""
        if self.outputs.keys() <= set(outputs):
            return self
        return self._only(self._leading_to(outputs))

    def _leading_to(self, outputs: Collection[str]) -> set[str]:
        """Return the names of the stages that these outputs need, and of their detours."""
        stages = {self.outputs[name].name for name in outputs}
        todo = list(stages)
        while todo:
            stage = todo.pop()
            needed = {e.source for e in self.edges_into(stage)} | {
                e.target for e in self.gathered_by(stage)
            }
            todo += needed - stages - {REQUEST}
            stages |= needed - {REQUEST}
        detours = (edge for edge in self.edges if edge.mode == "detour")
        return stages | {edge.target for edge in detours if edge.source in stages}

    def _only(self, names: set[str]) -> "Pipeline":
        return Pipeline(
            tuple(stage for stage in self.stages if stage.name in names),
            tuple(edge for edge in self.edges if {edge.source, edge.target} <= names | {REQUEST}),
        )

    @cached_property
    def required_stages(self) -> list[str]:
        """Stages that every request needs. Others are on detours, or encode media."""
        part = self.restricted_to(self.default_outputs)
        optional = (e for e in part.edges if e.mode in ("fan_out", "detour"))
        beside = {edge.target for edge in optional if edge.carries not in PAINTING}
        return [stage.name for stage in part.stages if stage.name not in beside]

    def restart_edges(self, stage: str) -> list[Edge]:
        """Return the edges from the request that lead to `stage`, to recompute lost payloads.

        A payload is a cache: the stage that computed it does so again from its own input. So the
        work restarts where the request enters the pipeline on the way to `stage`.
        """
        visited: set[str] = set()
        todo, edges = [stage], []
        while todo:
            for edge in self.edges_into(todo.pop()):
                if edge.source == REQUEST:
                    edges.append(edge)
                elif edge.source not in visited:
                    visited.add(edge.source)
                    todo.append(edge.source)
        return edges


class EdgeFunction(NamedTuple):
    """Registered edge function. `make(source)` returns the target's task body, a Struct."""

    carries: str
    make: Callable[[Any], Struct]
    takes_text: bool
    """Whether the function also accepts the given text of a request."""
    takes_body: bool
    """Whether its argument is a FollowedTask, instead of the inputs alone."""


EDGE_FUNCTIONS: dict[str, EdgeFunction] = {}
"""The registered edge functions, by name."""


Make = Callable[[Any], Any]


def edge_function(
    name: str, carries: str, *, takes_text: bool = False, takes_body: bool = False
) -> Callable[[Make], Make]:
    """Register a function under `name` for edges that carry `carries`.

    Its argument is the Prompt of the request for an edge from REQUEST, the result of the source for
    a task edge, the input names and outputs to follow for a stream edge, and an item for a fan-out
    edge. It returns the body of the target's task. With `takes_text`, the function of a stream edge
    also accepts the Prompt of a request that gives the text itself. With `takes_body`, its argument
    is a FollowedTask of `shared.stage.edge_functions`.
    """

    def register(make: Make) -> Make:
        EDGE_FUNCTIONS[name] = EdgeFunction(carries, make, takes_text, takes_body)
        return make

    return register


def function_of(edge: Edge) -> Make:
    """Return the function of an edge. Raises KeyError if its name is not registered."""
    return EDGE_FUNCTIONS[edge.function].make


def _takes_text(edge: Edge) -> bool:
    return EDGE_FUNCTIONS[edge.function].takes_text


class Fault(NamedTuple):
    """Fault of a pipeline, and the key of the configuration that causes it."""

    key: str
    message: str


def has_embeddings(pipeline: Pipeline) -> bool:
    """Return whether the model embeds prompts, with the decoder of the stage that writes text."""
    return pipeline.default_outputs == [TEXT]


def models_of(pipelines: Mapping[str, Pipeline], stage: str) -> list[str]:
    """Return the models that have a stage of this name."""
    return [model for model, pipeline in pipelines.items() if pipeline.stage(stage) is not None]
