"""Computed memory of scoring: the bytes of weights and rows, and how many rows fit.

Plans and the backend use the same formulas. Plans use this module, so its imports are light.
"""

from __future__ import annotations

from typing import NamedTuple

from pipeline.models.shape import Shape
from pipeline.train.memory import CONTEXT

MOST_ROWS = 512  # for eval.batch_size=null on a GPU
ROWS = 32  # for eval.batch_size=null on a CPU, and for models whose shape is unknown
COLUMNS = 128  # on CUDA the length of rows, and the columns that a step reads, are multiples
# tokens whose keys and values are read at once when rows are filled; each row reads the prefix
FILL = 2**16


class Prompts(NamedTuple):
    """The lengths, in tokens, of prompts that are computed together.

    `prefix` is the shared prefix, `question` the longest prompt after it, and `room` the longest
    answer. `room=0` means log-likelihoods, which store no keys and values.
    """

    prefix: float
    question: float
    room: float = 0


def scoring_memory(shape: Shape, size: int, prompts: Prompts, rows: int) -> dict[str, float]:
    """Return the bytes of scoring by their purpose.

    The cache stores the prefix once, and the tokens of each row. The activations are those of one
    layer: three times the MLP's width and eight times the model's width per token. Log-likelihoods
    compute all rows at once, and generation fills at most FILL tokens at once. The layer also
    copies the keys and values that it reads for each head; without a prefix, a step of generation
    reads all rows. The mask of a log-likelihood has a line for each token of a row. Logits are
    computed for one token per row.

    `size` is the number of bytes of a value.
    """
    prefix, question, room = prompts
    longest = prefix + question
    at_once = rows * longest
    mask = 5 * rows * question * longest  # as booleans, and as the numbers added to scores
    cached_tokens = 0.0
    if room:
        at_once = min(at_once, max(FILL, longest))
        cached_tokens = rows * COLUMNS * -(-(question + room) // COLUMNS)
        mask = 0
    read = max(at_once, cached_tokens) if not prefix else at_once
    token = 3 * shape.inner + 8 * shape.width
    key = 2 * shape.head_width * (shape.heads + shape.kv_heads)
    layer_tokens = max(prefix, at_once * question / longest)
    layer = (layer_tokens * token + read * key) * size
    return {
        "weights": shape.parameters * size,
        "cache": (prefix + cached_tokens) * shape.kv_values * size,
        "activations": layer + mask + 8 * rows * shape.vocabulary,
        "context": CONTEXT,
    }


def rows_that_fit(shape: Shape, size: int, prompts: Prompts, memory: float, row_limit: int) -> int:
    """Return how many rows fit in `memory` bytes, at least 1.

    Halves `row_limit` until the rows fit, as scoring does when memory runs out.
    """
    while row_limit > 1 and sum(scoring_memory(shape, size, prompts, row_limit).values()) > memory:
        row_limit //= 2
    return row_limit
