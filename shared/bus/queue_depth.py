"""How queues stand with their consumers."""

from dataclasses import dataclass

from nats.js import api


@dataclass(frozen=True, slots=True)
class QueueDepth:
    """`delivered` is the last sequence that a worker has been given."""

    delivered: int
    waiting: int
    in_hand: int

    @classmethod
    def of(cls, info: api.ConsumerInfo) -> "QueueDepth":
        delivered = info.delivered.stream_seq if info.delivered else 0
        return cls(delivered, info.num_pending or 0, info.num_ack_pending or 0)


@dataclass(frozen=True, slots=True)
class ConsumerQueue:
    """A consumer, on one filter of its stream, and its backlog."""

    subject: str
    backlog: QueueDepth

    @classmethod
    def of(cls, info: api.ConsumerInfo) -> "ConsumerQueue":
        return cls(info.config.filter_subject or "", QueueDepth.of(info))
