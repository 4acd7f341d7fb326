"""`pagemill batch make`: one line for each file, with the file in the line or stored."""

import base64
import json
import secrets
import shutil
from pathlib import Path
from typing import Any

import pytest

from shared.batches.input_file import InputCheck, InputLimits
from shared.bus.bus import Bus
from shared.bus.embedded_server import EmbeddedServer
from shared.errors import InvalidMedia, InvalidRequest
from shared.state import batch_files
from tests.cluster.conftest import ROOT
from tests.support import documents
from workers.cli import batch_lines
from workers.cli.commands import batch
from workers.cli.commands.requests import SamplingOptions

IMAGES = ROOT / "ops" / "demo_images"
CHAT = "/v1/chat/completions"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    config = f"models: {{m: {{path: {ROOT / 'ops' / 'demo_model'}, max_images: 2}}}}\n"
    (tmp_path / "pagemill.yaml").write_text(config)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def lines_in(text: str) -> list[dict[str, Any]]:
    """Return the lines, which a batch accepts."""
    check = InputCheck(InputLimits(CHAT, {"m"}, 1000, 2**23))
    check.feed(text.encode(), is_last=True)
    assert check.errors == []
    return [json.loads(line) for line in text.splitlines()]


async def made(capsys: pytest.CaptureFixture[str], *files: Path, **options: Any) -> Any:
    capsys.readouterr()
    assert await batch.make(*files, prompt="Read the text", model="m", **options) == 0
    return lines_in(capsys.readouterr().out)


async def test_each_file_becomes_a_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "invoice.json").write_text('{"type": "object"}')
    (folder / "a.wav").write_bytes(b"RIFF")
    schema = Path("invoice.json")
    sampling = SamplingOptions(max_tokens=7, temperature=0.0)
    image, sound = await made(
        capsys,
        IMAGES / "red.png",
        Path("a.wav"),
        schema=schema,
        system="Be brief.",
        sampling=sampling,
    )
    assert (image["custom_id"], sound["custom_id"]) == ("red.png", "a.wav")
    body = image["body"]
    assert (body["model"], body["max_tokens"], body["temperature"]) == ("m", 7, 0.0)
    assert body["response_format"]["json_schema"]["name"] == "invoice"
    assert body["response_format"]["json_schema"]["schema"] == {"type": "object"}
    system, user = body["messages"]
    assert system == {"role": "system", "content": "Be brief."}
    part, text = user["content"]
    assert text == {"type": "text", "text": "Read the text"}
    encoded = base64.b64encode((IMAGES / "red.png").read_bytes()).decode()
    assert part == {
        "type": "image_url",
        "image_url": {"url": f"data:image/png;base64,{encoded}"},
    }
    assert sound["body"]["messages"][1]["content"][0] == {
        "type": "input_audio",
        "input_audio": {"data": base64.b64encode(b"RIFF").decode(), "format": "wav"},
    }


async def test_a_folder_stands_for_its_files(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("b.png", "a.jpg", "notes.txt"):
        shutil.copy(IMAGES / "red.png", folder / name)
    (folder / "more").mkdir()
    shutil.copy(IMAGES / "red.png", folder / "more" / "b.png")
    lines = await made(capsys, Path(), Path("more"))
    # Files with equal names have their paths as ids.
    assert [line["custom_id"] for line in lines] == ["a.jpg", "b.png", "more/b.png"]


async def test_a_document_is_divided_into_the_pages_of_one_request(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = folder / "report.pdf"
    file.write_bytes(documents.document([documents.stream(b"")] * 5))
    lines = await made(capsys, file)
    assert [line["custom_id"] for line in lines] == [f"report.pdf#{n}" for n in ("1-2", "3-4", "5")]
    parts = [line["body"]["messages"][0]["content"][0]["file"] for line in lines]
    assert [part["pages"] for part in parts] == ["1-2", "3-4", "5"]
    assert parts[0]["file_data"].startswith("data:application/pdf;base64,")
    [line] = await made(capsys, file, pages_per_line=5)
    assert line["custom_id"] == "report.pdf"
    assert "pages" not in line["body"]["messages"][0]["content"][0]["file"]


async def test_files_that_do_not_fit_into_lines_are_stored(
    bus: Bus, broker: EmbeddedServer, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tenant = f"t{secrets.token_hex(4)}"
    (folder / "big.png").write_bytes(content := secrets.token_bytes(7 * 2**20))
    (folder / "report.pdf").write_bytes(documents.document([documents.stream(b"")] * 3))
    files = Path("big.png"), Path("report.pdf")
    lines = await made(capsys, *files, tenant=tenant, nats=broker.url)
    image, *pages = (line["body"]["messages"][0]["content"][0] for line in lines)
    name = image["image_url"]["url"].removeprefix("media:")
    stored = await batch_files.look_up(bus, name, tenant)
    assert stored is not None
    data = [piece async for piece, _ in batch_files.read(bus, stored, tenant)]
    assert b"".join(data) == content
    # Both lines of the document name one file.
    assert len({page["file"]["file_id"] for page in pages}) == 1
    assert [page["file"]["pages"] for page in pages] == ["1-2", "3"]


async def test_errors_name_the_file(folder: Path) -> None:
    (folder / "scan.tif").write_bytes(b"II*")
    (folder / "bad.pdf").write_bytes(b"%PDF-1.7 cut")
    (folder / "bad.json").write_text("[]")
    (folder / "empty").mkdir()
    for files, error, text in (
        ([], InvalidRequest, "name at least one file"),
        ([Path("missing.png")], InvalidMedia, "missing.png: No such file"),
        ([Path("scan.tif")], InvalidMedia, "scan.tif: not an image"),
        ([Path("bad.pdf")], InvalidMedia, "bad.pdf: the document is damaged"),
        ([Path("empty")], InvalidMedia, "empty: the folder has no images"),
        ([IMAGES / "red.png", IMAGES / "red.png"], InvalidRequest, "red.png is named twice"),
    ):
        with pytest.raises(error, match=text):
            await batch.make(*files, prompt="?", model="m")
    with pytest.raises(InvalidRequest, match=r"bad.json: a JSON schema is an object"):
        await batch.make(IMAGES / "red.png", prompt="?", model="m", schema=Path("bad.json"))


def test_files_are_stored_if_all_of_them_are_too_large() -> None:
    question = batch_lines.Question("m", "?", None, None, {})
    sources = [
        batch_lines.Source(Path(f"{n}.png"), "image", f"{n}.png", 600_000) for n in range(10)
    ]
    assert batch_lines.upload_reason(sources, question, 8, 8) is None
    reason = batch_lines.upload_reason(sources, question, 7, 8)
    assert reason is not None
    assert "batch.max_file_mib: 7" in reason
