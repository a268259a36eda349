"""Which jobs a list or a watch shows."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast_controller.api.selection import Selection, WatchFilter, page, parse_selector
from holdfast_controller.cluster import Change, Invalid
from holdfast_controller.jobs import Metadata, Phase, Spec, Status, TrainingJob

START = datetime(2026, 1, 1, tzinfo=UTC)


def job(number: int, *, phase: Phase = Phase.QUEUED, labels: dict[str, str] | None = None) -> TrainingJob:
    return TrainingJob(
        metadata=Metadata(
            name=f"j{number}",
            uid=f"uid-{number}",
            creation_timestamp=START + timedelta(seconds=number // 3),
            labels=labels or {},
        ),
        spec=Spec(command=["x"]),
        status=Status(phase=phase),
    )


@pytest.mark.parametrize(
    ("selector", "labels", "selected"),
    [
        ("", {}, True),
        ("a=b", {"a": "b"}, True),
        ("a==b", {"a": "b"}, True),
        ("a=b", {"a": "c"}, False),
        ("a=b", {}, False),
        ("a!=b", {"a": "c"}, True),
        ("a!=b", {}, True),
        ("a!=b", {"a": "b"}, False),
        ("a", {"a": ""}, True),
        ("a", {}, False),
        ("!a", {}, True),
        ("!a", {"a": "x"}, False),
        ("a=b, team.org/x=y", {"a": "b", "team.org/x": "y"}, True),
        ("a=b,c=d", {"a": "b"}, False),
    ],
)
def test_a_selector_means_what_kubernetes_means(
    selector: str, labels: dict[str, str], selected: bool
) -> None:
    assert Selection(labels=parse_selector(selector)).holds(job(1, labels=labels)) is selected


@pytest.mark.parametrize("text", ["a=b=c", "=b", "!a=b", "a in (b)", "a b", ",", " ", "a=b,", "a=b, ,c"])
def test_a_faulty_selector_is_named(text: str) -> None:
    with pytest.raises(Invalid, match="is none of: key=value, key!=value, key, !key"):
        parse_selector(text)


@given(st.sets(st.integers(0, 60), max_size=30), st.integers(1, 7), st.data())
def test_pages_show_every_job_that_stays_exactly_once(
    numbers: set[int], limit: int, data: st.DataObject
) -> None:
    """While somebody pages, other jobs come and go."""
    there = set(numbers)
    staying = set(data.draw(st.sets(st.sampled_from(sorted(numbers))))) if numbers else set()
    arriving = list(range(100, 105))
    seen: list[str] = []
    token = ""
    while True:
        found = page([job(number) for number in there], limit, token)
        seen += [item.metadata.name for item in found.items]
        token = found.next_token
        if not token:
            break
        assert len(found.items) == limit
        gone = data.draw(st.sets(st.sampled_from(sorted(there)), max_size=2)) if there else set()
        there -= gone - staying
        if arriving:
            there.add(arriving.pop())
    assert len(seen) == len(set(seen))
    assert {f"j{number}" for number in staying} <= set(seen)


def test_a_foreign_token_is_refused() -> None:
    for token in ("rubbish", "!!!", "MjAyNi0wMS0wMSB4"):
        with pytest.raises(Invalid, match="is no token of a list; start again without it"):
            page([], 10, token)


def test_a_watcher_always_holds_exactly_the_selected_jobs() -> None:
    """A job that leaves the selection is DELETED to the watcher, and ADDED when it is back."""
    watched = WatchFilter(Selection(phases=frozenset({Phase.RUNNING})))
    told = [
        watched.apply(Change(kind, job(1, phase=phase)))
        for kind, phase in (
            ("ADDED", Phase.QUEUED),
            ("MODIFIED", Phase.RUNNING),
            ("MODIFIED", Phase.RUNNING),
            ("MODIFIED", Phase.RECOVERING),
            ("MODIFIED", Phase.RECOVERING),
            ("MODIFIED", Phase.RUNNING),
            ("DELETED", Phase.RUNNING),
            ("DELETED", Phase.RUNNING),
        )
    ]
    kinds = [change and change.type for change in told]
    assert kinds == [None, "ADDED", "MODIFIED", "DELETED", None, "ADDED", "DELETED", None]
