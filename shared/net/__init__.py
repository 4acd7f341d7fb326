"""Connections to servers named by clients: URLs, addresses and dialing."""
