"""One incident an attempt: the first cause decides, its victims never count."""

from __future__ import annotations

from dataclasses import replace

import pytest

from holdfast_controller.cluster import AttemptObservation, RankExit, ReplicaObservation, ReplicaState
from holdfast_controller.jobs import Verdict
from holdfast_controller.policy.classify import Incident, classify
from holdfast_controller.policy.superseded import superseded_by
from holdfast_trainer.contract import Termination

DONE = Termination("finished", 100, 100)
NOTICED = Termination("interrupted", 50, 50)
CRASHED = Termination("failed", 50, 40, "ValueError: nan in the loss")
RESET = Termination("failed", 50, 40, "RuntimeError: Connection reset by peer")
HUNG = Termination("hung", 50, 40, "no step for 600 s")
CONFIG = Termination("failed", 0, 0, "unknown key 'lr_rate'", config_error=True)
NO_ROOM = Termination(
    "failed", 0, 0, "there is no room to begin in run directory /r", storage_unavailable=True
)
NO_ANSWER = replace(
    HUNG, error="no step for 600 s: its run directory does not answer", storage_unavailable=True
)
CUDA = Termination("failed", 5, 0, "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB")


HOST = Termination("failed", 5, 5, "rank 0 ran out of memory in step 6: [enforce fail at alloc_cpu.cpp:124]")


HANDLED = """Traceback (most recent call last):
  File "train.py", line 3, in step
    loss = table[key]
           ~~~~~^^^^^
KeyError: 'step'

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "train.py", line 9, in <module>
    step()
RuntimeError: CUDA error: device-side assert triggered
CUDA kernel errors might be asynchronously reported at some other API call.
Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.
"""
IN_WORKER = """Traceback (most recent call last):
  File "train.py", line 9, in <module>
    batch = next(batches)
ValueError: Caught ValueError in DataLoader worker process 0.
Original Traceback (most recent call last):
  File "fetch.py", line 52, in fetch
    data = dataset[index]
ValueError: bad sample
"""


def ok(index: int, message: Termination | None = None, at: float = 10.0) -> ReplicaObservation:
    return ReplicaObservation(
        index,
        ReplicaState.SUCCEEDED,
        exit_code=0,
        termination=message,
        ranks=(RankExit(index, 0, None, at),),
        ended_at=at,
    )


def bad(
    index: int, message: Termination | None = None, at: float = 10.0, code: int = 1
) -> ReplicaObservation:
    return ReplicaObservation(
        index,
        ReplicaState.FAILED,
        exit_code=1,
        termination=message,
        ranks=(RankExit(index, code, None, at),),
        ended_at=at + 0.5,
    )


def saved(index: int, at: float = 10.0) -> ReplicaObservation:
    """It saved and its rank exited 0, but torchrun was signalled and exits 1."""
    return ReplicaObservation(
        index,
        ReplicaState.FAILED,
        exit_code=1,
        termination=NOTICED,
        ranks=(RankExit(index, 0, None, at),),
        ended_at=at,
    )


def beside(message: Termination, first: RankExit) -> ReplicaObservation:
    """Of two ranks; rank 0 has said `message`, and left with 143 on a notice."""
    code = 143 if message.outcome == "interrupted" else 1
    return replace(bad(0, message), ranks=(RankExit(0, code, None, 10.0), first))


def taken(index: int, reason: str = "Drilled: killed on request") -> ReplicaObservation:
    return ReplicaObservation(index, ReplicaState.FAILED, reason, disrupted=True, ended_at=10.0)


def ours(index: int) -> ReplicaObservation:
    """Killed by Holdfast with its peers."""
    return ReplicaObservation(index, ReplicaState.FAILED, "Killed: by Holdfast", exit_signal=9, ended_at=12.0)


def memory(index: int) -> ReplicaObservation:
    return ReplicaObservation(
        index, ReplicaState.FAILED, exit_code=1, out_of_memory=True, ranks=(RankExit(index, None, 9, 9.0),)
    )


def large(index: int) -> ReplicaObservation:
    return replace(
        memory(index),
        reason="OutOfMemory: the container reached its limit of 512Mi",
        ranks=(RankExit(index, None, 9, 9.0, 497 * 2**20), RankExit(index + 1, None, 15, 9.1, 80 * 2**20)),
    )


FULL = 'Evicted: Usage of EmptyDir volume "scratch" exceeds the limit "20Gi"'


def node_gone(index: int) -> ReplicaObservation:
    return replace(taken(index, "DeletionByPodGC: node no longer exists"), lost_node=True)


def node_silent(index: int) -> ReplicaObservation:
    """We have ended it, and its node never told of that."""
    return replace(ours(index), exit_signal=None, ended_at=None, lost_node=True)


CASES = [
    pytest.param((ok(0, DONE), ok(1, DONE)), Verdict.FINISHED, "every replica finished", id="all finished"),
    pytest.param((ok(0), ok(1)), Verdict.FINISHED, "", id="a command without our trainer"),
    pytest.param((ok(0, DONE), bad(1, DONE)), Verdict.FINISHED, "", id="said finished, then tore down badly"),
    pytest.param((taken(0), bad(1, RESET)), Verdict.DISRUPTED, "replica 0: Drilled", id="peers crash"),
    pytest.param((taken(0), ours(1)), Verdict.DISRUPTED, "replica 0: Drilled", id="peers are killed"),
    pytest.param((bad(0, RESET, at=9), taken(1)), Verdict.DISRUPTED, "replica 1", id="a peer was quicker"),
    pytest.param((ok(0, DONE), taken(1)), Verdict.DISRUPTED, "replica 1", id="lost at the very end"),
    pytest.param((ok(0, NOTICED), saved(1)), Verdict.DISRUPTED, "notice and saved", id="a notice"),
    pytest.param((saved(0, at=10), bad(1, RESET, at=11)), Verdict.DISRUPTED, "notice", id="notice first"),
    pytest.param(
        (bad(0, CRASHED, at=10), saved(1, at=11)),
        Verdict.FAILED,
        "replica 0: ValueError: nan in the loss",
        id="torchrun ends the peers of a failed rank by SIGTERM: still a failure",
    ),
    pytest.param((bad(0, CRASHED), bad(1, RESET, at=11)), Verdict.FAILED, "nan in the loss", id="failed"),
    pytest.param((bad(0, RESET, at=11), bad(1, CRASHED)), Verdict.FAILED, "replica 1: Va", id="the first"),
    pytest.param((bad(0, RESET, at=9), bad(1, CRASHED)), Verdict.FAILED, "replica 1: Va", id="not its peer"),
    pytest.param(
        (bad(0, RESET, at=9), bad(1, RESET)), Verdict.FAILED, "replica 0: Ru", id="nobody says more"
    ),
    pytest.param(
        (replace(saved(0), over_limit=FULL), saved(1)),
        Verdict.FAILED,
        f"replica 0: {FULL}",
        id="evicted for what it wrote itself, and all saved on that notice",
    ),
    pytest.param((replace(saved(0), over_limit=FULL), taken(1)), Verdict.DISRUPTED, "Drilled", id="both"),
    pytest.param((node_gone(0), bad(1, RESET)), Verdict.LOST_NODE, "no longer exists", id="a lost node"),
    pytest.param((taken(0), node_gone(1)), Verdict.DISRUPTED, "Drilled", id="the first that was taken"),
    pytest.param((bad(0, code=7), ours(1)), Verdict.FAILED, "rank 0 ended with exit code 7", id="exit code"),
    pytest.param(
        (replace(bad(0), ranks=(RankExit(0, None, 7, 9.0),)), bad(1, RESET)),
        Verdict.FAILED,
        "replica 0: rank 0 ended by SIGBUS (a file that it had mapped was cut, its disk failed, or /dev/shm",
        id="a shard was cut while it was read",
    ),
    pytest.param((bad(0, CONFIG), bad(1, RESET)), Verdict.CONFIG_ERROR, "lr_rate", id="config error"),
    pytest.param(
        (bad(0, replace(CONFIG, error="model.layers: required\nmodel.width: required")),),
        Verdict.CONFIG_ERROR,
        "model.layers: required; model.width: required",
        id="all that is wrong in a configuration",
    ),
    pytest.param((bad(0, code=78), ours(1)), Verdict.CONFIG_ERROR, "exit code 78", id="exit code 78"),
    pytest.param((taken(0), bad(1, CONFIG)), Verdict.CONFIG_ERROR, "lr_rate", id="config error and drill"),
    pytest.param(
        (bad(0, replace(CRASHED, error=HANDLED)),),
        Verdict.FAILED,
        "replica 0: RuntimeError: CUDA error: device-side assert triggered ... Compile with "
        "`TORCH_USE_CUDA_DSA` to enable device-side assertions.",
        id="an exception of several lines",
    ),
    pytest.param(
        (bad(0, replace(CRASHED, error=f"...{HANDLED[-260:]}")),),
        Verdict.FAILED,
        "replica 0: RuntimeError: CUDA error: device-side assert triggered ... Compile",
        id="a traceback whose beginning found no room",
    ),
    pytest.param(
        (bad(0, replace(CRASHED, error=IN_WORKER)),),
        Verdict.FAILED,
        "replica 0: ValueError: bad sample",
        id="an exception that tells of another",
    ),
    pytest.param((memory(0), bad(1, RESET)), Verdict.OUT_OF_MEMORY, "memory", id="the kernel's killer"),
    pytest.param((bad(0, CUDA), ours(1)), Verdict.OUT_OF_MEMORY, "CUDA out of memory", id="CUDA"),
    pytest.param(
        (large(0), bad(1, RESET)),
        Verdict.OUT_OF_MEMORY,
        "replica 0: OutOfMemory: the container reached its limit of 512Mi; rank 0 had 497 MiB at its peak",
        id="who, and how much",
    ),
    pytest.param(
        (replace(large(0), termination=RESET), ours(1)),
        Verdict.OUT_OF_MEMORY,
        "replica 0: OutOfMemory: the container reached its limit of 512Mi",
        id="one rank of a replica, whose other one tells of the connection",
    ),
    pytest.param(
        (bad(0, HOST), ours(1)), Verdict.OUT_OF_MEMORY, "ran out of memory in step 6", id="the host"
    ),
    pytest.param(
        (bad(0, NO_ROOM), bad(1, RESET)), Verdict.STORAGE_UNAVAILABLE, "no room to begin", id="a full disk"
    ),
    pytest.param((bad(0, NO_ROOM), taken(1)), Verdict.DISRUPTED, "Drilled", id="a full disk, and taken"),
    pytest.param((bad(0, HUNG), ours(1)), Verdict.HUNG, "no step for 600 s", id="hung"),
    pytest.param(
        (bad(0, HUNG, at=9), bad(1, NO_ANSWER, at=14)),
        Verdict.STORAGE_UNAVAILABLE,
        "does not answer",
        id="hung, for one machine's mount hangs",
    ),
    pytest.param(
        (bad(0, CRASHED, at=9), bad(1, NO_ANSWER, at=14)),
        Verdict.FAILED,
        "nan in the loss",
        id="failed before a mount hung",
    ),
    pytest.param(
        (bad(0, HUNG), node_silent(1)),
        Verdict.LOST_NODE,
        "replica 1: its node fell silent (replica 0: no step for 600 s)",
        id="a hang that a silent node explains",
    ),
    pytest.param((bad(0, RESET), node_silent(1)), Verdict.LOST_NODE, "fell silent", id="a cut connection"),
    pytest.param((ours(0), node_silent(1)), Verdict.LOST_NODE, "fell silent", id="nobody says more"),
    pytest.param(
        (bad(0, CRASHED), node_silent(1)), Verdict.FAILED, "nan in the loss", id="a fault, and then its node"
    ),
    pytest.param((memory(0), node_silent(1)), Verdict.OUT_OF_MEMORY, "memory", id="memory, then its node"),
    pytest.param((saved(0), node_silent(1)), Verdict.DISRUPTED, "notice and saved", id="a notice before"),
    pytest.param(
        (replace(node_gone(0), ended_at=12.0), taken(1)), Verdict.DISRUPTED, "replica 1", id="taken later"
    ),
    pytest.param(
        (replace(taken(0), termination=DONE), bad(1, CRASHED)),
        Verdict.FAILED,
        "nan in",
        id="done, then taken",
    ),
    pytest.param(
        (replace(ok(0, DONE), over_limit=FULL), bad(1, CRASHED)),
        Verdict.FAILED,
        "nan in",
        id="done, and full",
    ),
    pytest.param(
        (replace(ok(0, DONE), lost_node=True), bad(1, HUNG)),
        Verdict.HUNG,
        "no step",
        id="done, then its node",
    ),
    pytest.param((ok(0, DONE, at=5), bad(1, CRASHED)), Verdict.FAILED, "nan in", id="one is done, one fails"),
    pytest.param(
        (bad(0, RESET, at=9), bad(1, CRASHED), ours(2)),
        Verdict.FAILED,
        "nan in",
        id="a fault, and one silent",
    ),
    pytest.param(
        (bad(0, RESET), replace(ours(1), ranks=(RankExit(1, None, 9, 12.0),))),
        Verdict.DISRUPTED,
        "replica 1 fell silent",
        id="its ranks were killed with it",
    ),
    pytest.param(
        (bad(0, RESET), replace(ours(1), ranks=(RankExit(1, None, 11, 9.0),))),
        Verdict.FAILED,
        "replica 1: rank 1 ended by SIGSEGV",
        id="a rank of it had crashed",
    ),
    pytest.param(
        (bad(0, RESET), replace(ours(1), ranks=(RankExit(1, 0, None, 9.0),))),
        Verdict.FAILED,
        "replica 0: RuntimeError",
        id="its rank was done",
    ),
    pytest.param((replace(ours(0), termination=CRASHED),), Verdict.FAILED, "nan in", id="its word alone"),
    pytest.param(
        (replace(memory(0), exit_code=None), bad(1, RESET)),
        Verdict.OUT_OF_MEMORY,
        "memory",
        id="no exit code",
    ),
    pytest.param(
        (bad(0, HUNG), bad(1, CRASHED, at=7)),
        Verdict.FAILED,
        "replica 1: Va",
        id="what failed before the hang",
    ),
    pytest.param(
        (
            replace(bad(0), ranks=(RankExit(0, 0, None, 5.0), RankExit(1, 7, None, 10.0))),
            bad(1, CRASHED, at=7),
        ),
        Verdict.FAILED,
        "replica 1: Va",
        id="a rank that was done earlier is no cause",
    ),
    pytest.param(
        (
            replace(
                bad(0), ranks=(RankExit(0, 0, None, 5.0), RankExit(1, 7, None, 8.0), RankExit(2, 1, None, 12))
            ),
            bad(1, CRASHED, at=9),
        ),
        Verdict.FAILED,
        "replica 0: rank 1 ended with exit code 7",
        id="the first of its ranks that failed",
    ),
    pytest.param(
        (replace(saved(0), ranks=(RankExit(0, 0, None, 9.0), RankExit(1, 0, None, 12.0))), bad(1, CRASHED)),
        Verdict.DISRUPTED,
        "notice and saved",
        id="a notice first, by the first rank that has saved",
    ),
    pytest.param(
        (replace(saved(0), ranks=(), ended_at=None), bad(1, CRASHED, at=1)),
        Verdict.DISRUPTED,
        "notice and saved",
        id="a notice, and nobody knows when",
    ),
    pytest.param(
        (replace(saved(0), ranks=()), bad(1, CRASHED, at=8)),
        Verdict.FAILED,
        "replica 1: ValueError",
        id="a fault, and the notice by which we end its peer",
    ),
    pytest.param(
        (replace(saved(0), ranks=()), replace(bad(1, at=9), ranks=(RankExit(1, None, 15, 9.0),))),
        Verdict.DISRUPTED,
        "notice and saved",
        id="a notice to both, of which one had not begun",
    ),
    pytest.param(
        (replace(saved(0), ranks=()), bad(1, RESET, at=9)),
        Verdict.DISRUPTED,
        "notice and saved",
        id="a notice, and a peer whose clock is behind",
    ),
    pytest.param(
        (beside(NOTICED, RankExit(1, None, 11, 9.0)),),
        Verdict.FAILED,
        "replica 0: rank 1 ended by SIGSEGV",
        id="a rank crashed, and torchrun gave its peers in the replica notice",
    ),
    pytest.param(
        (beside(NOTICED, RankExit(1, 7, None, 9.0)), bad(1, RESET, at=9)),
        Verdict.FAILED,
        "replica 0: rank 1 ended with exit code 7",
        id="a rank left without a word, and its peer got notice",
    ),
    pytest.param(
        (beside(RESET, RankExit(1, None, 11, 9.0)), ours(1)),
        Verdict.FAILED,
        "replica 0: rank 1 ended by SIGSEGV",
        id="a rank crashed, and its peer in the replica tells of the connection",
    ),
    pytest.param(
        (beside(NOTICED, RankExit(1, None, 6, 9.0)),),
        Verdict.FAILED,
        "replica 0: rank 1 ended by SIGABRT",
        id="a rank aborted, and torchrun gave its peers in the replica notice",
    ),
    pytest.param(
        (beside(RESET, RankExit(1, None, 6, 9.0)), ours(1)),
        Verdict.DISRUPTED,
        "replica 1",
        id="NCCL ended a rank that waited for one which fell silent, and its peer tells of the connection",
    ),
    pytest.param(
        (beside(NOTICED, RankExit(1, None, 11, 11.0)),),
        Verdict.DISRUPTED,
        "notice and saved",
        id="a notice, and a rank that crashes after its peer has left",
    ),
    pytest.param(
        (replace(saved(0), ranks=(RankExit(0, 0, None, 10.0), RankExit(1, None, 6, 10.1))),),
        Verdict.DISRUPTED,
        "notice and saved",
        id="a notice, and a rank that crashes as it leaves",
    ),
    pytest.param(
        (beside(NOTICED, RankExit(1, None, 15, 9.0)),),
        Verdict.DISRUPTED,
        "notice and saved",
        id="a notice that ended a rank without a word",
    ),
    pytest.param((ours(0), ours(1)), Verdict.DISRUPTED, "nothing says who", id="no evidence at all"),
    pytest.param((), Verdict.DISRUPTED, "nothing says who", id="no replica at all"),
]


@pytest.mark.parametrize(("replicas", "verdict", "reason"), CASES)
def test_one_incident_an_attempt(
    replicas: tuple[ReplicaObservation, ...], verdict: Verdict, reason: str
) -> None:
    incident = classify(AttemptObservation(1, True, True, replicas))
    assert incident.verdict is verdict, incident.reason
    assert reason in incident.reason


STOPPED = [
    pytest.param((saved(0), saved(1)), Verdict.SUSPENDED, "stopped on request", id="cleanly"),
    pytest.param((bad(0, CRASHED), saved(1)), Verdict.SUSPENDED, "not cleanly: replica 0", id="a crash"),
    pytest.param((taken(0), ours(1)), Verdict.SUSPENDED, "stopped on request", id="drilled too"),
    pytest.param((ours(0), ours(1)), Verdict.SUSPENDED, "stopped on request", id="past the grace"),
    pytest.param((ok(0, DONE), ok(1, DONE)), Verdict.FINISHED, "finished", id="was done anyway"),
    pytest.param((bad(0, CONFIG), saved(1)), Verdict.CONFIG_ERROR, "lr_rate", id="can never run"),
]


@pytest.mark.parametrize(("replicas", "verdict", "reason"), STOPPED)
def test_an_attempt_that_was_asked_to_stop(
    replicas: tuple[ReplicaObservation, ...], verdict: Verdict, reason: str
) -> None:
    incident = classify(AttemptObservation(1, True, True, replicas, stopping=True))
    assert incident.verdict is verdict, incident.reason
    assert reason in incident.reason


@pytest.mark.parametrize(
    "said",
    [
        "RuntimeError: Connection reset by peer",
        "RuntimeError: [unbound_buffer.cc:81] Timed out waiting 1800000ms for recv operation to complete",
        "DistNetworkError: failed to recv, got 0 bytes. Connection was likely closed.",
        "DistBackendError: [Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7",
        "DistBackendError: NCCL error: remote process exited or there was a network error",
        "ncclRemoteError: ... possibly due to a network error or a remote process exiting prematurely.",
        "Last error:\nsocketProgress: Connection closed by remote peer gpt-1-worker-0<40312>",
    ],
)
def test_a_replica_that_fell_silent_is_the_cause_where_its_peer_tells_only_of_the_connection(
    said: str,
) -> None:
    """Its supervisor was killed from outside, and we ended its torchrun before that could tell."""
    lost = Termination("failed", 50, 40, said)
    silent = ReplicaObservation(1, ReplicaState.FAILED, "Killed: by Holdfast", exit_signal=9, ended_at=11.0)
    taken = classify(AttemptObservation(1, True, True, (bad(0, lost), silent)))
    assert (taken.verdict, taken.replica) == (Verdict.DISRUPTED, 1)
    own_fault = classify(AttemptObservation(1, True, True, (bad(0, CRASHED), silent)))
    assert (own_fault.verdict, own_fault.replica) == (Verdict.FAILED, 0)


@pytest.mark.parametrize(
    "said",
    [
        "ConnectionResetError: [Errno 104] Connection reset by peer",
        "BrokenPipeError: [Errno 32] Broken pipe",
        "requests.exceptions.ConnectionError: ('Connection aborted.', ConnectionResetError(104, 'Connection "
        "reset by peer'))",
    ],
)
def test_a_connection_of_the_programs_own_that_breaks_is_its_fault(said: str) -> None:
    """To a store of data, to a loader's worker: its peer hung with it over NCCL, until we killed that. As a
    disruption it would be tried again for ever."""
    lost = Termination("failed", 50, 40, said)
    silent = ReplicaObservation(1, ReplicaState.FAILED, "Killed: by Holdfast", exit_signal=9, ended_at=11.0)
    incident = classify(AttemptObservation(1, True, True, (bad(0, lost), silent)))
    assert (incident.verdict, incident.replica) == (Verdict.FAILED, 0)
    assert incident.reason == f"replica 0: {said}"


@pytest.mark.parametrize(
    "said",
    [
        "torch.AcceleratorError: CUDA error: out of memory",
        "rank 1 ran out of memory before its first step: CUDA driver error: out of memory. Peak 0.1 of 8 GB.",
        "RuntimeError: CUDA driver error: out of memory",
        "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "torch.distributed.DistBackendError: NCCL error in: NCCLUtils.cpp:77, unhandled cuda error\n"
        "Last error:\nCuda failure 2 'out of memory'",
    ],
)
def test_memory_that_runs_out_past_the_allocator_of_pytorch_is_memory(said: str) -> None:
    """As on a GPU that others have filled."""
    told = Termination("failed", 0, 0, said)
    assert classify(AttemptObservation(1, True, True, (bad(0, told),))).verdict is Verdict.OUT_OF_MEMORY


ENDED = Incident(Verdict.HUNG, "no step for 400 s")


@pytest.mark.parametrize(
    ("replicas", "verdict"),
    [
        pytest.param((ours(0), ours(1)), Verdict.HUNG, id="nothing else is known"),
        pytest.param((bad(0, RESET), bad(1, code=134)), Verdict.HUNG, id="they ended as we ended them"),
        pytest.param((taken(0), ours(1)), Verdict.DISRUPTED, id="it was silent because it was taken"),
        pytest.param((node_gone(0), ours(1)), Verdict.LOST_NODE, id="its node went"),
        pytest.param((ours(0), node_silent(1)), Verdict.LOST_NODE, id="its node fell silent"),
        pytest.param((ok(0, DONE), ok(1, DONE)), Verdict.FINISHED, id="it finished in the last moment"),
        pytest.param((bad(0, CONFIG), ours(1)), Verdict.CONFIG_ERROR, id="it can never run"),
    ],
)
def test_what_holdfast_ended_an_attempt_for_gives_way_to_what_the_platform_says(
    replicas: tuple[ReplicaObservation, ...], verdict: Verdict
) -> None:
    assert classify(AttemptObservation(1, True, True, replicas), ENDED).verdict is verdict


@pytest.mark.parametrize(
    ("said", "verdict"),
    [
        ("attempt 4 was superseded by attempt 9: it may no longer write to s3://runs/a", Verdict.DISRUPTED),
        ("attempt 4 was superseded by attempt 3: it may no longer write to /r", Verdict.FAILED),
        ("attempt 2 was superseded by attempt 9: it may no longer write to /r", Verdict.FAILED),
        ("attempt 4 was superseded by attempt 10000: it may no longer write to /r", Verdict.FAILED),
    ],
)
def test_who_is_shut_out_of_its_run_directory_by_an_attempt_that_is_not_on_record(
    said: str, verdict: Verdict
) -> None:
    seen = AttemptObservation(
        4, True, True, (bad(0, RESET, at=9.0), bad(1, Termination("failed", 0, 0, said)))
    )
    assert classify(seen, superseded=superseded_by(seen, [])).verdict is verdict


# What a plain script writes has no words of the trainer's beside it. As PyTorch 2.15 prints it: the beginning
# found no room.
LOST_ITS_PEER = """... last):
[rank1]:   File "train.py", line 5, in <module>
[rank1]:     loss.backward()
[rank1]: RuntimeError: [gloo/transport/tcp/pair.cc:561] Connection closed by peer [10.0.0.7]:6831. This is \
typically caused by a remote worker crashing."""
NOT_DEFINED = """Traceback (most recent call last):
  File "train.py", line 3, in <module>
    print(undefined)
          ^^^^^^^^^
NameError: name 'undefined' is not defined"""
NO_ROOM = "[rank0]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
USAGE = "usage: train.py [-h] [--lr LR]\ntrain.py: error: unrecognized arguments: --rate 1"


def wrote(index: int, *said: str, code: int = 1) -> ReplicaObservation:
    """A replica whose ranks ended one after the other and wrote that last."""
    ends = tuple(RankExit(index, code, None, 10.0 + at, said=text) for at, text in enumerate(said))
    return replace(bad(index), ranks=ends)


SILENT = ReplicaObservation(1, ReplicaState.FAILED, "Killed: by Holdfast", exit_signal=9, ended_at=11.0)
PLAIN = [
    pytest.param(
        (wrote(0, NOT_DEFINED),),
        Verdict.FAILED,
        "replica 0: rank 0 ended with exit code 1; it last said: NameError: name 'undefined' is not defined",
        id="an exception",
    ),
    pytest.param(
        (wrote(0, USAGE, code=2),),
        Verdict.FAILED,
        "replica 0: rank 0 ended with exit code 2; it last said: train.py: error: unrecognized arguments: "
        "--rate 1",
        id="a wrong argument",
    ),
    pytest.param(
        (wrote(0, NO_ROOM),),
        Verdict.OUT_OF_MEMORY,
        "replica 0: rank 0 ended with exit code 1; it last said: torch.OutOfMemoryError: CUDA out of memory. "
        "Tried to allocate 2.00 GiB.",
        id="no memory",
    ),
    pytest.param(
        (wrote(0, "Loss is fine, and 12 GiB are free.\nCUDA out of memory is what we fear\nbye"),),
        Verdict.FAILED,
        "replica 0: rank 0 ended with exit code 1; it last said: bye",
        id="of memory long before",
    ),
    pytest.param(
        (wrote(0, LOST_ITS_PEER), SILENT),
        Verdict.DISRUPTED,
        "replica 1 fell silent, and its peers lost the connection to it",
        id="its peer fell silent",
    ),
    pytest.param(
        (wrote(0, LOST_ITS_PEER), replace(SILENT, lost_node=True)),
        Verdict.LOST_NODE,
        "replica 1: its node fell silent (replica 0: rank 0 ended with exit code 1; it last said: "
        "RuntimeError: [gloo/transport/tcp/pair.cc:561] Connection closed by peer",
        id="its peer's node fell silent",
    ),
    pytest.param(
        (wrote(0, NOT_DEFINED), replace(SILENT, lost_node=True)),
        Verdict.FAILED,
        "replica 0: rank 0 ended with exit code 1; it last said: NameError",
        id="a fault of its own beside it",
    ),
    pytest.param(
        (wrote(0, LOST_ITS_PEER), replace(wrote(1, NOT_DEFINED), ended_at=12.0)),
        Verdict.FAILED,
        "replica 1: rank 1 ended with exit code 1; it last said: NameError",
        id="its peer's fault took longer to end",
    ),
    pytest.param(
        (wrote(0, LOST_ITS_PEER, NOT_DEFINED), SILENT),
        Verdict.FAILED,
        "replica 0: rank 0 ended with exit code 1; it last said: NameError",
        id="the fault of another rank of its own",
    ),
    pytest.param(
        (wrote(0, "ConnectionResetError: [Errno 104] Connection reset by peer"), SILENT),
        Verdict.FAILED,
        "replica 0: rank 0 ended with exit code 1; it last said: ConnectionResetError",
        id="a connection of its own",
    ),
    pytest.param(
        (wrote(0, "step 50 after: Connection closed by peer\nstep 60"), SILENT),
        Verdict.FAILED,
        "replica 0: rank 0 ended with exit code 1; it last said: step 60",
        id="of a peer long before",
    ),
]


@pytest.mark.parametrize(("replicas", "verdict", "reason"), PLAIN)
def test_what_a_plain_script_wrote_last_is_the_evidence(
    replicas: tuple[ReplicaObservation, ...], verdict: Verdict, reason: str
) -> None:
    """An exit code said nothing, and a peer's lost node was held against the script."""
    incident = classify(AttemptObservation(1, True, True, replicas))
    assert incident.verdict is verdict, incident.reason
    assert incident.reason.startswith(reason)
