"""Count the copies and the synchronisations of towers, talkers and generators, without a GPU.

    python -m ops.gpu part-trips                      # all parts
    python -m ops.gpu part-trips qwen2_vl code2wav -v

Each part runs on torch's device `meta`, as `ops.gpu.trip_counter` describes it: a tower encodes two
items, a talker predicts the further codes of three frames, a vocoder decodes four chunks, and a
painter takes a step of three images with guidance. The first call of a part fills its caches and is
not counted. The exit status is 1 if a call fails, mixes devices, or has more copies and
synchronisations than `MOST`.
"""

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from msgspec.structs import replace
from transformers import AutoConfig
from transformers.models.qwen2_5_omni import modeling_qwen2_5_omni

from ops.gpu.models import IMAGE, TEXT, VIDEO, build
from ops.gpu.round_trips import BLOCK_SIZE, MAX_MODEL_LEN, NUM_BLOCKS, run_requests
from ops.gpu.trip_counter import DEVICE, Count, Record, counting, is_within, replace_launches
from shared.models import registry
from shared.models.tower import Tower
from shared.models.tower_adapter import Fields
from shared.protocol.images import parse_size
from shared.protocol.sampling import SamplingParams
from tests import omni
from tests.generator import pipelines
from tests.generator.pipelines.spec import PipelineSpec
from tests.models import sound_specs, vision_specs
from workers.engine.core.sequence import EngineRequest, SpokenText
from workers.engine.cuda.model import GpuModel
from workers.engine.model.qwen2_5_talker import Qwen25Talker
from workers.engine.model.qwen3_talker import CODEC_TOKENS, Qwen3Talker
from workers.engine.model.talker import Talker
from workers.engine.model.thinker_states import ThinkerStates
from workers.engine.runner import ModelRunner
from workers.generator import token2wav
from workers.generator.code2wav import Qwen3OmniVocoder
from workers.generator.core.denoising import Step, negative_of, noise_shape_of
from workers.generator.core.vocoder import Chunk, Speaker
from workers.generator.image_loader import load_image_model

# transformers leaves some of its names without types.
transformers: Any = import_module("transformers")

Call = Callable[[], int]
"""Uses a part, and returns the number of its steps."""
CALL = "step"
DTYPE = torch.bfloat16

AUDIO, NUM_BINS = 495, 16
CLIP = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 56,
    "patch_size": 14,
}
EARS = {
    "d_model": 32,
    "encoder_layers": 2,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 64,
    "num_mel_bins": NUM_BINS,
    "max_source_positions": 100,
}
EYES = {
    "depth": 2,
    "hidden_size": 32,
    "num_heads": 2,
    "intermediate_size": 64,
    "patch_size": 14,
    "out_hidden_size": 64,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
NUM_CODES, NUM_CODEBOOKS = 48, 4
START, USER, ASSISTANT = 1, 2, 3
"""Tokens of a chat: the start of a turn, and two roles."""
GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
PAINTERS = ("qwen_image", "flux", "stable_diffusion_3", "z_image", "pixart_sigma", "wan")
MOST: Mapping[str, float] = {
    "qwen2_vl": 5,
    "qwen2_5_vl": 5,
    "qwen3_vl": 5,
    "llava": 5,
    "llava_next_video": 5,
    "qwen2_audio": 4,
    "whisper": 2,
    "qwen2_5_omni": 9,
    "qwen3_omni": 9,
    "internvl": 2,
    "glm4v": 14,
    "qwen3_5": 18,
    "mistral3": 4,
    "llava_onevision": 8,
    "smolvlm": 7,
    "gemma4": 6,
    "glmasr": 4,
    "musicflamingo": 9,
    "talker": 2,
    "sampled_talker": 2,
    "qwen2_5_talker": 1,
    "code2wav": 4,
    "token2wav": 4,
    "qwen_image": 8,
    "flux": 7,
    "stable_diffusion_3": 5,
    "z_image": 4,
    "pixart_sigma": 5,
    "wan": 6,
}
"""Copies and synchronisations that a step of a part may have. They may only become fewer. A tower
copies the fields of two items, and waits for the device once; transformers' modules for some
generic types read the sizes of images from the device in each layer."""


def _build_llava() -> Any:
    config = transformers.LlavaConfig(
        vision_config=CLIP | {"model_type": "clip_vision_model"},
        text_config=TEXT | {"model_type": "llama"},
        image_token_index=IMAGE,
    )
    return transformers.LlavaForConditionalGeneration(config)


def _build_llava_next_video() -> Any:
    config = transformers.LlavaNextVideoConfig(
        vision_config=CLIP | {"model_type": "clip_vision_model"},
        text_config=TEXT | {"model_type": "llama"},
        image_token_index=IMAGE,
        video_token_index=VIDEO,
    )
    return transformers.LlavaNextVideoForConditionalGeneration(config)


def _build_qwen2_audio() -> Any:
    config = transformers.Qwen2AudioConfig(
        audio_config=EARS, text_config=TEXT | {"model_type": "qwen2"}, audio_token_index=AUDIO
    )
    return transformers.Qwen2AudioForConditionalGeneration(config)


def _build_whisper() -> Any:
    sizes = {"decoder_layers": 1, "decoder_attention_heads": 2, "decoder_ffn_dim": 64}
    ids = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), 0)
    ids["decoder_start_token_id"] = 1
    config = transformers.WhisperConfig(**EARS, **sizes, **ids, vocab_size=TEXT["vocab_size"])
    return transformers.WhisperForConditionalGeneration(config)


def _build_qwen2_5_omni() -> Any:
    config = transformers.Qwen2_5OmniThinkerConfig(
        audio_config=EARS | {"output_dim": 64, "n_window": 10},
        vision_config=EYES | {"fullatt_block_indexes": [1], "window_size": 56},
        text_config=TEXT,
    )
    return transformers.Qwen2_5OmniThinkerForConditionalGeneration(config)


def _build_qwen3_omni() -> Any:
    config = transformers.Qwen3OmniMoeThinkerConfig(
        audio_config=EARS
        | {"output_dim": 64, "n_window": 50, "n_window_infer": 100, "downsample_hidden_size": 16},
        vision_config=EYES | {"num_position_embeddings": 64, "deepstack_visual_indexes": [0]},
        text_config=TEXT | EXPERTS,
    )
    return transformers.Qwen3OmniMoeThinkerForConditionalGeneration(config)


def _build_whole_omni() -> Any:
    """Return Qwen3-Omni with all of its parts."""
    codes = {name: NUM_CODES + i for i, name in enumerate(CODEC_TOKENS)}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "num_hidden_layers": 2}
    config = transformers.Qwen3OmniMoeConfig(
        thinker_config=_build_qwen3_omni().config.to_dict(),
        talker_config={
            "text_config": TEXT
            | EXPERTS
            | {"vocab_size": NUM_CODES + 1024, "shared_expert_intermediate_size": 32},
            "num_code_groups": NUM_CODEBOOKS,
            "thinker_hidden_size": TEXT["hidden_size"],
            "accept_hidden_layer": 1,
            "spatial_merge_size": 2,
            "speaker_id": {"anna": NUM_CODES + len(CODEC_TOKENS)},
            "code_predictor_config": {
                "vocab_size": NUM_CODES,
                "hidden_size": TEXT["hidden_size"],
                "intermediate_size": 64,
                "head_dim": 16,
                "num_code_groups": NUM_CODEBOOKS,
                **heads,
            },
            **codes,
        },
        code2wav_config={
            "codebook_size": NUM_CODES,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_quantizers": NUM_CODEBOOKS,
            "upsample_rates": [4, 3],
            "upsampling_ratios": [2, 2],
            "decoder_dim": 32,
            **heads,
        },
        im_start_token_id=START,
        user_token_id=USER,
        assistant_token_id=ASSISTANT,
        tts_pad_token_id=4,
        tts_bos_token_id=5,
        tts_eos_token_id=6,
    )
    return transformers.Qwen3OmniMoeForConditionalGeneration(config)


TOWERS: Mapping[str, Callable[[], Any]] = {
    "qwen2_vl": partial(build, "qwen2_vl"),
    "qwen2_5_vl": partial(build, "qwen2_5_vl"),
    "qwen3_vl": partial(build, "qwen3_vl"),
    "llava": _build_llava,
    "llava_next_video": _build_llava_next_video,
    "qwen2_audio": _build_qwen2_audio,
    "whisper": _build_whisper,
    "qwen2_5_omni": _build_qwen2_5_omni,
    "qwen3_omni": _build_qwen3_omni,
}


GENERIC: Mapping[str, Any] = {
    "internvl": vision_specs,
    "glm4v": vision_specs,
    "qwen3_5": vision_specs,
    "mistral3": vision_specs,
    "llava_onevision": vision_specs,
    "smolvlm": vision_specs,
    "gemma4": vision_specs,
    "glmasr": sound_specs,
    "musicflamingo": sound_specs,
}
"""Types of generic families, with the modules that describe small models of them."""


def _open_tower(build: Callable[[], Any]) -> Call:
    """Encode two items of each modality."""
    with DEVICE:
        model = build()
    model = model.to(DTYPE).eval()
    adapter = registry.find_tower(model.config)
    assert adapter is not None
    adapter.optimize_layers(model, "torch")
    return _encode_with(Tower(adapter, model), [*adapter.samples(), *adapter.samples()])


def _open_generic_tower(specs: Any, name: str) -> Call:
    """Encode two items of a type that is served through transformers' modules."""
    with TemporaryDirectory() as folder:
        specs.write_files(Path(folder), name)
        config = AutoConfig.from_pretrained(folder)
        with DEVICE:
            model = registry.find_model_class(config)._from_config(config)
        adapter = registry.find_tower(config)
        assert adapter is not None
        items = [*adapter.samples(), *adapter.samples()]
    return _encode_with(Tower(adapter, model.to(DTYPE).eval()), items)


def _encode_with(tower: Tower, items: list[Fields]) -> Call:
    def encode() -> int:
        tower.encode(items)
        return 1

    return encode


def _build_qwen3_talker() -> Talker:
    with DEVICE:
        whole: Any = _build_whole_omni()
    return Qwen3Talker(whole.to(DTYPE).eval(), None)


def _build_qwen2_5_talker() -> Talker:
    with TemporaryDirectory() as name:
        omni.write_qwen25(Path(name))
        config = AutoConfig.from_pretrained(name)
    classes = modeling_qwen2_5_omni
    with DEVICE:
        talker = classes.Qwen2_5OmniTalkerForConditionalGeneration(config.talker_config)
        thinker = classes.Qwen2_5OmniThinkerForConditionalGeneration(config.thinker_config)
    states = ThinkerStates(thinker.to(DTYPE).eval(), has_tower=True)
    voices = dict.fromkeys(omni.VOICES, omni.TTS_BOS)
    return Qwen25Talker(talker.to(DTYPE).eval(), states, omni.NUM_CODES, voices)


def _open_talker(build: Callable[[], Talker], sampling: SamplingParams) -> Call:
    """Speak three texts that are whole."""
    talker = build()
    served = GpuModel(talker, max_num_seqs=4, max_model_len=MAX_MODEL_LEN, adapted=True)
    runner = ModelRunner(served, NUM_BLOCKS, BLOCK_SIZE)
    prompt = [START, USER, 9, 10, START, ASSISTANT, 8]

    def speak() -> int:
        requests = []
        for number in range(3):
            speech = SpokenText(prompt, [20 + number + i for i in range(6)], None)
            tokens = talker.prompt_tokens(speech)
            requests.append(EngineRequest(f"r{number}", tokens, [], sampling, speech=speech))
        return run_requests(runner, requests)

    return speak


def _open_vocoder() -> Call:
    with DEVICE:
        model: Any = _build_whole_omni().code2wav
    vocoder = Qwen3OmniVocoder(model.to(DTYPE).eval(), DEVICE)
    codes = np.zeros((30, NUM_CODEBOOKS), dtype=np.int32)
    chunks = [Chunk(codes, position=0, left=20, right=1)] * 4

    def decode() -> int:
        vocoder.synthesize(chunks)
        return 1

    return decode


def _open_token2wav() -> Call:
    """Decode four chunks with the tiny model that the tests have."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        omni.write_qwen25(folder)
        config = AutoConfig.from_pretrained(folder)
        vocoder: Any = token2wav.load(folder, config, omni.VOICES, torch.float32, "cpu")
    vocoder._dit.to(DEVICE)
    vocoder._bigvgan.to(DEVICE)
    vocoder._voices = {
        name: type(voice)(*(part.to(DEVICE) for part in voice))
        for name, voice in vocoder._voices.items()
    }
    vocoder._device, vocoder.max_rows = DEVICE, 4
    codes = np.zeros((30, 1), dtype=np.int32)
    chunks = [Chunk(codes, 0, 20, 1, speaker=Speaker(omni.VOICES[0], n)) for n in range(4)]

    def decode() -> int:
        vocoder.synthesize(chunks)
        return 1

    return decode


def _open_painter(name: str) -> Call:
    """Take a step of three images. Their prompts have different lengths."""
    spec: PipelineSpec = import_module(f"{pipelines.__name__}.{name}").SPEC
    with TemporaryDirectory() as folder:
        spec.write(Path(folder))
        model: Any = load_image_model(Path(folder), "float32", spec.sizes, "")
    prompt, params = spec.requests[0]
    size = parse_size(params.size)
    negative = negative_of(model, params)
    noise = np.zeros(noise_shape_of(model, size, params.frames))
    steps = []
    for number in range(3):
        texts = model.encode([prompt + number * " a", *([] if negative is None else [negative])])
        steps.append(
            Step(
                model.begin(size, noise),
                texts[0],
                texts[1] if negative is not None else None,
                params.guidance,
                size,
                number,
                params.steps,
            )
        )
    for attribute in ("_transformer", "_transformers"):
        if (networks := getattr(model, attribute, None)) is not None:
            is_one = isinstance(networks, torch.nn.Module)
            moved = networks.to(DEVICE) if is_one else [each.to(DEVICE) for each in networks]
            setattr(model, attribute, moved)

    def paint() -> int:
        model.step(steps)
        return 1

    return paint


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m ops.gpu part-trips", description=__doc__)
    parser.add_argument("parts", nargs="*", help=f"by default all: {', '.join(PARTS)}")
    parser.add_argument("-v", "--verbose", action="store_true", help="print each with its line")
    arguments = parser.parse_args(argv)
    if unknown := set(arguments.parts) - set(PARTS):
        parser.error(f"unknown parts: {', '.join(sorted(unknown))}")
    right = []
    for name in arguments.parts or PARTS:
        record = Record()
        replace_launches(record)
        counts = count(PARTS[name], record)
        right.append(is_within({CALL: MOST[name]}, name, counts, record, verbose=arguments.verbose))
    return int(not all(right))


def count(open_part: Callable[[], Call], record: Record) -> Iterator[Count]:
    """Yield the counts of the second call of a part, for each of its steps."""
    with counting(record):
        call = open_part()
        call()
        record.clear()
        num_steps = call()
    yield Count(CALL, record.copies.total() / num_steps, record.syncs.total() / num_steps)


PARTS: Mapping[str, Callable[[], Call]] = {
    **{name: partial(_open_tower, build) for name, build in TOWERS.items()},
    **{name: partial(_open_generic_tower, specs, name) for name, specs in GENERIC.items()},
    "talker": partial(_open_talker, _build_qwen3_talker, GREEDY),
    "sampled_talker": partial(_open_talker, _build_qwen3_talker, replace(GREEDY, temperature=1)),
    "qwen2_5_talker": partial(_open_talker, _build_qwen2_5_talker, GREEDY),
    "code2wav": _open_vocoder,
    "token2wav": _open_token2wav,
    **{name: partial(_open_painter, name) for name in PAINTERS},
}
