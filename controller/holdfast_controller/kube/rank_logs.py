"""What a rank has said: in its pod's output while there is a pod, then in what was kept of it."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing

from holdfast_controller.cluster import NotFound
from holdfast_controller.jobs import TrainingJob
from holdfast_controller.policy.tails import rank_of

from .connection import Connection
from .last_words import LastWords
from .observation import attempt_observation, first_made
from .pieces import Pieces
from .pod_state import last_output, terminated
from .podlogs import pod_lines
from .reflector import uid_of


class RankLogs:
    """Of all jobs."""

    def __init__(self, connection: Connection, pieces: Pieces, last_words: LastWords):
        self._connection = connection
        self._pieces = pieces
        self._last_words = last_words

    async def lines(
        self, job: TrainingJob, attempt: int, rank: int, *, follow: bool, tail: int | None
    ) -> AsyncIterator[str]:
        """Without their ends; with `follow` until the attempt is over. Raises NotFound.

        Of a replica with several ranks, where a `tail` is followed, it is about so many lines.
        """
        job = job.as_of(attempt)
        if not 0 <= rank < job.spec.world_size:
            raise NotFound(
                f"no rank {rank}: attempt {attempt} of {job.key} has {job.spec.world_size}, numbered from 0"
            )
        try:
            async with aclosing(self._of_pod(job, attempt, rank, follow=follow, tail=tail)) as lines:
                async for line in lines:
                    yield line
        except NotFound:
            kept = await self._kept(job, attempt, rank)
            if kept is None:
                raise NotFound(_without_pod(job, attempt, rank)) from None
            for line in kept if tail is None else kept[max(0, len(kept) - tail) :]:
                yield line

    async def _of_pod(
        self, job: TrainingJob, attempt: int, rank: int, *, follow: bool, tail: int | None
    ) -> AsyncGenerator[str]:
        ranks = job.spec.processes_per_replica
        replica = rank // ranks
        made, _ = first_made(self._pieces.pods_of(job, attempt))
        pod = made.get(replica)
        if pod is None:
            raise NotFound(f"replica {replica} of attempt {attempt} of {job.key} has no pod")

        def over() -> bool:
            pods = self._pieces.pods_of(job, attempt)
            now = next((one for one in pods if uid_of(one) == uid_of(pod)), None)
            if now is None or terminated(now):
                return True
            attempt_object = self._pieces.object_of(job, attempt)
            return attempt_observation(attempt, job.spec.replicas, attempt_object, pods).gone

        asked = tail
        if ranks > 1 and tail is not None:  # the last lines of the pod may all be another rank's
            asked = tail * ranks if follow else None
        last: deque[str] = deque(maxlen=tail)
        lines = pod_lines(self._connection, pod, tail=asked, follow=follow, over=over)
        async with aclosing(lines):
            async for line in lines:
                if not _is_of(rank, ranks, line):
                    continue
                if asked == tail or follow:
                    yield line
                else:
                    last.append(line)
        for line in last:
            yield line

    async def _kept(self, job: TrainingJob, attempt: int, rank: int) -> list[str] | None:
        """Its last lines, where its pod, the attempt's record or a ConfigMap beside it has them; of a pod
        that went before anybody could ask for more, what its kubelet kept."""
        ranks = job.spec.processes_per_replica
        replica = rank // ranks

        def of_rank(lines: list[str]) -> list[str]:
            return [line for line in lines if _is_of(rank, ranks, line)]

        made, _ = first_made(self._pieces.pods_of(job, attempt))
        pod = made.get(replica)
        if pod is not None and (noted := await self._last_words.tail_of(pod)):
            return of_rank(noted)
        record = job.status.record(attempt)
        kept = record.log_tail.get(str(rank)) if record is not None else None
        if kept is not None:
            return kept.split("\n")
        lines = await self._last_words.kept_tail(job, attempt, replica)
        if lines is None and pod is not None and (said := last_output(pod)):
            lines = said.split("\n")
        return None if lines is None else of_rank(lines)


def _without_pod(job: TrainingJob, attempt: int, rank: int) -> str:
    who, record = f"rank {rank} of attempt {attempt} of {job.key}", job.status.record(attempt)
    if record is not None and record.verdict is None and record.started_at is None:
        return f"{who} has no pod yet: {job.status.message or job.status.phase}"
    return f"{who} has no pod; its whole log is in the run directory: attempts/{attempt:04d}/rank-{rank}.log"


def _is_of(rank: int, ranks: int, line: str) -> bool:
    """Whether a line of the output of its replica, which has so many `ranks`, is this rank's."""
    return ranks == 1 or rank_of(line, rank // ranks * ranks) == rank
