"""Whatever a job's own program says of itself, its status can be written: NaN, numbers without end, the wrong
type. A status that cannot be written holds the job where it is, for ever."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scene import Scene, make, play, telling

from holdfast_controller.api.ledger import account
from holdfast_controller.cluster import AttemptObservation, ReplicaObservation
from holdfast_controller.jobs import AttemptRecord, Status
from holdfast_controller.kube.resource import status_document
from holdfast_controller.policy.books import Books
from holdfast_controller.policy.classify import classify
from holdfast_trainer.contract import Progress, Termination, parse_lines

NOW = datetime(2026, 1, 1, tzinfo=UTC)

ODD = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | st.sampled_from([0, 1, 7, 1e308, 1.7e9, "finished", "checkpoint", "attempt_start", "stop", "\ud800"])
    | st.text(st.characters(), max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=4,
)
COUNTS = ["attempt", "step", "world_size", "resumed_step", "durable_step", "time", "seconds"]
TEXTS = ["event", "outcome", "digest", "differences", "skipped", "startup"]
LINE_KEYS = st.sampled_from([*COUNTS, *TEXTS, "useful_seconds", "loss", "val_loss"])
PROGRESS_KEYS = st.sampled_from([name for name in Progress.__dataclass_fields__ if name != "quiet_limit"])


def lines(**always: st.SearchStrategy[Any]) -> st.SearchStrategy[str]:
    return st.lists(
        st.builds(dict.__or__, st.dictionaries(LINE_KEYS, ODD, max_size=6), st.fixed_dictionaries(always)),
        max_size=4,
    ).map(lambda bodies: "\n".join(json.dumps(body) for body in bodies))


@given(
    ledger=lines(attempt=st.just(1), event=st.sampled_from(["attempt_start", "checkpoint", "stop"])),
    steps=lines(attempt=st.just(1)),
    served=st.dictionaries(PROGRESS_KEYS, ODD, max_size=5),
    last=st.dictionaries(st.sampled_from(["outcome", "step", "durable_step", "error", "progress"]), ODD),
)
def test_the_status_of_a_job_that_says_anything_is_json_and_what_a_status_is(
    ledger: str, steps: str, served: dict[str, Any], last: dict[str, Any]
) -> None:
    known = Progress(1, 3, 10, 2, "training", updated=NOW.timestamp())
    try:
        told = Progress.from_json(json.dumps({**json.loads(known.to_json()), **served}))
    except ValueError:
        told = known
    termination = Termination.from_json(
        json.dumps({"outcome": "failed", "step": 3, "durable_step": 2, "progress": served, **last})
    )
    observation = AttemptObservation(
        1,
        exists=True,
        gone=True,
        replicas=(ReplicaObservation(0, state="failed", exit_code=1, termination=termination),),
        started_at=NOW,
        progress=told,
    )
    status = Status(attempt=1, attempts=[AttemptRecord(number=1, opened_at=NOW)])
    books, record = Books(status, NOW), status.attempts[0]
    books.take_progress(record, observation, parse_lines(ledger))
    books.close(record, classify(observation), observation, parse_lines(ledger), parse_lines(steps))

    written = json.dumps(status_document(status), allow_nan=False)
    written.encode()
    body = {key: value for key, value in json.loads(written).items() if key != "columns"}
    assert Status.model_validate(body, strict=False).attempts[0].verdict is record.verdict

    job = make().model_copy(update={"status": status})
    shown = account(job, parse_lines(ledger), parse_lines(steps), NOW)
    json.dumps(shown.model_dump(mode="json"), allow_nan=False)


@pytest.mark.parametrize(
    "text",
    [
        '{"outcome": "failed", "step": 1e999, "durable_step": 0}',
        '{"outcome": "failed", "step": true, "durable_step": 0}',
        '{"outcome": "failed", "step": -1, "durable_step": 0}',
        "[" * 100_000,
    ],
)
def test_what_is_no_last_word_counts_for_none(text: str) -> None:
    assert Termination.from_json(text) is None


def test_lines_nested_without_end_are_left_out() -> None:
    assert parse_lines("[" * 100_000 + '\n{"step": 1, "loss": NaN}\n') == [{"step": 1, "loss": None}]


@pytest.mark.parametrize("deep", ["[" * 300 + "]" * 300, '{"a":' * 300 + "1" + "}" * 300])
def test_lines_that_can_be_read_but_not_be_written_again_are_left_out_too(deep: str) -> None:
    """REST answered 500; and where 985 levels could be read just so, what keeps a ledger beside its
    attempt could not write it, and ended every controller."""
    at_most = "[" * 99 + "]" * 99
    lines = parse_lines(f'{{"step": 1, "x": {deep}}}\n{{"step": 2, "x": {at_most}}}\n')
    assert [line["step"] for line in lines] == [2]
    assert json.loads(at_most) == lines[0]["x"]


def test_a_training_whose_validation_overflows_is_carried_to_its_end() -> None:
    """As fp16 can have it; the training's own loss is a number all the while."""

    async def story(scene: Scene) -> None:
        engine = telling(scene)
        await scene.submit(make(replicas=1))
        served = Progress(1, 5, 10, 4, "training", loss=2.5, val_loss=float("nan"), updated=scene.seconds())
        engine.progress = Progress.from_json(served.to_json())
        job = await scene.look()
        assert job.status.progress is not None
        assert (job.status.progress.loss, job.status.progress.val_loss) == (2.5, None)
        json.dumps(status_document(job.status), allow_nan=False)

    play(story)


@pytest.mark.parametrize(
    "error",
    [
        "\x1b[1;31mno ink\x1b[0m", "no\x1b]0;named\x07 ink\n\x1b[0m", "\x1b[2J\x1bcno ink\n\x1b[",
        "\x9b2J\x9d0;named\x9cno ink", "all is well\nno\x00 ink\x08\x7f\x85",
    ],
)  # fmt: skip
def test_what_an_error_tells_its_terminal_is_no_reason(error: str) -> None:
    """Of one with colours the reason was the code that ends them: nothing to read, wherever it was shown."""
    word = Termination.from_json(Termination("failed", 3, 2, error).to_json())
    replica = ReplicaObservation(0, state="failed", exit_code=1, termination=word)
    seen = AttemptObservation(1, exists=True, gone=True, replicas=(replica,))
    assert classify(seen).reason == "replica 0: no ink"
