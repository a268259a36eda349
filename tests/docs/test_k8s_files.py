"""What lies in k8s/ works as it is: jobs are jobs, YAML is YAML, scripts parse, links lead somewhere."""

from __future__ import annotations

import re
import subprocess
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import yaml

from holdfast_controller.jobs import TrainingJob
from holdfast_controller.manifests import attempt_manifests
from holdfast_controller.pod_settings import PodSettings
from holdfast_controller.pod_template import JOB_LABEL
from holdfast_controller.policy.placement import MARKS, Provider
from holdfast_controller.policy.quantity import quantity
from holdfast_trainer.contract import DEFAULT_PORT

K8S = Path(__file__).parents[2] / "k8s"
FILES = sorted(K8S.rglob("*.yaml"))


def documents(path: Path) -> list[dict[str, Any]]:
    return [one for one in yaml.safe_load_all(path.read_text()) if one]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(K8S)))
def test_every_file_holds_whole_objects(path: Path) -> None:
    for one in documents(path):
        assert one["apiVersion"]
        assert one["metadata"]["name"]
        if one["kind"] == "TrainingJob":
            job = TrainingJob.model_validate(one)
            if job.spec.image:  # those without are for one machine
                attempt_manifests(job, 1, PodSettings())


def test_the_jobs_of_a_cluster_find_the_data_that_the_sample_prepares() -> None:
    prepared = documents(K8S / "examples/prepare-data.yaml")
    claims = {one["metadata"]["name"] for one in prepared if one["kind"] == "PersistentVolumeClaim"}
    (job,) = (one for one in prepared if one["kind"] == "Job")
    (container,) = job["spec"]["template"]["spec"]["containers"]
    vocabulary = int(re.search(r"--vocab-size (\d+)", container["command"][-1])[1])  # type: ignore[index]
    for path in sorted((K8S / "examples").glob("*.yaml")):
        for one in documents(path):
            if one["kind"] == "TrainingJob" and one["spec"].get("storage"):
                assert set(one["spec"]["storage"].values()) <= claims
                assert one["spec"]["config"]["data"]["path"] == "/holdfast/data/stdlib"
                assert one["spec"]["config"]["model"]["vocab_size"] == vocabulary


def test_the_policy_for_a_namespace_lets_in_whom_a_job_needs() -> None:
    """Its own pods, on whatever port, and whoever asks for its figures where pods give them."""
    (policy,) = documents(K8S / "network-policy.yaml")
    among, figures = policy["spec"]["ingress"]
    jobs = {"matchExpressions": [{"key": JOB_LABEL, "operator": "Exists"}]}
    assert policy["spec"]["podSelector"] == jobs
    assert among == {"from": [{"podSelector": jobs}]}
    assert figures["ports"] == [{"port": DEFAULT_PORT, "protocol": "TCP"}]
    (where,) = figures["from"][0]["namespaceSelector"]["matchExpressions"]
    assert "-n holdfast-system" in (K8S / "README.md").read_text()
    assert "holdfast-system" in where["values"]


@pytest.mark.parametrize("told", ["README.md", "k8s/README.md", "helm/holdfast/templates/NOTES.txt"])
def test_whoever_is_told_to_submit_the_sample_has_its_data_made_first(told: str) -> None:
    """Without them the job fails, and no retry can mend it."""
    commands = [line.strip() for line in (K8S.parent / told).read_text().splitlines() if "kubectl" in line]
    steps = [
        "examples/prepare-data.yaml",
        "--for=condition=complete job/prepare-stdlib",
        "gpt-stdlib-cluster",
    ]
    first = [next(n for n, line in enumerate(commands) if step in line) for step in steps]
    assert first == sorted(first)


SIZES = {
    "g5.12xlarge": (4, 48, 192), "g6.12xlarge": (4, 48, 192), "g6e.12xlarge": (4, 48, 384),
    "g2-standard-48": (4, 48, 192), "Standard_NC24ads_A100_v4": (1, 24, 220),
    "Standard_NC96ads_A100_v4": (4, 96, 880),
}  # fmt: skip
"""GPUs, cores and GiB of memory, as their vendors tell them."""


@pytest.mark.parametrize("pool", ["eks.yaml", "gke.sh", "aks.sh"])
def test_the_sample_for_spot_gpus_has_room_on_the_nodes_of_each_sample_pool(pool: str) -> None:
    """It asked for eight GPUs where nodes have four, or one, and waited for ever."""
    text = (K8S / "node-pools" / pool).read_text()
    kinds = re.findall(r"(?:g\w+\.\w*xlarge|g2-standard-\d+|Standard_\w+)", text)
    assert kinds
    [one] = documents(K8S / "examples/gpt-spot-gpus.yaml")
    spec = TrainingJob.model_validate(one).spec
    assert spec.resources.cpu
    assert spec.resources.memory
    assert spec.replicas <= int(re.search(r"max(?:Size:|-nodes|-count) (\d+)", text)[1])  # type: ignore[index]
    for gpus, cores, gibibytes in (SIZES[kind] for kind in kinds):
        assert quantity(str(spec.gpus)) <= gpus
        # A node keeps some of both for itself and its daemons.
        assert quantity(spec.resources.cpu) <= Fraction(9, 10) * cores
        assert quantity(spec.resources.memory) <= Fraction(9, 10) * gibibytes * 2**30


def test_teams_share_one_pool_and_each_gets_its_own_back() -> None:
    """What two teams are told to apply gives them together what one queue has, by the same resources."""

    def quotas(one: dict[str, Any]) -> dict[str, Fraction]:
        [group] = one["spec"]["resourceGroups"]
        [flavor] = group["flavors"]
        assert [quota["name"] for quota in flavor["resources"]] == group["coveredResources"]
        return {quota["name"]: quantity(quota["nominalQuota"]) for quota in flavor["resources"]}

    def of_kind(name: str, kind: str) -> list[dict[str, Any]]:
        return [one for one in documents(K8S / "kueue" / name) if one["kind"] == kind]

    (alone,) = of_kind("queues.yaml", "ClusterQueue")
    teams = of_kind("teams.yaml", "ClusterQueue")
    shares = [quotas(team) for team in teams]
    assert {name: sum(share[name] for share in shares) for name in shares[0]} == quotas(alone)
    assert {team["spec"]["cohort"] for team in teams} == {"training"}
    assert {team["spec"]["preemption"]["reclaimWithinCohort"] for team in teams} == {"Any"}
    assert all(float(team["spec"]["fairSharing"]["weight"]) > 0 for team in teams)
    queues = of_kind("teams.yaml", "LocalQueue")
    for team, queue in zip(teams, queues, strict=True):
        assert queue["spec"]["clusterQueue"] == team["metadata"]["name"]
        selected = team["spec"]["namespaceSelector"]["matchLabels"]["kubernetes.io/metadata.name"]
        assert selected == queue["metadata"]["namespace"]
    assert {one["metadata"]["name"] for one in (*queues, *of_kind("queues.yaml", "LocalQueue"))} == {
        "training"
    }, "a job names the same queue, whichever is used"


@pytest.mark.parametrize("path", sorted(K8S.rglob("*.sh")), ids=lambda path: path.name)
def test_scripts_parse(path: Path) -> None:
    assert subprocess.run(["sh", "-n", str(path)], check=False).returncode == 0


@pytest.mark.parametrize("path", sorted((K8S / "node-pools").glob("*.sh")), ids=lambda path: path.name)
def test_scripts_that_make_nodes_ask_for_what_they_need(path: Path) -> None:
    done = subprocess.run(
        ["sh", str(path)], capture_output=True, text=True, check=False, env={"PATH": "/usr/bin:/bin"}
    )
    assert done.returncode
    assert re.search(r"name the (cluster|resource group): ", done.stderr)


def test_the_readme_tells_the_marks_and_notices_of_the_code() -> None:
    text = (K8S / "README.md").read_text()
    for provider, mark in MARKS.items():
        row = next(line for line in text.splitlines() if line.startswith(f"| {provider.value} |"))
        assert f"`{mark.label}={mark.value}`" in row
        assert f"{mark.notice_seconds:g} s" in row
    shortest = min(mark.notice_seconds for mark in MARKS.values())
    assert f"| {Provider.AUTO.value} | any of them | {shortest:g} s" in text


def test_the_readme_names_the_chart_s_values_with_their_defaults() -> None:
    text = (K8S / "README.md").read_text()
    known = {field.alias for field in PodSettings.model_fields.values()}
    assert set(re.findall(r"\bjobs\.(\w+)", text)) <= known
    for name, default in (
        ("sharedMemory", PodSettings().shared_memory),
        ("scratch", PodSettings().scratch),
    ):
        assert f"`jobs.{name}` ({default.removesuffix('Gi')} GiB)" in text
    for name in re.findall(r"\bjobs\.ncclEnvironment\.(\w+)", text):
        assert name.startswith("NCCL_")


def test_links_lead_somewhere() -> None:
    for link in re.findall(r"\]\(([^)#:]+)\)", (K8S / "README.md").read_text()):
        assert (K8S / link).exists(), link
