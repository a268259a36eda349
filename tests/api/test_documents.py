"""What a user can write wrongly in a job, and what he is told."""

from __future__ import annotations

import contextlib
import json
from typing import Literal

import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st

from holdfast_controller.api.selection import Selection, parse_selector
from holdfast_controller.cluster import Invalid
from holdfast_controller.documents import parse, to_job
from holdfast_controller.job_series import JobFigures
from holdfast_controller.json_values import check_json
from holdfast_controller.yaml_text import dump
from holdfast_trainer.config import CheckpointConfig
from holdfast_trainer.schema import parse_scalar


def faults_of(text: str, namespace: str | None = None) -> list[str]:
    with pytest.raises(Invalid) as caught:
        to_job(parse(text.encode(), "job.yaml"), namespace)
    return caught.value.errors or [str(caught.value)]


GOOD = "metadata: {name: j}\nspec: {command: [python, t.py]}\n"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "job.yaml is empty: it should hold one TrainingJob"),
        ("- 1", "job.yaml holds a list, not the mapping of a TrainingJob"),
        ("a: [1\nb: 2", "job.yaml: line 2, column 2: did not find expected ',' or ']'"),
        ("a: 1\nb: 2\na: 3", "job.yaml: line 3, column 1: the key 'a' is given twice in one mapping"),
        ("a: 1\n---\nb: 2", "line 3, column 1: expected a single document in the stream, but found another"),
        ("---\n---\n", "job.yaml holds a null, not the mapping of a TrainingJob"),
        ("a:\n  é: 1\n\tb: 2", "job.yaml: line 3, column 1: a tab stands where YAML takes spaces alone"),
        ("a: &x [*x]", "job.yaml: line 1, column 4: an alias stands inside what it names"),
        ("a: !!python/object:os.system x", "job.yaml: line 1, column 4: could not determine a constructor"),
        ("apiVersion: v1\n" + GOOD, "apiVersion: 'v1' should be 'holdfast.dev/v1alpha1'"),
        ("kind: Pod\n" + GOOD, "kind: 'Pod' should be 'TrainingJob'"),
        ("metadata: {name: j}", "spec: this key is needed and missing"),
        (
            "metadata: {name: j}\nspec: {command: [python, t.py, --lr, 0.01]}",
            "spec.command[3]: 0.01: a number stands where text is needed; write it in quotes",
        ),
        (
            "metadata: {name: j}\nspec: {command: [x], env: {NESTED: true}}",
            "spec.env.NESTED: True: a true/false value stands where text is needed; write it in quotes",
        ),
        ("metadata: [j]\nspec: {command: [x]}", "metadata: a list stands where a mapping is needed"),
        ("metadata: {name: My_Job}\nspec: {command: [x]}", "metadata.name: 'My_Job' is no name: lower-case"),
        (
            "metadata: {name: j}\nspec: {command: [x], replica: 2}",
            "spec.replica: unknown key; did you mean 'replicas'?",
        ),
        (
            "metadata: {name: j, labels: {team: 'x\"y'}}\nspec: {command: [x]}",
            "metadata.labels.team: 'x\"y' is no label's value: letters, digits",
        ),
        ("metadata: {name: j, labels: {team: -a}}\nspec: {command: [x]}", "'-a' is no label's value"),
        (
            f"metadata: {{name: j, labels: {{team: {'a' * 64}}}}}\nspec: {{command: [x]}}",
            "at most 63",
        ),
        ("metadata: {name: j, labels: {'b c': d}}\nspec: {command: [x]}", "'b c' is no label's name"),
        ("metadata: {name: j, labels: {'A_b/c': d}}\nspec: {command: [x]}", "'A_b/c' is no label's name"),
        ("metadata: {name: j}\nspec: {command: [x], checkpoint: {evry: 5}}", "did you mean 'every'?"),
        (
            "metadata: {name: j}\nspec: {command: [x], checkpoint: {every: 0500}}",  # 320 steps to PyYAML
            "line 2, column 42: '0500' has zeros before it, as octal numbers have; write 500, or put it in",
        ),
        (
            "metadata: {name: j}\nspec: {command: [x], grace_seconds: 60}",  # which kubectl refuses, too
            "spec.grace_seconds: unknown key; did you mean 'graceSeconds'?",
        ),
        (
            "metadata: {name: j, deletion_timestamp: '2026-01-01T00:00:00Z'}\nspec: {command: [x]}",
            "metadata.deletion_timestamp: unknown key; did you mean 'deletionTimestamp'?",
        ),
        ("metadata: {name: j}\nspec: {command: [x], zzz: 1}", "spec.zzz: unknown key; known: image, command"),
        (
            "metadata: {name: j}\nspec: {command: [x], replicas: two}",
            "spec.replicas: 'two': input should be a valid integer",
        ),
        (
            "metadata: {name: j}\nspec: {command: python t.py}",
            "spec.command: 'python t.py': text stands where a list is needed, such as [python, train.py]",
        ),
        (
            "metadata: {name: j}\nspec: {command: [x], workingDir: ~/x}",
            "spec.workingDir: '~/x' is no absolute path, which begins with /",
        ),
        (
            "metadata: {name: j}\nspec: {command: [x], env: {B C: x}}",
            "spec.env.B C: 'B C' is no variable's name",
        ),
        (
            "metadata: {name: j}\nspec: {command: [x], queue: A B}",
            "spec.queue: 'A B' is no such name: lower-case",
        ),
        (
            "metadata: {name: j}\nspec: {command: [x], storage: {claim: A}}",
            "spec.storage.claim: 'A' is no such",
        ),
        ("metadata: {name: j}\nspec: {command: [x], mig: big}", "spec.mig: 'big' is no MIG profile, such as"),
        ("metadata: {name: j}\nspec: {command: []}", "spec.command: []: list should have at least 1 item"),
        ("metadata: {name: j}\nspec: {command: [x], env: {RANK: '1'}}", "RANK is set by the platform"),
        ("metadata: {name: j}\nspec: {command: [x], gpus: 1.5}", "1.5 GPUs: only whole numbers above 1"),
        (
            "metadata: {name: j}\nspec: {command: [x], config: {lr: .nan}}",
            "spec.config.lr: nan is no JSON number",
        ),
        (
            "metadata: {name: j}\nspec: {command: [x], config: {1: 2}}",
            "the key 1 is a number; write it in quotes",
        ),
        (
            f"metadata: {{name: j}}\nspec: {{command: [x], config: {{seed: 0x{'f' * 5000}}}}}",
            "spec.config.seed: an integer of 20000 bits does not fit into 64; write it in quotes",
        ),
        (
            f"metadata: {{name: j}}\nspec: {{command: [x], config: {{? 0x{'f' * 5000} : 1}}}}",
            "spec.config: the key 0xffffff",
        ),
        (f"apiVersion: 0x{'f' * 5000}", "apiVersion: an integer of 20000 bits"),
    ],
)
def test_a_faulty_document_is_told_where_and_what(text: str, told: str) -> None:
    assert any(told in fault for fault in faults_of(text)), faults_of(text)


@pytest.mark.parametrize("around", ["{}---\n", "---\n{}...\n---\n# the end\n", "# begins\n---\n---\n{}"])
def test_a_document_may_stand_between_empty_ones(around: str) -> None:
    """As in a file that was cut out of a longer one; kubectl takes it too."""
    alone, amid = (parse(text.encode(), "job.yaml") for text in (GOOD, around.format(GOOD)))
    assert amid == alone


def test_every_label_that_is_taken_can_be_selected() -> None:
    """What Kubernetes takes for a label is one here too."""
    labels = {"team": "vision_2.b", "example.com/Sweep-7": "", "a": "9", "x" * 63: "y" * 63}
    job = to_job({"metadata": {"name": "j", "labels": labels}, "spec": {"command": ["x"]}})
    terms = ",".join(f"{name}={value}" for name, value in labels.items())
    assert Selection(labels=parse_selector(terms)).holds(job)


def test_all_faults_are_told_at_once() -> None:
    faults = faults_of("metadata: {nmae: j}\nspec: {command: x, replicas: 0, gpu: 1}")
    assert len(faults) == 5
    assert "metadata.nmae: unknown key; did you mean 'name'?" in faults
    assert "spec.gpu: unknown key; did you mean 'gpus'?" in faults


def test_a_document_that_is_wrong_in_every_key_is_refused_in_a_few_words() -> None:
    """To seek the nearest right key for each took eight seconds, in which nobody else was served."""
    spec = {"command": ["x"], **{f"k{number}": 0 for number in range(90_000)}}
    with pytest.raises(Invalid, match=r"^90000 faults; the first: spec\.k0: unknown key; ") as caught:
        to_job({"metadata": {"name": "j"}, "spec": spec})
    assert len(caught.value.errors) == 100
    labels = {f"-{number}": "" for number in range(1000)}
    with pytest.raises(Invalid, match=r"^1000 faults; ") as caught:
        to_job({"metadata": {"name": "j", "labels": labels}, "spec": {"command": ["x"]}})
    assert len(caught.value.errors) == 100
    with pytest.raises(Invalid, match=r"^at least 100 faults; the first: a: a set cannot be kept") as caught:
        check_json({f"{'a' * number}": {1} for number in range(1, 1000)})
    assert len(caught.value.errors) == 100


def test_json_has_no_more_values_than_yaml_may_have() -> None:
    body = b'{"metadata": {"name": "j"}, "spec": {"command": ["x"], "config": {"a": [%s0]}}}'
    with pytest.raises(Invalid, match="too many values; at most 100000: put large tables into files"):
        to_job(parse(body % (b"0," * 99_999), "body", "json"))


def test_a_small_document_cannot_stand_for_a_large_one() -> None:
    """The billion laughs: ten lists of ten of the list before."""
    lines = ["a0: &a0 [" + ",".join("1" * 10) + "]"]
    lines += [f"a{n}: &a{n} [" + ",".join([f"*a{n - 1}"] * 10) + "]" for n in range(1, 9)]
    (fault,) = faults_of("\n".join(lines))
    assert "its aliases expanded; at most 100000" in fault


@pytest.mark.parametrize(
    "repeated",
    [
        "[" + ",".join(["*a"] * 1000) + "]",
        "[{*a : 1}, " + ",".join([f"{{x{n}: 1, *a : 1}}" for n in range(1000)]) + "]",
    ],
    ids=["a text", "a key"],
)
def test_a_long_text_cannot_be_repeated_by_aliases(repeated: str) -> None:
    """Few values, and gigabytes once they are written as JSON: 1,000 times half a megabyte."""
    (fault,) = faults_of(f'metadata: {{name: j}}\nx: &a "{"x" * 500_000}"\ny: {repeated}\n')
    assert "too much text, its aliases expanded; at most 1048576 characters" in fault
    assert "line 3" in fault


def test_deep_nesting_is_refused_not_a_crash() -> None:
    """The binding of libyaml would end the process: its composer recurses in C."""
    told = r"nested too deeply|nested deeper than 100 levels|did not find"
    for text in (b'{"a":' * 100_000, b"[" * 100_000, b"- " * 1_000 + b"x"):
        with pytest.raises(Invalid, match=told):
            parse(text, "deep", "yaml")
    with pytest.raises(Invalid, match="deep is nested too deeply"):
        parse(b"[" * 100_000, "deep", "json")


def test_nesting_by_alias_and_nesting_in_json_are_bounded_too() -> None:
    chain = "a0: &a0 [1]\n" + "\n".join(f"a{n}: &a{n} [*a{n - 1}]" for n in range(1, 300))
    assert any("nested deeper than 100 levels" in fault for fault in faults_of(chain))
    with pytest.raises(Invalid, match="nested deeper than 100 levels"):
        to_job(parse(b'{"a":' * 300 + b"1" + b"}" * 300, "deep", "json"))


def test_anchors_within_reason_are_fine() -> None:
    text = "metadata: {name: j}\nspec: {command: [x], config: {a: &a {lr: 1e-3}, b: *a, day: 2026-01-01}}"
    assert to_job(parse(text.encode(), "job.yaml")).spec.config == {
        "a": {"lr": 0.001},
        "b": {"lr": 0.001},
        "day": "2026-01-01",
    }


def test_what_get_shows_can_be_submitted_again() -> None:
    first = to_job(parse(GOOD.encode(), "job.yaml"), "team-a")
    again = to_job(parse(yaml.safe_dump(first.to_dict()).encode(), "job.yaml"), "team-a")
    assert again.spec == first.spec
    assert again.metadata.uid != first.metadata.uid


HALF = "\\ud800"  # as JSON escapes it


@pytest.mark.parametrize(
    ("config", "told"),
    [
        (f'{{"a": ["b", "c{HALF}"]}}', r"spec.config.a[1]: 'c\ud800' holds half a surrogate pair"),
        (f'{{"{HALF}": 1}}', r"spec.config: the key '\ud800' holds half a surrogate pair"),
    ],
)
def test_half_a_character_is_refused(config: str, told: str) -> None:
    """JSON can name it in an escape, and nobody can write it again."""
    with pytest.raises(Invalid) as caught:
        to_job(parse(f'{{"spec": {{"config": {config}}}}}'.encode(), "the body", "json"))
    assert told in str(caught.value)
    assert to_job(
        parse(b'{"metadata": {"name": "j"}, "spec": {"command": ["\\ud83d\\ude00"]}}', "x", "json")
    ).spec.command == ["\U0001f600"], "the two halves of one are a character"


@pytest.mark.parametrize("digits", [9, 400, 5000])
@pytest.mark.parametrize("key", ["gpus", "resources.cpu", "resources.memory"])
def test_more_than_any_machine_has_is_refused_before_it_is_reckoned_with(key: str, digits: int) -> None:
    """From 309 digits on it is no number that Python divides, from 4,301 on none that it reads: the answer
    was 500, with a traceback."""
    asked = f"{'9' * digits}{'Gi' if key == 'resources.memory' else ''}"
    (fault,) = faults_of(asking(key, asked))
    assert fault.startswith(f"spec.{key}: {asked[:20]}: more than ")
    assert fault.endswith(", which no machine has")


@pytest.mark.parametrize("key", ["gpus", "resources.cpu", "resources.memory"])
def test_a_number_whose_digits_never_end_is_refused(key: str) -> None:
    """With more than 4,300 of them its attempt could not be made, and each look at the job failed."""
    (fault,) = faults_of(asking(key, f"1.{'0' * 5000}"))
    assert fault == f"spec.{key}: 1.000000000000000000 goes on for 5002 characters: round it"


@pytest.mark.parametrize(
    ("key", "asked"), [("gpus", "٣"), ("resources.cpu", "٣"), ("resources.memory", "1٣Gi")]
)
def test_digits_of_another_script_are_refused_by_one_machine_as_by_a_cluster(key: str, asked: str) -> None:
    """Python reads them as numbers; an apiserver's rules do not."""
    (fault,) = faults_of(asking(key, asked))
    assert fault.startswith(f"spec.{key}: {asked!r} is not a ")


@pytest.mark.parametrize("unit", ["", "s"])
def test_a_job_cannot_save_so_seldom_that_no_number_says_it(unit: str) -> None:
    """On one machine such a job was taken, and ended its controller, at each start again: no series could
    tell how often it saves. With 19 digits the trainer refused what the controller had taken."""
    for digits in (19, 5000):
        (fault,) = faults_of(asking("checkpoint.every", "9" * digits + unit))
        assert fault.startswith("spec.checkpoint.every: '9999999999999999999")
        assert fault.endswith("is none of: auto, a number of steps (500), seconds (90s)")
    job = to_job(parse(asking("checkpoint.every", "9" * 18 + unit).encode(), "job.yaml"))
    assert JobFigures.of(job).every_steps == (None if unit else int("9" * 18))
    assert CheckpointConfig(every=job.spec.checkpoint.every).every == "9" * 18 + unit


def asking(key: str, value: str) -> str:
    section, _, name = key.rpartition(".")
    asked = f"{section}: {{{name}: '{value}'}}" if section else f"{name}: '{value}'"
    return f"metadata: {{name: j}}\nspec: {{command: [x], {asked}}}"


@pytest.mark.parametrize("syntax", ["json", "yaml"])
def test_an_integer_longer_than_python_reads_is_told_in_our_words(syntax: Literal["json", "yaml"]) -> None:
    """Python has a limit of 4,300 digits, and a hint of its own that is for programmers."""
    with pytest.raises(Invalid) as caught:
        parse(f'{{"spec": {{"config": {{"seed": {"7" * 5000}}}}}}}'.encode(), "job", syntax)
    told = str(caught.value)
    assert "write it in quotes" in told
    assert "777" in told
    assert len(told) < 200
    assert "set_int_max_str_digits" not in told


ODD = st.text() | st.text(
    st.sampled_from("0123456789eE+-._xXobBafFyYnN~<=:#&*[]{}|,'\" \t\n\r\x85\u2028\ufeffé")
)
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | ODD
    | st.from_regex(r"[-+]?[0-9]{0,3}(\.[0-9]{0,3})?([eE][-+]?[0-9]{1,5})?", fullmatch=True)
)


@example({"": {"": None}, ".": None})
@example({"run": "1e5", "sha": "7e12345", "lr": "1e-3", "commit": "12345e67", ".5e3": "1_0e1"})
@given(
    st.dictionaries(
        ODD,
        st.recursive(
            SCALARS,
            lambda inner: st.lists(inner, max_size=3) | st.dictionaries(ODD, inner, max_size=2),
            max_leaves=6,
        ),
        max_size=3,
    )
)
def test_what_is_written_as_yaml_is_what_all_read(config: dict[str, object]) -> None:
    """A commit such as 7e12345 is text: for `submit`, and for the trainer, which takes it for infinity."""
    text = dump({"config": config})
    for read in (parse(text.encode(), "job.yaml"), parse_scalar(text)):
        assert repr(read) == repr({"config": config})


@pytest.mark.parametrize("text", ["089", "y", "N", "0o17", "0X1F", ".5e3", "1e5", "on", "0x_1", "1_000"])
def test_what_kubectl_takes_for_a_number_or_a_truth_is_written_in_quotes(text: str) -> None:
    assert dump([text, {text: text}]) == f"- '{text}'\n- '{text}': '{text}'\n"


@pytest.mark.parametrize("text", ["3:1", "12:30:00", "-1:30.5", "07:00"])
def test_a_ratio_or_a_time_of_day_is_text_as_kubectl_reads_it(text: str) -> None:
    """`mix: 3:1` reached the program as 181: PyYAML counts by sixties, as YAML 1.1 had it."""
    config = to_job(
        parse(f"metadata: {{name: j}}\nspec: {{command: [x], config: {{mix: {text}}}}}".encode(), "f")
    )
    assert config.spec.config == {"mix": text}
    assert yaml.safe_load(dump({"mix": text})) == {"mix": text}


@pytest.mark.parametrize("word", ["no", "off", "false", "yes", "on", "true"])
@pytest.mark.parametrize(
    "key",
    [
        *("replicas", "minReplicas", "processes", "graceSeconds", "hangSeconds", "idleSeconds"),
        *("ttlSecondsAfterFinished", "checkpoint.keep", "retries.failures", "retries.disruptions"),
    ],
)
def test_no_is_not_zero_and_yes_is_not_one(key: str, word: str) -> None:
    """A job that was to be deleted `no` time after its end was deleted at its end, with its checkpoints."""
    *sections, last = key.split(".")
    spec = "".join(f"{section}: {{" for section in sections) + f"{last}: {word}" + "}" * len(sections)
    (fault,) = faults_of(f"metadata: {{name: j}}\nspec: {{command: [x], {spec}}}")
    truth = "false" if word in ("no", "off", "false") else "true"
    assert fault == (
        f"spec.{key}: {truth}, as YAML also reads yes, on, no or off, stands where a number is needed"
    )


def test_two_namespaces_are_a_contradiction() -> None:
    (fault,) = faults_of("metadata: {name: j, namespace: b}\nspec: {command: [x]}", "a")
    assert "metadata.namespace is 'b', but the job was sent to namespace 'a'" in fault


@given(
    st.dictionaries(
        st.text(min_size=1),
        st.recursive(
            st.none()
            | st.booleans()
            | st.integers(-(2**53), 2**53)
            | st.floats(allow_nan=False, allow_infinity=False)
            | st.text(),
            lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
            max_leaves=10,
        ),
        max_size=4,
    )
)
def test_a_config_comes_through_unchanged(config: dict[str, object]) -> None:
    body = {"metadata": {"name": "j"}, "spec": {"command": ["x"], "config": config}}
    job = to_job(parse(json.dumps(body).encode(), "job.json", "json"))
    assert json.loads(job.model_dump_json())["spec"]["config"] == config


@given(st.binary(max_size=200))
def test_no_bytes_are_a_crash(data: bytes) -> None:
    for syntax in ("json", "yaml"):
        with contextlib.suppress(Invalid):
            to_job(parse(data, "noise", syntax))
