"""Model on a hub: the list of files that serving needs, and the errors of requests to the hub.

The hub's address and the token are configured as for the library: with `HF_ENDPOINT`, and with
`HF_TOKEN` or `hf auth login`.
"""

import contextlib
import errno
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx2
from huggingface_hub import HfApi, ModelInfo, constants
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
    RevisionResolutionError,
)

from shared.errors import AccessDenied, ConfigError, DiskFull, NotFound, PagemillError, Unavailable
from shared.models.image_folder import MODEL_INDEX
from shared.vision.quantized import SETTINGS_FILES
from shared.vision.weight_files import INDEX

# Files of a repository with other names are never written, so no name can lead out of a folder.
WEIGHTS = re.compile(r"model(-\d+-of-\d+)?\.safetensors")
# In repositories with the format of diffusers. Each part has a folder.
PART_FILE = re.compile(r"[A-Za-z0-9_]+/([^/]+)")
PART_WEIGHTS = re.compile(r"(diffusion_pytorch_)?model(-\d+-of-\d+)?\.safetensors")
POOLING = re.compile(r"\d_Pooling/config\.json")
SMALL_FILES = frozenset(
    {
        "added_tokens.json",
        "chat_template.jinja",
        "chat_template.json",
        "config.json",
        "generation_config.json",
        "merges.txt",
        "modules.json",
        INDEX,
        "preprocessor_config.json",
        "processor_config.json",
        "special_tokens_map.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "video_preprocessor_config.json",
        "vocab.json",
        "vocab.txt",
        *SETTINGS_FILES,
    }
)
DESCRIPTIONS = frozenset({"config.json", "modules.json", INDEX, *SETTINGS_FILES})
PART_DESCRIPTIONS = DESCRIPTIONS | {
    f"diffusion_pytorch_{INDEX}",
    "scheduler_config.json",
    "tokenizer_config.json",
}
PART_SMALL_FILES = SMALL_FILES | PART_DESCRIPTIONS | {"spiece.model", "tokenizer.model"}
# Digests become names of files.
DIGEST = re.compile("[0-9a-f]{40}|[0-9a-f]{64}")
# Errors of the library for answers that are not a hub's, such as JSON of another shape.
NO_HUB = (
    AttributeError,
    LookupError,
    OverflowError,
    RecursionError,
    TypeError,
    ValueError,
)
CONTINUES = ": it continues where it stopped"
REPORTED = (
    HfHubHTTPError,
    HFValidationError,
    OSError,
    RevisionResolutionError,
    httpx2.HTTPError,
    httpx2.InvalidURL,
)
# No file system has larger files.
MAX_FILE_BYTES = 2**63 - 1
REQUIRED = ("config.json", "tokenizer.json")


@dataclass(frozen=True, slots=True)
class RemoteFile:
    name: str
    size: int
    digest: str
    """SHA-256 of a large file, or git's object id of a small one, in hexadecimal digits."""


@dataclass(frozen=True, slots=True)
class RemoteModel:
    name: str
    revision: str | None
    commit: str
    files: list[RemoteFile]

    @property
    def has_parts(self) -> bool:
        """Whether the repository has the format of diffusers."""
        return any(file.name == MODEL_INDEX for file in self.files)

    @property
    def descriptions(self) -> list[RemoteFile]:
        """Files that decide whether the model is served."""
        return [file for file in self.files if is_description(file.name, self.has_parts)]

    @property
    def size(self) -> int:
        return sum(file.size for file in self.files)


def is_needed(name: str, has_parts: bool) -> bool:
    """Return whether serving needs a file of this name.

    `has_parts` is whether the repository has the format of diffusers.
    """
    if has_parts:
        part = PART_FILE.fullmatch(name)
        return name == MODEL_INDEX or (
            part is not None
            and (part[1] in PART_SMALL_FILES or PART_WEIGHTS.fullmatch(part[1]) is not None)
        )
    forms = (WEIGHTS, POOLING)
    return name in SMALL_FILES or any(form.fullmatch(name) for form in forms)


def is_description(name: str, has_parts: bool) -> bool:
    """Return whether a needed file of this name decides whether a model is served."""
    if has_parts:
        return name == MODEL_INDEX or name.rpartition("/")[2] in PART_DESCRIPTIONS
    return name in DESCRIPTIONS or POOLING.fullmatch(name) is not None


def find_model(name: str, revision: str | None) -> RemoteModel:
    """Request the list of a model's files from the hub. Raises PagemillError."""
    with translated(name, revision), calling_library():
        info = HfApi().model_info(name, revision=revision, files_metadata=True)
    return _read_info(name, revision, info)


def _read_info(name: str, revision: str | None, info: ModelInfo) -> RemoteModel:
    # The library does not check the types in the hub's answer.
    siblings = info.siblings or []
    has_parts = MODEL_INDEX in [_checked_name(sibling.rfilename) for sibling in siblings]
    files = [
        RemoteFile(
            sibling.rfilename,
            _checked_size(sibling.rfilename, sibling.size),
            sibling.lfs.sha256 if sibling.lfs is not None else sibling.blob_id or "",
        )
        for sibling in siblings
        if is_needed(sibling.rfilename, has_parts)
    ]
    names = {file.name for file in files}
    missing = []
    if not has_parts:
        missing = [required for required in REQUIRED if required not in names]
        missing += [] if any(map(WEIGHTS.fullmatch, names)) else ["model*.safetensors"]
    if missing or info.sha is None:
        raise ConfigError(
            f"{name} has no {' and no '.join(missing)} on {constants.ENDPOINT}: only models in"
            " Hugging Face format with safetensors are served",
            field="name",
        )
    for digest in (info.sha, *(file.digest for file in files)):
        if not (isinstance(digest, str) and DIGEST.fullmatch(digest)):
            raise _no_hub(f"it has no checksum for a file of {name}")
    # Small files first: if downloads fail, they fail at once.
    return RemoteModel(name, revision, info.sha, sorted(files, key=lambda file: file.size))


def _checked_name(name: object) -> str:
    if not isinstance(name, str):
        raise _no_hub(f"the name of a file is {name!r:.40}")
    return name


def _checked_size(file: str, size: object) -> int:
    if not isinstance(size, int) or isinstance(size, bool) or not 0 <= size <= MAX_FILE_BYTES:
        raise _no_hub(f"the size of {file} is {size!r:.40}, not 0 to {MAX_FILE_BYTES} bytes")
    return size


@contextlib.contextmanager
def calling_library() -> Iterator[None]:
    """Translate the library's errors for answers that are not a hub's into Unavailable.

    Only calls of the library belong into the body: in other code, the same errors are bugs.
    """
    try:
        yield
    except REPORTED:
        raise
    except NO_HUB as error:
        raise _no_hub(f"{type(error).__name__}: {error}") from error


def _no_hub(reason: str, *, has_begun: bool = False) -> Unavailable:
    rest = CONTINUES if has_begun else ""
    return Unavailable(
        f"{constants.ENDPOINT} cannot be reached, or is not a hub ({reason}); check"
        f" the network, the proxy and HF_ENDPOINT, then run the command again{rest}"
    )


@contextlib.contextmanager
def translated(name: str, revision: str | None, target: Path | None = None) -> Iterator[None]:
    """Translate errors of the library and of the disk into PagemillErrors that name the remedy."""
    try:
        yield
    except REPORTED as error:
        raise _translate(error, name, revision, target) from error


def _translate(
    error: Exception, name: str, revision: str | None, target: Path | None
) -> PagemillError:
    where = constants.ENDPOINT
    match error:
        case GatedRepoError():
            return AccessDenied(
                f"{name} is gated: accept its conditions at {where}/{name}, then set HF_TOKEN to a"
                " token of that account, or run `hf auth login`",
                field="name",
            )
        case RepositoryNotFoundError():
            return NotFound(
                f"{where} has no model {name}, or it is private: check the name, or set HF_TOKEN to"
                " a token that may read it",
                field="name",
            )
        case RevisionNotFoundError():
            return NotFound(
                f"{name} has no revision {revision or 'main'!r}: name a branch, a tag or a commit",
                field="revision",
            )
        # Raised by the library if the hub does not answer while it links the files.
        case LocalEntryNotFoundError():
            return Unavailable(f"{where} does not answer any more; run the command again")
        case EntryNotFoundError():
            return NotFound(f"{where} lists a file of {name} that it does not have", field="name")
        case HFValidationError():
            return NotFound(f"{name!r} is not a name such as org/name", field="name")
        case HfHubHTTPError():
            return _translate_status(error.response.status_code, name, target)
        case OfflineModeIsEnabled():
            return Unavailable("HF_HUB_OFFLINE is set: unset it to download")
        case OSError():
            return _translate_disk(error, name, target)
        case _:
            reason = f"{type(error).__name__}: {error}"
            return _no_hub(reason, has_begun=target is not None)


def _translate_disk(error: Exception, name: str, target: Path | None) -> PagemillError:
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return DiskFull(
            f"the disk of {target} is full: free some space and run the command again{CONTINUES}"
        )
    return Unavailable(f"{name} cannot be stored in {target}: {error}")


def _translate_status(status: int, name: str, target: Path | None) -> PagemillError:
    if status in (401, 403):
        return AccessDenied(
            f"{constants.ENDPOINT} refuses {name} with status {status}: set HF_TOKEN to a token"
            " that may read it, or run `hf auth login`",
            field="name",
        )
    rest = "" if target is None else CONTINUES
    return Unavailable(
        f"{constants.ENDPOINT} answers with status {status}; run the command again later{rest}"
    )
