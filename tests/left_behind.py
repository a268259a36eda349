"""What workers leave that were ended before they could clear up, cleared by the process they worked for.

After Ctrl-C pytest-xdist gives its workers ten seconds, which is less than taking a cluster down may need;
one that dies can clear up nothing. All that a session of tests starts has the session's mark in its
environment.
"""

from __future__ import annotations

import os
import uuid
from contextlib import suppress

import psutil
import pytest
from processes import carrying
from tests.cluster.cluster import down
from tests.cluster.component import running
from tests.cluster.site import DEFAULT_NAME, sites
from tests.cluster.users import let_go
from waiting import wait_until

SESSION = "TEST_SESSION"


def begin(config: pytest.Config) -> None:
    """Mark what is started from now on, and clear it up when pytest ends; a session within one does not."""
    if SESSION not in os.environ:
        os.environ[SESSION] = uuid.uuid4().hex
        config.add_cleanup(clear_up)


def clear_up() -> None:
    session = os.environ.pop(SESSION)
    for where in sites():
        if not carrying(SESSION, session).keys().isdisjoint(running(where)):
            if where.name == DEFAULT_NAME:
                let_go(where)  # another checkout's tests may use it
            else:
                down(where, purge=True)

    def none_left() -> bool:
        left = carrying(SESSION, session)
        for process in left:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        return not left

    wait_until(none_left, f"the processes with {SESSION}={session} to end")
