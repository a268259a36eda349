"""A user turns text into shards: equal text gives equal bytes, and what is wrong is said clearly."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from tokenizers import Tokenizer

from holdfast_trainer.prepare import PrepareError, Request, build, main, prepare, progress
from holdfast_trainer.prepare.corpus import PIECE_BYTES, pieces
from holdfast_trainer.prepare.listing import list_files
from holdfast_trainer.prepare.reading import Reader
from holdfast_trainer.token_index import DataError, TokenIndex, read_index

WORDS = [
    "the",
    "cat",
    "sat",
    "on",
    "a",
    "mat",
    "while",
    "seven",
    "grey",
    "geese",
    "flew",
    "over",
    "hill",
    "and",
    "dale",
    "until",
    "night",
    "fell",
]


def story(seed: int, words: int = 400) -> str:
    chooser = random.Random(seed)
    return "".join(chooser.choice(WORDS) + chooser.choice("    \n") for _ in range(words))


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """Text files in folders, and a JSONL file; one text says the end-of-text token aloud."""
    root = tmp_path / "corpus"
    (root / "deep" / "er").mkdir(parents=True)
    for number in range(12):
        (root / ("deep/er" if number % 2 else "deep") / f"{number:02d}.txt").write_text(story(number))
    (root / "told.txt").write_text("the token <|endoftext|> is spelled <|endoftext|>")
    (root / "empty.txt").write_text("")
    lines = [json.dumps({"text": story(100 + n, 60), "id": n}) for n in range(30)]
    (root / "more.jsonl").write_text("\n".join([*lines[:10], "", *lines[10:]]))
    return root


def request(corpus: Path, out: str = "out", **options: object) -> Request:
    defaults = {
        "sources": (corpus,),
        "out": corpus.parent / out,
        "vocab_size": 300,
        "validation_fraction": 0.2,
    }
    return Request(**{**defaults, **options})  # type: ignore[arg-type]


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def documents(out: Path, index: TokenIndex) -> dict[str, list[str]]:
    """What the shards say, decoded, by split."""
    tokenizer = Tokenizer.from_file(str(out / "tokenizer.json"))
    found: dict[str, list[str]] = {}
    for split in ("train", "validation"):
        shards = [np.fromfile(out / shard.file, dtype=index.dtype) for shard in index.of(split)]
        tokens = np.concatenate(shards)
        assert tokens[-1] == index.end_of_text
        ends = np.nonzero(tokens == index.end_of_text)[0]
        starts = [0, *(ends[:-1] + 1)]
        found[split] = [
            tokenizer.decode(tokens[a:b].tolist(), skip_special_tokens=False)
            for a, b in zip(starts, ends, strict=True)
        ]
    return found


def test_every_document_is_in_one_split_and_can_be_read_back(
    corpus: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    index = prepare(request(corpus))
    found = documents(corpus.parent / "out", index)
    texts = [path.read_text() for path in corpus.rglob("*.txt")]
    texts += [json.loads(line)["text"] for line in (corpus / "more.jsonl").read_text().splitlines() if line]
    assert sorted(found["train"] + found["validation"]) == sorted(filter(None, texts))
    assert index.source["documents"] == {split: len(found[split]) for split in found}
    assert index.source["empty_documents"] == 0  # an empty file has no piece, so no document
    assert 0 < len(found["validation"]) < len(found["train"])
    assert index.vocab_size == 300
    assert index == read_index(corpus.parent / "out")
    said, each = capfd.readouterr().err, sum(map(len, texts)) / sum(shard.tokens for shard in index.shards)
    for split in found:
        assert f"{index.tokens(split):,} {split} tokens of {len(found[split])} documents, " in said
    assert f", {each:.2f} bytes of text a token, vocabulary 300, " in said


def test_the_bytes_do_not_depend_on_the_workers(corpus: Path) -> None:
    (corpus / "long.txt").write_text(story(7, 300_000))
    prepare(request(corpus, "alone", shard_tokens=50_000))
    prepare(request(corpus, "shared", shard_tokens=50_000, workers=3))
    alone = contents(corpus.parent / "alone")
    assert alone == contents(corpus.parent / "shared")
    kinds = Counter(name.partition("-")[0] for name in alone)
    assert kinds["train"] + kinds["validation"] > 5
    assert {*kinds} == {"index.json", "tokenizer.json", "train", "validation"}


def test_the_seed_changes_the_split(corpus: Path) -> None:
    first, second = prepare(request(corpus, "a")), prepare(request(corpus, "b", seed=2))
    assert first.identity != second.identity


def test_a_finished_directory_is_recognised_and_left_alone(
    corpus: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    first = prepare(request(corpus))

    def files() -> dict[Path, tuple[int, int, int]]:
        found = {path: path.stat() for path in (corpus.parent / "out").iterdir()}
        return {path: (one.st_ino, one.st_mtime_ns, one.st_size) for path, one in found.items()}

    before = files()
    os.utime(corpus / "told.txt")  # the content counts, not the time
    assert prepare(request(corpus, workers=2)) == first
    assert files() == before
    assert "is already prepared:" in capfd.readouterr().err


def test_a_directory_of_another_preparation_is_refused(corpus: Path) -> None:
    prepare(request(corpus))
    with pytest.raises(PrepareError, match="--vocab-size was 300, now 400") as caught:
        prepare(request(corpus, vocab_size=400))
    assert "belongs to another preparation" in str(caught.value)
    (corpus / "new.txt").write_text("more")
    with pytest.raises(PrepareError, match=r"the text was 15 files with .* now 16 files"):
        prepare(request(corpus))
    (corpus.parent / "photos").mkdir()
    (corpus.parent / "photos" / "me.jpg").write_text("x")
    with pytest.raises(PrepareError, match=r"files of something else \(me.jpg\); choose an empty --out"):
        prepare(request(corpus, "photos"))


def test_a_lost_shard_of_a_finished_directory_is_noticed(corpus: Path) -> None:
    prepare(request(corpus))
    (corpus.parent / "out" / "train-00000.bin").unlink()
    with pytest.raises(PrepareError, match=r"has 0 bytes, and .* were recorded"):
        prepare(request(corpus))


def test_a_tokenizer_of_the_user_is_taken_as_it_is(corpus: Path) -> None:
    prepare(request(corpus, "first"))
    own = corpus.parent / "first" / "tokenizer.json"
    index = prepare(request(corpus, "second", tokenizer=own))
    assert (corpus.parent / "second" / "tokenizer.json").read_bytes() == own.read_bytes()
    assert index.identity == read_index(corpus.parent / "first").identity
    assert index.tokenizer["sampled_bytes"] is None


def test_a_large_vocabulary_takes_four_bytes_a_token(corpus: Path) -> None:
    prepare(request(corpus, "first"))
    tokenizer = Tokenizer.from_file(str(corpus.parent / "first" / "tokenizer.json"))
    tokenizer.add_tokens([f"<extra {n}>" for n in range(70_000)])
    tokenizer.save(str(corpus.parent / "large.json"))
    index = prepare(request(corpus, "large", tokenizer=corpus.parent / "large.json"))
    assert (index.dtype, index.vocab_size) == ("uint32", 70_300)
    assert len(documents(corpus.parent / "large", index)["train"]) > 20


# -------------------------------------------------------------- which documents


def names(corpus: Path, **options: object) -> int:
    return int(prepare(request(corpus, f"out-{len(options)}-{random.random()}", **options)).source["files"])


def test_patterns_choose_and_exclusions_prune(corpus: Path) -> None:
    assert names(corpus) == 15
    assert names(corpus, patterns=("*.txt",)) == 14
    assert names(corpus, patterns=("0*.txt", "*.jsonl")) == 11
    assert names(corpus, excludes=("er",)) == 9
    assert names(corpus, excludes=("deep/er/*", "*.jsonl")) == 8
    assert names(corpus, sources=(corpus / "deep" / "00.txt", corpus)) == 15  # none is taken twice


def test_no_text_is_left_out_without_a_word(corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A pipe has its text once, a link may lead nowhere, and directories that are linked are not entered."""
    pipe, elsewhere = corpus.parent / "pipe", corpus.parent / "elsewhere"
    os.mkfifo(pipe)
    with pytest.raises(
        PrepareError, match="pipe is no file but a pipe or a device, and a source is read more"
    ):
        prepare(request(corpus, sources=(corpus, pipe)))

    elsewhere.mkdir()
    (elsewhere / "more.txt").write_text("more")
    (corpus / "linked").symlink_to(elsewhere)
    assert names(corpus) == 15
    assert (
        f"note: not followed, as links to directories: {corpus / 'linked'}; name" in capsys.readouterr().err
    )
    assert names(corpus, sources=(corpus, corpus / "linked")) == 16

    (corpus / "gone.txt").symlink_to(elsewhere / "gone.txt")
    with pytest.raises(PrepareError, match=r"gone\.txt cannot be read: No such file"):
        prepare(request(corpus, "third"))
    assert names(corpus, excludes=("gone.txt",)) == 15

    (corpus / "gone.txt").unlink()
    (corpus / "gone.txt").symlink_to("gone.txt")
    with pytest.raises(PrepareError, match=r"gone\.txt cannot be read: Too many levels of symbolic links"):
        prepare(request(corpus, "fourth"))
    # As of one in a directory of another user, which was a traceback.
    with pytest.raises(PrepareError, match=r"^source \S+long cannot be read: File name too long$"):
        prepare(request(corpus / ("too-long" * 40), "fifth"))


def test_a_long_text_is_cut_at_line_ends_and_nothing_is_lost(tmp_path: Path) -> None:
    lines = story(3, 700_000)
    unbroken = "äöü€😀" * 200_000
    (tmp_path / "lines.txt").write_text(lines)
    (tmp_path / "unbroken.txt").write_text(unbroken)
    for text, name in ((lines, "lines"), (unbroken, "unbroken")):
        files = list(_listed(tmp_path / f"{name}.txt"))
        found = [doc for piece in pieces(files) for doc in Reader("text").documents(piece)]
        assert "".join(doc.text for doc in found) == text
        assert not any(doc.replaced for doc in found)
        assert len(found) >= 3
        assert max(len(doc.text.encode()) for doc in found) < 1.1 * PIECE_BYTES
        if name == "lines":
            assert all(doc.text.endswith("\n") for doc in found[:-1])


def test_a_piece_within_the_last_line_of_a_text_is_no_document(tmp_path: Path) -> None:
    """The line goes on for 50 bytes beyond the first piece, to which all of it belongs. Beyond that was a
    document that holds no text, which was told of a file that is all text."""
    text = "a line\n" * 100_000
    text += "y" * (PIECE_BYTES + 50 - len(text)) + "\n"
    path = tmp_path / "lines.txt"
    path.write_text(text)
    files = list(_listed(path))
    assert len(list(pieces(files))) == 2  # type: ignore[arg-type]
    assert [doc.text for piece in pieces(files) for doc in Reader("text").documents(piece)] == [text]  # type: ignore[arg-type]


def _listed(path: Path) -> Iterator[object]:
    yield from list_files(Request(sources=(path,), out=path.parent / "out"))


def test_long_json_lines_belong_to_the_piece_they_start_in(tmp_path: Path) -> None:
    texts = [story(n, 100_000 if n % 3 else 10) for n in range(12)]
    path = tmp_path / "long.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    assert path.stat().st_size > 3 * PIECE_BYTES
    found = [doc.text for piece in pieces(_listed(path)) for doc in Reader("text").documents(piece)]  # type: ignore[arg-type]
    assert found == texts


def test_bytes_that_are_no_utf8_are_replaced_and_told(
    corpus: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (corpus / "latin.txt").write_bytes("naïve café ".encode("latin-1") * 3)
    (corpus / "bom.txt").write_bytes(b"\xef\xbb\xbfplain")
    (corpus / "half.jsonl").write_text('{"text": "half a pair \\ud800 here"}\n')
    index = prepare(request(corpus))
    assert index.source["replaced_documents"] == 2
    assert (
        "2 documents hold bytes that are no UTF-8, which became U+FFFD; the first is in"
        in capfd.readouterr().err
    )
    found = documents(corpus.parent / "out", index)
    assert "plain" in found["train"] + found["validation"]
    assert "half a pair \ufffd here" in found["train"] + found["validation"], "and not a question mark"


# ------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": "a"', ":3: not a JSON object: "),
        ("[1]", ":3: expected a JSON object, found a list"),
        (
            '{"body": "a", "id": 1}',
            ":3: no text in field 'text', found only 'body', 'id'; name the field",
        ),
        ('{"text": 5}', ":3: no text in field 'text', found a int"),
        ('{"text": "\udcff"}', ":3: not a JSON object: "),
    ],
)
def test_a_bad_json_line_is_named_by_file_and_line(corpus: Path, line: str, message: str) -> None:
    path = corpus / "bad.jsonl"
    path.write_text(f'{{"text": "good"}}\n\n{line}\n', errors="surrogateescape")
    with pytest.raises(PrepareError) as caught:
        prepare(request(corpus))
    assert f"{path}{message}" in str(caught.value)


def test_what_kept_a_preparation_from_its_first_text_is_mended_in_the_same_directory(corpus: Path) -> None:
    (corpus / "more.jsonl").write_text('{"body": "told once more"}\n' * 20)
    only = {"patterns": ("*.jsonl",)}
    with pytest.raises(PrepareError, match=r"name the field with --text-field \(of a stream: text_field\)"):
        prepare(request(corpus, **only))
    assert sum(prepare(request(corpus, text_field="body", **only)).source["documents"].values()) == 20
    with pytest.raises(PrepareError, match="belongs to another preparation: --text-field was body"):
        prepare(request(corpus, **only))


def test_the_line_is_right_beyond_the_first_piece(tmp_path: Path) -> None:
    path = tmp_path / "big.jsonl"
    good = json.dumps({"text": story(1, 1000)}) + "\n"
    count = 3 * PIECE_BYTES // len(good)
    path.write_text(good * count + "oops\n")
    with pytest.raises(PrepareError, match=rf"big\.jsonl:{count + 1}: not a JSON object"):
        prepare(request(path, "out", workers=2))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sources": (Path("/nowhere"),)}, "source /nowhere does not exist"),
        (
            {"patterns": ("*.rs",)},
            r"no file in .* matches \*\.rs; choose others with --pattern \(of a stream: patterns\)",
        ),
        ({"vocab_size": 256}, "--vocab-size 256: must be at least 257"),
        ({"vocab_size": 10**20}, "--vocab-size 100000000000000000000: must be at most 16777216"),
        ({"workers": 0}, "--workers 0: must be at least 1"),
        ({"validation_fraction": 1.0}, "--validation-fraction 1.0: must be at least 0 and below 1"),
        ({"shard_tokens": 10}, "--shard-tokens 10: must be at least 1024"),
        ({"tokenizer": Path("/nowhere.json")}, "tokenizer /nowhere.json does not exist"),
        ({"patterns": ("empty.txt",)}, "the 1 files of the sources are all empty"),
    ],
)
def test_bad_arguments(corpus: Path, options: dict[str, object], message: str) -> None:
    with pytest.raises(PrepareError, match=message):
        prepare(request(corpus, **options))


def test_a_file_that_is_no_tokenizer(corpus: Path) -> None:
    path = corpus.parent / "tokenizer.json"
    path.write_text('{"model": 1}')
    with pytest.raises(PrepareError, match=r"tokenizer\.json is not a tokenizer.json of the"):
        prepare(request(corpus, tokenizer=path))
    path.write_text(Tokenizer.from_str(_bare_tokenizer()).to_str())
    with pytest.raises(PrepareError, match=r"has no end-of-text token: add one of <\|endoftext\|>"):
        prepare(request(corpus, tokenizer=path))


def _bare_tokenizer() -> str:
    model = {"type": "WordLevel", "vocab": {"[UNK]": 0}, "unk_token": "[UNK]"}
    return json.dumps({"version": "1.0", "added_tokens": [], "model": model})


def test_an_out_that_can_not_be_written(corpus: Path) -> None:
    with pytest.raises(PrepareError, match=r"told\.txt.* cannot be written"):
        prepare(request(corpus, out=corpus / "told.txt" / "out"))
    with pytest.raises(PrepareError, match=r"told\.txt cannot be written: File exists"):
        prepare(request(corpus, out=corpus / "told.txt"))


def test_in_a_directory_of_something_else_nothing_is_removed(corpus: Path) -> None:
    """As where --out names the home directory; a half-written file of its own is removed."""
    out = corpus.parent / "out"
    (out / ".cache.tmp").mkdir(parents=True)
    (out / ".draft.tmp").write_text("a day's work")
    (out / "notes.md").write_text("nothing to prepare into")
    before = sorted(out.iterdir())
    with pytest.raises(PrepareError, match=r"holds files of something else \(notes\.md\)"):
        prepare(request(corpus))
    assert sorted(out.iterdir()) == before
    (out / "notes.md").unlink()
    (out / ".index.json.4711.tmp").write_text("a half")
    prepare(request(corpus))
    assert not list(out.glob(".index*"))
    assert (out / ".draft.tmp").read_text() == "a day's work"


def test_two_preparations_do_not_share_a_directory(corpus: Path) -> None:
    import fcntl

    out = corpus.parent / "out"
    out.mkdir()
    holder = os.open(out, os.O_RDONLY)
    try:
        fcntl.flock(holder, fcntl.LOCK_EX)
        with pytest.raises(PrepareError, match="another process prepares into"):
            prepare(request(corpus))
    finally:
        os.close(holder)


# ---------------------------------------------------------------- command line


def test_the_command_tells_errors_in_one_line(corpus: Path, capfd: pytest.CaptureFixture[str]) -> None:
    out = corpus.parent / "out"
    assert main(["--source", "/nowhere", "--out", str(out)]) == 1
    assert capfd.readouterr().err == "error: source /nowhere does not exist\n"
    arguments = ["--source", str(corpus), "--out", str(out), "--vocab-size", "300", "--workers", "1"]
    assert main([*arguments, "--exclude", "er", "--pattern", "*.txt"]) == 0
    assert read_index(out).source["files"] == 8
    assert "prepared" in capfd.readouterr().err
    (out / "index.json").write_text("{")
    assert main(arguments) == 1
    assert "index.json cannot be read" in capfd.readouterr().err
    with pytest.raises(DataError):
        read_index(out)


def test_the_seconds_that_it_tells_are_all_that_it_took(
    corpus: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Of 44 seconds for 100,000 small files it told 20: those for listing and reading them were left out.
    Here a second passes whenever it looks at the clock."""
    looks = iter(range(1000))
    clock = SimpleNamespace(monotonic=lambda: next(looks))
    monkeypatch.setattr(build, "time", clock)
    monkeypatch.setattr(progress, "time", clock)
    prepare(request(corpus))
    assert f"prepared {request(corpus).out} in {next(looks) - 1}.0 s" in capfd.readouterr().err


def test_help_teaches_and_torch_is_never_imported() -> None:
    code = "import sys; from holdfast_trainer.__main__ import main; main(['prepare', *sys.argv[1:]])"
    check = "import atexit, sys; atexit.register(lambda: print('torch' in sys.modules)); "
    done = subprocess.run(
        [sys.executable, "-c", check + code, "--help"],
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    assert "example: the standard library's sources" in done.stdout
    assert done.stdout.endswith("False\n")


def test_an_unknown_command_shows_the_known_ones() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "holdfast_trainer", "trian"],
        check=False,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 2
    assert "unknown command 'trian'" in done.stderr
    shown = [line.split(maxsplit=1) for line in done.stderr.splitlines()]
    assert ["prepare", "turn text and JSONL files into token shards"] in shown
