"""Packages of npm for tests, with the certificate authorities that the system trusts."""

import os
import re
import shutil
import ssl
import subprocess
from pathlib import Path

import pytest

needs_npm = pytest.mark.skipif(shutil.which("npm") is None, reason="needs node and npm")

# Bundles of Debian and Fedora. Python names none where the authorities are in a folder.
BUNDLES = (
    ssl.get_default_verify_paths().cafile,
    "/etc/ssl/certs/ca-certificates.crt",
    "/etc/pki/tls/certs/ca-bundle.crt",
)


def run(*command: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, env=os.environ | env, capture_output=True, text=True, timeout=100, check=False
    )


def install(folder: Path) -> None:
    """Install what package-lock.json in `folder` names. Skip the test without a registry."""
    quiet = ("--no-audit", "--no-fund", "--fetch-retries=0")
    done = run("npm", "ci", "--prefix", str(folder), *quiet, **_certificates())
    if unreached := re.search(r"request to \S+ failed, reason: .*", done.stderr):
        pytest.skip(f"npm could not reach its registry: {unreached[0]}")
    assert done.returncode == 0, done.stderr


def _certificates() -> dict[str, str]:
    """Return the variable by which Node trusts more than its own list of authorities."""
    name = "NODE_EXTRA_CA_CERTS"
    bundles = (path for path in BUNDLES if path is not None and Path(path).is_file())
    bundle = os.environ.get(name) or next(bundles, None)
    return {} if bundle is None else {name: bundle}
