"""Reader of the tokens that end an answer, from the files of a model folder."""

import json
from itertools import chain
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from shared.errors import ConfigError, first_sentence
from workers.engine.pooling_files import MODULES


def read_end_tokens(
    folder: Path, tokenizer: Any, vocab: range, *, is_codec: bool
) -> frozenset[int]:
    """Return the tokens of `vocab` that end an answer.

    An answer ends with any token that generation_config.json, config.json or the tokenizer names.
    Many files name only the end of a turn, or only the end of a text. For models that write the
    codes of a codec, only the first source with an end token counts, because the tokenizer names
    the end of a text.

    Defaults of transformers' config classes do not count, because they belong to the vocabulary of
    one model.
    """
    sources = (*_named_by_files(folder), _named({"eos_token_id": tokenizer.eos_token_id}))
    served = [token_ids.intersection(vocab) for token_ids in sources]
    if is_codec:
        return frozenset(next(filter(None, served), ()))
    return frozenset().union(*served)


def _named_by_files(folder: Path) -> tuple[set[int], set[int]]:
    """Return the end tokens of generation_config.json and of config.json."""
    config = _read(folder / "config.json")
    thinker = config.get("thinker_config")
    sections = (config, _section(config, "text_config"), thinker, _section(thinker, "text_config"))
    generation = _named(_read(folder / "generation_config.json"))
    return generation, set(chain.from_iterable(map(_named, sections)))


def check_files(folder: Path, vocab_size: int) -> None:
    """Raise the ConfigError of `check_endless` before the model is loaded.

    The tokenizer is read only if no other file names an end token, and if it is downloaded.
    """
    vocab = range(vocab_size)
    is_named = any(token_ids.intersection(vocab) for token_ids in _named_by_files(folder))
    if is_named or not (folder / "tokenizer.json").is_file():
        return
    tokenizer = load_tokenizer(folder)
    if not read_end_tokens(folder, tokenizer, vocab, is_codec=False):
        check_endless(folder, tokenizer)


def check_endless(folder: Path, tokenizer: Any) -> None:
    """Raise ConfigError for a chat model without an end token."""
    chats = tokenizer.chat_template or (folder / "chat_template.json").is_file()
    # sentence-transformers writes the file for models that compute embeddings.
    if chats and not (folder / MODULES).is_file():
        raise ConfigError(
            f"models.path: {folder} has a chat template and no end token, so no answer would end:"
            " set eos_token_id in its generation_config.json",
            field="models.path",
        )


def _read(file: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(file.read_bytes()) if file.is_file() else {}
    return content


def _section(config: Any, name: str) -> Any:
    return config.get(name) if isinstance(config, dict) else None


def _named(section: Any) -> set[int]:
    token_ids = _section(section, "eos_token_id")
    return set(token_ids) if isinstance(token_ids, list) else {token_ids} - {None}


def load_tokenizer(folder: Path) -> Any:
    """Load the tokenizer of a model's folder. Raises ConfigError."""
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # Unusable files make transformers raise exceptions of any type.
        raise ConfigError(
            f"models.path: {folder / 'tokenizer.json'} cannot be read: {first_sentence(error)}",
            field="models.path",
        ) from error
