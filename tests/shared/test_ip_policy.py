from ipaddress import IPv4Address, IPv6Address, ip_network

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.ip_policy import may_dial, parse_address

INSIDE = (
    "127.0.0.1",
    "127.255.0.9",
    "10.0.0.1",
    "172.16.0.1",
    "172.31.255.255",
    "192.168.1.1",
    "169.254.169.254",
    "100.64.0.1",
    "0.0.0.0",
    "192.0.0.8",
    "168.63.129.16",
    "224.0.0.1",
    "255.255.255.255",
    "198.18.0.1",
)


@pytest.mark.parametrize(
    "text",
    [
        *INSIDE,
        "::1",
        "::",
        "fe80::1",
        "fe80::1%eth0",
        "fc00::1",
        "fd12:3456::1",
        "fec0::1",
        "ff02::1",
        "::127.0.0.1",
        "::ffff:127.0.0.1",
        "::ffff:169.254.169.254",
        "64:ff9b::a9fe:a9fe",
        "64:ff9b:1::1",
        "2002:a9fe:a9fe::",
        "2002:7f00:1::",
        "2001:0:a9fe:a9fe::5601:5601",
        "2001:db8::1",
    ],
)
def test_what_is_not_the_internet_is_not_dialled(text: str) -> None:
    assert not may_dial(parse_address(text))


@pytest.mark.parametrize(
    "text",
    ["1.1.1.1", "93.184.216.34", "2606:4700::1111", "::ffff:1.1.1.1", "64:ff9b::101:101"],
)
def test_the_internet_is(text: str) -> None:
    assert may_dial(parse_address(text))


def test_a_network_of_ones_own_may_be_allowed() -> None:
    allowed = [ip_network("10.1.0.0/16"), ip_network("fd00::/8")]
    assert may_dial(parse_address("10.1.2.3"), allowed)
    assert may_dial(parse_address("::ffff:10.1.2.3"), allowed)
    assert may_dial(parse_address("fd00::1"), allowed)
    assert not may_dial(parse_address("10.2.0.1"), allowed)


@given(st.sampled_from(INSIDE))
def test_no_wrapping_hides_an_address(text: str) -> None:
    inner = int(IPv4Address(text))
    wrappings = (
        inner,
        0xFFFF << 32 | inner,
        int(IPv6Address("64:ff9b::")) | inner,
        0x2002 << 112 | inner << 80,
        0x20010000 << 96 | inner << 64,
        0x20010000 << 96 | 0x01010101 << 64 | (inner ^ 0xFFFFFFFF),
    )
    for wrapped in wrappings:
        assert not may_dial(IPv6Address(wrapped))
