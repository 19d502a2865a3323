"""Memory of scoring by arithmetic: bytes of weights and of the rows that are computed together, and
how many rows fit.

Plans and the backend reckon by the same formulas. Nothing heavy is imported.
"""

from __future__ import annotations

from typing import NamedTuple

from pipeline.models.shape import Shape
from pipeline.train.memory import CONTEXT

MOST_ROWS = 512  # of eval.batch_size=null on a GPU
ROWS = 32  # of eval.batch_size=null on a CPU, and of models of which no shape is known
COLUMNS = 128  # on CUDA rows have, and steps read, a multiple of these
FILL = (
    2**16
    # tokens whose keys and values are read at once when rows are filled, those of the prefix by
    # each row
)


class Prompts(NamedTuple):
    """Tokens of what is computed together: the shared prefix, the longest prompt after it, and the
    longest answer; 0: likelihoods, which leave no keys and values behind.
    """

    prefix: float
    question: float
    room: float = 0


def scoring_memory(shape: Shape, size: int, prompts: Prompts, rows: int) -> dict[str, float]:
    """What for -> bytes, of numbers of `size` bytes.

    Weights; keys and values of the prefix, once, and of the rows; and the widest layer of a forward
    pass, of all rows or, where answers are generated, of those that are filled at once (FILL). It
    holds three times the MLP's width a token and eight times its own, and copies for each head the
    keys and values that are read, of a step's rows where no prefix is read apart. The mask of a
    likelihood's row is a line for each token. Logits are of a token a row.
    """
    prefix, question, room = prompts
    longest = prefix + question
    cached_tokens = rows * COLUMNS * -(-(question + room) // COLUMNS) if room else 0
    if room:
        at_once = min(rows * longest, max(FILL, longest))
    else:
        at_once = rows * longest
    if prefix:
        read = at_once
    else:
        read = max(at_once, cached_tokens)
    token, key = (
        3 * shape.inner + 8 * shape.width,
        2 * shape.head_width * (shape.heads + shape.kv_heads),
    )
    layer = (max(prefix, at_once * question / longest) * token + read * key) * size
    mask = (
        0 if room else 5 * rows * question * longest
    )  # of booleans, and as they are added to scores
    return {
        "weights": shape.parameters * size,
        "cache": (prefix + cached_tokens) * shape.kv_values * size,
        "activations": layer + mask + 8 * rows * shape.vocabulary,
        "context": CONTEXT,
    }


def rows_that_fit(shape: Shape, size: int, prompts: Prompts, memory: float, row_limit: int) -> int:
    """Rows whose memory these bytes hold, of `row_limit`, its half and so on, as scoring halves
    them where memory runs out; 1 at the least.
    """
    while row_limit > 1 and sum(scoring_memory(shape, size, prompts, row_limit).values()) > memory:
        row_limit //= 2
    return row_limit
