"""Qwen2.5-Omni's talker: one codebook, and a row of the thinker for each spoken token.

A row is the sum of the thinker's last hidden state and the token's embedding. The engine that wrote
the answer does not send these rows. The talker loads a copy of the thinker and computes them again,
in one pass over prompt and answer.
"""

from pathlib import Path
from typing import Any, cast

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.models.qwen2_5_omni import modeling_qwen2_5_omni

from shared.vision.weights import load_weights
from workers.engine.core.sequence import SpokenText
from workers.engine.model.talker import SpeechRows, Talker, run_decoder

VOICES_FILE = "speakers.safetensors"
OTHER_PARTS = ("model.visual", "model.audio_tower", "lm_head")


class Qwen25Talker(Talker):
    num_codebooks = 1

    def __init__(self, talker: Any, thinker: Any, num_codes: int, voices: dict[str, int]) -> None:
        super().__init__(talker, talker.model)
        self._talker, self._thinker = talker, thinker
        config = talker.config
        self.codes = range(num_codes)
        self.num_text_tokens = thinker.get_input_embeddings().num_embeddings
        self.end_token_ids = frozenset([talker.codec_pad_token, talker.codec_eos_token])
        self.voices = voices
        self.media_token_ids = frozenset(
            [config.audio_token_index, config.image_token_index, config.video_token_index]
        )

    @property
    def input_embeddings(self) -> nn.Module:
        return nn.Sequential(
            self._talker.get_input_embeddings(), self._talker.thinker_to_talker_proj
        )

    def prompt_tokens(self, speech: SpokenText) -> list[int]:
        talker = self._talker
        num_masked = len(speech.prompt_token_ids)
        masked: list[int] = [talker.codec_mask_token] * num_masked
        return [*masked, talker.codec_pad_token, talker.codec_bos_token]

    def make_rows(self, speech: SpokenText) -> SpeechRows:
        talker, num_prompt = self._talker, len(speech.prompt_token_ids)
        rows = self._thinker_rows([*speech.prompt_token_ids, *speech.answer_token_ids[:-1]])
        voice = self.voices[speech.voice or next(iter(self.voices))]
        begin = self._embed_text([voice])
        text = torch.cat(
            [rows[num_prompt:], self._embed_text([talker.text_eos_token, talker.text_pad_token])]
        )
        prompt = torch.cat([rows[:num_prompt], begin, text[:1]])
        last = torch.tensor([talker.codec_pad_token, talker.codec_bos_token], device=rows.device)
        prompt[-2:] = prompt[-2:] + talker.get_input_embeddings()(last)
        return SpeechRows(talker.thinker_to_talker_proj(prompt), text[1:])

    def frame_rows(self, frames: Tensor, text: Tensor) -> Tensor:
        codec = self._talker.get_input_embeddings()(frames[:, 0])
        rows: Tensor = self._talker.thinker_to_talker_proj(codec + text)
        return rows

    def forward(
        self,
        embeddings: Tensor,
        positions: Tensor,
        sampled_rows: Tensor,
        deepstack: Tensor | None,
        **attention: Any,
    ) -> Tensor:
        head = self._talker.codec_head
        return run_decoder(self.decoder, head, embeddings, positions, sampled_rows, **attention)

    def _thinker_rows(self, token_ids: list[int]) -> Tensor:
        embeddings = self._embed_text(token_ids)
        states = self._thinker.model.language_model(
            inputs_embeds=embeddings[None], use_cache=False
        ).last_hidden_state
        return cast(Tensor, states[0] + embeddings)

    def _embed_text(self, token_ids: list[int]) -> Tensor:
        ids = torch.tensor(token_ids, dtype=torch.int64, device=self.model.device)
        embeddings: Tensor = self._thinker.get_input_embeddings()(ids)
        return embeddings


def load(folder: Path, config: PreTrainedConfig, dtype: torch.dtype, device: str) -> Talker:
    """Load the talker of a model's folder. Raises ConfigError."""
    omni = modeling_qwen2_5_omni
    talker = load_weights(
        omni.Qwen2_5OmniTalkerForConditionalGeneration,
        folder,
        dtype,
        device,
        part=("talker", config.talker_config),
    )
    thinker = load_weights(
        omni.Qwen2_5OmniThinkerForConditionalGeneration, folder, dtype, device, OTHER_PARTS
    )
    with safe_open(folder / VOICES_FILE, framework="pt") as stored:
        voices = {
            name.removesuffix(".bos_token"): int(stored.get_tensor(name))
            for name in stored.keys()  # noqa: SIM118
            if name.endswith(".bos_token")
        }
    num_codes: int = config.token2wav_config.dit_config.num_embeds
    return Qwen25Talker(talker, thinker, num_codes, voices)
