"""What `kubectl get -o json` gives, without kubectl, and with managedFields.

kubectl takes a twentieth of a second of a core each time, most of it to start, and a test that waits for
a job asks for it hundreds of times.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import urlencode

from tests.cluster.errors import ClusterError

if TYPE_CHECKING:
    from kubernetes.client import ApiClient

SECONDS = 30.0
DISCOVERY = "application/json;v=v2;g=apidiscovery.k8s.io;as=APIGroupDiscoveryList"
_SELECTORS = {"-l": "labelSelector", "--selector": "labelSelector", "--field-selector": "fieldSelector"}


def get(kubeconfig: Path, *words: str) -> dict[str, Any]:
    """One object, `pod web -n=team`, or a list, `pods -A` or `pods -n=team -l=app=web`; as the account of a
    kubeconfig. Raises ClusterError with the server's words, and where there is no answer within 30 s."""
    namespace, everywhere, query, plain = "default", False, {}, []
    for word in words:
        flag, _, value = word.partition("=")
        if flag in _SELECTORS:
            query[_SELECTORS[flag]] = value
        elif flag == "-n":
            namespace = value
        elif flag == "-A":
            everywhere = True
        elif word.startswith("-"):
            raise ClusterError(f"get {' '.join(words)}: {flag} is not known here")
        else:
            plain.append(word)
    server = _server(kubeconfig, kubeconfig.stat().st_mtime_ns)
    kind = server.kind(plain[0])
    within = f"/namespaces/{namespace}" if kind.namespaced and not everywhere else ""
    path = "/".join([f"{kind.group}{within}/{kind.plural}", *plain[1:]])
    return server.read(f"{path}?{urlencode(query)}" if query else path)


@cache
def _server(kubeconfig: Path, written: int) -> _Server:
    """`written`: a cluster that is made anew has other certificates."""
    from kubernetes import config

    return _Server(config.new_client_from_config(str(kubeconfig)))


class _Kind(NamedTuple):
    group: str
    """Its path, with the version."""
    plural: str
    namespaced: bool


class _Server:
    """Connections to it stay."""

    def __init__(self, client: ApiClient) -> None:
        self._client = client
        self._kinds: dict[str, _Kind] = {}

    def kind(self, name: str) -> _Kind:
        """Kinds come and go: about one that is not known the server is asked again. Raises ClusterError where
        it has none."""
        if name not in self._kinds:
            self._kinds = dict(self._discover())
        if name not in self._kinds:
            raise ClusterError(f'the server has no resource type "{name}"')
        return self._kinds[name]

    def _discover(self) -> Iterator[tuple[str, _Kind]]:
        """By all names, those last that come first for kubectl: of the core, of the first version."""
        for top in ("/apis", "/api"):
            for group in reversed(self.read(top, DISCOVERY)["items"]):
                for version in reversed(group["versions"]):
                    path = "/".join(filter(None, [top, group["metadata"].get("name"), version["version"]]))
                    for one in version["resources"]:
                        kind = _Kind(path, one["resource"], one["scope"] == "Namespaced")
                        for name in (kind.plural, one["singularResource"], *one.get("shortNames", ())):
                            yield name, kind

    def read(self, path: str, accept: str = "application/json") -> dict[str, Any]:
        """Raises ClusterError."""
        from urllib3.exceptions import HTTPError

        request = self._client.param_serialize(
            "GET", path, header_params={"Accept": accept}, auth_settings=["BearerToken"]
        )
        try:
            answer = self._client.call_api(*request, _request_timeout=SECONDS)
            body = json.loads(answer.read())
        except (HTTPError, OSError, ValueError) as error:
            raise ClusterError(f"GET {path}: {error}") from error
        if answer.status >= 400:
            raise ClusterError(f"GET {path}: {answer.status}: {body.get('message')}")
        found: dict[str, Any] = body
        return found
