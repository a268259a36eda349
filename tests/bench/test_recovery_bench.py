"""What bench-recovery makes of a run, and that it runs at all."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from bench import recovery
from bench.recovering.account import Hit, account, bound, first_useful
from bench.recovering.runs import Planned, Told, shares, trace
from bench.report import Report
from tests.cluster import jobset
from tests.cluster.cluster import Cluster


@pytest.fixture
def jobset_controller(cluster: Cluster) -> None:
    """JobSet's, on a cluster of this machine; it is built before a test's time begins."""
    if cluster.site is None:
        pytest.skip("it runs on the cluster of this machine")
    jobset.install(cluster, cluster.site)


def lines(*runs: tuple[float, int, int]) -> list[dict[str, Any]]:
    """Of starts at a time, from a step to another; a step takes a second."""
    told: list[dict[str, Any]] = []
    for at, first, last in runs:
        told.append({"event": "start", "step": first, "time": at, "born": at - 3})
        told += [
            {"event": "step", "step": step, "time": at + step - first} for step in range(first + 1, last + 1)
        ]
    return told


def test_a_run_that_nobody_disturbs_has_lost_nothing() -> None:
    found = account(lines((10, 0, 20)), [], submitted=2)
    assert (found.wall, found.step, found.recoveries) == (28, 1, ())
    assert (found.lost_with_notice, found.lost_without) == (0, 0)


def test_what_was_done_again_is_charged_to_the_hit_before_it() -> None:
    # Steps 1 to 30; taken with notice, which cost nothing; taken without, at 52 with 40 saved; taken twice
    # before a step was done.
    told = lines((0, 0, 30), (40, 30, 52), (70, 40, 45), (80, 40, 40), (90, 40, 100))
    hits = [Hit(30, True), Hit(62, False), Hit(75, False), Hit(82, True)]
    found = account(told, hits, submitted=0)
    assert (found.lost_with_notice, found.lost_without) == (0, 12 + 5)
    assert [one.seconds for one in found.recoveries] == [11, 9, 16]
    assert [one.until_process for one in found.recoveries] == [7, 5, 12]
    assert (found.wall, found.step) == (150, 1)
    assert first_useful(told) == 4
    assert bound(100, 1, 4, len(hits)) == 100 + 5 * 4


def test_a_loss_is_charged_to_the_hit_that_ended_the_training_not_to_one_while_it_starts_again() -> None:
    told = lines((10, 0, 30), (60, 20, 50))
    found = account(told, [Hit(40, False), Hit(47, True), Hit(55, True)], submitted=2)
    assert (found.lost_with_notice, found.lost_without) == (0, 10)


def test_a_trace_is_a_poisson_process_and_the_same_for_a_seed() -> None:
    once = trace(1, 10, 20_000)
    assert once == trace(1, 10, 20_000)
    assert once != trace(2, 10, 20_000)
    gaps = [after.after - before.after for before, after in pairwise(once)]
    assert sum(gaps) / len(gaps) == pytest.approx(10, rel=0.1)
    assert sum(gap > 10 for gap in gaps) / len(gaps) == pytest.approx(0.368, abs=0.03)
    assert 0.45 < sum(one.notice for one in once) / len(once) < 0.55


def test_the_trace_goes_on_over_the_rounds() -> None:
    whole = tuple(Planned(after, True, 0) for after in (3, 12, 25))
    assert shares(whole, 3, 10) == [
        whole,
        (Planned(2, True, 0), Planned(15, True, 0)),
        (Planned(5, True, 0),),
    ]


def test_the_usual_trace_has_the_hits_that_its_mean_lets_expect_in_every_round_some() -> None:
    options = recovery.parse([])
    rests = options.steps * options.pace
    hits = [[one for one in planned if one.after < rests] for planned in recovery.traces(options)]
    expected = options.rounds * rests / options.mean
    assert all(hits)
    assert sum(map(len, hits)) == expected
    assert sum(one.notice for planned in hits for one in planned) == expected / 2


def test_the_figures_are_of_the_rows_beside_them() -> None:
    report = Report("recovery")
    stages = [{"detect": 2.0, "import": 3.0}]
    ours = Told(lines((10, 0, 50), (70, 50, 100)), [Hit(60, True)], 0, True, stages)
    peer = Told(lines((10, 0, 50), (90, 40, 100)), [Hit(60, False)], 0, True)
    other = Told(lines((10, 0, 50), (74, 40, 100)), [Hit(60, False)], 0, True)
    recovery.add(report, 100, 4, {recovery.OURS: ours, recovery.PEER: peer, recovery.JOBSET: other})
    parts = ("recovery, to the process", "recovery, process to step", "its ledger: detect")
    assert [report.median(recovery.OURS, part) for part in parts] == [7, 4, 2]
    recovery.ratios(report)
    assert report.ratios == {
        "unfinished": 0,
        "lost_steps_with_notice": 0,
        "goodput_vs_bound": pytest.approx(108 / 120),
        "goodput_vs_pytorchjob": pytest.approx(150 / 120),
        "recovery_vs_pytorchjob": pytest.approx(11 / 31),
        "worst_recovery_vs_pytorchjob": pytest.approx(11 / 31),
        "goodput_vs_jobset": pytest.approx(134 / 120),
        "recovery_vs_jobset": pytest.approx(11 / 15),
        "worst_recovery_vs_jobset": pytest.approx(11 / 15),
    }


def test_a_run_that_was_given_up_is_said_and_has_no_goodput() -> None:
    report = Report("recovery")
    ours = Told(lines((10, 0, 100)), [], 0, True)
    peer = Told(lines((10, 0, 50)), [Hit(60, False)], 0, False)
    recovery.add(report, 100, 4, {recovery.OURS: ours, recovery.PEER: peer})
    recovery.ratios(report)
    assert report.median(recovery.PEER, "unfinished") == 1
    assert report.ratios.keys() == {"unfinished", "lost_steps_with_notice", "goodput_vs_bound"}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--rounds", "0"], "--rounds 0: more than 0 is needed"),
        (["--steps", "70"], "--steps 70: a multiple of --every 50, for the last save"),
        (["--pace", "0"], "--pace 0.0: more than 0 is needed"),
        (
            ["--rounds", "2", "--steps", "400", "--mean", "40", "--seed", "3"],
            "--seed 3: its trace leaves round 2 without a hit; take another, or more --steps, or a --mean "
            "below 40 s",
        ),
    ],
)
def test_options_that_cannot_be(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        recovery.parse(words)
    assert said in capsys.readouterr().err


@pytest.mark.cluster
@pytest.mark.slow
@pytest.mark.timeout(2400)
@pytest.mark.usefixtures("jobset_controller", "trainer_image")
def test_all_sides_train_are_hit_and_go_on(tmp_path: Path) -> None:
    """Cluster, controller and image are there already when it starts; it would see to them itself."""
    words = ["--rounds", "1", "--steps", "60", "--every", "10", "--mean", "8", "--seed", "1"]
    assert recovery.main([*words, "--out", str(tmp_path)]) == 0
    written = json.loads((tmp_path / "recovery.json").read_text())
    rows = {(row["subject"], row["metric"]): row["median"] for row in written["rows"]}
    [planned] = recovery.traces(recovery.parse(words))
    # Between the last of them and the end are steps enough for it to be met.
    least = sum(one.after < 5 for one in planned)
    for subject in (recovery.OURS, *recovery.PEERS.values()):
        assert rows[subject, "unfinished"] == 0
        assert rows[subject, "hits"] >= least
        assert 0 < rows[subject, "goodput"] < 1
    assert written["ratios"]["lost_steps_with_notice"] == 0
