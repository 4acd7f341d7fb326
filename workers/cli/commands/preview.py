"""Commands that ask a renderer, without an engine: `pagemill render` and `pagemill tokenize`."""

import uvloop

from workers.cli.ask import build_request
from workers.cli.options import ConfigFile, Images, ModelName, NatsUrl, find_url_and_model
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
    url, model = find_url_and_model(config, nats, model)
    request = build_request(model, question, image or [])
    return uvloop.run(render_and_print(request, url, as_json=json))


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
    url, model = find_url_and_model(config, nats, model)
    return uvloop.run(tokenize_and_print(model, text, url, as_json=json))
