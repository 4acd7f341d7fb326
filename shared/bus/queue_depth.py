"""Depths of the consumers' queues."""

from dataclasses import dataclass

from nats.js import api


@dataclass(frozen=True, slots=True)
class QueueDepth:
    """Messages of one consumer's queue."""

    last_delivered: int
    """Sequence of the last message that was delivered to a worker."""
    num_pending: int
    num_in_flight: int

    @classmethod
    def of(cls, info: api.ConsumerInfo) -> "QueueDepth":
        last_delivered = info.delivered.stream_seq if info.delivered else 0
        return cls(last_delivered, info.num_pending or 0, info.num_ack_pending or 0)


@dataclass(frozen=True, slots=True)
class ConsumerQueue:
    """A consumer's filter subject and the depth of its queue."""

    subject: str
    depth: QueueDepth

    @classmethod
    def of(cls, info: api.ConsumerInfo) -> "ConsumerQueue":
        return cls(info.config.filter_subject or "", QueueDepth.of(info))
