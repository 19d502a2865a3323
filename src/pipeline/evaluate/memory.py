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
    """Numbers of tokens that are computed together.

    The shared prefix, the longest prompt after it, and the longest answer. `room=0` means
    log-likelihoods, which leave no keys and values behind.
    """

    prefix: float
    question: float
    room: float = 0


def scoring_memory(shape: Shape, size: int, prompts: Prompts, rows: int) -> dict[str, float]:
    """Return the bytes of scoring by their purpose.

    The cache has the prefix once, and each row. The activations belong to the widest layer, of all
    rows, or in generation of the rows that are filled at once (FILL). This layer stores three times
    the MLP's width and eight times the model's width a token. It copies the keys and values that
    are read for each head; without a prefix, a step copies all rows. A log-likelihood's mask has a
    line for each token of a row. Logits are computed for one token a row.

    Args:
        shape: The model's shape.
        size: Bytes of a number.
        prompts: The tokens that are computed together.
        rows: The number of rows.
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
