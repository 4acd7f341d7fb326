"""Qwen2.5-Omni's talker: one codebook, and a row of the thinker for each spoken token.

A row is the sum of the thinker's last hidden state and the token's embedding, or the hidden state
alone at the embeddings of media.
"""

from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers.models.qwen2_5_omni import modeling_qwen2_5_omni

from shared.models.families.qwen_omni import OmniTower
from shared.models.language import PromptPositions
from shared.vision.weights import load_weights
from workers.engine.core.sequence import SpokenText
from workers.engine.model.talker import MediaParts, SpeechRows, Talker, run_decoder
from workers.engine.model.thinker_states import ThinkerStates
from workers.engine.transfers import upload

VOICES_FILE = "speakers.safetensors"


class Qwen25Talker(Talker):
    num_codebooks = 1

    thinker: ThinkerStates

    def __init__(
        self, talker: Any, thinker: ThinkerStates, num_codes: int, voices: dict[str, int]
    ) -> None:
        super().__init__(talker, talker.model)
        self._talker, self.thinker = talker, thinker
        self.codes = range(num_codes)
        self.num_text_tokens = thinker.num_tokens
        self.end_token_ids = frozenset([talker.codec_pad_token, talker.codec_eos_token])
        self.voices = voices

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

    def _locate_rows(self, thinker: ThinkerStates, speech: SpokenText) -> PromptPositions | None:
        return thinker.locate(speech)

    def make_rows(self, speech: SpokenText) -> SpeechRows:
        talker, num_prompt = self._talker, len(speech.prompt_token_ids)
        rows = self._thinker_rows(speech)
        voice = self.voices[speech.voice or next(iter(self.voices))]
        embed = self.thinker.embed
        begin = embed([voice])
        text = torch.cat([rows[num_prompt:], embed([talker.text_eos_token, talker.text_pad_token])])
        prompt = torch.cat([rows[:num_prompt], begin, text[:1]])
        last = upload([talker.codec_pad_token, talker.codec_bos_token], rows.device)
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

    def _thinker_rows(self, speech: SpokenText) -> Tensor:
        token_ids = [*speech.prompt_token_ids, *speech.answer_token_ids[:-1]]
        embeddings = self.thinker.embed(token_ids)
        for item in speech.items:
            place = item.placeholder
            indexes = [place.offset + index for index in place.embed_indexes()]
            embeddings[upload(indexes, embeddings.device)] = 0
        return self.thinker.run(speech, token_ids) + embeddings


def load(folder: Path, config: Any, dtype: torch.dtype, device: str, media: MediaParts) -> Talker:
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
        omni.Qwen2_5OmniThinkerForConditionalGeneration,
        folder,
        dtype,
        device,
        [*(() if media == "tower" else OmniTower.modules), "lm_head"],
    )
    with safe_open(folder / VOICES_FILE, framework="pt") as stored:
        voices = {
            name.removesuffix(".bos_token"): int(stored.get_tensor(name))
            for name in stored.keys()  # noqa: SIM118
            if name.endswith(".bos_token")
        }
    num_codes: int = config.token2wav_config.dit_config.num_embeds
    return Qwen25Talker(talker, ThinkerStates(thinker, media == "tower"), num_codes, voices)
