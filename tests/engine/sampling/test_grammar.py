"""Structured outputs follow their grammar for any model, also across resumes."""

import asyncio
import contextlib
import json
import random
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jsonschema_rs
import msgspec
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM

from shared.config.schema import EngineConfig, ModelConfig
from shared.errors import (
    GrammarNotTried,
    InvalidGrammar,
    InvalidRequest,
    PagemillError,
    WorkerFailure,
)
from shared.protocol.records import ChoiceDelta
from shared.protocol.sampling import MAX_GRAMMAR_BYTES, SamplingParams, StructuredOutputs
from tests.engine.model.test_parity import widen
from workers.engine.core.engine import EngineCore
from workers.engine.core.sequence import EngineRequest, LoggedChoice, RequestOutput
from workers.engine.loader import LoadedModel, load
from workers.engine.log_records import merge_deltas
from workers.engine.main import build_core, new_grammar_compiler
from workers.engine.sampling import grammar as grammars_module
from workers.engine.sampling import grammar_trial
from workers.engine.sampling.grammar import Grammar, GrammarCompiler, to_llguidance
from workers.settings import DEMO_MODEL

pytestmark = pytest.mark.usefixtures("one_thread")

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b", "é"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}


@dataclass(frozen=True)
class Rig:
    loaded: LoadedModel
    blanks: dict[int, float]
    """A bias against tokens of white space."""

    def core(self, **changes: Any) -> EngineCore:
        engine = EngineConfig(num_blocks=256, **changes)
        return build_core(self.loaded, engine)

    def grammar(self, form: StructuredOutputs) -> Grammar:
        async def compile_it() -> Grammar:
            grammars = new_grammar_compiler(self.loaded, 64)
            assert grammars is not None
            while True:
                with contextlib.suppress(GrammarNotTried):  # The machine is busy.
                    return await grammars.compile(form, "", no_progress)

        return asyncio.run(compile_it())

    def request(
        self, form: StructuredOutputs | None, name: str = "r", **params: Any
    ) -> EngineRequest:
        values = {"max_tokens": 200, "logit_bias": self.blanks if form else {}, **params}
        sampling = SamplingParams(**values, structured_outputs=form)
        prompt = self.loaded.tokenizer.encode("Tell me about Ada, please.")
        mask = None if form is None else self.grammar(form).new_mask
        return EngineRequest(name, prompt, [], sampling, new_token_mask=mask)


async def no_progress() -> None:
    pass


def make_rig(folder: Path) -> Rig:
    loaded = load(ModelConfig(str(folder), max_model_len=512), EngineConfig(num_blocks=256))
    ids = range(min(loaded.vocab_size, len(loaded.tokenizer)))
    blanks = {i: -100.0 for i in ids if not loaded.decode([i], skip_special_tokens=False).strip()}
    return Rig(loaded, blanks)


def write_random_model(folder: Path, vocab_size: int) -> Path:
    """Its outputs are unrelated to each other and to the tokens of the demo's tokenizer."""
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=512,
        eos_token_id=None,
    )
    model = LlamaForCausalLM(config)
    widen(model)
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(DEMO_MODEL / name, folder)
    return folder


@pytest.fixture(scope="module")
def demo() -> Rig:
    return make_rig(DEMO_MODEL)


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Rig:
    """It has more logits than there are tokens."""
    return make_rig(write_random_model(tmp_path_factory.mktemp("random"), 800))


Ended = tuple[list[ChoiceDelta], type[PagemillError] | None]


def run(core: EngineCore, *requests: EngineRequest) -> dict[str, Ended]:
    """Return the whole choice and the error of each request."""
    outputs: dict[str, list[RequestOutput]] = {}
    for request in requests:
        core.add(request)
    while core.has_work:
        for output in core.step():
            outputs.setdefault(output.request_id, []).append(output)
    return {
        name: (
            merge_deltas(of_request),
            None if (error := of_request[-1].error) is None else type(error),
        )
        for name, of_request in outputs.items()
    }


def say(rig: Rig, form: StructuredOutputs, **params: Any) -> list[ChoiceDelta]:
    request = rig.request(form, **params)
    choices, error = run(rig.core(), request)["r"]
    assert error is None
    return choices


# -- outputs ------------------------------------------------------------------------------------


@pytest.mark.parametrize("indented", ['{"a":1,"b":[]}', '{ "a": 1, "b": [] }', '{\n  "a": 1,\n'])
def test_json_allows_the_usual_white_space(demo: Rig, indented: str) -> None:
    mask = demo.grammar(StructuredOutputs(json_object=True)).new_mask()
    for token_id in demo.loaded.tokenizer.encode(indented):
        assert mask.allowed()[token_id // 32] >> (token_id % 32) & 1
        mask.advance(token_id)


def test_json_output_ends_although_the_model_prefers_blanks(demo: Rig) -> None:
    likes = dict.fromkeys(demo.blanks, 100.0)
    schema = {"type": "object", "properties": {"round": {"type": "boolean"}}}
    strict = schema | {"required": ["round"], "additionalProperties": False}
    (choice,) = say(demo, StructuredOutputs(json_schema=strict), logit_bias=likes)
    assert choice.finish_reason == "stop"
    assert json.loads(choice.text)["round"] in (True, False)


NAMES = st.text('abé"\\ ', max_size=4)
INTEGERS = st.tuples(st.integers(-500, 500), st.integers(0, 500)).map(
    lambda pair: {"type": "integer", "minimum": pair[0], "maximum": pair[0] + pair[1]}
)
# Others are no numbers of JavaScript's, nor of llguidance's.
EXACT = st.integers(-(2**53) + 1, 2**53 - 1)
LEAVES = st.one_of(
    st.just({"type": "null"}),
    st.just({"type": "boolean"}),
    INTEGERS,
    st.integers(0, 6).map(lambda n: {"type": "string", "maxLength": n}),
    st.just({"type": "string", "pattern": "^[a-cé]{1,3}$"}),
    st.lists(NAMES | EXACT | st.none(), min_size=1, max_size=3).map(lambda v: {"enum": v}),
    NAMES.map(lambda value: {"const": value}),
)


def objects(parts: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    @st.composite
    def draw_one(draw: st.DrawFn) -> dict[str, Any]:
        properties = draw(st.dictionaries(NAMES, parts, max_size=3))
        required = [name for name in properties if draw(st.booleans())]
        return {
            "type": "object",
            "properties": properties,
            "required": required,
            "additionalProperties": False,
        }

    return draw_one()


SCHEMAS = st.recursive(
    LEAVES,
    lambda parts: st.one_of(
        objects(parts),
        st.tuples(parts, st.integers(0, 2)).map(
            lambda pair: {"type": "array", "items": pair[0], "minItems": pair[1], "maxItems": 3}
        ),
        st.lists(parts, min_size=1, max_size=2).map(lambda choices: {"anyOf": choices}),
    ),
    max_leaves=5,
)


@settings(max_examples=10)
@given(SCHEMAS, st.integers(0, 2**31))
def test_outputs_follow_any_schema(rig: Rig, schema: dict[str, Any], seed: int) -> None:
    """A model with random weights would not follow it by itself."""
    for params in ({"temperature": 0.0}, {"temperature": 1.0, "seed": seed}):
        (delta,) = say(rig, StructuredOutputs(json_schema=schema), max_tokens=450, **params)
        assert delta.finish_reason == "stop"
        jsonschema_rs.validate(schema, json.loads(delta.text))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_demo_model_follows_a_schema(demo: Rig, temperature: float) -> None:
    (delta,) = say(demo, StructuredOutputs(json_schema=PERSON), temperature=temperature)
    assert delta.finish_reason == "stop"
    jsonschema_rs.validate(PERSON, json.loads(delta.text))


LIST = 'start: "[" item ("," item){0,3} "]"\nitem: NUMBER | start\nNUMBER: /[0-9]{1,3}/'


@pytest.mark.parametrize("seed", range(4))
def test_the_other_forms(rig: Rig, seed: int) -> None:
    params = {"temperature": 1.0, "seed": seed}
    (delta,) = say(rig, StructuredOutputs(regex="([0-9]{3}-){2}[x-z]+é?!"), **params)
    assert re.fullmatch("([0-9]{3}-){2}[x-z]+é?!", delta.text)
    (delta,) = say(rig, StructuredOutputs(grammar=LIST), **params)
    assert isinstance(json.loads(re.sub(r"\b0+(?=\d)", "", delta.text)), list)
    (delta,) = say(rig, StructuredOutputs(json_object=True), max_tokens=450, **params)
    # Its strings may be of any length.
    assert delta.text.lstrip().startswith("{")
    if delta.finish_reason == "stop":
        assert isinstance(json.loads(delta.text), dict)


@settings(max_examples=8)
@given(
    st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=8), min_size=1, max_size=4)
)
@example(["\x7f", "\u2028\\", '"'])
def test_the_output_is_one_of_the_choices(rig: Rig, choices: list[str]) -> None:
    (delta,) = say(rig, StructuredOutputs(choice=choices), temperature=1.0)
    assert delta.finish_reason == "stop"
    assert delta.text in choices


def test_fewer_logits_than_tokens(tmp_path: Path) -> None:
    rig = make_rig(write_random_model(tmp_path, 760))
    assert rig.loaded.vocab_size < len(rig.loaded.tokenizer)
    (delta,) = say(rig, StructuredOutputs(json_schema=PERSON))
    jsonschema_rs.validate(PERSON, json.loads(delta.text))


def test_a_model_without_end_tokens_supports_no_grammars(rig: Rig) -> None:
    assert new_grammar_compiler(replace(rig.loaded, eos_token_ids=frozenset()), 64) is None


def test_an_answer_that_is_cut_off_says_so(rig: Rig) -> None:
    (delta,) = say(rig, StructuredOutputs(json_schema=PERSON), max_tokens=5)
    assert (delta.finish_reason, len(delta.token_ids)) == ("length", 5)


def test_each_choice_has_a_separate_mask(rig: Rig) -> None:
    deltas = say(rig, StructuredOutputs(json_schema=PERSON), n=3, seed=5)
    assert len({each.text for each in deltas}) == 3
    for each in deltas:
        jsonschema_rs.validate(PERSON, json.loads(each.text))


# -- interruptions --------------------------------------------------------------------------------


@pytest.mark.parametrize("params", [{"temperature": 0.0}, {"temperature": 1.0, "seed": 7}])
def test_a_resume_continues_at_the_logged_token(rig: Rig, params: dict[str, Any]) -> None:
    request = rig.request(StructuredOutputs(json_schema=PERSON), n=2, **params)
    whole, _ = run(rig.core(), request)["r"]
    shortest = min(len(choice.token_ids) for choice in whole)
    for cut in random.Random(1).sample(range(shortest), 6):
        # The choices are not cut at the same place.
        cuts = [cut, shortest - 1 - cut]
        logged = [
            LoggedChoice(choice.token_ids[:at], False)
            for choice, at in zip(whole, cuts, strict=True)
        ]
        rest, error = run(rig.core(), replace(request, logged=logged))["r"]
        assert error is None
        for choice, at, more in zip(whole, cuts, rest, strict=True):
            assert more.token_ids == choice.token_ids[at:]
            assert more.finish_reason == choice.finish_reason


def test_preemption_does_not_change_outputs(rig: Rig) -> None:
    form = StructuredOutputs(regex="([a-z ]{3},){20}")
    requests = [rig.request(form, f"r{i}", seed=i, max_tokens=90) for i in range(4)]
    alone = {
        request.request_id: run(rig.core(), request)[request.request_id] for request in requests
    }
    loaded = replace(rig.loaded, num_blocks=24, max_model_len=160)
    core = replace(rig, loaded=loaded).core(prefix_caching=False)
    assert run(core, *requests) == alone
    assert core.stats().num_preemptions > 0


def test_a_grammar_does_not_change_other_requests(rig: Rig) -> None:
    plain = rig.request(None, "plain", temperature=1.0, seed=3, max_tokens=60, ignore_eos=True)
    held = rig.request(StructuredOutputs(json_schema=PERSON), "held", seed=4)
    together = run(rig.core(), plain, held)
    assert together["plain"] == run(rig.core(), plain)["plain"]
    assert together["held"] == run(rig.core(), held)["held"]


def test_a_log_of_another_grammar_is_not_continued(rig: Rig) -> None:
    request = rig.request(StructuredOutputs(choice=["yes", "no"]))
    logged = [LoggedChoice(rig.loaded.encode_part("maybe"), False)]
    assert run(rig.core(), replace(request, logged=logged))["r"] == ([], WorkerFailure)


# -- other parameters -----------------------------------------------------------------------------


def test_stop_strings_and_bias_still_count(rig: Rig) -> None:
    (delta,) = say(rig, StructuredOutputs(regex="a{2}b{2}"), stop=["b"])
    assert (delta.text, delta.finish_reason, delta.stop_reason) == ("aa", "stop", "b")
    banned = dict.fromkeys(rig.loaded.encode_part("x"), -100.0)
    (delta,) = say(rig, StructuredOutputs(choice=["x", "y"]), logit_bias=banned)
    assert delta.text == "y"


def test_with_ignore_eos_only_ends_follow(rig: Rig) -> None:
    form = StructuredOutputs(choice=["x"])
    (delta,) = say(rig, form, ignore_eos=True, max_tokens=8)
    assert (delta.text, delta.finish_reason, len(delta.token_ids)) == ("x", "length", 8)


def test_a_request_without_allowed_tokens_fails_alone(rig: Rig) -> None:
    form = StructuredOutputs(choice=["x"])
    good = rig.request(StructuredOutputs(json_schema=PERSON), "good", seed=1)
    ended = run(
        rig.core(),
        good,
        rig.request(form, "min_tokens", min_tokens=9),
        rig.request(form, "allowed", allowed_token_ids=rig.loaded.encode_part("y")),
    )
    assert {name: error for name, (_, error) in ended.items()} == {
        "good": None,
        "min_tokens": InvalidRequest,
        "allowed": InvalidRequest,
    }
    assert ended["good"] == run(rig.core(), good)["good"]


# -- compiling ------------------------------------------------------------------------------------

NESTED = "\n".join(f'r{i}: "a" r{i + 1} | "b"' for i in range(4500))
MANY = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(1000)}}
PRODUCT = {"allOf": [{"type": "string", "pattern": f"w{i}"} for i in range(32)]}


@pytest.mark.parametrize(
    ("form", "reason"),
    [
        (
            StructuredOutputs(json_schema={"type": "no such"}),
            "no such is not a type of JSON schemas",
        ),
        (
            StructuredOutputs(json_schema={"type": "string", "pattern": "("}),
            r"unclosed group in the expression \($",
        ),
        (StructuredOutputs(json_schema={"$ref": "#/nowhere"}), r"\$ref names #/nowhere, which"),
        (StructuredOutputs(json_schema={"$ref": "http://127.0.0.1/schema"}), "is another document"),
        (StructuredOutputs(json_schema={"not": {"type": "null"}}), "the keyword not of JSON"),
        (StructuredOutputs(regex="(?=a)b"), "look-around.* is not supported in the expression"),
        (StructuredOutputs(regex="((a{100}){100}){100}"), "too complex"),
        (StructuredOutputs(grammar="start: nothing"), 'line 1, column 8: unknown name: "nothing"$'),
        (StructuredOutputs(grammar=f'start: r0\n{NESTED}\nr4500: "z"'), "too complex"),
        (StructuredOutputs(json_schema=PRODUCT), "too complex"),
        (StructuredOutputs(json_schema=MANY), "too complex"),
    ],
    ids=lambda value: None if isinstance(value, str) else msgspec.json.encode(value)[:40].decode(),
)
def test_grammars_that_do_not_compile_are_rejected(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, form: StructuredOutputs, reason: str
) -> None:
    monkeypatch.setattr(grammar_trial, "MAX_CPU_S", 2)
    with pytest.raises(InvalidGrammar, match=reason) as caught:
        rig.grammar(form)
    assert caught.value.field == "sampling_params.structured_outputs"


class Counting:
    """Replaces the trial in a separate process, and counts calls."""

    def __init__(self, outcome: str | Exception = "") -> None:
        self.tried: list[str] = []
        self.go_on = asyncio.Event()
        self.go_on.set()
        self._outcome = outcome

    async def __call__(self, definition: str, _: Callable[[], bool], __: int) -> str:
        self.tried.append(definition)
        await self.go_on.wait()
        if isinstance(self._outcome, Exception):
            raise self._outcome
        return self._outcome


def grammars_with(rig: Rig, trial: Counting, monkeypatch: pytest.MonkeyPatch) -> GrammarCompiler:
    monkeypatch.setattr(grammars_module, "check_grammar", trial)
    grammars = new_grammar_compiler(rig.loaded, 64)
    assert grammars is not None
    return grammars


async def test_equal_grammars_are_compiled_once(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammars_module, "MAX_GRAMMARS", 2)
    trial = Counting()
    grammars = grammars_with(rig, trial, monkeypatch)

    async def compile_one(text: str) -> Grammar:
        return await grammars.compile(StructuredOutputs(choice=[text]), "", no_progress)

    first, same = await asyncio.gather(compile_one("a"), compile_one("a"))
    assert first is same
    await compile_one("b")
    assert await compile_one("a") is first
    await compile_one("c")
    assert await compile_one("a") is first
    assert len(trial.tried) == 3
    await compile_one("b")
    assert len(trial.tried) == 4


async def test_invalid_grammars_are_cached_and_failures_are_not(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    outcomes: list[tuple[str | Exception, type[Exception], int]] = [
        ("no", InvalidGrammar, 1),
        (OSError("no process"), OSError, 2),
    ]
    for outcome, error, num_tries in outcomes:
        trial = Counting(outcome)
        grammars = grammars_with(rig, trial, monkeypatch)
        for _ in range(2):
            with pytest.raises(error):
                await grammars.compile(StructuredOutputs(json_object=True), "", no_progress)
        assert len(trial.tried) == num_tries


class Left(Exception):
    """The waiting request has ended."""


async def leave() -> None:
    raise Left


def held_up(rig: Rig, trial: Counting, monkeypatch: pytest.MonkeyPatch) -> GrammarCompiler:
    """The trial lasts until released, while `progress` is called often."""
    trial.go_on.clear()
    monkeypatch.setattr(grammars_module, "PROGRESS_S", 0.01)
    return grammars_with(rig, trial, monkeypatch)


async def test_a_waiter_can_leave_without_affecting_others(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    trial = Counting()
    grammars = held_up(rig, trial, monkeypatch)
    form = StructuredOutputs(json_object=True)
    other = asyncio.create_task(grammars.compile(form, "", no_progress))
    with pytest.raises(Left):
        await grammars.compile(form, "", leave)
    trial.go_on.set()
    assert isinstance(await other, Grammar)
    assert len(trial.tried) == 1


async def test_a_compilation_without_waiters_frees_its_slot(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    trial = Counting()
    grammars = held_up(rig, trial, monkeypatch)
    for i in range(3 * grammars_module.MAX_COMPILING):
        with pytest.raises(Left):
            await grammars.compile(StructuredOutputs(choice=[f"left {i}"]), "", leave)
    form = StructuredOutputs(json_object=True)
    other = asyncio.create_task(grammars.compile(form, "", no_progress))
    await asyncio.sleep(0.05)
    assert trial.tried[-1] == to_llguidance(form)
    trial.go_on.set()
    assert isinstance(await other, Grammar)
    again = StructuredOutputs(choice=["left 0"])
    assert isinstance(await grammars.compile(again, "", no_progress), Grammar)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"regex": "a", "json_object": True},
        {"regex": ""},
        {"regex": "a" * 8193},
        {"choice": []},
        {"grammar": "x" * MAX_GRAMMAR_BYTES},
        {"json_schema": {"description": "x" * MAX_GRAMMAR_BYTES}},
        {"json_schema": True},
    ],
)
def test_one_form_of_bounded_size(fields: dict[str, Any]) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(fields, StructuredOutputs)
