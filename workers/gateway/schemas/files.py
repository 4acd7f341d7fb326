"""OpenAI's files: the form of an upload, and the objects of files. Pure."""

from typing import Annotated, Literal

from msgspec import Meta, Struct

ID_PREFIX = "file-"


class FileForm(Struct, frozen=True, forbid_unknown_fields=True):
    """The fields of the form beside `file`."""

    purpose: Annotated[str, Meta(max_length=64)] = "user_data"
    """What the file is for, such as `vision` or `user_data`; no effect."""


class FileObject(Struct, frozen=True, kw_only=True):
    id: str
    """`file-` and the SHA-256 of the file's bytes. A URL in a request is `media:` and this id."""
    bytes: int
    created_at: int
    """Unix seconds."""
    expires_at: int
    """Unix seconds until which the file is stored at least; a request that names it starts that
    time again."""
    filename: str
    purpose: str
    object: Literal["file"] = "file"
    status: Literal["processed"] = "processed"


class DeletedFile(Struct, frozen=True, kw_only=True):
    id: str
    deleted: bool = True
    object: Literal["file"] = "file"
