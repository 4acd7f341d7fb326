"""Pipelines of the configuration: every refusal names the file and the key."""

from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from shared.config.schema import Config, EngineConfig, ModelConfig, StageConfig
from shared.errors import ConfigError
from shared.protocol.chunks import ChunkSpec
from shared.protocol.images import SizeRule
from shared.protocol.multimodal import MultiModalKwargsItem, PlaceholderRange
from shared.protocol.pipeline import function_of
from shared.protocol.task_messages import EngineBody, SpeechBody
from shared.stage import tasks
from shared.stage.edge_functions import input_of_follower
from shared.stage.pipelines import check_pipelines, default_stage, pipeline_of

ROLES = ("renderer", "encoder", "engine")
SPEECH: dict[str, Any] = {
    "role": "engine",
    "inputs": {"tokens": {"from": "engine", "function": "follow", "mode": "stream"}},
    "output": {"name": "speech", "kind": "audio"},
}


def model_with(stages: dict[str, Any]) -> ModelConfig:
    return ModelConfig("nowhere", stages=msgspec.convert(stages, dict[str, StageConfig]))


PAINTER: dict[str, Any] = {
    "role": "engine",
    "inputs": {"prompt": {"from": "request", "function": "paint"}},
    "output": {"name": "image", "kind": "image"},
    "sizes": ["8x8"],
}


def speech(**changes: Any) -> dict[str, Any]:
    return {"speech": SPEECH | changes}


def output(name: str, kind: str = "audio") -> dict[str, Any]:
    return speech(output={"name": name, "kind": kind})


def from_engine(**changes: Any) -> dict[str, Any]:
    return speech(inputs={"tokens": SPEECH["inputs"]["tokens"] | changes})


DETOUR: dict[str, Any] = {
    "role": "engine",
    "inputs": {"tokens": {"from": "renderer", "function": "rendered", "mode": "detour"}},
}


def detour(carries: str, source: str = "renderer") -> dict[str, Any]:
    function = "rendered" if carries == "tokens" else "item"
    edge = {"from": source, "function": function, "mode": "detour"}
    return {"prefill": DETOUR | {"inputs": {carries: edge}}}


FROM_REQUEST = from_engine(**{"from": "request", "mode": "fan_out"})
CODES: dict[str, Any] = {
    "talker": SPEECH | {"output": {"name": "codes", "kind": "codes"}},
    "code2wav": {
        "role": "engine",
        "inputs": {"codes": {"from": "talker", "function": "follow", "mode": "stream"}},
        "output": {"name": "audio", "kind": "audio"},
    },
}


def code2wav(**changes: Any) -> dict[str, Any]:
    return CODES | {"code2wav": CODES["code2wav"] | changes}


REFUSED = [
    ("stages.a.b", "the name of a stage must be", {"a.b": SPEECH}),
    ("stages.request", "the name of a stage must be", {"request": SPEECH}),
    ("stages.speech.role", "no role 'singer'", speech(role="singer")),
    ("stages.speech.role", "no role 'speech'", speech(role=None)),
    ("stages.speech.inputs", "no input", speech(inputs={})),
    (
        "stages.speech.output",
        "the name of an output must be",
        output("a.b"),
    ),
    ("stages.speech.output", "the name of an output must be", output("")),
    ("stages.speech.output", "reserved", output("ends")),
    ("stages.speech.output", "kind 'text'", output("speech", "text")),
    ("stages.speech.output", "kind 'text'", output("text")),
    ("stages.speech.output", "writes output", output("text", "text")),
    ("stages", "no stage has an output", {"engine": {"enabled": False}}),
    (
        "stages.engine.inputs",
        "at most one task edge",
        {
            "engine": {
                "inputs": {
                    "tokens": {"from": "renderer", "function": "rendered"},
                    "prompt": {"from": "request", "function": "prompt"},
                }
            }
        },
    ),
    ("stages.speech.inputs.tokens", "no stage 'nobody'", from_engine(**{"from": "nobody"})),
    ("stages.speech.inputs.tokens", "has no output", from_engine(**{"from": "renderer"})),
    (
        "stages.speech.inputs.tokens",
        "a task edge",
        from_engine(**{"from": "request", "mode": "fan_out"}),
    ),
    (
        "stages.speech.inputs.tokens",
        "gather",
        from_engine(**{"from": "renderer", "mode": "fan_out", "gathered_by": "nobody"}),
    ),
    ("stages.speech.inputs.tokens.function", "no edge function", from_engine(function="sing")),
    ("stages.speech.inputs.tokens.function", "carries 'prompt'", from_engine(function="prompt")),
    (
        "stages.prefill.inputs.tokens",
        "has another detour",
        {"prefill": DETOUR, "more": DETOUR | {"role": "engine"}},
    ),
    ("stages.prefill.inputs.image", "that carries image", detour("image")),
    ("stages.prefill.inputs.tokens", "one task edge", detour("tokens", source="engine")),
    (
        "stages.prefill.inputs.tokens",
        "no other input and no outgoing edge",
        {
            "prefill": DETOUR,
            "speech": SPEECH | {"inputs": {"tokens": {"from": "prefill", "function": "rendered"}}},
        },
    ),
    (
        "stages.prefill.output",
        "writes no output",
        {"prefill": DETOUR | {"output": {"name": "speech", "kind": "audio"}}},
    ),
    # Its workers forward tasks, and would acknowledge them without a next stage.
    ("stages.engine.role", "no task edge begins", {"engine": {"role": "prefill"}}),
    ("stages.engine.role", "no task edge begins", {"engine": {"role": "renderer"}}),
    (
        "stages.renderer.output",
        "'renderer' write no output",
        {"renderer": {"output": {"name": "words", "kind": "codes"}}},
    ),
    ("stages.speech.chunks", "only a stage with an input 'codes'", speech(chunks={})),
    (
        "stages.code2wav.chunks.max_ahead",
        "31 is less than 32",
        code2wav(chunks={"first": [30], "size": 9, "right": 2, "max_ahead": 31}),
    ),
    (
        "stages.code2wav.inputs.codes",
        "of kind 'text', not 'codes'",
        code2wav(inputs={"codes": {"from": "engine", "function": "follow", "mode": "stream"}}),
    ),
    ("stages.speech.sizes", "if and only if", speech(sizes=["8x8"])),
    ("stages.dit.sizes", "if and only if", {"dit": PAINTER | {"sizes": []}}),
    (
        "stages.dit.sampling_defaults.steps",
        "must be at least 1",
        {"dit": PAINTER | {"sampling_defaults": {"steps": 0}}},
    ),
    (
        "stages.dit.sampling_defaults.cfg_scale",
        "only requests have this name",
        {"dit": PAINTER | {"sampling_defaults": {"cfg_scale": 2}}},
    ),
    (
        "stages.engine.sampling_defaults.steps",
        "unknown field",
        {"engine": {"sampling_defaults": {"steps": 2}}},
    ),
    (
        "stages.dit.sampling_defaults.size",
        "'8x9' is not in `sizes`",
        {"dit": PAINTER | {"sampling_defaults": {"size": "8x9"}}},
    ),
    (
        "stages.engine.inputs",
        "form a cycle",
        {"renderer": {"inputs": {"tokens": {"from": "engine", "function": "rendered"}}}},
    ),
]


@pytest.mark.parametrize(("key", "message", "stages"), REFUSED)
def test_a_refusal_names_the_file_and_the_key(
    key: str, message: str, stages: dict[str, Any]
) -> None:
    assert tasks  # registers the edge functions
    with pytest.raises(ConfigError) as caught:
        check_pipelines(Config({"demo": model_with(stages)}), (*ROLES, "prefill"), "pagemill.yaml")
    assert caught.value.field == f"models.demo.{key}"
    assert caught.value.message.startswith(f"pagemill.yaml: models.demo.{key}: ")
    assert message in caught.value.message


def test_a_model_and_a_stage_have_names_that_fit_into_a_consumers_name() -> None:
    long_stage = {"s" * 43: SPEECH}
    check_pipelines(Config({"." * 66: model_with({})}), ROLES, "pagemill.yaml")
    check_pipelines(Config({"m": model_with(long_stage)}), ROLES, "pagemill.yaml")
    with pytest.raises(ConfigError, match="more than 255 characters") as caught:
        check_pipelines(Config({"." * 67: model_with(long_stage)}), ROLES, "pagemill.yaml")
    assert caught.value.field == f"models.{'.' * 67}.stages.{'s' * 43}"


def test_stages_of_the_configuration_change_the_default_pipeline() -> None:
    model = model_with(speech() | {"engine": {"replicas": 2, "sampling_defaults": {"n": 2}}})
    check_pipelines(Config({"demo": model}), ROLES, "pagemill.yaml")
    pipeline = pipeline_of(model)
    assert list(pipeline.outputs) == ["text", "speech"]
    assert pipeline.default_outputs == ["text"]
    engine = pipeline.stage("engine")
    assert engine is not None
    assert (engine.replicas, engine.sampling_defaults) == (2, {"n": 2})
    assert [edge.target for edge in pipeline.followers_of("engine")] == ["speech"]


def test_a_painter_of_a_graph_takes_other_defaults_of_images() -> None:
    stages = {"dit": StageConfig(sampling_defaults={"steps": 4})}
    model = ModelConfig("x", graph="stable-diffusion-3", stages=stages)
    check_pipelines(Config({"demo": model}), (*ROLES, "generator"), "pagemill.yaml")
    painter = pipeline_of(model).painter
    assert painter is not None
    assert painter.sampling_defaults == {"steps": 4, "guidance": 7.0}


def test_texts_and_latents_have_separate_stages_if_the_configuration_names_them() -> None:
    stages = {"vae": StageConfig(replicas=2), "text_encoder": StageConfig()}
    model = ModelConfig("x", graph="qwen-image", stages=stages)
    check_pipelines(Config({"demo": model}), (*ROLES, "generator"), "pagemill.yaml")
    pipeline = pipeline_of(model)
    work = {stage.name: pipeline.painting_of(stage.name) for stage in pipeline.stages}
    assert work == {"dit": {"steps"}, "text_encoder": {"texts"}, "vae": {"latents"}}
    assert {(stage.role, stage.replicas) for stage in pipeline.stages} == {
        ("generator", 1),
        ("generator", 2),
    }
    # Every image needs all three.
    assert sorted(pipeline.required_stages) == ["dit", "text_encoder", "vae"]
    assert pipeline.readers_of("text_encoder") == {"dit"}
    one = pipeline_of(replace(model, stages={"vae": StageConfig(enabled=False)}))
    assert one.painting_of("dit") == {"texts", "steps", "latents"}
    two = pipeline_of(replace(model, stages={"vae": StageConfig()}))
    assert two.painting_of("dit") == {"texts", "steps"}


@pytest.mark.parametrize(
    "inputs",
    [
        {"texts": {"from": "dit", "function": "item"}},
        {"latents": {"from": "text_encoder", "function": "item", "mode": "fan_out"}},
        {
            kind: {"from": "dit", "function": "item", "mode": "fan_out"}
            for kind in ("texts", "latents")
        },
    ],
)
def test_texts_and_latents_come_alone_from_a_stage_that_paints(inputs: dict[str, Any]) -> None:
    stages = {"text_encoder": {}, "other": {"role": "generator", "inputs": inputs}}
    tree = {"path": "x", "graph": "qwen-image", "stages": stages}
    model = msgspec.convert(tree, ModelConfig)
    with pytest.raises(ConfigError, match="are the only input of their stage") as caught:
        check_pipelines(Config({"demo": model}), (*ROLES, "generator"), "pagemill.yaml")
    assert caught.value.field == f"models.demo.stages.other.inputs.{next(iter(inputs))}"


def test_sizes_of_a_configuration_are_the_only_ones() -> None:
    model = ModelConfig("x", graph="flux.1-dev")
    painter = pipeline_of(model).painter
    assert painter is not None
    assert painter.size_rule == SizeRule(16, 2048 * 2048, 4096)
    model = replace(model, stages={"dit": StageConfig(sizes=["512x512"])})
    painter = pipeline_of(model).painter
    assert painter is not None
    assert (painter.sizes, painter.size_rule) == (["512x512"], None)


def test_a_stage_that_follows_codes_cuts_them_into_chunks() -> None:
    chunks = {"first": [5, 10], "size": 20, "left": 3, "right": 4}
    for changes, expected in (
        ({}, ChunkSpec()),
        ({"chunks": chunks}, ChunkSpec((5, 10), 20, 3, 4)),
    ):
        model = model_with(code2wav(**changes))
        check_pipelines(Config({"demo": model}), ROLES, "pagemill.yaml")
        pipeline = pipeline_of(model)
        stages = {stage.name: stage.chunks for stage in pipeline.stages}
        assert stages == {"renderer": None, "engine": None, "talker": None, "code2wav": expected}
        assert pipeline.inputs_of("code2wav") == {"codes": "codes"}


def test_prefill_workers_are_on_a_detour_from_the_renderer_to_the_engine() -> None:
    model = ModelConfig("nowhere", prefill="prefill")
    check_pipelines(Config({"demo": model}), (*ROLES, "prefill"), "pagemill.yaml")
    pipeline, default = pipeline_of(model), pipeline_of(ModelConfig("nowhere"))
    detour = pipeline.detour_from("renderer")
    assert detour is not None
    assert (detour.target, default.detour_from("renderer")) == ("prefill", None)
    assert pipeline.onward_edges("prefill") == pipeline.edges_from("renderer", "task")
    assert pipeline.onward_edges("renderer") == default.onward_edges("renderer")
    # No request needs it, and what it stores is read by engines.
    assert pipeline.required_stages == default.required_stages
    assert pipeline.readers_of("prefill") == {"engine"}
    assert pipeline.readers_of("renderer") == {"prefill", "engine"}
    assert pipeline.restart_edges("engine") == default.restart_edges("engine")


def test_a_detour_belongs_to_the_part_of_a_pipeline_with_its_source() -> None:
    stages = msgspec.convert(speech(), dict[str, StageConfig])
    pipeline = pipeline_of(ModelConfig("nowhere", prefill="prefill", stages=stages))
    part = pipeline.restricted_to(["text"])
    assert [stage.name for stage in part.stages] == ["renderer", "prefill", "engine"]
    assert part.detour_from("renderer") == pipeline.detour_from("renderer")


def test_a_detour_needs_the_prefix_cache() -> None:
    config = Config(
        {"demo": ModelConfig("nowhere", prefill="prefill")},
        engine=EngineConfig(prefix_caching=False),
    )
    with pytest.raises(ConfigError, match=r"engine\.prefix_caching: true") as caught:
        check_pipelines(config, (*ROLES, "prefill"), "pagemill.yaml")
    assert caught.value.field == "models.demo.stages.prefill.inputs.tokens"


def test_a_worker_serves_the_only_stage_of_its_role_if_none_has_its_name() -> None:
    single, two = (
        {"m": pipeline_of(ModelConfig("nowhere", stages=stages))}
        for stages in (
            {"talker": StageConfig(role="engine"), "code2wav": StageConfig(role="generator")},
            {"a": StageConfig(role="generator"), "b": StageConfig(role="generator")},
        )
    )
    roles = ("renderer", "engine", "generator", "coordinator")
    assert [default_stage(single, role, "m") for role in roles] == [
        "renderer",
        "engine",
        "code2wav",
        "coordinator",
    ]
    assert default_stage(two, "generator", "m") == "generator"
    # Workers that serve all models have a stage of one name in all of them.
    assert default_stage(single | {"n": two["m"]}, "renderer", None) == "renderer"


@pytest.mark.parametrize("graph", ["qwen3-omni", "qwen2.5-omni"])
def test_a_graph_of_the_product_adds_a_talker_and_a_vocoder_that_may_be_changed(graph: Any) -> None:
    changes: dict[str, Any] = {
        "talker": {"voices": ["Chelsie"]},
        "code2wav": {"chunks": {"size": 9, "left": 30, "right": 1}},
    }
    model = msgspec.convert({"path": "nowhere", "graph": graph, "stages": changes}, ModelConfig)
    check_pipelines(Config(models={"omni": model}), (*ROLES, "generator"), "a file")
    pipeline = pipeline_of(model)
    assert list(pipeline.outputs) == ["text", "codes", "audio"]
    assert pipeline.required_stages == ["renderer", "engine"]
    assert pipeline.voices == ["Chelsie"]
    assert pipeline.stage("code2wav").chunks == ChunkSpec(size=9, left=30, right=1)  # type: ignore[union-attr]
    (edge,) = pipeline.followers_of("engine")
    items = [MultiModalKwargsItem("image", "a", PlaceholderRange(1, 1))]
    source = input_of_follower(pipeline, edge, EngineBody([1, 2], items))
    assert function_of(edge)(source) == SpeechBody(prompt_token_ids=[1, 2], items=items)
    # No text is given to a talker that speaks answers.
    assert list(pipeline.with_text_given.outputs) == []
