"""Which problems of the built-in model's task a trained model solves, by operation.

python -m lab.kinds runs/<run>/model
"""

import sys
from collections import Counter

import starter


def main(folder):
    starter.find_support()
    cfg = starter.cfg_with(n_eval_problems=1000, max_new_tokens=16, precision="float32")
    policy, tokenizer = starter.init_policy(folder, "cpu")
    cfg.stop_token_ids = starter.find_stop_tokens(policy, tokenizer)
    _, held_out = starter.TASKS["countdown_small"](cfg)
    held_out = starter.with_prompt_ids(held_out, policy, tokenizer, cfg)
    _, samples = starter.evaluate(policy, None, tokenizer, held_out, cfg)
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
    main(sys.argv[1])
