"""Messages from rank 0 to the other ranks of an engine, on the pipe to each process.

A reader that waits for a message is woken by it, and finds the end of the file when rank 0 ends.
"""

import struct
from collections.abc import Sequence
from typing import BinaryIO

import msgspec

from shared.config.schema import EngineConfig, ModelConfig

_LENGTH = struct.Struct("=Q")


class _Message(msgspec.Struct, frozen=True, tag=True):
    pass


class Start(_Message, frozen=True):
    """The first message to a process: its model, and its place among the ranks."""

    model: ModelConfig
    engine: EngineConfig
    rank: int
    store: str
    """File by which the processes find each other."""


class NewCache(_Message, frozen=True):
    """A KV cache replaces the previous one."""

    num_blocks: int
    block_size: int


class CopyBlocks(_Message, frozen=True):
    copies: Sequence[tuple[int, int]]


class ZeroBlocks(_Message, frozen=True):
    blocks: Sequence[int]


class ReadMemory(_Message, frozen=True):
    """The rank reports the memory of its GPU."""

    peak: bool
    """Whether the largest use is reported, and not the present use."""


class Step(_Message, frozen=True):
    """A step of the model, for the fields see `BatchLayout`. Its tensors are broadcast."""

    block_tables: Sequence[Sequence[int]]
    query_start_loc: Sequence[int]
    seq_lens: Sequence[int]
    spans: Sequence[Sequence[tuple[int, int]]]
    num_levels: int = 0
    """Number of levels of deepstack features, 0 without them."""


Command = NewCache | CopyBlocks | ZeroBlocks | ReadMemory | Step

commands = msgspec.msgpack.Decoder(Command)
starts = msgspec.msgpack.Decoder(Start)


class Loaded(_Message, frozen=True):
    """The answer to `Start`."""

    refusal: str = ""
    """Reason for which the part of the model cannot be served; empty if it is loaded."""
    memory_limit: int | None = None
    """Bytes of its GPU that the rank may use; None without a GPU."""
    free_memory: int = 0
    """Bytes that were free before the rank was loaded."""


class MemoryRead(_Message, frozen=True):
    """The answer to `ReadMemory`."""

    num_bytes: int


answers = msgspec.msgpack.Decoder(Loaded | MemoryRead)


def send(file: BinaryIO, message: bytes) -> None:
    file.write(_LENGTH.pack(len(message)))
    file.write(message)
    file.flush()


def receive(file: BinaryIO) -> bytes | None:
    """Return the next message; None if the writer has ended."""
    head = file.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        return None
    (length,) = _LENGTH.unpack(head)
    message = file.read(length)
    return message if len(message) == length else None
