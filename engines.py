"""engines.py: what samples for starter.py, beside its loops: drawing of tokens; vLLM: start, weights, restart."""
import machine  # first: it sets variables that torch and vLLM read when they are imported
import ranks
from machine import InputError, RunStopped, TimedOut, random_states_kept, time_limit

import functools
import gc
import os

import torch

# --- drawing tokens ---------------------------------------------------------------------------------------------------

def first_above(weights, share):
    """(B, K) weights, (B, 1) share in [0, 1) -> (B, 1) index at which the running sum passes that share of the whole,
    and how far into that index it does, in [0, 1)."""
    passed = weights.double().cumsum(dim=1)
    share = share * passed[:, -1:]
    index = (passed <= share).sum(dim=1, keepdim=True).clamp(max=weights.shape[1] - 1)
    here = weights.gather(1, index).double()
    return index, (1 - (passed.gather(1, index) - share) / here).clamp(0, 1 - 1e-9)


def draw_tokens(logits, uniform, temperature, logits_at_once=1 << 21):
    """(B, V) logits, (B, 1) uniform numbers -> (B, 1) tokens, (B, 1) their log-probs. Temperature 0 is greedy.

    Where the cumulative distribution passes the uniform number: first among blocks of 256 tokens, then within one,
    since a running sum over a vocabulary of 150,000 costs more than the model.
    """
    tokens, log_probs = [], []
    for part, share in zip(*(x.split(max(1, logits_at_once // logits.shape[1])) for x in (logits, uniform))):
        logit = part.float() if temperature in (0, 1) else part.float() / temperature  # (rows, V)
        top = logit.amax(dim=1, keepdim=True)
        p = logit.new_zeros(len(logit), -(-logit.shape[1] // 256) * 256)  # whole blocks
        torch.sub(logit, top, out=p[:, :logit.shape[1]]).exp_()
        p = p.unflatten(1, (-1, 256))
        blocks = p.sum(dim=2)
        if not temperature:
            token = logit.argmax(dim=1, keepdim=True)
        else:
            block, share = first_above(blocks, share)
            token = first_above(p.gather(1, block[..., None].expand(-1, 1, 256))[:, 0], share)[0] + 256 * block
        tokens.append(token), log_probs.append(logit.gather(1, token) - top - blocks.sum(dim=1, keepdim=True).log())
    return torch.cat(tokens), torch.cat(log_probs)


# --- transformers ----------------------------------------------------------------------------------------------------

def check_attention(model, context):
    """InputError where a prompt with its response is longer than the model's window: the cache here keeps it whole."""
    from shared_prompts import span_of_attention
    span = span_of_attention(model.config)
    if context > span:
        kind = f"a window of {span} tokens" if span else "layers that are not attention"
        raise InputError(f"the model has {kind}, and prompts with responses are up to {context} long: engine = "
                         "'transformers' cannot sample that here; use engine = 'vllm', or lower max_new_tokens")


# --- vLLM -------------------------------------------------------------------------------------------------------------

def vllm_memory(model_id, max_model_len, gpu_mem_util, bf16, max_num_seqs=256):
    """-> settings of LLM() that bound its memory. A CPU engine left alone takes 92 % of the machine's."""
    if not machine.VLLM_IS_CPU:
        return {"gpu_memory_utilization": gpu_mem_util}
    from transformers import AutoConfig
    config = AutoConfig.from_pretrained(model_id)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    token_bytes = 2 * config.num_hidden_layers * config.num_key_value_heads * head_dim * (2 if bf16 else 4)
    most = gpu_mem_util * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {"enforce_eager": True, "block_size": 32,  # blocks of 128, the default, waste a small cache
            "enable_chunked_prefill": False,  # a seeded request whose prompt is cut in two crashes
            "kv_cache_memory_bytes": int(min(max_num_seqs * (max_model_len + 64) * token_bytes, most))}


def vllm_worker_load(worker, named_weights):
    """Runs inside vLLM's worker: load (name, tensor) pairs, then pack the output head again.

    reload_weights alone leaves a tied head with its old packed weights on a CPU (1-7 of 192 greedy tokens agree).
    """
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
    worker.reload_weights(weights_iterator=iter(named_weights))
    for module in worker.model_runner.get_model().modules():
        if isinstance(module, ParallelLMHead):
            module.quant_method.process_weights_after_loading(module)


def init_vllm(model_id, seed, max_model_len, gpu_mem_util, bf16, sleep=False):
    """-> vLLM engine in this process. Its log-probs are log_softmax(logits / T), at the sampling temperature T."""
    from vllm import LLM
    memory = vllm_memory(model_id, max_model_len, gpu_mem_util, bf16) | ({"enable_sleep_mode": True} if sleep else {})
    with random_states_kept():
        return LLM(str(model_id), seed=seed, dtype="bfloat16" if bf16 else "float32", max_model_len=max_model_len,
                   logprobs_mode="processed_logprobs", max_num_seqs=256, use_tqdm_on_load=False, **memory)


def load_policy_into_vllm_instance(policy, llm):
    """Hand the policy's weights to vLLM and drop what its prefix cache computed with the old ones."""
    llm.collective_rpc(vllm_worker_load, args=(list(ranks.weights_of(policy).items()),))
    if llm.reset_prefix_cache() is not True:
        raise RunStopped("vLLM kept its prefix cache after a weight sync: it would read prompts with old weights")


class RestartedVLLM:
    """vLLM's LLM, as far as starter.py calls it. A call that fails or hangs is made once more, in a new engine.

    start() -> LLM; policy: whose weights the new engine gets. A second failure in the same call is RunStopped.
    sleep: after each rollout weights go to the host's memory and the cache is dropped, until the next call.
    """
    def __init__(self, start, policy, seconds, sleep=False):
        self.start, self.policy, self.seconds, self.sleep, self.asleep = start, policy, seconds, sleep, False
        self.llm = start()

    def call(self, name, *args, **settings):
        for attempt in (1, 2):
            try:
                with time_limit(self.seconds):
                    if self.llm is None:
                        self.llm = self.start()
                        load_policy_into_vllm_instance(self.policy, self.llm)
                    if self.asleep:  # a sleeping engine would spin for ever
                        self.llm.wake_up()
                    found = getattr(self.llm, name)(*args, **settings)
                    self.asleep = self.sleep and name == "generate"
                    if self.asleep:
                        self.llm.sleep(level=1)
                    return found
            except (Exception, TimedOut) as error:
                what = f"failed ({type(error).__name__}: {error})"
                what = f"did not return within {self.seconds:g} s" if isinstance(error, TimedOut) else what
            self.llm, self.asleep = None, False
            gc.collect()
            if attempt == 2 or ranks.world() > 1:  # the other ranks are at work: they give no weights now
                raise RunStopped(f"vLLM's {name} {what}{', twice' * (attempt == 2)}; resume = True goes on from the "
                                 "checkpoint")
            print(f"Warning: vLLM's {name} {what}; it is started again with the present weights", flush=True)

    def __getattr__(self, name):
        return functools.partial(self.call, name)
