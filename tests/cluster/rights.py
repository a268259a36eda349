"""Service accounts: who one is, and when it may do something.

The apiserver counts a new role or binding a moment after it has taken it: its authorizer watches them.
"""

from __future__ import annotations

from pathlib import Path

import yaml
from tests.cluster.kubectl import Kubectl
from tests.waiting import wait_until

JOBS = "trainingjobs.holdfast.dev"


def wait_until_allowed(
    kubectl: Kubectl, namespace: str, account: str, verb: str, resource: str = JOBS
) -> None:
    """Until the service account of the namespace may do this there. Raises DeadlinePassed."""
    user = f"--as=system:serviceaccount:{namespace}:{account}"
    asked = ("auth", "can-i", verb, resource, f"-n={namespace}", user)
    wait_until(
        lambda: kubectl.attempt(*asked).stdout.strip() == "yes",
        f"{account} of {namespace} to be allowed to {verb} {resource}",
    )


def as_account(kubectl: Kubectl, namespace: str, account: str, path: Path, *arguments: str) -> Path:
    """Write a kubeconfig of that service account and of nobody else; `arguments` are of `create token`."""
    config = yaml.safe_load(kubectl.kubeconfig.read_text())
    token = kubectl.run("create", "token", account, f"-n={namespace}", *arguments).strip()
    config["users"] = [{"name": config["users"][0]["name"], "user": {"token": token}}]
    path.touch(0o600)
    path.write_text(yaml.safe_dump(config))
    return path
