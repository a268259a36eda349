"""Draw the dashboards from a live Prometheus, without a Grafana.

render_dashboards.py --prometheus http://127.0.0.1:9090 --var namespace=default --var job=gpt
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import httpx

ROOT = Path(__file__).parents[1]


def rate_window(interval: float, seconds: float) -> str:
    """Of a rate on a graph that goes back so far: as Grafana's, no shorter than four scrapes, for a rate
    wants two samples."""
    return f"{max(4 * interval, seconds / 60):.0f}s"


def main(arguments: Sequence[str] | None = None) -> int:
    from scripts.monitoring import DASHBOARDS
    from scripts.monitoring.live import Prometheus, QueryError
    from scripts.monitoring.pictures import draw

    parser = argparse.ArgumentParser(description="Draw the dashboards from a live Prometheus.")
    parser.add_argument("--prometheus", default="http://127.0.0.1:9090", help="where it answers")
    parser.add_argument(
        "--var", action="append", default=[], metavar="NAME=VALUE", help="$NAME, e.g. job=gpt"
    )
    parser.add_argument("--minutes", type=float, default=15.0, help="how far back (%(default)g)")
    parser.add_argument(
        "--interval", type=float, default=15.0, help="seconds between two scrapes (%(default)g)"
    )
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "dashboards")
    parser.add_argument("--only", choices=sorted(DASHBOARDS), action="append", help="by default all")
    given = parser.parse_args(arguments)
    if bad := [one for one in given.var if not one.partition("=")[2]]:
        parser.error(f"--var {bad[0]}: give NAME=VALUE, such as --var job=gpt")
    seconds = 60 * given.minutes
    variables = {
        "__rate_interval": rate_window(given.interval, seconds),
        "__range": f"{seconds:.0f}s",
        "price": "1",
        **dict(one.split("=", 1) for one in given.var),
    }
    given.out.mkdir(parents=True, exist_ok=True)
    with httpx.Client(base_url=given.prometheus, timeout=60) as client:
        prometheus = Prometheus(client, variables)
        end = time.time()
        for name in given.only or DASHBOARDS:
            path = given.out / f"dashboard-{name}.png"
            try:
                draw(DASHBOARDS[name](), prometheus, end - seconds, end, path)
            except QueryError as error:
                print(f"{name}: {error}", file=sys.stderr)
                return 1
            print(f"wrote {path}")
    return 0


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))  # run as a file, it finds its neighbours by scripts.*
    sys.exit(main())
