"""Names that several tenants may use, in commands of operators."""

from collections.abc import Iterable

from shared.errors import InvalidRequest
from shared.protocol.names import scoped_id


def only_tenant(name: str, tenants: Iterable[str], kind: str) -> str | None:
    """Return the only tenant that uses a name; None without one.

    `kind` is the noun for what has the name. Raises InvalidRequest for several tenants.
    """
    users = sorted(set(tenants))
    if len(users) > 1:
        scoped = ", ".join(scoped_id(name, tenant) for tenant in users)
        raise InvalidRequest(
            f"several tenants have a {kind} {name}: name one of {scoped}", field=f"{kind}_id"
        )
    return users[0] if users else None
