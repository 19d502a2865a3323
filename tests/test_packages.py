"""The packages of src/pipeline.

Each imports only from those above it, and no two files import each other.

Reads every import, those inside functions and under TYPE_CHECKING included: an import that runs
later is an import.
"""

import ast
import json
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pipeline

SOURCE = Path(pipeline.__file__).parent
PACKAGES = (  # in the order of imports: errors is above all, __main__ below all
    "errors limits sandbox files text languages progress stats papers config benchmarks models hub"
    " runs data merge train evaluate analyze stages tables estimate launch report commands api"
    " __main__ extras"
).split()


def imports(source: str, module: str) -> set[str]:
    """Return the modules of this package that a source imports, without `pipeline.`."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{module}: imports are absolute here"
            found |= {node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)}
    ours = {name.removeprefix("pipeline.") for name in found if name.startswith("pipeline.")}
    return {name for name in ours if is_module(name)} - {module}


def is_module(name: str) -> bool:
    path = SOURCE.joinpath(*name.split("."))
    return path.with_suffix(".py").is_file() or (path / "__init__.py").is_file()


def modules() -> dict[str, str]:
    """Return dotted name -> source text of every file of the package.

    A package's __init__ has the package's name.
    """
    names = {
        path.relative_to(SOURCE).with_suffix("").as_posix().replace("/", "."): path
        for path in SOURCE.rglob("*.py")
    }
    return {
        name.removesuffix(".__init__"): path.read_text(encoding="utf-8")
        for name, path in names.items()
    }


def upward_imports(sources: dict[str, str]) -> list[str]:
    """`file -> file` for each import from a package that is not above the importing one."""
    found = []
    for module, source in sources.items():
        for other in imports(source, module):
            here, there = (PACKAGES.index(name.partition(".")[0]) for name in (module, other))
            if there > here:
                found.append(f"{module} -> {other}")
    return sorted(found)


def cycle(sources: dict[str, str]) -> list[str]:
    """Return the files of one cycle of imports, or an empty list.

    A package is not its own modules' parent here.
    """
    graph = {module: imports(source, module) for module, source in sources.items()}
    try:
        list(TopologicalSorter(graph).static_order())
    except CycleError as error:
        return list(error.args[1])
    return []


def test_every_file_is_in_a_package() -> None:
    assert {name.partition(".")[0] for name in modules() if name != "__init__"} <= set(PACKAGES)


def test_no_file_has_more_than_600_lines() -> None:
    assert [name for name, source in modules().items() if source.count("\n") > 600] == []


def test_imports_point_one_way() -> None:
    sources = {name: text for name, text in modules().items() if name != "__init__"}
    assert upward_imports(sources) == []


def test_no_cycle() -> None:
    sources = {name: text for name, text in modules().items() if name != "__init__"}
    assert cycle(sources) == []


def test_the_text_that_each_mutant_edits_is_once_in_its_file() -> None:
    """Or tests/mutants.py, which runs before releases alone, would find it gone."""
    mutants = json.loads(Path(__file__).with_name("mutants.json").read_text())["mutants"]
    assert [
        edit for edit in mutants if (SOURCE / edit["file"]).read_text().count(edit["old"]) != 1
    ] == []
