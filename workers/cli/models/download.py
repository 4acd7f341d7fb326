"""Download of a model into the hub's cache, or into a folder.

The library deletes a partial file when a transfer ends early, and checks only the size of complete
ones. So the transfers are made here, with the library's HTTP client: a partial file stays and is
continued, and a file gets its name only if it has the checksum that the hub reports. The library
then links the checked files into its cache.
"""

import contextlib
import fcntl
import hashlib
import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import IO, Protocol

import httpx2
from huggingface_hub import HfApi, constants, get_session, get_token, hf_hub_download, hf_hub_url
from huggingface_hub.errors import HfHubHTTPError
from huggingface_hub.file_download import repo_folder_name
from huggingface_hub.utils import hf_raise_for_status  # type: ignore[attr-defined]
from huggingface_hub.utils import logging as hub_logging

from shared.errors import ConfigError, CorruptDownload, DiskFull, Unavailable
from workers.cli.models.hub import RemoteFile, RemoteModel, calling_library, translated
from workers.cli.models.reports import check_folders

PARTIAL = ".incomplete"
PARTIAL_CONTENT = 206
# Statuses below 500 after which another attempt may succeed.
TRY_LATER = (408, 429)
# Pauses after answers such as 503, and after connections that break.
RETRY_PAUSES_S = (1.0, 2.0, 4.0, 8.0)
# Bytes that are left free, for the file system itself.
SPARE_BYTES = 64 * 2**20
CHUNK_BYTES = 1 << 20
SHA256_LEN = 64


class Progress(Protocol):
    """Receiver of the progress of a download."""

    def begin(self, name: str, size: int, done: int) -> None: ...

    def advance(self, num_bytes: int) -> None: ...

    def say(self, text: str) -> None: ...


def download(model: RemoteModel, folder: Path | None, progress: Progress) -> Path:
    """Download a model into `folder`, by default into the hub's cache, and return its folder.

    Weights are downloaded only if the engine accepts the small files of the model. Raises
    PagemillError. Partial files stay, and the next call continues them.
    """
    # Warnings of the library would break the display of the progress.
    hub_logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    cache = Path(constants.HF_HUB_CACHE)
    store = folder or cache / repo_folder_name(repo_id=model.name, repo_type="model") / "blobs"
    with translated(model.name, model.revision, store):
        store.mkdir(parents=True, exist_ok=True)
        targets = {
            file: store / (file.digest if folder is None else file.name) for file in model.files
        }
        _check_links(store, targets)
        missing = [file for file in model.files if not _has(targets[file], file, folder)]
        check_disk(store, missing, targets)
        for file in model.descriptions:
            if file in missing:
                missing.remove(file)
                _fetch(model, file, targets[file], progress)
        if missing:
            progress.say(f"checking whether {model.name} can be served")
            _check_served(model, {file.name: targets[file] for file in model.descriptions})
        for file in missing:
            _fetch(model, file, targets[file], progress)
        return folder or _link(model, cache)


def check_disk(store: Path, files: list[RemoteFile], targets: dict[RemoteFile, Path]) -> None:
    """Raise DiskFull, with needed and free bytes, if `files` do not fit."""
    partial = sum(_size(_partial_of(targets[file])) for file in files)
    needed = max(0, sum(file.size for file in files) - partial)
    free = shutil.disk_usage(store).free
    if files and needed + SPARE_BYTES > free:
        raise DiskFull.of(
            str(store),
            free,
            needed + SPARE_BYTES,
            "delete files, or choose another disk with --dir or HF_HOME",
        )


def _check_links(store: Path, targets: dict[RemoteFile, Path]) -> None:
    """Raise ConfigError if a folder of the store is a link that leads out of it."""
    for target in targets.values():
        if not Path(os.path.realpath(target.parent)).is_relative_to(os.path.realpath(store)):
            raise ConfigError(
                f"{target.parent} is a link that leads out of {store}: remove it", field="dir"
            )


def _check_served(model: RemoteModel, name_to_file: dict[str, Path]) -> None:
    """Raise ConfigError for a model that the engine refuses because of these files."""
    with tempfile.TemporaryDirectory() as folder:
        for name, file in name_to_file.items():
            link = Path(folder) / name
            link.parent.mkdir(exist_ok=True)
            link.symlink_to(file.absolute())
        (report,) = check_folders([Path(folder)], have_weights=False)
    if report.reason is not None:
        raise ConfigError(
            f"{model.name} is refused, and its weights were not downloaded: {report.reason}",
            field="name",
        )


def _link(model: RemoteModel, cache: Path) -> Path:
    """Make the library link the files into the folder of their commit, and return the folder."""
    blobs = cache / repo_folder_name(repo_id=model.name, repo_type="model") / "blobs"
    folder = Path()
    for file in model.files:
        with calling_library():
            linked = Path(hf_hub_download(model.name, file.name, revision=model.commit))
        # The library requests the checksum again, and downloads the file itself if it differs.
        if linked.is_symlink() and not linked.samefile(blobs / file.digest):
            raise CorruptDownload(
                f"{file.name} of {model.name}: the hub reports two checksums", field=file.name
            )
        folder = linked.parents[file.name.count("/")]
    # The revision is recorded last, so that its name never leads to an incomplete folder.
    with calling_library():
        resolved = HfApi().resolve_revision(model.name, revision=model.revision, cache_dir=cache)
    if resolved.resolved != model.commit:
        raise Unavailable(f"{model.name} has changed during the download; run the command again")
    return folder


def _has(target: Path, file: RemoteFile, folder: Path | None) -> bool:
    """Return whether a file exists. In a folder, its content may be of another revision."""
    if _size(target) != file.size or not target.is_file():
        return False
    return folder is None or _digest(target, file) == file.digest


def _fetch(model: RemoteModel, file: RemoteFile, target: Path, progress: Progress) -> None:
    """Download one file, or the rest of it, and check it."""
    partial = _partial_of(target)
    partial.parent.mkdir(exist_ok=True)
    # A link in its place would lead the bytes to another file.
    descriptor = os.open(partial, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o644)
    with os.fdopen(descriptor, "ab") as out:
        try:
            fcntl.flock(out, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise Unavailable(
                f"another process is downloading {file.name} of {model.name}; wait until it ends"
            ) from error
        _receive(model, file, out, progress)
        out.flush()
        os.fsync(out.fileno())
        progress.say(f"checking {file.name}")
        if _digest(partial, file) != file.digest:
            partial.unlink()
            raise CorruptDownload(
                f"{file.name} of {model.name} does not have the checksum that the hub reports, and"
                " was deleted: run the command again, and check the proxy if it fails again",
                field=file.name,
            )
        partial.rename(target)


def _receive(model: RemoteModel, file: RemoteFile, out: IO[bytes], progress: Progress) -> None:
    """Append the rest of a file to `out`, with retries of temporary failures."""
    url = hf_hub_url(model.name, file.name, revision=model.commit)
    pauses = list(RETRY_PAUSES_S)
    while (done := out.seek(0, os.SEEK_END)) != file.size:
        if done > file.size:
            out.truncate(0)
            continue
        progress.begin(file.name, file.size, done)
        try:
            _transfer(url, file, out, done, progress)
        except (HfHubHTTPError, httpx2.TransportError) as error:
            out.flush()
            if out.tell() > done:
                pauses = list(RETRY_PAUSES_S)
            if not pauses or _is_final(error):
                raise
            progress.say(f"{file.name}: {_reason_of(error)}; trying again in {pauses[0]:.0f} s")
            time.sleep(pauses.pop(0))


def _transfer(url: str, file: RemoteFile, out: IO[bytes], done: int, progress: Progress) -> None:
    """Append the rest of a file to `out`, which has `done` bytes of it.

    Raises TransportError if the rest ends early, and CorruptDownload if it is too long.
    """
    # A compressed answer could not be continued at a byte of the file.
    headers = {"Accept-Encoding": "identity"}
    if token := get_token():
        headers["Authorization"] = f"Bearer {token}"
    if done:
        headers["Range"] = f"bytes={done}-"
    timeout_s = constants.HF_HUB_DOWNLOAD_TIMEOUT
    with contextlib.ExitStack() as stack:
        with calling_library():
            # The client drops the token at a redirect to another host.
            transfer = get_session().stream("GET", url, headers=headers, timeout=timeout_s)
            response = stack.enter_context(transfer)
            hf_raise_for_status(response)
        if done and response.status_code != PARTIAL_CONTENT:
            out.truncate(0)
            progress.advance(-done)
            done = 0
        for chunk in response.iter_raw():
            done += len(chunk)
            if done > file.size:
                out.truncate(0)
                raise CorruptDownload(
                    f"{file.name} is longer than the {file.size} bytes that the hub reports, and"
                    " was deleted: run the command again, and check the proxy if it fails again",
                    field=file.name,
                )
            out.write(chunk)
            progress.advance(len(chunk))
    if done < file.size:
        raise httpx2.RemoteProtocolError(f"the answer ends after {done} of {file.size} bytes")


def _is_final(error: Exception) -> bool:
    if not isinstance(error, HfHubHTTPError):
        return False
    return error.response.status_code < 500 and error.response.status_code not in TRY_LATER


def _reason_of(error: Exception) -> str:
    if isinstance(error, HfHubHTTPError):
        return f"the hub answers with status {error.response.status_code}"
    return f"{type(error).__name__} {error}".strip()


def _digest(path: Path, file: RemoteFile) -> str:
    if len(file.digest) == SHA256_LEN:
        digest = hashlib.sha256()
    else:
        # Git's object id of a file.
        digest = hashlib.sha1(usedforsecurity=False)
        digest.update(f"blob {file.size}\0".encode())
    with path.open("rb") as read:
        while chunk := read.read(CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def _partial_of(target: Path) -> Path:
    return target.with_name(target.name + PARTIAL)


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0
