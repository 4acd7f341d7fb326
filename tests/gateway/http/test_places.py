"""Properties of the places for connections, for random sequences of events."""

from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.config.schema import ApiKey
from workers.gateway.http.auth import digest
from workers.gateway.http.places import (
    ADDRESSES_PART,
    TENANT_RATIO,
    ConnectionPlaces,
    Owner,
    Place,
    network_of,
)

TENANTS = ["a", "b", "c", "d"]
KEYS = [ApiKey(tenant, digest(tenant)) for tenant in TENANTS]
EVENTS = ["connect", "claim", "connect", "claim", "renew", "end", "leave"]
ADDRESSES = ["192.0.2.1", "192.0.2.2", "192.0.2.3"]


@dataclass
class Model:
    """The open connections, in a form without the books of the module."""

    total: int
    has_keys: bool
    places: ConnectionPlaces = field(init=False)
    open: list[Place] = field(default_factory=list)
    closed: list[Place] = field(default_factory=list)
    changed: dict[Place, int] = field(default_factory=dict)
    """Number of the latest change of each connection."""

    def __post_init__(self) -> None:
        self.places = ConnectionPlaces(self.total, KEYS if self.has_keys else [])

    @property
    def num_for_addresses(self) -> int:
        return max(1, self.total // ADDRESSES_PART) if self.has_keys else 0

    def num_held(self, owner: Owner) -> int:
        return sum(place.owner == owner for place in self.open)

    def num_without_key(self) -> int:
        return sum(place.owner is not None and not place.owner.is_tenant for place in self.open)

    def connect(self, address: str) -> Place | None:
        """Open a place, check the choice of the place that closes, and return the latter."""
        place = Place(address, close=lambda: None)
        before = {other: other.owner for other in self.open}
        idle = [other for other in self.open if not other.is_busy]
        num_held = {other: self.num_held(other.owner) for other in idle if other.owner}
        closing = self.places.open(place)
        self.open.append(place)
        self.change(place)
        if closing is None:
            return None
        self.open.remove(closing)
        self.closed.append(closing)
        assert closing.owner is None
        assert len(before) == self.total
        if closing is place:
            # No other connection could close.
            assert not idle
            return closing
        assert closing in idle
        owner = before[closing]
        assert owner is not None
        for other in idle:
            if before[other] == owner:
                # It was the oldest of its owner.
                assert self.changed[other] >= self.changed[closing]
            elif (other_owner := before[other]) and other_owner.is_tenant == owner.is_tenant:
                is_new = other_owner == place.owner
                assert num_held[other] + is_new <= num_held[closing] + (owner == place.owner)
        if owner.is_tenant and self.has_keys:
            assert self.num_without_key() <= self.num_for_addresses
        return closing

    def change(self, place: Place) -> None:
        self.changed[place] = 1 + max(self.changed.values(), default=0)

    def claim(self, place: Place, tenant: str) -> bool:
        self.change(place)
        num_busy = sum(other.is_busy for other in self.open if other is not place)
        num_own = sum(
            other.is_busy and other.tenant == tenant for other in self.open if other is not place
        )
        num_places = max(2 if self.has_keys else 1, self.total - self.num_for_addresses)
        num_free = num_places - num_busy - 1
        is_served = self.places.claim(place, tenant)
        max_own = TENANT_RATIO * num_free if self.has_keys else num_places
        assert is_served == (num_free >= 0 and num_own + 1 <= max_own)
        return is_served


@given(data=st.data(), total=st.integers(1, 24), has_keys=st.booleans())
def test_only_the_right_connections_close(data: Any, total: int, has_keys: bool) -> None:
    model = Model(total, has_keys)
    for _ in range(data.draw(st.integers(0, 80))):
        match data.draw(st.sampled_from(EVENTS)):
            case "connect":
                model.connect(data.draw(st.sampled_from(ADDRESSES)))
            case "claim" if model.open:
                place = data.draw(st.sampled_from(model.open))
                tenant = data.draw(st.sampled_from(TENANTS)) if has_keys else ""
                model.claim(place, tenant)
            case "renew" if model.open:
                place = data.draw(st.sampled_from(model.open))
                owner, is_busy = place.owner, place.is_busy
                model.places.renew(place)
                model.change(place)
                assert (place.owner, place.is_busy) == (owner, is_busy)
            case "end" if model.open:
                place = data.draw(st.sampled_from(model.open))
                model.places.end(place)
                model.change(place)
            case "leave" if model.open:
                place = model.open.pop(data.draw(st.integers(0, len(model.open) - 1)))
                model.places.leave(place)
                model.places.leave(place)
                model.closed.append(place)
        assert len(model.open) <= total
        assert all(place.owner is not None for place in model.open)
    for place in model.closed:
        model.places.end(place)
        model.places.renew(place)
        assert not model.places.claim(place, "a")
        assert place.owner is None
    # Nothing is left of connections that have closed.
    for place in model.open:
        model.places.leave(place)
    assert [model.connect("192.0.2.9") for _ in range(total)] == [None] * total


@given(
    total=st.integers(8, 1024),
    strangers=st.integers(0, 1100),
    greedy=st.lists(st.integers(1, 1100), max_size=3),
    same_address=st.booleans(),
)
def test_a_tenant_within_its_share_always_gets_a_place(
    total: int, strangers: int, greedy: list[int], same_address: bool
) -> None:
    places = ConnectionPlaces(total, KEYS)

    def connect(address: str) -> Place:
        place = Place(address, close=lambda: None)
        places.open(place)
        return place

    for i, number in enumerate(greedy):
        for _ in range(number):
            places.claim(connect("192.0.2.1"), f"greedy{i}")
    for i in range(strangers):
        connect("192.0.2.1" if same_address else f"192.0.2.{i}")
    newcomer = connect("192.0.2.1" if same_address else "198.51.100.1")
    assert newcomer.owner is not None
    # Each greedy tenant leaves a quarter of what it has found free.
    for_tenants = total - total // ADDRESSES_PART
    if for_tenants >= 2 * (TENANT_RATIO + 1) ** len(greedy):
        assert places.claim(newcomer, "newcomer")


def test_a_tenant_alone_has_three_quarters_and_equal_tenants_equal_shares() -> None:
    places = ConnectionPlaces(1024, KEYS)

    def claim(tenant: str) -> Place | None:
        place = Place("192.0.2.1", close=lambda: None)
        places.open(place)
        if places.claim(place, tenant):
            return place
        places.leave(place)
        return None

    def fill(tenant: str) -> list[Place]:
        return [place for _ in range(1024) if (place := claim(tenant)) is not None]

    held = {"a": fill("a"), "b": fill("b")}
    assert [len(places) for places in held.values()] == [576, 144]
    # Requests end, and each tenant sends new ones as soon as it may.
    for _ in range(2000):
        ended = max(held.values(), key=len).pop()
        places.end(ended)
        places.leave(ended)
        for tenant, its_places in held.items():
            if (place := claim(tenant)) is not None:
                its_places.append(place)
    assert abs(len(held["a"]) - len(held["b"])) <= 2
    assert len(held["a"]) > 300


def test_a_single_tenant_has_all_places_but_a_quarter() -> None:
    places = ConnectionPlaces(100, KEYS[:1])
    opened = [Place("192.0.2.1", close=lambda: None) for _ in range(100)]
    for place in opened:
        assert places.open(place) is None
    assert sum(places.claim(place, "a") for place in opened) == 75


def test_new_keys_divide_the_places_again() -> None:
    places = ConnectionPlaces(16, [])
    opened = [Place("192.0.2.1", close=lambda: None) for _ in range(16)]
    for place in opened:
        places.open(place)
        assert places.claim(place, "")
    places.set_keys(KEYS)
    assert not places.claim(opened[0], "a")
    for place in opened[1:]:
        places.end(place)
    # Three quarters of twelve.
    assert [places.claim(place, "a") for place in opened] == [True] * 9 + [False] * 7
    places.set_keys([])
    assert all(places.claim(place, "") for place in opened)


@pytest.mark.parametrize(
    ("host", "network"),
    [
        ("192.0.2.1", "192.0.2.1"),
        ("::ffff:192.0.2.1", "192.0.2.1"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("2001:db8:1:2::1", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
    ],
)
def test_clients_count_by_their_network(host: str, network: str) -> None:
    assert network_of(host) == network
