"""`python -m tests.cluster up|down|status`: a Kubernetes for a developer, on this machine."""

from __future__ import annotations

import argparse
import sys

from tests.cluster.cluster import down, status, up
from tests.cluster.errors import ClusterError
from tests.cluster.site import DEFAULT_NAME, site


def main(arguments: list[str]) -> int:
    """Exit code: 0, or 1 where it could not be done; `status` says 3 where it is not up, as services do."""
    parser = argparse.ArgumentParser(prog="python -m tests.cluster", description=__doc__)
    parser.add_argument("verb", choices=["up", "down", "status"])
    parser.add_argument(
        "--name", default=DEFAULT_NAME, help="several may run beside each other (%(default)s)"
    )
    parser.add_argument(
        "--nodes", type=int, default=1, help="up: how many; those that are missing join (%(default)s)"
    )
    parser.add_argument("--purge", action="store_true", help="down: remove its images too")
    given = parser.parse_args(arguments)
    try:
        where = site(given.name)
        if given.verb == "up":
            there = up(where, nodes=given.nodes, say=lambda line: print(line, file=sys.stderr))
            print(f"export KUBECONFIG={there.kubectl.kubeconfig}")
        elif given.verb == "down":
            down(where, purge=given.purge)
        else:
            words = status(where)
            print(words)
            return 0 if " is up" in words else 3
    except ClusterError as error:
        print(f"cluster: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
