"""LangChain, with `langchain-openai`."""

from typing import Any

from langchain_core.messages import HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI, OpenAIEmbeddings

from ops.interop.clients.common import CASES, failure_of, report

TOOL = {"type": "function", "function": CASES["tool"]}
MESSAGES = [HumanMessage(CASES["messages"][0]["content"])]


def model_of(name: str = "demo", **fields: Any) -> Any:
    return ChatOpenAI(model=name, max_retries=0, **{"temperature": 0} | fields)


model, endless = model_of(), model_of("endless")
offered = model.bind_tools([TOOL], tool_choice="required")
# Texts are sent as they are, and not as token ids of another model.
embedder = OpenAIEmbeddings(model="demo", check_embedding_ctx_length=False)


def tools() -> Any:
    first = offered.invoke(MESSAGES)
    [call] = first.tool_calls
    result = ToolMessage(CASES["tool_result"], tool_call_id=call["id"])
    return [call["args"], model.bind_tools([TOOL]).invoke([*MESSAGES, first, result]).content]


def streamed_tools() -> Any:
    first, *others = offered.stream(MESSAGES)
    return sum(others, first).tool_calls[0]["args"]


def structured() -> Any:
    schema = CASES["schema"] | {"title": "shape"}
    return model.with_structured_output(schema, method="json_schema", strict=True).invoke(MESSAGES)


def embeddings() -> Any:
    vectors = embedder.embed_documents(CASES["inputs"])
    return [len(vectors), vectors[-1]]


def responses() -> Any:
    model, question = model_of(use_responses_api=True), HumanMessage(CASES["text"])
    first = model.invoke([question])
    streamed = "".join(chunk.text for chunk in model.stream([question]))
    return [first.text, streamed, model.invoke([question, first, question]).text]


def timeout() -> str:
    hasty = model_of("endless", timeout=0.5)
    return failure_of(hasty.invoke, input=MESSAGES, extra_headers=CASES["timeout"])


def cancel() -> None:
    chunks = endless.stream(MESSAGES, extra_headers=CASES["cancel"])
    next(chunks)
    chunks.close()


report(
    chat=lambda: model.invoke(MESSAGES).content,
    stream=lambda: "".join(chunk.content for chunk in model.stream(MESSAGES)),
    tools=tools,
    streamed_tools=streamed_tools,
    structured=structured,
    embeddings=embeddings,
    responses=responses,
    failures=lambda: [
        failure_of(model_of("other").invoke, input=MESSAGES),
        failure_of(model_of(temperature=9).invoke, input=MESSAGES),
    ],
    timeout=timeout,
    cancel=cancel,
)
