"""Commands that ask a renderer, without an engine: `pagemill render` and `pagemill tokenize`."""

import uvloop

from workers.cli import settings
from workers.cli.ask import AskOptions
from workers.cli.options import ConfigFile, Images, ModelName, NatsUrl, load
from workers.cli.preview import render_and_print, tokenize_and_print


def render(
    question: str,
    /,
    *,
    image: Images = None,
    model: ModelName = None,
    json: bool = False,
    config: ConfigFile = None,
    nats: NatsUrl = None,
) -> int:
    """Print an engine's input for a question: token ids, and each image's position and tensors.

    Parameters
    ----------
    question
        The text of the question.
    json
        Print one JSON object, which includes the token ids.
    """
    loaded = load(config)
    options = AskOptions(model or next(iter(loaded.models)), question, image or [], {})
    url = nats or settings.nats_url(loaded)
    return uvloop.run(render_and_print(options, url, as_json=json))


def tokenize(
    text: str,
    /,
    *,
    model: ModelName = None,
    json: bool = False,
    config: ConfigFile = None,
    nats: NatsUrl = None,
) -> int:
    """Print the tokens of a text, without the model's chat template.

    Parameters
    ----------
    json
        Print one JSON object.
    """
    loaded = load(config)
    url = nats or settings.nats_url(loaded)
    name = model or next(iter(loaded.models))
    return uvloop.run(tokenize_and_print(name, text, url, as_json=json))
