"""Report about model folders, as JSON on stdout: family, reason of a refusal, size of a token.

`pagemill models`, `pull` and `up`, which do not import transformers themselves, run `python -m
workers.engine.model.check_folders FOLDER POOLING RANKS...`, where POOLING is `models.NAME.pooling`
or empty, and RANKS is `engine.tensor_parallel`. The command reads small files and the headers of
weights, and runs no code of a folder.
"""

import contextlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from shared.errors import first_sentence

PoolingMode = Literal["last", "mean"]


class TalkerReport(msgspec.Struct, frozen=True):
    num_thinker_layers: int
    """Number of the first layers of the thinker that the talker's process loads, too."""
    longest: int
    kv_values_per_token: int


class FolderReport(msgspec.Struct, frozen=True):
    family: str | None = None
    source: str | None = None
    """Origin of the family; None for a type without a family."""
    reason: str | None = None
    """Reason for which the engine refuses the model; None for a supported model."""
    dtype: str | None = None
    """Type of the saved weights."""
    max_position_embeddings: int = 0
    kv_values_per_token: int = 0
    """Keys and values of one token in a rank, in all layers, with its share of an item's for cross
    attention in the longest sequence."""
    state_bytes_per_sequence: int = 0
    """States of one sequence in all recurrent layers; 0 for a model without such layers."""
    stored_as: str | None = None
    """Format of quantized weights; None for floats."""
    keeps_numbers: bool = False
    """Whether the C++ kernels, where they run, read quantized weights as they are stored."""
    talker: TalkerReport | None = None
    """The talker of an omni model; None for a model that does not speak."""
    divided: list[str] = []
    """Layers that ranks divide, by name with `*` for numbers; empty for one rank."""


def main(arguments: Sequence[str]) -> None:
    # With this entry transformers does not load torch, as in a renderer.
    sys.modules["torch"] = None  # type: ignore[assignment]
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    # transformers asks on stdout whether to run the code of a folder. No user is there to answer.
    rows = zip(arguments[::3], arguments[1::3], arguments[2::3], strict=True)
    with contextlib.redirect_stdout(sys.stderr):
        reports = [
            examine(Path(folder), msgspec.convert(mode or None, PoolingMode | None), int(num_ranks))
            for folder, mode, num_ranks in rows
        ]
    sys.stdout.buffer.write(msgspec.json.encode(reports))


def examine(folder: Path, pooling: PoolingMode | None = None, num_ranks: int = 1) -> FolderReport:
    """Return the report about one folder."""
    try:
        return _read(folder, pooling, num_ranks)
    except Exception as error:  # Unusable folders make transformers raise exceptions of any type.
        return FolderReport(reason=f"config.json cannot be read: {first_sentence(error)}")


def _read(folder: Path, pooling: PoolingMode | None, num_ranks: int) -> FolderReport:
    from transformers import AutoConfig

    from shared.errors import ConfigError
    from shared.models import registry
    from shared.models.chat_templates import check_chat_templates
    from shared.models.dtypes import saved_dtype
    from shared.models.reach import count_positions
    from shared.models.states import count_state_bytes
    from shared.vision.quantized import read_quantized
    from shared.vision.rank_plan import FIELD, set_local_heads
    from workers.engine.end_tokens import check_files
    from workers.engine.model.ranks import check_ranks
    from workers.engine.model.support import check_supported, num_item_values, num_kv_values
    from workers.engine.pooling_files import read_pooling

    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    family = registry.find_family(config)
    name, source = (None, None) if family is None else (family.name, family.source)
    try:
        check_supported(config, folder)
        layers = check_ranks(config, folder, num_ranks)
        registry.find_tower(config)
        read_pooling(folder, pooling)
        if (folder / "tokenizer.json").is_file():  # Else only the descriptions are downloaded.
            for media in () if family is None else family.media.values():
                media.open_layout(folder, config)
            check_chat_templates(folder)
            if family is not None and family.chat_template is not None:
                family.chat_template(folder)
        if pooling is None:
            check_files(folder, config.get_text_config(decoder=True).vocab_size)
    except ConfigError as error:
        reason = error.message.removeprefix("models.path: ").removeprefix(f"{folder} ")
        if error.field == FIELD:
            reason = f"does not fit {reason}"
        return FolderReport(name, source, reason.replace(f"{folder}/", ""))
    text = config.get_text_config(decoder=True)
    quantized = read_quantized(folder)
    if layers:
        set_local_heads(text, num_ranks)
    return FolderReport(
        name,
        source,
        dtype=saved_dtype(config),
        max_position_embeddings=count_positions(text),
        kv_values_per_token=num_kv_values(text) + num_item_values(config) // count_positions(text),
        state_bytes_per_sequence=count_state_bytes(text),
        stored_as=None if quantized is None else quantized.label,
        keeps_numbers="llama_like" in registry.find_decoder_traits(text),
        talker=_read_talker(folder, config),
        divided=layers,
    )


def _read_talker(folder: Path, config: Any) -> TalkerReport | None:
    from shared.stage.graphs import graph_of_folder, writes_text
    from workers.engine.model.support import num_kv_values

    graph = graph_of_folder(folder)
    if graph is None or not writes_text(graph):
        return None
    talker, thinker = config.talker_config, config.thinker_config.text_config
    text = talker.get_text_config()
    num_layers = thinker.num_hidden_layers
    return TalkerReport(
        min(num_layers, getattr(talker, "accept_hidden_layer", num_layers)),
        text.max_position_embeddings,
        num_kv_values(text),
    )


if __name__ == "__main__":
    main(sys.argv[1:])
