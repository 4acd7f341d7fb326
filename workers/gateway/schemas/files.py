"""Forms and response bodies of `/v1/files`. Pure."""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct

from shared.protocol.batch_orders import Life

BATCH, BATCH_OUTPUT = "batch", "batch_output"


class FileForm(Struct, frozen=True, forbid_unknown_fields=True):
    """The fields of the form, except for `file`."""

    purpose: Annotated[str, Meta(max_length=64)] = "user_data"
    """Purpose of the file, such as `vision` or `user_data`. The input file of a batch, and files
    that its lines name, have the purpose `batch`; others have no effect."""
    expires_anchor: Literal["created_at"] | None = msgspec.field(
        name="expires_after[anchor]", default=None
    )
    expires_after_s: Life | None = msgspec.field(name="expires_after[seconds]", default=None)
    """Seconds for which a file with the purpose `batch` is stored, by default `batch.ttl_s`. An
    equal file that is already stored for longer keeps its time. Other files are stored for as long
    as requests use them."""


class FileObject(Struct, frozen=True, kw_only=True):
    id: str
    """`file-` and the SHA-256 of the file's bytes. A URL in a request is `media:` and this id. The
    files of a batch's results have other ids."""
    bytes: int
    created_at: int
    """Unix seconds."""
    expires_at: int
    """Unix seconds until which the file is stored at least. Each request that names a file starts
    the time again, except for the files of batches."""
    filename: str
    purpose: str
    object: Literal["file"] = "file"
    status: Literal["processed"] = "processed"


class FileList(Struct, frozen=True, kw_only=True):
    data: list[FileObject]
    first_id: str | None
    last_id: str | None
    has_more: bool
    object: Literal["list"] = "list"


class DeletedFile(Struct, frozen=True, kw_only=True):
    id: str
    deleted: bool = True
    object: Literal["file"] = "file"
