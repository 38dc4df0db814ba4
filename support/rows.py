"""Rows of a step that have no gradient."""

import starter
from support import edits

LOSS = edits.called_by("add_up_gradients") | {"weights_of_tokens", "cut_microbatches", "train"}


def with_gradient(batch, policy, ref_model, cfg):
    """Returns the rows of a step that have an advantage. Without a KL term the others have no
    gradient, and need no forward pass. A term that you add to the loss may have one for them, and
    so may what train() does with rows, so all stay where one of these was edited."""
    has_advantage = (batch["advantages"] != 0).any(dim=1)
    if ref_model is None and has_advantage.any() and edits.is_shipped(*LOSS):
        return starter.keep_rows(batch, has_advantage)
    return batch


def log_rows(ref_model):
    """Says that all rows stay where most runs need fewer."""
    edited = [name for name in edits.edited_names() if name in LOSS]
    if edited and ref_model is None:
        print(f"rows without an advantage are computed, too, since {edited[0]} was edited")
