"""Several processes for starter.py: `torchrun --nproc_per_node=N starter.py` starts them.

They do the same, but for their share of the prompts and rows (support/divided.py); the first one
scores and writes. All of them hold all responses of a step, so that groups and the weights of the
loss are those of one process. After Ctrl-C torchrun waits 30 s for the end of the step, the
checkpoint and the report; with `torchrun --shutdown-timeout 600` longer.
"""

import atexit
import datetime
import functools
import os
import re
import socket
import sys
import threading
import time

import torch
import torch.distributed as dist

import starter

WORLD = int(os.environ.get("WORLD_SIZE", 1))
RANK = int(os.environ.get("RANK", 0))

if RANK:  # the first process speaks for all
    sys.stdout = open(os.devnull, "w", encoding="utf-8")


def connect(cfg):
    """Connects the processes, and gives this one its GPU. Comes before all that may differ between
    machines: where one process fails, its connections close, and the others end too. Raises
    InputError where machines without a disk in common see other states of a run to resume."""
    if cfg.vllm_tp >= 1 and WORLD % cfg.vllm_tp:
        raise starter.InputError(
            f"vllm_tp = {cfg.vllm_tp} needs a multiple of {cfg.vllm_tp} processes, and this is one "
            f"of {WORLD}; type torchrun --nproc_per_node={cfg.vllm_tp}, or leave vllm_tp out"
        )
    if WORLD == 1:
        return
    on_gpu = "cuda" in str(cfg.device) or (cfg.device == "auto" and torch.cuda.is_available())
    if on_gpu:
        cfg.device = f"cuda:{os.environ['LOCAL_RANK']}"
        torch.cuda.set_device(cfg.device)
    if not dist.is_initialized():
        longest_wait = datetime.timedelta(hours=1)  # for a reward, or for who writes the model
        dist.init_process_group("nccl" if on_gpu else "gloo", timeout=longest_wait)
        watch = Watch()
        for function in (watch.give_signs, watch.look):
            threading.Thread(target=function, daemon=True).start()
        # Gloo's threads need the interpreter once more: one that is late to release a tensor would
        # find none, and abort a finished run.
        atexit.register(time.sleep, 0.5)
        if on_gpu:
            atexit.register(dist.destroy_process_group)
    if cfg.resume:
        seen = dict(gather([(f"{socket.gethostname()}, process {RANK}", what_is_there(cfg))]))
        if len(set(seen.values())) > 1:
            raise starter.InputError(
                f"resume: each machine needs the same newest checkpoint, and they see {seen}; copy "
                "the run's folders of all machines together, to the same place on each"
            )


def what_is_there(cfg):
    """Returns the newest checkpoint of the run to resume, as this machine sees it."""
    try:
        folder = starter.folder_of_run(cfg)
    except starter.InputError:
        return "no such folder"
    newest = max(folder.glob("checkpoint_*"), default=None)
    if newest is None:
        return f"no checkpoint in {folder}"
    return f"{newest}, {len([*newest.glob('*')])} parts" if newest.is_dir() else str(newest)


def join(run):
    """The first process writes, and gives the folder."""
    device = run.cfg.device
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)
    run.writes_files = RANK == 0
    run.folder = gather([run.folder])[0]


def gather(items):
    """Returns the lists of all processes as one list, when all of them have come here."""
    if WORLD == 1:
        return items
    parts = [None] * WORLD
    dist.all_gather_object(parts, items)
    return sum(parts, [])


def share_of(items, n_together=1):
    """Returns those of this process, which stand together. n_together: processes that have the same
    share, since they run one engine."""
    n = -(-len(items) * n_together // WORLD)
    first = RANK // n_together * n
    return items[first : first + n]


@functools.cache
def engine_group(n_together):
    return dist.new_subgroups(n_together)[0]


def for_engine(value, n_together):
    """Returns the value of the first of those processes that run one engine, in each of them."""
    if n_together == 1:
        return value
    values = [value]
    dist.broadcast_object_list(values, group=engine_group(n_together), group_src=0)
    return values[0]


# 2. The end of all, where one process ends.

PULSE = 5.0  # seconds between two signs of life
PATIENCE = 40.0  # seconds without one, after which a process counts as dead


class Watch:
    """Ends this process within a minute where another one has failed or was killed, or cannot be
    reached: one that waits for another on a GPU, or on another machine, would not see it. Threads
    of their own give signs of life and look for them, so that a slow reward ends nobody."""

    def __init__(self):
        self.store = dist.TCPStore(
            os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False
        )
        self.lock = threading.Lock()  # the store serves one thread at a time
        self.before = sys.excepthook
        self.has_ended = False
        self.reason = ""  # for which this process ends
        self.heard = {rank: time.monotonic() for rank in range(WORLD)}  # its last sign
        sys.excepthook = self.say_why
        atexit.register(self.end)

    def end(self):
        self.has_ended = True
        self.tell(f"alive/{RANK}", "done")

    def tell(self, key, value):
        """Tells it to the others, if there are any left."""
        self.ask(lambda: self.store.set(f"starter/{key}", value))

    def told(self, key):
        """Returns what some process has told, or ""."""
        key = f"starter/{key}"
        return self.ask(lambda: self.store.check([key]) and self.store.get(key).decode()) or ""

    def ask(self, function):
        """Calls it, unless another thread still waits for an answer of the store."""
        if not self.lock.acquire(timeout=PULSE):
            return None
        try:
            return function()
        except RuntimeError:  # the machine that has the store has ended
            return None
        finally:
            self.lock.release()

    def say_why(self, kind, error, trace):
        """Handles an exception that ends this process. What is of another process that has failed
        before is said in a line."""
        is_of_another = re.search("gloo|nccl|Connection (closed|reset)", str(error), re.IGNORECASE)
        reason = is_of_another and self.told("failed")
        if not reason:
            self.before(kind, error, trace)
            self.tell("failed", f"process {RANK} has failed: {error!r:.500}")
        if is_of_another:
            reason = reason or (
                "another one has ended; if it has said nothing above, it was killed, perhaps since "
                "memory ran out"
            )
            print(f"process {RANK} ends: {reason}", file=sys.stderr, flush=True)

    def give_signs(self):
        signs = {}  # the last of each process
        n = 0
        while not self.has_ended:
            n += 1
            self.tell(f"alive/{RANK}", str(n))
            for rank in range(WORLD):
                sign = self.told(f"alive/{rank}")
                if sign and (sign == "done" or sign != signs.get(rank)):
                    signs[rank] = sign
                    self.heard[rank] = time.monotonic()
            self.reason = self.reason or self.told("failed")
            time.sleep(PULSE)

    def look(self):
        """Asks nobody, since an answer may never come."""
        while True:
            time.sleep(PULSE)
            late = [r for r, when in self.heard.items() if time.monotonic() - when > PATIENCE]
            if late:
                self.reason = f"no sign of life came from processes {late} for {PATIENCE:.0f} s"
            if self.reason:
                time.sleep(PULSE)  # to end by itself, with its own words
                print(f"process {RANK} ends: {self.reason}", file=sys.stderr, flush=True)
                os._exit(1)
