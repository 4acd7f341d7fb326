"""Connections to servers that clients name: URLs, addresses and dialing."""
