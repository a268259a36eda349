"""The REST API: routes, access, limits, streams. Knows the ports of `cluster.py`, no adapter."""

from .app import create_app

__all__ = ["create_app"]
