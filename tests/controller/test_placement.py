"""Policies about pods: where they may run, what a share of a GPU is, which images are allowed."""

from __future__ import annotations

import re
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from holdfast_controller.jobs import Capacity, Spec
from holdfast_controller.pod_settings import PodSettings, PodSettingsError, load_pod_settings
from holdfast_controller.policy.gpu_request import GpuRequest, gpu_request
from holdfast_controller.policy.images import allowed
from holdfast_controller.policy.placement import Provider, affinity, marks_of, tolerations
from holdfast_controller.policy.quantity import quantity

GKE, AKS, GENERIC = (
    "cloud.google.com/gke-spot",
    "kubernetes.azure.com/scalesetpriority",
    "node.kubernetes.io/spot",
)
GPU = "nvidia.com/gpu"
CPU_ONLY = GpuRequest()
WHOLE = gpu_request("8")

TOLERATED = [
    # provider, capacity, GPUs -> keys
    (Provider.GKE, Capacity.SPOT, WHOLE, [GKE, GPU]),
    (Provider.GKE, Capacity.ON_DEMAND, WHOLE, [GPU]),
    (Provider.GKE, Capacity.ANY, CPU_ONLY, [GKE]),
    (Provider.EKS, Capacity.SPOT, WHOLE, [GPU]),
    (Provider.KARPENTER, Capacity.SPOT, CPU_ONLY, []),
    (Provider.AKS, Capacity.SPOT, WHOLE, [AKS, GPU]),
    (Provider.GENERIC, Capacity.ANY, CPU_ONLY, [GENERIC]),
    (Provider.AUTO, Capacity.SPOT, CPU_ONLY, [GKE, AKS, GENERIC]),
    (Provider.AUTO, Capacity.ON_DEMAND, CPU_ONLY, []),
]


@pytest.mark.parametrize(("provider", "capacity", "gpus", "keys"), TOLERATED)
def test_taints_that_are_tolerated(
    provider: Provider, capacity: Capacity, gpus: GpuRequest, keys: list[str]
) -> None:
    found = tolerations(provider, capacity, gpus)
    assert [one["key"] for one in found] == keys
    assert all(one["effect"] == "NoSchedule" for one in found), "an eviction is never tolerated"


REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"


def terms(found: dict[str, Any]) -> list[list[dict[str, Any]]]:
    required = found["nodeAffinity"][REQUIRED]
    return [term["matchExpressions"] for term in required["nodeSelectorTerms"]]


def place(
    provider: Provider, capacity: Capacity, gpus: GpuRequest = CPU_ONLY, replicas: int = 1, **more: str
) -> dict[str, Any]:
    return affinity(
        provider, capacity, gpus, replicas=replicas, attempt_labels={"holdfast.dev/job": "a"}, **more
    )


def holds(expression: dict[str, Any], node: dict[str, str]) -> bool:
    inside = node.get(expression["key"]) in expression["values"]
    return inside if expression["operator"] == "In" else not inside


def fits(found: dict[str, Any], node: dict[str, str]) -> bool:
    """Whether a node's labels satisfy the affinity, by the scheduler's rules."""
    return REQUIRED not in found.get("nodeAffinity", {}) or any(
        all(holds(expression, node) for expression in term) for term in terms(found)
    )


def wished(found: dict[str, Any], node: dict[str, str]) -> int:
    """The weight that a node gets from the preferences, by the scheduler's rules."""
    return sum(
        wish["weight"]
        for wish in found["nodeAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"]
        if all(holds(expression, node) for expression in wish["preference"]["matchExpressions"])
    )


@pytest.mark.parametrize("provider", [one for one in Provider if one is not Provider.AUTO])
def test_each_capacity_lands_where_it_says(provider: Provider) -> None:
    (mark,) = marks_of(provider)
    spot, ordinary = {mark.label: mark.value}, {"kubernetes.io/os": "linux"}
    for named in (provider, Provider.AUTO):
        assert fits(place(named, Capacity.SPOT), spot)
        assert not fits(place(named, Capacity.SPOT), ordinary)
        assert fits(place(named, Capacity.ON_DEMAND), ordinary)
        assert not fits(place(named, Capacity.ON_DEMAND), spot)
        assert place(named, Capacity.ANY) == {}


@pytest.mark.parametrize("provider", [one for one in Provider if one is not Provider.AUTO])
def test_what_is_only_wished_for_lands_anywhere_and_there_first(provider: Provider) -> None:
    (mark,) = marks_of(provider)
    spot, ordinary = {mark.label: mark.value}, {"kubernetes.io/os": "linux"}
    for named in (provider, Provider.AUTO):
        spot_first, others_first = place(named, Capacity.SPOT_FIRST), place(named, Capacity.ON_DEMAND_FIRST)
        for node in (spot, ordinary):
            assert fits(spot_first, node)
            assert fits(others_first, node)
        assert wished(spot_first, spot) > wished(spot_first, ordinary)
        assert wished(others_first, ordinary) > wished(others_first, spot)
        accepted = tolerations(named, Capacity.SPOT, CPU_ONLY)
        for capacity in (Capacity.SPOT_FIRST, Capacity.ON_DEMAND_FIRST):
            assert tolerations(named, capacity, CPU_ONLY) == accepted, "or it could land on one kind alone"


@pytest.mark.parametrize("capacity", list(Capacity))
@pytest.mark.parametrize("provider", list(Provider))
def test_nobody_waits_on_a_node_that_is_being_taken(provider: Provider, capacity: Capacity) -> None:
    keys = {one.get("key") for one in tolerations(provider, capacity, WHOLE)}
    assert None not in keys, "a toleration without a key accepts every taint"
    assert "karpenter.sh/disrupted" not in keys


def test_a_share_is_of_a_gpu_cut_into_as_many_and_two_of_one_job_never_meet() -> None:
    quarter = gpu_request("0.25")
    found = place(Provider.GKE, Capacity.SPOT, quarter, replicas=2)
    spot = {GKE: "true"}
    assert fits(found, spot | {"nvidia.com/gpu.replicas": "4"})
    assert not fits(found, spot | {"nvidia.com/gpu.replicas": "8"})
    (apart,) = found["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert apart["topologyKey"] == "kubernetes.io/hostname"
    assert "podAntiAffinity" not in place(Provider.GKE, Capacity.SPOT, quarter, replicas=1)
    assert "podAntiAffinity" not in place(Provider.GKE, Capacity.SPOT, WHOLE, replicas=2)
    assert place(Provider.GKE, Capacity.ANY, quarter, slices_label="") == {}


def test_a_mig_profile_is_a_resource_and_two_of_one_job_never_meet() -> None:
    """Parts of one GPU look like one device to NCCL, however MIG cut it."""
    part = gpu_request("1", "1g.10gb")
    assert (part.resources, part.slices) == ({"nvidia.com/mig-1g.10gb": "1"}, None)
    assert gpu_request("1", "1g.10gb.me").resources == {"nvidia.com/mig-1g.10gb.me": "1"}
    assert "podAntiAffinity" in place(Provider.GKE, Capacity.ANY, part, replicas=2)
    assert place(Provider.GKE, Capacity.ANY, part, replicas=1) == {}
    assert [one["key"] for one in tolerations(Provider.GKE, Capacity.ON_DEMAND, part)] == ["nvidia.com/gpu"]


@pytest.mark.parametrize(
    ("mig", "gpus", "told"),
    [
        ("1g.10gb", "0.25", "mig 1g.10gb with 0.25 GPUs: a replica uses one MIG device; set gpus to 1"),
        ("1g.10gb", "2", "mig 1g.10gb with 2 GPUs: a replica uses one MIG device; set gpus to 1"),
        ("mig-1g.10gb", "1", "String should match pattern"),
    ],
)
def test_a_mig_profile_that_cannot_be(mig: str, gpus: str, told: str) -> None:
    with pytest.raises(ValidationError, match=re.escape(told)):
        Spec(command=["x"], gpus=gpus, mig=mig)


@pytest.mark.parametrize(
    ("gpus", "resources", "slices"),
    [
        ("0", {}, None),
        ("1", {"nvidia.com/gpu": "1"}, None),
        ("8", {"nvidia.com/gpu": "8"}, None),
        ("0.25", {"nvidia.com/gpu.shared": "1"}, 4),
        ("0.5", {"nvidia.com/gpu.shared": "1"}, 2),
        ("0.125", {"nvidia.com/gpu.shared": "1"}, 8),
    ],
)
def test_gpus_in_the_words_of_the_device_plugin(
    gpus: str, resources: dict[str, str], slices: int | None
) -> None:
    request = gpu_request(gpus)
    assert request.resources == resources
    assert request.slices == slices


@pytest.mark.parametrize(
    ("image", "patterns", "expected"),
    [
        ("anything:1", (), True),
        ("python:3", ("python:*",), True),
        ("docker.io/library/python:3", ("python:*",), True),
        ("team/trainer:1", ("docker.io/team/*",), True),
        ("docker.io/team/trainer:1", ("team/*",), True),
        ("evil.example.org/team/trainer:1", ("team/*",), False),
        ("registry.example.org.evil.org/team/x", ("registry.example.org/*",), False),
        ("registryXexample.org/team/x", ("registry.example.org/*",), False),
        ("registry.example.org/team/x:1", ("registry.example.org/team/x",), False),
        ("registry.example.org/team/x", ("registry.example.org/team/x",), True),
        ("localhost/trainer", ("trainer",), False),
        # In the registry's name a star stands for no slash, or a path could look like one.
        ("mirror.example.org/team/x", ("*.example.org/team/*",), True),
        ("evil.net/a.example.org/team/x", ("*.example.org/team/*",), False),
        # Runtimes take a name with capitals for a registry, also without a dot.
        ("EVIL/team/x", ("docker.io/*",), False),
        ("EVIL/team/x", ("team/*",), False),
        # One image has one name.
        ("index.docker.io/team/x", ("team/*",), True),
        ("docker.io/python:3", ("python:*",), True),
        # A digest wins over the tag that stands before it: a pattern without a star does not cover it.
        ("registry.example.org/x:1@sha256:" + "0" * 64, ("registry.example.org/x:1",), False),
        ("localhost:5000/trainer:2", ("other/*", "localhost:5000/*"), True),
    ],
)
def test_images_are_compared_by_their_full_names(
    image: str, patterns: tuple[str, ...], expected: bool
) -> None:
    assert allowed(image, patterns) is expected


@pytest.mark.parametrize(
    ("text", "amount"),
    [
        ("8", 8),
        ("500m", Fraction(1, 2)),
        ("1.5", Fraction(3, 2)),
        ("1Gi", 2**30),
        ("2k", 2000),
        ("15937500u", Fraction(255, 16)),  # as a kubelet tells it that keeps 62.5m of 16 cores
        ("1e3", 1000),
        ("5E", 5 * 10**18),
        ("2Pi", 2**51),
    ],
)
def test_quantities_are_exact(text: str, amount: Fraction) -> None:
    assert quantity(text) == amount


def test_a_wrong_quantity_names_itself() -> None:
    for text in ("8 cores", "1K", "1e", "1e999999999"):
        with pytest.raises(ValueError, match=f"'{text}' is not a quantity"):
            quantity(text)


# ---------------------------------------------------------------------- settings


def test_settings_are_read_by_the_names_of_the_chart(tmp_path: Path) -> None:
    path = tmp_path / "jobs.yaml"
    path.write_text("provider: gke\nallowedImages: ['a/*']\nlimits: {gpus: 8}\nncclEnvironment: {A: b}\n")
    settings = load_pod_settings(path)
    assert settings.provider is Provider.GKE
    assert settings.allowed_images == ("a/*",)
    assert settings.limits.gpus == 8
    path.write_text("")
    assert load_pod_settings(path) == PodSettings()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("alowedImages: []", "alowedImages is no setting; did you mean allowedImages?"),
        ("limits: {gpu: 8}", "limits.gpu is no setting; did you mean gpus?"),
        (
            "tolerations: [{key: sku, values: gpu}]",
            "tolerations.0.values is no setting; did you mean value?",
        ),
        ("prices: {perHours: []}", "prices.perHours is no setting; did you mean perHour?"),
        ("tolerations: [{operator: Exists}]", "tolerations.0.key is"),
        ("tolerations: [{key: ''}]", "tolerations.0.key is ''"),
        ("tolerations: [{key: karpenter.sh/disrupted}]", "Karpenter puts this taint on a node that it takes"),
        ("tolerations: [{key: a, operator: Exists, value: b}]", "with operator Exists it may have no value"),
        ("tolerations: [{key: a, tolerationSeconds: 5}]", "tolerationSeconds is for the effect NoExecute"),
        ("nodeSelector: {pool: 1}", "nodeSelector.pool is 1"),
        ("provider: gcp", "provider is 'gcp'"),
        ("kind: JobSet", "kind is 'JobSet': Input should be 'PyTorchJob' or 'TrainJob'"),
        ("sharedMemory: lots", "sharedMemory is 'lots'"),
        ("scratch: 500m", "scratch is '500m'"),  # half a byte, in which no job's pod stays
        ("userId: 0", "userId is 0"),
        ("[1, 2]", "the document is [1, 2]"),
        ("{", "is not YAML"),
        (None, "No such file or directory"),
    ],
)
def test_settings_that_cannot_be_used_say_why(tmp_path: Path, text: str | None, message: str) -> None:
    path = tmp_path / "jobs.yaml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(PodSettingsError) as refused:
        load_pod_settings(path)
    assert message in str(refused.value)
    assert str(path) in str(refused.value)
