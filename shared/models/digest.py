"""Identity of a model by its files, for caches of computed results."""

from pathlib import Path

from blake3 import blake3

from shared.protocol.multimodal import content_hash


def digest_of_files(folder: Path) -> str:
    """Return a hash over the configuration and the weights in a folder."""
    digest = blake3(max_threads=blake3.AUTO)
    for file in sorted([*folder.glob("*.json"), *folder.glob("*.safetensors")]):
        digest.update(content_hash(file.name, file.stat().st_size).encode())
        digest.update_mmap(file)
    return digest.hexdigest()
