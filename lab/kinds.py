"""Which problems of the built-in model's task a trained model solves, by operation.

python -m lab.kinds runs/<run>/model
"""

import sys
from collections import Counter

import starter
from lab import bench


def measure(policy, tokenizer, llm, optimizer, problems, cfg, *others):
    """In the place of train()."""
    _, samples = starter.evaluate(policy, llm, tokenizer, problems.held_out, cfg)
    asked, solved, tried = Counter(), Counter(), Counter()
    for problem, text, reward in samples:
        [operation] = set(problem["solution"]) & set("+-*/")
        asked[operation] += 1
        solved[operation] += reward == 1
        tried.update(set(text.replace("</answer>", "")) & set("+-*/"))
    for operation, n in asked.most_common():
        share = solved[operation] / n
        print(f"{operation}: {n} problems, {share:.0%} solved, {tried[operation]} answers with it")


if __name__ == "__main__":
    settings = dict(preset="tiny", model_id=sys.argv[1], n_eval_problems=1000, max_new_tokens=16)
    bench.in_place_of_train(measure, settings | dict(device="cpu", precision="float32"))
