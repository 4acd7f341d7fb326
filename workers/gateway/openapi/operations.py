"""What the API answers: one table, of which the OpenAPI document and docs/api.md are made.

A test holds it equal to the routes that there are.
"""

from typing import Annotated, Any

from msgspec import Meta

from shared.errors import (
    Cancelled,
    ContextTooLong,
    DeadlineExceeded,
    InvalidGrammar,
    InvalidMedia,
    InvalidRequest,
    LogTruncated,
    MediaBlocked,
    MediaNotFound,
    MediaTooLarge,
    MMCacheMiss,
    NotFound,
    Overloaded,
    PayloadTooLarge,
    Poisoned,
    Unavailable,
    UnknownAdapter,
    UnknownModel,
    UnsupportedContent,
)
from workers.gateway.http import errors
from workers.gateway.openapi.operation import ApiOperation, Parameter
from workers.gateway.routes import generate, health, models, render, requests, tokenize
from workers.gateway.schemas.generate import GenerateChunk, GenerateResponse, RenderedRequest
from workers.gateway.schemas.openai_request import ChatRequest, CompletionRequest
from workers.gateway.schemas.openai_response import ChatChunk, ChatCompletion, Completion
from workers.gateway.vllm import derender_schema
from workers.gateway.vllm import errors as scaleouterrors

SCALE_OUT = "Scale-out"
"""What `gateway.scale_out` is for."""

Index = Annotated[int, Meta(ge=0)]

ANY_ANSWER = (
    Cancelled,
    ContextTooLong,
    DeadlineExceeded,
    InvalidGrammar,
    InvalidMedia,
    LogTruncated,
    MediaBlocked,
    MediaNotFound,
    MediaTooLarge,
    Overloaded,
    PayloadTooLarge,
    Poisoned,
    Unavailable,
    UnknownAdapter,
    UnknownModel,
    UnsupportedContent,
    errors.AnswerTooLarge,
    errors.Interrupted,
    errors.ReusedId,
)
"""What a request may end with."""

ASKED_OF_RENDERERS = (
    ContextTooLong,
    InvalidMedia,
    MediaBlocked,
    MediaNotFound,
    MediaTooLarge,
    Overloaded,
    PayloadTooLarge,
    Unavailable,
    UnknownAdapter,
    UnknownModel,
    UnsupportedContent,
)
"""What renderers may answer to a question."""

OWN_ID = Parameter(
    "X-Request-Id",
    "header",
    "1 to 256 printable characters that name the request; the same again goes on with its answer",
)
IDEMPOTENCY_KEY = Parameter("Idempotency-Key", "header", "The same by another name, which wins")
LAST_EVENT = Parameter("Last-Event-ID", "header", "The last event that has been read of the stream")
FROM = Parameter("from", "query", "The first record that is to be read of the stream", Index)
STREAM = (OWN_ID, IDEMPOTENCY_KEY, LAST_EVENT, FROM)

OPERATIONS = [
    ApiOperation(
        "POST",
        "/v1/chat/completions",
        "Answers",
        "Answer a conversation, with pictures",
        ChatCompletion,
        ChatRequest,
        ChatChunk,
        ANY_ANSWER,
        STREAM,
        counted=True,
    ),
    ApiOperation(
        "POST",
        "/v1/completions",
        "Answers",
        "Go on with a prompt",
        Completion,
        CompletionRequest,
        Completion,
        ANY_ANSWER,
        STREAM,
        counted=True,
    ),
    ApiOperation(
        "GET",
        "/v1/requests/{id}",
        "Requests",
        "What has become of a request",
        requests.RequestBody,
        refuses=(
            *(InvalidRequest, NotFound, Unavailable, LogTruncated, Overloaded),
            errors.AnswerTooLarge,
        ),
    ),
    ApiOperation(
        "GET",
        "/v1/requests/{id}/stream",
        "Requests",
        "Its answer once more, as events",
        None,
        chunk=Any,
        refuses=(InvalidRequest, NotFound, *ANY_ANSWER),
        parameters=(LAST_EVENT, FROM),
        counted=True,
    ),
    ApiOperation(
        "DELETE",
        "/v1/requests/{id}",
        "Requests",
        "End a request, wherever it is",
        requests.Cancelling,
        refuses=(InvalidRequest, NotFound, Unavailable),
        statuses=(202,),
    ),
    ApiOperation(
        "POST",
        "/v1/chat/completions/render",
        SCALE_OUT,
        "What an engine would be given for a conversation",
        RenderedRequest,
        render.RenderChat,
        refuses=(*ASKED_OF_RENDERERS, InvalidGrammar),
        counted=True,
        status_of=scaleouterrors.status_of,
    ),
    ApiOperation(
        "POST",
        "/v1/completions/render",
        SCALE_OUT,
        "What an engine would be given for each prompt",
        list[RenderedRequest],
        render.RenderCompletion,
        refuses=(*ASKED_OF_RENDERERS, InvalidGrammar),
        counted=True,
        status_of=scaleouterrors.status_of,
    ),
    ApiOperation(
        "POST",
        "/inference/v1/generate",
        SCALE_OUT,
        "Tokens and pictures of a rendered request in, tokens out",
        GenerateResponse,
        RenderedRequest,
        GenerateChunk,
        (*ANY_ANSWER, MMCacheMiss),
        STREAM,
        counted=True,
        status_of=scaleouterrors.status_of,
    ),
    ApiOperation(
        "POST",
        "/inference/v1/abort_requests",
        SCALE_OUT,
        "End requests by their request_id; nothing is said of those that are not there",
        None,
        generate.AbortBody,
        refuses=(Unavailable,),
        status_of=scaleouterrors.status_of,
    ),
    ApiOperation(
        "POST",
        "/v1/chat/completions/derender",
        SCALE_OUT,
        "A chat completion of what generate has answered; of a stream, event by event",
        derender_schema.DerenderChatResponse | derender_schema.StreamAnswer,
        derender_schema.DerenderChat | derender_schema.DerenderChatStream,
        refuses=ASKED_OF_RENDERERS,
        counted=True,
        status_of=scaleouterrors.status_of,
    ),
    ApiOperation(
        "POST",
        "/v1/completions/derender",
        SCALE_OUT,
        "The same for completions",
        derender_schema.DerenderCompletionResponse | derender_schema.StreamAnswer,
        derender_schema.DerenderCompletion | derender_schema.DerenderCompletionStream,
        refuses=ASKED_OF_RENDERERS,
        counted=True,
        status_of=scaleouterrors.status_of,
    ),
    ApiOperation(
        "POST",
        "/tokenize",
        "Tokens",
        "The tokens of a text, or of a conversation",
        tokenize.TokenizeAnswer,
        tokenize.TokenizeBody,
        refuses=ASKED_OF_RENDERERS,
        counted=True,
        status_of=scaleouterrors.status_of,
    ),
    ApiOperation(
        "POST",
        "/detokenize",
        "Tokens",
        "The text of tokens",
        tokenize.DetokenizeAnswer,
        tokenize.DetokenizeBody,
        refuses=ASKED_OF_RENDERERS,
        counted=True,
        status_of=scaleouterrors.status_of,
    ),
    ApiOperation(
        "GET", "/v1/models", "Models", "The models that are served here", models.ModelList
    ),
    ApiOperation(
        "GET",
        "/v1/models/{model}",
        "Models",
        "One of them",
        models.ModelEntry,
        refuses=(UnknownModel,),
    ),
    ApiOperation(
        "GET", "/health", "Server", "Whether the process lives", health.Health, public=True
    ),
    ApiOperation(
        "GET",
        "/ready",
        "Server",
        "Whether a request would be answered; status 503 if not",
        health.Ready,
        statuses=(200, 503),
        public=True,
    ),
    ApiOperation("GET", "/version", "Server", "The version that runs", health.Version),
    ApiOperation(
        "GET", "/metrics", "Server", "Numbers of this gateway, for Prometheus", "text/plain"
    ),
    ApiOperation(
        "GET", "/openapi.json", "Server", "This document", "application/json", public=True
    ),
]
