"""An engine and a renderer without a model: the product's worker, scheduler, blocks and log.

A token is a function of (seed, choice, all token ids before, every byte of the images), so a
request determines its answer. An answer that was resumed without one of its tokens, or whose
payload changed while the engine read it, differs from then on.
"""

import hashlib
import os
import signal
import time
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from shared.codec.envelope import TensorData
from shared.config.schema import ModelConfig
from shared.protocol.chunks import ChunkSpec
from shared.protocol.code_tokens import CodeTokens
from shared.protocol.multimodal import (
    DEFAULT_SAMPLING,
    IMAGE,
    FrameSampling,
    Modality,
    MultiModalKwargsItem,
    PlaceholderRange,
    Placement,
    content_hash,
)
from shared.protocol.pipeline import StageSpec
from shared.protocol.requests import ImagePart, Message, Prompt, TextPart
from shared.protocol.sampling import SamplingParams
from workers.engine.code_output import CodeOutput
from workers.engine.core.block_pool import BlockPool
from workers.engine.core.engine import EngineCore
from workers.engine.core.sequence import (
    Batch,
    EngineRequest,
    Item,
    SampledToken,
    ScheduledSequence,
    Span,
)
from workers.engine.core.sequence import Sequence as EngineSequence
from workers.renderer.processing.prompt import SizedMedia, expand

VOCAB_SIZE = 771
"""The size of the demo models' vocabulary, so that the fake engine accepts the real renderer's
prompts."""
EOS_TOKEN_IDS = frozenset(range(0, 768, 128))
BLOCK_SIZE = 16
MAX_BATCHED_TOKENS = 512
IMAGE_TOKEN_ID = 700
IMAGE_KIB = (4, 40, 300, 2048)
"""Sizes of fake images. Small ones travel in the message, large ones outside of it."""
MAX_MODEL_LEN = 2048
NUM_CODES = 40
"""Number of codes of the fake talker, which are the tokens from 1. Token 0 ends a speech."""
_LETTERS = "etaoinshrdlucmfwypvbgkjqxz"

# Seeds by which a request does harm. The request carries the harm, so every engine meets it.
KILLS_SEED = 666_001
RAISES_SEED = 666_002
HANGS_SEED = 666_003
HANG_S = 12.0


def decode(token_ids: list[int], /, *, skip_special_tokens: bool = True) -> str:
    """Return the text; some tokens are empty and some add a space, so stop strings span tokens."""
    return "".join(_piece(token_id) for token_id in token_ids if token_id not in EOS_TOKEN_IDS)


def _piece(token_id: int) -> str:
    return "" if token_id % 17 == 16 else _LETTERS[token_id % 26] + " " * (token_id % 7 == 6)


class FakeRunner:
    """A runner whose KV cache holds, in each slot, a hash of all tokens up to it.

    Like keys and values, a hash depends on all tokens before, so that the runner detects slots that
    another sequence has overwritten. Verifying all slots at every step would cost more than the
    step, so a sequence is verified whenever it has filled a block.
    """

    def __init__(
        self,
        step_s: float = 0.0,
        on_harm: Callable[[int, str], bool] | None = None,
        num_sampled: int = VOCAB_SIZE,
    ) -> None:
        """`on_harm` is called with the seed and the id of a harmful request, and may prevent it.

        Only tokens below `num_sampled` are in answers.
        """
        self._num_sampled = num_sampled
        self._step_s = step_s
        self._on_harm = on_harm
        self.encoded_items = 0
        self.mm_cache_queries = self.mm_cache_hits = 0
        self._slots: dict[tuple[int, int], bytes] = {}
        self._sampled: list[int] = []
        """Tokens that the last batch has sampled."""
        self._seen: dict[str, bytes] = {}
        """Hash of the images, by request."""

    def check(self, request: EngineRequest) -> int:
        return MAX_MODEL_LEN - len(request.prompt_token_ids)

    def spans_of(self, request: EngineRequest) -> list[Span]:
        return []

    def prepare(self, request: EngineRequest) -> None:
        digest = hashlib.blake2b(digest_size=8)
        for item in request.items:
            for name in sorted(item.fields):
                digest.update(item.fields[name].data)
        self._seen[request.request_id] = digest.digest() if request.items else b""

    def begin_encoding(self, request: EngineRequest, indexes: Sequence[int]) -> set[int]:
        return set()

    def take_embedding(self, item: Item, embedding: Any) -> None:
        item.embedding = embedding

    def encode(self, requests: Sequence[tuple[EngineRequest, Sequence[int]]]) -> int:
        items = [request.items[i] for request, indexes in requests for i in indexes]
        self.encoded_items += len(items)
        return sum(item.placeholder.length for item in items)

    def recover_memory(self, error: Exception) -> bool:
        return False

    def release(self, request_id: str) -> None:
        self._seen.pop(request_id, None)

    def zero_blocks(self, blocks: list[int]) -> None:
        pass

    def copy_blocks(self, copies: list[tuple[int, int]]) -> None:
        for source, destination in copies:
            for slot in range(BLOCK_SIZE):
                if (content := self._slots.get((source, slot))) is not None:
                    self._slots[destination, slot] = content

    def launch(self, batch: Batch) -> "_Launched":
        if self._step_s:
            time.sleep(self._step_s)
        for s in batch.scheduled:
            if self._on_harm is not None and s.sequence.seed >= KILLS_SEED:
                self._harm(s.sequence, self._on_harm)
            self._write(s)
        for s in batch.scheduled:
            if s.num_new_tokens > 1 or s.end % BLOCK_SIZE == 0:
                self._verify(s)
        return _Launched(self, batch)

    def sample(self, scheduled: list[ScheduledSequence]) -> list[list[SampledToken]]:
        tokens = [self.next_token(s.sequence) if s.samples else None for s in scheduled]
        self._sampled = [token_id for token_id in tokens if token_id is not None]
        return [[] if token_id is None else [SampledToken(token_id)] for token_id in tokens]

    def next_token(self, sequence: EngineSequence) -> int:
        before = array("q", [sequence.seed, sequence.choice, *sequence.token_ids]).tobytes()
        images = self._seen[sequence.request_id]
        digest = hashlib.blake2b(before + images, digest_size=8).digest()
        return int.from_bytes(digest, "big") % self._num_sampled

    def _harm(self, sequence: EngineSequence, allows: Callable[[int, str], bool]) -> None:
        seed = sequence.seed
        if seed not in (KILLS_SEED, RAISES_SEED, HANGS_SEED):
            return
        if not allows(seed, sequence.request_id):
            return
        if seed == KILLS_SEED:
            os.kill(os.getpid(), signal.SIGKILL)
        if seed == RAISES_SEED:
            raise RuntimeError("a poisoned request")
        time.sleep(HANG_S)

    def _write(self, s: ScheduledSequence) -> None:
        before = self._slots[_slot(s.sequence, s.start - 1)] if s.start else b""
        for position in range(s.start, s.end):
            before = self._content(s.sequence, position, before)
            self._slots[_slot(s.sequence, position)] = before

    def _verify(self, s: ScheduledSequence) -> None:
        before = b""
        for position in range(s.end):
            before = self._content(s.sequence, position, before)
            content = self._slots[_slot(s.sequence, position)]
            assert content == before, "a block holds what another sequence has written"

    def _content(self, sequence: EngineSequence, position: int, before: bytes) -> bytes:
        token_id = sequence.token_ids[position]
        if token_id < 0:  # It is awaited from the last batch.
            token_id = self._sampled[-1 - token_id]
        return hashlib.blake2b(before + token_id.to_bytes(8, "little"), digest_size=16).digest()


def _slot(sequence: EngineSequence, position: int) -> tuple[int, int]:
    block, slot = divmod(position, BLOCK_SIZE)
    return sequence.block_table[block], slot


class _Launched:
    def __init__(self, runner: FakeRunner, batch: Batch) -> None:
        self._runner = runner
        self._batch = batch
        self._tokens: list[list[SampledToken]] = []

    def sample(self, kept: Sequence[int]) -> None:
        self._tokens = self._runner.sample([self._batch.scheduled[i] for i in kept])

    def result(self) -> list[list[SampledToken]]:
        return self._tokens


def build_core(
    runner: FakeRunner, num_blocks: int, max_num_seqs: int, *, runs_ahead: bool = False
) -> EngineCore:
    return EngineCore(
        runner,
        decode,
        EOS_TOKEN_IDS,
        pool=BlockPool(num_blocks, BLOCK_SIZE),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=MAX_BATCHED_TOKENS,
        max_model_len=MAX_MODEL_LEN,
        vocab_size=VOCAB_SIZE,
        runs_ahead=runs_ahead,
    )


def build_talker(step_s: float, num_blocks: int, max_num_seqs: int) -> EngineCore:
    """Return the engine core of a talker. Its speeches have 40 codes on average."""
    return build_core(FakeRunner(step_s, None, NUM_CODES + 1), num_blocks, max_num_seqs)


def code_output(bus: Any, stage: StageSpec, chunks: Sequence[ChunkSpec] = ()) -> CodeOutput:
    """Return the output of the fake talker's stage; the tokens of a text are its bytes."""
    sampling = msgspec.convert(stage.sampling_defaults, SamplingParams)
    return CodeOutput(
        bus,
        stage.name,
        msgspec.structs.replace(sampling, n=1, detokenize=False),
        CodeTokens(1, NUM_CODES),
        MAX_MODEL_LEN - (sampling.max_tokens or 1),
        lambda text: [1 + byte for byte in text.encode()],
        dict.fromkeys(stage.voices, IMAGE_TOKEN_ID),
        chunks,
    )


@dataclass(frozen=True, slots=True)
class FakeImage:
    mm_hash: str
    num_tokens: int
    fields: dict[str, TensorData]
    modality: Modality = IMAGE
    placement: Placement | None = None


@dataclass(frozen=True, slots=True)
class FakeRendered:
    prompt_token_ids: list[int]
    items: list[MultiModalKwargsItem]
    tensors: list[TensorData]


class FakeProcessor:
    """Stand-in for the real processor, whose import takes 3 to 4 s."""

    def __init__(self, model: ModelConfig) -> None:
        self.max_model_len = MAX_MODEL_LEN

    def accepts(self, modality: Modality) -> bool:
        return False

    def metadata(
        self, modality: Modality, fields: Mapping[str, TensorData]
    ) -> dict[str, TensorData]:
        return {}

    def check(self, messages: Sequence[Message]) -> None:
        pass

    def tokenize(self, prompt: Prompt) -> list[int]:
        return [token_id for message in prompt.messages for token_id in _token_ids(message)]

    def hash_media(
        self,
        modality: Modality,
        source_hash: str,
        tenant: str,
        sampling: FrameSampling = DEFAULT_SAMPLING,
    ) -> str:
        # Without the tenant, so that all tenants get equal answers.
        return content_hash("", source_hash, "fake")

    def place(self, modality: Modality, metadata: Mapping[str, TensorData]) -> Placement | None:
        return None

    def process(
        self,
        media: Any,
        field: str,
        tenant: str,
        sampling: FrameSampling = DEFAULT_SAMPLING,
        max_tokens: int | None = None,
    ) -> FakeImage:
        mm_hash = self.hash_media(IMAGE, media.source_hash, tenant)
        num_bytes = image_bytes(mm_hash)
        data = memoryview(bytes.fromhex(mm_hash) * (num_bytes // 32))
        return FakeImage(
            mm_hash,
            1 + int(mm_hash[0], 16) // 2,
            {"bytes": TensorData("uint8", (num_bytes,), data)},
        )

    def expand(
        self,
        token_ids: list[int],
        media: Sequence[SizedMedia],
        field: str = "messages",
        embeds: bool = False,
    ) -> tuple[list[int], list[PlaceholderRange]]:
        return expand(token_ids, media, {IMAGE: IMAGE_TOKEN_ID}, field)


def render(
    processor: FakeProcessor, messages: Sequence[Message], media: Iterable[Any]
) -> FakeRendered:
    """Render messages and their media as `ops.rendering.render` does."""
    processed = [processor.process(medium, "", "") for medium in media]
    token_ids, ranges = processor.expand(processor.tokenize(Prompt(list(messages))), processed)
    items = [
        MultiModalKwargsItem(IMAGE, image.mm_hash, placeholder, {"bytes": number})
        for number, (image, placeholder) in enumerate(zip(processed, ranges, strict=True))
    ]
    return FakeRendered(token_ids, items, [image.fields["bytes"] for image in processed])


def image_bytes(mm_hash: str) -> int:
    return IMAGE_KIB[int(mm_hash[:8], 16) % len(IMAGE_KIB)] * 1024


def _token_ids(message: Message) -> list[int]:
    content = message.content
    parts = [TextPart(content)] if isinstance(content, str) else content or []
    token_ids: list[int] = []
    for part in parts:
        if isinstance(part, ImagePart):
            token_ids.append(IMAGE_TOKEN_ID)
        elif isinstance(part, TextPart):
            token_ids += [1 + byte for byte in part.text.encode()]
    return token_ids
