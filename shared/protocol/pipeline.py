"""A model's pipeline: its stages and the edges between them, as data.

A stage is a queue that the workers of one role serve. An edge says how the target of the edge gets
its input:

task      The source hands its result over, and the edge's function makes the target's task of it.
stream    The target gets its task when the source writes its first record, and follows the
          source's output while it grows.
fan_out   The source publishes any number of item tasks, each under the hash of its content, so
          that requests which need the same result share one task. Another stage, `gathered_by`,
          waits for the results.
detour    The source may hand its result to this stage instead of over its task edge. The stage adds
          to it what saves work, and hands it over that same task edge. No request needs it.

Outputs have names and kinds, and one stage writes each. The output `text` is the request's own
token log; every other output has a log beside it. This module is pure: it names roles and edge
functions, and knows neither workers nor the bus.
"""

from collections.abc import Callable, Collection, Mapping
from functools import cached_property
from typing import Any, Literal, NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from shared.protocol.chunks import ChunkSpec

REQUEST = "request"
"""The source of the edges that begin at the client's request."""
TEXT = "text"
"""The name of the output that is the request's own token log."""
ANY = "*"
"""What an edge function carries that does not look at what it carries."""
ENDS = "ends"
"""In the place of an output's name: the list of the outputs that have ended."""
RESERVED_OUTPUTS = frozenset({ENDS})
"""Names under which a request has other records than those of an output."""

OutputKind = Literal["text", "codes", "audio", "image", "video"]
CODES: OutputKind = "codes"
"""Frames of a codec, of which a later stage makes sound."""
AUDIO: OutputKind = "audio"
"""Sound."""
IMAGE_KIND: OutputKind = "image"
"""Painted images."""
ANSWER = "answer"
"""The edge function for a stage that speaks a text, and reads the prompt that it answers."""
EdgeMode = Literal["task", "stream", "fan_out", "detour"]


class OutputSpec(Struct, frozen=True, forbid_unknown_fields=True):
    """An output of a stage, which requests may ask for by its name."""

    name: str
    """The output's name; `text` is the request's own token log."""
    kind: OutputKind
    """What its records hold."""
    timed: bool = False
    """Whether each record of sound says in `end_token` how much of the text has been spoken."""


class StageSpec(Struct, frozen=True):
    """A stage: the queue's name, and the role whose workers serve it."""

    name: str
    role: str
    path: str | None = None
    """Folder of the model part that the stage runs; None for the model's own folder."""
    sampling_defaults: dict[str, Any] = {}
    replicas: int = 1
    """Workers that `pagemill up` starts for it."""
    output: OutputSpec | None = None
    chunks: ChunkSpec | None = None
    """How the stage cuts the codes that it follows; None for a stage that follows none."""
    voices: list[str] = []
    """The voices that the stage speaks with; the first one is the default."""
    frames_per_character: float | None = None
    """Mean length of a character of the text that the stage speaks, if that is known."""
    sizes: list[str] = []
    """The sizes of image that the stage paints; the first one is the default."""
    slots: int = 1
    """Queues of a lane; see `shared.stage.slots`."""
    max_wait_s: float = 300.0
    """Age of the oldest task that waits, beyond which requests for the stage's output are refused;
    without effect on the stage that writes the request's text."""

    @property
    def queue_slots(self) -> list[int | None]:
        """The slots that tasks may have: None first, for tasks without a slot."""
        return [None, *(range(self.slots) if self.slots > 1 else ())]


class Edge(Struct, frozen=True):
    """How the stage `target` gets its input from `source`, which is a stage or REQUEST."""

    source: str
    target: str
    carries: str
    """The kind of what goes over the edge, such as `prompt`, `tokens` or `image`."""
    function: str
    """Name of the registered function that makes the target's input."""
    mode: EdgeMode = "task"
    gathered_by: str | None = None
    """The stage that waits for the results of a fan-out edge; None for the source itself."""


class Pipeline(Struct, frozen=True, dict=True):
    """The stages of a model and the edges between them."""

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
        """Fan-out edges whose results this stage waits for."""
        fan_outs = (edge for edge in self.edges if edge.mode == "fan_out")
        return [edge for edge in fan_outs if (edge.gathered_by or edge.source) == stage]

    def readers_of(self, stage: str) -> set[str]:
        """The stages that read payloads of this one: those that follow, or that gather."""
        given = {edge.target for edge in self.edges if edge.source == stage}
        given |= {edge.target for edge in self.onward_edges(stage)}
        fan_outs = (edge for edge in self.edges_into(stage) if edge.mode == "fan_out")
        return given | {edge.gathered_by or edge.source for edge in fan_outs}

    def detour_from(self, stage: str) -> Edge | None:
        """The edge to the stage that a result of `stage` may go to first."""
        return next(iter(self.edges_from(stage, "detour")), None)

    def onward_edges(self, stage: str) -> list[Edge]:
        """The task edges over which a stage forwards: on a detour, those of its source."""
        detours = (edge for edge in self.edges_into(stage) if edge.mode == "detour")
        sources = {stage} | {edge.source for edge in detours}
        return [edge for edge in self.edges if edge.source in sources and edge.mode == "task"]

    def inputs_of(self, stage: str) -> dict[str, str]:
        """The stream inputs of a stage: what each carries → the output to follow."""
        edges = (edge for edge in self.edges_into(stage) if edge.mode == "stream")
        followed = {edge.carries: self.stage(edge.source) for edge in edges}
        return {
            carries: source.output.name
            for carries, source in followed.items()
            if source is not None and source.output is not None
        }

    def followers_of(self, stage: str) -> list[Edge]:
        """Stream edges whose target gets its task from this stage, not over a task edge."""
        edges = self.edges_from(stage, "stream")
        return [e for e in edges if all(i.mode != "task" for i in self.edges_into(e.target))]

    def chunks_behind(self, stage: str) -> dict[str, ChunkSpec]:
        """How the stages that follow this one cut its output, by the names of their outputs."""
        targets = (self.stage(edge.target) for edge in self.edges_from(stage, "stream"))
        return {
            spec.output.name: spec.chunks
            for spec in targets
            if spec is not None and spec.chunks is not None and spec.output is not None
        }

    @cached_property
    def outputs(self) -> dict[str, StageSpec]:
        """Output name → the stage that writes it."""
        return {stage.output.name: stage for stage in self.stages if stage.output is not None}

    def output_of(self, kind: OutputKind) -> OutputSpec | None:
        """The first output of a kind, if there is any."""
        specs = (stage.output for stage in self.stages if stage.output is not None)
        return next((spec for spec in specs if spec.kind == kind), None)

    @cached_property
    def default_outputs(self) -> list[str]:
        """The outputs of a request that names none: its text, or all outputs without one."""
        return [TEXT] if TEXT in self.outputs else list(self.outputs)

    @property
    def voices(self) -> list[str]:
        """The voices of the stage that speaks; none without such a stage."""
        return next((stage.voices for stage in self.stages if stage.voices), [])

    @property
    def painter(self) -> StageSpec | None:
        """The stage that paints images."""
        outputs = self.outputs.values()
        return next((s for s in outputs if s.output and s.output.kind == IMAGE_KIND), None)

    def part_for(self, outputs: Collection[str], *, text_given: bool = False) -> "Pipeline":
        """The part that runs for a request with these outputs.

        A request that names none wants its text, or, where it gives the text itself, all outputs
        that are made of it.
        """
        whole = self.with_text_given if text_given else self
        return whole.restricted_to(outputs or whole.default_outputs)

    @cached_property
    def with_text_given(self) -> "Pipeline":
        """The pipeline of requests that give their text themselves, so that no stage writes it.

        The stages that follow the text, with an edge function for it, take it from the request. The
        outputs that cannot be made so are missing.
        """
        writer = self.outputs.get(TEXT)
        if writer is None:
            return Pipeline((), ())
        whole = Pipeline(
            self.stages,
            tuple(
                replace(edge, source=REQUEST, mode="task")
                if edge.source == writer.name and edge.mode == "stream" and _takes_text(edge)
                else edge
                for edge in self.edges
            ),
        )
        made = [name for name in self.outputs if writer.name not in whole._leading_to([name])]
        return whole._only(whole._leading_to(made))

    def restricted_to(self, outputs: Collection[str]) -> "Pipeline":
        """The part of the pipeline that leads to `outputs`."""
        if self.outputs.keys() <= set(outputs):
            return self
        return self._only(self._leading_to(outputs))

    def _leading_to(self, outputs: Collection[str]) -> set[str]:
        """The names of the stages without which these outputs are not written, and of detours."""
        wanted = {self.outputs[name].name for name in outputs}
        todo = list(wanted)
        while todo:
            stage = todo.pop()
            needed = {e.source for e in self.edges_into(stage)} | {
                e.target for e in self.gathered_by(stage)
            }
            todo += needed - wanted - {REQUEST}
            wanted |= needed - {REQUEST}
        detours = (edge for edge in self.edges if edge.mode == "detour")
        return wanted | {edge.target for edge in detours if edge.source in wanted}

    def _only(self, wanted: set[str]) -> "Pipeline":
        return Pipeline(
            tuple(stage for stage in self.stages if stage.name in wanted),
            tuple(edge for edge in self.edges if {edge.source, edge.target} <= wanted | {REQUEST}),
        )

    @cached_property
    def required_stages(self) -> list[str]:
        """Stages without which no request of this model is answered.

        These are all but the targets of fan-outs and detours.
        """
        part = self.restricted_to(self.default_outputs)
        beside = {edge.target for edge in part.edges if edge.mode in ("fan_out", "detour")}
        return [stage.name for stage in part.stages if stage.name not in beside]

    def restart_edges(self, stage: str) -> list[Edge]:
        """The edges from the request by which what `stage` was given is made again.

        A payload is a cache: the stage that made it makes it again from its own input, so the work
        restarts where the request enters the pipeline on the way to `stage`.
        """
        seen: set[str] = set()
        todo, found = [stage], []
        while todo:
            for edge in self.edges_into(todo.pop()):
                if edge.source == REQUEST:
                    found.append(edge)
                elif edge.source not in seen:
                    seen.add(edge.source)
                    todo.append(edge.source)
        return found


class EdgeFunction(NamedTuple):
    """A registered edge function. `make(source)` returns the target's task body, a Struct."""

    carries: str
    make: Callable[[Any], Struct]
    takes_text: bool
    """Whether it also makes the task of the text that a request gives."""
    takes_body: bool
    """Whether it makes the task of a FollowedTask, and not of the inputs alone."""


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
    takes a Prompt as well: that of a request that gives the text itself. With `takes_body`, its
    argument is a FollowedTask of `shared.stage.edge_functions`.
    """

    def register(make: Make) -> Make:
        EDGE_FUNCTIONS[name] = EdgeFunction(carries, make, takes_text, takes_body)
        return make

    return register


def function_of(edge: Edge) -> Make:
    """The registered function of an edge. Raises KeyError for a name that nobody registered."""
    return EDGE_FUNCTIONS[edge.function].make


def _takes_text(edge: Edge) -> bool:
    return EDGE_FUNCTIONS[edge.function].takes_text


class Fault(NamedTuple):
    """Something that is wrong with a pipeline, and the key of its part of the configuration."""

    key: str
    message: str


def has_embeddings(pipeline: Pipeline) -> bool:
    """Return whether the model embeds prompts: the stage that writes its text runs its decoder."""
    return pipeline.default_outputs == [TEXT]


def models_of(pipelines: Mapping[str, Pipeline], stage: str) -> list[str]:
    """The models that have a stage of this name."""
    return [model for model, pipeline in pipelines.items() if pipeline.stage(stage) is not None]
