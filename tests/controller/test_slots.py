"""Who gets which cores and GPUs, who waits, and why."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast_controller.jobs import Spec
from holdfast_controller.local.slots import (
    Allocation,
    Grant,
    Machine,
    Request,
    Waiting,
    admit,
    allocate,
    free_cores,
    never_fits,
    request_of,
)


def ask(replicas: int = 1, cores: float = 0, gpus: float = 0) -> Request:
    return Request(replicas, Fraction(cores), Fraction(gpus))


@pytest.mark.parametrize(
    ("spec", "request_"),
    [
        (Spec(command=["x"], replicas=2), ask(2, 1)),
        (Spec(command=["x"], processes=3), ask(1, 3)),
        (Spec.model_validate({"command": ["x"], "resources": {"cpu": "500m"}}), ask(1, 0.5)),
        (Spec(command=["x"], gpus="4"), ask(1, 0, 4)),
        (Spec.model_validate({"command": ["x"], "gpus": 0.25, "resources": {"cpu": 2}}), ask(1, 2, 0.25)),
    ],
)
def test_what_a_spec_asks_for(spec: Spec, request_: Request) -> None:
    assert request_of(spec) == request_


@pytest.mark.parametrize(
    ("request_", "machine", "reason"),
    [
        (ask(2, 1), Machine(2), None),
        (
            ask(1, 0, 64),
            Machine(2),
            "asks for 64 GPUs; this machine has 0: set gpus: 0 to train on CPU, or use",
        ),
        (
            ask(4, 1),
            Machine(2),
            "asks for 4 CPU slots (1 for each of 4 replicas); this machine has 2: ask for",
        ),
        (ask(2, 0, 0.5), Machine(2, (0,)), "asks for shares of 2 GPUs (one a replica); this machine has 1"),
        (ask(1, 0, 0.5), Machine(2, (0,)), None),
    ],
)
def test_what_can_never_fit_is_told_with_a_remedy(
    request_: Request, machine: Machine, reason: str | None
) -> None:
    reasons = never_fits(request_, machine)
    assert not reasons if reason is None else reasons[0].startswith(reason)


def test_shares_meet_on_a_gpu_but_never_those_of_one_job() -> None:
    machine = Machine(0, (2, 5))
    first = allocate(ask(2, 0, 0.5), machine, {})
    assert first is not None
    assert [grant.gpus for grant in first] == [(2,), (5,)]
    second = allocate(ask(1, 0, 0.5), machine, {"a": first})
    assert second == (Grant(Fraction(0), (2,), Fraction(1, 2)),)
    third = allocate(ask(1, 0, 0.5), machine, {"a": first, "b": second})
    assert third is not None
    assert third[0].gpus == (5,)
    assert allocate(ask(1, 0, 1), machine, {"a": first}) is None


def test_the_oldest_waits_and_nobody_overtakes_it() -> None:
    machine = Machine(2)
    running = {"default/x": (Grant(Fraction(1)),)}
    queue = [Waiting("default/wide", ask(2, 1)), Waiting("default/small", ask(1, 1))]
    started, waits = admit(queue, machine, running)
    assert started == {}
    assert waits == {
        "default/wide": "waits for 2 CPU slots: 1 of 2 free; job default/x holds 1",
        "default/small": "waits behind job default/wide, which is older",
    }


def test_a_start_changes_what_is_said_of_the_first_in_line_and_the_next_alone() -> None:
    """Each reason is written into its job's status: with hundreds in line, every start had all of them
    written anew, and what had ended meanwhile waited for its verdict until that was done."""
    machine = Machine(2)
    queue = [Waiting(f"default/j{n}", ask(1, 1)) for n in range(300)]
    _, before = admit(
        queue[1:], machine, {"default/x": (Grant(Fraction(1)),), "default/j0": (Grant(Fraction(1)),)}
    )
    started, after = admit(queue[1:], machine, {"default/j0": (Grant(Fraction(1)),)})
    assert list(started) == ["default/j1"]
    assert [key for key in after if after[key] != before[key]] == ["default/j2"]
    assert after["default/j299"] == "waits behind job default/j298, which is older"


def test_what_a_job_in_line_waits_for_too_is_not_taken_by_a_younger_one() -> None:
    """It is behind another for its cores; the GPU that it needs is free, and stays so."""
    machine = Machine(4, (0,))
    running = {"default/x": (Grant(Fraction(3)),)}
    queue = [
        Waiting("default/wide", ask(1, 4)),
        Waiting("default/both", ask(1, 1, 1)),
        Waiting("default/gpu", ask(1, 0, 1)),
    ]
    started, waits = admit(queue, machine, running)
    assert started == {}
    assert waits["default/both"] == "waits behind job default/wide, which is older"
    assert waits["default/gpu"] == "waits behind job default/both, which is older"


def test_who_waits_for_gpus_holds_up_no_job_on_cores() -> None:
    machine = Machine(2, (0,))
    running = {"default/x": (Grant(Fraction(0), (0,)),)}
    queue = [Waiting("default/gpu", ask(1, 0, 1)), Waiting("default/cpu", ask(1, 1))]
    started, waits = admit(queue, machine, running)
    assert list(started) == ["default/cpu"]
    assert waits["default/gpu"] == "waits for 1 GPU slots: 0 of 1 free; job default/x holds 1"


@pytest.mark.parametrize(
    ("machine", "held", "request_", "said"),
    [
        (
            Machine(0, (0, 1)),
            (Grant(gpus=(0,), share=Fraction(1, 2)), Grant(gpus=(1,), share=Fraction(1, 2))),
            ask(1, 0, 1),
            "waits for 1 GPU slots: 0 of 2 free; job default/x holds 1",
        ),
        (
            Machine(0, (0, 1)),
            (Grant(gpus=(0,)),),
            ask(2, 0, 0.5),
            "waits for 0.5 of 2 GPUs: 1 of 2 with that much free; job default/x holds 1",
        ),
        (
            Machine(2),
            (Grant(Fraction(4)),),
            ask(1, 1),
            "waits for 1 CPU slots: 0 of 2 free; job default/x holds 4",
        ),
    ],
    ids=["halves of GPUs", "two shares", "fewer slots than before"],
)
def test_what_is_said_to_be_free_is_what_could_be_given(
    machine: Machine, held: Allocation, request_: Request, said: str
) -> None:
    """Who waited for one GPU was told that one of two is free, that was half of each; and -2 of 2 slots were
    free where the controller was started with fewer than before."""
    _, waits = admit([Waiting("default/a", request_)], machine, {"default/x": held})
    assert waits == {"default/a": said}


def test_what_another_job_of_its_name_holds_stays_taken_when_a_job_starts() -> None:
    machine = Machine(3, (0, 1))
    running = {"default/a": (Grant(Fraction(0), (0,)),)}
    queue = [Waiting("default/a", ask(1, 0, 1)), Waiting("default/b", ask(1, 0, 1))]
    started, waits = admit(queue, machine, running)
    assert started == {"default/a": (Grant(Fraction(0), (1,)),)}
    assert waits == {"default/b": "waits for 1 GPU slots: 0 of 2 free; job default/a holds 2"}


requests = st.builds(
    ask,
    st.integers(1, 3),
    st.sampled_from([0, 0.5, 1, 2]),
    st.sampled_from([0, Fraction(1, 4), Fraction(1, 2), 1, 2]),
)


@given(st.lists(requests, max_size=12), st.integers(0, 6), st.integers(0, 4))
def test_nothing_is_ever_given_twice(asked: list[Request], cores: int, gpus: int) -> None:
    machine = Machine(cores, tuple(range(10, 10 + gpus)))
    queue = [Waiting(f"default/{n}", request) for n, request in enumerate(asked)]
    started, waits = admit(queue, machine, {})
    assert set(started) | set(waits) == {job.key for job in queue}
    assert all(waits.values())
    assert free_cores(machine, started) >= 0
    for device in machine.devices:
        shares = [
            grant.share for held in started.values() for grant in held for d in grant.gpus if d == device
        ]
        assert sum(shares) <= 1
    if queue and not never_fits(queue[0].request, machine):
        assert queue[0].key in started
