"""IP policy: the addresses that may be dialled for a client, of images and of tools. Pure.

The policy looks at the address of the connection, never at a name. Both addresses are checked where
one carries another inside (mapped, translated, tunnelled).
"""

from collections.abc import Sequence
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address

Address = IPv4Address | IPv6Address
Network = IPv4Network | IPv6Network

# `is_global` of Python 3.11 accepts these addresses, which belong to protocols, local services and
# metadata servers of clouds.
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
# All assigned unicast addresses of IPv6; the rest is for translators, local and future networks.
_GLOBAL_UNICAST = IPv6Network("2000::/3")
_NAT64 = IPv6Network("64:ff9b::/96")


def may_dial(address: Address, allowed: Sequence[Network] = ()) -> bool:
    """Return whether `address` is on the public internet, or in a network that is `allowed`."""
    if any(address in network for network in allowed if network.version == address.version):
        return True
    inner = _inside(address)
    return _is_public(address) and all(may_dial(i, allowed) for i in inner)


def parse_address(text: str) -> Address:
    """Parse an address without its zone. Raises ValueError."""
    return ip_address(text.partition("%")[0])


def is_loopback_host(host: str) -> bool:
    """Return whether a name or an address can lead to this machine alone (RFC 6761)."""
    try:
        address = parse_address(host)
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return (mapped or address).is_loopback


def _is_public(address: Address) -> bool:
    if isinstance(address, IPv4Address):
        return address.is_global and not any(address in network for network in _DENIED)
    # A mapped or translated address is as public as the one inside, which is checked separately.
    if address.ipv4_mapped is not None or address in _NAT64:
        return True
    return address.is_global and address in _GLOBAL_UNICAST


def _inside(address: Address) -> list[IPv4Address]:
    """Return the IPv4 addresses that packets to `address` may end at."""
    if isinstance(address, IPv4Address):
        return []
    inner = [address.ipv4_mapped, address.sixtofour, *(address.teredo or ())]
    if address in _NAT64:
        inner.append(IPv4Address(int(address) & 0xFFFFFFFF))
    return [carried for carried in inner if carried is not None]
