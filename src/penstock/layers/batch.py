"""One forward pass, as the layers see it: rows of tokens, where their keys go, and what each attends to."""

from dataclasses import dataclass

from torch import Tensor

from penstock.kernels.spans import AttentionWork, WrittenPlaces


@dataclass(frozen=True)
class StateRows:
    """Rows [start, end) of the batch, successive tokens of one sequence: the state in slot `read` is that before
    them, the one after them goes into slot `write`."""

    start: int
    end: int
    read: int
    write: int
    is_prompt: bool


@dataclass(frozen=True)
class ForwardBatch:
    """Spans of tokens to run in one pass, one after the other, then padding rows.

    The last layer's queries are needed only where logits are wanted: `logit_rows` says which rows of the batch
    those are (`num_logits` of them, then padding), and `last_layer` is their work.
    """

    token_ids: Tensor  # [rows]
    positions: Tensor  # [rows]
    end_position: int  # above every position
    num_tokens: int  # rows before the padding
    places: WrittenPlaces  # where the keys and values of the first num_tokens rows go
    all_layers: AttentionWork
    last_layer: AttentionWork
    logit_rows: Tensor  # [last layer's rows]
    num_logits: int
    is_canonical: bool  # whether a row's bits must not depend on how many others there are
    states: tuple[
        StateRows, ...
    ] = ()  # where a model has recurrent layers: all rows but the padding, in order
