"""Ask a running Prometheus what a dashboard shows, as Grafana would."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx

from .panels import Panel

Labels = dict[str, str]


class QueryError(Exception):
    """Prometheus refuses a query, or does not answer; the message has its words."""


@dataclass(frozen=True)
class Series:
    """One result: (seconds since the epoch, value), oldest first."""

    labels: Labels
    points: tuple[tuple[float, float], ...]

    def called(self, legend: str) -> str:
        """The legend with its `{{label}}`s filled in."""
        return re.sub(r"\{\{\s*(\w+)\s*\}\}", lambda found: self.labels.get(found[1], ""), legend)


@dataclass(frozen=True)
class Prometheus:
    """A server and what dashboards' variables are (`$job`, `$namespace`, ...)."""

    client: httpx.Client
    variables: Mapping[str, str] = field(default_factory=dict)

    def filled(self, expression: str) -> str:
        """The expression with its variables replaced. Raises QueryError where one has no value."""

        def value(found: re.Match[str]) -> str:
            if found[1] not in self.variables:
                raise QueryError(
                    f"the query needs ${found[1]}: give it with --var {found[1]}=...: {expression}"
                )
            return self.variables[found[1]]

        # $1 is a group of label_replace.
        return re.sub(r"\$([A-Za-z_]\w*)", value, expression)

    def now(self, expression: str) -> list[Series]:
        """The value at this moment, by labels."""
        data = self._ask("query", query=self.filled(expression))
        if data["resultType"] == "scalar":
            return [Series({}, (_point(data["result"]),))]
        return [Series(one["metric"], (_point(one["value"]),)) for one in data["result"]]

    def over(self, expression: str, begin: float, end: float, step: float) -> list[Series]:
        """Values between two moments, every `step` seconds."""
        query = self.filled(expression)
        data = self._ask("query_range", query=query, start=f"{begin:.3f}", end=f"{end:.3f}", step=f"{step:g}")
        return [Series(one["metric"], tuple(map(_point, one["values"]))) for one in data["result"]]

    def rules(self) -> list[dict[str, Any]]:
        """The rules that are loaded, with their health."""
        found = self._ask("rules")["groups"]
        return [rule for group in found for rule in group["rules"]]

    def _ask(self, what: str, **parameters: str) -> Any:
        try:
            answer = (
                self.client.post(f"/api/v1/{what}", data=parameters)
                if parameters
                else self.client.get(f"/api/v1/{what}")
            )
            body = answer.json()
        except (httpx.HTTPError, ValueError) as error:
            raise QueryError(f"{self.client.base_url} does not answer as a Prometheus: {error}") from error
        if body.get("status") != "success":
            raise QueryError(f"{body.get('error', answer.text)}: {parameters.get('query', what)}")
        return body["data"]


def _point(pair: list[Any]) -> tuple[float, float]:
    return float(pair[0]), float(pair[1])


def targets(dashboard: Panel) -> Iterator[tuple[str, str, str]]:
    """(panel, legend, PromQL) of all that a dashboard asks, its marks and choices too."""
    for panel in dashboard["panels"]:
        for target in panel["targets"]:
            yield panel["title"], target["legendFormat"], target["expr"]
    for mark in dashboard["annotations"]["list"]:
        yield "marks", mark["name"], mark["expr"]
    for variable in dashboard["templating"]["list"]:
        if variable["type"] == "query":
            yield "choices", variable["name"], choice_query(variable)


def choice_query(variable: Panel) -> str:
    """The PromQL within a variable's `query_result(...)`."""
    found: str = variable["query"]["query"]
    return found.removeprefix("query_result(").removesuffix(")")
