"""A reader who types the commands of a page.

Its blocks, and a shell small enough to run them in this process.
"""

import re
import runpy
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from fixture_types import Call

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), ROOT / "slurm/README.md"]
BLOCK = re.compile(r"^ *```(\w+)?(?: ([^\n]+))?\n(.*?)^ *```$", re.DOTALL | re.MULTILINE)
ASSIGNED = re.compile(r"([A-Z_]+)=\$\((.*)\)", re.DOTALL)
PATTERN = re.compile(r"[\[\]*?]")  # what zsh expands where it is not quoted


@dataclass(frozen=True)
class Block:
    """A fenced block.

    Its language, what stands behind that (a file's name, or `plan`), and its text.
    """

    language: str
    info: str
    text: str


def blocks(page: Path) -> list[Block]:
    found = BLOCK.findall(page.read_text(encoding="utf-8"))
    indent = re.compile(
        r"^ {3}(?=\S)|^ {3}(?= +\S)", re.MULTILINE
    )  # of a block inside a numbered list
    return [
        Block(a, b, text if not text.startswith("   ") else indent.sub("", text))
        for a, b, text in found
    ]


def commands(block: Block) -> list[str]:
    """Return the commands of a bash block, with continued lines joined and without comments."""
    lines = block.text.replace("\\\n", " ").splitlines()
    plain = (line.partition(" #")[0].strip() for line in lines if not line.startswith("#"))
    return [line for line in plain if line]


def write_files(page: Path, folder: Path) -> None:
    """Write the files that a page shows to the places that it names."""
    for block in blocks(page):
        if "." in block.info:
            (folder / block.info).parent.mkdir(parents=True, exist_ok=True)
            (folder / block.info).write_text(block.text, encoding="utf-8")


@dataclass
class Shell:
    """Variables, and commands in this process: `call` is the command line.

    A command that fails, fails the test.
    """

    call: Call
    variables: dict[str, str] = field(default_factory=dict)

    def run(self, command: str) -> str:
        """Its standard output. NAME=$(command) keeps it in a variable, as in bash."""
        assigned = ASSIGNED.fullmatch(command)
        inner = assigned[2] if assigned else command
        program, *words = words_of(inner, self.variables)
        assert program == "python", f"not a command of this program: {command}"
        if words[:2] == ["-m", "pipeline"]:
            told = self.call(*words[2:])
            assert told.status == 0, f"{command}\n{told.err}"
            printed = told.out.strip()
        else:
            runpy.run_path(words[0], run_name="__main__")
            printed = ""
        if assigned:
            assert printed and "\n" not in printed, f"{command}\nprinted {printed!r}"
            self.variables[assigned[1]] = printed
        return printed


def words_of(command: str, variables: dict[str, str]) -> list[str]:
    """Return a command's words as bash and zsh both give them.

    Undefined variables and unquoted patterns are errors.
    """
    plain = re.sub(r"'[^']*'|\"[^\"]*\"", "", command)
    assert not PATTERN.search(plain), f"unquoted brackets, which zsh refuses: {command}"

    def value(found: re.Match[str]) -> str:
        assert found[1] in variables, f"${found[1]} is not defined before: {command}"
        return variables[found[1]]

    parts = re.split(r"('[^']*')", command)
    double = [
        (
            re.sub(r"\$([A-Z_]+)", value, part)
            if not part.startswith("'") or inside(parts, place)
            else part
        )
        for place, part in enumerate(parts)
    ]
    return shlex.split("".join(double))


def inside(parts: list[str], place: int) -> bool:
    """Whether a single-quoted part stands inside double quotes, where variables are expanded."""
    return "".join(parts[:place]).count('"') % 2 == 1


def planned(command: str) -> Iterator[list[str]]:
    """Return the words of a command that is only planned; with -m those of each job."""
    words = shlex.split(command)
    while re.fullmatch(r"[A-Z_]+=\S*", words[0]):
        words.pop(0)
    if words[0] == "sbatch":
        script, *words = [word for word in words[1:] if not word.startswith("--")]
        assert (ROOT / script).is_file(), script
        yield words
        return
    assert words[:3] == ["python", "-m", "pipeline"], command
    words = words[3:]
    if words[0] == "-m":
        from pipeline.config.overrides import sweep_jobs

        yield from sweep_jobs(words[1:])
    else:
        yield words
