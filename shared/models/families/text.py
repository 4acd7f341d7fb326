"""Families that read text only: transformers' modules need no help beyond the decoder's traits."""

from shared.models.family import DecoderTrait, ModelFamily


def _declare(name: str, **decoders: set[DecoderTrait]) -> ModelFamily:
    """Declare a family. Its model types are the keys of `decoders`."""
    frozen = {model_type: frozenset(traits) for model_type, traits in decoders.items()}
    return ModelFamily(name, frozenset(decoders), frozen)


FAMILIES = (
    _declare("Gemma", gemma=set(), gemma2=set(), gemma3_text=set()),
    _declare("Llama", llama={"llama_like"}),
    _declare("Mistral", mistral={"llama_like", "one_window"}, mixtral={"one_window"}),
    _declare("OLMo", olmo2=set()),
    _declare("Phi", phi3={"one_window"}),
    _declare(
        "Qwen",
        qwen2={"llama_like"},
        qwen2_moe=set(),
        qwen3={"llama_like"},
        qwen3_moe={"one_window"},
    ),
    _declare("SmolLM", smollm3=set()),
)
