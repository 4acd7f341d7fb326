"""Ask Pagemill with nothing but a NATS client: python ask.py "What can you do?" [picture.png]"""

import asyncio
import base64
import json
import os
import sys
import uuid

import nats


async def main(question: str, pictures: list[str]) -> int:
    nc = await nats.connect(os.environ.get("NATS_URL", "nats://127.0.0.1:4222"))
    request_id = uuid.uuid4().hex
    log = await nc.subscribe(f"pm.tokens.{request_id}")
    content = [{"type": "text", "text": question}]
    for picture in pictures:
        with open(picture, "rb") as file:  # noqa: ASYNC230
            url = "data:image/png;base64," + base64.b64encode(file.read()).decode()
        content.append({"type": "image_url", "image_url": {"url": url}})
    request = {"model": "demo", "messages": [{"role": "user", "content": content}]}
    body, headers = json.dumps(request).encode(), {"Nats-Msg-Id": request_id}
    await nc.jetstream().publish("pm.request.demo", body, headers=headers)
    record = {"type": "tokens"}
    while record["type"] == "tokens":
        record = json.loads((await log.next_msg(timeout=60)).data)
        sys.stdout.write("".join(choice["text"] for choice in record.get("choices", [])))
        sys.stdout.flush()
    sys.stdout.write("\n" if record["type"] == "finish" else f"{record['error']['message']}\n")
    await nc.close()
    return 0 if record["type"] == "finish" else 1


sys.exit(asyncio.run(main(sys.argv[1], sys.argv[2:])))
