"""What a kubeconfig's user is known by, kept fresh for as long as a controller runs.

A service account's token the vendor's client reads anew every minute by itself. Of a kubeconfig it asks the
program that it names (`exec`) and reads the file (`tokenFile`) once, though such a token ends: after a
quarter of an hour on EKS.
"""

from __future__ import annotations

import asyncio

import structlog
from kubernetes.aio import client
from kubernetes.aio.config.kube_config import KubeConfigLoader

RENEW_SECONDS = 60.0
"""Between two looks whether a token is to be renewed. A program is asked again five minutes before its token
ends, and each time where it does not say when that is."""

ENDS_SECONDS = 2.0
"""So long the end of a program that was asked is waited for, where nobody needs its token any more."""

log = structlog.get_logger(__name__)


def why_none(loader: KubeConfigLoader, configuration: client.Configuration) -> str | None:
    """What keeps the user of a kubeconfig that was loaded from being known; None: nothing does. The program's
    own words are in the log, where the vendor's client has written them."""
    program = None if loader._user is None else loader._user.safe_get("exec")
    if program is None or configuration.api_key.get("BearerToken") or configuration.cert_file:
        return None
    return f"its program {program.get('command')!r} gives no credentials; the line before says why"


async def keep_fresh(loader: KubeConfigLoader, configuration: client.Configuration) -> None:
    """Until cancelled."""
    while True:
        await asyncio.sleep(RENEW_SECONDS)
        renewing = asyncio.ensure_future(loader._load_authentication())
        try:
            await asyncio.shield(renewing)
        except asyncio.CancelledError:  # the client would leave its program behind, half read
            await asyncio.gather(asyncio.wait_for(renewing, ENDS_SECONDS), return_exceptions=True)
            raise
        except Exception as error:  # whatever is wrong with it now, the next time it may not be
            log.warning("credentials cannot be renewed", error=str(error) or type(error).__name__)
            continue
        if token := getattr(loader, "token", None):
            configuration.api_key["BearerToken"] = token
