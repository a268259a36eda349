"""Training runs of the tests: a gang of ranks on one run directory, watched, signalled and read.

`RankServer` forks ranks from a process that has torch imported already. A `Gang` is what an engine would
start for an attempt, without torchrun: the ranks' environment is the same, and each rank has a
termination message of its own, as if each were a replica.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpus import of_rank
from processes import Processes
from waiting import DeadlinePassed, wait_until

from holdfast_controller.local.ports import free_port
from holdfast_trainer.contract import RunDir, Termination, read_lines

LOOP = Path(__file__).parent / "trainer" / "loop_script.py"


def holding(loop: str) -> str:
    """An example's text, whose loop waits for its test as loop_script.py does; see Workshop.start."""
    begins = "    for step in run.steps(STEPS):\n"
    waits = """
        while os.path.exists(os.environ.get("HOLD", "")) and step >= int(os.environ["HOLD_AT"]):
            time.sleep(0.005)
"""
    assert begins in loop
    return f"import os, time\n{loop.replace(begins, begins + waits[1:])}"


@dataclass
class History:
    """What the attempts of a run left on disk."""

    run: RunDir

    def ledger(self, attempt: int | None = None) -> list[dict[str, Any]]:
        numbers = self.run.attempt_numbers() if attempt is None else [attempt]
        return [line for number in numbers for line in read_lines(self.run.ledger(number))]

    def events(self, event: str, attempt: int | None = None) -> list[dict[str, Any]]:
        return [line for line in self.ledger(attempt) if line["event"] == event]

    def steps(self, attempt: int | None = None) -> list[dict[str, Any]]:
        """Of every step that each attempt did all that it told, validations left out."""
        found = []
        for number in self.run.attempt_numbers() if attempt is None else [attempt]:
            done: dict[int, dict[str, Any]] = {}
            for line in read_lines(self.run.steps(number)):
                if "val_loss" not in line:
                    done.setdefault(line["step"], {}).update(line)
            found += done.values()
        return found

    def last_step(self, attempt: int | None = None) -> int:
        return max((line["step"] for line in self.steps(attempt)), default=0)

    def stop(self, attempt: int | None = None) -> dict[str, Any]:
        """The newest stop line."""
        return self.events("stop", attempt)[-1]

    def losses(self) -> dict[int, str]:
        """Bits of every step's loss; a step that was done again must have had the same bits before."""
        found: dict[int, str] = {}
        for line in self.steps():
            if "loss_hex" in line:
                again = found.setdefault(line["step"], line["loss_hex"])
                assert again == line["loss_hex"], f"step {line['step']} had another loss when done again"
        return found

    def validations(self) -> dict[int, str]:
        found: dict[int, str] = {}
        for number in self.run.attempt_numbers():
            for line in read_lines(self.run.steps(number)):
                if "val_loss_hex" in line:
                    again = found.setdefault(line["step"], line["val_loss_hex"])
                    assert again == line["val_loss_hex"], f"validation at {line['step']} differs"
        return found


class RankServer:
    """Client of rank_server.py."""

    def __init__(self, processes: Processes) -> None:
        self._server = processes.start(
            [sys.executable, Path(__file__).parent / "rank_server.py"],
            env={"OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self._answer()

    def _answer(self) -> str:
        assert self._server.stdout is not None
        answer = self._server.stdout.readline()
        assert answer, "the rank server ended"
        return answer.strip()

    def _order(self, order: Mapping[str, Any]) -> Any:
        assert self._server.stdin is not None
        self._server.stdin.write(json.dumps(order) + "\n")
        self._server.stdin.flush()
        return json.loads(self._answer())

    def start(self, argv: Sequence[str | Path], env: Mapping[str, str], log: Path) -> Rank:
        pid = self._order({"argv": [str(word) for word in argv], "env": dict(env), "log": str(log)})
        return Rank(self, int(pid), log)

    def poll(self, pid: int) -> int | None:
        code = self._order({"poll": pid})
        return None if code is None else int(code)

    def close(self) -> None:
        assert self._server.stdin is not None
        self._server.stdin.close()
        self._server.wait(300)
        assert self._server.stdout is not None
        self._server.stdout.close()


@dataclass
class Rank:
    """One forked rank."""

    server: RankServer
    pid: int
    log: Path
    code: int | None = None

    def poll(self) -> int | None:
        if self.code is None:
            self.code = self.server.poll(self.pid)
        return self.code

    def signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def wait(self, seconds: float = 300) -> int:
        try:
            wait_until(lambda: self.poll() is not None, "a rank to end", seconds)
        except DeadlinePassed as error:
            raise DeadlinePassed(f"{error}; its log:\n{self.text()}") from None
        return self.code or 0

    def text(self) -> str:
        return self.log.read_text() if self.log.exists() else ""


@dataclass
class Gang:
    """One attempt: its ranks and what they say at their end."""

    ranks: list[Rank]
    terminations: list[Path]
    history: History
    attempt: int = 0
    held: Path | None = None
    """While it is there, the step of `hold_at` waits."""

    def signal(self, number: int, ranks: Sequence[int] | None = None) -> None:
        """And let a step go on that waits for it."""
        for index, rank in enumerate(self.ranks):
            if ranks is None or index in ranks:
                rank.signal(number)
        self.release()

    def release(self) -> None:
        """Let the step go on that waits for the test."""
        if self.held is not None:
            self.held.unlink(missing_ok=True)

    def wait(self, seconds: float = 300) -> list[int]:
        return [rank.wait(seconds) for rank in self.ranks]

    def wait_for_step(self, step: int, seconds: float = 300) -> None:
        """Until this attempt has told of a step from `step` on."""

        def reached() -> bool:
            if self.history.last_step(self.attempt) >= step:
                return True
            for rank in self.ranks:
                code = rank.poll()
                assert code is None, f"a rank ended early ({code}):\n{rank.text()}"
            return False

        wait_until(reached, f"step {step}", seconds)

    def wait_for_checkpoint(self) -> None:
        """Until its run has one, from which a killed attempt is resumed."""
        wait_until(lambda: any(self.history.run.checkpoints.glob("step-*")), "a first checkpoint")

    def wait_for_text(self, text: str, rank: int = 0, seconds: float = 300) -> None:
        wait_until(lambda: text in self.ranks[rank].text(), f"{text!r} in rank {rank}'s log", seconds)

    def termination(self, rank: int = 0) -> Termination:
        text = self.terminations[rank].read_text()
        message = Termination.from_json(text)
        assert message is not None, text
        return message

    def texts(self) -> str:
        return "\n".join(rank.text() for rank in self.ranks)


@dataclass
class Workshop:
    """Starts attempts of one test; every run has a directory of its own."""

    server: RankServer
    path: Path
    numbers: dict[str, int] = field(default_factory=dict)
    started: list[Rank] = field(default_factory=list)

    def history(self, name: str) -> History:
        return History(RunDir(self.path / name))

    def start(
        self,
        name: str = "run",
        *,
        ranks: int = 1,
        attempt: int | None = None,
        env: Mapping[str, str] | None = None,
        script: Path = LOOP,
        run_dir: Path | None = None,
        arguments: Sequence[str] | None = None,
        hold_at: int | None = None,
        **options: Any,
    ) -> Gang:
        """The next attempt of run `name`: the loop with its `options`, or `script` with `arguments`.

        It goes no further than the step `hold_at` before it is sent a signal, or released.
        """
        number = self.numbers.get(name, 0) + 1 if attempt is None else attempt
        self.numbers[name] = number
        place = self.path / f"{name}-{number}"
        place.mkdir()
        run = RunDir(run_dir or self.path / name)
        common = {
            "HOLDFAST_RUN_DIR": str(run.path),
            "HOLDFAST_ATTEMPT": str(number),
            "WORLD_SIZE": str(ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
            **(env or {}),
        }
        held = None if hold_at is None else place / "held"
        if held is not None:
            held.touch()
            common |= {"HOLD": str(held), "HOLD_AT": str(hold_at)}
        started, terminations = [], []
        for rank in range(ranks):
            message = place / f"rank-{rank}.termination"
            own = {"RANK": str(rank), "LOCAL_RANK": "0", "HOLDFAST_TERMINATION_LOG": str(message)}
            own |= of_rank(rank)
            argv = [script, *([json.dumps(options)] if arguments is None else arguments)]
            started.append(self.server.start(argv, common | own, place / f"rank-{rank}.log"))
            terminations.append(message)
        self.started += started
        return Gang(started, terminations, History(run), number, held)

    def finish(self, name: str = "run", **arguments: Any) -> History:
        """Run an attempt to its end, which must be a good one."""
        gang = self.start(name, **arguments)
        codes = gang.wait()
        assert codes == [0] * len(codes), gang.texts()
        assert gang.history.stop(gang.attempt)["outcome"] == "finished", gang.texts()
        return gang.history

    def finish_interrupted(self, *hits: tuple[int, int], **arguments: Any) -> History:
        """An attempt for each (step, signal), which comes soon after that step, and then one to its end."""
        for step, number in hits:
            gang = self.start(**arguments, hold_at=step + 5)
            gang.wait_for_step(step)
            gang.signal(number)
            gang.wait()
        return self.finish(**arguments)

    def end(self) -> None:
        """Kill what still runs."""
        for rank in self.started:
            rank.signal(signal.SIGKILL)
            rank.wait()


KILL, NOTICE = signal.SIGKILL, signal.SIGTERM
