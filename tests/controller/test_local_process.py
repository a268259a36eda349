"""Processes of an attempt, found by what /proc shows of them."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator

import pytest

from holdfast_controller.local import process
from holdfast_trainer.contract import ENV_ATTEMPT_UID

RESTLESS = 'exec sh -c "$0" "$0"'
"""A program that does nothing but become itself again."""


@pytest.fixture
def restless() -> Iterator[subprocess.Popen[bytes]]:
    variables = {**os.environ, ENV_ATTEMPT_UID: "restless"}
    with subprocess.Popen(["sh", "-c", RESTLESS, RESTLESS], env=variables) as running:
        yield running
        running.kill()


def test_what_is_becoming_another_program_does_not_escape(restless: subprocess.Popen[bytes]) -> None:
    """In between, the kernel shows nothing of it: an attempt would count as gone whose process lives on."""
    for _ in range(500):
        assert [one.pid for one in process.find("restless")] == [restless.pid]
    process.kill_all("restless")
    restless.wait()
    assert process.find("restless") == []


def test_a_program_that_was_given_no_variables_has_none() -> None:
    with subprocess.Popen(["sleep", "60"], env={}) as bare:
        try:
            assert process.environment(bare.pid) == frozenset()
        finally:
            bare.kill()
