"""Keys of roles and tenants in Secrets of Kubernetes, for the chart's job."""

import base64
import secrets
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec

from shared.config.schema import NatsConfig
from shared.errors import InvalidRequest, Unavailable
from shared.protocol.names import NAME_RULE, is_name
from workers.keyring import ACCOUNTS_FILE, Keyring
from workers.kubernetes import ABSENT, ApiServer

ALL = "pagemill-keys"
"""Secret with all keys. The other Secrets are written from it."""
ACCOUNTS = "pagemill-accounts"
"""Secret of the brokers: the public keys, and their common password."""
TENANTS = "pagemill-tenants"
PASSWORD = "nats_password"
_TENANT = "tenant."
"""Beginning of a tenant's key in ALL. Keys of a Secret have no slash."""


class _Secret(msgspec.Struct):
    data: dict[str, bytes] = {}


class SecretApi(ApiServer):
    """Reads and writes Secrets of one namespace."""

    field = "keys secrets"
    needed_right = "the Role `pagemill-keys` of the chart"

    async def read(self, name: str) -> dict[str, bytes]:
        """Return the files in a Secret; none if there is no such Secret."""
        about, path = self._place("get", name)
        answer = await self._send("GET", path, about)
        if answer.status_code == ABSENT:
            return {}
        if answer.is_error:
            raise Unavailable(f"{about}: HTTP status {answer.status_code}")
        return msgspec.json.decode(answer.content, type=_Secret).data

    async def write(self, name: str, files: Mapping[str, bytes]) -> None:
        """Create or replace a Secret with these files."""
        about, path = self._place("patch", name)
        body = {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": {"name": name, "labels": {"app.kubernetes.io/name": "pagemill"}},
            "data": {file: base64.b64encode(data).decode() for file, data in files.items()},
        }
        path += "?fieldManager=pagemill&force=true"
        answer = await self._send("PATCH", path, about, body, "application/apply-patch+yaml")
        if answer.is_error:
            raise Unavailable(f"{about}: HTTP status {answer.status_code}")

    def _place(self, verb: str, name: str) -> tuple[str, str]:
        about = f"{verb} secrets {name!r} in namespace {self.namespace!r}"
        return about, f"/api/v1/namespaces/{self.namespace}/secrets/{name}"


async def write_secrets(api: SecretApi, tenants: Iterable[str], settings: NatsConfig) -> list[str]:
    """Create missing keys, write all Secrets, and return the names of the new keys.

    A tenant that is not in `tenants` loses its key. Raises InvalidRequest for a wrong name.
    """
    for name in tenants:
        if not is_name(name):
            raise InvalidRequest(f"tenant {name!r} {NAME_RULE}", field="tenant")
    stored = await api.read(ALL)
    with tempfile.TemporaryDirectory() as folder:
        keyring = Keyring(Path(folder), settings)
        files = {name: keyring.file_of_tenant(name) for name in tenants}
        places = {f"{_TENANT}{name}.nk": file for name, file in files.items()}
        for name, data in stored.items():
            if not name.startswith(_TENANT):
                places[name] = keyring.folder / name
            if name in places:
                places[name].parent.mkdir(parents=True, exist_ok=True)
                places[name].write_bytes(data)
        created = keyring.complete(tenants)
        roles = {file.stem: file.read_bytes() for file in keyring.folder.glob("*.nk")}
        keys = {name: file.read_bytes() for name, file in files.items()}
        accounts = keyring.accounts_file.read_bytes()
    password = stored.get(PASSWORD) or f"pm{secrets.token_hex(24)}".encode()
    # All keys are stored before any of them is used, and the brokers are the last to learn of them.
    everything = {f"{name}.nk": data for name, data in roles.items()}
    everything |= {f"{_TENANT}{name}.nk": data for name, data in keys.items()}
    await api.write(ALL, everything | {PASSWORD: password})
    for name, data in roles.items():
        await api.write(f"pagemill-key-{name}", {f"{name}.nk": data})
    await api.write(TENANTS, {f"{name}.nk": data for name, data in keys.items()})
    await api.write(ACCOUNTS, {ACCOUNTS_FILE: accounts, PASSWORD: password})
    return created
