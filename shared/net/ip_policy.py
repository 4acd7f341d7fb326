"""IP policy: the addresses that may be dialled for a client's images and tools. Pure.

The policy checks the address of the connection, never a name. If an address contains another one
(mapped, translated, tunnelled), both are checked. The prefixes of the local network's translator
(NAT64) come from its name server.
"""

from collections.abc import Sequence
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address

Address = IPv4Address | IPv6Address
Network = IPv4Network | IPv6Network

# Addresses of protocols, local services and metadata servers of clouds, which `is_global` of Python
# 3.11 accepts.
_DENIED = tuple(
    IPv4Network(network)
    for network in (
        "0.0.0.0/8",
        "100.64.0.0/10",  # between a provider and its customers
        "168.63.129.16/32",  # Azure's host
        "192.0.0.0/24",
        "192.88.99.0/24",  # 6to4 relays
        "224.0.0.0/4",
        "240.0.0.0/4",
    )
)
# All assigned unicast addresses of IPv6. The rest is for translators, local and future networks.
_GLOBAL_UNICAST = IPv6Network("2000::/3")
_NAT64 = IPv6Network("64:ff9b::/96")

_PREFIX_LENS = (32, 40, 48, 56, 64, 96)
"""Lengths of a translator's prefix, which an IPv4 address follows (RFC 6052)."""
_WELL_KNOWN = (IPv4Address("192.0.0.170"), IPv4Address("192.0.0.171"))
"""The addresses of `ipv4only.arpa`, which no host has (RFC 7050)."""


def may_dial(
    address: Address, allowed: Sequence[Network] = (), translators: Sequence[IPv6Network] = ()
) -> bool:
    """Return whether `address` is on the public internet, or in a network that is `allowed`.

    `translators` are the prefixes of the local network's NAT64.
    """
    if any(address in network for network in allowed if network.version == address.version):
        return True
    inner = _inside(address, translators)
    return _is_public(address) and all(may_dial(i, allowed) for i in inner)


def may_be_translated(address: Address) -> bool:
    """Return whether the policy for `address` depends on the local network's translators."""
    return (
        isinstance(address, IPv6Address)
        and address in _GLOBAL_UNICAST
        and not may_dial(_carried(address, 96)[0])
    )


def translators_of(address: IPv6Address) -> list[IPv6Network]:
    """Return the possible translators' prefixes in this address of `ipv4only.arpa`.

    There may be several, and it is safe to treat all of them as prefixes.
    """
    return [
        IPv6Network((address, length), strict=False)
        for length in _PREFIX_LENS
        if _carried(address, length)[0] in _WELL_KNOWN
    ]


def parse_address(text: str) -> Address:
    """Parse an address without its zone. Raises ValueError."""
    return ip_address(text.partition("%")[0])


def is_loopback_host(host: str) -> bool:
    """Return whether a name or an address always leads to this machine (RFC 6761)."""
    try:
        address = parse_address(host)
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return (mapped or address).is_loopback


def _is_public(address: Address) -> bool:
    if isinstance(address, IPv4Address):
        return address.is_global and not any(address in network for network in _DENIED)
    # The policy for a mapped or translated address is the policy for the address inside, which is
    # checked separately.
    if address.ipv4_mapped is not None or address in _NAT64:
        return True
    return address.is_global and address in _GLOBAL_UNICAST


def _inside(address: Address, translators: Sequence[IPv6Network]) -> list[IPv4Address]:
    """Return the IPv4 addresses that packets to `address` may reach."""
    if isinstance(address, IPv4Address):
        return []
    inner = [address.ipv4_mapped, address.sixtofour, *(address.teredo or ())]
    for network in (_NAT64, *translators):
        if address in network:
            inner.append(_carried(address, network.prefixlen)[0])
    for length in _PREFIX_LENS[:-1]:
        carried, rest = _carried(address, length)
        # Any network may have such a prefix. Addresses of hosts rarely end in zeros.
        if rest == 0:
            inner.append(carried)
    # ISATAP: the lower half is 0:5efe or 200:5efe before the address (RFC 5214).
    if int(address) >> 32 & 0xFCFFFFFF == 0x5EFE:
        inner.append(_carried(address, 96)[0])
    return [carried for carried in inner if carried is not None]


def _carried(address: IPv6Address, prefix_len: int) -> tuple[IPv4Address, int]:
    """Return the IPv4 address after a translator's prefix, and the bits that must be zero."""
    number = int(address)
    if prefix_len == 96:
        return IPv4Address(number & 0xFFFFFFFF), 0
    # The octet in the middle is not part of the address (RFC 6052, section 2.2).
    upper, octet, lower = number >> 64, number >> 56 & 0xFF, number & (1 << 56) - 1
    bits, shift = upper << 56 | lower, 88 - prefix_len
    return IPv4Address(bits >> shift & 0xFFFFFFFF), octet | bits & (1 << shift) - 1
