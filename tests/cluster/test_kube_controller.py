"""The controller on a real cluster with the real Training Operator: from submission to the end.

Pods run a stand-in for the trainer; everything else is real.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from subprocess import Popen
from typing import Any

import httpx
import pytest
import yaml
from processes import Processes
from tests.cluster import trainer_image, trainingjobs
from tests.cluster.claims import host_claim, lost_claim
from tests.cluster.cluster import Cluster
from tests.cluster.images import ImageStore
from tests.cluster.machine import Machine
from tests.cluster.platform import is_ready
from tests.cluster.rights import wait_until_allowed
from waiting import wait_until

from holdfast_controller.policy.quantity import quantity

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(2400)]
CRD = Path(__file__).parents[2] / "helm" / "holdfast" / "templates" / "crd.yaml"
SETTINGS = {"defaultImage": trainer_image.NAME, "defaultClaim": "runs"}


@dataclass
class World:
    """A cluster with the CRD, a namespace with storage, and controllers at work."""

    cluster: Cluster
    namespace: str
    processes: Processes
    directory: Path
    urls: list[str] = field(default_factory=list)
    started: list[Popen[str]] = field(default_factory=list)

    def controller(self, identity: str, lease: str, **jobs: Any) -> Popen[str]:
        """Start one, with settings for `jobs`, and wait until it is ready."""
        log = self.directory / f"{identity}.log"
        settings = self.directory / "jobs.yaml"
        settings.write_text(yaml.safe_dump({**SETTINGS, **jobs}))
        command = [
            sys.executable, "-m", "holdfast_controller", "controller", "--engine", "kubernetes",
            f"--kubeconfig={self.cluster.kubectl.kubeconfig}", "--host=127.0.0.1", "--port=0",
            f"--pod-settings={settings}", f"--lease={lease}", f"--namespace={self.namespace}",
            f"--identity={identity}", "--log-format=json",
        ]  # fmt: skip
        with log.open("w") as output:
            started = self.processes.start(command, stderr=output, stdout=output)
        self.started.append(started)

        def answers() -> bool:
            assert started.poll() is None, log.read_text()
            found = re.search(r'"port": (\d+)', log.read_text())
            if found is None:
                return False
            url = f"http://127.0.0.1:{found[1]}"
            if not is_ready(url):
                return False
            self.urls.append(url)
            return True

        wait_until(answers, f"controller {identity} to be ready")
        return started

    def submit(self, name: str, **spec: Any) -> None:
        """By kubectl, as users do."""
        job = {
            "apiVersion": "holdfast.dev/v1alpha1",
            "kind": "TrainingJob",
            "metadata": {"name": name},
            "spec": {
                "command": ["python", "train.py"],
                "resources": {"cpu": "50m"},
                "graceSeconds": 10,
                **spec,
            },
        }
        self.kubectl("apply", "-f", "-", document=json.dumps(job))

    def kubectl(self, *words: str, document: str | None = None) -> str:
        return self.cluster.kubectl.run(*words, f"-n={self.namespace}", document=document)

    def job(self, name: str) -> dict[str, Any]:
        return self.cluster.kubectl.get("tj", name, f"-n={self.namespace}")

    def until(self, name: str, what: str, condition: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
        """The job's status once the condition holds."""
        seen: dict[str, Any] = {}

        def holds() -> bool:
            seen.update(self.job(name).get("status") or {})
            return bool(seen) and bool(condition(seen))

        try:
            wait_until(holds, f"{name}: {what}", 300)
        except AssertionError as error:
            pods = self.kubectl("get", "pods", "-o=wide")
            logs = "\n".join(path.read_text()[-3000:] for path in self.directory.glob("*.log"))
            raise AssertionError(f"{error}\n{json.dumps(seen, indent=1)[-3000:]}\n{pods}\n{logs}") from None
        return seen

    def phase(self, name: str, phase: str) -> dict[str, Any]:
        return self.until(name, f"phase {phase}", lambda status: status.get("phase") == phase)

    def token(self, account: str, *arguments: str) -> str:
        """Of a service account, made where it is not there."""
        self.cluster.kubectl.attempt("create", "serviceaccount", account, f"-n={self.namespace}")
        return self.kubectl("create", "token", account, *arguments).strip()


@pytest.fixture
def world(cluster: Cluster, namespace: str, processes: Processes, tmp_path: Path) -> Iterator[World]:
    if cluster.site is None:
        pytest.skip("the stand-in's image cannot be put into a cluster that was not started here")
    machine = Machine.running(cluster.site)
    ImageStore(machine.site, machine.enter).add([trainer_image.trainer_image(tmp_path)])
    trainingjobs.install(cluster.kubectl, yaml.safe_load(CRD.read_text()))
    with host_claim(cluster, cluster.site, namespace, "runs"):
        there = World(cluster, namespace, processes, tmp_path)
        try:
            yield there
        finally:
            processes.end_all()
            for controller in there.started:
                controller.wait()
            trainingjobs.release(cluster.kubectl, namespace)


def test_a_job_goes_through_eviction_and_kill_to_its_end(world: World) -> None:
    one = world.controller("one", "story")
    world.submit("gpt", replicas=2, env={"STEPS": "100", "PAUSE": "0.1", "ATTEMPTS": "3"})
    status = world.until("gpt", "progress", lambda s: s.get("phase") == "Running" and steps(s) >= 5)
    assert (status["attempt"], status["disruptions"]) == (1, 0)

    # Somebody drains the node: notice, save, next attempt.
    trainingjobs.evict(world.cluster.kubectl, world.namespace, "gpt-1-worker-1")
    status = world.until(
        "gpt", "a second attempt at work", lambda s: s["attempt"] == 2 and s["phase"] == "Running"
    )
    first = status["attempts"][0]
    assert first["verdict"] == "Disrupted"
    assert first["reason"].startswith("replica 1: EvictionByEvictionAPI")
    assert (status["disruptions"], status["failures"]) == (1, 0)
    # The kubelet has removed its container since, and the log with it.
    assert "saved at step" in first["logTail"]["1"]

    # A drill by REST, without notice.
    headers = {"Authorization": f"Bearer {admin(world)}"}
    base = f"{world.urls[0]}/v1/namespaces/{world.namespace}/jobs/gpt"
    with httpx.Client(headers=headers, trust_env=False, timeout=300) as client:
        answer = client.post(f"{base}/drill", json={"replica": 0, "kind": "kill"})
        assert answer.status_code == 202, answer.text
        status = world.phase("gpt", "Succeeded")
        assert [a["verdict"] for a in status["attempts"]] == ["Disrupted", "Disrupted", "Finished"]
        assert status["attempts"][1]["reason"].startswith("replica 0: Drilled: killed on request")
        assert (status["disruptions"], status["failures"]) == (2, 0)

        def log() -> str:
            """The job ends with rank 0; the other says so of itself a moment later."""
            text = client.get(f"{base}/logs", params={"rank": 1}).text
            return text if "finished at step 100" in text else ""

        assert "replica 1 of attempt 3 goes on at step" in wait_until(log, "replica 1 to finish")
        ledger = client.get(f"{base}/ledger").json()
        assert [line["attempt"] for line in ledger["lines"]] == [1, 2, 3]
        assert "replica 0 of attempt 2 goes on at step" in status["attempts"][1]["logTail"]["0"]

    # Another controller knows no less, though no rank is left to be asked.
    one.terminate()
    one.wait()
    world.controller("two", "story")
    base = f"{world.urls[-1]}/v1/namespaces/{world.namespace}/jobs/gpt"
    with httpx.Client(headers=headers, trust_env=False, timeout=300) as client:
        assert client.get(f"{base}/ledger").json()["lines"] == ledger["lines"]
        logs = client.get(f"{base}/logs", params={"attempt": 1, "rank": 1}).text
        assert "saved at step" in logs

    # What is left of ended attempts goes; deleting the job takes the rest, and leaves the run directory.
    wait_until(lambda: world.kubectl("get", "pytorchjobs", "-o=name").split() == [
        "pytorchjob.kubeflow.org/gpt-3"
    ], "earlier attempts to be cleared")  # fmt: skip
    events = ("events", f"-n={world.namespace}")
    wait_until(
        lambda: (
            {"AttemptOpened", "Disrupted", "Finished"}
            <= {event["reason"] for event in world.cluster.kubectl.get(*events)["items"]}
        ),
        "its events",
    )
    world.kubectl("delete", "tj", "gpt", "--timeout=300s")
    wait_until(
        lambda: world.kubectl("get", "pods,pytorchjobs,configmaps", "-l=holdfast.dev/job", "-o=name") == "",
        "all objects of the job to go",
    )


def steps(status: dict[str, Any]) -> int:
    """How many its job is known to have done."""
    return int((status.get("progress") or {}).get("step", 0))


def admin(world: World) -> str:
    """A token that may do everything in the namespace."""
    token = world.token("boss")
    world.cluster.kubectl.attempt(
        "create", "rolebinding", "boss", f"-n={world.namespace}", "--clusterrole=cluster-admin",
        f"--serviceaccount={world.namespace}:boss",
    )  # fmt: skip
    wait_until_allowed(world.cluster.kubectl, world.namespace, "boss", "update")
    return token


def test_a_job_goes_on_with_fewer_replicas_where_there_is_no_room_for_all(world: World) -> None:
    world.controller("one", "fewer", placeSeconds=10)
    (node,) = world.cluster.kubectl.get("nodes")["items"]
    more_than_half = quantity(node["status"]["allocatable"]["cpu"]) * 3 / 5
    world.submit(
        "gpt", replicas=2, minReplicas=1, resources={"cpu": f"{int(1000 * more_than_half)}m"},
        env={"STEPS": "10", "PAUSE": "0.1", "ATTEMPTS": "2"},
    )  # fmt: skip
    status = world.phase("gpt", "Succeeded")
    first, second = status["attempts"]
    assert (first["verdict"], first["placed"], first["replicas"]) == ("Unschedulable", 1, 2)
    assert first["reason"].startswith("1 of 2 replicas ran for 10 s and waited for replica ")
    assert (second["verdict"], second["replicas"]) == ("Finished", 1)
    assert (status["failures"], status["disruptions"]) == (0, 0)


def test_failures_suspension_and_deletion(world: World) -> None:
    world.controller("one", "story")
    with lost_claim(world.cluster, world.namespace, "lost"):
        world.submit("unmounted", storage={"claim": "lost"}, env={"STEPS": "1"})
        world.submit("queued", queue="nowhere", env={"STEPS": "1"})
        _what_fails_is_suspended_and_deleted(world)

        # Its pod has a node, and its status says "ContainerCreating": the reason is in its Events alone.
        why = "replica 0: FailedMount: MountVolume.SetUp failed for volume"
        remedy = "the node does not get the volume of storage.claim"
        status = world.until("unmounted", "the reason", lambda s: why in s.get("message", ""))
        assert "/no/such/directory is not a directory" in status["message"]
        assert (status["phase"], remedy in status["message"]) == ("Queued", True)
        world.kubectl("delete", "tj", "unmounted", "--timeout=300s")

        # Without Kueue a queue keeps no quota: the job waits instead of running beside all others.
        kueue = "kueue.x-k8s.io" in world.kubectl("api-versions")
        why = "LocalQueue nowhere doesn't exist" if kueue else "the cluster has no API kueue.x-k8s.io"
        status = world.until("queued", "the reason", lambda s: why in s.get("message", ""))
        assert status["phase"] == "Queued"
        assert world.kubectl("get", "pods", "-l=holdfast.dev/job=queued", "-o=name") == ""
        world.kubectl("delete", "tj", "queued", "--timeout=300s")


def _what_fails_is_suspended_and_deleted(world: World) -> None:
    world.submit("broken", env={"STEPS": "50", "FAIL_AT": "3", "PAUSE": "0.05"}, retries={"failures": 0})
    status = world.phase("broken", "Failed")
    assert status["failures"] == 1
    assert status["attempts"][0]["reason"] == "replica 0: ValueError: loss is nan"

    world.submit("long", replicas=2, env={"STEPS": "10000", "PAUSE": "0.1"})
    world.until("long", "progress", lambda s: steps(s) >= 3)
    url = f"{world.urls[0]}/v1/namespaces/{world.namespace}/jobs/long/drill"
    headers = {"Authorization": f"Bearer {admin(world)}"}
    asked = {"replica": 1, "kind": "notice"}
    answer = httpx.post(url, headers=headers, json=asked, trust_env=False, timeout=300)
    assert answer.status_code == 202, answer.text
    status = world.until("long", "attempt 2 at work", lambda s: s["attempt"] == 2 and s["phase"] == "Running")
    assert status["attempts"][0]["reason"] == "replica 1: Drilled: given notice on request"

    world.kubectl("patch", "tj", "long", "--type=merge", '-p={"spec":{"suspend":true}}')
    status = world.phase("long", "Suspended")
    assert [a["verdict"] for a in status["attempts"]] == ["Disrupted", "Suspended"]
    assert status["attempts"][1]["durableStep"] >= 3
    assert status["attempts"][1]["lostSteps"] == 0
    world.kubectl("patch", "tj", "long", "--type=merge", '-p={"spec":{"suspend":false}}')
    status = world.until("long", "attempt 3 at work", lambda s: s["attempt"] == 3 and s["phase"] == "Running")
    assert (status["failures"], status["disruptions"]) == (0, 1)
    world.kubectl("delete", "tj", "long", "--timeout=300s")
    wait_until(
        lambda: world.kubectl("get", "pods", "-l=holdfast.dev/job=long", "-o=name") == "", "no pod left"
    )

    world.submit("nowhere", storage={"claim": "no-such-claim"}, env={"STEPS": "1"})
    why = 'persistentvolumeclaim "no-such-claim" not found'
    world.until(
        "nowhere", "the reason to wait", lambda s: s.get("phase") == "Queued" and why in s.get("message", "")
    )


def test_what_happens_while_no_controller_looks_is_not_lost(world: World) -> None:
    first = world.controller("one", "story")
    world.submit("gpt", replicas=2, env={"STEPS": "60", "PAUSE": "0.1", "ATTEMPTS": "2"})
    world.until("gpt", "progress", lambda s: steps(s) >= 3)
    os.kill(first.pid, signal.SIGKILL)
    first.wait()
    world.kubectl("delete", "pod", "gpt-1-worker-0", "--wait=false")
    wait_until(
        lambda: "exitCode" in world.kubectl("get", "pod", "gpt-1-worker-0", "-o=jsonpath={.status}"),
        "the replica to end, unseen",
    )
    world.controller("two", "story")  # waits until the dead one's lease has run out
    status = world.until("gpt", "a second attempt", lambda s: s["attempt"] == 2)
    assert status["attempts"][0]["verdict"] == "Disrupted"
    assert status["attempts"][0]["reason"] == "replica 0: Deleted: somebody deleted the pod"
    world.phase("gpt", "Succeeded")


def test_rest_gives_each_caller_what_kubectl_would(world: World) -> None:
    world.controller("one", "story")
    world.submit("gpt", env={"STEPS": "1"})
    namespace = world.namespace
    rules = {
        "viewer": ("get,list,watch", "trainingjobs.holdfast.dev"),
        "editor": ("get,list,watch,create,update,patch,delete", "trainingjobs.holdfast.dev"),
    }
    for name, (verbs, resource) in rules.items():
        world.kubectl("create", "role", name, f"--verb={verbs}", f"--resource={resource}")
        world.kubectl("create", "rolebinding", name, f"--role={name}", f"--serviceaccount={namespace}:{name}")
        wait_until_allowed(world.cluster.kubectl, namespace, name, "list")
    tokens = {name: world.token(name) for name in ("viewer", "editor", "stranger")}
    jobs = f"/v1/namespaces/{namespace}/jobs"
    body = {"metadata": {"name": "new", "namespace": namespace}, "spec": {"command": ["python", "x"]}}
    asked = [
        ("GET", jobs, {}, (200, 200, 403)),
        ("GET", f"{jobs}/gpt", {}, (200, 200, 403)),
        ("GET", f"{jobs}/gpt/events", {}, (200, 200, 403)),
        ("GET", f"{jobs}/gpt/ledger", {}, (200, 200, 403)),
        ("POST", jobs, {"json": body, "params": {"dryRun": "true"}}, (403, 200, 403)),
        ("POST", jobs, {"json": body}, (403, 201, 403)),
        ("POST", f"{jobs}/gpt/drill", {"json": {}}, (403, 409, 403)),
        ("DELETE", f"{jobs}/new", {}, (403, 202, 403)),
        ("GET", "/v1/jobs", {}, (403, 403, 403)),
        ("GET", "/v1/namespaces/kube-system/jobs", {}, (403, 403, 403)),
        ("GET", "/metrics", {}, (403, 403, 403)),
    ]
    world.until("gpt", "a status", lambda s: s["phase"] in ("Running", "Succeeded"))
    world.phase("gpt", "Succeeded")
    with httpx.Client(base_url=world.urls[0], trust_env=False, timeout=300) as client:
        for method, path, options, expected in asked:
            for name, code in zip(("viewer", "editor", "stranger"), expected, strict=True):
                headers = {"Authorization": f"Bearer {tokens[name]}"}
                answer = client.request(method, path, headers=headers, **options)
                assert answer.status_code == code, (method, path, name, answer.text)
        refused = client.get(jobs, headers={"Authorization": f"Bearer {tokens['stranger']}"}).json()
        assert refused["detail"] == (
            f"system:serviceaccount:{namespace}:stranger may not list trainingjobs in namespace {namespace}"
        )
        assert client.get(jobs).status_code == 401
        unknown = client.get(jobs, headers={"Authorization": "Bearer nonsense"})
        assert (unknown.status_code, "does not know this token" in unknown.text) == (401, True)
        paths = client.get("/openapi.json", headers={"Authorization": f"Bearer {tokens['stranger']}"}).json()
        for path, methods in paths["paths"].items():
            if path in ("/healthz", "/readyz"):
                continue
            for method in methods:
                where = path.replace("{namespace}", namespace).replace("{name}", "gpt")
                assert client.request(method, where).status_code == 401, (method, path)
