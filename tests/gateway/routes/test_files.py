"""Files that are stored for requests."""

import hashlib
import secrets
from pathlib import Path

import httpx
import pytest

from shared.bus.bus import Bus
from shared.protocol import subjects
from shared.state import batch_files
from shared.state.batch_log import READ_AT_ONCE
from shared.state.media_store import MediaUpload
from tests.gateway.conftest import Gateway, Start
from tests.support.media import png
from workers.gateway.http.auth import digest, make_key

FILES = "/v1/files"
MIB = 2**20
ABSENT = f"file-{'0' * 64}"


async def upload(http: httpx.AsyncClient, data: bytes, **fields: str) -> httpx.Response:
    return await http.post(FILES, files={"file": ("a.png", data)}, data=fields)


async def test_a_stored_file_is_named_by_requests(http: httpx.AsyncClient) -> None:
    data = png()
    stored = (await upload(http, data, purpose="vision")).raise_for_status().json()
    assert stored["id"] == f"file-{hashlib.sha256(data).hexdigest()}"
    assert (stored["object"], stored["bytes"], stored["filename"], stored["purpose"]) == (
        "file",
        len(data),
        "a.png",
        "vision",
    )
    assert stored["expires_at"] > stored["created_at"] + 600
    file = (await http.get(f"{FILES}/{stored['id']}")).json()
    assert file == stored | {"created_at": file["created_at"], "expires_at": file["expires_at"]}
    answers = []
    for url in (f"media:{stored['id']}", f"media:{stored['id'].removeprefix('file-')}"):
        parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "?"}]
        body = {"model": "demo", "max_tokens": 4, "temperature": 0}
        body["messages"] = [{"role": "user", "content": parts}]
        answer = (await http.post("/v1/chat/completions", json=body)).raise_for_status().json()
        answers.append(answer["choices"][0]["message"]["content"])
    assert answers[0] == answers[1]


async def test_a_removed_file_is_gone(http: httpx.AsyncClient, bus: Bus) -> None:
    data = secrets.token_bytes(2 * MIB)
    file_id = (await upload(http, data)).raise_for_status().json()["id"]
    before, _ = await bus.figures.size(subjects.MEDIA_STREAM)
    assert (await http.delete(f"{FILES}/{file_id}")).json() == {
        "id": file_id,
        "object": "file",
        "deleted": True,
    }
    after, _ = await bus.figures.size(subjects.MEDIA_STREAM)
    assert before - after == 2 + 4
    for method in ("GET", "DELETE"):
        answer = await http.request(method, f"{FILES}/{file_id}")
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_found")


async def test_a_file_that_is_stored_again_replaces_the_first(
    http: httpx.AsyncClient, bus: Bus
) -> None:
    data = secrets.token_bytes(2 * MIB)
    await upload(http, data, purpose="first")
    before, _ = await bus.figures.size(subjects.MEDIA_STREAM)
    file_id = (await upload(http, data, purpose="second")).json()["id"]
    after, _ = await bus.figures.size(subjects.MEDIA_STREAM)
    assert after == before
    assert (await http.get(f"{FILES}/{file_id}")).json()["purpose"] == "second"


async def test_a_gateway_holds_no_more_than_chunks_of_a_file(
    http: httpx.AsyncClient, gateway: Gateway
) -> None:
    await upload(http, bytes(MIB))
    before_kib = peak_kib(gateway.process.pid)
    (await upload(http, secrets.token_bytes(48 * MIB))).raise_for_status()
    assert peak_kib(gateway.process.pid) - before_kib < 12 * 1024


def peak_kib(pid: int) -> int:
    return int(Path(f"/proc/{pid}/status").read_text().partition("VmHWM:")[2].split()[0])


async def test_a_file_over_the_limit_leaves_nothing(http: httpx.AsyncClient, bus: Bus) -> None:
    before, _ = await bus.figures.size(subjects.MEDIA_STREAM)
    answer = await upload(http, bytes(64 * MIB + 1))
    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "body_too_large")
    while (await bus.figures.size(subjects.MEDIA_STREAM))[0] > before:
        pass


@pytest.mark.parametrize(
    ("upload", "status", "param"),
    [
        ({"json": {}}, 415, None),
        ({"files": {"image": ("a", b"b")}}, 400, "image"),
        ({"files": {"other": (None, "b")}}, 400, "file"),
        ({"files": {"file": ("a", b"b"), "purpose": (None, "x" * 65)}}, 400, "purpose"),
        ({"files": {"file": ("a", b"b"), "model": (None, "x")}}, 400, "model"),
        ({"files": [("file", ("a", b"b")), ("file", ("a", b"b"))]}, 400, "file"),
        (
            {"content": b"--X\r\n", "headers": {"content-type": "multipart/form-data; boundary=X"}},
            400,
            None,
        ),
    ],
)
async def test_what_is_no_upload_is_refused(
    http: httpx.AsyncClient, upload: dict[str, object], status: int, param: str | None
) -> None:
    answer = await http.request("POST", FILES, **upload)  # type: ignore[arg-type]
    assert (answer.status_code, answer.json()["error"]["param"]) == (status, param)


async def test_a_page_of_the_list_reads_only_its_files(http: httpx.AsyncClient, bus: Bus) -> None:
    ids = []
    for number in range(60):
        data = secrets.token_bytes(9)
        if number % 3:
            sending = MediaUpload(bus)
            await sending.write(data)
            file = await sending.finish("a.png", "vision")
        else:
            file = await batch_files.store(bus, data, int(bus.now_ms() / 1000) + 3600, "")
        ids.append(f"file-{file.name}")
    reads: list[str] = []
    end_watch = await bus.watch_subjects("$JS.API.DIRECT.GET.*", reads.append)
    page = (await http.get(FILES, params={"limit": 7})).json()
    await bus.connection.nc.flush()
    await end_watch()
    assert 0 < len(reads) <= 2 + READ_AT_ONCE
    assert [file["id"] for file in page["data"]] == ids[:-8:-1]
    assert (page["first_id"], page["last_id"], page["has_more"]) == (ids[-1], ids[-7], True)
    assert await listed(http, order="asc", limit=9, after=ids[0]) == ids[1:]
    older = await listed(http, limit=9, after=ids[-1])
    assert older[:59] == ids[-2::-1]
    assert await listed(http) == [ids[-1], *older]
    inputs = [file_id for number, file_id in enumerate(ids) if number % 3 == 0]
    assert await listed(http, purpose="batch", limit=3, order="asc", after=ids[3]) == inputs[2:]
    answers = [
        await http.get(FILES, params={name: value})
        for name, value in (("order", "no"), ("limit", 0), ("after", "file-x"), ("after", ABSENT))
    ]
    assert [answer.status_code for answer in answers] == [400, 400, 404, 404]


async def listed(http: httpx.AsyncClient, **query: str | int) -> list[str]:
    """Return the ids of all pages of a list."""
    ids: list[str] = []
    has_more = True
    while has_more:
        page = (await http.get(FILES, params=query)).json()
        ids += [file["id"] for file in page["data"]]
        has_more, query["after"] = page["has_more"], page["last_id"]
    return ids


async def test_a_file_belongs_to_its_tenant(another: Start) -> None:
    keys = [make_key(), make_key()]
    sections = [{"name": f"k{i}", "sha256": digest(key)} for i, key in enumerate(keys)]
    gateway = another(api_keys=sections)
    statuses = []
    async with httpx.AsyncClient(base_url=gateway.url, timeout=30) as http:
        file_id = ""
        for key in (*keys, None):
            http.headers = {"authorization": f"Bearer {key}"} if key else {}
            if key == keys[0]:
                file_id = (await upload(http, secrets.token_bytes(999))).json()["id"]
            statuses.append((await http.get(f"{FILES}/{file_id}")).status_code)
            statuses.append((await http.delete(f"{FILES}/{file_id}?")).status_code)
            if key == keys[0]:
                statuses.append((await upload(http, b"x")).status_code)
    assert statuses == [200, 200, 200, 404, 404, 401, 401]
