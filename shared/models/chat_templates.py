"""Check of the chat templates in a model folder."""

import json
from pathlib import Path

from shared.errors import ConfigError

FILE = "tokenizer_config.json"
DEFAULT = "default"


def check_chat_templates(folder: Path) -> None:
    """Raise ConfigError for named chat templates of which none is the default.

    Requests without tools could not be written with them. transformers reads the templates of
    tokenizer_config.json only if no other file has templates.
    """
    names = [file.stem for file in folder.glob("additional_chat_templates/*.jinja")]
    file, remedy = folder / FILE, "write the template for all other chats as chat_template.jinja"
    if not names and file.is_file():
        templates = json.loads(file.read_bytes()).get("chat_template")
        names = [entry["name"] for entry in templates] if isinstance(templates, list) else []
        remedy = f"name one of them {DEFAULT!r} in {FILE}"
    if names and DEFAULT not in names and not (folder / "chat_template.jinja").is_file():
        raise ConfigError(
            f"{folder} has the chat templates {', '.join(sorted(names))}, and none for every chat:"
            f" {remedy}",
            field="path",
        )
