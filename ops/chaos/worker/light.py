"""Modules of the workers that compute nothing, imported without torch as `pagemill worker` does."""

from workers.cli.commands.worker import load_main

for role in ("coordinator", "gateway"):
    load_main(role)
