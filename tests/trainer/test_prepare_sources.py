"""The same documents in any form give the same tokens; what is damaged is named."""

from __future__ import annotations

import errno
import gzip
import io
import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow
import pytest
from processes import Processes
from pyarrow import parquet
from waiting import wait_until

from holdfast_trainer.prepare import PrepareError, Request, prepare
from holdfast_trainer.prepare.corpus import PIECE_BYTES, pieces
from holdfast_trainer.prepare.listing import list_files
from holdfast_trainer.prepare.reading import Reader
from holdfast_trainer.prepare.tokenizer import sample
from holdfast_trainer.token_index import may_come

WORDS = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"]


def documents(megabytes: float, seed: int = 3) -> list[str]:
    """Of very different lengths, some empty."""
    chance, found, size = random.Random(seed), [], 0
    while size < megabytes * 1e6:
        count = chance.choice([0, 1, 50, 500, 5000])
        found.append(" ".join(chance.choices(WORDS, k=count)) + (" é€😀\n" if count else ""))
        size += len(found[-1].encode())
    return found


def lines(texts: list[str]) -> bytes:
    return "".join(json.dumps({"id": n, "text": t}) + "\n" for n, t in enumerate(texts)).encode()


def table(texts: list[str | None]) -> pyarrow.Table:
    return pyarrow.table({"id": pyarrow.array(range(len(texts))), "text": pyarrow.array(texts)})


def gzipped(content: bytes) -> bytes:
    return gzip.compress(content, compresslevel=1)


def zstd(content: bytes) -> bytes:
    packed = pyarrow.BufferOutputStream()
    with pyarrow.CompressedOutputStream(packed, "zstd") as stream:
        stream.write(content)
    return packed.getvalue().to_pybytes()


def saved(directory: Path, texts: list[str], parts: int = 2) -> Path:
    """As `datasets` saves a data set: Arrow streams, and a file that says which of them count."""
    directory.mkdir(parents=True)
    names = [f"data-{n:05d}-of-{parts:05d}.arrow" for n in range(parts)]
    size = -(-len(texts) // parts)
    for number, name in enumerate(names):
        part = table(texts[number * size : (number + 1) * size])
        with pyarrow.ipc.new_stream(directory / name, part.schema) as writer:
            writer.write_table(part, max_chunksize=100)
    (directory / "cache-0123456789.arrow").write_bytes(b"a result that somebody computed meanwhile")
    (directory / "dataset_info.json").write_text("{}")
    (directory / "state.json").write_text(json.dumps({"_data_files": [{"filename": n} for n in names]}))
    return directory


def write(directory: Path, form: str, texts: list[str]) -> Path:
    """The documents in a form, under `directory`."""
    path = directory / form
    if form == "saved":
        return saved(path, texts)
    if form == "several/splits":
        (directory / "several").mkdir()
        (directory / "several" / "dataset_dict.json").write_text('{"splits": ["splits"]}')
        saved(path, texts)
        return directory / "several"
    if form.endswith(".parquet"):
        group = {"fine.parquet": 7, "coarse.parquet": 1 << 20}[form]
        parquet.write_table(table(texts), path, row_group_size=group)
    elif form == "file.arrow":
        with pyarrow.ipc.new_file(path, table(texts).schema) as writer:
            writer.write_table(table(texts))
    else:
        pack = {"plain.jsonl": bytes, "packed.jsonl.gz": gzipped, "packed.ndjson.zst": zstd}[form]
        path.write_bytes(pack(lines(texts)))
    return path


FORMS = ["packed.jsonl.gz", "packed.ndjson.zst", "fine.parquet", "coarse.parquet", "file.arrow", "saved",
         "several/splits"]  # fmt: skip


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str], str]:
    """A directory with a tokenizer, documents of some MB, and what they are as tokens."""
    root = tmp_path_factory.mktemp("plain")
    texts = documents(4)
    index = prepare(Request((write(root, "plain.jsonl", texts),), root / "out", validation_fraction=0.1))
    assert index.source["empty_documents"] > 0
    return root, texts, index.identity


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("workers", [1, 3])
def test_the_same_documents_are_the_same_tokens(
    plain: tuple[Path, list[str], str], tmp_path: Path, form: str, workers: int
) -> None:
    root, texts, identity = plain
    source = write(tmp_path, form, texts)
    tokenizer = root / "out" / "tokenizer.json"
    request = Request((source,), tmp_path / "out", tokenizer=tokenizer, workers=workers)
    assert prepare(Request(**{**vars(request), "validation_fraction": 0.1})).identity == identity


@pytest.mark.parametrize("form", ["fine.parquet", "plain.jsonl"])
def test_a_null_is_a_document_without_text_whatever_holds_it_and_told(
    tmp_path: Path, form: str, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write(tmp_path, form, ["some text", None, "", "more"])
    index = prepare(Request((source,), tmp_path / "out", validation_fraction=0))
    assert (index.source["documents"]["train"], index.source["empty_documents"]) == (2, 2)
    assert "note: 2 documents hold no text, as they are empty or null" in capsys.readouterr().err


class CountedReads(io.BytesIO):
    """A file that tells how much was read of it."""

    read_bytes = 0

    def read(self, size: int | None = -1, /) -> bytes:
        content = super().read(size)
        self.read_bytes += len(content)
        return content


def test_the_end_of_one_long_line_is_looked_for_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A document of hundreds of MB lies in hundreds of pieces; each was read from to the line's end."""
    texts = ["short", "word " * (6 * PIECE_BYTES // 5), "last"]
    path = write(tmp_path, "plain.jsonl", texts)
    opened = CountedReads(path.read_bytes())
    files = list_files(Request((path,), tmp_path / "out"))
    monkeypatch.setattr(opened, "close", lambda: None)
    monkeypatch.setattr("builtins.open", lambda *_: opened)
    reader = Reader("text")
    found = [document.text for piece in pieces(files) for document in reader.documents(piece)]
    monkeypatch.undo()
    assert found == texts
    assert opened.read_bytes < 3 * path.stat().st_size


def test_a_tokenizer_is_trained_where_a_sample_hits_only_the_inside_of_long_lines(tmp_path: Path) -> None:
    """They were said to be empty: no document begins in the pieces that the sample has."""
    path = write(tmp_path, "plain.jsonl", ["short", "some word " * PIECE_BYTES])
    files = list_files(Request((path,), tmp_path / "out"))
    inside = next(seed for seed in range(99) if sample(files, seed)[0].start)
    request = Request((path,), tmp_path / "out", vocab_size=257, validation_fraction=0, seed=inside)
    index = prepare(request)
    assert index.source["documents"]["train"] == 2
    assert index.tokenizer["sampled_bytes"] > 8 * PIECE_BYTES, "what was read besides counts, too"


@pytest.mark.parametrize("pack", [gzip.compress, zstd])
def test_packed_text_is_cut_where_plain_text_is(tmp_path: Path, pack: Callable[[bytes], bytes]) -> None:
    text = "\n".join(documents(3)) + "äöü€😀" * 200_000
    suffix = "gz" if pack is gzip.compress else "zst"
    (tmp_path / "a.txt").write_text(text)
    (tmp_path / f"b.txt.{suffix}").write_bytes(pack(text.encode()))

    def found(name: str, order: int = 1) -> list[str]:
        files = list_files(Request((tmp_path / name,), tmp_path / "out"))
        reader = Reader("text")
        read = [[doc.text for doc in reader.documents(piece)] for piece in list(pieces(files))[::order]]
        return [text for part in read[::order] for text in part]

    assert found(f"b.txt.{suffix}") == found("a.txt")
    assert found(f"b.txt.{suffix}", order=-1) == found("a.txt"), "backwards it is slower, and the same"
    assert "".join(found("a.txt")) == text
    assert len(found("a.txt")) > 3


def test_rows_are_found_from_anywhere(tmp_path: Path) -> None:
    texts = documents(6)
    parquet.write_table(table(texts), tmp_path / "a.parquet", row_group_size=100)
    files = list_files(Request((tmp_path / "a.parquet",), tmp_path / "out"))
    places = list(pieces(files))
    assert len(places) > 4
    reader = Reader("text")
    read = {n: [d.text for d in reader.documents(places[n])] for n in (0, 2, 3, 1, 4, *range(5, len(places)))}
    assert [text for n in sorted(read) for text in read[n]] == texts


# ------------------------------------------------------------- larger than memory

PEAK = """
import re, sys
from pathlib import Path
from holdfast_trainer.prepare import Request, prepare
prepare(Request((Path(sys.argv[1]),), Path(sys.argv[2]), tokenizer=Path(sys.argv[3])))
print(int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) // 1024)
"""


@pytest.mark.slow
@pytest.mark.parametrize("form", ["packed.jsonl.gz", "packed.ndjson.zst", "coarse.parquet"])
def test_memory_does_not_grow_with_the_source(
    plain: tuple[Path, list[str], str], tmp_path: Path, form: str
) -> None:
    """In one row group, in one compressed file: only the parts in work are in memory."""
    root, texts, _ = plain
    peak = []
    for times in (2, 25):
        source = write(tmp_path, form, texts * times)
        words = [str(source), str(tmp_path / str(times)), str(root / "out" / "tokenizer.json")]
        done = subprocess.run(
            [sys.executable, "-c", PEAK, *words], capture_output=True, text=True, check=True
        )
        peak.append(int(done.stdout))
    assert peak[1] < peak[0] + 60, f"MiB with 8 and 100 MB of text: {peak}"


def test_killed_in_the_middle_it_goes_on_with_the_same_bytes(
    plain: tuple[Path, list[str], str], tmp_path: Path, processes: Processes
) -> None:
    root, texts, _ = plain
    sources = [str(write(tmp_path, form, texts)) for form in ("packed.jsonl.gz", "coarse.parquet", "saved")]
    command = [sys.executable, "-m", "holdfast_trainer", "prepare", "--source", *sources]
    command += ["--tokenizer", str(root / "out" / "tokenizer.json"), "--shard-tokens", "50000"]

    def units_done() -> int:
        state = tmp_path / "killed" / ".prepare.json"
        return json.loads(state.read_text())["next_unit"] if state.exists() else -1

    slow = [*command, "--encoder", "tokenizers", "--workers", "2", "--out", str(tmp_path / "killed")]
    for until in (1, 5):  # in the packed lines, in the table
        run = processes.start(slow, stderr=subprocess.PIPE)
        wait_until(lambda: units_done() >= until or run.poll() is not None, f"unit {until}")  # noqa: B023
        run.kill()
        run.communicate()
        assert run.returncode == -signal.SIGKILL
        wait_until(lambda: not processes.running(), "the workers to leave with their parent")
    for out in ("killed", "untouched"):
        subprocess.run([*command, "--out", str(tmp_path / out)], check=True, capture_output=True)
    written = [
        {p.name: p.read_bytes() for p in (tmp_path / out).iterdir()} for out in ("killed", "untouched")
    ]
    assert written[0] == written[1]


# ------------------------------------------------------------------------ bad input


def cut(content: bytes) -> bytes:
    return content[: len(content) // 2]


def packed_table(texts: list[str]) -> bytes:
    sink = io.BytesIO()
    parquet.write_table(table(texts), sink)
    return sink.getvalue()


TEXTS = [str(random.Random(n).random()) for n in range(2000)]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl.gz", cut(gzip.compress(lines(TEXTS))), "a.jsonl.gz is no whole gzip file (Compressed file"),
        ("a.jsonl.gz", lines(TEXTS), "a.jsonl.gz is no whole gzip file (Not a gzipped file"),
        ("a.jsonl.zst", cut(zstd(lines(TEXTS))), "a.jsonl.zst is damaged or cut off ("),
        ("a.jsonl.zst", lines(TEXTS), "a.jsonl.zst is damaged or cut off ("),
        ("a.parquet", lines(TEXTS), "a.parquet is no whole Parquet file (Parquet magic bytes not found"),
        ("a.parquet", cut(packed_table(TEXTS)), "a.parquet is no whole Parquet file (Parquet magic bytes"),
        ("a.parquet", b"", "a.parquet is no whole Parquet file (Parquet file size is 0 bytes)"),
        ("a.arrow", lines(TEXTS), "a.arrow is no whole Arrow file ("),
        ("a.parquet.gz", gzip.compress(packed_table(TEXTS)), "its own compression: unpack it first"),
        ("a.jsonl.gz", gzip.compress(lines(TEXTS) + b"oops\n"), "a.jsonl.gz:2001: not a JSON object"),
    ],
)
def test_a_damaged_source_is_named(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(PrepareError) as caught:
        prepare(Request((path,), tmp_path / "out"))
    assert message in str(caught.value)


def test_a_table_that_a_file_server_does_not_give_is_not_called_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stale(*_: object, **__: object) -> Iterator[pyarrow.RecordBatch]:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        yield

    path = write(tmp_path, "fine.parquet", ["one", "two"])
    monkeypatch.setattr(parquet.ParquetFile, "iter_batches", stale)
    with pytest.raises(PrepareError, match=r"fine\.parquet cannot be read: Stale file handle$") as raised:
        prepare(Request((path,), tmp_path / "out"))
    assert may_come(raised.value)


def test_a_table_that_is_damaged_inside_is_named_with_its_row(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    parquet.write_table(table(documents(3)), path, compression="snappy")
    content = bytearray(path.read_bytes())
    content[5000:400_000] = random.Random(7).randbytes(395_000)
    path.write_bytes(content)
    with pytest.raises(PrepareError, match=r"a\.parquet is damaged near row 0 \(.*\): get it again"):
        prepare(Request((path,), tmp_path / "out"))


@pytest.mark.parametrize("form", ["coarse.parquet", "saved"])
@pytest.mark.parametrize(
    ("field", "message"),
    [
        (
            "body",
            "has no column 'body', it has id: int64, text: string; name the column with --text-field (of",
        ),
        ("id", "holds int64, not text; it has id: int64, text: string; name a column of text with --text-f"),
    ],
)
def test_a_column_that_is_not_there_or_is_no_text(
    tmp_path: Path, form: str, field: str, message: str
) -> None:
    source = write(tmp_path, form, ["a", "b"])
    with pytest.raises(PrepareError) as caught:
        prepare(Request((source,), tmp_path / "out", text_field=field))
    assert message in str(caught.value)


def test_a_column_that_is_there_twice(tmp_path: Path) -> None:
    twice = pyarrow.table([pyarrow.array(["a"]), pyarrow.array(["b"])], names=["text", "text"])
    parquet.write_table(twice, tmp_path / "a.parquet")
    with pytest.raises(PrepareError, match=r"a\.parquet has 2 columns 'text'; rename all but one"):
        prepare(Request((tmp_path,), tmp_path / "out"))


def test_of_several_splits_the_user_names_one(tmp_path: Path) -> None:
    for split in ("train", "test"):
        saved(tmp_path / "all" / split, ["a text", "another"])
    (tmp_path / "all" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    with pytest.raises(PrepareError, match=r"splits train, test: name the one to prepare, for .*/train"):
        prepare(Request((tmp_path / "all",), tmp_path / "out"))
    prepare(Request((tmp_path / "all" / "train",), tmp_path / "out", validation_fraction=0))


def test_a_data_set_that_was_copied_by_half(tmp_path: Path) -> None:
    source = saved(tmp_path / "half", ["a text", "another"])
    (source / "data-00001-of-00002.arrow").unlink()
    with pytest.raises(PrepareError, match=r"00001-of-00002\.arrow is missing; .*state\.json names it: copy"):
        prepare(Request((source,), tmp_path / "out"))


def test_json_lines_that_are_called_json_are_told(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """As those of C4 are, c4-train.00000-of-01024.json.gz: all of it was one text, keys and addresses too."""
    texts = ["one two", "three four"]
    (tmp_path / "c4").mkdir()
    packed, code = tmp_path / "c4" / "c4.json.gz", tmp_path / "c4" / "package.json"
    packed.write_bytes(gzipped(lines(texts)))
    code.write_text('{\n "text": "of a program"\n}\n')
    prepare(Request((tmp_path / "c4",), tmp_path / "a", patterns=("*.json*",), vocab_size=300))
    told = capfd.readouterr().err
    assert f"warning: read as text, braces and all, as the name says: {packed}; the first line" in told
    named = tmp_path / "c4.jsonl.gz"
    named.symlink_to(packed)
    index = prepare(Request((named, code), tmp_path / "b", vocab_size=300))
    assert sum(index.source["documents"].values()) == len(texts) + 1
    assert "warning: read as text" not in capfd.readouterr().err


def test_directories_give_what_is_packed_too(tmp_path: Path) -> None:
    for form in ("plain.jsonl", "packed.jsonl.gz", "fine.parquet"):
        write(tmp_path, form, [f"text of {form}"])
    index = prepare(Request((tmp_path,), tmp_path / "out", validation_fraction=0))
    assert index.source["documents"]["train"] == 3
    assert index.arguments["piece_bytes"] == PIECE_BYTES


def test_kinds_of_text_that_no_pattern_takes_are_told(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A directory of packed texts with one that tells about them was prepared as that one."""
    source = tmp_path / "texts"
    source.mkdir()
    (source / "README.md").write_text("what is in here")
    (source / "all.v2.txt.gz").write_bytes(gzipped(b"all that there is"))
    (source / "picture.png").write_bytes(b"no text")
    write(source, "packed.ndjson.zst", ["more of it"])
    said = f"left out, as their kind is taken only if asked for: {source / 'all.v2.txt.gz'} and 1 more; give "
    prepare(Request((source,), tmp_path / "a", vocab_size=300))
    assert f"note: {said}--pattern '*.txt.gz', and one for" in capfd.readouterr().err
    chosen = Request((source,), tmp_path / "b", vocab_size=300, patterns=("*.txt.gz",))
    assert sum(prepare(chosen).source["documents"].values()) == 1
    prepare(Request((source,), tmp_path / "c", vocab_size=300, excludes=("*.gz", "*.zst")))
    assert "left out" not in capfd.readouterr().err
