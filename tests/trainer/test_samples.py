"""A dataset with workers in a run that is interrupted: same batches, same bits, and a dead worker is told."""

from __future__ import annotations

import os
import random
from collections import UserDict
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from gangs import KILL, NOTICE, Gang, Workshop, holding
from torch import Tensor
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import Dataset, default_collate
from waiting import wait_until

from holdfast_trainer import parallel
from holdfast_trainer.contract import EXIT_CONFIG_ERROR
from holdfast_trainer.samples import Samples, pad_ragged, to_device, workers_by_rule
from holdfast_trainer.token_index import DataError
from holdfast_trainer.tune.own import loader
from holdfast_trainer.tune.settings import Settings
from holdfast_trainer.tune.workload import Workload

EXAMPLE = Path(__file__).parents[2] / "k8s" / "examples" / "ragged" / "train.py"


class Noisy(Dataset[Any]):
    """Draws from all generators that there are."""

    def __init__(self, size: int = 50) -> None:
        self._size = size

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> tuple[int, Tensor]:
        return index, torch.rand(2) + np.random.rand() + random.random()


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_workers_are_forked_whatever_python_would_do(device: str) -> None:
    """Only what is forked from the rank has let go of its signals: a notice ends any other."""
    ours = Samples(Noisy(), batch=2, device=device, workers=1)._loader(0)
    workload = Workload(torch.nn.Identity, Noisy(), lambda model, batch: batch)
    tuned = loader(workload, Settings(batch=2, workers=1), parallel.Gang(0, 1, 0, torch.device(device)))
    for made in (ours, tuned):
        assert made.multiprocessing_context.get_start_method() == "fork"


def same(one: Any, other: Any) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_a_batch_is_a_function_of_the_step_whoever_loads_it_and_whenever() -> None:
    alone, helped = Samples(Noisy(), batch=8, workers=0), Samples(Noisy(), batch=8, workers=2, prefetch=2)
    expected = [alone.batch(step) for step in range(20)]
    try:
        for step in (*range(6), *range(15, 20), 2, 3):  # on and on, as after a resume, and back
            assert same(helped.batch(step), expected[step]), step
    finally:
        helped.close()
    seen = torch.cat([indices for indices, _ in expected])[:50]
    assert sorted(seen.tolist()) == list(range(50)), "an epoch has every sample once"
    assert not same(alone.batch(0), alone.batch(50)), "and the next one another order"


def test_ranks_have_parts_of_one_order() -> None:
    whole = [Samples(Noisy(), batch=8, workers=0).batch(step)[0] for step in range(5)]
    for step, expected in enumerate(whole):
        parts = [Samples(Noisy(), batch=4, workers=0, rank=r, world_size=2).batch(step)[0] for r in (0, 1)]
        assert torch.equal(torch.cat(parts), expected)


def test_training_draws_what_it_would_without_a_loader() -> None:
    for workers in (0, 1):
        samples = Samples(Noisy(), batch=4, workers=workers)
        torch.manual_seed(3)
        expected = torch.rand(3)
        torch.manual_seed(3)
        samples.batch(0)
        assert torch.equal(torch.rand(3), expected)
        samples.close()


def test_samples_may_be_fetched_together() -> None:
    class Together(Noisy):
        def __getitems__(self, indices: list[int]) -> list[int]:
            return [-index for index in indices]

    apart = Samples(Noisy(), batch=4, workers=0).batch(0)[0]
    assert torch.equal(Samples(Together(), batch=4, workers=0, collate=default_collate).batch(0), -apart)


def test_all_tensors_of_a_batch_are_on_the_device_but_those_that_belong_elsewhere() -> None:
    """A packed sequence keeps its sizes on the CPU, and one ended the first step on a GPU. Of what is like a
    dict and none, as a tokenizer gives it, all stayed where it was."""
    device, tensor = torch.device("meta"), torch.ones(2)
    packed = to_device(pack_sequence([torch.ones(3), tensor]), device)
    assert (packed.data.device, packed.batch_sizes.device) == (device, torch.device("cpu"))
    batch = to_device({"a": [tensor, (tensor, 3)], "b": UserDict(ids=tensor)}, device)
    assert batch["a"][0].device == batch["a"][1][0].device == batch["b"]["ids"].device == device
    assert batch["a"][1][1] == 3


def test_ragged_sequences_are_padded() -> None:
    values, lengths = pad_ragged([[1, 2, 3], torch.tensor([4]), np.array([], dtype=int)], fill=-1, multiple=4)
    assert values.tolist() == [[1, 2, 3, -1], [4, -1, -1, -1], [-1] * 4]
    assert lengths.tolist() == [3, 1, 0]
    assert pad_ragged([np.zeros(9, np.float32)])[0].shape == (1, 16)
    assert pad_ragged([[1]], dtype=torch.float16)[0].dtype == torch.float16


def test_what_is_padded_keeps_its_values_whatever_the_first_sequence_is() -> None:
    for samples, dtype in (
        ([[1, 2], [0.5, 1.5, 2.5]], torch.float64),
        ([np.array([7], np.int32), [2**40]], torch.int64),
        ([[], [5, 6]], torch.int64),
        ([np.array([], np.uint8), np.array([200], np.uint8)], torch.uint8),
        ([[]], torch.float64),
    ):
        padded, lengths = pad_ragged(samples)
        assert padded.dtype == dtype
        for row, length, sample in zip(padded, lengths, samples, strict=True):
            assert row[:length].tolist() == list(sample)


def test_a_type_that_has_no_room_for_a_value_is_refused() -> None:
    assert pad_ragged([[0, 255], []], dtype=torch.uint8)[0][0, :2].tolist() == [0, 255]
    assert pad_ragged([[0.1]], dtype=torch.float32)[0][0, 0] == torch.tensor(0.1)
    for samples, dtype, said in (
        ([[1], [2**40]], torch.int32, "a sequence holds 1099511627776, and int32 has no room for that"),
        ([[3, -1]], torch.uint8, "a sequence holds -1, and uint8 has no room for that"),
        ([[1], [1.5]], torch.int64, "a sequence of float64 would lose its values as int64"),
    ):
        with pytest.raises(DataError, match=said):
            pad_ragged(samples, dtype=dtype)
    with pytest.raises(DataError, match=r"torch.uint16 has no room for fill=-100: give another dtype"):
        pad_ragged([np.array([1, 2], np.uint16)], fill=-100)


@pytest.mark.parametrize(
    ("cores", "ranks", "gpu", "workers"),
    [
        (2, 1, False, 0),
        (8, 1, False, 6),
        (64, 1, False, 8),
        (8, 1, True, 4),
        (64, 8, True, 4),
        (16, 8, True, 1),
    ],
)
def test_workers_by_rule(cores: int, ranks: int, gpu: bool, workers: int) -> None:
    assert workers_by_rule(cores, ranks, gpu=gpu) == workers


def test_what_can_not_be_loaded_is_refused() -> None:
    with pytest.raises(DataError, match=r"the dataset \(Noisy\) has no samples"):
        Samples(Noisy(0), batch=1)
    with pytest.raises(ValueError, match="no batch of 4 samples for rank 2 of 2"):
        Samples(Noisy(), batch=4, rank=2, world_size=2)


# -------------------------------------------------------------------- in a run

UNLIKE = """
import torch
from holdfast_trainer.run import Run
from holdfast_trainer.contract import EXIT_CONFIG_ERROR
from holdfast_trainer.samples import Samples

run = Run()
run.track(model=run.wrap(torch.nn.Linear(1, 1)))
Samples(range(50 - 10 * run.rank), batch=2, rank=run.rank, world_size=run.world_size, workers=0)
for step in run.steps(2):
    raise AssertionError("a step of ranks that differ")
"""


def test_ranks_with_another_number_of_samples_are_told(workshop: Workshop, tmp_path: Path) -> None:
    """Each would go by an order of its own: samples twice, and others never."""
    script = tmp_path / "unlike.py"
    script.write_text(UNLIKE)
    gang = workshop.start(ranks=2, script=script)
    assert gang.wait() == [EXIT_CONFIG_ERROR, EXIT_CONFIG_ERROR], gang.texts()
    told = gang.termination().error
    assert "the data of Samples differs among the ranks: '50 samples, 2 a step, seed 1337' on rank 0" in told
    assert "'40 samples, 2 a step, seed 1337' on rank 1" in told


FOLDER = """
import os

import torch
from holdfast_trainer.run import Run
from holdfast_trainer.samples import Samples

run = Run()
model = run.wrap(torch.nn.Linear(1, 1))
images = [torch.tensor([float(n)]) for n in range(int(os.environ["IMAGES"]))]
samples = Samples(images, batch=2, rank=run.rank, world_size=run.world_size, workers=0)
run.track(model=model, optimizer=torch.optim.SGD(model.parameters(), 0.1))
for step in run.steps(int(os.environ["STEPS"])):
    samples.batch(step)
"""


def test_a_folder_with_more_images_than_before_is_told_at_the_resume(
    workshop: Workshop, tmp_path: Path
) -> None:
    """Its order is another one, and after a notice no step is done again, which would tell."""
    script = tmp_path / "folder.py"
    script.write_text(FOLDER)
    workshop.finish(script=script, env={"IMAGES": "50", "STEPS": "4"})
    history = workshop.finish(script=script, env={"IMAGES": "50", "STEPS": "6"})
    assert history.events("attempt_start", 2)[0]["differences"] == []
    history = workshop.finish(script=script, env={"IMAGES": "53", "STEPS": "8"})
    expected = "the data of Samples: 50 samples, 2 a step, seed 1337 -> 53 samples, 2 a step, seed 1337"
    assert history.events("attempt_start", 3)[0]["differences"] == [expected]


def test_the_page_on_own_loops_shows_the_lines_of_the_example() -> None:
    page = (EXAMPLE.parents[3] / "docs/own-loops.md").read_text()
    shown = page.split("sorts sequences into classes with it:\n\n```python\n")[1].split("```")[0]
    lines = [line.strip() for line in EXAMPLE.read_text().splitlines()]
    assert all(line.strip() in lines for line in shown.splitlines())


def script(tmp_path: Path, workers: int) -> Path:
    """The example, shorter, with so many workers; it waits for its test where it is told to."""
    text = EXAMPLE.read_text()
    for old, new in (("STEPS = 300", "STEPS = 100"), ("batch=64,", f"batch=64, workers={workers},")):
        assert old in text
        text = text.replace(old, new)
    path = tmp_path / f"with-{workers}.py"
    path.write_text(holding(text))
    return path


def workers_of(gang: Gang, rank: int) -> list[psutil.Process]:
    found = []
    for process in psutil.Process(gang.ranks[rank].pid).children():
        with suppress(psutil.NoSuchProcess):
            if process.name() == "pt_data_worker":
                found.append(process)
    return found


@pytest.mark.slow
def test_killed_noticed_and_bereft_of_a_worker_equals_untouched(workshop: Workshop, tmp_path: Path) -> None:
    """The untouched run has no workers: they change nothing but who waits."""
    env = {"HOLDFAST_CHECKPOINT_EVERY": "8"}
    untouched = workshop.finish("untouched", ranks=2, script=script(tmp_path, 0), env=env)
    helped = script(tmp_path, 2)

    killed = workshop.start(ranks=2, script=helped, env=env, hold_at=17)
    killed.wait_for_step(12)
    wait_until(lambda: killed.history.run.checkpoint(8).exists(), "step 8 to be durable")
    killed.signal(KILL)
    killed.wait()

    noticed = workshop.start(ranks=2, script=helped, env=env, hold_at=31)
    noticed.wait_for_step(26)
    for rank in noticed.ranks:
        os.killpg(rank.pid, NOTICE)  # as torchrun does: to the rank and what is in its group
    noticed.release()
    assert noticed.wait() == [0, 0], noticed.texts()
    assert noticed.termination().step == noticed.termination().durable_step >= 26

    later = noticed.termination().step + 9
    bereft = workshop.start(ranks=2, script=helped, env=env, hold_at=later)
    bereft.wait_for_step(later)
    wait_until(lambda: len(workers_of(bereft, 1)) == 2, "the workers of rank 1")
    victim = workers_of(bereft, 1)[0]
    victim.kill()
    bereft.release()
    assert bereft.ranks[1].wait() == 1, bereft.texts()
    bereft.ranks[0].wait()
    told = bereft.termination(1)
    assert (told.outcome, told.config_error) == ("failed", False), "it may be tried again"
    assert told.error.startswith("rank 1 lost a process that loads data in step "), told.error
    assert str(victim.pid) in told.error
    assert "take fewer workers, a smaller prefetch or batch, or more memory" in told.error

    interrupted = workshop.finish(ranks=2, script=helped, env=env)
    starts = [line["resumed_step"] for line in interrupted.events("attempt_start")]
    assert 0 == starts[0] < starts[1] < starts[2] <= starts[3] < 100, starts
    assert interrupted.losses() == untouched.losses()
    assert sorted(interrupted.losses()) == list(range(1, 101))
    assert interrupted.stop()["digest"] == untouched.stop()["digest"] != ""
