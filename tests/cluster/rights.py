"""The apiserver counts a new role or binding a moment after it has taken it: its authorizer watches them."""

from __future__ import annotations

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
