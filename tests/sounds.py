"""Sounds, and tiny random models of transformers with audio input."""

import importlib
import io
from typing import Any

import numpy as np
import soundfile
from numpy.typing import NDArray

from shared.models.media import AudioProbe, DecodedAudio
from shared.models.mel_layout import SAMPLE_RATE

# mypy knows neither this extractor nor the audio classes in transformers.
transformers: Any = importlib.import_module("transformers")

Samples = NDArray[np.float32]


def draw_sound(seed: int, num_samples: int) -> Samples:
    """Noise below a sine, neither of which is loud."""
    rng = np.random.default_rng(seed)
    tone = np.sin(np.arange(num_samples) * rng.uniform(0.02, 1.2))
    return np.asarray(0.2 * tone + rng.normal(0, 0.05, num_samples), np.float32)


def decoded(samples: Samples, promised: int | None = None) -> DecodedAudio:
    """A sound in pieces of a second. Its header promises `promised` samples."""
    num_samples = len(samples) if promised is None else promised
    return DecodedAudio(
        AudioProbe(num_samples / SAMPLE_RATE, SAMPLE_RATE, 1),
        lambda plan: iter(np.split(samples, range(SAMPLE_RATE, len(samples), SAMPLE_RATE))),
        source_hash="a" * 64,
    )


def file_of(samples: Samples, form: str = "WAV", subtype: str = "FLOAT") -> bytes:
    file = io.BytesIO()
    soundfile.write(file, samples, SAMPLE_RATE, subtype, format=form)
    return file.getvalue()


def extract(extractor: Any, samples: Samples) -> tuple[Samples, int]:
    """transformers' own features of the whole window, and the sound's number of frames."""
    output = extractor(
        samples, sampling_rate=SAMPLE_RATE, return_attention_mask=True, return_tensors="np"
    )
    return output["input_features"][0], int(output["attention_mask"].sum())
