"""Run a function on several real processes with a gloo process group, in a test.

In: a module-level function and a world size. Out: what each rank returned, by rank; or `WorldError` with every
rank's traceback, or `WorldTimeout` with every rank's stack. One fork server, preloaded with torch, per process.
"""

from __future__ import annotations

import faulthandler
import importlib
import importlib.util
import multiprocessing
import multiprocessing.connection
import os
import pickle
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import ModuleType
from typing import Any

from hp_protocols.platform import get_platform

__all__ = ["WorldError", "WorldTimeout", "run_world"]

# Ranks that outlive a failed one usually wait for it in a collective: they get this long to fail by themselves.
_GRACE_SECONDS = 3.0
# The signal that makes a rank write its stacks into its log, how long the ranks have for it, and how they end: the main
# thread comes last, and the lowest of its calls is a module's; a very deep stack is cut.
_STACK_SIGNAL = signal.SIGUSR1
_STACK_SECONDS = 5.0
_STACK_ENDS = (" in <module>\n", "  ...\n")
# Imported once, by the fork server, and shared by every rank of every world.
# (torch._dynamo: FSDP2 and distributed tensors import it at their first call.)
_PRELOAD = ["torch._dynamo", "torch.distributed.fsdp", "torch.distributed.tensor", "hp_protocols.distributed", __name__]


class WorldError(RuntimeError):
    """A rank failed. The text holds every rank's traceback, or stack if it was still running, and output."""


class WorldTimeout(WorldError, TimeoutError):
    """The world did not finish in time. The text holds every rank's stack and output."""


@dataclass(frozen=True, slots=True)
class _Function:
    """A module-level function by name and file, so that a process can find it that does not share sys.modules."""

    module: str
    name: str
    file: str | None

    @classmethod
    def of(cls, fn: Callable[..., Any]) -> _Function:
        name = getattr(fn, "__qualname__", "")
        if not name.isidentifier():
            raise ValueError(f"run_world needs a function defined at module level, not {name or fn!r}")
        module = sys.modules[fn.__module__]
        return cls(fn.__module__, name, getattr(module, "__file__", None))

    def load(self) -> Callable[..., Any]:
        try:
            module = importlib.import_module(self.module)
        except ModuleNotFoundError:
            # pytest may import a test file under a name that is on no path (--import-mode=importlib).
            if self.file is None:
                raise
            module = _load_file(self.module, self.file)
        return getattr(module, self.name)


@dataclass(frozen=True, slots=True)
class _Task:
    """What one rank needs to know."""

    rank: int
    world_size: int
    port: int
    function: _Function
    arguments: bytes
    environment: Mapping[str, str]
    init_process_group: bool
    timeout: float
    log: str


@dataclass(slots=True)
class _Rank:
    """One child as the parent sees it. `outcome`: ("value", pickled) or ("failure", text) once it is known."""

    process: BaseProcess
    connection: Connection
    log: Path
    outcome: tuple[str, Any] | None = None

    @property
    def failed(self) -> bool:
        return self.outcome is not None and self.outcome[0] == "failure"

    def poll(self) -> None:
        """Take the child's report, or note that it died without one."""
        try:
            self.outcome = self.connection.recv()
        except (EOFError, ConnectionResetError):
            self.process.join(_GRACE_SECONDS)
            code = self.process.exitcode
            how = f"signal {signal.Signals(-code).name}" if code is not None and code < 0 else f"exit code {code}"
            self.outcome = ("failure", f"the process died without a report ({how})")

    def write_stacks(self) -> Callable[[], bool]:
        """Make the child write where it stands; the result says whether that is done."""
        before = len(self.written())
        if self.process.pid is not None and self.process.is_alive():
            os.kill(self.process.pid, _STACK_SIGNAL)
        return lambda: not self.process.is_alive() or self.written()[before:].endswith(_STACK_ENDS)

    def written(self) -> str:
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def end(self) -> None:
        """End the child and what it started: each child leads a process group of its own."""
        if self.process.pid is not None and self.process.is_alive():
            try:
                os.killpg(self.process.pid, signal.SIGKILL)
            except ProcessLookupError:
                self.process.kill()
        self.process.join(_GRACE_SECONDS)
        self.connection.close()


def run_world(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout: float = 120.0,
    init_process_group: bool = True,
    env: Mapping[str, str] | None = None,
) -> list[Any]:
    """Call `fn(rank, world_size, *args)` on `world_size` new processes; return the results by rank.

    Each process has one thread, runs on the cpu (HP_DEVICE=cpu), and sees the caller's environment with `env` and a
    launcher's variables (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT) on top. What it prints is
    printed by the caller, rank by rank, when the world has ended.

    Args:
        fn: a function defined at module level; arguments and results are pickled.
        timeout: seconds from the start of the last process.
        init_process_group: start the gloo process group before `fn`, and destroy it after.
        env: variables to set in the processes.

    Raises:
        WorldError: a rank raised or died.
        WorldTimeout: time is up.
        ValueError: `fn` is not at module level, or `world_size` is not positive.
    """
    if world_size < 1:
        raise ValueError(f"world_size must be at least 1, got {world_size}")
    function, arguments = _Function.of(fn), pickle.dumps(args)
    environment = {**os.environ, **(env or {})}
    with tempfile.TemporaryDirectory(prefix="hp-world-") as folder, _store_port() as port:
        tasks = [
            _Task(
                rank, world_size, port, function, arguments, environment, init_process_group, timeout,
                log=os.path.join(folder, f"rank{rank}.log"),
            )
            for rank in range(world_size)
        ]  # fmt: skip
        ranks: list[_Rank] = []
        try:
            for task in tasks:
                ranks.append(_start(task))
            # From here, since the first world of a process also waits for the fork server's imports.
            deadline = time.monotonic() + timeout
            finished = _wait(ranks, deadline)
            problem = _problem(ranks, finished, timeout)
        finally:
            for rank in ranks:
                rank.end()
            output = "".join(_output(index, rank.written()) for index, rank in enumerate(ranks))
        if problem is not None:
            kind, text = problem
            raise kind(text + output)
    print(output, end="")
    return [pickle.loads(rank.outcome[1]) for rank in ranks if rank.outcome is not None]


def _start(task: _Task) -> _Rank:
    context = multiprocessing.get_context("forkserver")
    ours, theirs = context.Pipe()
    process = context.Process(target=_child, args=(task, theirs), name=f"rank {task.rank}")
    with _fork_server_environment(context):
        process.start()
    theirs.close()
    return _Rank(process, ours, Path(task.log))


@contextmanager
def _fork_server_environment(context: Any) -> Iterator[None]:
    """What the fork server imports and sees if it is started now; without effect when it runs already."""
    # A child imports the parent's main script again; under pytest that is pytest itself.
    context.set_forkserver_preload([*_PRELOAD, *(["pytest"] if "pytest" in sys.modules else [])])
    before = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ["OMP_NUM_THREADS"]
        else:
            os.environ["OMP_NUM_THREADS"] = before


@contextmanager
def _store_port() -> Iterator[int]:
    """The port of a store in this process: the system picks it while binding, so nobody can take it in between."""
    store = get_platform().host_store()
    yield store.port


def _wait(ranks: Sequence[_Rank], deadline: float) -> bool:
    """Collect the reports. False if time ran out; after a failure the others get a short grace."""
    while pending := [rank for rank in ranks if rank.outcome is None]:
        left = deadline - time.monotonic()
        ready = multiprocessing.connection.wait([rank.connection for rank in pending], timeout=max(left, 0))
        if not ready:
            return any(rank.failed for rank in ranks)
        for rank in pending:
            if rank.connection in ready:
                rank.poll()
                if rank.failed:
                    deadline = min(deadline, time.monotonic() + _GRACE_SECONDS)
    return True


def _problem(ranks: Sequence[_Rank], finished: bool, timeout: float) -> tuple[type[WorldError], str] | None:
    """None if every rank returned a value; else the error and what each rank raised, or where it stands."""
    if finished and all(rank.outcome is not None and rank.outcome[0] == "value" for rank in ranks):
        return None
    running = [index for index, rank in enumerate(ranks) if rank.outcome is None]
    failed = [index for index, rank in enumerate(ranks) if rank.failed]
    # The signal handler writes at once, but the processes have to be scheduled.
    are_done = [ranks[index].write_stacks() for index in running]
    deadline = time.monotonic() + _STACK_SECONDS
    while not all(done() for done in are_done) and time.monotonic() < deadline:
        time.sleep(0.02)
    if finished:
        kind, text = WorldError, f"of {len(ranks)} ranks, {failed} failed"
    else:
        kind, text = WorldTimeout, f"of {len(ranks)} ranks, {running} were still running after {timeout:g} s"
    for index, rank in enumerate(ranks):
        if rank.outcome is None:
            text += f"\n--- rank {index}: still running, its stack is in its output below"
        elif rank.failed:
            text += f"\n--- rank {index} failed:\n{rank.outcome[1]}"
        else:
            text += f"\n--- rank {index}: returned"
    return kind, text + "\n"


def _output(rank: int, text: str) -> str:
    return "".join(f"[rank {rank}] {line}\n" for line in text.splitlines())


# In the child


def _child(task: _Task, connection: Connection) -> None:
    os.setpgrp()
    _redirect_output(task.log)
    threading.Thread(target=_die_with_parent, args=(connection,), daemon=True).start()
    report: tuple[str, bytes | str]
    try:
        report = ("value", pickle.dumps(_call(task)))
    except BaseException:
        report = ("failure", traceback.format_exc())
    sys.stdout.flush()
    sys.stderr.flush()
    connection.send(report)
    # Skips the interpreter's shutdown, where threads of a broken process group may hang.
    os._exit(0)


def _redirect_output(log: str) -> None:
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream, number in ((sys.stdout, 1), (sys.stderr, 2)):
        stream.flush()
        os.dup2(descriptor, number)
    # The fork server's own streams may be closed or captured ones; these write to the log line by line.
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    faulthandler.enable(file=2)
    faulthandler.register(_STACK_SIGNAL, file=2, all_threads=True)


def _die_with_parent(connection: Connection) -> None:
    """The parent never sends; the read ends when the parent is gone."""
    try:
        connection.poll(None)
    finally:
        os._exit(1)


def _call(task: _Task) -> Any:
    os.environ.clear()
    os.environ.update(task.environment)
    os.environ.update(
        RANK=str(task.rank),
        LOCAL_RANK=str(task.rank),
        WORLD_SIZE=str(task.world_size),
        LOCAL_WORLD_SIZE=str(task.world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(task.port),
        # The store lives in the parent: every rank is its client, as under torchrun's agent.
        TORCHELASTIC_USE_AGENT_STORE="True",
        TORCHELASTIC_RESTART_COUNT="0",
        OMP_NUM_THREADS="1",
        HP_DEVICE="cpu",
    )
    loopback = {name for _, name in socket.if_nameindex()} & {"lo", "lo0"}
    if loopback:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback.pop())

    platform = get_platform()
    platform.set_threads(1)
    fn = task.function.load()
    args = pickle.loads(task.arguments)
    if not task.init_process_group:
        return fn(task.rank, task.world_size, *args)
    # Longer than the world's own limit, so that a hang is reported with stacks and not as an error of gloo.
    platform.init_process_group(timeout=task.timeout + 60)
    result = fn(task.rank, task.world_size, *args)
    platform.destroy_process_group()
    return result


def _load_file(name: str, file: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ImportError(f"cannot load {name} from {file}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
