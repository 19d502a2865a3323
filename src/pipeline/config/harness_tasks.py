"""The names of tasks, groups and tags of the harness and of eval.include_path.

They are found without importing the harness.
"""

from __future__ import annotations

import re
from collections import ChainMap
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from pipeline.config import conf
from pipeline.config.knob import Tree, Words
from pipeline.config.task_yaml import (
    MOST_BYTES,
    TaskFile,
    load_plain,
    local_rows,
    read_task,
    shipped_folder,
)
from pipeline.errors import PipelineError
from pipeline.progress import warn

WORD = r"[^\s\"'#]"
# each part begins with what the part before cannot contain, so that a search takes linear time
NAMED = {
    key: re.compile(
        rf"^[\"']?{key}[\"']?[ \t]*:[ \t]*[\"']?"
        rf"({WORD}+(?:[^\S\n]+{WORD}+)*)[^\S\n]*(?:[\"'][^\S\n]*)?(?:#.*)?$",
        re.MULTILINE,
    )
    for key in ("task", "group")
}
SHOTS = re.compile(r"(.+)_(\d+)shot")
TASKS, INCLUDED = "eval.tasks", "eval.include_path"
OF_ENTRIES = {
    "task",
    "task_alias",
    "group",
    "group_alias",
}  # keys of a group's entry that change no score
OF_GROUPS = {
    *OF_ENTRIES,
    "aggregate_metric_list",
    "metadata",
}  # keys of a group that is defined inside another group
MOST_LETTERS = 150
NAME = re.compile(rf"(?!\.)[\w .+()&,-]{{1,{MOST_LETTERS}}}")  # name of a user-defined task


Function = TypeVar("Function", bound=Callable[..., Any])
Index = dict[str, Path]  # task or group -> its YAML file
_included: dict[Path, Index] = {}  # folder of eval.include_path -> its tasks and groups
_remembered: list[Any] = []


def remembered(function: Function) -> Function:
    """Cache the results of a function until eval.include_path adds tasks."""
    cached: Any = cache(function)
    _remembered.append(cached)
    return cached  # type: ignore[no-any-return]


def index(folder: Path) -> Index:
    """Return the tasks and groups in the YAML files below a folder.

    Python classes are not included. The harness' 14,000 files take a second. If several files
    define a name, the first one counts, as in the harness.
    """
    result: Index = {}
    for file in sorted(folder.rglob("*.yaml"), key=str):
        if not file.is_file() or file.parent.name == ".ipynb_checkpoints":
            continue
        if file.stat().st_size > MOST_BYTES:
            continue
        text = file.read_text(encoding="utf-8-sig", errors="replace")
        if "\nclass:" in text:
            continue
        name = NAMED["group"].search(text) or NAMED["task"].search(text)
        if name and result.setdefault(name[1], file) != file:
            warn(f"{file} is not read, because {result[name[1]]} defines {name[1]} too")
    return result


@cache
def shipped() -> Index:
    return index(shipped_folder())


def include(folder: str) -> None:
    """Register the tasks of eval.include_path=FOLDER.

    Raises:
        PipelineError: the folder does not exist, has no task, or has a task with a taken name.
    """
    path = Path(folder).resolve()
    if not path.is_dir():
        raise PipelineError(
            f"eval.include_path={folder} is not a folder. Name the folder with your task files"
            " (*.yaml)."
        )
    if path in _included:
        return
    own_index = index(path)
    if not own_index:
        for file in sorted(path.rglob("*.yaml")):
            load_plain(file)  # or raises an error that says what is wrong
        raise PipelineError(
            f"eval.include_path={folder} has no task. Name a folder of YAML files with task: NAME."
        )
    for name, file in own_index.items():
        if not NAME.fullmatch(name):
            raise PipelineError(
                f"{file}: {name[:60]!r} cannot name a task, because files are named after it. Use"
                f" up to {MOST_LETTERS} letters, digits, spaces and -_.+()&,"
            )
        scored_by_option = [task["task"] for task in tasks_of_option(name)]
        if name in harness_index() or (scored_by_option and name not in scored_by_option):
            raise PipelineError(f"{file}: the name {name} exists already. Rename the task.")
    _included[path] = own_index
    forget_names()


def forget_files() -> None:
    """Read the files of options and tasks again, for another command of this process.

    They may have changed, and another eval.include_path may have tasks of the same names.
    """
    conf.forget_options()
    _included.clear()
    forget_names()


def forget_names() -> None:
    for function in _remembered:
        function.cache_clear()


def included_folder(task: str) -> Path | None:
    """Return the folder of eval.include_path that defines a task or group, or None."""
    return next((path for path, part in _included.items() if task in part), None)


def files_of_task(name: str) -> tuple[Path, ...]:
    """Return the files in eval.include_path that decide the scores of a task or group.

    These are the task files with their included files, their rows, and the Python of the folder if
    a task runs some.
    """
    folder = included_folder(name)
    assert folder
    files: set[Path] = set()
    for part in (name, *members(name)):
        task_file = file_of(part)
        for path, body in task_file.own:
            files.add(path)
            files.update(local_rows(body))
        if task_file.python:
            files.update(folder.rglob("*.py"))
    resolved = {file.resolve() for file in files}
    return tuple(sorted(file for file in resolved if folder in file.parents))


@remembered
def harness_index() -> Index:
    """Return all known tasks and groups, of the installed harness and of eval.include_path."""
    return dict(ChainMap(*_included.values(), shipped()))


@remembered
def file_of(name: str) -> TaskFile:
    """Return the file of a task or group, which is read once in a command.

    Raises:
        PipelineError: it cannot be read, or YAML reads another name in it than `index` found.
    """
    file = harness_index()[name]
    task_file = read_task(file)
    if name not in (task_file.body.get("group"), task_file.body.get("task")):
        raise PipelineError(f"{file} has more names than {name}. Write task: NAME once.")
    return task_file


def is_group(name: str) -> bool:
    return "group" in file_of(name).body


@remembered
def members(name: str) -> tuple[str, ...]:
    """Return the tasks of a group in its order; for a task, only the task.

    Groups and tags within the group are expanded.

    Raises:
        PipelineError: a group redefines its tasks, or has no task, an unknown one or itself.
    """
    if not is_group(name):
        return (name,)
    listed = file_of(name).body.get("task") or []
    try:
        parts = dict.fromkeys(tasks_within(name, listed, harness_index()[name].parent))
    except RecursionError:
        raise PipelineError(f"The group {name} is a part of itself. Take it out.") from None
    if not parts:
        raise PipelineError(f"The group {name} has no tasks. Leave it out.")
    return tuple(parts)


def tasks_within(group: str, listed: str | list[Any], folder: Path) -> Iterator[str]:
    """Yield the tasks that a group lists, with the tasks of groups defined inside it.

    `folder` is the folder of the group's file.
    """
    harness = harness_index()
    for item in [listed] if isinstance(listed, str) else listed:
        entry = {"task": item} if isinstance(item, str) else item
        part = entry.get("group") or entry.get("task") or "an entry without a name"
        is_inside = "group" in entry and part not in harness
        own_keys = entry.keys() - (OF_GROUPS if is_inside else OF_ENTRIES)
        if own_keys:
            raise PipelineError(
                f"The group {group} sets {', '.join(sorted(own_keys))} of {part} in its own file."
                " Write that as a task file to a folder, eval.include_path=FOLDER, or list the"
                " other tasks in eval.tasks=[...]."
            )
        if is_inside:
            members_inside = tuple(tasks_within(group, entry.get("task") or [], folder))
        elif part in harness:
            members_inside = members(part)
        else:
            members_inside = tuple(tagged(part, folder))
        if not members_inside:
            raise PipelineError(
                f"The group {group} has an unknown task {part}. List the others in eval.tasks."
            )
        yield from members_inside


@remembered
def tags_below(folder: Path) -> dict[str, list[str]]:
    """Return tag -> tasks in a folder and below it."""
    by_tag: dict[str, list[str]] = {}
    for name, file in harness_index().items():
        if folder not in file.parents:
            continue
        body = read_task(file).body
        tags = body.get("tag") or []
        if "group" in body:
            continue
        for tag in [tags] if isinstance(tags, str) else tags:
            by_tag.setdefault(tag, []).append(name)
    return by_tag


def tagged(tag: str, nearest: Path) -> list[str]:
    """Return the tasks with a tag.

    Most tags belong to one folder, so the tasks below `nearest` have priority. Otherwise all files
    are searched, which takes two seconds.
    """
    for folder in (nearest, *_included, shipped_folder()):
        tasks = tags_below(folder).get(tag)
        if tasks:
            return tasks
    return []


def spell_out_tasks(settings: Words, options: list[str]) -> Tree:
    """Return overrides in which tasks and groups of the harness replace options of eval=.

    A task may be named as an option (eval=arc_easy, eval=arc_easy_5shot) or in
    eval.tasks=[arc_easy, ...], where options and records are allowed too. An option may have
    another number of exemplars (eval=mgsm_3shot). Without a number, a task has the exemplars of its
    file, or none.

    `options` are the options of eval=.
    """
    spelled = dict(settings)
    folder = settings.get(INCLUDED, settings.get(f"every.{INCLUDED}"))
    if isinstance(folder, str) and folder:
        include(folder)
    if TASKS in settings and "eval" not in settings:
        spelled |= {"eval": "mgsm_0shot", "eval.name": "tasks"}
    name = spelled.get("eval")
    if isinstance(name, str) and name not in options:
        near = option_of_other_shots(name, options)
        if near:
            of_option = [
                {**task, "num_fewshot": split_shots(name)[1]} for task in tasks_of_option(near)
            ]
            spelled |= {"eval": near, "eval.name": name, TASKS: of_option}
        elif task := named_task(name):
            spelled |= {
                "eval": "mgsm_0shot",
                "eval.name": f"{task['task']}_{task['num_fewshot']}shot",
                TASKS: [task],
            }
    tasks = spelled.get(TASKS)
    if isinstance(tasks, list):
        spelled[TASKS] = [
            named_task(task) or {"task": task, "num_fewshot": 0} if isinstance(task, str) else task
            for task in tasks
        ]
    return spelled


def split_shots(name: str) -> tuple[str, int | None]:
    """Split the number of exemplars off a name such as arc_easy_5shot, if it ends in one."""
    match = SHOTS.fullmatch(name)
    if match:
        return (match[1], int(match[2]))
    return (name, None)


def option_of_other_shots(name: str, options: list[str]) -> str | None:
    """Return the first option of eval= that differs from a name only in its exemplars."""
    task, shots = split_shots(name)
    if shots is None:
        return None
    of_task = re.compile(rf"{re.escape(task)}_\d+shot")
    return next(filter(of_task.fullmatch, options), None)


def tasks_of_option(option: str) -> list[Tree]:
    """Return the tasks that the file of an option of eval= lists, if there is such a file.

    Entries of another type are left out. They are refused when the option is chosen.
    """
    if conf.option_file("eval", option) is None:
        return []
    listed = conf.option("eval", option).get("eval", {}).get("tasks") or []
    return [task for task in listed if isinstance(task, dict) and "task" in task]


def task_of_option(option: str) -> str:
    """Return the task that an option of eval= scores.

    Its file lists the task. Otherwise it is the option's name without the number of exemplars:
    arc_easy for arc_easy_5shot.
    """
    tasks = tasks_of_option(option)
    if len(tasks) == 1:
        return str(tasks[0]["task"])
    return split_shots(option)[0]


def named_task(name: str) -> Tree | None:
    """Return the task and the number of exemplars of arc_easy or arc_easy_5shot.

    Without a number in the name, it is the number in the task file, for a group that of its first
    task. Returns None if the harness has no such task.
    """
    if name in harness_index():
        body = file_of(members(name)[0]).body
        return {"task": name, "num_fewshot": int(body.get("num_fewshot") or 0)}
    task, shots = split_shots(name)
    if task in harness_index():
        return {"task": task, "num_fewshot": shots}
    return None
