"""Pipelines as data: the part that leads to an output, restarts, and followers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.config.schema import ModelConfig
from shared.protocol.pipeline import REQUEST, TEXT, Edge, EdgeMode, OutputSpec, Pipeline, StageSpec
from shared.protocol.pipeline_faults import faults
from shared.stage import tasks
from shared.stage.pipelines import pipeline_of

ROLES = ("role",)
SPOKEN = Pipeline(
    (
        StageSpec("renderer", "role"),
        StageSpec("encoder", "role"),
        StageSpec("engine", "role", output=OutputSpec(TEXT, "text")),
        StageSpec("talker", "role", output=OutputSpec("codes", "audio")),
        StageSpec("vocoder", "role", output=OutputSpec("audio", "audio")),
    ),
    (
        Edge(REQUEST, "renderer", "prompt", "prompt"),
        Edge("renderer", "encoder", "image", "item", "fan_out", gathered_by="engine"),
        Edge("renderer", "engine", "tokens", "rendered"),
        Edge("engine", "talker", "tokens", "follow", "stream"),
        Edge("talker", "vocoder", "codes", "follow", "stream"),
    ),
)


@st.composite
def pipelines(draw: st.DrawFn) -> Pipeline:
    """Graphs without a cycle: the sources of a stage come before it."""
    names = [f"s{number}" for number in range(draw(st.integers(1, 7)))]
    stages, edges = [], []
    for number, name in enumerate(names):
        has_output = number == len(names) - 1 or draw(st.booleans())
        output = OutputSpec(f"out-{name}", "audio") if has_output else None
        stages.append(StageSpec(name, "role", output=output))
        sources = draw(st.sets(st.sampled_from([REQUEST, *names[:number]]), min_size=1))
        with_output = {stage.name for stage in stages if stage.output is not None}
        for source in sorted(sources):
            mode: EdgeMode = "stream" if source in with_output else "task"
            edges.append(Edge(source, name, f"{source}-{name}", "item", mode))
    return Pipeline(tuple(stages), tuple(edges))


def ancestors(pipeline: Pipeline, stage: str) -> set[str]:
    """The stage and all stages with a path to it, by the definition."""
    sources = {edge.source for edge in pipeline.edges if edge.target == stage} - {REQUEST}
    return {stage}.union(*(ancestors(pipeline, source) for source in sources))


@given(st.data())
def test_a_restricted_pipeline_has_exactly_the_ancestors(data: st.DataObject) -> None:
    pipeline = data.draw(pipelines())
    outputs = data.draw(st.sets(st.sampled_from(sorted(pipeline.outputs)), min_size=1))
    part = pipeline.restricted_to(outputs)
    names = set().union(*(ancestors(pipeline, pipeline.outputs[o].name) for o in outputs))
    if set(pipeline.outputs) <= outputs:
        assert part == pipeline
        return
    assert {stage.name for stage in part.stages} == names
    assert [stage for stage in pipeline.stages if stage.name in names] == list(part.stages)
    for edge in pipeline.edges:
        assert (edge in part.edges) == (edge.target in names)
    assert part.restricted_to(outputs) == part


def test_the_part_for_the_text_keeps_the_encoder_whose_results_the_engine_gathers() -> None:
    part = SPOKEN.restricted_to([TEXT])
    assert [stage.name for stage in part.stages] == ["renderer", "encoder", "engine"]
    assert SPOKEN.required_stages == ["renderer", "engine"]
    assert SPOKEN.restricted_to(["audio"]) == SPOKEN.restricted_to(["audio", TEXT])


def test_work_restarts_where_the_request_enters_the_pipeline() -> None:
    for stage in ("renderer", "encoder", "engine", "talker", "vocoder"):
        assert SPOKEN.restart_edges(stage) == [SPOKEN.edges[0]]


def test_a_follower_gets_its_task_from_the_output_that_it_follows() -> None:
    assert SPOKEN.followers_of("engine") == [SPOKEN.edges[3]]
    assert SPOKEN.inputs_of("vocoder") == {"codes": "codes"}
    with_task = Pipeline(
        SPOKEN.stages, (*SPOKEN.edges, Edge("renderer", "talker", "prompt", "rendered"))
    )
    assert with_task.followers_of("engine") == []


@pytest.mark.parametrize("tower", ["engine", "encoder"])
def test_the_default_pipelines_have_no_fault(tower: str) -> None:
    assert tasks  # registers the edge functions
    model = ModelConfig("nowhere", tower=tower)  # type: ignore[arg-type]
    assert list(faults(pipeline_of(model), ["renderer", "encoder", "engine"])) == []


def test_a_pipeline_with_several_outputs_has_no_fault() -> None:
    assert list(faults(SPOKEN, ROLES)) == []


def test_a_text_that_is_given_takes_the_place_of_the_stages_that_write_it() -> None:
    speech = Edge("engine", "talker", TEXT, "speech", "stream")
    edges = tuple(speech if edge.target == "talker" else edge for edge in SPOKEN.edges)
    spoken = Pipeline(SPOKEN.stages, edges)
    for outputs in ([], ["audio"], ["codes", "audio"]):
        part = spoken.part_for(outputs, text_given=True)
        assert [stage.name for stage in part.stages] == ["talker", "vocoder"]
        assert part.edges_from(REQUEST, "task") == [Edge(REQUEST, "talker", TEXT, "speech")]
        assert part.followers_of("talker") == [edges[-1]]
    assert [stage.name for stage in spoken.part_for(["codes"], text_given=True).stages] == [
        "talker"
    ]
    assert spoken.part_for(["audio"]) is not spoken.part_for(["audio"], text_given=True)


def test_no_output_is_made_of_a_given_text_by_an_edge_function_that_takes_none() -> None:
    assert SPOKEN.with_text_given == Pipeline((), ())
    without_text = Pipeline(SPOKEN.stages[:2], SPOKEN.edges[:2])
    assert without_text.with_text_given == Pipeline((), ())
