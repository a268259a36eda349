"""In the place of runc, on a node whose pods live at another time: `late_runc.py RUNC LIBRARY SECONDS ...`.

What runc is asked to make has LIBRARY (wall_clock.c) loaded before all else, and sees the time of day so many
seconds ahead (negative: behind). Programs that do not ask libc for the time (those written in Go) know the
machine's.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

INSIDE = "/opt/libwallclock.so"


def changed(config: dict, library: str, seconds: int) -> dict:
    """A container's configuration (OCI runtime specification) with the library in it."""
    environment = {"LD_PRELOAD": INSIDE, "WALL_CLOCK_AHEAD": str(seconds)}
    process = config["process"]
    process["env"] = [*process.get("env", []), *(f"{name}={value}" for name, value in environment.items())]
    mount = {"destination": INSIDE, "type": "bind", "source": library, "options": ["bind", "ro"]}
    config["mounts"] = [*config.get("mounts", []), mount]
    return config


def main(runc: str, library: str, seconds: str, *arguments: str) -> None:
    if "create" in arguments:
        path = Path(arguments[arguments.index("--bundle") + 1], "config.json")
        path.write_text(json.dumps(changed(json.loads(path.read_text()), library, int(seconds))))
    os.execv(runc, [runc, *arguments])


if __name__ == "__main__":
    main(*sys.argv[1:])
