"""Checks of a pipeline. Pure."""

from collections.abc import Collection, Iterable, Iterator
from graphlib import CycleError, TopologicalSorter

from shared.protocol.pipeline import (
    ANY,
    EDGE_FUNCTIONS,
    REQUEST,
    RESERVED_OUTPUTS,
    TEXT,
    Edge,
    Fault,
    Pipeline,
)


def faults(pipeline: Pipeline, roles: Collection[str]) -> Iterator[Fault]:
    """Yield all faults of a pipeline, with messages for an operator.

    `roles` are the names of roles that serve stages.
    """
    yield from _faults_of_stages(pipeline, roles)
    yield from _faults_of_edges(pipeline)
    for edge in pipeline.edges:
        if edge.mode == "detour":
            yield from _faults_of_detour(pipeline, edge)
    yield from _faults_of_graph(pipeline)


def _faults_of_stages(pipeline: Pipeline, roles: Collection[str]) -> Iterator[Fault]:
    writers: dict[str, str] = {}
    for stage in pipeline.stages:
        key = f"stages.{stage.name}"
        if stage.role not in roles:
            yield Fault(f"{key}.role", f"no role {stage.role!r}; there are {_listed(roles)}")
        if not any(edge.target == stage.name for edge in pipeline.edges):
            yield Fault(f"{key}.inputs", "the stage has no input, so it would never run")
        if stage.output is None:
            continue
        name, kind = stage.output.name, stage.output.kind
        if name in RESERVED_OUTPUTS:
            yield Fault(f"{key}.output", f"{name!r} is a reserved name")
        if (name == TEXT) != (kind == "text"):
            yield Fault(f"{key}.output", f"only the output {TEXT!r} is of kind 'text'")
        if name in writers:
            yield Fault(f"{key}.output", f"stage {writers[name]!r} writes output {name!r} already")
        writers[name] = stage.name
    if not writers:
        yield Fault("stages", "no stage has an output, so no request would have an answer")


def _faults_of_edges(pipeline: Pipeline) -> Iterator[Fault]:
    for stage in pipeline.stages:
        if sum(edge.mode == "task" for edge in pipeline.edges_into(stage.name)) > 1:
            message = "a stage has at most one task edge; its other inputs are streams"
            yield Fault(f"stages.{stage.name}.inputs", message)
    for edge in pipeline.edges:
        key = f"stages.{edge.target}.inputs.{edge.carries}"
        source = pipeline.stage(edge.source)
        if edge.source != REQUEST and source is None:
            sources = [REQUEST, *(stage.name for stage in pipeline.stages)]
            yield Fault(key, f"no stage {edge.source!r}; there are {_listed(sources)}")
        elif edge.mode == "stream" and (source is None or source.output is None):
            yield Fault(key, f"{edge.source!r} has no output that a stream edge could follow")
        if edge.source == REQUEST and edge.mode != "task":
            yield Fault(key, "an edge from the request is a task edge")
        if edge.gathered_by is not None and pipeline.stage(edge.gathered_by) is None:
            yield Fault(key, f"no stage {edge.gathered_by!r} that would gather the results")
        function = EDGE_FUNCTIONS.get(edge.function)
        if function is None:
            yield Fault(
                f"{key}.function",
                f"no edge function {edge.function!r}; there are {_listed(EDGE_FUNCTIONS)}",
            )
        elif function.carries not in (ANY, edge.carries):
            yield Fault(
                f"{key}.function",
                f"{edge.function!r} carries {function.carries!r}, not {edge.carries!r}",
            )


def _faults_of_detour(pipeline: Pipeline, edge: Edge) -> Iterator[Fault]:
    key, target = f"stages.{edge.target}.inputs.{edge.carries}", pipeline.stage(edge.target)
    task_edges = pipeline.edges_from(edge.source, "task")
    if len(pipeline.edges_from(edge.source, "detour")) > 1:
        yield Fault(key, f"{edge.source!r} has another detour")
    if [other.carries for other in task_edges] != [edge.carries]:
        message = f"a detour begins at a stage with one task edge, and that carries {edge.carries}"
        yield Fault(key, message)
    has_more = len(pipeline.edges_into(edge.target)) > 1
    if has_more or any(other.source == edge.target for other in pipeline.edges):
        yield Fault(key, "a stage on a detour must have no other input and no outgoing edge")
    if target is not None and target.output is not None:
        yield Fault(f"stages.{edge.target}.output", "a stage on a detour writes no output")


def _faults_of_graph(pipeline: Pipeline) -> Iterator[Fault]:
    names = {stage.name for stage in pipeline.stages}
    # A source that is not a stage is reported as another fault.
    sources = {name: {e.source for e in pipeline.edges_into(name)} & names for name in names}
    try:
        TopologicalSorter(sources).prepare()
    except CycleError as error:
        stuck = sorted(set(error.args[1]))
        yield Fault(f"stages.{stuck[0]}.inputs", f"the stages {_listed(stuck)} form a cycle")


def _listed(names: Iterable[str]) -> str:
    return ", ".join(repr(name) for name in names) or "none"
