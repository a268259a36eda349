"""bench/images: what it concludes from builds, and what it refuses to conclude."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from bench import images
from bench.images import TORCH, Subject, conclude, refuse_small_disk, torch_again, with_dependency
from bench.report import Report, ReportError
from tests.cluster.machine import Machine
from tests.cluster.site import site

STAGES = {"cold": 100.0, "source edit": 0.5, "new dependency": 4.0}


def measured(
    report: Report, kind: str, *, one_layer: bool, times: float = 1.0, came_in: float = 9.0
) -> Subject:
    """A subject whose builds took STAGES, `times` as long; `came_in` MiB with each new dependency."""
    subject = Subject(kind, one_layer, report, Machine(site("bench"), 0), Path("/nowhere"))
    for stage, seconds in STAGES.items():
        report.add(subject.name, stage, "s", seconds * times)
    report.add(subject.name, "new dependency, downloaded", "MiB", came_in)
    report.add(subject.name, "image", "MiB", 5600)
    subject.torch_downloads = {"cold": [507.1], "new dependency": []}
    return subject


def test_uvs_words_are_found_in_buildkits_log() -> None:
    log = (
        "#20 3.1 Downloading torch (507.1MiB)\n#20 3.2 Downloading torchvision (7.1MiB)\n"
        "#20 3.3 Downloading nvidia-cudnn-cu13 (340.2MiB)\n#20 9.0  Downloaded torch\n"
    )
    assert TORCH.findall(log) == [("507.1", "M")]


def test_each_ratio_is_of_the_same_stage_of_both_images() -> None:
    report = Report("images")
    ours = measured(report, "trainer", one_layer=False)
    report.add("trainer, COMPILER=1", "image", "MiB", 5867)
    conclude(report, ours, measured(report, "trainer", one_layer=True, times=300.0))
    conclude(
        report,
        measured(report, "controller", one_layer=False),
        measured(report, "controller", one_layer=True, times=40.0),
    )
    assert report.ratios["source_edit_speedup_vs_naive"] == pytest.approx(300)
    assert report.ratios["source_edit_seconds"] == 0.5
    assert report.ratios["dependency_change_redownloads_torch"] == 0
    assert report.ratios["compiler_mib"] == 267
    assert report.ratios["controller_source_edit_speedup_vs_naive"] == pytest.approx(40)
    assert report.ratios["controller_image_mib"] == 5600


def test_a_second_download_of_pytorch_is_counted() -> None:
    report = Report("images")
    subject = measured(report, "trainer", one_layer=False, came_in=2950.0)
    subject.torch_downloads["new dependency"] = [507.1]
    assert torch_again(report, subject) == 1


def test_a_log_that_would_not_have_told_proves_nothing() -> None:
    report = Report("images")
    subject = measured(report, "trainer", one_layer=False)
    subject.torch_downloads["cold"] = []
    with pytest.raises(ReportError, match=r"cold build tells of 0 downloads of PyTorch.*see TORCH in bench"):
        torch_again(report, subject)


def test_bytes_that_the_log_does_not_explain_are_no_zero() -> None:
    report = Report("images")
    subject = measured(report, "trainer", one_layer=False, came_in=2950.0)
    with pytest.raises(ReportError, match=r"tells of 0 downloads of PyTorch \(507 MiB\).*2950 MiB came in"):
        torch_again(report, subject)


@pytest.mark.parametrize("kind", ["trainer", "controller"])
def test_a_dependency_is_added_to_the_extra_that_the_image_installs(kind: str) -> None:
    extras = tomllib.loads(with_dependency(kind, "einops==0.8.0"))["project"]["optional-dependencies"]
    assert [name for name, wanted in extras.items() if "einops==0.8.0" in wanted] == [kind]


def test_an_extra_that_is_not_there_is_named() -> None:
    with pytest.raises(ReportError, match=r"no extra 'driver' to which einops==0\.8\.0 could be added"):
        with_dependency("driver", "einops==0.8.0")


def test_a_small_disk_is_refused_before_anything_is_built(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOLDFAST_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(images, "FREE_GIB", 1 << 30)
    with pytest.raises(ReportError, match=r"GiB free and .* are needed: .*let HOLDFAST_CACHE name"):
        refuse_small_disk()
