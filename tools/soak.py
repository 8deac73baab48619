"""Disturb real commands at random and compare their results with undisturbed ones, bit for bit.

    python tools/soak.py --minutes 10
    python tools/soak.py --tries 1 --seed 17        # repeat one try and print every start

Every try draws a command (run, compare, grid, study) and disturbances: kill -9, Ctrl-C, a paused
process whose directory another machine takes over, full disks, failing system calls, twins, damaged
files. The command is then repeated. It must end with the undisturbed result, or refuse a damaged
file with one line and exit code 2. Moments depend on the machine's load: a seed fixes only what is
done, and roughly when. Needs a system with fork.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import errno
import io
import json
import math
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from functools import partial
from pathlib import Path

from soak_faults import DAMAGES, INTERRUPTED, Change, Failure, Fault, Process, command, on_machine
from soak_results import is_refused, results

BASE = 'task = "logistic"\nalgorithms = ["scaffold", "fedadam"]\nengine = "vectorized"\n'
GRID = f"""kind = "grid"\n{BASE}selection = "test"\nrounds = 12\nlast = 4\nseeds = [1000, 1001]
axes.client.lr = [0.01, 0.1, 1000.0]\nprotocol.cohort = 3
stop = {{ diverged = true }}
search.halving = [[6, 2]]
"""
STUDY = f"""kind = "study"\n{BASE}rates = "given"\nrounds = 12\nseeds = [0, 1]\nprotocol.cohort = 3
stop = {{ diverged = true }}
"""
PLUGIN = """from fedzmg import Algorithm, Parts
from fedzmg.algorithms import SGD, Average
ALGORITHMS = (Algorithm("mine", SGD(lr=0.1), Average(), parts=Parts(personal=("last:1",))),)
"""
FEW = "--set protocol.cohort=3 --engine vectorized --device cpu"
COMMANDS = {
    "run": f"run digits --algorithm scaffold --rounds 5 --set protocol.epochs=1 {FEW}",
    "run with server state": f"run logistic --algorithm fedadam --rounds 30 {FEW}",
    "run with memory": f"run logistic --algorithm scaffold --rounds 30 {FEW}",
    "run with personal models": f"run digits --algorithm fedper --rounds 5 "
    f"--set protocol.epochs=1 --set client_metrics_every=2 {FEW}",
    "run with stages": "run logistic --algorithm fedavg --rounds 30 "
    "--set federation.aggregator=trimmed_mean --set federation.participation.sampler=poisson "
    f"{FEW}",
    "run with plugin": "run digits --plugin mine.py --algorithm mine --rounds 5 "
    f"--set protocol.epochs=1 --set protocol.fine_tune=1 {FEW}",
    "compare": "compare logistic --algorithms scaffold,fedadam --seeds 2 --rounds 12 "
    "--engine vectorized --device cpu",
    "grid": "grid grid.toml",
    "study": "study study.toml",
}
OTHER_SEED = {"run": "--seed 1", "grid": "--set seeds=[7,8]"}  # others have siblings
CODES = {0, 2}


def kind_of(rng: random.Random) -> str:
    """Draw the command, which is the first choice of a try."""
    return rng.choice(list(COMMANDS))


class Trial:
    """One command and its directory."""

    def __init__(self, seed: int, work: Path, references: dict[str, Reference]) -> None:
        self.rng = random.Random(seed)
        self.kind = kind_of(self.rng)
        self.reference = references[self.kind]
        self.seconds = self.reference.seconds
        self.out = work / f"try-{seed}"
        self.damaged: tuple[Path, bytes | None] | None = None
        self.started: list[Process] = []
        self.story = [self.kind]

    def start(self, *changes: Change) -> Process:
        """Start the command."""
        interval = self.rng.choice(["0", "0.05", "30"])
        put = [lambda: os.environ.update(FEDZMG_CHECKPOINT_SECONDS=interval), *changes]
        self.started.append(Process(line(self.kind, self.out), put))
        return self.started[-1]

    def moment(self) -> float:
        """Draw a moment of an undisturbed start."""
        return self.rng.uniform(0.0, 1.1) * self.seconds

    def kill(self) -> None:
        """Kill the command several times."""
        for _ in range(self.rng.randint(1, 5)):
            process = self.start()
            if process.sleep(self.moment()):
                process.kill()
            else:
                process.finish({0})

    def interrupt(self) -> None:
        """Press Ctrl-C once or twice."""
        process = self.start()
        for _ in range(self.rng.randint(1, 2)):
            process.sleep(self.moment())
            process.send(signal.SIGINT)
        process.finish({0, INTERRUPTED})

    def take_over(self) -> None:
        """Pause the command, start it on another machine, and continue it at any time."""
        first = self.start(on_machine("one"))
        first.sleep(self.moment())
        first.send(signal.SIGSTOP)
        second = self.start(on_machine("two"))
        second.sleep(self.rng.uniform(0.0, 2.0) + self.moment())
        first.send(signal.SIGCONT)
        second.finish(CODES)
        first.finish(CODES)

    def fill_disk(self) -> None:
        """Let no file grow beyond a limit."""
        limit = int(math.exp(self.rng.uniform(math.log(50), math.log(1e6))))
        self.story.append(f"{limit} bytes")
        hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
        full = partial(resource.setrlimit, resource.RLIMIT_FSIZE, (limit, hard))
        self.start(full).finish(CODES)

    def fail_calls(self) -> None:
        """Let one system call fail, or all from then on."""
        name = self.rng.choice(["write", "pwrite", "replace", "fsync", "unlink", "open"])
        number = int(math.exp(self.rng.uniform(0, math.log(200))))
        code = self.rng.choice([errno.EIO, errno.ENOSPC, errno.EDQUOT])
        last = self.rng.choice([number, 10**9])
        self.story.append(f"os.{name}, call {number} to {last}, {errno.errorcode[code]}")
        fault = Fault(getattr(os, name), range(number, last + 1), code, self.out)
        self.start(lambda: setattr(os, name, fault)).finish(CODES)

    def twins(self) -> None:
        """Start the command several times at once."""
        for process in [self.start() for _ in range(self.rng.randint(2, 3))]:
            process.finish(CODES)
        if not any(process.code == 0 for process in self.started[-3:]):
            raise Failure("no twin was successful")

    def damage(self) -> bool:
        """Damage a file and start again; return whether that was refused."""
        files = [p for p in sorted(self.out.rglob("*")) if p.suffix not in (".png", ".svg")]
        files = [p for p in files if p.is_file()]
        if not files:
            return False
        path = self.rng.choice(files)
        how = self.rng.choice(list(DAMAGES))
        donors = [p for p in sorted(self.out.rglob(path.name)) if p != path]
        donors += sorted(self.reference.other.rglob(path.name))
        donor = self.rng.choice(donors).read_bytes() if donors else b""
        self.story.append(f"{how} {path.relative_to(self.out)}")
        content = path.read_bytes()
        damaged = DAMAGES[how](content, self.rng, donor)
        if damaged is None:
            path.unlink()
        else:
            path.write_bytes(damaged)
        self.damaged = path, damaged
        locks = set(self.out.rglob("lock.json"))  # of killed processes
        if self.start().finish(CODES) == 0:
            return False
        if damaged is not None and (not path.exists() or path.read_bytes() != damaged):
            raise Failure("refused, and yet overwritten")
        if set(self.out.rglob("lock.json")) - locks:
            raise Failure("refused, and yet locked")
        return True

    def unread(self) -> str:
        """Return a damaged file of tensors that a finished training does not read, but refuses."""
        path, content = self.damaged or (self.out, b"")
        if path.suffix != ".safetensors":
            return ""
        same = (path.read_bytes() if path.exists() else None) == content
        return str(path.relative_to(self.out)) if same and is_refused(path) else ""

    def run(self) -> str:
        """Disturb the command, repeat it and judge the result."""
        disturbances = (
            self.kill, self.interrupt, self.take_over, self.fill_disk, self.fail_calls, self.twins,
        )  # fmt: skip
        refused = False
        try:
            for _ in range(self.rng.randint(1, 2)):
                disturb = self.rng.choice(disturbances)
                self.story.append(disturb.__name__)
                disturb()
            if self.rng.random() < 0.4:
                self.story.append("damage")
                refused = self.damage()
            if refused:
                return "refused"
            for path in self.out.rglob(".*"):  # figures in progress are kept for a minute
                os.utime(path, (time.time() - 60,) * 2)
            self.start().finish({0})
            if difference := self.reference.difference(self.out, self.unread()):
                raise Failure(f"another result: {difference}")
            return "equal"
        finally:
            for process in self.started:
                process.kill()
            shutil.rmtree(self.out, ignore_errors=True)


class Reference:
    """Undisturbed result of a command, and the directory of another seed."""

    def __init__(self, kind: str, work: Path) -> None:
        out, self.other = work / kind / "reference", work / kind / "other"
        os.environ["FEDZMG_CHECKPOINT_SECONDS"] = "0"
        # In this process, which loads and compiles everything that its copies need.
        quiet(line(kind, out))
        if option := OTHER_SEED.get(kind.split()[0]):
            quiet([*line(kind, self.other), *option.split()])
        self.expected = results(out)
        self.names = {path.relative_to(out) for path in out.rglob("*")}
        began = time.monotonic()
        Process(line(kind, work / kind / "again"), []).finish({0})
        self.seconds = time.monotonic() - began
        if difference := self.difference(work / kind / "again"):
            raise SystemExit(f"soak: {kind} is not deterministic: {difference}")

    def difference(self, out: Path, unread: str = "") -> str:
        """Describe the first difference; empty if there is none but in a file that is not read."""
        left = {path.relative_to(out) for path in out.rglob("*")} - self.names
        if left:
            return f"left behind: {', '.join(map(str, sorted(left)))}"
        found = results(out)
        for name in sorted(self.expected.keys() | found.keys()):
            old, new = self.expected.get(name), found.get(name)
            if unread and name.startswith(unread):
                continue
            if isinstance(old, dict) and isinstance(new, dict):
                keys = [key for key in old.keys() | new.keys() if old.get(key) != new.get(key)]
                old, new = ({key: d.get(key) for key in sorted(keys)} for d in (old, new))
            if old != new:
                return f"{name}: {new!s:.500} instead of {old!s:.500}"
        return ""


def line(kind: str, out: Path) -> list[str]:
    """Return the command line of a kind."""
    return [*COMMANDS[kind].split(), "--out", str(out)]


def quiet(arguments: list[str]) -> None:
    """Run a command in this process without output."""
    words = io.StringIO()
    with contextlib.redirect_stdout(words), contextlib.redirect_stderr(words):
        code = command(arguments)
    if code:
        raise SystemExit(f"soak: fedzmg {' '.join(arguments)}: {words.getvalue()}")


def attempt(seed: int, work: Path, references: dict[str, Reference]) -> None:
    """Make one try in a process of its own; its result is a file."""
    os.setsid()
    trial = Trial(seed, work, references)
    try:
        result = trial.run()
    except Failure as error:
        result = f"failure: {error}"
    except BaseException:
        result = f"failure: {traceback.format_exc()}"
    (work / f"{seed}.txt").write_text(json.dumps([", ".join(trial.story), result]))
    os._exit(0)


def soak(work: Path, seeds: range, end: float, workers: int) -> collections.Counter[str]:
    """Make tries until the end, several at once; print failures and count results."""
    drawn = {kind_of(random.Random(seed)) for seed in seeds} if len(seeds) <= 100 else COMMANDS
    references = {kind: Reference(kind, work) for kind in sorted(drawn)}
    shown = ", ".join(f"{kind} {r.seconds:.1f} s" for kind, r in references.items())
    print(f"undisturbed: {shown}", flush=True)
    counts, left, running = collections.Counter[str](), iter(seeds), dict[int, int]()
    try:
        while True:
            free = len(running) < workers and time.monotonic() < end
            if free and (seed := next(left, None)) is not None:
                if (pid := os.fork()) == 0:
                    attempt(seed, work, references)
                running[pid] = seed
                continue
            if not running:
                return counts
            done = running.pop(os.wait()[0])
            path = work / f"{done}.txt"
            story, result = json.loads(path.read_text()) if path.exists() else ("", "failure: lost")
            counts[result.split(":")[0]] += 1
            if result.startswith("failure"):
                print(f"seed {done} ({story}): {result}")
                print(f"  repeat: python tools/soak.py --seed {done} --tries 1", flush=True)
            elif len(seeds) == 1:
                print(f"seed {done} ({story}): {result}")
            if counts.total() % 50 == 0:
                print(f"{counts.total()} tries: {dict(counts)}", flush=True)
    finally:
        for pid in running:
            os.killpg(pid, signal.SIGKILL)


def main() -> None:
    """Make tries until the time or their number is over."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=math.inf)
    parser.add_argument("--tries", type=int, help="100 by default, if there is no time limit")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first try")
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    tries = options.tries or (10**9 if options.minutes < math.inf else 100)
    # Autograd starts threads for every GPU, and threads do not survive a fork.
    os.environ.update(OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="")
    import torch

    torch.set_num_threads(1)
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="fedzmg-soak-") as folder:
        os.chdir(folder)
        Path("grid.toml").write_text(GRID)
        Path("study.toml").write_text(STUDY)
        Path("mine.py").write_text(PLUGIN)
        seeds = range(options.seed, options.seed + tries)
        end = began + 60 * options.minutes
        counts = soak(Path(folder).resolve(), seeds, end, options.workers)
        os.chdir("/")
    seconds, failures = time.monotonic() - began, counts["failure"]
    print(f"{counts.total()} tries, {failures} failures, {seconds:.0f} s: {dict(counts)}")
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()
