"""CSV, JSON and parquet as their files say.

Every cell as text, nothing guessed, nothing shifted, nothing skipped.
"""

import gzip
import json
from pathlib import Path
from typing import Any

import datasets
import pytest
from reading import read_source
from small_runs import writes

from pipeline.config.compose import compose
from pipeline.config.stages import DataStage
from pipeline.errors import PipelineError
from pipeline.launch.plan_file import Task
from pipeline.runs.make import make_once
from pipeline.stages.rows import build


def own(
    folder: Path, file: str, *words: str, prompt: str = "{q}", completion: str = "{a}"
) -> list[Any]:
    config = compose(
        [
            "stage=data",
            "expert=own",
            f"data_root={folder}",
            f"expert.sources.own.file={file}",
            f"expert.sources.own.prompt='{prompt}'",
            f"expert.sources.own.completion='{completion}'",
            *words,
        ]
    )
    assert isinstance(config, DataStage)
    found = list(read_source("own", config.expert.sources["own"], folder))
    return [(one["prompt"], one["completion"]) if isinstance(one, dict) else one for one in found]


@pytest.mark.parametrize("stream", ["true", "false"])
@pytest.mark.parametrize("name", ["a.csv", "a.tsv", "a.csv.gz"])
def test_every_cell_is_the_text_of_the_file(name: str, stream: str, tmp_path: Path) -> None:
    cells = [
        "5",
        "007",
        "3.10",
        "1e3",
        "NA",
        "None",
        "null",
        "nan",
        "#N/A",
        "True",
        " x ",
        "-",
        "a\rb",
        '"q", he said',
    ]
    separator = "\t" if ".tsv" in name else ","
    lines = [
        f"q{separator}a",
        *(f"{n}{separator}{quoted(cell)}" for n, cell in enumerate(cells)),
        f"blank{separator} ",
    ]
    raw = "\ufeff".encode() + "\n".join(lines).encode()
    (tmp_path / name).write_bytes(gzip.compress(raw) if name.endswith("gz") else raw)
    found = own(tmp_path, name, f"expert.sources.own.stream={stream}")
    pairs = [(str(n), cell) for n, cell in enumerate(cells)]
    assert sorted(map(str, found)) == sorted(map(str, [*pairs, "empty"]))  # a stream is shuffled


def quoted(cell: str) -> str:
    return '"' + cell.replace('"', '""') + '"' if {*'",\r'} & {*cell} else cell


def test_a_repository_of_csv_is_read_as_text_too(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data/train.csv").write_text(",q,a\n0,None,007\n1,NA,5\n2,x,\n")
    config = compose(
        [
            "stage=data",
            "expert=own",
            f"expert.sources.own.hub={tmp_path}",
            "expert.sources.own.file=x",
            "expert.sources.own.prompt='{q}'",
            "expert.sources.own.completion='{a}'",
        ]
    )
    assert isinstance(config, DataStage)
    found = [
        one if isinstance(one, str) else tuple(one.values())
        for one in read_source("own", config.expert.sources["own"], None)
    ]
    assert found == [("None", "007"), ("NA", "5"), "empty"]
    config.expert.sources["own"].split = "dev"
    with pytest.raises(
        PipelineError,
        match=r'Unknown split "dev". Should be one of \[.train.\]. Correct expert.sources.own',
    ):
        read_source("own", config.expert.sources["own"], None)
    config.expert.sources["own"].split = "train[:34%]"  # of lines, of which none is counted before
    with pytest.raises(PipelineError, match=r"Unknown split .train\[:34%\]"):
        read_source("own", config.expert.sources["own"], None)


def test_data_that_is_here_is_known_by_its_content(tmp_path: Path) -> None:
    """A copy of a repository, a file in place of an address, and a data_root.

    Another hash where a file is another, and no run under the hash of what it was planned with, in
    this process or in a worker.
    """
    file = tmp_path / "data/train.csv"
    file.parent.mkdir()
    words = [
        "stage=data",
        "expert=own",
        "data.shuffle=false",
        f"runs_dir={tmp_path}/runs",
        "tracking.mode=disabled",
        "expert.sources.own.prompt='{q}'",
        "expert.sources.own.completion='{a}'",
    ]
    places = [
        [f"expert.sources.own.hub={tmp_path}", "expert.sources.own.file=x"],
        [
            f"expert.sources.own.hub={tmp_path}",
            "expert.sources.own.file=x",
            "expert.sources.own.files=data/*.csv",
        ],
        [f"expert.sources.own.url={file}", "expert.sources.own.file=x"],
        [f"data_root={tmp_path}", "expert.sources.own.file=data/train.csv"],
    ]
    for place in places:
        file.write_text("q,a\n0,five\n1,six\n")
        config: Any = compose([*words, *place])
        planned = build(config)
        worker = Task(**json.loads(json.dumps(vars(Task.of(planned))))).run()
        assert planned.hash == build(config).hash == worker.hash
        file.write_text("q,a\n0,five\n1,ten\n")
        assert planned.hash != build(config).hash
        for run in (planned, worker):
            with pytest.raises(
                PipelineError,
                match="was changed after data-own was planned, or while it read it. Rer",
            ):
                make_once(run, writes())
        make_once(build(config), writes())


def test_a_slice_is_taken_of_a_local_parquet_file(tmp_path: Path) -> None:
    rows = datasets.Dataset.from_dict(
        {"q": [f"q{n}" for n in range(20)], "a": [f"a{n}" for n in range(20)]}
    )
    rows.to_parquet(tmp_path / "a.parquet")
    slices = {"train[:10%]": [0, 1], "train[-3:]": [17, 18, 19], "train[5:7]+train[:1]": [5, 6, 0]}
    for split, expected in slices.items():
        found = own(tmp_path, "a.parquet", f"expert.sources.own.split='{split}'")
        assert found == [(f"q{n}", f"a{n}") for n in expected]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "q,a\n1,2\n3,4,\n",
            r"a\.csv, line 3 has 3 cells, and the header has 2. Write as many cells, and quote cells",
        ),
        ("q,a\n1,2,\n3,4,\n", r"line 2 has 3 cells"),
        ('q,a\n"x\ny",2\n3\n', r"line 4 has 1 cells"),
        ("q;a\nx;y\n", r"has no column q, a. Its columns are q;a"),
        ("q,a,a\n1,2,3\n", r"a\.csv has two columns 'a'. Give each column another name"),
        ("q,a\n", r"source own .*has no rows"),
        ("\n\n", r"source own .*has no rows"),
        (
            'q,a\n1,"two\n3,4\n',
            r"line 2: unexpected end of data. Quote cells .* double the quotation marks in them",
        ),
        ('q,a\n1,"two" x\n', r"line 2: .* expected after"),
        (
            "q,a\n1,two\rthree\n",
            r"line 2: new-line character .*Quote cells that contain a carriage return",
        ),
        ("q,a\r1,2\r", r"line 1: new-line character .*Quote cells that contain a carriage return"),
        ("q a\n1 2\n", r"has no column q, a. Its columns are q a"),
    ],
)
@pytest.mark.parametrize("stream", ["true", "false"])
def test_tables_that_are_refused(text: str, expected: str, stream: str, tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(text)
    with pytest.raises(PipelineError, match=expected) as refused:
        own(tmp_path, "a.csv", f"expert.sources.own.stream={stream}")
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.json"])
def test_numbers_of_json_stay_as_written(name: str, tmp_path: Path) -> None:
    """A column may hold numbers for 12,000 rows and then text.

    A number may follow a decimal number.
    """
    values = ["5", "3.10", "1e3", "null", '"007"', "-0.0", *["7"] * 12_000, '"ten"']
    rows = [f'{{"q": "{n}", "a": {value}}}' for n, value in enumerate(values)]
    text = "[" + ",\n".join(rows) + "]" if name == "a.json" else "\ufeff" + "\n\n".join(rows) + "\n"
    (tmp_path / name).write_bytes(
        gzip.compress(text.encode()) if name.endswith("gz") else text.encode()
    )
    found = own(tmp_path, name)
    assert found[:6] == [
        ("0", "5"),
        ("1", "3.10"),
        ("2", "1e3"),
        "empty",
        ("4", "007"),
        ("5", "-0.0"),
    ]
    assert found[-1] == ("12006", "ten") and len(found) == 12_007


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.json"])
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"q": "1", "a": "2"}\n\n{"q":\n', "line 3 is not JSON"),
        ('{"q": "1", "a": "2"}\n[1]\n', "line 2 is a list"),
    ],
)
def test_lines_that_are_no_objects(name: str, text: str, expected: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(
        gzip.compress(text.encode()) if name.endswith("gz") else text.encode()
    )
    with pytest.raises(PipelineError, match=expected):
        own(tmp_path, name)


@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize("name", ["a.json", "a.jsonl", "a.json.gz"])
def test_a_list_of_rows_is_read_like_datasets_reads_it(
    name: str, indent: int | None, tmp_path: Path
) -> None:
    """On one line or over many. A column may be named data."""
    rows = [{"q": f"{n} and\n{n}?", "a": f"a{n}"} for n in range(5)]
    text = json.dumps(rows, indent=indent)
    (tmp_path / name).write_bytes(
        gzip.compress(text.encode()) if name.endswith("gz") else text.encode()
    )
    stock = datasets.load_dataset(
        "json",
        data_files=str(tmp_path / name),
        split="train",
        cache_dir=str(tmp_path / "cache"),
    )
    assert own(tmp_path, name) == [(row["q"], row["a"]) for row in stock] and len(stock) == 5
    (tmp_path / "wide.jsonl").write_text(
        "".join(json.dumps({**row, "data": [row]}) + "\n" for row in rows)
    )
    assert len(own(tmp_path, "wide.jsonl")) == 5


def test_objects_over_many_lines_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{\n "q": 1,\n "a": \n')
    with pytest.raises(PipelineError, match="a.json, line 1 is not JSON"):
        own(tmp_path, "a.json")


def test_a_blank_column_inside_a_template_empties_the_row(tmp_path: Path) -> None:
    """Template text around a blank would be trained on."""
    rows = [
        {"q": "Mji?", "a": "Nairobi"},
        {"q": " ", "a": "x"},
        {"q": None, "a": ""},
        {"q": "y", "a": "\u3000"},
    ]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = own(tmp_path, "a.jsonl", prompt="Swali: {q}", completion="Jibu: {a}")
    assert found == [("Swali: Mji?", "Jibu: Nairobi"), "empty", "empty", "empty"]
