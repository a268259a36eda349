"""`make verify` shows every failure, not only the first, and generated files cannot go stale unseen."""

from __future__ import annotations

from pathlib import Path

import pytest
from scripts.generate import GENERATORS, ROOT, stale, write
from scripts.verify import Check, checks, verify


def test_every_failure_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    failed = verify(
        [
            Check("first", ("python", "-c", "print('one went wrong'); raise SystemExit(1)")),
            Check("second", ("python", "-c", "pass")),
            Check("third", ("python", "-c", "raise SystemExit('three went wrong')")),
            Check("fourth", ("no-such-tool",)),
        ]
    )
    output = capsys.readouterr().out
    assert failed == 3
    assert "FAILED  first" in output
    assert "ok  second" in output
    assert "one went wrong" in output
    assert "three went wrong" in output
    assert "no-such-tool does not start: No such file or directory; run `make install`" in output
    assert output.endswith("1 of 4 checks passed\n")


def test_a_check_that_cannot_be_made_is_said_and_not_counted_as_passed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    wanted = [
        Check("first", ("python", "-c", "pass")),
        Check("chart", ("None", "lint"), "no helm yet; `make test` builds it as root"),
    ]
    assert verify(wanted) == 0
    output = capsys.readouterr().out
    assert "  none  chart: no helm yet; `make test` builds it as root\n" in output
    assert output.endswith("1 of 1 checks passed, 1 not made\n")


def test_every_dockerfile_is_checked() -> None:
    words = [word for check in checks() for word in check.command]
    assert {str(path.relative_to(ROOT)) for path in ROOT.glob("docker/*.Dockerfile")} <= set(words)


def test_a_stale_file_is_shown_with_its_difference(tmp_path: Path) -> None:
    generators = {"docs/a.txt": lambda: "one\ntwo\n"}
    assert "docs/a.txt is stale: run `make generate`" in stale(tmp_path, generators)[0]
    write(tmp_path, generators)
    assert stale(tmp_path, generators) == []
    (tmp_path / "docs" / "a.txt").write_text("one\n2\n")
    assert "-2\n+two" in stale(tmp_path, generators)[0]


@pytest.mark.parametrize("name", GENERATORS)
def test_a_generator_makes_the_same_text_twice(name: str) -> None:
    assert GENERATORS[name]() == GENERATORS[name]()
