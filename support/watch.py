"""A program that runs beside each process of torchrun, and ends it where another one has ended or
cannot be reached: one that waits for another on a GPU, or on another machine, would not see it. A
program of its own gives signs of life also while a reward lets no other thread run.

    python support/watch.py RANK WORLD PARENT PULSE PATIENCE     ranks.py starts it
"""

import contextlib
import os
import signal
import sys
import threading
import time

from torch.distributed import TCPStore


def store_of_all():
    """The store of torchrun, of which each user needs a connection of its own."""
    return TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)


class Watch:
    def __init__(self, rank, world, parent, pulse, patience):
        self.rank = int(rank)
        self.parent = int(parent)
        self.pulse = float(pulse)  # seconds between two signs of life
        self.patience = float(patience)  # seconds without one, after which a process is given up
        self.others = range(int(world))
        # When each process gave its last sign. For the first one it has longer, since a program may
        # take long to start
        first = time.monotonic() + 4 * self.patience
        self.heard = dict.fromkeys(self.others, first)
        self.reason = ""  # for which the process ends

    def give_signs(self):
        """Until the store ends, as it does when torchrun has ended well."""
        with contextlib.suppress(RuntimeError):
            self.give_signs_to(store_of_all())

    def give_signs_to(self, store):
        def told(key):
            return store.get(key).decode() if store.check([key]) else ""

        signs = {}  # the last of each process
        n = 0
        while True:
            own = told(f"alive/{self.rank}")
            if os.getppid() != self.parent:  # it has ended
                if own != "done" and not told("failed"):
                    store.set("failed", f"process {self.rank} was killed, perhaps for its memory")
                os._exit(0)
            n += 1
            if own != "done":
                store.set(f"alive/{self.rank}", str(n))
            for other in self.others:
                sign = told(f"alive/{other}")
                if sign and (sign == "done" or sign != signs.get(other)):
                    signs[other] = sign
                    self.heard[other] = time.monotonic()
            self.reason = self.reason or told("failed")
            time.sleep(self.pulse)

    def look(self):
        """Asks nobody, since an answer may never come."""
        now = time.monotonic()
        while os.getppid() == self.parent:
            before = now
            time.sleep(self.pulse)
            now = time.monotonic()
            if now - before > self.patience / 2:  # this program was halted, as by Ctrl-Z
                self.heard = dict.fromkeys(self.heard, now)  # and perhaps the others with it
            late = [other for other, when in self.heard.items() if now - when > self.patience]
            if late:
                self.reason = f"no sign of life from processes {late} for {self.patience:.0f} s"
            if self.reason:
                is_own = self.reason.startswith(f"process {self.rank} ")
                # To end by itself, with its own words
                time.sleep(self.patience if is_own else 2 * self.pulse)
                if os.getppid() == self.parent:
                    print(f"process {self.rank} ends: {self.reason}", file=sys.stderr, flush=True)
                    os.kill(self.parent, signal.SIGKILL)
                return


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM):  # its process decides what they mean
        signal.signal(number, signal.SIG_IGN)
    watch = Watch(*sys.argv[1:])
    threading.Thread(target=watch.give_signs, daemon=True).start()
    watch.look()
    time.sleep(2 * watch.pulse)  # for the last words to the others
