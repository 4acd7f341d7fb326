"""Imports the modules of coordinators and gateways, without torch, as `pagemill worker` does."""

from workers.cli.commands.worker import load_main

for role in ("coordinator", "gateway"):
    load_main(role)
