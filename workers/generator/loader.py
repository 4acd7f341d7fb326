"""Reader of vocoder files. Every error names the file and the fault."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from safetensors import SafetensorError, safe_open

from shared.errors import ConfigError, first_sentence
from shared.protocol.chunks import ChunkSpec
from workers.generator.core.vocoder import Vocoder
from workers.generator.table_vocoder import TableVocoder, VoiceTable

TABLE_FILE = "code2wav.safetensors"
TABLE_FORMAT = "pagemill.code2wav.1"
MIN_PITCH_HZ = 20.0
MAX_SAMPLE_RATE = 192_000
# Both a quarter of a frame, a step of the vocoder, and its FFT of 6.4 steps must be whole samples.
FRAME_MULTIPLE = 20
# In base64, which is a third longer, this fits into a message of 1 MiB, the broker's default.
MAX_RECORD_BYTES = 720_000


def load_vocoder(
    folder: Path,
    spec: ChunkSpec,
    key: str,
    *,
    voices: Sequence[str] = (),
    dtype: str = "float32",
    device: str = "cpu",
) -> Vocoder:
    """Load the vocoder of a folder, a table or a part of a model, for the chunks of `spec`.

    `key` is the stage's key in the settings. Raises ConfigError.
    """
    file = folder / TABLE_FILE
    try:
        if file.exists() or not (folder / "config.json").exists():
            vocoder: Vocoder = TableVocoder(_read_table(file))
        else:
            file = folder
            vocoder = _load_neural(folder, voices, dtype, device)
    except ConfigError as error:
        raise ConfigError(f"{key}.path: {error.message}", field=f"{key}.path") from error
    for name, num, needed in (
        ("left", spec.left, vocoder.min_left),
        ("right", spec.right, vocoder.min_right),
    ):
        if num < needed:
            raise ConfigError(
                f"{key}.chunks.{name}: {num} is less than {needed}, the number of frames that"
                f" {file} needs on this side of a chunk",
                field=f"{key}.chunks.{name}",
            )
    most = MAX_RECORD_BYTES // (2 * vocoder.samples_per_frame)
    for name, size in (("first", max(spec.first, default=0)), ("size", spec.size)):
        if size > most:
            raise ConfigError(
                f"{key}.chunks.{name}: {size} frames do not fit into a record; the limit with"
                f" {file} is {most}",
                field=f"{key}.chunks.{name}",
            )
    return vocoder


def _load_neural(folder: Path, voices: Sequence[str], dtype: str, device: str) -> Vocoder:
    """Load the vocoder among the parts of a model."""
    # A table needs neither torch nor transformers.
    import torch
    from transformers import AutoConfig

    from shared.models.registry import find_family
    from workers.generator import code2wav, snac_vocoder, token2wav

    try:
        if snac_vocoder.is_snac(folder):
            return snac_vocoder.load(folder, getattr(torch, dtype), device)
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
        family = find_family(config)
        kind = None if family is None else family.vocoder
        if kind == "code2wav":
            return code2wav.load(folder, config, getattr(torch, dtype), device)
        if kind == "token2wav":
            return token2wav.load(folder, config, voices, getattr(torch, dtype), device)
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f"{folder} cannot be served: {first_sentence(error)}") from error
    raise ConfigError(f"{folder}: a model of type {config.model_type!r} has no vocoder")


def _read_table(file: Path) -> VoiceTable:
    try:
        with safe_open(file, framework="numpy") as stored:
            metadata: dict[str, str] = stored.metadata() or {}
            arrays = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{file}: not a safetensors file: {error}") from error
    if metadata.get("format") != TABLE_FORMAT:
        _refuse(file, "format", f"expected {TABLE_FORMAT!r}, got {metadata.get('format')!r}")
    sample_rate = _number(file, metadata, "sample_rate")
    frame_rate = _number(file, metadata, "frame_rate")
    if sample_rate > MAX_SAMPLE_RATE:
        _refuse(file, "sample_rate", f"{sample_rate} is over the limit of {MAX_SAMPLE_RATE}")
    if sample_rate % (FRAME_MULTIPLE * frame_rate) != 0:
        message = f"a frame must have a multiple of {FRAME_MULTIPLE} samples, at {sample_rate} Hz"
        _refuse(file, "frame_rate", message)
    pitch = _array(file, arrays, "pitch", np.float16, (None,))
    bands = _array(file, arrays, "band_hz", np.float32, (None,))
    voicing = _array(file, arrays, "voicing", np.float16, pitch.shape)
    envelope = _array(file, arrays, "envelope", np.float16, (len(pitch), len(bands)))
    if (np.diff(bands) <= 0).any():
        _refuse(file, "band_hz", "the bands must be in ascending order")
    if ((voicing < 0) | (voicing > 1)).any():
        _refuse(file, "voicing", "all values must be from 0 to 1")
    if ((pitch != 0) & ((pitch < MIN_PITCH_HZ) | (pitch > sample_rate / 2))).any():
        message = f"all values must be 0, or from {MIN_PITCH_HZ:g} to {sample_rate / 2:g}"
        _refuse(file, "pitch", message)
    return VoiceTable(sample_rate, sample_rate // frame_rate, bands, envelope, pitch, voicing)


def _number(file: Path, metadata: dict[str, str], key: str) -> int:
    value = metadata.get(key, "")
    if not (value.isascii() and value.isdigit() and len(value) < 10 and int(value) > 0):
        _refuse(file, key, f"expected a whole number above 0, got {value!r}")
    return int(value)


def _array(
    file: Path,
    arrays: dict[str, Any],
    key: str,
    dtype: type[np.floating[Any]],
    shape: tuple[int | None, ...],
) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Return an array of the file; None in `shape` allows any length except 0."""
    array = arrays.get(key)
    if array is None:
        _refuse(file, key, "there is no such array")
    fits = len(array.shape) == len(shape) and all(
        length == expected or (expected is None and length > 0)
        for length, expected in zip(array.shape, shape, strict=True)
    )
    if array.dtype != dtype or not fits:
        sizes = ", ".join("any" if size is None else str(size) for size in shape)
        _refuse(
            file,
            key,
            f"expected {np.dtype(dtype)} [{sizes}], got {array.dtype} {list(array.shape)}",
        )
    if not np.isfinite(array).all():
        _refuse(file, key, "all values must be finite")
    return np.asarray(array, np.float64)


def _refuse(file: Path, key: str, message: str) -> NoReturn:
    raise ConfigError(f"{file}: {key}: {message}")
