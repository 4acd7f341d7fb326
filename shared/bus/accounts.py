"""Accounts of a nats-server: the part of its configuration with logins and permissions."""

import json
from collections.abc import Iterable, Iterator, Mapping

from shared.config.schema import NatsConfig
from shared.protocol import subjects
from shared.protocol.names import TENANT_MARK
from shared.protocol.permissions import (
    ACCOUNT,
    SERVER_ACCOUNTS,
    SERVER_LIMITS,
    SERVER_SETTINGS,
    TENANT_SUBJECTS,
    Permissions,
    TenantSubject,
    permissions_of,
    permissions_of_tenant,
)

# Limit on the subscriptions of one connection of a tenant. Each takes about a kilobyte of the
# server's memory. The server refuses further ones with an error, for which nats-py disconnects. It
# has no limit on the subscriptions of an account.
MAX_SUBSCRIPTIONS = 4096

# Exports services with the server's settings, which ordinary accounts cannot read.
_SERVICES = (SERVER_SETTINGS, SERVER_LIMITS, SERVER_ACCOUNTS)
_EXPORTS = ", ".join(f'{{ service: "{name}", response_type: stream }}' for name in _SERVICES)
_SYSTEM = f"""\
system_account: SYS
accounts {{
  SYS {{ exports: [{_EXPORTS}] }}
"""
_SETTINGS_IMPORTS = ", ".join(
    f'{{ service: {{ account: SYS, subject: "{name}" }} }}' for name in _SERVICES
)

OPEN_ACCOUNTS = f"""\
{_SYSTEM}  {ACCOUNT} {{
    jetstream: enabled
    users: [{{ user: anyone, password: anyone }}]
    imports: [{_SETTINGS_IMPORTS}]
  }}
}}
no_auth_user: anyone
"""
"""Accounts without keys, for servers of tests and benchmarks on the loopback address."""


def accounts_config(
    workers: Mapping[str, str], tenants: Mapping[str, str], settings: NatsConfig
) -> str:
    """Return the configuration for the public keys of identities and of tenants.

    It contains no secret, because the server needs only the public part of each key. `settings`
    has the limits of each tenant's account.
    """
    exports = [_export(subject) for subject in TENANT_SUBJECTS]
    limits = (
        f"max_connections: {settings.tenant_connections}, max_subscriptions: {MAX_SUBSCRIPTIONS}"
        f", max_payload: {settings.tenant_payload_mib}MB"
    )
    users = [
        _user(key, permissions_of(name), name, settings.domain) for name, key in workers.items()
    ]
    return "\n".join(
        (
            f"# Written by `pagemill keys`, which replaces this file.\n{_SYSTEM}  {ACCOUNT} {{",
            "    jetstream: enabled",
            *_list("users", users),
            f"    imports: [{_SETTINGS_IMPORTS}]",
            *_list("exports", exports),
            "  }",
            *(line for name, key in tenants.items() for line in _tenant(name, key, limits)),
            "}\n",
        )
    )


def _tenant(name: str, key: str, limits: str) -> Iterator[str]:
    """Yield the account of a tenant. It may import only subjects with its own name."""
    account = f"{TENANT_MARK}{name}"
    yield f"  {_quoted(account)} {{"
    yield from _list("users", [_user(key, permissions_of_tenant(), "", None)])
    yield from _list("imports", [_import(subject, account) for subject in TENANT_SUBJECTS])
    yield f"    limits: {{ {limits} }}"
    yield "  }"


def _export(subject: TenantSubject) -> str:
    kind = "stream" if subject.is_stream else "service"
    position = subject.tenant_position
    return f"{{ {kind}: {_quoted(subject.exported)}, account_token_position: {position} }}"


def _import(subject: TenantSubject, account: str) -> str:
    kind = "stream" if subject.is_stream else "service"
    source = f"{{ account: {ACCOUNT}, subject: {_quoted(subject.mapped.format(account))} }}"
    return f"{{ {kind}: {source}, to: {_quoted(subject.own)} }}"


def _user(key: str, permissions: Permissions, name: str, domain: str | None) -> str:
    allowed, denied = (
        # The server also checks the subject that it maps one of a domain to.
        [*dict.fromkeys(subjects.in_domain(s, d) for d in (None, domain) for s in listed)]
        for listed in (permissions.publish, permissions.never_publish)
    )
    publish = f"allow: {_subjects(allowed)}"
    if denied:
        publish += f", deny: {_subjects(denied)}"
    subscribe = f"allow: {_subjects(permissions.subscribe)}"
    permitted = f"permissions: {{ publish: {{ {publish} }}, subscribe: {{ {subscribe} }} }}"
    return f"{{ nkey: {key}, {permitted} }}" + (f"  # {name}" if name else "")


def _list(name: str, entries: Iterable[str]) -> Iterator[str]:
    yield f"    {name}: ["
    yield from (f"      {entry}" for entry in entries)
    yield "    ]"


def _subjects(names: Iterable[str]) -> str:
    return f"[{', '.join(map(_quoted, names))}]"


def _quoted(text: str) -> str:
    return json.dumps(text)
