"""A table's results in one file: its report, configuration, manifests, scores and answers, without weights, local paths
or secrets.

A zip file whose bytes depend only on the results. What is unpacked has known names and sizes with limits.

    archive.json                {"format": 3, "table": its name, "finished": number of its finished cells}
    index.html, cells.csv ...   the report, as in runs_dir/reports/TABLE
    table.yaml                  the table as requested
    conf/GROUP/NAME.yaml        the options and languages of --config-dir, without launcher and tracking
    runs/NAME/manifest.json     and scores.json, samples/*.jsonl, log.jsonl, data_card.md, delta.csv, facts.json
    SHA256SUMS                  digests of all other files, for `sha256sum -c`
"""

from __future__ import annotations

import hashlib
import json
import re
import tempfile
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path

from pipeline.errors import PipelineError
from pipeline.files import added_conf, replacing
from pipeline.report.load.contents import Results
from pipeline.report.private import without_private
from pipeline.report.write import write_report
from pipeline.tables.schema import NAME

FORMAT = 3
SUMS = "SHA256SUMS"
MEMBER = re.compile(
    rf"{SUMS}|(archive|choices)\.json|table\.yaml|index\.html|summary\.txt|answers\.parquet|cells\.md|\w+\.csv|plots/\w+\.svg"
    rf"|conf/{NAME}/{NAME}\.yaml|runs/{NAME}/(manifest\.json|scores\.json|log\.jsonl|data_card\.md|delta\.csv"
    rf"|facts\.json|samples/{NAME}\.jsonl)"
)
PACKED = ("manifest.json", "scores.json", "samples/*.jsonl", "log.jsonl", "data_card.md", "delta.csv", "facts.json")
LARGEST_BYTES, ALL_BYTES, MOST_MEMBERS = 2**28, 2**33, 300_000
PRIVATE = ("environment", "runs_dir", "tracking", "launcher")  # keys of a manifest and its configuration


def write_archive(results: Results, table: str, file: Path, roots: Sequence[str] = ()) -> Path:
    """Write the archive. table: the text of its YAML; roots: local folders to remove from all texts."""
    with (
        replacing(file) as partial, zipfile.ZipFile(partial, "w", zipfile.ZIP_DEFLATED) as archive,
        tempfile.TemporaryDirectory() as folder,
    ):  # fmt: skip
        contents = {"format": FORMAT, "table": results.table, "finished": results.finished}
        add_member(archive, "archive.json", json.dumps(contents))
        report = write_report(without_private(results, roots), Path(folder)).parent
        for path in sorted(path for path in report.rglob("*") if path.is_file()):
            add_member(archive, path.relative_to(report).as_posix(), path.read_bytes())
        add_member(archive, "table.yaml", without_private(table, roots))
        for path in (path for root in added_conf() for path in sorted(root.glob("*/*.yaml"))):
            if path.parent.name not in PRIVATE:
                add_member(archive, f"conf/{path.parent.name}/{path.name}", packed_content(path, roots))
        for run in sorted(results.runs, key=lambda run: run.name):
            paths = sorted(path for pattern in PACKED for path in run.folder.glob(pattern)) if run.finished else []
            for path in paths:
                name = f"runs/{run.name}/{path.relative_to(run.folder).as_posix()}"
                add_member(archive, name, packed_content(path, roots))
        add_member(archive, SUMS, "".join(f"{digest}  {name}\n" for name, digest in digests_of(archive).items()))
    return file


def digests_of(archive: zipfile.ZipFile) -> dict[str, str]:
    """Member -> its SHA-256, of all but SHA256SUMS itself."""
    return {name: hashlib.sha256(archive.read(name)).hexdigest() for name in archive.namelist() if name != SUMS}


def add_member(archive: zipfile.ZipFile, name: str, content: str | bytes) -> None:
    if not MEMBER.fullmatch(name):
        raise PipelineError(f"{name} cannot be packed: unexpected file name")
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


def is_archive(file: Path) -> bool:
    """Whether a file is a zip by its name or its first bytes, which a truncated one still has."""
    if not file.is_file():
        return False
    with open(file, "rb") as stream:
        return file.suffix == ".zip" or stream.read(4) == b"PK\x03\x04"


def check_archive(file: Path) -> tuple[str, int]:
    """(name of the table, number of its finished cells) of an archive that can be unpacked.

    Raises PipelineError if the archive is truncated, of another version, or was not written by this program, and if a
    member differs from SHA256SUMS or is not listed there.
    """
    try:
        with zipfile.ZipFile(file) as archive:
            refuse_strange(file, archive.infolist())
            contents = json.loads(archive.read("archive.json"))
            if contents["format"] != FORMAT:
                which = f"format {contents['format']}, this one reads {FORMAT}"
                raise PipelineError(f"{file} was written by another version of this program ({which}): export it again")
            name, finished = contents["table"], int(contents["finished"])
            if not re.fullmatch(NAME, name):
                raise ValueError(name)
            lines = (line.split("  ", 1) for line in archive.read(SUMS).decode().splitlines())
            listed = {(member, digest) for digest, member in lines}
            if changed := sorted(listed ^ set(digests_of(archive).items())):
                raise PipelineError(f"{file} was changed after it was exported ({changed[0][0]}): export it again")
            return name, finished
    except PipelineError:
        raise
    except (zipfile.BadZipFile, zlib.error, EOFError, OSError, NotImplementedError) as error:
        raise PipelineError(f"{file} is truncated or damaged ({error}): copy it again") from error
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise PipelineError(f"{file} was not written by this program: give a file of stage=export") from error


def unpack(file: Path, folder: Path) -> None:
    """Unpack a checked archive into the folder of a report, in place of what another report or archive left there."""
    with zipfile.ZipFile(file) as archive:
        archive.extractall(folder)
        members = {folder / name for name in archive.namelist()}
    for path in [*folder.rglob("*")]:
        if path not in members and MEMBER.fullmatch(path.relative_to(folder).as_posix()):
            path.unlink()


def refuse_strange(file: Path, members: Sequence[zipfile.ZipInfo]) -> None:
    names = [member.filename for member in members]
    strange = [name for name in names if not MEMBER.fullmatch(name)]
    if strange or len(set(names)) < len(names):
        member = repr(strange[0][:80]) if strange else "a duplicate file"
        raise PipelineError(f"{file} contains {member}, which stage=export never writes")
    sizes = [member.file_size for member in members]
    if max(sizes, default=0) > LARGEST_BYTES or sum(sizes) > ALL_BYTES or len(names) > MOST_MEMBERS:
        raise PipelineError(f"{file} unpacks to {sum(sizes) / 2**20:.0f} MB, more than the limit for a table's results")
