"""Sounds of generic families: each sound alone goes through the model's own processor.

The processors of transformers need torch for sounds.
"""

import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import structlog
from transformers import AutoFeatureExtractor
from transformers.utils.import_utils import is_torch_available

from shared.codec.arrays import from_numpy, to_numpy
from shared.codec.envelope import TensorData
from shared.codec.vllm_kwargs import WireField
from shared.errors import ConfigError, InvalidMedia, UnsupportedContent
from shared.models.generic_image import ERRORS, REPLACEMENT, TEXT_FIELDS, open_processor
from shared.models.layout import check_processor_file, fingerprint
from shared.models.lazy_module import load_torch
from shared.models.media import AudioProbe, SamplePlan
from shared.models.mel_layout import SAMPLE_RATE, Samples, SoundLayout
from shared.protocol.multimodal import FrameSampling, Placement

MAX_WINDOW_S = 30.0
"""Longest sound. Processors cut longer sounds, some of them silently."""

_log = structlog.get_logger()

# transformers leaves this function without types.
_load_feature_extractor: Any = AutoFeatureExtractor.from_pretrained


class GenericSoundLayout(SoundLayout):
    """Fields with the names that the family's processor gives them, and the sound's tokens.

    replacement  int64 [num_tokens], the tokens that replace the sound's marker in the prompt
    """

    metadata = (REPLACEMENT,)

    def __init__(self, folder: Path, config: Any) -> None:
        load_torch()
        extractor = _load_extractor(folder)
        kinds = ("feature_extractor", "audio_processor")
        parts = dict.fromkeys(kinds, extractor)
        self._processor, settings = open_processor(folder, config.model_type, parts)
        # A call changes settings of the processor's tokenizer.
        self._lock = threading.Lock()
        self._marker: str = self._processor.audio_token
        self.marker_id = self._processor.tokenizer.convert_tokens_to_ids(self._marker)
        self.embed_ids = (config.audio_token_id,)
        self.window_s = min(MAX_WINDOW_S, getattr(extractor, "chunk_length", MAX_WINDOW_S))
        self.fingerprint = fingerprint(
            extractor,
            config.model_type,
            sorted(settings.items()),
            (folder / "tokenizer.json").read_bytes(),
        )
        self._check(folder, config.model_type)

    def plan(self, probe: AudioProbe, sampling: FrameSampling, field: str) -> SamplePlan:
        # The processor counts the tokens. A sound is short enough for it.
        return SamplePlan(SAMPLE_RATE, 0, self.limit(probe, sampling, field))

    def pack(
        self, parts: Iterator[Samples], plan: SamplePlan, field: str
    ) -> tuple[dict[str, TensorData], int]:
        samples = self.collect(parts, plan, field)
        try:
            arrays, token_ids = self._run(samples)
        except ERRORS as error:
            _log.info("sound_refused", reason=str(error))
            raise InvalidMedia(
                f"the model's processor refuses a sound of {len(samples)} samples at"
                f" {SAMPLE_RATE} Hz",
                field=field,
            ) from error
        if not (num_tokens := sum(token_id in self.embed_ids for token_id in token_ids)):
            raise InvalidMedia(
                f"a sound of {len(samples)} samples at {SAMPLE_RATE} Hz is too short", field=field
            )
        fields = {name: from_numpy(array) for name, array in arrays.items()}
        fields[REPLACEMENT] = from_numpy(np.array(token_ids))
        return fields, num_tokens

    def outline(
        self, parts: Iterator[Samples], plan: SamplePlan, field: str
    ) -> tuple[dict[str, TensorData], int]:
        fields, num_tokens = self.pack(parts, plan, field)
        return {REPLACEMENT: fields[REPLACEMENT]}, num_tokens

    def place(
        self, metadata: Mapping[str, TensorData], encode: Callable[[str], list[int]]
    ) -> Placement | None:
        token_ids: list[int] = to_numpy(metadata[REPLACEMENT]).tolist()
        return Placement(token_ids, self.embed_ids)

    def to_wire(self, fields: Mapping[str, TensorData]) -> dict[str, WireField]:
        raise UnsupportedContent(
            "sounds of this model are not exchanged with other servers", field="features"
        )

    def from_wire(
        self, wire: Mapping[str, WireField], field: str
    ) -> tuple[dict[str, TensorData], int]:
        raise UnsupportedContent(
            "sounds of this model are not accepted from other servers", field=field
        )

    def _run(self, samples: Samples) -> tuple[dict[str, Any], list[int]]:
        """Return the processor's arrays for one sound, and the tokens that replace its marker."""
        with self._lock:
            output = self._processor(
                text=[self._marker],
                audio=[samples],
                return_tensors="pt",
                return_text_replacement_offsets=True,
            )
            (replaced,) = output["text_replacement_offsets"][0]
            token_ids: list[int] = self._processor.tokenizer.encode(
                replaced["replacement"], add_special_tokens=False
            )
        arrays = {
            name: np.asarray(array) for name, array in output.items() if name not in TEXT_FIELDS
        }
        return arrays, token_ids

    def _check(self, folder: Path, model_type: str) -> None:
        """Raise ConfigError unless a sound has the same tokens in any text."""
        try:
            _, token_ids = self._run(sample_sound())
        except ERRORS as error:
            raise ConfigError(
                f"{folder}: the processor of {model_type!r} fails for a sound: {error}",
                field="path",
            ) from error
        # Special tokens are never merged with the text next to them.
        ends = {token_ids[0], token_ids[-1]} if token_ids else set()
        special = set(self._processor.tokenizer.added_tokens_decoder)
        if not set(token_ids) & set(self.embed_ids) or not ends <= special:
            raise ConfigError(
                f"{folder}: the tokens of a sound do not begin and end with tokens that the"
                f" tokenizer keeps apart, or have no token {self.embed_ids[0]}, which config.json"
                " names as audio_token_id",
                field="path",
            )


def open_sounds(folder: Path, config: Any) -> GenericSoundLayout | None:
    """Open the layout of a model folder; None in the check of a folder, which has no torch."""
    check_processor_file(folder)
    return GenericSoundLayout(folder, config) if is_torch_available() else None


def sample_sound() -> Samples:
    """Return a second of a sound that changes."""
    times = np.arange(SAMPLE_RATE, dtype=np.float32) / SAMPLE_RATE
    return np.asarray(np.sin(2_000 * times * times), np.float32)


def _load_extractor(folder: Path) -> Any:
    try:
        extractor = _load_feature_extractor(folder, local_files_only=True)
    except (OSError, ValueError, ImportError) as error:
        raise ConfigError(f"{folder}: no feature extractor: {error}", field="path") from error
    if (rate := extractor.sampling_rate) != SAMPLE_RATE:
        raise ConfigError(
            f"{folder}: the feature extractor needs sounds at {rate} Hz; {SAMPLE_RATE} Hz is"
            " served",
            field="path",
        )
    if getattr(extractor, "dither", 0.0) != 0.0:
        raise ConfigError(
            f"{folder}: the feature extractor adds noise (dither), so that a sound has other"
            " features each time",
            field="path",
        )
    return extractor
