"""Identity of a model by its files, for caches of computed results."""

from pathlib import Path

from blake3 import blake3

from shared.protocol.multimodal import content_hash


def digest_of_files(folder: Path) -> str:
    """Return a hash over the configuration and the weights in a folder and its subfolders.

    Folders of diffusers have their parts in subfolders.
    """
    digest = blake3(max_threads=blake3.AUTO)
    for file in sorted([*folder.rglob("*.json"), *folder.rglob("*.safetensors")]):
        name = file.relative_to(folder).as_posix()
        digest.update(content_hash(name, file.stat().st_size).encode())
        digest.update_mmap(file)
    return digest.hexdigest()
