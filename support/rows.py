"""Rows of a step that have no gradient."""

import functools

import starter
from support import edits

LOSS = edits.called_by("add_up_gradients") | {"weights_of_tokens", "cut_microbatches"}


@functools.cache
def is_edited_behind_the_rows(train):
    """Whether train() was edited between its calls of rows_to_train_on and clip_gradient, where it
    may do something with the rows that gives all of them a gradient."""
    source, first = edits.lines_of(train)
    calls = [
        n
        for n, line in enumerate(source, start=first)
        if "rows_to_train_on(" in line or "clip_gradient(" in line
    ]
    if len(calls) != 2:
        return True
    edited = edits.edited_lines(train, edits.SHIPPED["train"]["lines"])
    return any(calls[0] <= n <= calls[1] for n in edited)


def edited_in_the_update():
    """Returns the names of the functions for whose edits all rows stay."""
    names = [name for name in sorted(LOSS) if not edits.is_shipped(name)]
    if not edits.is_shipped("train") and is_edited_behind_the_rows(starter.train):
        names.append("train")
    return names


def with_gradient(batch, policy, ref_model, cfg):
    """Returns the rows of a step that have an advantage. Without a KL term the others have no
    gradient, and need no forward pass. A term that you add to the loss may have one for them, and
    so may what train() does with the rows, so all stay where one of these was edited."""
    has_advantage = (batch["advantages"] != 0).any(dim=1)
    if ref_model is None and has_advantage.any() and not edited_in_the_update():
        return starter.keep_rows(batch, has_advantage)
    return batch


def log_rows(ref_model):
    """Says that all rows stay where most runs need fewer."""
    edited = edited_in_the_update()
    if edited and ref_model is None:
        print(f"rows without an advantage are computed, too, since {edited[0]} was edited")
