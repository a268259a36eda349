"""A hundred jobs run, and what their trainers say reaches `kubectl get tj`, without a flood of writes.

The apiserver and the controller are real, and so is the endpoint of each trainer, at a hundred addresses of
this machine; pods that no kubelet runs have them, and training itself is played. What is proven: the newest
figures of all jobs arrive, figures alone are written at most once in `PROGRESS_SECONDS` for a job, and a
controller that is started anew has lost nothing. How long the figures take `make bench-controller` tells.
"""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from subprocess import Popen
from typing import Any

import pytest
import yaml
from bench.controlling.trainers import Trainers, address_of, trainers
from bench.report import ReportError
from processes import Processes
from tests.cluster import training_operator, trainingjobs
from tests.cluster.control_plane import ControlPlane
from tests.cluster.platform import is_ready
from waiting import wait_until

from holdfast_controller.on_cluster import PROGRESS_SECONDS
from holdfast_controller.pytorchjobs import PYTORCH_JOB

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(2400)]

JOBS = 100
NAMESPACE = "many"
CRD = Path(__file__).parents[2] / "helm" / "holdfast" / "templates" / "crd.yaml"
STARTED = "2026-01-01T00:00:00Z"


@pytest.fixture
def ranks() -> Iterator[Trainers]:
    with ExitStack() as stack:
        try:
            there = stack.enter_context(trainers(JOBS))
        except ReportError as error:
            pytest.skip(str(error))
        yield there


@pytest.fixture
def plane(control_plane: ControlPlane) -> Iterator[ControlPlane]:
    kubectl = control_plane.kubectl
    crds = [yaml.safe_load(CRD.read_text()), training_operator.crd(kubectl)]
    trainingjobs.install(kubectl, *crds, namespaces=(NAMESPACE,))
    trainingjobs.clear(kubectl)
    kubectl.run("wait", f"-n={NAMESPACE}", "--for=create", "serviceaccount/default", "--timeout=300s")
    yield control_plane
    trainingjobs.clear(kubectl)
    kubectl.run("delete", "pods,pytorchjobs,configmaps", f"-n={NAMESPACE}", "--all", "--wait=false")


def controller(plane: ControlPlane, processes: Processes, directory: Path) -> Popen[str]:
    """Start one, and wait until it is ready."""
    log, settings = directory / "controller.log", directory / "jobs.yaml"
    settings.write_text(yaml.safe_dump({"defaultImage": "trainer:1", "defaultClaim": "runs"}))
    log.unlink(missing_ok=True)
    command = [
        sys.executable, "-m", "holdfast_controller", "controller", "--engine", "kubernetes",
        f"--kubeconfig={plane.kubectl.kubeconfig}", "--host=127.0.0.1", "--port=0",
        f"--pod-settings={settings}", f"--namespace={NAMESPACE}", "--lease=many", "--identity=one",
        "--log-format=json",
    ]  # fmt: skip
    with log.open("w") as output:
        started = processes.start(command, stderr=output, stdout=output)

    def ready() -> bool:
        assert started.poll() is None, log.read_text()
        found = re.search(r'"port": (\d+)', log.read_text())
        return found is not None and is_ready(f"http://127.0.0.1:{found[1]}")

    wait_until(ready, "the controller to be ready")
    return started


def training_job(number: int) -> dict[str, Any]:
    return {
        "apiVersion": "holdfast.dev/v1alpha1",
        "kind": "TrainingJob",
        "metadata": {"name": f"job-{number}", "namespace": NAMESPACE},
        "spec": {"command": ["python", "train.py"], "resources": {"cpu": "100m"}},
    }


def pod_of(pytorch_job: dict[str, Any]) -> dict[str, Any]:
    """As the operator makes it, but not held as evidence: nothing ends here."""
    template = pytorch_job["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]
    name = pytorch_job["metadata"]["name"]
    labels = {**template["metadata"]["labels"], PYTORCH_JOB.index_label: "0"}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": f"{name}-worker-0", "namespace": NAMESPACE, "labels": labels},
        "spec": {**template["spec"], "restartPolicy": "Never"},
    }


def running(pod: dict[str, Any], address: str) -> dict[str, Any]:
    """What a kubelet would say of it."""
    state = {"running": {"startedAt": STARTED}}
    container = {
        "name": "pytorch", "ready": True, "started": True, "restartCount": 0, "image": "trainer:1",
        "imageID": "", "state": state,
    }  # fmt: skip
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": pod["metadata"]["name"], "namespace": NAMESPACE},
        "status": {
            "phase": "Running",
            "podIP": address,
            "podIPs": [{"ip": address}],
            "startTime": STARTED,
            "containerStatuses": [container],
        },
    }


def as_list(items: list[dict[str, Any]]) -> str:
    return json.dumps({"apiVersion": "v1", "kind": "List", "items": items})


def status_writes(plane: ControlPlane) -> float:
    """Of all TrainingJobs so far, as the apiserver counts them."""
    lines = plane.kubectl.run("get", "--raw=/metrics").splitlines()
    return sum(
        float(line.rsplit(" ", 1)[1])
        for line in lines
        if line.startswith("apiserver_request_total{")
        and 'resource="trainingjobs"' in line
        and 'subresource="status"' in line
        and ('verb="PATCH"' in line or 'verb="APPLY"' in line or 'verb="PUT"' in line)
    )


def test_the_figures_of_a_hundred_jobs_arrive_without_a_flood_of_writes(
    plane: ControlPlane, processes: Processes, ranks: Trainers, tmp_path: Path
) -> None:
    kubectl = plane.kubectl
    where = f"-n={NAMESPACE}"
    first = controller(plane, processes, tmp_path)
    kubectl.run("create", "-f", "-", document=as_list([training_job(n) for n in range(JOBS)]))

    def opened() -> list[dict[str, Any]]:
        found = kubectl.get("pytorchjobs", where)["items"]
        return found if len(found) == JOBS else []

    pods = [pod_of(one) for one in wait_until(opened, "an attempt of each job")]
    kubectl.run("create", "-f", "-", document=as_list(pods))
    alive = [running(pod, address) for pod, address in zip(pods, map(address_of, range(JOBS)), strict=True)]
    kubectl.run("apply", "--server-side", "--subresource=status", "-f", "-", document=as_list(alive))

    def all_at(step: int) -> bool:
        jobs = kubectl.get("tj", where)["items"]
        at = [((job.get("status") or {}).get("progress") or {}).get("step") for job in jobs]
        return len(at) == JOBS and all(one is not None and one >= step for one in at)

    ranks.step_done(10)
    wait_until(lambda: all_at(10), "the figures of every job")
    ranks.step_done(20)
    wait_until(lambda: all_at(20), "the next figures of every job")
    for job in kubectl.get("tj", where)["items"]:
        assert job["status"]["phase"] == "Running"
        assert job["status"]["usefulSeconds"] == 10.0

    # They train on, a step every moment; the apiserver hears of a job every few seconds.
    before, began = status_writes(plane), time.monotonic()
    while time.monotonic() < began + 3 * PROGRESS_SECONDS:
        ranks.step_done(ranks.step + 1)
        time.sleep(0.05)
    written, seconds = status_writes(plane) - before, time.monotonic() - began
    print(f"{written:.0f} writes of status in {seconds:.1f} s while {ranks.step} steps were done")
    assert written <= JOBS * (seconds / PROGRESS_SECONDS + 2)

    # A controller that is started anew goes on from what the status says.
    first.kill()
    first.wait()
    kubectl.run("delete", "lease", "many", where)  # or it would wait for the dead one's to run out
    ranks.step_done(1000)
    second = controller(plane, processes, tmp_path)
    wait_until(lambda: all_at(1000), "the figures told to the next controller")
    for job in kubectl.get("tj", where)["items"]:
        assert (job["status"]["attempt"], job["status"]["disruptions"]) == (1, 0)

    kubectl.run("delete", "tj", where, "--all", "--wait=false")
    wait_until(
        lambda: kubectl.run("get", "tj,pods,pytorchjobs", where, "-o=name") == "",
        "every job and all that it had to go",
    )
    second.terminate()
    assert second.wait(300) == 0
