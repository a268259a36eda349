"""One training, done in two ways: with Holdfast's `Run`, and as most scripts do it by themselves.

Model, data, optimizer, steps and the interval of checkpoints are the same. WAY says which way; what rank 0
has begun and done is appended to TOLD, a line each, for the benchmark to read.
"""

import json
import os
import time
from pathlib import Path

BORN = time.time() - (
    float(Path("/proc/uptime").read_text().split()[0])
    - int(Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()[19]) / os.sysconf("SC_CLK_TCK")
)
"""When this process was started, before it had imported anything."""

import torch  # noqa: E402 - what is born before includes the import
import torch.distributed as dist  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

from holdfast_trainer.data import TokenDataset  # noqa: E402
from holdfast_trainer.model import GPT  # noqa: E402
from holdfast_trainer.model_config import ModelConfig  # noqa: E402

MODEL = ModelConfig(vocab_size=512, layers=2, heads=2, width=64, context=64)
BATCH = 8
STEPS, EVERY, PACE = (os.environ[name] for name in ("STEPS", "EVERY", "PACE"))
TOLD = Path(os.environ["TOLD"])
DATA = Path("/holdfast/data/text")
SAVED = TOLD.with_suffix(".pt")


def tell(event: str, step: int, **more: float) -> None:
    with TOLD.open("a") as file:
        file.write(json.dumps({"event": event, "step": step, "time": time.time(), **more}) + "\n")


class Training:
    def __init__(self, rank: int, ranks: int) -> None:
        torch.manual_seed(0)
        self.model = GPT(MODEL)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 1e-3)
        self._data = TokenDataset(DATA, "train", context=MODEL.context, vocab_size=MODEL.vocab_size)
        self._place = {"rank": rank, "world_size": ranks, "global_batch": BATCH}

    def step(self, forward: torch.nn.Module, step: int) -> torch.Tensor:
        """The rest stands for a GPU at work: it leaves the cores to others, as that would."""
        time.sleep(float(PACE))
        loss: torch.Tensor = forward(*self._data.batch(seed=0, step=step, **self._place))[1]
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss


def with_holdfast() -> None:
    from holdfast_trainer.run import Run

    run = Run()
    training = Training(run.rank, run.world_size)
    model = run.wrap(training.model)
    run.track(model=model, optimizer=training.optimizer)
    resumed = False
    for step in run.steps(int(STEPS)):
        if run.rank == 0 and not resumed:
            tell("start", step, born=BORN)
            resumed = True
        loss = training.step(model, step)
        run.log(loss=loss)
        training.optimizer.step()
        if run.rank == 0:
            tell("step", step + 1)


def as_usual() -> None:
    """Rank 0 saves every so many steps, and whoever starts goes on from there."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    training = Training(rank, dist.get_world_size())
    model = DistributedDataParallel(training.model)
    first = 0
    if SAVED.exists():
        state = torch.load(SAVED, map_location="cpu")
        training.model.load_state_dict(state["model"])
        training.optimizer.load_state_dict(state["optimizer"])
        first = state["step"]
    if rank == 0:
        tell("start", first, born=BORN)
    for step in range(first, int(STEPS)):
        training.step(model, step)
        training.optimizer.step()
        if rank == 0:
            tell("step", step + 1)
        if (step + 1) % int(EVERY) == 0:
            if rank == 0:
                state = {
                    "model": training.model.state_dict(),
                    "optimizer": training.optimizer.state_dict(),
                    "step": step + 1,
                }
                beside = SAVED.with_suffix(".new")
                torch.save(state, beside)
                beside.replace(SAVED)
            dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    with_holdfast() if os.environ["WAY"] == "holdfast" else as_usual()
