"""Rows of a step that have no gradient."""

import starter
from support import edits

LOSS = edits.called_by("add_up_gradients") | {"weights_of_tokens", "cut_microbatches", "train"}


def with_gradient(batch, policy, ref_model, cfg):
    """Returns the rows of a step that have an advantage. Without a KL term the others have no
    gradient, and need no forward pass. A term that you add to the loss may have one for them, so
    all rows stay where something of the loss was edited."""
    has_advantage = (batch["advantages"] != 0).any(dim=1)
    if ref_model is None and has_advantage.any() and edits.is_shipped(*LOSS):
        return starter.keep_rows(batch, has_advantage)
    return batch
