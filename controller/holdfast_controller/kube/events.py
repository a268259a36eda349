"""What is told about a job, as core/v1 Events: `kubectl describe` shows them.

An Event's name follows from the job, reason and message, so a repeat finds the one that is there and adds
to its count; a controller that died between writing and noting so tells nothing twice. The server itself
forgets Events, after an hour where it was not told otherwise.
"""

from __future__ import annotations

import hashlib
import socket
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any

from holdfast_controller.cluster import AlreadyExists, Conflict, Event, NotFound
from holdfast_controller.jobs import API_VERSION, KIND, TrainingJob
from holdfast_trainer.contract import legible

from .connection import MERGE_PATCH, Connection, Document
from .errors import NotPermitted
from .reflector import pages

KEPT = 200
COMPONENT = "holdfast-controller"
TRIES = 10
MESSAGE_BYTES = 1024
"""That the API takes at most of a message, in UTF-8."""


def events_path(namespace: str) -> str:
    return f"/api/v1/namespaces/{namespace}/events"


def reference(job: TrainingJob) -> dict[str, str]:
    """For an Event's involvedObject."""
    meta = job.metadata
    return {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "namespace": meta.namespace,
        "name": meta.name,
        "uid": meta.uid,
    }


def event_name(uid: str, job: str, event: Event) -> str:
    digest = hashlib.sha256(f"{uid}\n{event.reason}\n{event.message}".encode()).hexdigest()
    return f"{job}.{digest[:16]}"


class EventLog:
    """Events of TrainingJobs."""

    def __init__(self, connection: Connection):
        self._connection = connection

    async def record(self, about: dict[str, str], event: Event) -> None:
        """Tell it about what `reference` refers to. No error where the namespace is going or gone."""
        path = events_path(about["namespace"])
        name = event_name(about["uid"], about["name"], event)
        try:
            for _ in range(TRIES):
                try:
                    await self._connection.post(path, _document(name, about, event))
                    return
                except AlreadyExists:
                    if await self._repeat(f"{path}/{name}", event):
                        return
        except NotFound:
            return
        except NotPermitted as error:
            if "being terminated" not in str(error):
                raise
        else:
            raise Conflict(f"event {name} was written by others {TRIES} times in a row; try again")

    async def _repeat(self, path: str, event: Event) -> bool:
        try:
            known = await self._connection.get(path)
            count = int(known.get("count") or 1) + event.count
            change = {
                "metadata": {"resourceVersion": known["metadata"]["resourceVersion"]},
                "count": count,
                "lastTimestamp": _second(event.time),
                "series": {"count": count, "lastObservedTime": _micro(event.time)},
            }
            await self._connection.patch(path, change, MERGE_PATCH)
        except (Conflict, NotFound):
            return False
        return True

    async def of(self, namespace: str, uid: str) -> list[Event]:
        """Of the object with this uid, oldest first, the newest 200."""
        return _in_order(await self._listed(namespace, f"involvedObject.uid={uid}"))

    async def of_named(self, namespace: str, kind: str, name: str, since: str) -> list[Event]:
        """Of an object whose uid is not known, as `of`. What was told first before `since` was of another one
        of its name; both times are the apiserver's."""
        told = await self._listed(namespace, f"involvedObject.kind={kind},involvedObject.name={name}")
        begin = datetime.fromisoformat(since)
        return _in_order(
            document
            for document in told
            if datetime.fromisoformat(document["metadata"]["creationTimestamp"]) >= begin
        )

    async def _listed(self, namespace: str, fields: str) -> list[Document]:
        query = {"fieldSelector": fields}
        listed = pages(self._connection, events_path(namespace), query)
        return [document async for page in listed for document in page["items"]]


def _in_order(documents: Iterable[Document]) -> list[Event]:
    return sorted(map(_event, documents), key=lambda event: event.time)[-KEPT:]


def _document(name: str, about: dict[str, str], event: Event) -> Document:
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": name, "namespace": about["namespace"]},
        "involvedObject": about,
        "type": event.type,
        "reason": event.reason,
        "message": event.message.encode()[:MESSAGE_BYTES].decode(errors="ignore"),
        "count": event.count,
        "firstTimestamp": _second(event.time),
        "lastTimestamp": _second(event.time),
        "eventTime": _micro(event.time),
        "action": event.reason,
        "source": {"component": COMPONENT},
        "reportingComponent": COMPONENT,
        "reportingInstance": socket.gethostname(),
    }


def _event(document: dict[str, Any]) -> Event:
    """Whoever may write Events could have them tell something to the terminal of who reads them."""
    times = (
        (document.get("series") or {}).get("lastObservedTime"),
        document.get("eventTime"),
        document.get("lastTimestamp"),
        document["metadata"]["creationTimestamp"],
    )
    return Event(
        datetime.fromisoformat(next(time for time in times if time)),
        document.get("type") or "Normal",
        legible(document.get("reason") or ""),
        legible(document.get("message") or ""),
        int(document.get("count") or 1),
    )


def _second(time: datetime) -> str:
    return time.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _micro(time: datetime) -> str:
    return time.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
