"""`holdfast`: the commands people type. A client of the REST API, except for `up`."""

from .app import create_cli

__all__ = ["create_cli"]
