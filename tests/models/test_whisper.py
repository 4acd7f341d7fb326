"""Whisper on the engine, token for token in float64, from a model folder.

The reference is the `generate` of transformers, with one call for each sound.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from shared.config.schema import EngineConfig, ModelConfig
from shared.errors import ConfigError, InvalidRequest, PagemillError, UnsupportedContent
from shared.models.registry import find_family
from shared.protocol.multimodal import content_hash
from shared.protocol.requests import AudioPart, AudioURL, Message, Prompt, TextPart
from shared.protocol.sampling import SamplingParams
from tests.engine.model.test_parity import Case, from_afar
from tests.models.rig import make_case
from tests.sounds import Samples, decoded, draw_sound, extract, transformers
from tests.whisper import IDS, START, SUPPRESSED, write_whisper
from workers.engine.core.sequence import EngineRequest, LoggedChoice
from workers.engine.loader import LoadedModel, _resolve_num_item_slots, load
from workers.engine.main import build_core
from workers.engine.model.check_folders import examine
from workers.engine.model.item_attention import ItemAttention
from workers.renderer.processing.processor import Processor, join

pytestmark = pytest.mark.usefixtures("one_thread")

MAX_TOKENS = 20
SPEECH = Message("user", [AudioPart(AudioURL(""))])


@dataclass(frozen=True)
class Question:
    sound: Samples
    kwargs: dict[str, str]


QUESTIONS = {
    "detected": Question(draw_sound(1, 20_011), {}),
    "named": Question(draw_sound(2, 9_000), {"language": "fr"}),
    "translated": Question(draw_sound(3, 32_000), {"language": "de", "task": "translate"}),
    "spelled": Question(draw_sound(4, 1_000), {"language": "en", "prompt": " Jörg,  Ann "}),
    "short": Question(draw_sound(5, 400), {"prompt": "Yes."}),
}


@dataclass(frozen=True)
class Model:
    folder: Path
    reference: Any
    loaded: LoadedModel
    processor: Processor
    cases: dict[str, Case]
    expected: dict[str, list[int]]
    """Prompts and answers of transformers."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder = tmp_path_factory.mktemp("whisper")
    reference = write_whisper(folder)
    config = ModelConfig(str(folder), dtype="float64")
    # Room for three sequences: the others wait, or are preempted.
    loaded = load(config, EngineConfig(num_blocks=27, block_size=4))
    processor = Processor(config)
    cases = {name: make_request(processor, name, each) for name, each in QUESTIONS.items()}
    expected = {name: generate(folder, reference, each) for name, each in QUESTIONS.items()}
    return Model(folder, reference, loaded, processor, cases, expected)


def make_request(processor: Processor, name: str, question: Question) -> Case:
    """Return the engine's request."""
    return request_of(processor, name, question.sound, {"task": "transcribe"} | question.kwargs)


def request_of(processor: Processor, name: str, sound: Samples, kwargs: dict[str, str]) -> Case:
    token_ids = processor.tokenize(Prompt([SPEECH], template_kwargs=dict(kwargs)))
    # The answer has the tokens of the language and the task if the prompt does not have them.
    num_more = 3 if token_ids[-1] == START else 0
    media = replace(decoded(sound), source_hash=content_hash(sound.tobytes()))
    processed = processor.process(media, "url", "")
    rendered = join(*processor.expand(token_ids, [processed]), [processed])
    case = make_case(name, rendered, [], MAX_TOKENS + num_more)
    request = replace(
        case.request,
        sampling=SamplingParams(temperature=0, max_tokens=MAX_TOKENS + num_more),
        items=[replace(item, attended=True) for item in case.request.items],
    )
    return Case(request, [])


def generate(folder: Path, reference: Any, question: Question) -> list[int]:
    extractor = transformers.WhisperFeatureExtractor.from_pretrained(folder)
    features, _ = extract(extractor, question.sound)
    options: dict[str, Any] = {"task": "transcribe"} | question.kwargs
    if (prompt := options.pop("prompt", None)) is not None:
        tokenizer = transformers.WhisperTokenizer.from_pretrained(folder)
        options["prompt_ids"] = tokenizer.get_prompt_ids(prompt, return_tensors="pt")
    # The processors of a call change the generation config.
    config = copy.deepcopy(reference.generation_config)
    answer: list[int] = reference.generate(
        input_features=torch.from_numpy(features)[None].to(reference.dtype),
        generation_config=config,
        do_sample=False,
        max_new_tokens=MAX_TOKENS,
        # Without it, transformers would take random tokens of times for the ends of segments.
        force_unique_generate_call=True,
        **options,
    )[0].tolist()
    return answer


def answers_of(
    loaded: LoadedModel, requests: Sequence[EngineRequest], **engine: Any
) -> tuple[dict[str, list[int]], int]:
    """Return prompts and answers, and the number of preemptions. Requests join every two steps."""
    core = build_core(loaded, EngineConfig(embedding_cache_mib=1, **engine))
    waiting = list(requests)
    answers = {request.request_id: list(request.prompt_token_ids) for request in requests}
    step = 0
    while waiting or core.has_work:
        while waiting and step >= 2 * (len(requests) - len(waiting)):
            core.add(waiting.pop(0))
        for output in core.step():
            assert output.error is None
            for delta in output.choices:
                answers[output.request_id] += delta.token_ids
        step += 1
    stats = core.stats()
    assert stats.num_free_blocks == loaded.num_blocks
    return answers, stats.num_preemptions


@pytest.mark.parametrize(("budget", "max_num_seqs"), [(512, 8), (3, 8), (5, 2)])
def test_any_schedule_yields_the_tokens_of_generate(
    model: Model, budget: int, max_num_seqs: int
) -> None:
    assert all(len(set(answer)) > 8 for answer in model.expected.values()), "or it proves little"
    limits = {"max_num_batched_tokens": budget, "max_num_seqs": max_num_seqs}
    requests = [case.request for case in model.cases.values()]
    answers, num_preemptions = answers_of(model.loaded, requests, **limits)
    assert answers == model.expected
    assert num_preemptions > 0 or budget < 512


def test_encoders_may_compute_the_sounds(model: Model) -> None:
    assert model.loaded.tower is not None
    remote = [from_afar(case, model.loaded.tower).request for case in model.cases.values()]
    without = replace(model.loaded, tower=None)
    assert answers_of(without, remote)[0] == model.expected


def test_a_resumed_answer_has_the_same_tokens(model: Model) -> None:
    resumed = []
    for num_logged, (name, case) in enumerate(model.cases.items(), 1):
        prompt = case.request.prompt_token_ids
        logged = model.expected[name][len(prompt) : len(prompt) + num_logged]
        # The answer of the core has only the tokens after the logged ones.
        resumed.append(replace(case.request, logged=[LoggedChoice(logged, finished=False)]))
    answers, _ = answers_of(model.loaded, resumed)
    for num_logged, (name, case) in enumerate(model.cases.items(), 1):
        num_prompt = len(case.request.prompt_token_ids)
        assert answers[name][num_prompt:] == model.expected[name][num_prompt + num_logged :]


def test_other_sounds_with_the_same_tokens_do_not_share_cached_prefixes(model: Model) -> None:
    """The prompt comes before the sound's token, but its keys and values depend on the sound."""
    kwargs = {"language": "en", "prompt": "Ann, Bob, Cleo and Dora"}
    questions = [Question(draw_sound(seed, 9_000), kwargs) for seed in (1, 2)]
    cases = [make_request(model.processor, str(i), each) for i, each in enumerate(questions)]
    again = replace(cases[0].request, request_id="again")
    core = build_core(model.loaded, EngineConfig())
    answers: list[list[int]] = []
    for request in (cases[0].request, cases[1].request, again):
        core.add(request)
        answers.append(list(request.prompt_token_ids))
        while core.has_work:
            for output in core.step():
                answers[-1] += [t for delta in output.choices for t in delta.token_ids]
    first, second = (generate(model.folder, model.reference, each) for each in questions)
    assert answers == [first, second, first]
    assert first != second
    # The same sound again is found, and its keys and values are there for the answer.
    assert 0 < core.stats().prefix_hit_tokens < len(again.prompt_token_ids)


def test_a_slot_that_another_request_took_is_filled_again(model: Model) -> None:
    family, tower = model.loaded.model.family, model.loaded.tower
    assert tower is not None
    attention = ItemAttention(family, 1)
    for name in ("named", "short"):
        (embedding,) = tower.encode([model.cases[name].request.items[0].fields])
        attention.add(name, embedding)
    query = torch.randn(2, 4, 16, dtype=torch.float64)
    first, second, again = (
        attention.plan([name], [0, 2])(1, query, 1.0) for name in ("named", "short", "named")
    )
    assert torch.equal(first, again)
    assert not torch.allclose(first, second)


def test_decodes_read_their_own_slots(model: Model) -> None:
    family, tower = model.loaded.model.family, model.loaded.tower
    assert tower is not None
    attention = ItemAttention(family, 4)
    names = list(model.cases)[:4]
    items = [model.cases[name].request.items[0].fields for name in names]
    for name, embedding in zip(names, tower.encode(items), strict=True):
        attention.add(name, embedding)
    attention.plan(names, [0, 1, 2, 3, 4])
    query = torch.randn(5, 4, 16, dtype=torch.float64)
    # Slots in another order, twice the same one, and with another between them.
    for order in ([3, 1, 0, 2], [0, 1, 2, 3], [1, 1, 2], [3, 0, 1], [2]):
        rows = query[: len(order)]
        requests = [names[index] for index in order]
        joined = attention.plan(requests, range(len(order) + 1))(1, rows, 1.0)
        alone = [
            attention.plan([name], [0, 1])(1, row[None], 1.0)
            for name, row in zip(requests, rows, strict=True)
        ]
        torch.testing.assert_close(joined, torch.cat(alone))
    assert not torch.allclose(alone[0], attention.plan([names[0]], [0, 1])(1, rows, 1.0))


def test_requests_may_begin_in_one_step(model: Model) -> None:
    core = build_core(model.loaded, EngineConfig(embedding_cache_mib=1, max_num_seqs=3))
    answers = {name: list(case.request.prompt_token_ids) for name, case in model.cases.items()}
    for case in model.cases.values():
        core.add(case.request)
    while core.has_work:
        for output in core.step():
            answers[output.request_id] += [t for d in output.choices for t in d.token_ids]
    assert answers == model.expected


def test_items_have_half_of_the_cache(model: Model) -> None:
    config = ModelConfig(str(model.folder), dtype="float64")
    loaded = load(config, EngineConfig(kv_cache_mib=1, block_size=4))
    # 100 rows of 3 layers, with keys and values of 64 numbers.
    slot_bytes, block_bytes = 100 * 2 * 3 * 64 * 8, 4 * 2 * 3 * 64 * 8
    assert (loaded.num_item_slots, loaded.num_blocks) == (1, (2**20 - slot_bytes) // block_bytes)
    requests = [case.request for case in model.cases.values()]
    assert answers_of(loaded, requests)[0] == model.expected
    longer = copy.deepcopy(model.reference.config)
    longer.max_source_positions = 1_500
    with pytest.raises(ConfigError, match="do not fit into half of it; set it to 9 or more"):
        _resolve_num_item_slots(longer, torch.float64, EngineConfig(kv_cache_mib=1))


def test_choices_share_a_sound(model: Model) -> None:
    case = model.cases["named"]
    sampling = msgspec.structs.replace(case.request.sampling, n=2)
    core = build_core(model.loaded, EngineConfig())
    core.add(replace(case.request, sampling=sampling))
    answers: dict[int, list[int]] = {0: [], 1: []}
    while core.has_work:
        for output in core.step():
            for delta in output.choices:
                answers[delta.index] += delta.token_ids
    expected = model.expected["named"][len(case.request.prompt_token_ids) :]
    assert answers == {0: expected, 1: expected}


# -- rules and prompts ----------------------------------------------------------------------------


def test_the_rules_are_felt(model: Model) -> None:
    """Without them, the same weights answer with suppressed tokens, or otherwise."""
    family = model.loaded.model.family
    request = model.cases["named"].request
    rules = family.rules_of(request)
    assert rules is not None
    assert (rules.beginning, rules.suppressed) == ((), tuple(SUPPRESSED))
    forced = family.rules_of(model.cases["detected"].request)
    assert forced is not None
    assert forced.beginning[1:] == ((IDS["<|transcribe|>"],), (IDS["<|notimestamps|>"],))
    core = build_core(model.loaded, EngineConfig())
    core._factory.new_rules = lambda request: None
    names = ("named", "detected")
    for name in names:
        core.add(model.cases[name].request)
    answers = {name: list(model.cases[name].request.prompt_token_ids) for name in names}
    while core.has_work:
        for output in core.step():
            answers[output.request_id] += [t for d in output.choices for t in d.token_ids]
    assert all(answers[name] != model.expected[name] for name in names)


def prompt_of(processor: Processor, text: str = "", **kwargs: str) -> str:
    parts: list[Any] = [AudioPart(AudioURL(""))] + ([TextPart(text)] if text else [])
    prompt = Prompt([Message("user", parts)], template_kwargs=dict(kwargs))
    return processor.tokenizer.decode(processor.tokenize(prompt))


def test_prompts_have_the_language_and_the_task(model: Model) -> None:
    start, end = "<|startoftranscript|>", "<|notimestamps|>"
    assert prompt_of(model.processor) == start
    assert prompt_of(model.processor, language="de") == f"{start}<|de|><|transcribe|>{end}"
    # A text in a chat is the text before the sound, but the instruction of a transcription is not.
    assert prompt_of(model.processor, "Ann") == f"<|startofprev|> Ann{start}"
    assert prompt_of(model.processor, "Write!", task="transcribe") == start


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"language": "xx"}, "does not know the language xx"),
        ({"task": "sing"}, "does not have the task sing"),
        ({"task": "translate"}, "the task translate needs the language of the sound"),
        ({"prompt": "<|en|>"}, "control token <|en|>"),
    ],
)
def test_prompts_that_the_model_cannot_have_are_refused(
    model: Model, kwargs: dict[str, str], message: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        prompt_of(model.processor, **kwargs)
    assert message in caught.value.message


def test_a_request_has_one_sound(model: Model) -> None:
    for messages in ([Message("user", "Hi")], [SPEECH, SPEECH]):
        with pytest.raises(InvalidRequest, match="transcribes one sound"):
            model.processor.tokenize(Prompt(messages))
    core = build_core(model.loaded, EngineConfig())
    with pytest.raises(InvalidRequest, match="one sound, and the prompt has 0"):
        core.add(replace(model.cases["named"].request, items=[]))


def test_structured_outputs_are_refused(model: Model) -> None:
    core = build_core(model.loaded, EngineConfig())
    mask: Any = object
    with pytest.raises(UnsupportedContent) as caught:
        core.add(replace(model.cases["named"].request, new_token_mask=mask))
    assert caught.value.field == "sampling_params.structured_outputs"


def test_items_of_other_servers_are_refused(model: Model) -> None:
    fields = {"input_features": None}
    layout: Any = find_family(model.reference.config)
    layout = layout.media["audio"].open_layout(model.folder, model.reference.config)
    for exchange in (lambda: layout.to_wire(fields), lambda: layout.from_wire(fields, "f")):
        with pytest.raises(UnsupportedContent, match="not exchanged"):
            exchange()


# -- folders --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "prompt"),
    [
        ({"language": "german", "task": "translate"}, "<|de|><|translate|><|notimestamps|>"),
        ({"forced_decoder_ids": [[1, IDS["<|fr|>"]], [2, IDS["<|translate|>"]]]}, "<|fr|>"),
        ({"forced_decoder_ids": [[1, None], [2, IDS["<|translate|>"]]]}, ""),
        ({"is_multilingual": False, "lang_to_id": None, "task_to_id": None}, "<|notimest"),
    ],
)
def test_a_folder_sets_the_language_and_the_task(
    tmp_path: Path, changes: dict[str, Any], prompt: str
) -> None:
    reference = write_whisper(tmp_path, **changes)
    config = ModelConfig(str(tmp_path), dtype="float64")
    processor = Processor(config)
    text = prompt_of(processor)
    assert text.removeprefix("<|startoftranscript|>").startswith(prompt)
    loaded = load(config, EngineConfig(num_blocks=27))
    sound = draw_sound(7, 5_000)
    request = request_of(processor, "x", sound, {}).request
    extractor = transformers.WhisperFeatureExtractor.from_pretrained(tmp_path)
    features, _ = extract(extractor, sound)
    expected = reference.generate(
        input_features=torch.from_numpy(features)[None].double(),
        do_sample=False,
        max_new_tokens=MAX_TOKENS,
        force_unique_generate_call=True,
    )
    answers, _ = answers_of(loaded, [request])
    assert answers == {"x": expected[0].tolist()}


def test_a_folder_may_have_a_tied_head(tmp_path: Path) -> None:
    reference = write_whisper(tmp_path, tied=True)
    config = ModelConfig(str(tmp_path), dtype="float64")
    question = QUESTIONS["named"]
    case = make_request(Processor(config), "x", question)
    answers, _ = answers_of(load(config, EngineConfig(num_blocks=27)), [case.request])
    assert answers == {"x": generate(tmp_path, reference, question)}


def test_pagemill_examines_the_folder(model: Model, tmp_path: Path) -> None:
    report = examine(model.folder)
    assert (report.reason, report.family, report.source) == (None, "Whisper", "native")
    # An item has 100 rows, and a sequence 96 tokens.
    values = 2 * 3 * 64 * 196 // 96
    assert (report.max_position_embeddings, report.kv_values_per_token) == (96, values)
    write_whisper(tmp_path, lang_to_id=None)
    reason = examine(tmp_path).reason or ""
    assert "generation_config.json has no lang_to_id" in reason
    with pytest.raises(PagemillError, match="lang_to_id"):
        load(ModelConfig(str(tmp_path), dtype="float64"), EngineConfig(num_blocks=27))


def test_adapters_are_refused(model: Model) -> None:
    config = ModelConfig(str(model.folder), dtype="float64", adapters={"a": "/nowhere"})
    with pytest.raises(ConfigError, match="cross attention, for which adapters"):
        load(config, EngineConfig(num_blocks=27))


def test_a_window_of_other_frames_is_refused(model: Model, tmp_path: Path) -> None:
    write_whisper(tmp_path)
    extractor = transformers.WhisperFeatureExtractor(feature_size=16, chunk_length=1)
    extractor.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="returns 100 frames"):
        Processor(ModelConfig(str(tmp_path)))
