"""What an attempt's nodes are and cost. No price, no figure."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from pydantic import ValidationError
from series import sample

from holdfast_controller.api.ledger import account
from holdfast_controller.cli.description import totals_line
from holdfast_controller.cli.starts import capacity, start_columns
from holdfast_controller.cluster import AttemptObservation, Place, ReplicaObservation, ReplicaState
from holdfast_controller.job_series import JobFigures, job_series
from holdfast_controller.jobs import AttemptRecord, Metadata, Spec, Status, TrainingJob, Verdict
from holdfast_controller.metrics import Metrics
from holdfast_controller.policy.books import Books
from holdfast_controller.policy.classify import Incident
from holdfast_controller.policy.cost import Node, capacity_of, place_of, share, whereabouts
from holdfast_controller.policy.lost_work import shown
from holdfast_controller.prices import NodePrice, Prices
from holdfast_controller.settings import SettingsError, load_settings
from holdfast_trainer.contract import Progress

NOON = datetime(2026, 5, 1, 12, tzinfo=UTC)


@pytest.mark.parametrize(
    ("label", "value", "expected"),
    [
        ("karpenter.sh/capacity-type", "spot", "Spot"),
        ("karpenter.sh/capacity-type", "on-demand", "OnDemand"),
        ("cloud.google.com/gke-spot", "true", "Spot"),
        ("cloud.google.com/gke-provisioning", "spot", "Spot"),
        ("cloud.google.com/gke-provisioning", "standard", "OnDemand"),
        ("eks.amazonaws.com/capacityType", "SPOT", "Spot"),
        ("eks.amazonaws.com/capacityType", "ON_DEMAND", "OnDemand"),
        ("kubernetes.azure.com/scalesetpriority", "spot", "Spot"),
        ("kubernetes.azure.com/scalesetpriority", "regular", "OnDemand"),
        ("node.kubernetes.io/spot", "true", "Spot"),
        ("kubernetes.io/hostname", "spot", None),
    ],
)
def test_providers_say_what_a_node_is_by_their_own_labels(
    label: str, value: str, expected: str | None
) -> None:
    assert capacity_of({label: value}) == expected


LABELS = {"node.kubernetes.io/instance-type": "p4d.24xlarge", "karpenter.sh/capacity-type": "spot"}
NODE = Node("n1", LABELS, {"nvidia.com/gpu": "8", "cpu": "96"})
PRICES = Prices(
    per_hour=(
        NodePrice(instance_type="p4d.24xlarge", capacity="Spot", price=12.0),
        NodePrice(instance_type="p4d.24xlarge", price=32.0),
        NodePrice(capacity="OnDemand", price=1.0),
    )
)


def spec(**body: object) -> Spec:
    return Spec.model_validate({"command": ["x"], **body})


def test_a_replica_pays_for_the_part_of_the_node_that_it_takes() -> None:
    assert place_of(NODE, spec(gpus="2"), PRICES) == Place("n1", "Spot", "p4d.24xlarge", 3.0, "USD")
    assert place_of(NODE, spec(gpus="8"), PRICES).price_per_hour == 12.0
    assert place_of(NODE, spec(resources={"cpu": "24"}), PRICES).price_per_hour == 3.0
    assert share(Node("n", {}, {"nvidia.com/gpu.shared": "4"}), spec(gpus="0.25")) == 0.25
    assert share(Node("n", {}, {}), spec()) is None, "a node that cannot be read has no share"
    # Where the kubelet keeps 62.5m of 8 cores: each look at a job there ended in a traceback.
    assert share(Node("n", {}, {"cpu": "7937500u"}), spec()) == 1 / 7.9375


A100 = {"nvidia.com/gpu": "0", "nvidia.com/mig-1g.5gb": "14"}


@pytest.mark.parametrize(
    ("allocatable", "part"),
    [
        pytest.param(A100, 1 / 14, id="all of its GPUs are cut alike"),
        pytest.param({**A100, "nvidia.com/gpu": "7"}, None, id="one is, the others are whole"),
        pytest.param({**A100, "nvidia.com/mig-3g.20gb": "2"}, None, id="into devices of two sizes"),
        pytest.param({**A100, "nvidia.com/mig-3g.20gb": "0"}, 1 / 14, id="as it was once"),
        pytest.param({"nvidia.com/gpu": "8"}, None, id="none is cut any more"),
    ],
)
def test_a_mig_device_has_a_price_where_it_is_clear_what_part_of_the_node_it_is(
    allocatable: dict[str, str], part: float | None
) -> None:
    node = Node("n1", LABELS, {"cpu": "96", **allocatable})
    slice_of_it = spec(gpus=1, mig="1g.5gb")
    assert share(node, slice_of_it) == part
    price = place_of(node, slice_of_it, PRICES).price_per_hour
    assert price == (None if part is None else pytest.approx(12.0 * part))


def test_a_whole_gpu_beside_others_that_are_cut_has_no_price() -> None:
    """Which part of the machine the four are nobody says."""
    half_cut = {"nvidia.com/gpu": "4", "nvidia.com/mig-1g.5gb": "28", "cpu": "96"}
    assert share(Node("n1", LABELS, half_cut), spec(gpus="1")) is None
    assert share(Node("n1", LABELS, half_cut), spec(resources={"cpu": "24"})) == 0.25


def test_the_first_price_that_fits_counts_and_none_is_none() -> None:
    assert PRICES.of("p4d.24xlarge", None) == 32.0
    assert PRICES.of("m5.large", "OnDemand") == 1.0
    assert PRICES.of("m5.large", "Spot") is None
    nowhere = place_of(NODE, spec(gpus="1"), Prices())
    assert (nowhere.price_per_hour, nowhere.currency) == (None, "")


def test_a_gang_has_a_price_when_all_of_its_nodes_have() -> None:
    spot, owned = Place("a", "Spot", "t", 2.0, "USD"), Place("b", None, "", None, "")
    both = whereabouts([spot, spot, owned])
    assert (both.nodes, both.capacity) == (["a", "b"], {"Spot": 2, "Unknown": 1})
    assert (both.price_per_hour, both.currency) == (None, None)
    assert whereabouts([spot, spot]).price_per_hour == 4.0
    assert capacity({"capacity": both.capacity}) == "2 Spot, 1 Unknown"
    assert len(whereabouts([Place(f"n{i}") for i in range(40)]).nodes) == 16


def at(seconds: float) -> datetime:
    return NOON + timedelta(seconds=seconds)


def run_attempt(status: Status, number: int, places: tuple[Place, ...], start: float, end: float) -> None:
    """An attempt as the books see it: seen running, then over."""
    record = AttemptRecord(number=number, opened_at=at(start))
    status.attempts.append(record)
    seen = AttemptObservation(number, exists=True, gone=True, places=places, started_at=at(start))
    Books(status, at(start)).take_progress(record, seen, ())
    Books(status, at(end)).close(record, Incident(Verdict.DISRUPTED, "evicted"), seen, (), ())


def trains(status: Status, number: int, start: float, now: float) -> None:
    """An attempt on a spot node at 36 USD an hour that tells of its steps."""
    status.attempts.append(record := AttemptRecord(number=number, opened_at=at(start)))
    progress = Progress(number, 5, 10, 0, "training", updated=at(now).timestamp())
    place = Place("n1", "Spot", "t", 36.0, "USD")
    seen = AttemptObservation(number, True, False, places=(place,), progress=progress, started_at=at(start))
    Books(status, at(now)).take_progress(record, seen, ())


def test_a_job_costs_what_its_attempts_cost_everywhere_alike() -> None:
    place = Place("n1", "Spot", "t", 36.0, "USD")
    job = TrainingJob(metadata=Metadata(name="gpt"), spec=spec())
    run_attempt(job.status, 1, (place,), 0, 100)
    run_attempt(job.status, 2, (place, place), 110, 160)
    assert [record.cost for record in job.status.attempts] == [1.0, 1.0]
    assert (job.status.cost, job.status.cost_currency) == (2.0, "USD")
    document = account(job, [], []).model_dump(mode="json", by_alias=True)
    assert (document["totals"]["cost"], document["totals"]["costCurrency"]) == (2.0, "USD")
    metrics = Metrics()
    metrics.jobs[job.key] = JobFigures.of(job)
    labels = {"namespace": "default", "job": "gpt", "currency": "USD"}
    assert sample(metrics, "holdfast_job_cost", labels) == 2.0
    assert "2.00 USD" in str(totals_line(document["totals"]))
    assert str(start_columns(document["attempts"])[-1].cells[0]) == "1.00 USD"
    trains(job.status, 3, 200, 300)
    assert (job.status.cost, job.status.cost_currency) == (3.0, "USD"), "while it runs"
    trains(first := Status(), 1, 0, 100)
    assert (first.cost, first.cost_currency) == (1.0, "USD")


def test_one_attempt_without_a_price_leaves_the_job_without_one() -> None:
    job = TrainingJob(metadata=Metadata(name="gpt"), spec=spec())
    run_attempt(job.status, 1, (Place("n1", "Spot", "t", 36.0, "USD"),), 0, 100)
    run_attempt(job.status, 2, (Place("n2"),), 100, 200)
    run_attempt(job.status, 3, (Place("n1", "Spot", "t", 36.0, "USD"),), 200, 300)
    assert [record.cost for record in job.status.attempts] == [1.0, None, 1.0]
    assert (job.status.cost, job.status.unpriced_attempts) == (None, 1)
    document = account(job, [], []).model_dump(mode="json", by_alias=True)
    assert "USD" not in str(totals_line(document["totals"]))
    assert [str(cell) for cell in start_columns(document["attempts"])[-1].cells] == [
        "1.00 USD",
        "-",
        "1.00 USD",
    ]
    trains(job.status, 4, 300, 400)
    assert (job.status.cost, job.status.cost_currency) == (None, None)


def test_an_attempt_that_never_started_costs_nothing() -> None:
    status = Status()
    run_attempt(status, 1, (Place("n1", "Spot", "t", 36.0, "USD"),), 0, 100)
    record = AttemptRecord(number=2, opened_at=at(100))
    seen = AttemptObservation(2, exists=True, gone=True)
    Books(status, at(900)).close(record, Incident(Verdict.UNSCHEDULABLE, "no node"), seen, (), ())
    assert (status.cost, status.cost_currency, status.unpriced_attempts) == (1.0, "USD", 0)


def test_a_gang_that_is_placed_one_by_one_costs_what_most_of_it_was_seen_to_cost() -> None:
    status, record = Status(), AttemptRecord(number=1, opened_at=at(0))
    status.attempts.append(record)
    place = Place("n1", "Spot", "t", 36.0, "USD")
    for count in (1, 3, 2):
        seen = AttemptObservation(1, True, False, places=(place,) * count, started_at=at(0))
        Books(status, at(1)).take_progress(record, seen, ())
    assert record.whereabouts is not None
    assert record.whereabouts.price_per_hour == 108.0


def test_an_attempt_costs_until_the_last_of_it_has_ended() -> None:
    status, record = Status(), AttemptRecord(number=1, opened_at=at(0))
    status.attempts.append(record)
    ends = [
        ReplicaObservation(n, ReplicaState.FAILED, ended_at=end and at(end).timestamp())
        for n, end in enumerate((100, 200, 50, None))
    ]
    places = (Place("n1", "Spot", "t", 36.0, "USD"),)
    seen = AttemptObservation(1, True, True, tuple(ends), places=places, started_at=at(0))
    Books(status, at(900)).close(record, Incident(Verdict.DISRUPTED, "evicted"), seen, (), ())
    assert (status.cost, record.ended_at) == (2.0, at(200))


@pytest.mark.parametrize("behind", [0, 40, 300])
def test_an_attempt_on_a_node_whose_clock_is_behind_costs_all_of_its_time(behind: int) -> None:
    """It was taken to have started no sooner than it was opened, and to have ended when its node said: of
    100 s on a node 40 s behind it cost 64, and on one 300 s behind nothing."""
    status, record = Status(), AttemptRecord(number=1, opened_at=at(0))
    status.attempts.append(record)
    seen = AttemptObservation(
        1,
        True,
        False,
        (ReplicaObservation(0, ReplicaState.RUNNING),),
        places=(Place("n1", "Spot", "t", 36.0, "USD"),),
        started_at=at(4 - behind),
    )
    Books(status, at(5)).take_progress(record, seen, ())
    end = ReplicaObservation(0, ReplicaState.FAILED, ended_at=at(104 - behind).timestamp())
    seen = replace(seen, gone=True, replicas=(end,))
    Books(status, at(900)).close(record, Incident(Verdict.DISRUPTED, "evicted"), seen, (), ())
    assert status.cost == record.cost == 1.0


def test_a_job_has_no_cost_while_it_runs_where_nobody_knows_the_price() -> None:
    """A spot node with a price was taken, and the next attempt trains for days on one without: what the first
    came to stood there for all that."""
    job = TrainingJob(metadata=Metadata(name="gpt"), spec=spec())
    run_attempt(job.status, 1, (Place("n1", "Spot", "t", 36.0, "USD"),), 0, 100)
    record = AttemptRecord(number=2, opened_at=at(100))
    job.status.attempts.append(record)
    silent = AttemptObservation(2, exists=True, gone=False)
    Books(job.status, at(110)).take_progress(record, silent, ())
    assert JobFigures.of(job).cost == 1.0, "nothing of it has started yet"
    runs = replace(silent, places=(Place("n2", "OnDemand", "t"),), started_at=at(120))
    Books(job.status, at(7200)).take_progress(record, runs, ())
    assert (job.status.cost, job.status.cost_currency) == (None, None)
    metrics = Metrics()
    metrics.jobs[job.key] = JobFigures.of(job)
    assert b"holdfast_job_cost{" not in b"".join(metrics.text())


def test_a_script_that_tells_no_progress_costs_what_it_runs() -> None:
    """A job of any other framework had no cost for as long as its first attempt ran, and the first one's for
    as long as the second did."""
    job = TrainingJob(metadata=Metadata(name="gpt"), spec=spec())
    place = Place("n1", "Spot", "t", 36.0, "USD")

    def told(seconds: float) -> tuple[float | None, str | None, float | None]:
        figures, now = JobFigures.of(job), at(seconds)
        text = b"".join(job_series([figures], now)).decode()
        line = 'holdfast_job_cost{namespace="default",job="gpt",currency="USD"} '
        scraped = [float(one.removeprefix(line)) for one in text.splitlines() if one.startswith(line)]
        status = shown(job, now).status
        assert account(shown(job, now), [], []).totals.cost == status.cost
        return status.cost, status.cost_currency, (scraped or [None])[0]

    record = AttemptRecord(number=1, opened_at=at(0))
    job.status.attempts.append(record)
    seen = AttemptObservation(1, exists=True, gone=False, places=(place,), started_at=at(0))
    Books(job.status, at(1)).take_progress(record, seen, ())
    assert told(100) == (1.0, "USD", 1.0)
    Books(job.status, at(200)).close(record, Incident(Verdict.DISRUPTED, "evicted"), seen, (), ())
    assert told(500) == (2.0, "USD", 2.0), "nothing runs"
    second = AttemptRecord(number=2, opened_at=at(500))
    job.status.attempts.append(second)
    seen = replace(seen, attempt=2, started_at=at(600))
    Books(job.status, at(600)).take_progress(second, seen, ())
    assert told(800) == (4.0, "USD", 4.0)


def test_dollars_and_euros_are_not_added_up() -> None:
    """The prices' currency was changed between two attempts: the job was said to have cost 2 EUR."""
    job = TrainingJob(metadata=Metadata(name="gpt"), spec=spec())
    run_attempt(job.status, 1, (Place("n1", "Spot", "t", 36.0, "USD"),), 0, 100)
    record = AttemptRecord(number=2, opened_at=at(100))
    job.status.attempts.append(record)
    seen = AttemptObservation(
        2,
        exists=True,
        gone=True,
        places=(Place("n1", "Spot", "t", 36.0, "EUR"),),
        progress=Progress(2, 5, 10, 0, "training", updated=at(150).timestamp()),
        started_at=at(100),
    )
    Books(job.status, at(150)).take_progress(record, seen, ())
    assert (job.status.cost, job.status.cost_currency) == (None, None)
    Books(job.status, at(200)).close(record, Incident(Verdict.DISRUPTED, "evicted"), seen, (), ())
    assert [one.cost for one in job.status.attempts] == [1.0, 1.0]
    assert (job.status.cost, job.status.unpriced_attempts) == (None, 1)


def test_prices_that_cannot_be_are_refused() -> None:
    with pytest.raises(ValidationError, match="greater than 0"):
        NodePrice(price=0)
    with pytest.raises(SettingsError, match=r"price_per_hour \(HOLDFAST_PRICE_PER_HOUR\) is -1"):
        load_settings(price_per_hour=-1)
    with pytest.raises(SettingsError, match=r"price_per_hour \(HOLDFAST_PRICE_PER_HOUR\) is inf: .*finite"):
        load_settings(price_per_hour=float("inf"))
    assert load_settings(price_per_hour=2.5).prices.of("", None) == 2.5
    assert load_settings().prices.of("", None) is None
