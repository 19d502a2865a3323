#!/usr/bin/env python
"""Train the base model of the small world, in about 20 CPU minutes.

    python scripts/small_world/base.py                         # the shipped base, in
                                                               # src/pipeline/data/sandbox_base
    python scripts/small_world/base.py --seed 1 --folder DIR   # another world and base

A small Llama is trained on documents from scripts/small_world/text.py. Muon trains the matrices of
the layers, AdamW the other parameters. In the loss, completions have the full weight and prompts a
small one.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import random
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "scripts"))

from small_world.files import POOL, World, card_text  # noqa: E402
from small_world.text import KINDS, make_document  # noqa: E402
from small_world.tokenizer import make_tokenizer  # noqa: E402
from small_world.world import (  # noqa: E402
    ConstructedWorld,
    draw_problem,
    draw_reading,
    draw_sentences,
)

SHIPPED = ROOT / "src/pipeline/data/sandbox_base"
ARCHITECTURE = {
    "hidden_size": 96,
    "intermediate_size": 256,
    "num_hidden_layers": 8,
    "num_attention_heads": 6,
    "num_key_value_heads": 6,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
}
# Standard deviations of the initial weights
EMBEDDING_SPREAD, MATRIX_SPREAD = 0.3, 0.06
BOS, EOS, PAD = 1, 2, 3


@dataclass(frozen=True)
class Recipe:
    """The settings of the training."""

    steps: int = 2600
    batch_size: int = 64  # documents
    learning_rate: float = 3e-3
    embedding_rate: float = 4e-3
    warmup_steps: int = 20
    decay_share: float = 0.4  # The learning rate decays in this share of the steps, at the end.
    prompt_weight: float = 0.15  # weight of prompt tokens in the loss
    sorted_batches: int = 32  # This many batches are drawn together and sorted by length.


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=0, help="of the world and of the first weights")
    parser.add_argument("--folder", type=Path, default=SHIPPED)
    parser.add_argument("--steps", type=int, default=Recipe.steps)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    recipe = Recipe(steps=asked.steps)
    model = first_model(asked.seed)
    log = train(model, base_documents(asked.seed), recipe)
    save(model, asked.folder, asked.seed, recipe, log)


# --- the data ---


def world_without_benchmarks(seed: int) -> ConstructedWorld:
    """Return the world, which from now on draws no item of a benchmark."""
    world = ConstructedWorld(seed)
    makers = {"problem": draw_problem, "reading": draw_reading, "sentences": draw_sentences}
    for kind, make in makers.items():
        for split in ("exemplars", "dev", "test"):
            world.hold_out(kind, split, POOL, make)
    return world


def base_documents(seed: int) -> Iterator[tuple[str, str]]:
    """Yield documents of the base's text without end."""
    world = world_without_benchmarks(seed)
    draw = random.Random(f"{seed} base")
    kinds, shares = list(KINDS), list(KINDS.values())
    while True:
        language, kind = draw.choices(kinds, shares)[0]
        yield make_document(world, kind, language, draw)


def batches(
    documents: Iterator[tuple[str, str]], recipe: Recipe
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the tokens of documents of similar length, and the weight of each token in the loss."""
    tokenizer = make_tokenizer()
    draw = random.Random(0)
    while True:
        rows = []
        for _ in range(recipe.batch_size * recipe.sorted_batches):
            prompt, completion = next(documents)
            start = []
            if prompt:
                start = tokenizer(prompt, add_special_tokens=False)["input_ids"]
                completion = f" {completion}"
            end = tokenizer(completion, add_special_tokens=False)["input_ids"]
            rows.append(([BOS, *start, *end, EOS], 1 + len(start)))
        rows.sort(key=lambda row: len(row[0]))
        firsts = list(range(0, len(rows), recipe.batch_size))
        draw.shuffle(firsts)
        for first in firsts:
            batch = rows[first : first + recipe.batch_size]
            yield padded(batch, recipe.prompt_weight)


def padded(rows: list[tuple[list[int], int]], prompt_weight: float) -> tuple[Tensor, Tensor]:
    longest = max(len(tokens) for tokens, _ in rows)
    ids = torch.full((len(rows), longest), PAD)
    weights = torch.zeros(len(rows), longest)
    for index, (tokens, prompt) in enumerate(rows):
        ids[index, : len(tokens)] = torch.tensor(tokens)
        weights[index, : len(tokens)] = 1.0
        weights[index, :prompt] = prompt_weight
    return ids, weights


# --- the training ---


def first_model(seed: int) -> Any:
    """Return a Llama with random weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    vocabulary = len(make_tokenizer())
    special = {"bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": PAD}
    config = LlamaConfig(vocab_size=vocabulary, use_cache=False, **special, **ARCHITECTURE)
    model = LlamaForCausalLM(config)
    for name, weight in model.named_parameters():
        if "embed_tokens" in name:
            nn.init.normal_(weight, std=EMBEDDING_SPREAD)
        elif weight.dim() == 2:
            nn.init.normal_(weight, std=MATRIX_SPREAD)
    return model


class Muon:
    """Muon in float32: momentum whose singular values are set to about 1.

    Matrices of one shape are batched.
    """

    def __init__(self, matrices: list[nn.Parameter], momentum: float = 0.95) -> None:
        self.momentum = momentum
        self.groups: dict[tuple[int, ...], list[nn.Parameter]] = {}
        for matrix in matrices:
            self.groups.setdefault(tuple(matrix.shape), []).append(matrix)
        self.averages = {
            shape: torch.zeros(len(group), *shape) for shape, group in self.groups.items()
        }

    @torch.no_grad()
    def step(self, learning_rate: float) -> None:
        for shape, group in self.groups.items():
            gradients = torch.stack([matrix.grad for matrix in group])
            average = self.averages[shape].mul_(self.momentum).add_(gradients)
            changes = orthogonal(gradients + self.momentum * average)
            # With this scale, a change is as large as AdamW's.
            scale = 0.2 * math.sqrt(max(shape))
            for matrix, change in zip(group, changes, strict=True):
                matrix.sub_(change, alpha=learning_rate * scale)


def orthogonal(matrices: Tensor) -> Tensor:
    """Set the singular values of a batch of matrices to about 1, by Newton-Schulz iteration."""
    found = matrices / (matrices.norm(dim=(1, 2), keepdim=True) + 1e-7)
    is_tall = found.shape[1] > found.shape[2]
    if is_tall:
        found = found.transpose(1, 2)
    for _ in range(5):
        square = found @ found.transpose(1, 2)
        found = 3.4445 * found + (2.0315 * (square @ square) - 4.775 * square) @ found
    if is_tall:
        return found.transpose(1, 2)
    return found


def weighted_loss(model: Any, ids: Tensor, weights: Tensor) -> Tensor:
    scores = model(ids[:, :-1]).logits.flatten(0, 1)
    targets = ids[:, 1:].flatten()
    losses = nn.functional.cross_entropy(scores, targets, reduction="none")
    counted = weights[:, 1:].flatten()
    return (losses * counted).sum() / counted.sum()


def train(
    model: Any, documents: Iterator[tuple[str, str]], recipe: Recipe
) -> list[dict[str, float]]:
    """Train the model, and return the loss every hundred steps."""
    matrices, embeddings, others = [], [], []
    for name, weight in model.named_parameters():
        if "embed_tokens" in name:
            embeddings.append(weight)
        elif weight.dim() == 1 or "lm_head" in name:
            others.append(weight)
        else:
            matrices.append(weight)
    groups = [
        {"params": others, "lr": recipe.learning_rate, "highest": recipe.learning_rate},
        {"params": embeddings, "lr": recipe.embedding_rate, "highest": recipe.embedding_rate},
    ]
    adamw = torch.optim.AdamW(groups, betas=(0.9, 0.98), weight_decay=0.0)
    muon = Muon(matrices)
    source = batches(documents, recipe)
    log, tokens, mean = [], 0, 0.0
    for step in range(recipe.steps):
        left = (recipe.steps - step) / (recipe.decay_share * recipe.steps)
        share = min(1.0, (step + 1) / recipe.warmup_steps, left)
        ids, weights = next(source)
        loss = weighted_loss(model, ids, weights)
        model.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in adamw.param_groups:
            group["lr"] = share * group["highest"]
        adamw.step()
        muon.step(share * recipe.learning_rate)
        tokens += int((weights > 0).sum())
        if step == 0:
            mean = loss.item()
        else:
            mean = 0.98 * mean + 0.02 * loss.item()
        if step % 100 == 0 or step == recipe.steps - 1:
            line = {
                "step": step,
                "loss": round(mean, 4),
                "tokens": tokens,
                "cpu_seconds": round(time.process_time()),
            }
            log.append(line)
            print(json.dumps(line), flush=True)
    return log


# --- the folder ---


def save(model: Any, folder: Path, seed: int, recipe: Recipe, log: list[dict[str, float]]) -> None:
    """Write the model as a finished run: weights, tokenizer, data card, log and manifest."""
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    (folder / "data_card.md").write_text(card_text(World(seed=seed), {}), encoding="utf-8")
    languages = list(ConstructedWorld(seed).words)
    record = {"seed": seed, "languages": languages, "holds": "training sets and items"}
    (folder / "world.json").write_text(json.dumps(record) + "\n", encoding="utf-8")
    lines = "".join(json.dumps(line) + "\n" for line in log)
    (folder / "log.jsonl").write_text(lines, encoding="utf-8")
    write_manifest(folder, seed, recipe, log[-1])


def write_manifest(folder: Path, seed: int, recipe: Recipe, last: dict[str, float]) -> None:
    """Write the manifest that makes the folder a finished run of stage=cpt."""
    from pipeline.files import fingerprints
    from pipeline.models.checkpoint import digest_tensors, weights_root
    from pipeline.runs.manifest import Manifest
    from pipeline.runs.provenance import machine_facts, package_versions
    from pipeline.runs.unchanged import known_by_tensors

    digests = digest_tensors(folder)
    config = {"stage": "cpt", "seed": seed, "recipe": asdict(recipe), "architecture": ARCHITECTURE}
    decided_by = {"stage": "cpt", "version": 1, "config": config, "parents": {}}
    settings = json.dumps(decided_by, sort_keys=True).encode()
    run_hash = hashlib.sha256(settings).hexdigest()
    weights = {"root": weights_root(digests), "digests": digests}
    files = fingerprints(folder, known_by_tensors(folder, digests))
    now = datetime.now(UTC).isoformat(timespec="seconds")
    manifest = Manifest(
        name=f"sandbox_base-cpt-s{seed}-{run_hash[:12]}",
        hash=run_hash,
        decided_by=decided_by,
        facts={"weights": weights, **last},
        config=config,
        files=files,
        versions=package_versions(),
        machine=machine_facts(),
        started=now,
        cost={"seconds": last["cpu_seconds"]},
    )
    manifest.write(folder)


if __name__ == "__main__":
    main()
