"""The whole path on a real cluster, nothing pretended: both images are built from docker/, the chart is
installed by helm, text is prepared in a pod, and a GPT trains under DDP in two pods of the real Training
Operator. Jobs come by REST, by the command line and by kubectl, and one of them loses a pod on the way.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from scripts.demo.proof import Evidence, differences
from slow_training import COMMAND
from tests.cluster.claims import Files, claim
from tests.cluster.cluster import Cluster
from tests.cluster.platform import CHART, Platform, installed, is_ready
from tests.cluster.trainingjobs import evict, release
from waiting import wait_until

from holdfast_controller.api.ledger import account
from holdfast_controller.jobs import TrainingJob
from holdfast_trainer.contract import RunDir, read_lines

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(2400)]

STEPS = 240
NAMES = ("by-rest", "by-cli", "by-kubectl")
CONFIG: dict[str, Any] = {
    "model": {"vocab_size": 512, "layers": 2, "heads": 2, "width": 64, "context": 64, "dropout": 0.1},
    "data": {"path": "/holdfast/data/text"},
    "train": {"steps": STEPS, "global_batch": 8, "micro_batch": 2, "log_every": 50},
    "optim": {"learning_rate": 1e-3, "warmup_steps": 20},
    "validation": {"every": 100, "batches": 2},
}


@dataclass(frozen=True)
class World:
    """Holdfast installed, a namespace for jobs with two claims, and text prepared on one of them."""

    platform: Platform
    namespace: str
    runs: Files

    def kubectl(self, *words: str, document: object = None) -> str:
        text = None if document is None else json.dumps(document)
        return self.platform.cluster.kubectl.run(*words, f"-n={self.namespace}", document=text)

    def job(self, name: str) -> dict[str, Any]:
        return self.platform.cluster.kubectl.get("tj", name, f"-n={self.namespace}")

    def run_directory(self, name: str) -> RunDir:
        """As the job's pods see it, seen from here as it is now."""
        uid = self.job(name)["metadata"]["uid"]
        return RunDir(self.runs(f"{self.namespace}/{name}-{uid[:8]}"))

    def until(self, name: str, what: str, condition: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
        """The job's status once the condition holds."""
        seen: dict[str, Any] = {}

        def holds() -> bool:
            seen.update(self.job(name).get("status") or {})
            assert seen.get("phase") != "Failed" or condition(seen), seen["message"]
            return bool(seen) and bool(condition(seen))

        try:
            wait_until(holds, f"{name}: {what}", 900)
        except AssertionError as error:
            raise AssertionError(
                f"{error}\n{json.dumps(seen, indent=1)[-3000:]}\n{self.evidence()}"
            ) from None
        return seen

    def evidence(self) -> str:
        """What a person would look at first."""
        kubectl = self.platform.cluster.kubectl
        controllers = kubectl.attempt(
            "logs", f"-n={self.platform.namespace}", "-l=app.kubernetes.io/name=holdfast", "--tail=40"
        )
        logs = [path.read_text()[-1500:] for path in sorted(self.runs("").rglob("*.log"))]
        return "\n".join([self.kubectl("get", "tj,pods", "-o=wide"), controllers.stdout, *logs])


def training_job(name: str) -> dict[str, Any]:
    return {
        "apiVersion": "holdfast.dev/v1alpha1",
        "kind": "TrainingJob",
        "metadata": {"name": name},
        "spec": {
            "command": ["python", "-m", "holdfast_trainer", "train"],
            "config": CONFIG,
            "replicas": 2,
            "resources": {"cpu": "100m", "memory": "1Gi"},
            "checkpoint": {"every": "50", "keep": 2},
            "storage": {"claim": "training-runs", "data": "training-data"},
        },
    }


@pytest.fixture(scope="module")
def world(
    cluster: Cluster,
    trainer_image: str,
    controller_image: str,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[World]:
    scratch = tmp_path_factory.mktemp("claims")
    namespace = f"path-{uuid.uuid4().hex[:8]}"
    cluster.kubectl.run("create", "namespace", namespace)
    cluster.kubectl.run("label", "namespace", namespace, "pod-security.kubernetes.io/enforce=restricted")
    try:
        with (
            claim(cluster, namespace, "training-data", scratch),
            claim(cluster, namespace, "training-runs", scratch) as runs,
            installed(
                cluster, f"{namespace}-system", controller_image=controller_image, trainer_image=trainer_image
            ) as platform,
        ):
            cluster.kubectl.apply(prepare_text(trainer_image), namespace=namespace)
            cluster.kubectl.run(
                "wait", f"-n={namespace}", "job/prepare-stdlib", "--for=condition=complete", "--timeout=900s",
                seconds=920,
            )  # fmt: skip
            try:
                yield World(platform, namespace, runs)
            finally:
                cluster.kubectl.attempt("delete", "tj", f"-n={namespace}", "--all", "--timeout=300s")
    finally:
        release(cluster.kubectl, namespace)
        cluster.kubectl.run("delete", "namespace", namespace, "--wait=false")


def prepare_text(image: str) -> dict[str, Any]:
    """The Job that the sample gives users, on a few sources."""
    sample = Path(__file__).parents[2] / "k8s" / "examples" / "prepare-data.yaml"
    (job,) = (one for one in yaml.safe_load_all(sample.read_text()) if one["kind"] == "Job")
    (container,) = job["spec"]["template"]["spec"]["containers"]
    container["image"] = image
    container["resources"] = {"requests": {"cpu": "100m", "memory": "512Mi"}}
    command = container["command"][-1]
    for old, new in (
        ('["stdlib"])', '["stdlib"] + "/email")'),
        ("/data/stdlib", "/data/text"),
        ("--vocab-size 4096", "--vocab-size 512 --validation-fraction 0.2"),
    ):
        assert old in command
        command = command.replace(old, new)
    container["command"][-1] = command
    return dict(job)


def test_the_installed_release_passes_its_own_test(world: World) -> None:
    said = world.platform.helm("test", "holdfast")
    assert "Phase:          Succeeded" in said


def test_a_job_comes_by_rest_by_command_line_and_by_kubectl_and_survives_an_eviction(
    world: World, tmp_path: Path
) -> None:
    platform, namespace = world.platform, world.namespace
    editor = platform.token(namespace, "alice", "edit")

    answer = httpx.post(
        f"{platform.url}/v1/namespaces/{namespace}/jobs",
        json=training_job("by-rest"),
        headers={"Authorization": f"Bearer {editor}"},
        trust_env=False,
        timeout=300,
    )
    assert answer.status_code == httpx.codes.CREATED, answer.text
    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump(training_job("by-cli")))
    assert (
        platform.holdfast(editor, "submit", str(file), "-n", namespace) == f"{namespace}/by-cli submitted\n"
    )
    world.kubectl("apply", "-f", "-", document=training_job("by-kubectl"))

    rest = Rest(platform.url, namespace, editor)
    world.until("by-kubectl", "5 steps", lambda status: len(rest.steps("by-kubectl")) >= 5)
    evict(world.platform.cluster.kubectl, world.namespace, "by-kubectl-1-worker-1")
    for name in NAMES:
        world.until(name, "phase Succeeded", lambda status: status["phase"] == "Succeeded")

    tells_the_truth_of_an_untouched_job(world, "by-rest")
    tells_the_truth_of_an_untouched_job(world, "by-cli")
    tells_the_truth_of_an_evicted_job(world)
    for twin in ("by-rest", "by-cli"):
        assert differences(proof_of(world, "by-kubectl", twin)) == ""
    for name in NAMES:
        figures_are_those_of_the_run_directory(world, name, rest.ledger(name))

    # All of it outlives the controllers that saw it.
    told = {name: rest.ledger(name) for name in NAMES}
    shown = {name: platform.holdfast(editor, "ledger", name, "-n", namespace) for name in NAMES}
    restart_controllers(world)
    for name in NAMES:
        again = rest.ledger(name)
        assert (again["attempts"], again["totals"]) == (told[name]["attempts"], told[name]["totals"])
        assert platform.holdfast(editor, "ledger", name, "-n", namespace) == shown[name]
        assert percent(again["totals"]["goodput"]) in shown[name]
        row = world.kubectl("get", "tj", name, "--no-headers").split()
        assert row[:3] == [name, "Succeeded", str(STEPS)]
        assert percent(again["totals"]["goodput"]) in row
    refused = rest.get("by-rest/steps")
    assert refused.status_code == httpx.codes.CONFLICT
    assert "on claim training-runs, in" in refused.json()["detail"]

    # Deleting a job takes its pods, and never the work.
    uid = world.job("by-cli")["metadata"]["uid"]
    said = platform.holdfast(editor, "delete", "by-cli", "-n", namespace, "--wait", seconds=330)
    assert f"{namespace}/by-cli is being deleted; what it wrote on a claim stays there" in said
    assert world.kubectl("get", "pods,pytorchjobs", "-l=holdfast.dev/job=by-cli", "-o=name") == ""
    assert (world.runs(f"{namespace}/by-cli-{uid[:8]}") / "checkpoints").exists()


def test_a_job_trains_on_while_the_release_is_upgraded_rolled_back_and_installed_anew(world: World) -> None:
    """The controllers come and go with their release; the pods of a job are not theirs."""
    platform, kubectl, name = world.platform, world.platform.cluster.kubectl, "long"
    document = training_job(name)
    del document["spec"]["config"]
    document["spec"]["command"] = COMMAND
    world.kubectl("apply", "-f", "-", document=document)

    def trains_on() -> None:
        """Beyond where it is now: whoever leads now has asked it."""
        known = step_of(world.job(name)["status"])
        status = world.until(name, f"beyond step {known}", lambda status: step_of(status) > known)
        assert (status["attempt"], status["disruptions"], status["failures"]) == (1, 0, 0)

    def pods() -> set[str]:
        selected = kubectl.get("pods", f"-n={world.namespace}", f"-l=holdfast.dev/job={name}")["items"]
        assert all(pod["status"]["phase"] == "Running" for pod in selected)
        return {pod["metadata"]["uid"] for pod in selected}

    world.until(name, "its first step", step_of)
    before = pods()
    assert len(before) == 2
    upgrade = ("--set=logLevel=debug", "--wait", "--timeout=600s")
    platform.helm("upgrade", "holdfast", str(CHART), *platform.values, *upgrade)
    trains_on()
    platform.helm("rollback", "holdfast", "1", "--wait", "--timeout=600s")
    trains_on()
    platform.helm("uninstall", "holdfast", "--wait", "--timeout=600s")
    assert pods() == before
    platform.install()
    trains_on()
    assert pods() == before
    kubectl.run("delete", "tj", name, f"-n={world.namespace}", "--timeout=300s", seconds=310)


@dataclass(frozen=True)
class Rest:
    """What a client that holds a service account's token is told."""

    url: str
    namespace: str
    token: str

    def get(self, path: str) -> httpx.Response:
        headers = {"Authorization": f"Bearer {self.token}"}
        url = f"{self.url}/v1/namespaces/{self.namespace}/jobs/{path}"
        return httpx.get(url, headers=headers, trust_env=False, timeout=300)

    def ledger(self, name: str) -> dict[str, Any]:
        answer = self.get(f"{name}/ledger")
        assert answer.status_code == httpx.codes.OK, answer.text
        return dict(answer.json())

    def steps(self, name: str) -> list[dict[str, Any]]:
        """None where rank 0 cannot be asked."""
        answer = self.get(f"{name}/steps")
        assert answer.status_code in (httpx.codes.OK, httpx.codes.CONFLICT), answer.text
        return list(answer.json()["items"]) if answer.is_success else []


def step_of(status: dict[str, Any]) -> int:
    return int((status.get("progress") or {"step": 0})["step"])


def percent(share: float) -> str:
    return f"{100 * share:.1f}%"


def restart_controllers(world: World) -> None:
    """As a drain of their node does; there are two, and the Service goes on."""
    kubectl = world.platform.cluster.kubectl
    where = f"-n={world.platform.namespace}"
    kubectl.run("rollout", "restart", "deployment/holdfast", where)
    kubectl.run("rollout", "status", "deployment/holdfast", where, "--timeout=300s", seconds=310)
    selected = "-l=app.kubernetes.io/component=controller"
    wait_until(
        lambda: len(kubectl.get("pods", where, selected)["items"]) == 2,
        "the old controllers to be gone, and no request to reach them",
    )
    wait_until(lambda: is_ready(world.platform.url), "a forwarded port to lead to a new one")


def tells_the_truth_of_an_evicted_job(world: World) -> None:
    evicted = world.job("by-kubectl")["status"]
    first, second = evicted["attempts"]
    assert (evicted["attempt"], evicted["disruptions"], evicted["failures"]) == (2, 1, 0)
    assert first["verdict"] == "Disrupted"
    assert first["reason"].startswith("replica 1: EvictionByEvictionAPI")
    assert 5 <= first["lastStep"] == first["durableStep"] == second["resumedStep"] < STEPS
    assert (evicted["lostSteps"], first["lostSteps"], second["lostSteps"]) == (0, 0, 0)
    assert (second["verdict"], second["lastStep"], second["durableStep"]) == ("Finished", STEPS, STEPS)
    assert "unable to retrieve" not in json.dumps(evicted), "no log is not a log"


def figures_are_those_of_the_run_directory(world: World, name: str, told: dict[str, Any]) -> None:
    """The controller does not mount it: what it tells has come from rank 0."""
    lines, steps = written(world.run_directory(name))
    status = world.job(name)["status"]
    seconds = {line["step"]: line["seconds"] for line in steps if "seconds" in line}
    assert sorted(seconds) == list(range(1, STEPS + 1))
    assert status["usefulSeconds"] == pytest.approx(sum(seconds.values()))
    assert status["progress"]["loss"] == [line["loss"] for line in steps if "loss" in line][-1]
    assert status["progress"]["valLoss"] == [line["val_loss"] for line in steps if "val_loss" in line][-1]
    job = TrainingJob.model_validate(world.job(name), extra="ignore")
    itself = account(job, lines, steps).model_dump(mode="json", by_alias=True)
    same = ("worldSize", "resumedStep", "firstStep", "lastStep", "durableStep", "lostSteps")
    for ours, theirs in zip(told["attempts"], itself["attempts"], strict=True):
        assert {key: ours[key] for key in same} == {key: theirs[key] for key in same}
        for key in ("checkpoints", "outcome", "digest"):
            assert ours[key] == theirs[key], (key, ours, theirs)
    ended = datetime.fromisoformat(status["attempts"][-1]["endedAt"])
    wall = (ended - job.status.first_started_at).total_seconds()
    assert told["totals"]["goodput"] == status["goodput"] == pytest.approx(sum(seconds.values()) / wall)


def tells_the_truth_of_an_untouched_job(world: World, name: str) -> None:
    status = world.job(name)["status"]
    (only,) = status["attempts"]
    assert (status["attempt"], status["disruptions"], status["failures"]) == (1, 0, 0)
    assert (only["verdict"], only["lostSteps"], status["lostSteps"]) == ("Finished", 0, 0)
    assert only["lastStep"] == only["durableStep"] == status["progress"]["step"] == STEPS


def proof_of(world: World, name: str, twin: str) -> Evidence:
    """What both runs wrote on the claim, as `make demo` compares it."""
    ledgers, steps = zip(*(written(world.run_directory(one)) for one in (name, twin)), strict=True)
    ends = [[line for line in lines if line["event"] == "stop"] for lines in ledgers]
    assert all(line["digest"] for lines in ends for line in lines)
    return Evidence(
        submitted=0.0,
        job=TrainingJob.model_validate(training_job(name)),
        ledger={"attempts": ends[0]},
        steps=steps[0],
        twin_ledger={"attempts": ends[1]},
        twin_steps=steps[1],
    )


def written(run: RunDir) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Ledger lines and steps of all attempts."""
    numbers = run.attempt_numbers()
    return (
        [line for number in numbers for line in read_lines(run.ledger(number))],
        [{**line, "attempt": number} for number in numbers for line in read_lines(run.steps(number))],
    )
