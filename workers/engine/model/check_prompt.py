"""The prompt with which the self-check compares a generic model with transformers' own pass.

The prompt of a model with images has one. Its embeddings are random, because the tower may run in
another worker.
"""

import inspect
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_outputs import BaseModelOutputWithPooling

from shared.models.generic_image import IMAGE_GRID
from shared.protocol.multimodal import IMAGE, PlaceholderRange
from shared.protocol.sampling import SamplingParams
from workers.engine.core.sequence import EngineRequest, Item
from workers.engine.model.flat_model import FlatModel

IMAGE_SPAN, IMAGE_SHAPE = slice(4, 10), (2, 3)
"""Tokens of the image in the prompt, and their rows and columns."""
PROMPT_LEN = 20
"""Tokens of the prompt; the others are the answer."""
SEED = 0


@dataclass(frozen=True, slots=True)
class CheckPrompt:
    token_ids: Tensor  # [num_tokens]
    embeddings: Tensor  # [num_tokens, hidden_size]
    positions: Tensor  # [num_position_rows, num_tokens]
    image_inputs: dict[str, Tensor]
    """Inputs of transformers' model that describe the image; none for a model without images."""
    spans: list[tuple[int, int]]

    def run(self, model: Any, num_tokens: int, **options: Any) -> Any:
        """Run transformers' model on the first tokens, which include the image."""
        names = inspect.signature(model.forward).parameters
        inputs = {name: self.image_inputs[name] for name in self.image_inputs.keys() & names.keys()}
        inputs["input_ids"] = self.token_ids[None]
        run = partial(
            model, **{n: tensor[:, :num_tokens] for n, tensor in inputs.items()}, **options
        )
        if not self.image_inputs:
            return run()
        output: Any = BaseModelOutputWithPooling
        embeddings = self.embeddings[None, IMAGE_SPAN]
        try:
            # Most models join a list of embeddings, and some take one tensor.
            return run(mm_encoder_outputs={IMAGE: output(pooler_output=[embeddings])})
        except (TypeError, AttributeError):
            return run(mm_encoder_outputs={IMAGE: output(pooler_output=embeddings)})


def make_prompt(model: FlatModel, num_tokens: int) -> CheckPrompt:
    """Return a prompt of random tokens."""
    family = model.family
    generator = torch.Generator().manual_seed(SEED)
    token_ids, image_ids = torch.randint(model.vocab_size, (2, num_tokens), generator=generator)
    positions = torch.arange(num_tokens).expand(family.num_position_rows, -1)
    image_inputs: dict[str, Tensor] = {}
    spans: list[tuple[int, int]] = []
    config: Any = family.model.config
    placeholder_id = getattr(config, "image_token_id", None)
    if family.tower is not None and placeholder_id is not None:
        token_ids[token_ids == placeholder_id] = int(placeholder_id == 0)
        token_ids[IMAGE_SPAN] = placeholder_id
        merge = getattr(getattr(config, "vision_config", None), "spatial_merge_size", 1)
        grid = torch.tensor([[1, *(merge * side for side in IMAGE_SHAPE)]])
        kinds = (token_ids == placeholder_id).int()[None]
        if not family.shares_prefixes:
            # Tokens of type 0 are the prompt, and attend to each other.
            kinds = (torch.arange(num_tokens) >= PROMPT_LEN).int()[None]
        image_inputs = {IMAGE_GRID: grid, "mm_token_type_ids": kinds, "token_type_ids": kinds}
        placeholder = PlaceholderRange(IMAGE_SPAN.start, IMAGE_SPAN.stop - IMAGE_SPAN.start)
        item = Item(IMAGE, "", placeholder, {IMAGE_GRID: grid})
        request = EngineRequest("", token_ids.tolist(), [item], SamplingParams())
        prompt = replace(request, prompt_token_ids=request.prompt_token_ids[:PROMPT_LEN])
        spans = family.spans_of(prompt)
        located = family.locate(request)
        positions = positions if located is None else located.prompt
    token_ids, image_ids = token_ids.to(model.device), image_ids.to(model.device)
    embeddings = model.embed(token_ids)
    if image_inputs:
        embeddings[IMAGE_SPAN] = model.embed(image_ids[IMAGE_SPAN])
    image_inputs = {name: tensor.to(model.device) for name, tensor in image_inputs.items()}
    return CheckPrompt(token_ids, embeddings, positions.to(model.device), image_inputs, spans)
