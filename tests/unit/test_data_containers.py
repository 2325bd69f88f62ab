"""The same rows from every kind of data file, compressed or not, and from folders."""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import json
import lzma
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import ipc, parquet

from backend.config import RunSpec
from backend.config.options import edit
from backend.data import DataFileError, expand, read_examples, reading
from backend.inspect import data_files
from backend.inspect.data_files import inspect_data_files

ROWS: list[dict[str, Any]] = [
    {"prompt": "Wann f\u00e4hrt\u2028er?", "completion": 'Um "9",\ngenau.\tJa.'},
    {"prompt": "a" * 5000, "completion": "\U0001f682"},
]


def separated(rows: list[dict[str, Any]], separator: str) -> bytes:
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), delimiter=separator)
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue().encode()


def arrow(rows: list[dict[str, Any]], writer: Callable[..., Any]) -> bytes:
    table, stream = pyarrow.Table.from_pylist(rows), io.BytesIO()
    with writer(stream, table.schema) as file:
        file.write_table(table, 1)
    return stream.getvalue()


def parquet_file(rows: list[dict[str, Any]]) -> bytes:
    stream = io.BytesIO()
    parquet.write_table(pyarrow.Table.from_pylist(rows), stream)
    return stream.getvalue()


WRITERS: dict[str, Callable[[list[dict[str, Any]]], bytes]] = {
    "a.jsonl": lambda rows: "\n".join(map(json.dumps, rows)).encode(),
    "a.json": lambda rows: json.dumps(rows).encode(),
    "a.csv": lambda rows: separated(rows, ","),
    "a.tsv": lambda rows: separated(rows, "\t"),
    "a.parquet": parquet_file,
    "stream.arrow": lambda rows: arrow(rows, ipc.new_stream),
    "file.ARROW": lambda rows: arrow(rows, ipc.new_file),
}
PACK: dict[str, Callable[[bytes], bytes]] = {
    ".gz": gzip.compress, ".GZ": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress,
    ".zst": lambda content: pyarrow.compress(content, codec="zstd", asbytes=True),
}  # fmt: skip
PACKED = [f"a{kind}{suffix}" for kind in (".jsonl", ".json", ".csv", ".tsv") for suffix in PACK]


def write(folder: Path, name: str, rows: list[dict[str, Any]]) -> Path:
    path = folder / name
    suffix = path.suffix if name not in WRITERS else ""
    content = WRITERS[name.removesuffix(suffix)](rows)
    path.write_bytes(PACK[suffix](content) if suffix else content)
    return path


@pytest.mark.parametrize("in_server", [False, True])
@pytest.mark.parametrize("name", [*WRITERS, *PACKED])
def test_the_rows_are_the_same(tmp_path: Path, name: str, in_server: bool) -> None:
    path = write(tmp_path, name, ROWS)
    assert [row for _, row in read_examples(path, in_server=in_server)] == ROWS


@pytest.mark.parametrize("name", PACKED)
def test_a_cut_file_is_named(tmp_path: Path, name: str) -> None:
    path = write(tmp_path, name, [{"prompt": str(n**9), "completion": "b"} for n in range(900)])
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(DataFileError, match=r"cannot be (read|decompressed)"):
        list(read_examples(path))


@pytest.mark.parametrize("name", ["stream.arrow", "file.ARROW", "a.parquet"])
@pytest.mark.parametrize("in_server", [False, True])
def test_a_cut_arrow_file_is_named(tmp_path: Path, name: str, in_server: bool) -> None:
    path = write(tmp_path, name, [{"prompt": str(n**9), "completion": "b"} for n in range(900)])
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(DataFileError, match=r"is not a valid (Arrow|Parquet) file|cannot be read"):
        list(read_examples(path, in_server=in_server))


def test_a_folder_is_its_data_files(tmp_path: Path) -> None:
    """In the order of their names, without others and without hidden ones."""
    for name in ("b.jsonl", "a.csv.gz", "c.parquet", "README.md", "._a.jsonl", "_SUCCESS.json"):
        (tmp_path / name).write_bytes(b"")
    (tmp_path / "more.jsonl").mkdir()
    assert [path.name for path in expand([str(tmp_path)])] == ["a.csv.gz", "b.jsonl", "c.parquet"]
    with pytest.raises(DataFileError, match=r"contains no data files .*\.arrow$"):
        expand([str(tmp_path / "more.jsonl")])
    (tmp_path / "more.jsonl" / "README.md").write_bytes(b"")
    with pytest.raises(DataFileError, match=r"contains no data files"):
        expand([str(tmp_path / "more.jsonl")])


def test_a_document_is_one_example(tmp_path: Path) -> None:
    """In a folder only without other data; its README only if it is named itself; an empty one is none."""
    for name, text in {"b.txt": "One.\n\nTwo.\n", "a.md": "# Three\n", "c.txt": " \n", "README.md": "About"}.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    spec = edit(RunSpec(), {"train.stage": "pretraining", "data.source": "files", "data.files": (".",)})
    paths = expand(spec.data.files, tmp_path)
    assert [path.name for path in paths] == ["a.md", "b.txt", "c.txt"]
    examples = [example for path in paths for example in read_examples(path)]
    assert examples == [(0, {"text": "# Three\n"}), (0, {"text": "One.\n\nTwo.\n"})]
    found = inspect_data_files(spec, tmp_path)
    assert (found["format"], found["num_examples"], found["data_issues"]) == ("text", 2, ())
    assert [path.name for path in expand(["README.md"], tmp_path)] == ["README.md"]
    assert [path.name for path in expand(["*.md"], tmp_path)] == ["a.md"]
    (tmp_path / "d.jsonl").write_text('{"text": "Four"}\n', encoding="utf-8")
    assert [path.name for path in expand(["."], tmp_path)] == ["d.jsonl"]


def test_thousands_of_documents_are_counted_without_reading_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The form waits for the inspection."""
    monkeypatch.setattr(data_files, "MAX_SECONDS", -1)
    for number in range(400):
        (tmp_path / f"{number}.txt").write_text("ü" * number, encoding="utf-8")
    spec = edit(RunSpec(), {"train.stage": "pretraining", "data.source": "files", "data.files": ("*.txt",)})
    found = inspect_data_files(spec, tmp_path)
    assert (found["num_examples"], found["counts_are_exact"], found["all_checked"]) == (399, False, False)
    assert found["num_checked"] == 1


def test_a_document_has_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "MAX_LINE", 8)
    (tmp_path / "a.txt").write_text("12345678", encoding="utf-8")
    (tmp_path / "b.txt").write_text("123456789", encoding="utf-8")
    assert [example for _, example in read_examples(tmp_path / "a.txt")] == [{"text": "12345678"}]
    with pytest.raises(DataFileError, match=r"b\.txt: is too long: .*; split it into several files"):
        list(read_examples(tmp_path / "b.txt"))


def test_the_examples_of_a_compressed_file_are_estimated(tmp_path: Path) -> None:
    """Its size is that of the compressed text; a compressed .json file is left to the other process."""
    rows = [{"prompt": f"When does train {n} leave?", "completion": "At nine. " * 20} for n in range(3)]
    for name in ("a.jsonl.gz", "a.json.gz"):
        write(tmp_path, name, rows)
    spec = edit(RunSpec(), {"data.source": "files", "data.files": ("a.jsonl.gz",)})
    found = inspect_data_files(spec, tmp_path)
    assert (found["num_examples"], found["counts_are_exact"], found["data_issues"]) == (3, True, ())
    found = inspect_data_files(edit(spec, {"data.files": ("a.json.gz",)}), tmp_path)
    assert not found["counts_are_exact"] and not found["data_issues"]


def test_the_header_of_a_csv_file_says_what_separates_its_columns(tmp_path: Path) -> None:
    """Excel writes semicolons in many countries."""
    for separator in ",;\t":
        for name in ("a.csv", "a.csv.gz"):
            text = f'\ufeffq{separator}a\r\n"x{separator} y"{separator}"1,5; z"\r\n'.encode()
            (tmp_path / name).write_bytes(gzip.compress(text) if name.endswith("gz") else text)
            assert list(read_examples(tmp_path / name)) == [(2, {"q": f"x{separator} y", "a": "1,5; z"})]
    (tmp_path / "quoted.csv").write_text('"question, please";answer\nx;y\n')
    assert list(read_examples(tmp_path / "quoted.csv")) == [(2, {"question, please": "x", "answer": "y"})]
    (tmp_path / "alone.csv").write_text('"a;b"\nx\n')
    assert list(read_examples(tmp_path / "alone.csv")) == [(2, {"a;b": "x"})]
    (tmp_path / "one.csv").write_text("text\na; b\n")
    assert list(read_examples(tmp_path / "one.csv")) == [(2, {"text": "a; b"})]


def test_an_error_of_a_whole_file_skips_no_example(tmp_path: Path) -> None:
    """Skipping would change nothing, so it is not offered."""
    files = {"a.tsv": "q,a\nx,y\n", "b.csv": "q,q\nx,y\n", "c.csv": 'q,a\n"x,y\n', "d.json": "[{]"}
    words = ("separated by commas, but tabs are expected", "two columns q", "not valid CSV", "not valid JSON")
    for (name, text), expected in zip(files.items(), words, strict=True):
        (tmp_path / name).write_text(text)
        spec = edit(RunSpec(), {"data.source": "files", "data.files": (name,)})
        (issue,) = inspect_data_files(spec, tmp_path)["data_issues"]
        assert expected in issue.message and not issue.is_example
    (tmp_path / "e.jsonl").write_text("{]\n")
    (issue,) = inspect_data_files(edit(spec, {"data.files": ("e.jsonl",)}), tmp_path)["data_issues"]
    assert issue.is_example


@pytest.mark.parametrize("on_bad_example", ["stop", "skip"])
def test_broken_lines_are_counted_as_far_as_the_time_allows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on_bad_example: str
) -> None:
    options = {"data.source": "files", "data.files": ("a.jsonl",), "data.on_bad_example": on_bad_example}
    spec, row = edit(RunSpec(), options), json.dumps({"prompt": "p", "completion": "c"})
    (tmp_path / "a.jsonl").write_text("\n".join(["{]", row, *["[1"] * 4, row]) + "\n")
    found, skips = inspect_data_files(spec, tmp_path), on_bad_example == "skip"
    assert (found["num_invalid"], found["num_skipped"]) == ((0, 5) if skips else (5, 0))
    assert (found["num_examples"], found["all_checked"]) == (2 if skips else 7, True)
    places = [issue.location for issue in found["data_issues"]] or [each.split(":")[0] for each in found["skipped"]]
    assert [place.partition(", ")[2] for place in places] == ["line 1", "line 3", "line 4"]
    monkeypatch.setattr("backend.inspect.data_files.MAX_SECONDS", 0.0)
    (tmp_path / "a.jsonl").write_text("{]\n" * 1000)
    found = inspect_data_files(spec, tmp_path)
    assert (found["num_invalid"] + found["num_skipped"], found["all_checked"]) == (50, False)


def test_a_folder_that_datasets_has_saved(tmp_path: Path) -> None:
    """It may also have what `map` and `filter` have computed of the examples."""
    for name in ("dataset_info.json", "dataset_infos.json", "state.json", "cache-0123456789abcdef.arrow"):
        (tmp_path / name).write_text("{}")
    path = write(tmp_path, "stream.arrow", ROWS)
    assert expand([str(tmp_path)]) == expand([str(tmp_path / "*.arrow")]) == [path]


def test_one_file_with_several_names_is_read_once(tmp_path: Path) -> None:
    path = write(tmp_path, "a.jsonl", ROWS)
    (tmp_path / "link.jsonl").symlink_to(path)
    names = ["a.jsonl", "./a.jsonl", str(path), str(tmp_path / "more" / ".." / "a.jsonl"), "link.jsonl", "."]
    (tmp_path / "more").mkdir()
    assert expand(names, tmp_path) == [path]


@pytest.mark.parametrize("in_server", [False, True])
@pytest.mark.parametrize("offset", [-5, 2**31 - 1])
def test_an_arrow_file_with_a_wrong_offset_is_named(tmp_path: Path, offset: int, in_server: bool) -> None:
    """Arrow would read at that place in memory."""
    table = pyarrow.table({"text": ["abcdefgh", "ijkl"]})
    stream = io.BytesIO()
    with ipc.new_file(stream, table.schema) as file:
        file.write_table(table)
    content = bytearray(stream.getvalue())
    at = content.find(b"".join(number.to_bytes(4, "little") for number in (0, 8, 12)))
    assert at > 0
    content[at + 4 : at + 8] = offset.to_bytes(4, "little", signed=True)
    (tmp_path / "a.arrow").write_bytes(content)
    with pytest.raises(DataFileError, match=r"is not a valid Arrow file|takes too much memory"):
        list(read_examples(tmp_path / "a.arrow", in_server=in_server))
