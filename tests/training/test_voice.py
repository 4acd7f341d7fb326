"""The demo's voice: its files load, speak as recorded, and are understood."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.numpy import load_file
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen2ForCausalLM

from ops.training.folders import SEEING, VOICE
from ops.training.judge.listening import Listener, warped_distances
from ops.training.voice import talker
from ops.training.voice.codec import NUM_CODES, SAMPLE_RATE
from ops.training.voice.features import NUM_BANDS
from ops.training.voice.judging import CODES_FILE, TEMPLATES_FILE, sound_of
from ops.training.voice.texts import answers
from shared.protocol.chunks import ChunkSpec
from workers.engine.model import check_folders
from workers.generator.core.vocoder import Vocoder
from workers.generator.loader import load_vocoder

RECORDED = Path(__file__).parents[1] / "recorded"
MIB = 1 << 20


@pytest.fixture(scope="module")
def codes() -> dict[str, list[int]]:
    spoken: dict[str, list[int]] = json.loads((RECORDED / CODES_FILE).read_text())
    return spoken


@pytest.fixture(scope="module")
def listener() -> Listener:
    templates = load_file(RECORDED / TEMPLATES_FILE)
    return Listener({text: rows.astype(np.float32) for text, rows in templates.items()})


@pytest.fixture(scope="module")
def vocoder() -> Vocoder:
    return load_vocoder(VOICE, ChunkSpec(), "the voice")


def test_the_voice_is_small() -> None:
    files = [file for file in VOICE.rglob("*") if "__pycache__" not in file.parts]
    assert sum(file.stat().st_size for file in files if file.is_file()) < 8 * MIB


def test_the_talker_says_the_recorded_codes(codes: dict[str, list[int]]) -> None:
    model = AutoModelForCausalLM.from_pretrained(
        VOICE / "talker", dtype=torch.float32, local_files_only=True
    )
    assert isinstance(model, Qwen2ForCausalLM)
    assert model.num_parameters() < 2_000_000
    tokenizer = PreTrainedTokenizerFast.from_pretrained(VOICE / "talker", local_files_only=True)
    prompts = [talker.prompt_of(tokenizer, text) for text in codes]
    assert talker.speak(model.eval(), prompts) == list(codes.values())


def test_the_engine_serves_the_talker() -> None:
    report = check_folders.examine(VOICE / "talker")
    assert (report.family, report.reason) == ("Qwen", None)


def test_the_tokenizer_is_the_demo_models_followed_by_the_codes() -> None:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(VOICE / "talker", local_files_only=True)
    demo = PreTrainedTokenizerFast.from_pretrained(SEEING, local_files_only=True)
    text = "4 yellow crosses on black"
    assert tokenizer.encode(text) == demo.encode(text)
    assert tokenizer.convert_tokens_to_ids("<|code_0|>") == talker.CODE_OFFSET
    assert tokenizer.convert_tokens_to_ids("<|code_1023|>") == talker.CODE_OFFSET + 1023
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": text}], return_dict=False)
    assert prompt == talker.prompt_of(tokenizer, text)


def test_the_table_says_how_each_code_sounds() -> None:
    with safe_open(VOICE / "code2wav.safetensors", "numpy") as file:
        assert file.metadata()["sample_rate"] == str(SAMPLE_RATE)
        assert file.metadata()["frame_rate"] == "50"
        table = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    assert table["envelope"].shape == (NUM_CODES, NUM_BANDS)
    assert {table[name].dtype for name in ("envelope", "pitch", "voicing")} == {np.dtype("float16")}
    is_voiced = table["pitch"] > 0
    assert 50 < table["pitch"][is_voiced].min() < table["pitch"].max() < 400
    assert ((table["voicing"] > 0) == is_voiced).all()
    assert table["voicing"].max() <= 1
    assert (np.diff(table["band_hz"]) > 0).all()


def test_the_speech_of_the_talker_is_understood(
    codes: dict[str, list[int]], vocoder: Vocoder, listener: Listener
) -> None:
    short = [text for text in codes if text in listener.templates]
    assert len(short) >= 5
    for text in short:
        wave = sound_of(vocoder, codes[text])
        assert len(wave) == 480 * len(codes[text])
        assert listener.hear(wave, SAMPLE_RATE) == text


def test_the_judge_does_not_take_noise_or_another_word_for_it(
    codes: dict[str, list[int]], vocoder: Vocoder, listener: Listener
) -> None:
    backwards = sound_of(vocoder, codes["circle"][::-1])
    assert listener.hear(backwards, SAMPLE_RATE) != "circle"
    assert listener.hear(sound_of(vocoder, codes["red"] * 8), SAMPLE_RATE) is None


def plain_warp(rows: NDArray[np.float32], template: NDArray[np.float32]) -> float:
    cost = np.full((len(rows) + 1, len(template) + 1), np.inf)
    cost[0, 0] = 0
    for i, row in enumerate(rows):
        for j, other in enumerate(template):
            least = min(cost[i, j], cost[i, j + 1], cost[i + 1, j])
            cost[i + 1, j + 1] = least + float(np.linalg.norm(row - other))
    return float(cost[-1, -1]) / (len(rows) + len(template))


def test_warps_onto_all_templates_cost_what_they_cost_alone() -> None:
    random = np.random.default_rng(0)
    rows = random.standard_normal((9, 3)).astype(np.float32)
    templates = [random.standard_normal((n, 3)).astype(np.float32) for n in (1, 4, 9, 14)]
    together = warped_distances(rows, templates)
    assert together == pytest.approx([plain_warp(rows, t) for t in templates], rel=1e-4)


def test_the_judge_finds_the_nearest_of_many() -> None:
    random = np.random.default_rng(0)
    templates = {
        str(n): random.standard_normal((60, 12)).cumsum(0).astype(np.float32) for n in range(90)
    }
    slower = np.repeat(templates["70"], random.integers(1, 3, 60), axis=0)
    assert Listener(templates).recognise(slower) == "70"


def test_the_voice_speaks_all_that_the_demo_model_answers() -> None:
    spoken = answers()
    kinds = [answer.kind for answer in spoken]
    assert (kinds.count("short"), kinds.count("sentence")) == (59, 6)
    assert kinds.count("description") == 11 + 36 * 11 + 11 * 10 * 6 * 5
    assert len({answer.text for answer in spoken}) == len(spoken)
    held_out = [answer for answer in spoken if answer.is_held_out]
    assert {answer.kind for answer in held_out} == {"description"}
    assert 0.08 < len(held_out) / len(spoken) < 0.12
