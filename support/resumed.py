"""What an edit keeps that no checkpoint holds: said before the first step, and after a resume."""

import starter


def first_numbers(parameter, n):
    """Returns the first n numbers of a tensor, or of this process's part of it."""
    part = getattr(parameter, "to_local", lambda: parameter)()
    return part.flatten()[:n].tolist()


def sample_of(model):
    """A number that changes with a model's weights: the sum of the first one of each tensor, which
    the first of several processes has, whether the parts are joined or not."""
    total = 0.0
    for parameter in model.parameters():
        total += sum(first_numbers(parameter, 1))
    return total


def keep(run, ref_model):
    """After each step: whether the state can be saved, and what the reference is now."""
    if run.state["step"] == 1:
        starter.check_can_be_read_back(run.state)
    if ref_model is not None:
        run.state["reference"] = sample_of(ref_model)


def say_what_is_new(run, policy, ref_model, optimizer):
    """Before the first step of a process."""
    own = {id(parameter) for parameter in policy.parameters()}
    others = [
        parameter
        for group in optimizer.param_groups
        for parameter in group["params"]
        if id(parameter) not in own
    ]
    if others:
        print(
            f"{len(others)} of the optimiser's parameters are none of the policy's: no checkpoint "
            "holds their values, so keep these in run.state"
        )
    state = run.state
    teacher = str(run.cfg.ref_model_id)
    if state.setdefault("ref_model_id", teacher) != teacher:  # which is said as a changed setting
        state.update(ref_model_id=teacher, reference=None, first_reference=None)
    if ref_model is not None and state.get("first_reference") is None:
        state["first_reference"] = sample_of(ref_model)
    before = state.get("reference")
    if before is not None and ref_model is not None and sample_of(ref_model) != before:
        print(
            "resume: the reference is another one than before: an edit that changes it while "
            "training must keep it in run.state"
        )
