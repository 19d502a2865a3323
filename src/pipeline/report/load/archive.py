"""A table's results in one file: configuration, manifests, scores and answers, without weights, local paths or secrets.

A zip file whose bytes depend only on the results. Its contents are untrusted: members have known names, sizes have
limits, everything is plain data, and none of it becomes an address or markup of the page.

    archive.json                {"format": 2, "results": ...}, as in report/load/contents.py, without folders
    table.yaml                  the table as requested
    conf/GROUP/NAME.yaml        the options and languages of --config-dir, without launcher and tracking
    runs/NAME/manifest.json     and scores.json, samples/*.jsonl, log.jsonl, data_card.md, delta.csv, facts.json
"""

from __future__ import annotations

import json
import re
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

from pipeline.errors import PipelineError
from pipeline.files import added_conf, replacing
from pipeline.hub.addresses import without_credentials
from pipeline.report.load.contents import Results
from pipeline.typed_json import from_json

FORMAT = 2  # increased when an older version would misread an archive
NAME = r"[\w+=@][\w.+=@-]{0,250}"
MEMBER = re.compile(
    rf"archive\.json|table\.yaml|conf/{NAME}/{NAME}\.yaml|runs/{NAME}/(manifest\.json|scores\.json|log\.jsonl|data_card\.md|delta\.csv"
    rf"|facts\.json|samples/{NAME}\.jsonl)"
)
PACKED = ("manifest.json", "scores.json", "samples/*.jsonl", "log.jsonl", "data_card.md", "delta.csv", "facts.json")
LARGEST_BYTES, ALL_BYTES, MOST_MEMBERS = 2**28, 2**33, 300_000
PRIVATE = ("environment", "runs_dir", "tracking", "launcher")  # keys of a manifest and its configuration
ABSOLUTE = re.compile(r"(?<![\w.:/-])(?:~|[A-Za-z]:)?/(?:[^\s/:,;\"'()\[\]<>|]+/)*([^\s/:,;\"'()\[\]<>|]+)")


def without_private(value: Any, roots: Sequence[str] = ()) -> Any:
    """The same structure without private data: only the last part of absolute paths, no credentials.

    roots: local folders to remove from texts, also if their names contain spaces.
    """
    if isinstance(value, Mapping):
        return {key: without_private(inner, roots) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [without_private(inner, roots) for inner in value]
    if not isinstance(value, str):
        return value
    for root in roots:
        value = value.replace(root, "…")
    return ABSOLUTE.sub(r"…/\1", str(without_credentials(value)))


# ------------------------------------------------------------------------------------------------ out


def write_archive(results: Results, table: str, file: Path, roots: Sequence[str] = ()) -> Path:
    """Write the archive. table: the text of its YAML; roots: local folders to remove from all texts."""
    with replacing(file) as partial, zipfile.ZipFile(partial, "w", zipfile.ZIP_DEFLATED) as archive:
        contents = {"format": FORMAT, "results": without_private(plain_data(results), roots)}
        add_member(archive, "archive.json", json.dumps(contents, ensure_ascii=False, indent=1))
        add_member(archive, "table.yaml", without_private(table, roots))
        for path in (path for root in added_conf() for path in sorted(root.glob("*/*.yaml"))):
            if path.parent.name not in PRIVATE:
                add_member(archive, f"conf/{path.parent.name}/{path.name}", packed_content(path, roots))
        for run in sorted(results.runs, key=lambda run: run.name):
            paths = sorted(path for pattern in PACKED for path in run.folder.glob(pattern)) if run.finished else []
            for path in paths:
                name = f"runs/{run.name}/{path.relative_to(run.folder).as_posix()}"
                if not MEMBER.fullmatch(name):
                    raise PipelineError(f"{path.name} of {run.name} cannot be packed: unexpected file name")
                add_member(archive, name, packed_content(path, roots))
    return file


def add_member(archive: zipfile.ZipFile, name: str, content: str | bytes) -> None:
    member = zipfile.ZipInfo(name)  # dated 1980: the bytes must not depend on the time
    member.compress_type, member.create_system, member.external_attr = zipfile.ZIP_DEFLATED, 3, 0o644 << 16
    archive.writestr(member, content)


def packed_content(path: Path, roots: Sequence[str]) -> str | bytes:
    """Content of a file in the archive: answers and logs unchanged, others without private data."""
    if path.suffix in (".jsonl", ".csv"):
        return path.read_bytes()
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".json":
        return str(without_private(text, roots))
    content = json.loads(text)
    if path.name == "manifest.json":
        content = {key: value for key, value in content.items() if key not in PRIVATE}
        content["config"] = {key: value for key, value in content.get("config", {}).items() if key not in PRIVATE}
    return json.dumps(without_private(content, roots), ensure_ascii=False, indent=1) + "\n"


def plain_data(value: Any) -> Any:
    """A dataclass as JSON data, without folders."""
    if is_dataclass(value):
        return {item.name: plain_data(getattr(value, item.name)) for item in fields(value) if item.name != "folder"}
    if isinstance(value, Mapping):
        return {key: plain_data(inner) for key, inner in value.items()}
    return [plain_data(inner) for inner in value] if isinstance(value, list | tuple) else value


# ------------------------------------------------------------------------------------------------ in


def is_archive(file: Path) -> bool:
    """Whether a file is a zip by its name or its first bytes, which a truncated one still has."""
    if not file.is_file():
        return False
    with open(file, "rb") as stream:
        return file.suffix == ".zip" or stream.read(4) == b"PK\x03\x04"


def read_archive(file: Path, folder: Path) -> Results:
    """The results in an archive, with its files extracted to `folder`, which is empty.

    Raises PipelineError if the archive is truncated, from a newer version, or was not written by this program.
    """
    try:
        with zipfile.ZipFile(file) as archive:
            refuse_strange(file, archive.infolist())
            contents = json.loads(archive.read("archive.json"))
            if contents["format"] > FORMAT:
                newer = f"format {contents['format']}, this one reads {FORMAT}"
                raise PipelineError(f"{file} was written by a newer version of this program ({newer}): update this one")
            plainly = of_format_1(contents["results"]) if contents["format"] == 1 else contents["results"]
            for run in plainly["runs"]:
                if not re.fullmatch(NAME, run["name"]):
                    raise ValueError("a run without a name")
                run["folder"] = str(folder / "runs" / run["name"])
            results = replace(from_json(Results, plainly), linked=False)
            for member in archive.infolist():
                target = folder / member.filename
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(archive.read(member))
    except PipelineError:
        raise
    except (zipfile.BadZipFile, zlib.error, EOFError, OSError, NotImplementedError) as error:
        raise PipelineError(f"{file} is truncated or damaged ({error}): copy it again") from error
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise PipelineError(f"{file} was not written by this program: give a file of stage=export") from error
    if not re.fullmatch(NAME, results.table):
        raise PipelineError(f"{file} contains a table without a name: give a file of stage=export")
    return results


def refuse_strange(file: Path, members: Sequence[zipfile.ZipInfo]) -> None:
    names = [member.filename for member in members]
    strange = [name for name in names if not MEMBER.fullmatch(name)]
    if strange or len(set(names)) < len(names):
        member = repr(strange[0][:80]) if strange else "a duplicate file"
        raise PipelineError(f"{file} contains {member}, which stage=export never writes")
    sizes = [member.file_size for member in members]
    if max(sizes, default=0) > LARGEST_BYTES or sum(sizes) > ALL_BYTES or len(names) > MOST_MEMBERS:
        raise PipelineError(f"{file} unpacks to {sum(sizes) / 2**20:.0f} MB, more than the limit for a table's results")


def of_format_1(old: dict[str, Any]) -> dict[str, Any]:
    """Results of an archive of format 1, whose cells were stored apart from a second table with one row per model."""
    evaluations: dict[str, list[dict[str, Any]]] = {}
    for entry in old["cells"]:
        score = {"run": entry["name"], "at": {"seed": str(entry["seed"])}}
        evaluations.setdefault(entry["name"], []).append(score)
    cells = []
    for cell in old["table_cells"]:
        scores = [evaluations[name][0] for name in cell["runs"] if name in evaluations]
        tasks = {task_in(entry["run"]) for entry in scores}
        roles = {old["roles"].get(entry["row"], "") for entry in old["cells"] if entry["name"] in cell["runs"]}
        cells.append({**cell, "scores": scores, "task": "".join(tasks) if len(tasks) == 1 else "",
                      "role": "".join(roles) if len(roles) == 1 else ""})  # fmt: skip
    return {**old, "rows": old["table_rows"], "columns": old["table_columns"], "cells": cells}


def task_in(name: str) -> str:
    """The task in the name of an evaluation: mgsm in eval-mgsm_2shot-base-1234abcd."""
    match = re.match(r"eval-(\w+?)_\d+shot-", name)
    return match[1] if match else ""
