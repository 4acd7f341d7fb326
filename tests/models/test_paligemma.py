"""PaliGemma and PaliGemma 2, token for token in float64, from a model folder.

The processor writes the prompt, and all tokens of the prompt attend to each other. The reference is
transformers' processor and `generate`.
"""

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from PIL import Image
from transformers import AutoConfig
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

from ops.rendering import render
from shared.config.schema import EngineConfig, ModelConfig
from shared.errors import ConfigError, InvalidRequest, UnsupportedContent
from shared.models.generic_image import open_processor
from shared.models.generic_tower import PrefixLanguage
from shared.models.media import DecodedImage
from shared.protocol.requests import ImagePart, ImageURL, Message, TextPart
from tests.engine.model.test_parity import Twins, draw_image, from_afar, run_core
from tests.models.rig import answer_greedily, make_case
from tests.models.vision_specs import (
    IDS,
    SIDE,
    SQUARE,
    Spec,
    draw_model,
    make_config,
    make_tokenizer,
)
from workers.engine.loader import load
from workers.engine.main import build_core
from workers.engine.model.flat_model import FlatModel
from workers.engine.model.self_check import check_against_whole
from workers.renderer.processing.processor import Processor

pytestmark = pytest.mark.usefixtures("one_thread")

MAX_TOKENS = 12
NUM_ROWS = (SIDE // 14) ** 2
PLAIN = Spec(("siglip", "Siglip", {}), {}, {})
TEXTS: dict[str, dict[str, Any]] = {
    "gemma": {"model_type": "gemma"},
    # Every second layer has a window, which is smaller than the prompt.
    "gemma2": {"model_type": "gemma2", "sliding_window": 7, "query_pre_attn_scalar": 16},
}
QUESTIONS: dict[str, tuple[str, list[Image.Image]]] = {
    "one": ("answer en What is in the middle of it?", [draw_image(1, 90, 60)]),
    "none": ("", [draw_image(4, 56, 56)]),
    "two": ("Both?", [draw_image(2, 70, 120), draw_image(3, 56, 64)]),
}


class Model(NamedTuple):
    folder: Path
    processor: Processor
    twins: Twins


def write_folder(folder: Path, text: dict[str, Any]) -> Any:
    """Write a folder without a chat template, as the hub's, and return the model in float64."""
    tokenizer = make_tokenizer(PLAIN)
    tokenizer.chat_template = None
    # As in the hub's files.
    tokenizer.add_tokens(
        [*(f"<loc{i:04}>" for i in range(1024)), *(f"<seg{i:03}>" for i in range(128))]
    )
    tokenizer.save_pretrained(folder)
    SiglipImageProcessorPil(size=SQUARE, image_seq_length=NUM_ROWS).save_pretrained(folder)
    base = make_config("paligemma").to_dict()
    base["text_config"] |= text | {"vocab_size": len(tokenizer), "bos_token_id": IDS["<s>"]}
    base["text_config"].pop("use_bidirectional_attention", None)
    if text["model_type"] == "gemma2":
        base["text_config"]["layer_types"] = ["sliding_attention", "full_attention"] * 2
    base["vision_config"] |= {"projection_dim": base["text_config"]["hidden_size"]}
    base |= {
        "image_token_index": IDS["<image>"],
        "projection_dim": base["text_config"]["hidden_size"],
    }
    base.pop("image_token_id", None)
    (folder / "config.json").write_text(json.dumps(base))
    model = draw_model(AutoConfig.from_pretrained(folder))
    model.save_pretrained(folder)
    return model


@pytest.fixture(scope="module", params=TEXTS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder = tmp_path_factory.mktemp(request.param)
    reference = write_folder(folder, TEXTS[request.param])
    config = ModelConfig(str(folder), dtype="float64")
    loaded = load(config, EngineConfig(num_blocks=512, kernels="torch"))
    assert isinstance(loaded.model, FlatModel)
    assert isinstance(loaded.model.family, PrefixLanguage)
    return Model(folder, Processor(config), Twins(reference, loaded.model, loaded.tower))


def messages(text: str, num_images: int) -> list[Message]:
    images = [ImagePart(ImageURL("")) for _ in range(num_images)]
    return [Message("user", [*images, TextPart(text)])]


def case_of(model: Model, name: str) -> Any:
    text, images = QUESTIONS[name]
    decoded = [DecodedImage(image, f"{name} {i}") for i, image in enumerate(images)]
    rendered = render(model.processor, messages(text, len(images)), decoded)
    return make_case(name, rendered, images, max_tokens=MAX_TOKENS)


def generate(model: Model, name: str) -> tuple[list[int], list[int]]:
    """Return the prompt and the answer of transformers."""
    text, images = QUESTIONS[name]
    processor, _ = open_processor(model.folder, "paligemma")
    arrays = processor(text=["<image>" * len(images) + text], images=[images], return_tensors="np")
    inputs = {key: torch.as_tensor(value) for key, value in arrays.items() if key != "labels"}
    inputs["pixel_values"] = inputs["pixel_values"].double()
    return answer_greedily(model.twins.reference, inputs, MAX_TOKENS)


def test_any_schedule_yields_the_tokens_of_generate(model: Model) -> None:
    cases = [case_of(model, name) for name in QUESTIONS]
    expected = {name: generate(model, name) for name in QUESTIONS}
    prompts = {case.request.request_id: case.request.prompt_token_ids for case in cases}
    assert prompts == {name: prompt for name, (prompt, _) in expected.items()}
    twins = model.twins
    assert twins.tower is not None
    remote = [from_afar(case, twins.tower) for case in cases]
    for tower, own, budget in ((twins.tower, cases, 7), (None, remote, 512)):
        answers, runner = run_core(
            Twins(twins.reference, twins.served, tower),
            own,
            num_blocks=512,
            budget=budget,
            steps_between=3,
            max_model_len=1024,
        )
        assert answers == {name: answer for name, (_, answer) in expected.items()}
        assert max(runner.batch_sizes) > 1
    assert all(len(set(answer)) > 5 for _, answer in expected.values()), "or it would prove little"


def test_prompts_share_no_prefix(model: Model) -> None:
    """The keys of an image depend on the question after it."""
    config = ModelConfig(str(model.folder), dtype="float64")
    loaded = load(config, EngineConfig(num_blocks=512, kernels="torch"))
    core = build_core(loaded, EngineConfig())
    text, images = QUESTIONS["one"]
    decoded = [DecodedImage(images[0], "one 0")]
    answers: dict[str, list[int]] = {}
    for name, question in (("first", "answer en Where?"), ("one", text)):
        rendered = render(model.processor, messages(question, 1), decoded)
        request = make_case(name, rendered, images, max_tokens=MAX_TOKENS).request
        core.add(request)
        answers[name] = []
        while core.has_work:
            for output in core.step():
                assert output.error is None
                answers[name] += [t for delta in output.choices for t in delta.token_ids]
    assert answers["one"] == generate(model, "one")[1]
    assert core.stats().prefix_hit_tokens == 0


def test_the_check_notices_causal_prompts(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    served = model.twins.served
    assert isinstance(served, FlatModel)
    check_against_whole(served, 8)
    monkeypatch.setattr(PrefixLanguage, "spans_of", lambda self, prompt: [])
    with pytest.raises(ConfigError, match="differ from transformers'"):
        check_against_whole(served, 8)


def test_prompts_of_other_forms_are_refused(model: Model) -> None:
    text = [Message("user", [TextPart("Hello")])]
    rendered = render(model.processor, text, [])
    request = make_case("text", rendered, [], max_tokens=2).request
    with pytest.raises(UnsupportedContent, match="an image in each prompt"):
        model.twins.served.family.check(request)
    with pytest.raises(InvalidRequest, match="one message of a user"):
        render(model.processor, [*messages("A", 0), Message("assistant", "B")], [])
