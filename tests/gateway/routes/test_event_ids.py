"""Ids of events: they increase, may jump, and any of them resumes its stream."""

import httpx

from tests.gateway.routes.test_chat import events, question

PATH = "/v1/chat/completions"
GENERATE = "/inference/v1/generate"


async def test_an_event_has_the_index_of_its_record(http: httpx.AsyncClient) -> None:
    body = question() | {"stream": True, "temperature": 0.0, "max_tokens": 8, "ignore_eos": True}
    for options, num_silent in (({"stream_options": {"include_usage": True}}, 0), ({}, 1)):
        answer = await http.post(PATH, json=body | options)
        url = f"/v1/requests/{answer.headers['x-request-id']}"
        ids = [int(event_id) for event_id, _ in events(answer.text)[:-1]]
        num_records = (await http.get(url)).json()["records"]
        # Without usage the last record, the end, makes no event.
        assert ids == sorted(set(ids))
        assert ids[0] == 0
        assert ids[-1] == num_records - 1 - num_silent


async def test_ids_of_several_choices_jump_and_each_number_resumes(http: httpx.AsyncClient) -> None:
    sampling = {"n": 3, "temperature": 1.0, "seed": 5, "max_tokens": 6, "ignore_eos": True}
    body = {"token_ids": [5, 6, 7], "sampling_params": sampling, "stream": True}
    answer = await http.post(GENERATE, json=body)
    url = f"/v1/requests/{answer.headers['x-request-id']}/stream"
    pairs = events(answer.text)[:-1]
    ids = [int(event_id) for event_id, _ in pairs]
    # Four numbers a record: one for each choice, and one for the usage that is not asked for.
    assert ids == sorted(set(ids))
    assert {number % 4 for number in ids} == {0, 1, 2}
    assert set(range(ids[-1])) - set(ids)
    for number in range(ids[-1] + 1):
        rest = await http.get(url, headers={"last-event-id": str(number)})
        assert events(rest.text)[:-1] == [event for event in pairs if int(event[0]) > number]
