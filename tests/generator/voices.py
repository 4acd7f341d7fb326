"""Small random voices, and the sound of a whole speech in one piece."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from workers.generator.core.schedule import Window
from workers.generator.core.vocoder import Codes, Samples, Vocoder, cut
from workers.generator.loader import TABLE_FILE

NUM_CODES, NUM_BANDS = 40, 12
SAMPLES_PER_FRAME = 480
METADATA = {"format": "pagemill.code2wav.1", "sample_rate": "24000", "frame_rate": "50"}


def arrays(seed: int = 0) -> dict[str, np.ndarray[Any, Any]]:
    """Arrays of a table. A third of the codes has no pitch."""
    rng = np.random.default_rng(seed)
    voicing = rng.uniform(0, 1, NUM_CODES)
    pitch = np.where(rng.uniform(size=NUM_CODES) < 2 / 3, rng.uniform(80, 300, NUM_CODES), 0)
    return {
        "envelope": rng.normal(-3, 1, (NUM_CODES, NUM_BANDS)).astype(np.float16),
        "pitch": pitch.astype(np.float16),
        "voicing": voicing.astype(np.float16),
        "band_hz": np.geomspace(60, 11_000, NUM_BANDS).astype(np.float32),
    }


def write(
    folder: Path,
    changed: Mapping[str, np.ndarray[Any, Any] | None] = {},
    metadata: Mapping[str, str] = METADATA,
) -> Path:
    """Write a table, with these arrays changed or, if they are None, left out; return its file."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: value for name, value in (arrays() | dict(changed)).items() if value is not None
    }
    save_file(tensors, folder / TABLE_FILE, dict(metadata))
    return folder / TABLE_FILE


def codes_of(seed: int, num_frames: int) -> Codes:
    """Codes of a speech. Runs of the same code are frequent, as in a real one."""
    rng = np.random.default_rng(seed)
    runs = np.repeat(rng.integers(0, NUM_CODES, num_frames), rng.integers(1, 5, num_frames))
    return runs[:num_frames, None].astype(np.int32)


def whole(vocoder: Vocoder, codes: Codes) -> Samples:
    """The sound of all frames as one chunk."""
    window = Window(0, 0, len(codes), len(codes))
    return vocoder.synthesize([cut(vocoder, codes, window)])[0]
