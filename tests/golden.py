"""Compare a text with the one that was reviewed and kept beside the tests.

`GOLDEN=write make test ARGS="-k golden"` writes them anew; the diff is then for a person to read.
"""

from __future__ import annotations

import os
from pathlib import Path


def assert_golden(path: Path, text: str) -> None:
    """`text` is what the file holds, to the letter."""
    if os.environ.get("GOLDEN") == "write":
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    assert path.is_file(), f"{path} is missing: write it with GOLDEN=write and review it"
    assert text == path.read_text(encoding="utf-8")
