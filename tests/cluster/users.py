"""Who uses a cluster now: test sessions of several checkouts may share one, and the last takes it down."""

from __future__ import annotations

import fcntl
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tests.cluster.cluster import Cluster, cluster, down, up
from tests.cluster.locks import locked
from tests.cluster.site import Site


@contextmanager
def used(site: Site, say: Callable[[str], None]) -> Iterator[Cluster]:
    """The cluster at `site`, up for as long as this holds.

    One that a developer has started is used and stays; one that was started for tests goes down with the
    last session that uses it.
    """
    site.home.mkdir(parents=True, exist_ok=True)
    with (site.home / "users").open("a") as users:
        with locked(site.home / "users.lock"):
            fcntl.flock(users, fcntl.LOCK_SH)
            was_up = cluster(site).is_up
            there = up(site, say=say)
            ours = site.state / "started-for-tests"
            if not was_up:
                ours.touch()
        try:
            yield there
        finally:
            with locked(site.home / "users.lock"):
                if ours.exists() and _last(users.fileno()):
                    down(site)


def let_go(site: Site) -> None:
    """Take down a cluster that was started for tests and that nobody uses: its last user had no time to."""
    with (site.home / "users").open("a") as users, locked(site.home / "users.lock"):
        if (site.state / "started-for-tests").exists() and _last(users.fileno()):
            down(site)


def _last(descriptor: int) -> bool:
    """True where nobody else holds the lock that this descriptor shares."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
