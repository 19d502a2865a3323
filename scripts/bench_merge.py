"""How long merges take beside copying the file: cp, ours and mergekit, interleaved, with imports and without.

    python scripts/bench_merge.py --folder DIR                        # 1B-shaped, about 13 GB in DIR while it runs
    python scripts/bench_merge.py --folder DIR --shape 512,1024,8,8,2,2000 --rounds 1
    python scripts/bench_merge.py --folder DIR --mergekit PYTHON      # an environment with the mergekit extra

Sources are in the page cache and stand as finished runs: their digests are on record, which also says that they are
finite. "Foreign" ones are folders that no run made, merged by the whole command: their contents are hashed once, to
name the run and for the digests of what is copied (timed by itself as well). "Again" asks for the finished
run once more, "other layers" for another merge of the same folders. Nothing is tracked. Memory is the process'
anonymous memory, sampled; pages of mapped files are the cache's. Start-up is what importing and composing take. The
record is written to --out.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import math
import os
import resource
import shutil
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

SHAPE = "2048,8192,16,32,8,128256"  # hidden, intermediate, layers, heads, key-value heads, vocabulary: Llama 3.2 1B
OURS = {  # a merge -> its settings; the sides' outside parameters are math's where nothing is to be computed
    "swap": ("layer_swap", {"bottom_layers": 3, "embeddings": "math", "final_norm": "math", "head": "math"}),
    "swap, averaged embeddings": ("layer_swap", {"bottom_layers": 3}),
    "average": ("soup", {}),
    "ties, mergekit's": ("ties", {"trim": "tensor", "weigh": "before", "divisor": "weights", "zero_sum": "plus"}),
    "ties, whole model": ("ties", {}),
}
FOREIGN = {  # what is asked of folders that no run made -> bottom layers; the first finds nothing kept
    "foreign swap": 3,
    "foreign swap, again": 3,
    "foreign swap, other layers": 4,
}
HASHING = "digests of both experts"
SHARD_BYTES = 10**9
RATIOS = {  # to the median of cp; its CPU seconds for theirs
    **{"ratio": "seconds", "whole_process_ratio": "wall"},
    **{"cpu_ratio": "cpu", "whole_process_cpu_ratio": "whole_cpu"},
}


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("--folder", type=Path, required=True)
    words.add_argument("--shape", default=SHAPE)
    words.add_argument("--rounds", type=int, default=5)
    words.add_argument("--threads", type=int)
    words.add_argument("--only", default="", help="names of merges, separated by ;; none in memory then")
    words.add_argument("--mergekit", help="a Python that has mergekit")
    words.add_argument("--mergekit_rounds", type=int, default=1, help="it takes minutes for TIES")
    words.add_argument("--out", type=Path, default=Path("results/bench/merge.json"))
    words.add_argument("--one", help=argparse.SUPPRESS)
    asked = words.parse_args()
    if asked.one:
        print(json.dumps(one(asked.one, asked.folder, asked.threads)))
        return
    make_checkpoints(asked.folder, [int(number) for number in asked.shape.split(",")])
    make_foreign(asked.folder)
    time.sleep(3)  # what was touched within two seconds is not kept
    record = measure(asked)
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    asked.out.write_text(json.dumps(record, indent=1) + "\n")
    show(record)


# ------------------------------------------------------------------------------------------------ checkpoints


def make_checkpoints(folder: Path, shape: list[int]) -> None:
    """base, and math and language 0.002 away from it: random bfloat16 in shards of 1 GB, digests in a manifest."""
    import numpy as np

    from pipeline.models.checkpoint import digest_tensors, header_bytes

    hidden, inner, layers, heads, key_heads, vocabulary = shape
    width = hidden // heads * key_heads
    shapes = {"model.embed_tokens.weight": (vocabulary, hidden), "model.norm.weight": (hidden,)}
    for layer in range(layers):
        at = f"model.layers.{layer}."
        shapes |= {f"{at}self_attn.{part}_proj.weight": (hidden, hidden) for part in "qo"}
        shapes |= {f"{at}self_attn.{part}_proj.weight": (width, hidden) for part in "kv"}
        shapes |= {f"{at}mlp.{part}_proj.weight": (inner, hidden) for part in ("gate", "up")}
        shapes |= {f"{at}mlp.down_proj.weight": (hidden, inner)}
        shapes |= {f"{at}{part}.weight": (hidden,) for part in ("input_layernorm", "post_attention_layernorm")}
    config = {
        **{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "bfloat16", "hidden_size": hidden},
        **{"intermediate_size": inner, "num_hidden_layers": layers, "num_attention_heads": heads},
        **{"num_key_value_heads": key_heads, "vocab_size": vocabulary, "tie_word_embeddings": True},
    }
    shards: list[list[str]] = [[]]
    for name, size in shapes.items():
        if sum(2 * math.prod(shapes[other]) for other in shards[-1]) + 2 * math.prod(size) > SHARD_BYTES and shards[-1]:
            shards.append([])
        shards[-1].append(name)
    for seed, role in enumerate(("base", "math", "language")):
        target = folder / role
        if (target / "manifest.json").is_file() and json.loads((target / "config.json").read_text()) == config:
            continue
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir(parents=True)
        (target / "config.json").write_text(json.dumps(config))
        tokenizer = {
            "version": "1.0",
            "added_tokens": [],
            "model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"},
        }
        (target / "tokenizer.json").write_text(json.dumps(tokenizer))
        (target / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
        index = {}
        for number, names in enumerate(shards, start=1):
            file = f"model-{number:05}-of-{len(shards):05}.safetensors"
            with open(target / file, "wb") as stream:
                stream.write(header_bytes({name: ("BF16", shapes[name]) for name in names}))
                for name in names:
                    index[name] = file
                    for begin in range(0, math.prod(shapes[name]), 2**22):
                        count = min(2**22, math.prod(shapes[name]) - begin)
                        place = [list(shapes).index(name), begin]
                        values = np.random.default_rng([9, *place]).standard_normal(count, np.float32) * np.float32(
                            0.02
                        )
                        if role != "base":
                            noise = np.random.default_rng([seed, *place]).standard_normal(count, np.float32)
                            values += noise * np.float32(0.002)
                        stream.write(((values.view(np.uint32) + 0x8000) >> 16).astype(np.uint16).data)
        total = sum(2 * math.prod(size) for size in shapes.values())
        listing = {"metadata": {"total_size": total}, "weight_map": index}
        (target / "model.safetensors.index.json").write_text(json.dumps(listing))
        begun = time.perf_counter()
        digests = digest_tensors(target)  # what hashing and checking a foreign folder costs, once
        seconds = time.perf_counter() - begun
        (target / "manifest.json").write_text(
            json.dumps(
                {
                    "name": role,
                    "hash": hashlib.sha256(role.encode()).hexdigest(),
                    "decided_by": {"stage": "sft"},
                    "facts": {"weights": {"digests": digests}, "hashing": seconds},
                    "cost": {"seconds": seconds},
                }
            )
        )


def make_foreign(folder: Path) -> None:
    """The experts once more, by hard links, without the manifests."""
    for role in ("math", "language"):
        (folder / "foreign" / role).mkdir(parents=True, exist_ok=True)
        for path in (folder / role).iterdir():
            copy = folder / "foreign" / role / path.name
            if path.name != "manifest.json" and not (copy.exists() and copy.samefile(path)):
                copy.unlink(missing_ok=True)
                copy.hardlink_to(path)


# ------------------------------------------------------------------------------------------------ one merge


def one(name: str, folder: Path, threads: int | None) -> dict[str, float]:
    """One of ours in this process: seconds of the engine alone, imports and the start of Python left out."""
    if name == "live":
        return live(folder, threads)
    if name in FOREIGN or name == HASHING:
        return foreign(name, folder, threads)
    import pipeline.merge.stage  # noqa: F401  # what importing takes is timed with the process

    begun, cpu = time.perf_counter(), time.process_time()
    merge = opened(name, folder)
    merge.write(folder / "out", recorded=known(merge), threads=threads)
    found = {"seconds": time.perf_counter() - begun, "cpu": time.process_time() - cpu}
    if "torch" in sys.modules:
        found["imported torch"] = 1.0
    return found


def foreign(name: str, folder: Path, threads: int | None) -> dict[str, float]:
    """The command on folders without manifests, from what was composed to the finished run."""
    import pipeline.merge.stage
    import pipeline.runs.resume
    import pipeline.runs.tracking  # noqa: F401  # what importing takes is timed with the process
    from pipeline.config.compose import compose
    from pipeline.launch.in_process import make_single_run as make
    from pipeline.models.identity import folder_digest

    words = ["stage=merge", "merge=layer_swap", "merge.embeddings=math", "merge.final_norm=math", "merge.head=math"]
    words += [f"merge.{side}={folder}/foreign/{side}" for side in ("math", "language")]
    words += [
        f"merge.bottom_layers={FOREIGN.get(name, 0)}",
        f"runs_dir={folder}/foreign/runs",
        "tracking.mode=disabled",
    ]
    config: Any = compose([*words, *([f"threads={threads}"] if threads else [])])
    begun, cpu = time.perf_counter(), time.process_time()
    if name == HASHING:
        for side in ("math", "language"):
            folder_digest(folder / "foreign" / side, list((folder / "foreign" / side).glob("*.safetensors")))
    else:
        make(config)
    return {"seconds": time.perf_counter() - begun, "cpu": time.process_time() - cpu}


def opened(name: str, folder: Path, **more: Any) -> Any:
    from pipeline.merge.merge import open_merge
    from pipeline.merge.methods import METHODS
    from pipeline.models.checkpoint import Checkpoint

    method, settings = OURS[name]
    sides = ("math", "language") if method == "layer_swap" else ("0", "1")
    experts = {role: Checkpoint.open(folder / where) for role, where in zip(sides, ("math", "language"), strict=True)}
    named = {"math": "m", "language": "l"} if method == "layer_swap" else {"experts": ["m", "l"]}
    base = Checkpoint.open(folder / "base") if method == "ties" else None
    return open_merge(METHODS[method](**named, **settings | more), experts, base)


def known(merge: Any) -> dict[str, dict[str, str]]:
    """As finished runs have them on record."""
    from pipeline.merge.digests import SourceDigests

    return SourceDigests(merge, merge.layout.folder).known


def live(folder: Path, threads: int | None) -> dict[str, float]:
    """From one configuration to the next on a model in memory, beside writing it and loading it again."""
    import torch
    from transformers import AutoModelForCausalLM

    from pipeline.merge.live import Live

    model = AutoModelForCausalLM.from_pretrained(folder / "math", dtype="auto")
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    held = Live(model, None)
    held.apply(opened("swap", folder), threads)
    times: dict[str, list[float]] = {"live": [], "write": [], "load": []}
    for bottom in (4, 3, 4, 3, 4):
        merge = opened("swap", folder, bottom_layers=bottom)
        begun = time.perf_counter()
        held.apply(merge, threads)
        times["live"].append(time.perf_counter() - begun)
        shutil.rmtree(folder / "out", ignore_errors=True)
        (folder / "out").mkdir()
        begun = time.perf_counter()
        merge.write(folder / "out", recorded=known(merge), threads=threads)
        times["write"].append(time.perf_counter() - begun)
        begun = time.perf_counter()
        again = AutoModelForCausalLM.from_pretrained(folder / "out", dtype="auto")
        for parameter in again.parameters():  # loading maps the file: the pages are read when they are used
            parameter.data = parameter.data.clone()
        times["load"].append(time.perf_counter() - begun)
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
        del again
    return {key: statistics.median(values) for key, values in times.items()}


MERGEKIT = """
import json, sys, time
import torch, yaml
from mergekit.config import MergeConfiguration
from mergekit.merge import run_merge
from mergekit.options import MergeOptions
config = MergeConfiguration.model_validate(yaml.safe_load(open(sys.argv[1])))
begun, cpu = time.perf_counter(), time.process_time()
run_merge(config, sys.argv[2], options=MergeOptions(quiet=True, copy_tokenizer=False))
print(json.dumps({"seconds": time.perf_counter() - begun, "cpu": time.process_time() - cpu}))
"""


def mergekit_config(name: str, folder: Path) -> dict[str, Any]:
    """The same merge in mergekit's words; bfloat16 out, arithmetic as it does it."""
    base, math_, language = (str(folder / role) for role in ("base", "math", "language"))
    layers = json.loads((folder / "base/config.json").read_text())["num_hidden_layers"]
    if name == "swap":
        cuts = [(0, 3, language), (3, layers - 2, math_), (layers - 2, layers, language)]
        slices = [{"sources": [{"model": model, "layer_range": [low, high]}]} for low, high, model in cuts]
        return {"merge_method": "passthrough", "dtype": "bfloat16", "slices": slices}
    each = [{"model": model, "parameters": {"weight": 1.0}} for model in (math_, language)]
    if name == "average":
        return {"merge_method": "linear", "dtype": "bfloat16", "models": each}
    for model in each:
        model["parameters"]["density"] = 0.2
    return {"merge_method": "ties", "base_model": base, "dtype": "float32", "out_dtype": "bfloat16", "models": each}


# ------------------------------------------------------------------------------------------------ measuring


def measure(asked: argparse.Namespace) -> dict[str, Any]:
    folder, every = asked.folder, [*OURS, HASHING, *FOREIGN]
    names = [name for name in every if not asked.only or name in asked.only.split(";")]
    runs: dict[str, list[dict[str, float]]] = {}
    for turn in range(asked.rounds):
        peer = ("swap", "average", "ties") if asked.mergekit and turn < asked.mergekit_rounds else ()
        for name in ["cp", *names, *(f"mergekit {name}" for name in peer)]:
            print(f"round {turn + 1}/{asked.rounds}: {name}", file=sys.stderr)
            shutil.rmtree(folder / "out", ignore_errors=True)
            warm(folder)
            os.sync()
            if name == "cp":
                found = timed(["cp", "-r", str(folder / "math"), str(folder / "out")])
            elif name.startswith("mergekit "):
                (folder / "merge.yaml").write_text(json.dumps(mergekit_config(name.split()[1], folder)))
                words = [asked.mergekit, "-c", MERGEKIT, str(folder / "merge.yaml"), str(folder / "out")]
                found = timed(words)
            else:
                if name == next(iter(FOREIGN)):
                    shutil.rmtree(folder / "foreign/runs", ignore_errors=True)
                (folder / "out").mkdir()
                found = timed(ours(name, folder, asked.threads))
            runs.setdefault(name, []).append(found)
    reload = None if asked.only else timed(ours("live", folder, asked.threads))
    shutil.rmtree(folder / "out", ignore_errors=True)
    shutil.rmtree(folder / "foreign/runs", ignore_errors=True)
    copy = {key: each_median(runs["cp"], key) for key in RATIOS.values()}
    hashing = {
        role: json.loads((folder / role / "manifest.json").read_text())["facts"]["hashing"] for role in ("base", "math")
    }
    return {
        "shape": asked.shape, "rounds": asked.rounds, "threads": asked.threads, "cores": os.cpu_count(),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS"), "load": os.getloadavg(), "versions": versions(),
        "bytes": sum(path.stat().st_size for path in (folder / "math").glob("*.safetensors")),
        "seconds_to_hash_and_check_a_foreign_folder": hashing,
        "cp": summary(runs["cp"]),
        "merges": {
            name: {**summary(each), **{key: each_median(each, of) / copy[of] for key, of in RATIOS.items()}}
            for name, each in runs.items() if name != "cp"
        },
        **({"live": {**reload, "times_faster": (reload["write"] + reload["load"]) / reload["live"]}} if reload else {}),
    }  # fmt: skip


def ours(name: str, folder: Path, threads: int | None) -> list[str]:
    return [
        sys.executable,
        __file__,
        "--folder",
        str(folder),
        "--one",
        name,
        *(["--threads", str(threads)] if threads else []),
    ]


def warm(folder: Path) -> None:
    for path in folder.glob("*/*.safetensors"):
        with open(path, "rb", buffering=0) as stream:
            while stream.read(2**22):
                pass


def timed(words: list[str]) -> dict[str, float]:
    """Wall and CPU seconds of a process, its peak anonymous memory, and what it says of itself."""
    before, begun = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    peak, done = [0], threading.Event()

    def sample() -> None:
        while not done.wait(0.005):
            with contextlib.suppress(OSError, IndexError):
                lines = Path(f"/proc/{process.pid}/status").read_text().split("RssAnon:")
                peak[0] = max(peak[0], int(lines[1].split()[0]) * 1024)

    watcher = threading.Thread(target=sample)
    watcher.start()
    said, _ = process.communicate()
    wall = time.perf_counter() - begun
    done.set()
    watcher.join()
    if process.returncode:
        raise SystemExit(f"{' '.join(words[:4])} failed with status {process.returncode}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    own = json.loads(said.strip().splitlines()[-1]) if said.strip() else {"seconds": wall, "cpu": used}
    return {"wall": wall, "whole_cpu": used, "peak_anonymous_bytes": peak[0], **own}


def summary(each: list[dict[str, float]]) -> dict[str, Any]:
    keys = sorted(set.intersection(*(set(run) for run in each)))
    return {key: {"median": each_median(each, key), "all": [round(run[key], 4) for run in each]} for key in keys}


def each_median(each: list[dict[str, float]], key: str) -> float:
    return statistics.median(run[key] for run in each)


def versions() -> dict[str, str]:
    from pipeline.runs.provenance import package_versions as installed

    return {key: value for key, value in installed().items() if key in ("python", "numpy", "torch", "transformers")}


def show(record: dict[str, Any]) -> None:
    print(f"{'':<28} seconds  x cp   start-up   whole process  x cp   CPU     anonymous MB")
    for name, row in {"cp": record["cp"], **record["merges"]}.items():
        values = [row[key]["median"] for key in ("seconds", "wall", "cpu", "peak_anonymous_bytes")]
        ratios = (row.get("ratio", 1.0), row.get("whole_process_ratio", 1.0))
        numbers = f"{values[0]:7.2f} {ratios[0]:6.2f} {values[1] - values[0]:10.2f} {values[1]:14.2f} {ratios[1]:6.1f}"
        numbers += f" {values[2]:7.2f}"
        print(f"{name:<28} {numbers} {values[3] / 1e6:10.0f}")
    if "live" not in record:
        return
    print("from one configuration to the next in memory: {live:.3f} s; written {write:.2f} s and loaded {load:.2f} s, "
          "{times_faster:.0f} times as long".format(**record["live"]))  # fmt: skip


if __name__ == "__main__":
    main()
