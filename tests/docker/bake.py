"""What docker/docker-bake.hcl describes, as buildx itself reads it: no daemon is needed for that."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.cluster.build import program

ROOT = Path(__file__).parents[2]


def bake(home: Path, *targets: str, given: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Target's name to what bake would build of it, for `targets` (none: the default group).

    `given` are the variables that a user sets; `home` is where buildx may keep its settings.
    """
    done = subprocess.run(
        [str(program("buildx")), "bake", "--file=docker/docker-bake.hcl", "--print", *targets],
        cwd=ROOT,
        env={"PATH": os.environ["PATH"], "HOME": str(home), **(given or {})},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    described: dict[str, Any] = json.loads(done.stdout)["target"]
    return described
