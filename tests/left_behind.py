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
        if any(_marked(process, session) for process in running(where)):
            if where.name == DEFAULT_NAME:
                let_go(where)  # another checkout's tests may use it
            else:
                down(where, purge=True)

    def none_left() -> bool:
        left = [process for process in psutil.process_iter() if _marked(process, session)]
        for process in left:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        return not left

    wait_until(none_left, f"the processes with {SESSION}={session} to end")


def _marked(process: psutil.Process, session: str) -> bool:
    try:
        return (
            process.pid != os.getpid()
            and process.environ().get(SESSION) == session
            and process.status() != psutil.STATUS_ZOMBIE
        )
    except psutil.Error:
        return False  # ended meanwhile, or another user's
