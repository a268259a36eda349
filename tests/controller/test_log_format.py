"""What the controller writes to its log of an error that nobody foresaw."""

from __future__ import annotations

import subprocess
import sys

import pytest

FAILS = """
import sys
from holdfast_controller.logs import configure_logging
log = configure_logging("info", sys.argv[1])
def answer(headers):
    raise RuntimeError("unforeseen")
try:
    answer({"authorization": sys.argv[2]})
except RuntimeError:
    log.error("request", exc_info=True)
"""


@pytest.mark.parametrize("form", ["json", "console"])
def test_a_traceback_in_the_log_has_no_token(form: str) -> None:
    """The values of a request's variables stood there, and the token among them, for all who read logs."""
    command = [sys.executable, "-c", FAILS, form, "Bearer the-token"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "RuntimeError" in done.stderr
    assert "answer" in done.stderr
    assert "the-token" not in done.stderr
