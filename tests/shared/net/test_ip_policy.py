from ipaddress import IPv4Address, IPv6Address, IPv6Network, ip_network

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.net.ip_policy import may_be_translated, may_dial, parse_address, translators_of

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
def test_addresses_outside_the_internet_are_not_dialled(text: str) -> None:
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


def embed(prefix: IPv6Network, inner: IPv4Address) -> IPv6Address:
    """Append an address to a prefix, octet by octet, as in the table of RFC 6052."""
    octets = bytearray(prefix.network_address.packed)
    place = prefix.prefixlen // 8
    for octet in inner.packed:
        place += place == 8
        octets[place] = octet
        place += 1
    return IPv6Address(bytes(octets))


PREFIXES = st.builds(
    lambda number, length: IPv6Network((0x20 << 120 | number >> 8, length), strict=False),
    st.integers(0, 2**125 - 1),
    st.sampled_from([32, 40, 48, 56, 64, 96]),
)
ADDRESSES = st.builds(IPv4Address, st.integers(0, 2**32 - 1))


@pytest.mark.parametrize(
    ("prefix", "text"),
    [
        ("2001:db8::/32", "2001:db8:c000:221::"),
        ("2001:db8:100::/40", "2001:db8:1c0:2:21::"),
        ("2001:db8:122::/48", "2001:db8:122:c000:2:2100::"),
        ("2001:db8:122:300::/56", "2001:db8:122:3c0:0:221::"),
        ("2001:db8:122:344::/64", "2001:db8:122:344:c0:2:2100::"),
        ("2001:db8:122:344::/96", "2001:db8:122:344::192.0.2.33"),
    ],
)
def test_the_examples_of_rfc_6052(prefix: str, text: str) -> None:
    assert embed(IPv6Network(prefix), IPv4Address("192.0.2.33")) == IPv6Address(text)


@given(PREFIXES, st.sampled_from(INSIDE) | ADDRESSES.map(str))
def test_no_translator_leads_to_an_inner_address(prefix: IPv6Network, text: str) -> None:
    address = embed(prefix, IPv4Address(text))
    is_public = may_dial(IPv4Address(text))
    if not is_public:
        assert not may_dial(address, translators=[prefix])
        # Only after a prefix of 96 bits, the address alone does not decide.
        assert not may_dial(address) or prefix.prefixlen == 96
        assert may_be_translated(address) or prefix.prefixlen != 96
    elif may_dial(address):
        inner = [ip_network(f"{text}/32")]
        assert may_dial(address, inner, [prefix])


@given(PREFIXES, st.sampled_from(["192.0.0.170", "192.0.0.171"]))
def test_a_translator_is_found_by_its_address_of_a_known_name(
    prefix: IPv6Network, text: str
) -> None:
    assert prefix in translators_of(embed(prefix, IPv4Address(text)))


@given(
    st.integers(0x2000 << 48, (0x4000 << 48) - 1),
    st.sampled_from(INSIDE),
    st.sampled_from([0x0000_5EFE, 0x0200_5EFE, 0x0100_5EFE, 0x0300_5EFE]),
)
def test_no_isatap_address_leads_to_an_inner_address(network: int, text: str, marker: int) -> None:
    address = IPv6Address(network << 64 | marker << 32 | int(IPv4Address(text)))
    assert not may_dial(address)


def test_an_isatap_address_of_a_public_address_is_public() -> None:
    assert may_dial(parse_address("2606:4700::5efe:1.1.1.1"))
    assert may_dial(parse_address("2606:4700::200:5efe:1.1.1.1"))
