"""Shares of tenants in the bytes of a stream, whose oldest messages are deleted when it is full.

A tenant may store as much as the reserve and the other tenants leave free, times its weight. One
greedy tenant gets half of the stream, two get a third each, and a newcomer always finds room. A
tenant that is alone in a stream has no limit, because only its own messages are deleted for it.
Pure.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from shared.protocol.exceeded_shares import ExceededShare

RESERVE = 0.1
"""Part of a stream that is kept free for requests in flight, so that they can end."""
NEWCOMER = ""
"""Stands for every tenant without stored messages."""


@dataclass(frozen=True, slots=True)
class StreamUse:
    """Use of a stream, in total and by tenant."""

    stream: str
    max_bytes: int
    num_bytes: int
    by_tenant: Mapping[str, int] = field(default_factory=dict)
    """Bytes of each tenant. The rest of `num_bytes` belongs to no tenant."""


def may_be_exceeded(max_bytes: int, num_bytes: int, weights: Mapping[str, float]) -> bool:
    """Return whether any tenant could be over its share, for the total use of a stream."""
    free = max_bytes * (1 - RESERVE) - num_bytes
    return num_bytes >= free * min([1.0, *weights.values()])


def exceeded_shares(use: StreamUse, weights: Mapping[str, float]) -> list[ExceededShare]:
    """Return the tenants over their share, the largest first.

    Bytes of a tenant beyond its share of an empty stream do not reduce the shares of other tenants:
    they were stored while the tenant was alone, and are deleted first.
    """
    limit = use.max_bytes * (1 - RESERVE)
    stored = {tenant: num_bytes for tenant, num_bytes in use.by_tenant.items() if num_bytes > 0}
    held = {t: min(num_bytes, limit * _part(t, weights)) for t, num_bytes in stored.items()}
    without = max(0, use.num_bytes - sum(stored.values()))
    free = limit - min(without, limit / 2) - sum(held.values())
    exceeded = [
        ExceededShare(use.stream, tenant, num_bytes, max(0, int(share)))
        for tenant, num_bytes in stored.items()
        if num_bytes >= (share := _part(tenant, weights) * (free + held[tenant]))
    ]
    if len(stored) == 1:
        return []
    if stored and free <= 0:
        exceeded.append(ExceededShare(use.stream, NEWCOMER, 0, 0))
    return sorted(exceeded, key=lambda share: share.num_bytes, reverse=True)


def _part(tenant: str, weights: Mapping[str, float]) -> float:
    """Return the part of the free bytes that a tenant may have."""
    weight = weights.get(tenant, 1.0)
    return weight / (1 + weight)
