"""Reading the logs of inspect_ai: .json, or .eval, a zip of header.json, reductions.json and samples/ID_epoch_N.json.

Written for the format of inspect_ai 0.3.285, whose .eval files are compressed by Zstandard, and older ones by deflate.
"""

from __future__ import annotations

import hashlib
import json
import zipfile
import zlib
from collections.abc import Iterable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from pipeline.errors import PipelineError
from pipeline.report.load.archive import ALL_BYTES, LARGEST_BYTES
from pipeline.report.load.task_logs import (
    LoggedItem,
    TaskLog,
    as_one_sentence,
    finite_number,
    model_title,
    parse_json,
    setting_texts,
)
from pipeline.runs.run import flatten_dict

ZSTANDARD = 93  # the method in zip files
WORDS = {"C": 1.0, "P": 0.5, "I": 0.0, "N": 0.0, "yes": 1.0, "true": 1.0, "no": 0.0, "false": 0.0}
# keys of the generation config without an effect on answers
NO_SETTING = ("max_connections", "max_retries", "timeout", "attempt_timeout", "cache")


def is_inspect(content: Any) -> bool:
    """Whether JSON is what inspect_ai writes as a log."""
    return isinstance(content, dict) and {"version", "status", "eval"} <= content.keys()


def read_inspect(path: Path, content: dict[str, Any] | None = None) -> list[TaskLog]:
    """The log of one task. content: of a .json file."""
    with as_one_sentence(path, "inspect_ai"):
        try:
            return [task_log(path, unpacked(path) if content is None else content)]
        except (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError) as error:
            raise ValueError(f"{error}") from error


def unpacked(path: Path) -> dict[str, Any]:
    """The content of an .eval file, like that of a .json log."""
    with zipfile.ZipFile(path) as archive:
        members = {member.filename: member for member in archive.infolist()}
        if "header.json" not in members:
            raise PipelineError(f"{path} is the log of a run that did not finish: rerun it, or leave it out of results")

        if (size := sum(member.file_size for member in members.values())) > ALL_BYTES:
            raise ValueError(f"it unpacks to {size / 2**20:.0f} MB, more than the limit")

        def parsed(name: str) -> Any:
            return parse_json(member_bytes(archive, members[name]), path)

        samples = [parsed(name) for name in members if name.startswith("samples/") and name.endswith(".json")]
        reductions = parsed("reductions.json") if "reductions.json" in members else None
        return {**parsed("header.json"), "samples": samples, "reductions": reductions}


def member_bytes(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> bytes:
    """A member's bytes. Python's zipfile reads Zstandard from version 3.14 on."""
    if member.file_size > LARGEST_BYTES:
        raise ValueError(f"{member.filename} unpacks to {member.file_size / 2**20:.0f} MB")
    if member.compress_type != ZSTANDARD:
        return archive.read(member)
    import pyarrow as pa

    assert archive.fp is not None
    archive.fp.seek(member.header_offset + 26)  # of the local header: the lengths of name and extra field
    name, extra = (int.from_bytes(archive.fp.read(2), "little") for _ in range(2))
    archive.fp.seek(name + extra, 1)
    packed = archive.fp.read(member.compress_size)
    with pa.input_stream(pa.BufferReader(packed), compression="zstd") as stream:
        content = stream.read(member.file_size + 1)
    if len(content) != member.file_size or zlib.crc32(content) != member.CRC:
        raise ValueError(f"{member.filename} is damaged")
    return content


def task_log(path: Path, content: Mapping[str, Any]) -> TaskLog:
    spec, samples, stats = content["eval"], content.get("samples") or [], content.get("stats") or {}
    if not samples:
        raise PipelineError(f"{path} holds no samples: run inspect eval without --no-log-samples")
    epochs: dict[str, list[Mapping[str, Any]]] = {}
    for sample in sorted(samples, key=lambda sample: (str(sample["id"]).zfill(12), sample.get("epoch", 1))):
        epochs.setdefault(f"{sample['id']}", []).append(sample)
    reduced = reductions_of(content.get("reductions") or [])
    items = [logged_item(group, reduced.get(name, {})) for name, group in epochs.items()]
    scored = [item for item in items if item.values]
    problems = [] if content["status"] == "success" else [f"The run of {path.name} has status={content['status']}."]
    if len(scored) < len(items):
        problems.append(f"{len(items) - len(scored)} of {len(items)} items of {path.name} have no score.")
    return TaskLog(
        tool="inspect_ai", model=model_title(str(spec["model"])), task=str(spec["task"]), filter="none", file=path,
        started=str(spec.get("created") or ""), items=scored, scores=printed_scores(content.get("results") or {}),
        settings=setting_texts(settings_of(content)),
        versions={str(name): str(version) for name, version in (spec.get("packages") or {}).items()},
        problems=tuple(problems), seconds=elapsed(stats),
    )  # fmt: skip


def logged_item(epochs: list[Mapping[str, Any]], reduced: Mapping[str, Any]) -> LoggedItem:
    """One item: the answer is that of its first epoch. Its values are those that inspect_ai reduced over epochs, or
    else the means over them."""
    first = epochs[0]
    recorded: dict[str, list[Any]] = {}
    for sample in epochs:
        for scorer, score in (sample.get("scores") or {}).items():
            for metric, value in named_values(str(scorer), score["value"]).items():
                recorded.setdefault(metric, []).append(value)
    values = {metric: mean_or_first(numbers) for metric, numbers in recorded.items()}
    values |= {metric: value for metric, value in reduced.items() if metric in values}
    chosen = {str(scorer): plain_text(score.get("answer")) for scorer, score in (first.get("scores") or {}).items()}
    prompt = prompt_of(first)
    output, target = first.get("output") or {}, first.get("target")
    choices = output.get("choices") or [{}]
    response = output.get("completion") or plain_text((choices[0].get("message") or {}).get("content"))
    response = resolved(response, first)
    return LoggedItem(
        key=digest([str(first["id"]), input_text(first)]), values=values, prompt=prompt, prompt_hash=digest(prompt),
        target=target if isinstance(target, str) else ", ".join(map(str, target or [])), response=response,
        extracted=response, chosen={scorer: answer for scorer, answer in chosen.items() if answer},
        cut_off=choices[0].get("stop_reason") in ("max_tokens", "model_length"),
    )  # fmt: skip


def named_values(scorer: str, value: Any) -> dict[str, Any]:
    """Metric -> number, of a scorer's value; a scorer with several has a metric for each."""
    if isinstance(value, dict):
        return {f"{scorer} {key}": as_number(inner) for key, inner in value.items()}
    return {scorer: as_number(value)}


def as_number(value: Any) -> Any:
    """The number that inspect_ai's value_to_float makes of a value; anything else unchanged."""
    if isinstance(value, str):
        if value in WORDS or value.lower() in WORDS:
            return WORDS[value if value in WORDS else value.lower()]
        try:
            return float(value)
        except ValueError:
            return value
    return value


def mean_or_first(values: list[Any]) -> Any:
    numbers = [number for value in values if (number := finite_number(value)) is not None]
    return sum(numbers) / len(numbers) if len(numbers) == len(values) else values[0]


def reductions_of(reductions: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Item id -> metric -> its value over epochs, of the first reducer of each scorer."""
    reduced: dict[str, dict[str, Any]] = {}
    for reduction in reductions:
        for sample in reduction["samples"]:
            for metric, value in named_values(str(reduction["scorer"]), sample["value"]).items():
                reduced.setdefault(str(sample["sample_id"]), {}).setdefault(metric, value)
    return reduced


def printed_scores(results: Mapping[str, Any]) -> dict[str, float]:
    """Metric -> the mean that inspect_ai printed, if it printed one."""
    printed: dict[str, float] = {}
    for score in results.get("scores") or []:
        name = score["scorer"] if score["name"] == score["scorer"] else f"{score['scorer']} {score['name']}"
        for metric in ("accuracy", "mean"):
            number = finite_number((score["metrics"].get(metric) or {}).get("value"))
            if number is not None:
                printed.setdefault(name, number)
    return printed


def prompt_of(sample: Mapping[str, Any]) -> str:
    """The messages before the first one that the model generated."""
    shown = []
    for message in sample.get("messages") or []:
        if message.get("role") == "assistant" and message.get("source") in (None, "generate"):
            break
        shown.append(f"{message.get('role')}: {resolved(plain_text(message.get('content')), sample)}")
    return "\n\n".join(shown) or input_text(sample)


def input_text(sample: Mapping[str, Any]) -> str:
    """The item itself, before solvers add to it."""
    value = sample["input"]
    if isinstance(value, str):
        return resolved(value, sample)
    return "\n\n".join(f"{part.get('role')}: {resolved(plain_text(part.get('content')), sample)}" for part in value)


def plain_text(content: Any) -> str:
    """The text of a message; parts that are no text, such as images, by their type in brackets."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        return json.dumps(content, ensure_ascii=False)
    return "\n".join(
        part if isinstance(part, str) else str(part.get("text") or f"[{part.get('type')}]") for part in content
    )


def resolved(text: str, sample: Mapping[str, Any]) -> str:
    """The text itself where the log refers to one of its attachments."""
    name = text.removeprefix("attachment://")
    return str((sample.get("attachments") or {}).get(name, text)) if name != text else text


def digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, ensure_ascii=False).encode(errors="replace")).hexdigest()


def elapsed(stats: Mapping[str, Any]) -> float | None:
    """Seconds of the whole command."""
    try:
        begun, ended = (datetime.fromisoformat(stats[key]) for key in ("started_at", "completed_at"))
        return max(0.0, (ended - begun).total_seconds())
    except (KeyError, TypeError, ValueError):
        return None


def settings_of(content: Mapping[str, Any]) -> dict[str, Any]:
    """What may differ between two runs of a task, by dotted names: of the task, its solvers, generation, versions."""
    spec, plan = content["eval"], content.get("plan") or {}
    generation = {**(spec.get("model_generate_config") or {}), **(plan.get("config") or {})}
    config, dataset = spec.get("config") or {}, spec.get("dataset") or {}
    settings: dict[str, Any] = {"version of the task": spec.get("task_version")}
    settings |= {f"task_args.{key}": value for key, value in flatten_dict(spec.get("task_args") or {}).items()}
    settings |= {f"generation.{key}": value for key, value in flatten_dict(generation).items() if key not in NO_SETTING}
    settings |= {key: config.get(key) for key in ("epochs", "epochs_reducer", "limit", "message_limit", "token_limit")}
    settings |= {f"dataset.{key}": dataset.get(key) for key in ("name", "location", "shuffled")}
    settings["solvers"] = [[step.get("solver"), step.get("params")] for step in plan.get("steps") or []]
    settings["scorers"] = [[scorer.get("name"), scorer.get("options")] for scorer in spec.get("scorers") or []]
    return settings | dict(spec.get("packages") or {})
