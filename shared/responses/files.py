"""What a stored file is, from the ending of its name. Pure."""

from shared.protocol.multimodal import AUDIO, IMAGE, VIDEO, Modality

_ENDINGS: dict[Modality, tuple[str, ...]] = {
    IMAGE: ("png", "jpg", "jpeg", "webp", "gif", "bmp"),
    VIDEO: ("mp4", "mov", "webm", "mkv", "avi"),
    AUDIO: ("wav", "flac", "ogg", "mp3", "aac", "m4a"),
}


def modality_of_file(filename: str | None) -> Modality | None:
    """Return what a file is by its name; None for one that no model reads."""
    _, dot, ending = (filename or "").rpartition(".")
    found = (modality for modality, known in _ENDINGS.items() if ending.lower() in known)
    return next(found, None) if dot else None
