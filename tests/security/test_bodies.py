"""Shares of tenants in the memory for bodies, and in the connections that wait for them.

`tests/gateway/http/test_body_shares.py` holds a gateway to them.
"""

import pytest

from shared.tenants.tenant_shares import TenantShares

SHARES: list[tuple[str, int, list[tuple[str, int, bool]]]] = [
    ("half", 100, [("a", 50, True), ("a", 1, False), ("b", 25, True), ("b", 1, False)]),
    ("more than half", 100, [("a", 51, False), ("a", 50, True)]),
    ("a third of three", 90, [("a", 30, True), ("b", 30, True), ("a", 1, False), ("c", 15, True)]),
    ("nothing", 0, [("a", 0, True), ("a", 1, False)]),
    ("many", 64, [("a", 32, True), ("b", 16, True), ("c", 8, True), ("d", 4, True)]),
    ("all of them", 4, [("a", 2, True), ("b", 1, True), ("c", 1, False), ("d", 1, False)]),
]


@pytest.mark.parametrize(("_", "total", "requests"), SHARES, ids=[row[0] for row in SHARES])
def test_a_tenant_holds_no_more_than_is_left_free(
    _: str, total: int, requests: list[tuple[str, int, bool]]
) -> None:
    shares = TenantShares(total, has_tenants=True)
    assert [shares.take(tenant, amount) for tenant, amount, _ in requests] == [
        is_taken for _, _, is_taken in requests
    ]
    for tenant, amount, is_taken in requests:
        if is_taken:
            shares.give_back(tenant, amount)
    assert shares.take("z", total // 2)


def test_one_tenant_alone_holds_the_whole() -> None:
    shares = TenantShares(100, has_tenants=False)
    assert shares.take("", 100)
    assert not shares.take("", 1)


def test_a_change_of_the_rule_leaves_what_tenants_hold() -> None:
    shares = TenantShares(100, has_tenants=False)
    assert shares.take("a", 90)
    shares.change(80, has_tenants=True)
    assert not shares.take("b", 1)
    shares.give_back("a", 60)
    assert not shares.take("a", 11)
    assert shares.take("b", 25)
    shares.give_back("a", 30)
    shares.give_back("b", 25)
    shares.change(8, has_tenants=False)
    assert shares.take("a", 8)


@pytest.mark.parametrize(("ratio", "most"), [(1, 50), (3, 75)])
def test_a_tenant_holds_at_most_a_multiple_of_what_is_free(ratio: int, most: int) -> None:
    shares = TenantShares(100, has_tenants=True, ratio=ratio)
    assert not shares.take("a", most + 1)
    assert shares.take("a", most)
    assert shares.take("b", 1)
