"""Two machines train in a directory that they share over NFS: nothing takes longer, or is lost, for that."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from gangs import History
from processes import Processes
from tests.cluster.system import is_root
from tests.nfs.machines import ADDRESSES, Machine, Machines, two_machines
from waiting import wait_until

from holdfast_trainer.contract import RunDir, Termination

HERE = Path(__file__).parent
PATHS = os.pathsep.join(str(HERE.parents[1] / part) for part in ("trainer", "controller"))
GRACE = 20
"""Less than the 30 s for which a client of NFS remembers at least what was not there."""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1500),
    pytest.mark.skipif(not os.environ.get("NFS"), reason="make test-nfs has two machines train over NFS"),
    pytest.mark.skipif(not is_root(), reason="only root makes networks and mounts"),
]


@pytest.fixture
def machines(processes: Processes, tmp_path: Path) -> Iterator[Machines]:
    with two_machines(processes, tmp_path) as both:
        yield both


def gang(machines: Machines, attempt: int, *, first_on: int) -> list[Machine]:
    """The ranks of an attempt, rank 0 on machine `first_on`."""
    common = {
        "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin",
        "PYTHONPATH": PATHS,
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "eth0",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": ADDRESSES[first_on],
        "MASTER_PORT": str(29500 + attempt),
        "HOLDFAST_RUN_DIR": str(machines.shared / "run"),
        "HOLDFAST_ATTEMPT": str(attempt),
        "HOLDFAST_GRACE_SECONDS": str(GRACE),
    }
    options = json.dumps({"steps": 60, "save_every": 10, "pause": 0.2})
    ranks = []
    for rank in range(2):
        own = {
            "RANK": str(rank),
            "HOLDFAST_TERMINATION_LOG": str(machines.directory / f"end-{attempt}-{rank}"),
        }
        command = [sys.executable, HERE / "late_part_loop.py", options]
        ranks.append(machines.start((first_on + rank) % 2, command, common | own))
    return ranks


def test_each_machine_sees_at_once_what_the_other_saved(machines: Machines) -> None:
    """A save was durable after 30 to 60 s, so a notice of 20 s cost all steps since the last one."""
    history = History(RunDir(machines.shared / "run"))

    def trains(attempt: int, step: int) -> None:
        wait_until(lambda: history.last_step(attempt) >= step, f"step {step} of attempt {attempt}", 300)

    ranks = gang(machines, 1, first_on=0)
    trains(1, 13)
    ranks[1].signal(signal.SIGTERM)
    assert [rank.wait() for rank in ranks] == [0, 0]
    stop = history.stop(1)
    assert (stop["outcome"], stop["durable_step"]) == ("interrupted", stop["step"])

    ranks = gang(machines, 2, first_on=1)
    trains(2, 37)
    ranks[0].signal(signal.SIGKILL)
    assert ranks[0].wait() == 128 + signal.SIGKILL
    assert ranks[1].wait() == 1
    end = Termination.from_json((machines.directory / "end-2-1").read_text())
    assert end is not None
    assert (end.outcome, end.durable_step) == ("failed", 30), "the newest save, of which the other rank told"

    ranks = gang(machines, 3, first_on=0)
    assert [rank.wait() for rank in ranks] == [0, 0]
    began = [history.events("attempt_start", attempt)[0]["resumed_step"] for attempt in (1, 2, 3)]
    assert began == [0, stop["step"], 30]
    assert history.stop(3)["outcome"] == "finished"
    assert set(history.losses()) == set(range(1, 61)), "and what was done twice had the same bits"
    took = [line["seconds"] for line in history.events("checkpoint")]
    print(f"\nsaves were durable after {min(took):.1f} to {max(took):.1f} s, of which rank 1 waits one")


def test_no_line_of_the_ledger_is_lost_where_both_append(machines: Machines) -> None:
    """Some of them were: on NFS each machine appends at what it takes for the end."""
    words = [sys.executable, HERE / "append_script.py", machines.shared / "run"]
    both = [machines.start(number, [*words, str(number), "100"], {"PYTHONPATH": PATHS}) for number in (0, 1)]
    assert [machine.wait() for machine in both] == [0, 0], [machine.log.read_text() for machine in both]
    told = [(line["rank"], line["index"]) for line in History(RunDir(machines.shared / "run")).ledger()]
    assert sorted(told) == [(rank, index) for rank in (0, 1) for index in range(100)]
