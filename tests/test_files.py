"""Digests that are kept between processes: what they save, and when they must not be believed."""

import hashlib
import io
import itertools
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from pipeline import files
from pipeline.benchmarks.local_files import lines_of
from pipeline.data.lines import read_objects
from pipeline.errors import PipelineError
from pipeline.files import (
    FileState,
    cache_digests,
    cached_digests,
    content_hash,
    read_yaml,
    readable_yaml,
    write_atomically,
)
from pipeline.models.checkpoint import read_json
from pipeline.tables.table_yaml import parsed_yaml


@pytest.fixture
def settled(monkeypatch):
    """Files count as settled at once; no digest is known in this process."""
    monkeypatch.setattr(files, "SETTLED_NS", 0)
    monkeypatch.setattr(files, "_digests_of", {})


def written(path, data):
    path.write_bytes(data)
    time.sleep(0.02)  # beyond the tick of the file system's clock
    return path


def entries(runs_dir):
    return sorted((runs_dir / ".digests").glob("*"))


def cached_sha256(file, runs_dir):
    """As a caller of the cache: the digest in runs_dir, else that of the file, which is read."""
    state, begun = FileState.now(file), time.time_ns()
    if "sha256" not in cached_digests(state, runs_dir):
        cache_digests(state, begun, runs_dir, sha256=files.sha256(file))
    return cached_digests(state, runs_dir)["sha256"]


def test_the_content_of_a_folder_is_names_and_sha256(tmp_path):
    paths = [written(tmp_path / name, name.encode() * 9) for name in ("b.json", "a.safetensors")]
    lines = "".join(
        f"{path.name} {hashlib.sha256(path.read_bytes()).hexdigest()}\n" for path in sorted(paths)
    )
    for _ in range(2):
        assert content_hash(paths, tmp_path) == hashlib.sha256(lines.encode()).hexdigest()
    twice = lines + lines.splitlines(keepends=True)[-1]
    assert content_hash([*paths, paths[0]], tmp_path) == hashlib.sha256(twice.encode()).hexdigest()


def test_a_file_is_read_once_for_all_processes(tmp_path, settled, monkeypatch):
    file = written(tmp_path / "x", b"one")
    expected = hashlib.sha256(b"one").hexdigest()
    assert cached_sha256(file, tmp_path / "runs") == expected
    monkeypatch.setattr(files, "_digests_of", {})  # as another process
    monkeypatch.setattr(files, "sha256", lambda path: pytest.fail(f"{path} was read"))
    assert cached_sha256(file, tmp_path / "runs") == expected
    monkeypatch.setattr(files, "_digests_of", {})
    with pytest.raises(pytest.fail.Exception, match="was read"):
        cached_sha256(file, tmp_path / "other")


@pytest.mark.parametrize(
    "way", ["longer", "same size", "time set back", "another file in its place"]
)
def test_a_file_that_changed_is_read_again(tmp_path, settled, monkeypatch, way):
    file = written(tmp_path / "x", b"one")
    cached_sha256(file, tmp_path / "runs")
    before = file.stat()
    if way == "another file in its place":
        os.replace(written(tmp_path / "y", b"two"), file)
    else:
        written(file, b"longer" if way == "longer" else b"two")
    if way != "longer":
        os.utime(
            file,
            ns=(before.st_atime_ns, before.st_mtime_ns if way != "same size" else time.time_ns()),
        )
    monkeypatch.setattr(files, "_digests_of", {})
    assert cached_sha256(file, tmp_path / "runs") == hashlib.sha256(file.read_bytes()).hexdigest()


def test_a_file_touched_a_moment_ago_is_not_kept(tmp_path, monkeypatch):
    """It may change once more within one tick of its clock, and would look the same.

    Git's racily clean.
    """
    file, runs_dir = written(tmp_path / "x", b"one"), tmp_path / "runs"
    cached_sha256(file, runs_dir)
    assert not entries(runs_dir)
    future = time.time_ns() + 10**12  # a clock elsewhere that is ahead
    os.utime(file, ns=(future, future))
    cached_sha256(file, runs_dir)
    assert not entries(runs_dir)
    cache_digests(FileState.now(file), time.time_ns() + 2 * 10**12, runs_dir, sha256="later")
    assert len(entries(runs_dir)) == 1


def test_a_file_that_changes_while_it_is_read_is_refused(tmp_path, settled, monkeypatch):
    file = written(tmp_path / "x", b"one")
    monkeypatch.setattr(files, "sha256", lambda path: written(path, b"other").name)
    with pytest.raises(
        PipelineError, match="x changed while it was read. Wait until it is complete"
    ):
        cached_sha256(file, tmp_path / "runs")
    assert not entries(tmp_path / "runs")


REWRITER = """
import json, sys
from pathlib import Path
from pipeline.files import write_atomically
for number in range(300):
    write_atomically(Path(sys.argv[1]), json.dumps([sys.argv[2]] * (1 + number % 7 * 3000)))
"""


def test_two_writers_and_a_reader(tmp_path):
    """Each text that is read is one writer's whole text; no writer fails on the other's rename.

    Nothing is left.
    """
    file, read = tmp_path / "table.json", []
    writers = [subprocess.Popen([sys.executable, "-c", REWRITER, str(file), mark]) for mark in "ab"]
    while any(writer.poll() is None for writer in writers):
        if file.is_file():
            (mark,) = set(json.loads(file.read_text()))
            read.append(mark)
    assert [writer.returncode for writer in writers] == [0, 0] and set(read) == {"a", "b"}
    assert list(tmp_path.iterdir()) == [file]


def test_a_write_that_fails_leaves_the_file_as_it_was_and_nothing_else(tmp_path):
    file = tmp_path / "x.json"
    write_atomically(file, "one")
    with pytest.raises(UnicodeEncodeError):
        write_atomically(file, "two \ud800")
    assert file.read_text() == "one" and list(tmp_path.iterdir()) == [file]


@pytest.mark.parametrize(
    ("text", "line", "problem"),
    [
        ("a: 1\nb: [1, 2\nc: 3\n", 2, "expected ',' or ']'"),
        ("a: 1\nb: it is: so\n", 2, "mapping values are not allowed"),
        ("a:\n\tb: 1\n", 2, "cannot start any token"),
        ("a: 1\nb: *home\n", 2, "undefined alias"),
    ],
)
@pytest.mark.parametrize("loader", [yaml.SafeLoader, getattr(yaml, "CSafeLoader", yaml.SafeLoader)])
def test_a_mistake_in_yaml_is_its_line_and_a_remedy(text, line, problem, loader):
    with pytest.raises(PipelineError) as caught, readable_yaml("mine.yaml"):
        yaml.load(text, loader)
    message = str(caught.value)
    assert message.startswith(f"mine.yaml, line {line}: invalid YAML (") and problem in message
    assert "Indent with spaces, write each key once" in message


BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{letter}: &{letter} [{', '.join([f'*{before}'] * 9)}]\n"
    for before, letter in itertools.pairwise("abcdefghi")
)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (BOMB, "aliases repeat its content too often"),
        ("a: &a {b: *a}\n", "aliases repeat its content too often"),
        ("a: " + "[" * 5000 + "]" * 5000, "maximum recursion depth"),
        (
            "a: !!python/object/apply:os.system [touch CODE_RAN]\n",
            "could not determine a constructor",
        ),
    ],
)
def test_yaml_that_explodes_or_runs_is_refused(text, why, tmp_path):
    (tmp_path / "t.yaml").write_text(text)
    for read in (read_yaml, lambda file: parsed_yaml(file.read_text(), str(file))):
        with pytest.raises(PipelineError, match=why):
            read(tmp_path / "t.yaml")
    (tmp_path / "t.yaml").write_text("a: &a [x, y]\nb: [*a, *a]\n")
    assert read_yaml(tmp_path / "t.yaml")["b"] == [["x", "y"]] * 2


def test_a_pipe_in_place_of_a_file_is_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for read in (read_yaml, lines_of, read_json):
        with pytest.raises(PipelineError, match="pipe is a named pipe. Name a regular file"):
            read(tmp_path / "pipe")


def test_a_device_in_place_of_a_file_is_refused(tmp_path):
    """/dev/zero has no end."""
    for read in (read_yaml, lines_of, read_json):
        with pytest.raises(PipelineError, match="/dev/zero is a device. Name a regular file"):
            read(Path("/dev/zero"))


def test_a_yaml_file_of_more_bytes_is_refused(tmp_path):
    (tmp_path / "t.yaml").write_text("a: 1\n" * 3)
    assert read_yaml(tmp_path / "t.yaml", most_bytes=15) == {"a": 1}
    with pytest.raises(
        PipelineError, match="t.yaml has 15 bytes, more than 14. Use a smaller file"
    ):
        read_yaml(tmp_path / "t.yaml", most_bytes=14)
    with (tmp_path / "t.yaml").open("wb") as file:
        file.truncate(20_000_001)  # takes no space
    with pytest.raises(PipelineError, match="more than 20,000,000"):
        read_yaml(tmp_path / "t.yaml")


def test_brackets_in_brackets_of_rows_are_a_sentence():
    with pytest.raises(
        PipelineError, match=r"rows.jsonl, line 1 is not JSON \(maximum recursion depth"
    ):
        list(read_objects(io.StringIO("[" * 200_000), "rows.jsonl"))


@pytest.mark.parametrize(
    "value", ["9" * 5000, "2024-99-99", "!!bool maybe", "!!int ''", "!!timestamp x"]
)
def test_a_yaml_value_that_cannot_be_read_is_a_sentence(value, tmp_path):
    (tmp_path / "t.yaml").write_text(f"a: {value}\n")
    with pytest.raises(PipelineError, match="t.yaml: invalid YAML .*in quotes"):
        read_yaml(tmp_path / "t.yaml")
