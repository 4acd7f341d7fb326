"""Tiny random omni models, in folders laid out like Qwen3-Omni and Qwen2.5-Omni."""

import functools
import importlib
import json
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from transformers import GenerationConfig
from transformers.models.qwen2_5_omni import modeling_qwen2_5_omni

# mypy knows no omni classes in transformers.
transformers: Any = importlib.import_module("transformers")
DEMO_MODEL = Path(__file__).resolve().parents[1] / "ops" / "demo_model"
TOKENIZER = Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json"))
VOCAB_SIZE = 800
IM_START, IM_END, VISION_START, VISION_END, IMAGE, VIDEO = 755, 756, 763, 764, 766, 767
AUDIO, AUDIO_START, AUDIO_END, TTS_PAD, TTS_BOS, TTS_EOS = 770, 771, 772, 773, 774, 775
USER, ASSISTANT = (TOKENIZER.encode(role).ids[0] for role in ("user", "assistant"))
NUM_CODES, NUM_CODEBOOKS = 64, 4
IMAGE_MARKS = (VISION_START, IMAGE, VISION_END)
CODEC_PAD, CODEC_BOS, CODEC_EOS, CODEC_MASK = 64, 65, 66, 67
VOICES = ("Ethan", "Chelsie")
ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2]}
TEXT: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rope_parameters": ROPE,
    "max_position_embeddings": 1024,
}
TALKER = {**TEXT, "hidden_size": 48, "num_hidden_layers": 2}
EARS: dict[str, Any] = {
    "d_model": 32,
    "encoder_layers": 1,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 64,
    "output_dim": 64,
    "num_mel_bins": 16,
    "max_source_positions": 100,
    "n_window": 10,
}
EYES: dict[str, Any] = {
    "depth": 2,
    "hidden_size": 32,
    "num_heads": 2,
    "intermediate_size": 64,
    "patch_size": 14,
    "out_hidden_size": 64,
}


def write_qwen3(folder: Path, seed: int = 0) -> None:
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    media = {"image_token_id": IMAGE, "video_token_id": VIDEO, "audio_token_id": AUDIO}
    # As in the published folders; transformers has another default.
    starts = {
        "vision_start_token_id": VISION_START,
        "audio_start_token_id": AUDIO_START,
        "position_id_per_seconds": 13,
    }
    # transformers knows the number of embeddings of a chunk for this length alone.
    ears = {**EARS, "downsample_hidden_size": 16, "n_window": 50, "n_window_infer": 100}
    codec = range(CODEC_PAD, CODEC_PAD + 8)
    config = transformers.Qwen3OmniMoeConfig(
        thinker_config={
            "audio_config": ears,
            "vision_config": {
                **EYES,
                "num_position_embeddings": 64,
                "deepstack_visual_indexes": [0],
            },
            "text_config": {**TEXT, **experts, "vocab_size": VOCAB_SIZE},
            "user_token_id": USER,
            "vision_end_token_id": VISION_END,
            "audio_end_token_id": AUDIO_END,
            **media,
            **starts,
        },
        talker_config={
            # The last 1,024 tokens but the end are never sampled.
            "text_config": {
                **TALKER,
                **experts,
                "vocab_size": NUM_CODES + 1024,
                "shared_expert_intermediate_size": 32,
            },
            "num_code_groups": NUM_CODEBOOKS,
            "thinker_hidden_size": TEXT["hidden_size"],
            "accept_hidden_layer": 2,
            "spatial_merge_size": 2,
            "codec_pad_id": codec[0],
            "codec_bos_id": codec[1],
            "codec_eos_token_id": codec[2],
            "codec_nothink_id": codec[3],
            "codec_think_bos_id": codec[4],
            "codec_think_eos_id": codec[5],
            "speaker_id": {VOICES[0].lower(): codec[6], VOICES[1].lower(): codec[7]},
            "code_predictor_config": {
                "vocab_size": NUM_CODES,
                "hidden_size": TALKER["hidden_size"],
                "intermediate_size": 64,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "head_dim": 12,
                "num_code_groups": NUM_CODEBOOKS,
            },
            **media,
            **starts,
        },
        code2wav_config={
            "codebook_size": NUM_CODES,
            "hidden_size": 32,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_quantizers": NUM_CODEBOOKS,
            "sliding_window": 8,
            "upsample_rates": [4, 3],
            "upsampling_ratios": [2, 2],
            "decoder_dim": 32,
        },
        im_start_token_id=IM_START,
        im_end_token_id=IM_END,
        system_token_id=USER + 1,
        user_token_id=USER,
        assistant_token_id=ASSISTANT,
        tts_pad_token_id=TTS_PAD,
        tts_bos_token_id=TTS_BOS,
        tts_eos_token_id=TTS_EOS,
    )
    torch.manual_seed(seed)
    _save(transformers.Qwen3OmniMoeForConditionalGeneration(config), folder)


def write_qwen25(folder: Path, seed: int = 0) -> None:
    media = {"image_token_index": IMAGE, "video_token_index": VIDEO, "audio_token_index": AUDIO}
    marks = {
        "vision_start_token_id": VISION_START,
        "vision_end_token_id": VISION_END,
        "audio_start_token_id": AUDIO_START,
        "audio_end_token_id": AUDIO_END,
    }
    channels = 16
    config = transformers.Qwen2_5OmniConfig(
        thinker_config={
            "audio_config": EARS,
            "vision_config": {**EYES, "fullatt_block_indexes": [1], "window_size": 56},
            "text_config": {**TEXT, "vocab_size": VOCAB_SIZE},
            "user_token_id": USER,
            "pad_token_id": 0,
            **media,
            **marks,
        },
        talker_config={
            **TALKER,
            "vocab_size": CODEC_MASK + 1,
            "embedding_size": TEXT["hidden_size"],
            "tts_text_start_token_id": TTS_BOS,
            "tts_text_end_token_id": TTS_EOS,
            "tts_text_pad_token_id": TTS_PAD,
            "tts_codec_pad_token_id": CODEC_PAD,
            "tts_codec_start_token_id": CODEC_BOS,
            "tts_codec_end_token_id": CODEC_EOS,
            "tts_codec_mask_token_id": CODEC_MASK,
            **media,
            **marks,
        },
        token2wav_config={
            "dit_config": {
                "hidden_size": 32,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "head_dim": 16,
                "emb_dim": 16,
                "num_embeds": NUM_CODES,
                "mel_dim": channels,
                "block_size": 8,
                "look_ahead_layers": [1],
                "look_backward_layers": [0],
                "enc_emb_dim": 8,
                "enc_dim": 8,
                "enc_channels": [channels, channels, channels, channels, 3 * channels],
                "enc_attention_channels": 8,
                "enc_res2net_scale": 2,
                "enc_se_channels": 8,
            },
            "bigvgan_config": {
                "mel_dim": channels,
                "upsample_initial_channel": 32,
                "upsample_rates": [5, 3],
                "upsample_kernel_sizes": [11, 7],
            },
        },
    )
    torch.manual_seed(seed)
    _save(transformers.Qwen2_5OmniForConditionalGeneration(config), folder)
    speakers = {}
    for voice in VOICES:
        speakers[f"{voice}.cond"] = torch.randn(1, 8)
        speakers[f"{voice}.ref_mel"] = torch.randn(1, 30, channels)
        speakers[f"{voice}.bos_token"] = torch.tensor(TTS_BOS)
    save_file(speakers, folder / "speakers.safetensors")


def _save(model: Any, folder: Path) -> None:
    # Random weights large enough for the answers to vary; the usual ones repeat one token.
    for name, weight in model.named_parameters():
        if weight.dim() > 1 and name.startswith(("thinker", "talker")):
            # Experts are stacked.
            num_inputs = weight.shape[-1] if weight.dim() == 3 else weight[0].numel()
            torch.nn.init.normal_(weight, std=2 * num_inputs**-0.5)
    if isinstance(model, transformers.Qwen2_5OmniForConditionalGeneration):
        # The reference would choose this token too, which is no code.
        model.talker.codec_head.weight.data[CODEC_MASK] = 0
    model.generation_config = GenerationConfig(eos_token_id=IM_END)
    model.save_pretrained(folder)
    files = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
    for name in (*files, "preprocessor_config.json"):
        shutil.copy(DEMO_MODEL / name, folder)
    # A folder has one file for images and sounds.
    file = folder / "preprocessor_config.json"
    settings = json.loads(file.read_text()) | {"feature_size": EARS["num_mel_bins"]}
    file.write_text(json.dumps(settings))


def reference_qwen3(folder: Path, dtype: torch.dtype = torch.float64) -> Any:
    """The whole model in transformers."""
    model = transformers.Qwen3OmniMoeForConditionalGeneration.from_pretrained(
        folder, dtype=dtype, experts_implementation="eager"
    )
    # For a sound next to an image, transformers looks for these settings in the wrong config.
    model.talker.config.audio_config = model.config.thinker_config.audio_config
    return model.eval()


def reference_qwen25(folder: Path, dtype: torch.dtype = torch.float64) -> Any:
    """The whole model in transformers, with the voices of `speakers.safetensors`.

    Its own `from_pretrained` wants the voices in a pickle.
    """
    kind = transformers.Qwen2_5OmniForConditionalGeneration
    model = super(kind, kind).from_pretrained(folder, dtype=dtype)
    for name, tensor in load_file(folder / "speakers.safetensors").items():
        voice, _, key = name.partition(".")
        value = int(tensor) if key == "bos_token" else tensor
        model.speaker_map.setdefault(voice, {})[key] = value
    return model.eval()


def user_prompt(text: str) -> list[int]:
    """The tokens of a question, and of the beginning of its answer."""
    prompt = f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"
    token_ids: list[int] = TOKENIZER.encode(prompt).ids
    return token_ids


def pcm(sound: torch.Tensor) -> NDArray[np.int16]:
    """Samples as 16-bit integers."""
    samples: NDArray[np.int16] = (
        np.rint(sound.double().numpy() * 32767).reshape(-1).astype(np.int16)
    )
    return samples


class SpokenAnswer(NamedTuple):
    """Greedy answer of transformers."""

    token_ids: list[int]
    frames: list[list[int]]
    sound: torch.Tensor


@torch.no_grad()
def speak_qwen3(
    model: Any, prompt: list[int], num_tokens: int, num_frames: int, **media: Any
) -> SpokenAnswer:
    frames: list[list[int]] = []
    decode = model.code2wav.chunked_decode

    def recorded(codes: torch.Tensor, **options: Any) -> torch.Tensor:
        frames.extend(codes[0].T.tolist())
        sound: torch.Tensor = decode(codes, **options)
        return sound

    model.code2wav.chunked_decode = recorded
    token_ids = torch.tensor([prompt])
    sequences, sound = model.generate(
        input_ids=token_ids,
        attention_mask=torch.ones_like(token_ids),
        thinker_max_new_tokens=num_tokens,
        thinker_do_sample=False,
        thinker_eos_token_id=IM_END,
        talker_max_new_tokens=num_frames + 1,
        talker_do_sample=False,
        **media,
    )
    del model.code2wav.chunked_decode
    return SpokenAnswer(sequences[0, len(prompt) :].tolist(), frames[:num_frames], sound[0, 0])


@torch.no_grad()
def speak_qwen25(
    model: Any, prompt: list[int], num_tokens: int, num_frames: int, **media: Any
) -> SpokenAnswer:
    frames: list[list[int]] = []
    token2wav, talker = model.token2wav, model.talker
    forward = talker.forward

    @functools.wraps(forward)
    def masked(*, past_key_values: Any, attention_mask: Any = None, **inputs: Any) -> Any:
        """Give the talker its mask back: `generate` drops one that hides nothing, and without a
        mask the talker leaves out the embeddings of the codec's pad and begin."""
        length = past_key_values.get_seq_length()
        embeddings = inputs.get("inputs_embeds")
        new = inputs["input_ids"] if embeddings is None else embeddings
        mask = torch.ones((1, length + new.shape[1]), dtype=torch.int64)
        return forward(past_key_values=past_key_values, attention_mask=mask, **inputs)

    talker.forward = masked

    def recorded(codes: torch.Tensor, **_: Any) -> torch.Tensor:
        frames.extend([code] for code in codes[0].tolist())
        return torch.zeros(1)

    token2wav.forward = recorded
    token_ids = torch.tensor([prompt])
    sequences, sound = model.generate(
        input_ids=token_ids,
        speaker=VOICES[0],
        attention_mask=torch.ones_like(token_ids),
        thinker_max_new_tokens=num_tokens,
        thinker_do_sample=False,
        thinker_eos_token_id=IM_END,
        talker_max_new_tokens=num_frames,
        talker_do_sample=False,
        talker_eos_token_id=[CODEC_PAD, CODEC_EOS],
        # `generate` passes everything else to the talker, which refuses pixels.
        **{f"thinker_{key}" if "pixel" in key else key: value for key, value in media.items()},
    )
    del token2wav.forward, talker.forward
    return SpokenAnswer(sequences[0, len(prompt) :].tolist(), frames, sound)


def reference_token2wav(folder: Path, dtype: torch.dtype = torch.float64) -> Any:
    """Qwen2.5-Omni's vocoder in transformers."""
    config = transformers.Qwen2_5OmniConfig.from_pretrained(folder)
    model: Any = modeling_qwen2_5_omni.Qwen2_5OmniToken2WavModel.from_pretrained(
        folder, config=config.token2wav_config, key_mapping={r"^token2wav\.": ""}, dtype=dtype
    )
    return model.eval()
