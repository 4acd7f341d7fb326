"""Have Pagemill speak, with a stock NATS client: python speak.py "three red circles" [out.wav]

Without a file the sound is played as it arrives, by `aplay` of Debian's package alsa-utils.
"""

import asyncio
import base64
import json
import os
import sys
import uuid
import wave
from collections.abc import AsyncIterator

import nats

# The key of a tenant signs, and is never sent. An empty name is for a broker without keys.
KEY = os.environ.get("NATS_NKEY", "data/nats/keys/tenants/local.nk")


async def speak(text: str) -> AsyncIterator[bytes]:
    url = os.environ.get("NATS_URL", "nats://127.0.0.1:4222")
    nc = await nats.connect(url, nkeys_seed=KEY or None)
    request_id = uuid.uuid4().hex
    # Subscribed before the request is published, so that no record is missed.
    log = await nc.subscribe(f"pm.tokens.{request_id}.audio")
    own = await nc.subscribe(f"pm.tokens.{request_id}", max_msgs=1)  # its end, or its error
    body = json.dumps({"model": "demo", "given_text": text, "outputs": ["audio"]})
    await nc.jetstream().publish(f"pm.request.demo.{request_id}", body.encode())
    end = asyncio.create_task(own.next_msg(timeout=600))
    while True:
        piece = asyncio.create_task(log.next_msg(timeout=600))
        await asyncio.wait({piece, end}, return_when=asyncio.FIRST_COMPLETED)
        # A request that is refused has no log of its sound.
        if not piece.done() and json.loads(end.result().data)["type"] == "error":
            sys.exit(json.loads(end.result().data)["error"]["message"])
        record = json.loads((await piece).data)
        if record["type"] == "end":
            break
        yield base64.b64decode(record["pcm"])
    final = json.loads((await end).data)
    if final["type"] == "error":
        sys.exit(final["error"]["message"])


async def main(text: str, file: str = "") -> None:
    if file:
        with wave.open(file, "wb") as sound:
            sound.setparams((1, 2, 24_000, 0, "NONE", ""))
            async for samples in speak(text):
                sound.writeframes(samples)
        return
    command = "aplay -q -t raw -f S16_LE -r 24000"
    player = await asyncio.create_subprocess_shell(command, stdin=asyncio.subprocess.PIPE)
    assert player.stdin is not None
    async for samples in speak(text):
        player.stdin.write(samples)
    player.stdin.close()
    await player.wait()


asyncio.run(main(*sys.argv[1:]))
