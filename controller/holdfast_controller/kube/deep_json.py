"""JSON of the apiserver's, however deep a user has nested what is his to write.

It takes thousands of levels in a job's `config`, and Python's parser ends at a thousand: a list or a watch in
which there is one such job would be no list of any. So what lies too deep is left out, and the job that has
it is told that it is nested too deeply (spec.py), for more levels than it may have are left.
"""

from __future__ import annotations

import json
import re
from typing import Any

DEEPEST = 200
"""Levels that are read where not all can be."""

_TOKEN = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"|[{}\[\]]', re.DOTALL)


def parsed(text: bytes) -> Any:
    """Raises ValueError."""
    try:
        return json.loads(text)
    except RecursionError:
        return json.loads(_shallow(text))


def _shallow(text: bytes) -> bytes:
    """With null for what lies too deep."""
    kept, depth, start = [], 0, 0
    for token in _TOKEN.finditer(text):
        sign = token[0]
        if sign in (b"{", b"["):
            depth += 1
            if depth == DEEPEST + 1:
                kept += [text[start : token.start()], b"null"]
        elif sign in (b"}", b"]"):
            if depth == DEEPEST + 1:
                start = token.end()
            depth -= 1
    return b"".join([*kept, text[start:]])
