"""Every cache there is, and that what one tenant has put into it is another's under another key."""

import asyncio
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from shared.config.schema import ModelConfig, RendererConfig
from shared.protocol.multimodal import IMAGE, Modality, PlaceholderRange
from shared.protocol.sampling import SamplingParams
from shared.protocol.subjects import last_token
from tests.renderer.threads import in_thread
from workers.engine.core.block_hash import block_hashes
from workers.engine.core.sequence import EngineRequest, Item, Sequence
from workers.generator.image_thread import text_key
from workers.renderer.media.item_registry import ItemRegistry
from workers.renderer.media.loader import MediaLoader
from workers.renderer.processing.processor import Processor
from workers.settings import DEMO_MODEL

ROOT = Path(__file__).parents[1]
URL = "https://example.com/a.png"
# Lines that store something for a later request.
KEEPS = re.compile(
    r"[=:] ByteLRU\(|lru_cache|functools\.cache|mm_items\.put_item\(|pool\.register\(|"
    r"subjects\.item\("
)
NOT_OF_REQUESTS = [
    "shared/codec/envelope.py",  # decoders, by type
    "shared/protocol/versions.py",  # fields, by type
    # Why a grammar cannot be compiled, which follows from the grammar alone.
    "workers/engine/sampling/grammar.py",
    # Masks of a vocabulary, by the listed token ids alone, and what each byte of a mask allows.
    *("workers/engine/sampling/logits_processors.py",) * 3,
    # Masks of a model's own rules, by their token ids alone.
    *("workers/engine/sampling/token_rules.py",) * 3,
    # Beginnings of segments, by their lengths alone.
    "shared/vision/layers.py",
    "shared/vision/layers.py",
    # Positions, segments and windows of patches, by the sizes of images alone.
    "shared/models/qwen_geometry.py",
    # Noise levels, by the number of steps alone.
    *("workers/generator/diffusion/wan.py",) * 2,
    # Weights of a resized axis, by its two lengths alone.
    *("shared/models/resizing.py",) * 2,
    # Noise levels of images, by their numbers of steps and patches alone.
    *("workers/generator/diffusion/dpm_solver.py",) * 2,
    *("workers/generator/diffusion/flow_match.py",) * 2,
    # This machine and its library.
    "shared/native/library.py",
    "shared/native/library.py",
    "shared/native/tower_kernels.py",
]


class Fetched:
    """Replaces the fetcher, because the test reads the cache that is filled by it."""

    async def fetch(self, url: str, field: str, modality: Modality, tenant: str) -> bytes:
        return b"picture"


@pytest.fixture(scope="module")
def processor() -> Processor:
    return Processor(ModelConfig(str(DEMO_MODEL)))


def block_key(tenant: str, processor: Processor) -> object:
    """Last key of the chain of an image that has one hash for both: the chain has its own salt."""
    items = [Item("image", "a" * 64, PlaceholderRange(0, 4), {})]
    request = EngineRequest("r", [1] * 8, items, SamplingParams(), tenant=tenant)
    return block_hashes(Sequence(request, 0, 0, [1] * 8, 1), 2, 4)[-1]


def image_key(tenant: str, processor: Processor) -> object:
    """mm_hash, the key of the renderer's pixels and of the engine's embeddings."""
    return processor.hash_media(IMAGE, "b" * 64, tenant)


def test_processed_images_of_others_are_known_by_their_bytes_and_tenant(
    processor: Processor,
) -> None:
    keys = {
        processor.hash_item(IMAGE, source * 64, tenant) for source in "ab" for tenant in ("", "a")
    }
    assert len(keys) == 4
    assert processor.hash_media(IMAGE, "a" * 64, "") not in keys


def url_key(tenant: str, processor: Processor) -> object:
    media = MediaLoader(RendererConfig(), in_thread)
    media._fetcher = Fetched()  # type: ignore[assignment]
    asyncio.run(media.read(URL, "field", tenant))
    (key,) = media._fetched[IMAGE]._entries
    return key


def item_key(tenant: str, processor: Processor) -> object:
    """By which a hash of a client's own leads to the bytes of an item."""
    items = ItemRegistry(None, tenant, "demo")  # type: ignore[arg-type]
    return last_token(items._subject("a hash"))


def encoded_text_key(tenant: str, processor: Processor) -> object:
    return text_key("a red circle", tenant)


CACHES: dict[str, tuple[str, Callable[[str, Processor], object]]] = {
    "prefixes": ("workers/engine/core/prefix_cache.py", block_key),
    "prefixes that a prefill worker has computed": (
        "workers/engine/core/prefix_cache.py",
        block_key,
    ),
    "embeddings": ("workers/engine/runner.py", image_key),
    "processed pictures": ("workers/renderer/image_cache.py", image_key),
    "items by a client's hash": ("workers/renderer/media/item_registry.py", item_key),
    "encoded texts of images": ("workers/generator/image_thread.py", encoded_text_key),
    "fetched files": ("workers/renderer/media/loader.py", url_key),
}


@pytest.mark.parametrize("cache", CACHES)
def test_the_key_differs_between_tenants_and_not_between_requests(
    cache: str, processor: Processor
) -> None:
    _, key = CACHES[cache]
    keys = {tenant: key(tenant, processor) for tenant in ("", "a", "b")}
    assert len(set(keys.values())) == 3
    assert keys == {tenant: key(tenant, processor) for tenant in keys}
    if isinstance(keys["a"], str):
        assert len(bytes.fromhex(keys["a"])) >= 32, "a hash in full"


def test_there_are_no_other_caches() -> None:
    """A new one belongs into the table above."""
    caches = [
        str(file.relative_to(ROOT))
        for folder in ("shared", "workers")
        for file in sorted((ROOT / folder).rglob("*.py"))
        for _ in KEEPS.findall(file.read_text())
    ]
    assert sorted(caches) == sorted([*NOT_OF_REQUESTS, *(module for module, _ in CACHES.values())])
