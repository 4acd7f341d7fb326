"""Places for connections at a gateway: which connection closes when there are too many. Pure.

A connection belongs to a tenant if its latest request had a valid key, and otherwise to the network
address of its client. Connections of addresses keep a quarter of the places, and connections of
tenants keep the rest; either may use more while there are free places. When there are none, a
connection of the part that uses too much closes for a new one: the oldest idle connection of the
tenant or address with the most connections. A tenant's connection with a request in progress is
never closed. Instead, each tenant has a share of such connections.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from ipaddress import IPv6Address, IPv6Network, ip_address
from typing import NamedTuple

from shared.config.schema import ApiKey
from shared.tenants.tenant_shares import TenantShares
from workers.gateway.http.auth import has_several_tenants

ADDRESSES_PART = 4
"""One place in this number is kept for connections without a valid key."""
TENANT_RATIO = 3
"""Limit on requests in progress of one tenant, as a multiple of the places that are free."""
SCARCE = 0.75
"""Part of the places in use from which idle connections have little time."""


class Owner(NamedTuple):
    """User that a connection counts for: a tenant, or an address without a valid key."""

    is_tenant: bool
    name: str


@dataclass(slots=True, eq=False)
class Place:
    """Place of one connection."""

    address: str
    """Address of the client, or of its network."""
    close: Callable[[], None]
    """Close the connection for another one."""
    owner: Owner | None = None
    """None before the connection has its place, and after it has left it."""
    tenant: str | None = None
    """Tenant of the request in progress, if that request had a valid key."""
    is_busy: bool = False
    """Whether it must not close, because it counts for the share of its tenant."""


class ConnectionPlaces:
    """The places of all connections of one gateway."""

    def __init__(self, total: int, keys: Sequence[ApiKey]) -> None:
        self._total = total
        self._busy = TenantShares(0, has_tenants=False, ratio=TENANT_RATIO)
        self.set_keys(keys)
        self._num_held: Counter[Owner] = Counter()
        self._idle: dict[bool, dict[Owner, dict[Place, None]]] = {False: {}, True: {}}
        """Places that may close, of addresses and of tenants (True), by owner. The oldest place
        of an owner is first, and so is the owner whose latest place is the oldest. Owners without
        any are left out."""
        self._num_open = {False: 0, True: 0}
        """Number of places of addresses, and of tenants (True)."""

    def set_keys(self, keys: Sequence[ApiKey]) -> None:
        """Divide the places for the configured keys. Without keys, there is one owner."""
        self._has_keys = bool(keys)
        self._for_addresses = max(1, self._total // ADDRESSES_PART) if keys else 0
        has_tenants = has_several_tenants(keys)
        # One place of several tenants always stays free, so one tenant needs two of them.
        for_tenants = max(2 if has_tenants else 1, self._total - self._for_addresses)
        self._busy.change(for_tenants, has_tenants=has_tenants)

    @property
    def are_scarce(self) -> bool:
        """Whether idle connections should soon close."""
        return sum(self._num_open.values()) > self._total * SCARCE

    def open(self, place: Place) -> Place | None:
        """Add a new connection. Return the connection to close for it, which has left its place.

        If no other connection may close, this is `place` itself.
        """
        self._add(place, self._owner_without_key(place))
        if sum(self._num_open.values()) <= self._total:
            return None
        closing = self._next_to_close()
        self.leave(closing)
        return closing

    def claim(self, place: Place, tenant: str) -> bool:
        """Count a request with a valid key for its tenant, until `end`.

        Return False if the tenant has too many requests in progress.
        """
        if place.owner is None:
            return False  # The connection is closing.
        self._remove(place)
        place.is_busy, place.tenant = self._busy.take(tenant, 1), tenant
        self._add(place, Owner(is_tenant=True, name=tenant))
        return place.is_busy

    def renew(self, place: Place) -> None:
        """Mark an idle connection as the newest of its owner, because a request has arrived."""
        if place.owner is not None and not place.is_busy:
            owner = place.owner
            self._remove(place)
            self._add(place, owner)

    def end(self, place: Place) -> None:
        """Mark the connection as idle, after a request with or without a valid key."""
        if place.owner is None:
            return
        tenant, place.tenant = place.tenant, None
        self._remove(place)
        if tenant is None:
            self._add(place, self._owner_without_key(place))
        else:
            self._add(place, Owner(is_tenant=True, name=tenant))

    def leave(self, place: Place) -> None:
        """Remove a closed connection. A second call has no effect."""
        if place.owner is not None:
            self._remove(place)

    def _owner_without_key(self, place: Place) -> Owner:
        return Owner(not self._has_keys, place.address if self._has_keys else "")

    def _add(self, place: Place, owner: Owner) -> None:
        place.owner = owner
        self._num_open[owner.is_tenant] += 1
        self._num_held[owner] += 1
        if not place.is_busy:
            owners = self._idle[owner.is_tenant]
            places = owners[owner] = owners.pop(owner, {})
            places[place] = None

    def _remove(self, place: Place) -> None:
        owner, place.owner = place.owner, None
        assert owner is not None
        self._num_open[owner.is_tenant] -= 1
        self._num_held[owner] -= 1
        if not self._num_held[owner]:
            del self._num_held[owner]
        if place.is_busy:
            place.is_busy = False
            self._busy.give_back(owner.name, 1)
            return
        owners = self._idle[owner.is_tenant]
        del owners[owner][place]
        if not owners[owner]:
            del owners[owner]

    def _next_to_close(self) -> Place:
        """Return the oldest idle place of the largest owner, in the part that uses too much."""
        closes_tenant = self._num_open[False] <= self._for_addresses
        owners = self._idle[closes_tenant] or self._idle[not closes_tenant]
        largest = max(owners, key=self._num_held.__getitem__)
        return next(iter(owners[largest]))


def network_of(host: str) -> str:
    """Return the address that a client's connections count for. One client has a whole /64."""
    address = ip_address(host)
    if not isinstance(address, IPv6Address):
        return host
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(IPv6Network((address, 64), strict=False))
