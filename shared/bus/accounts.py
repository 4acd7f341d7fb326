"""Accounts of a nats-server: the part of its configuration with logins and permissions."""

import json
from collections.abc import Iterable, Iterator, Mapping

from shared.protocol.names import TENANT_MARK
from shared.protocol.permissions import (
    ACCOUNT,
    SERVER_SETTINGS,
    TENANT_SUBJECTS,
    Permissions,
    TenantSubject,
    permissions_of,
    permissions_of_tenant,
)

# Limit on the subscriptions of one connection of a tenant. Each takes about a kilobyte of the
# server's memory. The server closes a connection that exceeds the limit.
MAX_SUBSCRIPTIONS = 4096

# Exports a service with the server's storage settings, which ordinary accounts cannot read.
_SYSTEM = f"""\
system_account: SYS
accounts {{
  SYS {{ exports: [{{ service: "{SERVER_SETTINGS}", response_type: stream }}] }}
"""
_SETTINGS_IMPORT = f'{{ service: {{ account: SYS, subject: "{SERVER_SETTINGS}" }} }}'

OPEN_ACCOUNTS = f"""\
{_SYSTEM}  {ACCOUNT} {{
    jetstream: enabled
    users: [{{ user: anyone, password: anyone }}]
    imports: [{_SETTINGS_IMPORT}]
  }}
}}
no_auth_user: anyone
"""
"""Accounts without keys, for servers of tests and benchmarks on the loopback address."""


def accounts_config(
    workers: Mapping[str, str], tenants: Mapping[str, str], tenant_connections: int
) -> str:
    """Return the configuration for the public keys of identities and of tenants.

    It contains no secret, because the server needs only the public part of each key. The clients of
    one tenant may have `tenant_connections` connections at the same time.
    """
    exports = [_export(subject) for subject in TENANT_SUBJECTS]
    limits = f"max_connections: {tenant_connections}, max_subscriptions: {MAX_SUBSCRIPTIONS}"
    users = [_user(key, permissions_of(name), name) for name, key in workers.items()]
    return "\n".join(
        (
            f"# Written by `pagemill keys`, which replaces this file.\n{_SYSTEM}  {ACCOUNT} {{",
            "    jetstream: enabled",
            *_list("users", users),
            f"    imports: [{_SETTINGS_IMPORT}]",
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
    yield from _list("users", [_user(key, permissions_of_tenant(), "")])
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


def _user(key: str, permissions: Permissions, name: str) -> str:
    publish = f"allow: {_subjects(permissions.publish)}"
    if permissions.never_publish:
        publish += f", deny: {_subjects(permissions.never_publish)}"
    subscribe = f"allow: {_subjects(permissions.subscribe)}"
    allowed = f"permissions: {{ publish: {{ {publish} }}, subscribe: {{ {subscribe} }} }}"
    return f"{{ nkey: {key}, {allowed} }}" + (f"  # {name}" if name else "")


def _list(name: str, entries: Iterable[str]) -> Iterator[str]:
    yield f"    {name}: ["
    yield from (f"      {entry}" for entry in entries)
    yield "    ]"


def _subjects(names: Iterable[str]) -> str:
    return f"[{', '.join(map(_quoted, names))}]"


def _quoted(text: str) -> str:
    return json.dumps(text)
