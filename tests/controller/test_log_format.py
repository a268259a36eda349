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


TELLS = """
import sys
from holdfast_controller.logs import configure_logging
log = configure_logging("info", sys.argv[1])
text = sys.stdin.read()
log.info("request", path=text)
try:
    raise RuntimeError(text)
except RuntimeError:
    log.error("unforeseen: " + text, exc_info=True)
"""


@pytest.mark.parametrize("form", ["json", "console"])
@pytest.mark.parametrize("told", ["\x1b]0;renamed\x07", "\x1b[2J", "\x9b2J"])
def test_what_the_log_tells_does_nothing_to_a_terminal(form: str, told: str) -> None:
    """Who has no token, too, could clear the screen of who ran `holdfast up`, by the path of a request."""
    command = [sys.executable, "-c", TELLS, form]
    done = subprocess.run(command, input=f"/v1/{told}jobs", capture_output=True, encoding="utf-8", check=True)
    assert "/v1/" in done.stderr
    assert "jobs" in done.stderr
    assert not set(done.stderr) & {"\x1b", "\x07", "\x9b"}
