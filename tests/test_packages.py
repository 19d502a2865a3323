"""The packages of src/pipeline: each imports only from those above it, and no two files import each other.

Reads every import, those inside functions and under TYPE_CHECKING included: an import that runs later is an import.
"""

import ast
import json
import os
from collections import Counter
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pipeline

SOURCE = Path(pipeline.__file__).parent
PACKAGES = (  # in the order of imports: errors is above all, __main__ below all
    "errors files text languages progress stats papers config benchmarks models hub runs data merge train "
    "evaluate analyze stages tables estimate launch report commands api __main__ extras"
).split()


NODES = {  # syntax nodes of each package when its size was last decided on; one more file or feature is a decision
    "errors": 206, "files": 1_088, "text": 220, "languages": 574, "progress": 524, "stats": 4_475, "papers": 377,
    "config": 11_700, "benchmarks": 5_488, "models": 5_400, "hub": 1_746, "runs": 10_623, "data": 9_943,
    "merge": 13_589, "train": 8_415, "evaluate": 16_384, "analyze": 1_980, "stages": 7_085, "tables": 11_032,
    "estimate": 5_780, "launch": 10_037, "report": 21_310, "commands": 15_627, "api": 445, "__main__": 930,
    "extras": 8_947,
}  # fmt: skip
GROWTH = 1.05


def nodes(source: str) -> int:
    """Statements and expressions, which do not depend on how lines are broken."""
    return sum(isinstance(node, ast.stmt | ast.expr) for node in ast.walk(ast.parse(source)))


def imports(source: str, module: str) -> set[str]:
    """The modules of this package that a source text imports, as dotted names without `pipeline.`."""
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
    """Dotted name -> source text of every file of the package; a package's __init__ has the package's name."""
    names = {
        path.relative_to(SOURCE).with_suffix("").as_posix().replace("/", "."): path for path in SOURCE.rglob("*.py")
    }
    return {name.removesuffix(".__init__"): path.read_text(encoding="utf-8") for name, path in names.items()}


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
    """The files of one cycle of imports; empty where there is none. A package is not its own modules' parent here."""
    graph = {module: imports(source, module) for module, source in sources.items()}
    try:
        list(TopologicalSorter(graph).static_order())
    except CycleError as error:
        return list(error.args[1])
    return []


def test_every_file_is_in_a_package() -> None:
    assert {name.partition(".")[0] for name in modules() if name != "__init__"} <= set(PACKAGES)


def test_packages_stay_as_large_as_decided() -> None:
    """After a decision for growth, or a redesign: PIPELINE_WRITE_SIZES=1 prints the numbers for NODES."""
    sizes = Counter({name: 0 for name in PACKAGES})
    for name, source in modules().items():
        sizes[name.partition(".")[0]] += nodes(source)
    found = {name: size for name, size in sizes.items() if size > 200}
    if os.environ.get("PIPELINE_WRITE_SIZES"):
        print(found)
    grown = {name: (NODES.get(name, 0), size) for name, size in found.items() if size > GROWTH * NODES.get(name, 0)}
    assert not grown, f"package: (decided, today): {grown}"


def test_no_file_has_more_than_400_lines() -> None:
    assert [name for name, source in modules().items() if source.count("\n") > 400] == []


def test_imports_point_one_way() -> None:
    sources = {name: text for name, text in modules().items() if name != "__init__"}
    assert upward_imports(sources) == []


def test_no_cycle() -> None:
    sources = {name: text for name, text in modules().items() if name != "__init__"}
    assert cycle(sources) == []


def test_the_text_that_each_mutant_edits_is_once_in_its_file() -> None:
    """Or tests/mutants.py, which runs before releases alone, would find it gone."""
    mutants = json.loads(Path(__file__).with_name("mutants.json").read_text())["mutants"]
    assert [edit for edit in mutants if (SOURCE / edit["file"]).read_text().count(edit["old"]) != 1] == []
