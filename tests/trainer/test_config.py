"""A user writes a configuration; what is wrong with it is said at once, with place and remedy."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import pytest

from holdfast_trainer.check_command import main as check
from holdfast_trainer.checkpoint import Cadence
from holdfast_trainer.config import Config, ConfigError, check_world, from_mapping, load
from holdfast_trainer.contract import EXIT_CONFIG_ERROR
from holdfast_trainer.hf_command import main as export_hf
from holdfast_trainer.place import run_directory
from holdfast_trainer.prepare.command import build_parser
from holdfast_trainer.schema import Range, read_yaml
from holdfast_trainer.tune.command import main as tune

GOOD = """\
model: {vocab_size: 4096, layers: 2, heads: 2, width: 64, context: 32}
data:
  path: build/data
train:
  steps: 100
  global_batch: 12
optim:
  learning_rate: 6e-4
  warmup_steps: 10
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "train.yaml"
    path.write_text(GOOD)
    return path


def read(path: Path, *overrides: str, **environ: str) -> Config:
    return load(path, overrides, environ=environ)


def test_a_good_file_becomes_typed_sections_with_defaults(file: Path) -> None:
    config = read(file)
    assert config.data.path == Path("build/data")
    assert config.optim.learning_rate == 6e-4  # PyYAML alone would read the text "6e-4"
    assert config.optim.final_learning_rate == pytest.approx(6e-5)
    assert (config.train.seed, config.train.micro_batch, config.train.precision) == (1337, None, "auto")
    assert (config.validation.every, config.checkpoint.every, config.checkpoint.keep) == (0, "auto", 3)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.train.steps = 5  # type: ignore[misc]


def test_overrides_win_over_the_file_and_the_environment_wins_over_both(file: Path) -> None:
    overrides = ("train.steps=200", "optim.learning_rate=1e-3", "checkpoint.every=500", "train.compile=true")
    config = read(file, *overrides, HOLDFAST_CHECKPOINT_EVERY="90s", HOLDFAST_CHECKPOINT_KEEP="7")
    assert (config.train.steps, config.optim.learning_rate, config.train.compile) == (200, 1e-3, True)
    assert (config.checkpoint.every, config.checkpoint.keep) == ("90s", 7)
    cadence = Cadence.parse(config.checkpoint.every)
    assert (cadence.seconds, cadence.steps) == (90.0, None)
    steps = read(file, "checkpoint.every=500", HOLDFAST_CHECKPOINT_EVERY="").checkpoint
    cadence = Cadence.parse(steps.every)
    assert (cadence.seconds, cadence.steps) == (None, 500)


def test_an_override_changes_the_section_it_names_alone(file: Path) -> None:
    file.write_text(GOOD + "validation: &often {every: 100}\ncheckpoint: *often\n")
    config = read(file, "checkpoint.every=25")
    assert (config.validation.every, config.checkpoint.every) == (100, 25)


def test_without_a_file_the_overrides_are_the_whole_configuration() -> None:
    pairs = ["vocab_size=300", "layers=1", "heads=1", "width=8", "context=4"]
    config = load(
        None, [*(f"model.{p}" for p in pairs), "data.path=d", "train.steps=1", "train.global_batch=1"]
    )
    assert config.model.width == 8


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("train.stepz=5", "override 'train.stepz=5': train.stepz: unknown key; did you mean 'steps'?"),
        ("trian.steps=5", "override 'trian.steps=5': trian: unknown key; did you mean 'train'?"),
        (
            "data.stream.sources=[a.txt]",
            "override 'data.stream.sources=[a.txt]': data.stream.tokenizer: required, but missing",
        ),
        ("train.zzz=5", "train.zzz: unknown key; known: activation_checkpointing, compile, deter"),
        ("train.steps=ten", "train.steps: expected an integer, found the text 'ten'"),
        ("train.steps=true", "train.steps: expected an integer, found the boolean True"),
        ("train.steps=2.5", "train.steps: expected an integer, found the number 2.5"),
        ("train.steps=0", "train.steps: must be at least 1, found the integer 0"),
        (
            "train.seed=18446744073709551616",
            "train.seed: must be at most 18446744073709551615, found the integer",
        ),
        ("train.steps=", "train.steps: expected an integer, found nothing (null)"),
        ("train.micro_batch=x", "train.micro_batch: expected an integer, found the text 'x'"),
        (
            "train.micro_batch=5",
            "train.micro_batch: 5 does not divide train.global_batch 12; the nearest that ",
        ),
        ("train.precision=bf61", "'bf61' is not one of auto, fp32, bf16, fp16; did you mean 'bf16'?"),
        ("train.compile=fast", "train.compile: expected true or false or default, reduce-overhead"),
        ("model.heads=3", "model.heads: 3 does not divide width 64; the nearest that does is 2"),
        ("model.dropout=1", "model.dropout: must be below 1, found the integer 1"),
        ("data.path=12", "data.path: expected a path, found the integer 12"),
        ("data=12", "data: expected a mapping of DataConfig keys, found the integer 12"),
        ("data.path.x=12", "path is a value, not a section with keys"),
        ("optim.learning_rate=.inf", "optim.learning_rate: must be a finite number, found the number inf"),
        ("optim.clip=" + "9" * 400, "optim.clip: must be a finite number, found the integer 99999"),
        ("train.global_batch=" + "9" * 400, "train.global_batch: must have at most 128 bits, found the inte"),
        ("train.steps=1:30", "train.steps: expected an integer, found the text '1:30'"),
        ("train.seed=0042", "'0042' has zeros before it, as octal numbers have; write 42"),
        ("optim.learning_rate=0", "optim.learning_rate: must be above 0, found the integer 0"),
        ("optim.min_learning_rate=1", "optim.min_learning_rate: 1 is above learning_rate 0.0006"),
        ("optim.warmup_steps=100", "optim.warmup_steps: 100 is not below train.steps 100"),
        (
            "checkpoint.every=often",
            "checkpoint.every: 'often' is none of: auto, a number of steps (500), seconds",
        ),
        ("checkpoint.every=0", "checkpoint.every: 0 is none of: auto"),
        (f"train.global_batch={10**16}", "train.global_batch: must be at most 1073741824, found the integer"),
        ("checkpoint.every=" + "9" * 400 + "s", "checkpoint.every: '9999"),
        ("train.steps", "override 'train.steps': expected section.key=value, such as train.steps=200"),
        ("train.steps=[1", "'[1' is not a YAML value: line 1"),
    ],
)
def test_what_is_wrong_is_named_with_its_remedy(file: Path, change: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read(file, change)
    assert message in str(caught.value)


def test_what_a_key_takes_is_listed_once(file: Path) -> None:
    with pytest.raises(ConfigError, match=r"'fp8' is not one of auto, fp32, bf16, fp16$"):
        read(file, "train.precision=fp8")


def test_the_environment_is_named_when_it_is_wrong(file: Path) -> None:
    with pytest.raises(ConfigError, match=r"environment HOLDFAST_CHECKPOINT_KEEP=none: checkpoint\.keep"):
        read(file, HOLDFAST_CHECKPOINT_KEEP="none")


def test_all_faults_of_a_file_are_told_at_once_each_with_its_line(file: Path) -> None:
    file.write_text(
        GOOD.replace("  steps: 100\n", "  stepz: 100\n").replace("vocab_size: 4096", "vocab_size: big")
    )
    with pytest.raises(ConfigError) as caught:
        read(file)
    assert caught.value.errors == (
        f"{file} line 1: model.vocab_size: expected an integer, found the text 'big'",
        f"{file} line 5: train.stepz: unknown key; did you mean 'steps'?",
        f"{file} line 4: train.steps: required, but missing (expected an integer)",
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("train: [1\n", "not valid YAML: line 2"),
        ("seed: 1\n---\nseed: 2\n", "line 3, column 1: a second document begins here, where one is expected"),
        ("- 1\n", "expected a mapping of sections, found a list of 1"),
        ("a: 1\na: 2\n", "line 2: a: written twice; the first is at"),
        ("a:\n- b: 1\n- c: [{d: 1},\n  {d: 2, d: 3}]\n", "line 4: a[1].c[1].d: written twice; the first is"),
        (
            "",
            "model: required, but missing (expected a mapping with at least vocab_size, layers, heads, "
            "width, context)",
        ),
        ("a: !!python/object:os.system {}\n", "not valid YAML: line 1"),
        (
            "a: 1\nb: 2026-02-30\n",
            "line 2, column 4: '2026-02-30' cannot be read as timestamp; write it in quo",
        ),
        (
            "kind: TrainingJob\nspec: {config: {}}\n",
            "is a TrainingJob, for `holdfast submit`; what is wanted",
        ),
        (f"a: {'9' * 5000}\n", "line 1, column 4: '999999999"),
        (f"a: {'[' * 10_000}{']' * 10_000}\n", "train.yaml: nested too deeply, or within itself by an alias"),
        ("a: &a {b: *a}\n", "train.yaml: nested too deeply, or within itself by an alias (`*name`)"),
        ("a: &a [*a]\n", "train.yaml: nested too deeply, or within itself by an alias (`*name`)"),
    ],
)
def test_a_file_that_is_no_configuration(file: Path, text: str, message: str) -> None:
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read(file)
    assert message in str(caught.value)


def test_keys_that_read_the_same_in_two_mappings_are_two(file: Path) -> None:
    file.write_text("a.b: 1\na: {b: 2, '': {'': 3}, .: 4}\n")
    assert read_yaml(file)[0] == {"a.b": 1, "a": {"b": 2, "": {"": 3}, ".": 4}}


@pytest.mark.parametrize(
    "form", ["[{0}, {0}, {0}]", "{{a: {0}, b: {0}, c: [{0}]}}"], ids=["lists", "mappings"]
)
def test_aliases_of_aliases_take_no_longer_than_they_are_written(file: Path, form: str) -> None:
    lines = (f"x{n}: &x{n} {form.format(f'*x{n - 1}')}" for n in range(1, 40))
    file.write_text("\n".join(["x0: &x0 [{ha: 1}]", *lines]))
    assert len(read_yaml(file)[0]) == 40


@pytest.mark.parametrize("around", ["{}---\n", "---\n{}...\n---\n# the end\n", "# begins\n---\n---\n{}"])
def test_a_configuration_may_stand_between_empty_documents(file: Path, around: str) -> None:
    alone = read(file)
    file.write_text(around.format(GOOD))
    assert read(file) == alone


def test_a_word_of_the_command_line_that_is_no_value(file: Path) -> None:
    with pytest.raises(ConfigError, match=r"^'9{70,80} is not a YAML value: .* cannot be read as int"):
        read(file, f"train.steps={'9' * 5000}")
    twice = r"^'{seed: 1, seed: 2}' line 1: seed: written twice; the first is at '{seed: 1, seed: 2}' line 1"
    with pytest.raises(ConfigError, match=twice):
        read(file, "train={seed: 1, seed: 2}")
    for value in ("[" * 10_000, "{a: &a {b: *a}}"):
        with pytest.raises(ConfigError, match=r"^'.{0,80}: nested too deeply, or within itself by an alias"):
            read(file, f"train={value}")


def test_a_file_that_can_not_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent\.yaml: no such configuration file"):
        read(tmp_path / "absent.yaml")
    with pytest.raises(ConfigError, match="cannot be read"):
        read(tmp_path)


@pytest.mark.parametrize("change", ["model.width=128", "train.seed=1", "optim.beta2=0.99", "train.steps=101"])
def test_the_hash_follows_what_defines_the_training(file: Path, change: str) -> None:
    assert read(file).hash() != read(file, change).hash()


@pytest.mark.parametrize(
    "change",
    [
        "checkpoint.every=90s",
        "validation.every=5",
        "data.path=elsewhere",
        "train.log_every=1",
        "train.threads=1",
        "train.micro_batch=3",
        "optim.min_learning_rate=6e-5",
        "optim.weight_decay=0.1",
    ],
)
def test_the_hash_ignores_how_it_is_carried_out_and_watched(file: Path, change: str) -> None:
    config = read(file, change)
    assert config.hash() == read(file).hash()
    assert len(config.hash()) == 64


@pytest.mark.parametrize(
    ("micro", "world", "message"),
    [
        ("null", 1, None),
        ("null", 12, None),
        ("3", 2, None),
        (
            "null",
            5,
            "12 sequences can not be shared evenly by 5 ranks; use a global_batch of 10 or 15, or 4 ranks",
        ),
        ("null", 24, "use a global_batch of 24, or 12 ranks"),
        (
            "3",
            6,
            "micro_batch: 3 does not divide the share of each of 6 ranks, which is 2; the nearest",
        ),
        ("4", 2, "which is 6; the nearest that do are 3 or 6"),
    ],
)
def test_a_batch_that_can_not_be_shared_out(file: Path, micro: str, world: int, message: str | None) -> None:
    config = read(file, f"train.micro_batch={micro}")
    if message is None:
        check_world(config, world)
    else:
        with pytest.raises(ConfigError) as caught:
            check_world(config, world)
        assert message in str(caught.value)


@dataclass(frozen=True)
class Augment:
    flip: bool = False


@dataclass(frozen=True)
class Mine:
    images: Annotated[int, Range(1, 100)]
    sizes: tuple[int, ...] = ()
    names: dict[str, float] | None = None
    mode: Literal["a", 2] = "a"
    augment: Augment = Augment()


def test_the_home_is_found_where_no_shell_has_put_it(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a file, or in Run(run_dir="~/runs/a"), which made a directory of the name ~."""
    monkeypatch.setenv("HOME", str(tmp_path))
    assert read(file, "data.path=~/data").data.path == tmp_path / "data"
    assert read(file, "data.path=~nobody-here/data").data.path == Path("~nobody-here/data")
    assert run_directory("~/runs/a").path == tmp_path / "runs" / "a"
    prepared = build_parser().parse_args(["--source=~/text", "--out=~/data"])
    assert (prepared.source, prepared.out) == ([tmp_path / "text"], tmp_path / "data")


@pytest.mark.parametrize("option", ["--source", "--out", "--tokenizer"])
def test_an_empty_path_is_not_the_current_directory(capsys: pytest.CaptureFixture[str], option: str) -> None:
    """--source "$TEXT" where that is not set made shards of whatever lay there."""
    words = {"--source": "text", "--out": "data", "--tokenizer": "bpe.json"} | {option: ""}
    with pytest.raises(SystemExit, match="2"):
        build_parser().parse_args([f"{name}={value}" for name, value in words.items()])
    assert f"argument {option}: it is empty, as of a variable that is not set" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "words"),
    [(tune, ["gpt.yaml", "--out="]), (export_hf, ["run", "--config=gpt.yaml", "--out="])],
)
def test_nothing_is_written_where_no_place_was_named(
    capsys: pytest.CaptureFixture[str], command: Callable[[list[str]], int], words: list[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        command(words)
    assert "argument --out: it is empty, as of a variable" in capsys.readouterr().err


def test_an_empty_run_directory_is_not_the_usual_one(capsys: pytest.CaptureFixture[str], file: Path) -> None:
    """There may be another training's, which was gone on from."""
    with pytest.raises(SystemExit, match="2"):
        check([str(file), "--run-dir="])
    assert "argument --run-dir: it is empty, as of a variable" in capsys.readouterr().err


def test_another_script_reads_its_own_dataclass() -> None:
    body = {"images": 3, "sizes": [1, 2], "names": {"x": 1}, "mode": 2, "augment": {"flip": True}}
    assert from_mapping(Mine, body, "mine.yaml") == Mine(3, (1, 2), {"x": 1.0}, 2, Augment(True))
    with pytest.raises(ConfigError) as caught:
        from_mapping(Mine, {"images": 101, "sizes": [1, "b"], "augment": {"flop": 1}}, "mine.yaml")
    assert str(caught.value).splitlines() == [
        "mine.yaml: images: must be at most 100, found the integer 101",
        "mine.yaml: sizes[1]: expected an integer, found the text 'b'",
        "mine.yaml: augment.flop: unknown key; did you mean 'flip'?",
    ]


@pytest.mark.parametrize("made_as", ["another user's", "a link to another user's", "a link to nowhere"])
def test_what_a_run_in_a_bucket_keeps_here_lies_in_nobody_elses_directory(
    made_as: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In /tmp anybody may make one first, and what is in its compile cache runs as who trains."""
    monkeypatch.delenv("HOLDFAST_LOCAL_DIR", raising=False)
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    theirs, user = tmp_path / "theirs", os.getuid()
    theirs.mkdir()
    monkeypatch.setattr("os.getuid", lambda: user + 1)
    base = tmp_path / f"holdfast-{user + 1}"
    if made_as == "another user's":
        base.mkdir()
    else:
        base.symlink_to(theirs if "another" in made_as else tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=rf"^{base}, .* is no directory of yours: .* HOLDFAST_LOCAL_DIR$"):
        run_directory("s3://bucket/run")


def test_nobody_else_writes_where_a_run_in_a_bucket_keeps_its_logs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HOLDFAST_LOCAL_DIR", raising=False)
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    base = tmp_path / f"holdfast-{os.getuid()}"
    assert run_directory("s3://bucket/run").path == base / "bucket/run"
    assert base.stat().st_mode & 0o777 == 0o700
    base.chmod(0o777)  # as an earlier Holdfast left it, where new files are open to all
    run_directory("s3://bucket/run")
    assert base.stat().st_mode & 0o777 == 0o755


@pytest.mark.parametrize("place", ["s3://", "s3://runs", "gs://runs/a"])
def test_check_refuses_a_run_directory_that_no_run_could_have(
    file: Path, place: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`train` does, at once; `check` found nothing wrong."""
    monkeypatch.delenv("HOLDFAST_RUN_DIR", raising=False)
    assert check([str(file), "--run-dir", place]) == EXIT_CONFIG_ERROR
    assert f"error: the run directory '{place}'" in capsys.readouterr().err
    assert check([str(file), "--run-dir", "s3://runs/a"]) == 0
    monkeypatch.setenv("HOLDFAST_RUN_DIR", place)
    assert check([str(file), "--run-dir", "s3://runs/a"]) == EXIT_CONFIG_ERROR, "a job's counts"
