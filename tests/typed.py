"""What people type: a command line, run in this process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from typer.testing import CliRunner, Result

from holdfast_controller.cli import create_cli

Holdfast = Callable[..., Result]


def command(*words: str, given: str = "", code: int | None = 0) -> Result:
    def no_controller(*_: Any) -> None:
        raise AssertionError("only `up` starts a controller")

    result = CliRunner().invoke(create_cli(no_controller, no_controller), list(words), input=given)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert code is None or result.exit_code == code, result.output
    return result
