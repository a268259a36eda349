"""What a GPU computes is told a step late, without waiting for the step that is under way."""

from __future__ import annotations

import math

import pytest
import torch
from gpu_queue import StandInQueue

from holdfast_trainer.interruption import Exchange, Notice
from holdfast_trainer.late import Late
from holdfast_trainer.parallel import Gang
from holdfast_trainer.training_state import TrainingState

CPU = torch.device("cpu")


def exchange(queue: StandInQueue) -> Exchange:
    return Exchange(Gang(0, 1, 0, CPU), Notice(30, lambda: None), queue.late)


def test_of_the_cpu_a_number_is_there_at_once() -> None:
    total = torch.tensor([2.0], requires_grad=True)
    told = Late.of(total)
    with torch.no_grad():
        total.zero_()
    assert (told.read(), told.late) == (2.0, False)
    assert Late.of(3.0).read() == 3.0


def test_a_loss_is_told_a_step_late_and_what_is_under_way_is_not_waited_for() -> None:
    queue = StandInQueue()
    one = exchange(queue)
    heard = []
    for step in range(1, 6):
        one.offer_loss(step, torch.tensor(float(step)), 10.0 * step)
        one.contribute(step)
        agreed = one.finish()
        heard.append((agreed.loss, agreed.grad_norm))
        assert queue.waiting == 2, "loss and norm of this step"
    assert heard == [(None, None), *(((step, float(step)), 10.0 * step) for step in range(1, 5))]
    assert [agreed.loss for agreed in one.drain(5)] == [(5, 5.0)], "before a save all are known"
    assert queue.waiting == 0


@pytest.mark.parametrize("bad", [(math.nan, 1.0), (1.0, math.inf)], ids=["loss", "norm"])
def test_what_is_no_number_is_known_before_its_state_is_saved(bad: tuple[float, float]) -> None:
    one = exchange(StandInQueue())
    for step, (loss, norm) in enumerate([(1.0, 1.0), bad], start=1):
        one.offer_loss(step, torch.tensor(loss), norm)
        one.contribute(step)
        assert one.finish().broken is None
    assert [agreed.broken for agreed in one.drain(2)] == [2]


def test_the_least_scale_is_read_without_asking_the_scaler_for_it() -> None:
    scalers = {name: torch.amp.GradScaler("cpu", scale) for name, scale in (("a", 2.0**16), ("b", 8.0))}
    scale = TrainingState(scalers, 0).gradient_scale(CPU)
    assert scale is not None
    assert scale.read() == 8.0
    assert TrainingState({"a": torch.amp.GradScaler("cpu", enabled=False)}, 0).gradient_scale(CPU) is None
