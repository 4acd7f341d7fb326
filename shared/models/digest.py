"""Identity of a model by its files, for caches of computed results."""

from pathlib import Path

from blake3 import blake3

from shared.models.image_folder import is_image_folder
from shared.protocol.multimodal import content_hash


def digest_of_files(folder: Path) -> str:
    """Return a hash over the configuration and the weights in a folder.

    A folder of diffusers has its parts, and a tokenizer of several files, in subfolders.
    """
    digest = blake3(max_threads=blake3.AUTO)
    patterns = ["*.json", "*.safetensors"]
    if is_image_folder(folder):
        patterns += ["*/*.json", "*/*.safetensors", "*/*.txt"]
    for file in sorted(file for pattern in patterns for file in folder.glob(pattern)):
        name = file.relative_to(folder).as_posix()
        digest.update(content_hash(name, file.stat().st_size).encode())
        digest.update_mmap(file)
    return digest.hexdigest()
