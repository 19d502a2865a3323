"""Memory of scoring by arithmetic: bytes of weights and of the rows that are computed together, and how many rows fit.

Plans and the backend reckon by the same formulas. Nothing heavy is imported.
"""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.models.shape import Shape
from pipeline.train.memory import CONTEXT

MOST_ROWS = 512  # of eval.batch_size=null on a GPU
ROWS = 32  # of eval.batch_size=null on a CPU, and of models of which no shape is known
FILL = 2**16  # tokens whose keys and values are read at once when rows are filled, those of the prefix by each row


@dataclass(frozen=True)
class Prompts:
    """Tokens of what is computed together: the shared prefix, the longest prompt after it, and the longest answer; 0:
    likelihoods, which leave no keys and values behind."""

    prefix: float
    question: float
    room: float = 0


def scoring_memory(shape: Shape, size: int, prompts: Prompts, rows: int) -> dict[str, float]:
    """What for -> bytes, of numbers of `size` bytes.

    Weights; keys and values of the prefix, once, and of the rows; and the widest layer of a forward pass, of all rows
    or, where answers are generated, of those that are filled at once (FILL), or of a step. A layer holds three times
    the MLP's width a token and eight times its own, and copies keys and values for each head of those that are read:
    of a step's rows where no prefix is read apart. The mask of a likelihood's row is a line for each token.
    """
    key = 2 * shape.head_width * (shape.heads + shape.kv_heads)
    longest = prompts.prefix + prompts.question
    held = rows * (prompts.question + prompts.room)
    read = min(rows * longest, max(FILL, longest)) if prompts.room else rows * longest
    computed = max(prompts.prefix, read * prompts.question / longest)
    layer = (computed * (3 * shape.inner + 8 * shape.width) + read * key) * size
    if not prompts.room:
        layer += 5 * rows * prompts.question * longest  # of booleans, and as they are added to scores
    elif not prompts.prefix:
        layer = max(layer, held * key * size)
    return {
        "weights": shape.parameters * size,
        "cache": (prompts.prefix + held * bool(prompts.room)) * shape.kv_values * size,
        "activations": layer, "context": CONTEXT,
    }  # fmt: skip


def rows_that_fit(shape: Shape, size: int, prompts: Prompts, memory: float, most: int) -> int:
    """Rows whose memory these bytes hold, of `most`, its half and so on, as scoring halves them where memory runs out;
    1 at the least."""
    while most > 1 and sum(scoring_memory(shape, size, prompts, most).values()) > memory:
        most //= 2
    return most
