"""Random files, numbers, adapters and command lines against what is known of them: how many were read right, refused
in one sentence, or read wrong. A wrong one is printed with the seed that makes it again.

    python tests/fuzz_inputs.py [--seed 0] [--count 200] [--kinds csv json numbers adapters commands] [--out FILE]

csv, json: tables of random cells, written by rules of their own here, some damaged (a cell more or less, an open
quotation mark, half a line). numbers: a number in a random spelling, in a sentence. adapters: a random LoraConfig,
saved by PEFT, against PEFT's reloaded and merged model. commands: random words of a command line, for the exit status
and whether a traceback is printed.
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

from pipeline.config import conf
from pipeline.config.data import Source
from pipeline.data.load import read_source
from pipeline.errors import PipelineError
from pipeline.evaluate.metrics import last_number
from pipeline.progress import quiet

CORRECT, REFUSED, WRONG = "correct", "refused", "wrong"
LETTERS = "aZ09 .,;\t\"'\r|{}%#é\u0301ß中\u200b\u2028😀NA-"
WORDS = ("NA", "None", "null", "nan", "True", "007", "3.10", "1e3", "-0", "1,000", "  x", "x  ", "#", "\\N", "")


def cell(draw: random.Random) -> str:
    return draw.choice(WORDS) if draw.random() < 0.4 else "".join(draw.choices(LETTERS, k=draw.randint(1, 12)))


def rows_read(file: Path, stream: bool) -> list[Any] | None:
    """(q, a) of each row, None for one that is left out; None alone where the file is refused."""
    source = Source(file=file.name, rows="template", prompt="{q}", completion="{a}", stream=stream)
    try:
        found = list(read_source("own", source, file.parent))
    except PipelineError as error:
        assert "\n" not in str(error), "a refusal is one sentence"
        return None
    return [(one["prompt"], one["completion"]) if isinstance(one, dict) else None for one in found]


def known(rows: list[tuple[str, str]]) -> list[Any]:
    return [row if all(one.strip() for one in row) else None for row in rows]


def csv(draw: random.Random, folder: Path) -> str:
    separator = draw.choice(",\t")
    rows = [(cell(draw), cell(draw)) for _ in range(draw.randint(1, 8))]
    end = draw.choice(("\n", "\r\n"))

    def quoted(text: str) -> str:
        must = any(mark in text for mark in (separator, '"', "\n", "\r")) or draw.random() < 0.2
        return '"' + text.replace('"', '""') + '"' if must else text

    lines = [separator.join(map(quoted, row)) for row in (("q", "a"), *rows)]
    damaged = draw.random() < 0.3
    if damaged:
        at = draw.randrange(1, len(lines))
        lines[at] = draw.choice((lines[at] + separator + "z", separator.join(["z"] * 3), '"' + rows[at - 1][0]))
    text = end.join(lines) + draw.choice(("", end, end + end))
    raw = draw.choice((b"", "\ufeff".encode())) + text.encode()
    compressed = draw.random() < 0.3
    file = folder / f"a.{'csv' if separator == ',' else 'tsv'}{'.gz' if compressed else ''}"
    file.write_bytes(gzip.compress(raw) if compressed else raw)
    stream = draw.random() < 0.5
    found = rows_read(file, stream)
    if found is None:
        return REFUSED if damaged else WRONG
    return CORRECT if not damaged and sorted(map(str, found)) == sorted(map(str, known(rows))) else WRONG


def json_lines(draw: random.Random, folder: Path) -> str:
    kinds: list[Callable[[], tuple[str, str | None]]] = [
        lambda: (text := cell(draw), text) and (json.dumps(text, ensure_ascii=draw.random() < 0.5), text),
        lambda: (number := f"{draw.randint(0, 9)}.{draw.randint(0, 99):02}", number),
        lambda: (number := str(draw.randint(-9, 10**20)), number),
        lambda: ("null", None),
    ]
    values = [draw.choice(kinds)() for _ in range(draw.randint(1, 8))]
    lines = [f'{{"q": "{n}", "a": {written}}}' for n, (written, _) in enumerate(values)]
    damaged = draw.random() < 0.3
    if damaged:
        at = draw.randrange(len(lines))
        lines[at] = draw.choice((lines[at][:-2], "[1]", "text", lines[at] + ","))
    listed = draw.random() < 0.3
    text = "[" + ",\n".join(lines) + "]" if listed else draw.choice(("\n", "\n\n")).join(lines)
    name = "a.json" if listed else draw.choice(("a.jsonl", "a.jsonl.gz", "a.json"))
    raw = draw.choice((b"", "\ufeff".encode())) + text.encode()
    (folder / name).write_bytes(gzip.compress(raw) if name.endswith("gz") else raw)
    found = rows_read(folder / name, stream=False)
    if found is None:
        return REFUSED if damaged else WRONG
    expected = [(str(n), value) if value and value.strip() else None for n, (_, value) in enumerate(values)]
    return CORRECT if not damaged and found == expected else WRONG


def numbers(draw: random.Random, _: Path) -> str:
    whole = draw.choice((draw.randint(0, 99), draw.randint(100, 99_999), draw.randint(10**5, 10**12)))
    spellings = [
        str(whole),
        f"{whole:,}",
        f"{whole:,}".replace(",", "."),
        f"{whole:,}".replace(",", " "),
        f"${whole:,}",
    ]
    spellings += [f"{whole}.0", f"{whole}.50", f"{whole:,}.5", f"{whole}e0", f"{whole}e3"]
    meant = [Fraction(whole)] * 6 + [Fraction(whole) + Fraction(1, 2)] * 2 + [Fraction(whole), Fraction(whole * 1000)]
    groups = [(part, mark) for part, mark in ((whole // 10**8, "億"), (whole // 10**4 % 10**4, "万")) if part]
    rest = whole % 10**4
    spellings.append("".join(f"{part}{mark}" for part, mark in groups) + (str(rest) if rest or not groups else ""))
    meant.append(Fraction(whole))
    at = draw.randrange(len(spellings))
    digits = draw.choice(("0123456789", "０１２３４５６７８９", "٠١٢٣٤٥٦٧٨٩", "০১২৩৪৫৬৭৮৯"))
    written = spellings[at].translate(str.maketrans("0123456789", digits))
    found = last_number(
        draw.choice(("{}", "答えは{}円です。", "First 7, then {}.", "**{}**", "= {} km")).format(written)
    )
    if found is None:
        return REFUSED
    if found != meant[at]:
        print(f"  {written} is {meant[at]}, read as {found}", file=sys.stderr)
    return CORRECT if found == meant[at] else WRONG


def adapters(draw: random.Random, folder: Path) -> str:
    import torch
    from peft import LoraConfig, PeftModel, get_peft_model
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

    from pipeline.merge.adapters import open_source
    from pipeline.models.arrays import matrix

    torch.manual_seed(draw.randrange(2**31))
    LlamaForCausalLM(LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, attention_bias=draw.random() < 0.5, tie_word_embeddings=draw.random() < 0.3,
    )).save_pretrained(folder / "base")  # fmt: skip
    modules = ["q_proj", "v_proj", "o_proj", "up_proj", "down_proj", "lm_head", "embed_tokens"]
    settings: dict[str, Any] = {
        "r": draw.randint(1, 5), "lora_alpha": draw.randint(1, 9), "use_rslora": draw.random() < 0.3,
        "target_modules": draw.sample(modules, draw.randint(1, 4)), "bias": draw.choice(("none", "all", "lora_only")),
    }  # fmt: skip
    more = [
        {}, {}, {"modules_to_save": ["norm"]}, {"modules_to_save": ["embed_tokens"]}, {"use_dora": True},
        {"lora_bias": True}, {"init_lora_weights": draw.choice(["pissa", "olora", "gaussian", "orthogonal"])},
        {"alora_invocation_tokens": [1]}, {"layers_to_transform": [1]}, {"trainable_token_indices": [3]},
        {"rank_pattern": {"q_proj": 2}}, {"alpha_pattern": {"layers.1.*": 3}}, {"ensure_weight_tying": True},
    ]  # fmt: skip
    try:
        model = AutoModelForCausalLM.from_pretrained(folder / "base")
        wrapped = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **settings | draw.choice(more)))
        for parameter in wrapped.parameters():
            if parameter.requires_grad:
                parameter.data.add_(torch.randn_like(parameter), alpha=0.1)
        wrapped.save_pretrained(folder / "adapter")
        base = AutoModelForCausalLM.from_pretrained(folder / "base")
        merged = PeftModel.from_pretrained(base, folder / "adapter").merge_and_unload()
    except (ValueError, RuntimeError, NotImplementedError, KeyError, TypeError, AttributeError):
        return "impossible in PEFT"
    try:
        source = open_source(folder / "adapter")
    except PipelineError as error:
        return REFUSED if "\n" not in str(error) else WRONG
    expected = merged.state_dict()
    for name in source.names:
        shape = source.info(name).shape
        found = torch.from_numpy(source.rows(name, 0, matrix(shape)[0]).reshape(shape))
        if not torch.allclose(found, expected[name], rtol=0, atol=1e-5):
            return WRONG
    return CORRECT


def commands(draw: random.Random, folder: Path) -> str:
    stages = ["data", "sft", "cpt", "merge", "eval", "sweep", "plan", "table", "report", "export", "status", "show"]
    groups = {name: conf.options(name) for name in conf.groups()}
    values = ["1", "-1", "null", "true", "x", "", "[", "[1,2]", "{a: 1}", "${a}", "0.5", "../x", "é", "a b", "1e400"]
    keys = [*groups, "seed", "runs_dir.x", "eval.limit", "sft.steps", "merge.experts", "languages", "run", "=", "+new"]
    words = [f"stage={draw.choice(stages)}"] if draw.random() < 0.9 else []
    for _ in range(draw.randint(0, 4)):
        key = draw.choice(keys)
        words.append(f"{key}={draw.choice([*groups.get(key, []), *values])}")
    words += draw.choices(
        [[], ["--cfg=job"], ["--resolve"], ["--help"], ["-h"], ["--what"], ["=1"]], [9, 3, 1, 1, 1, 1, 1]
    )[0]
    if not any(word.startswith(("stage=plan", "stage=status", "--")) for word in words):
        words.append("--cfg=job")  # nothing is made
    told = subprocess.run(
        [sys.executable, "-m", "pipeline", *words], capture_output=True, text=True, cwd=folder, timeout=120, check=False
    )
    if "Traceback" in told.stderr or told.returncode not in (0, 1, 2):
        print(f"  {words}: {told.stderr.strip().splitlines()[-1:]}", file=sys.stderr)
        return WRONG
    return CORRECT if told.returncode == 0 else REFUSED


KINDS: dict[str, Callable[[random.Random, Path], str]] = {
    "csv": csv, "json": json_lines, "numbers": numbers, "adapters": adapters, "commands": commands,
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=KINDS)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    quiet()
    record = {}
    for kind in asked.kinds:
        found: Counter[str] = Counter()
        for number in range(asked.count):
            with tempfile.TemporaryDirectory() as folder:
                draw = random.Random(f"{kind} {asked.seed} {number}")
                verdict = KINDS[kind](draw, Path(folder))
            found[verdict] += 1
            if verdict == WRONG:
                print(f"wrong: {kind}, seed {asked.seed}, number {number}", file=sys.stderr)
        record[kind] = {"tried": asked.count, CORRECT: 0, REFUSED: 0, WRONG: 0, **found}
        print(kind, record[kind])
    if asked.out:
        asked.out.write_text(json.dumps({"seed": asked.seed, "kinds": record}, indent=1) + "\n")


if __name__ == "__main__":
    main()
