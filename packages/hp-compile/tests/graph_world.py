"""Real gloo worlds for tests: one fork server with torch loaded, one process per rank.

In: a function of an importable module, a world size. Out: each rank's result; or one error with every rank's
traceback (or, after a hang or an abort, its stack), what it wrote (gloo says there why it aborts), and who was first.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.distributed import TCPStore

_context = multiprocessing.get_context("forkserver")
# What a first capture imports takes seconds; the server does it once for all ranks of all worlds.
_context.set_forkserver_preload(
    [
        "torch._dynamo",
        "torch._functorch._aot_autograd.logging_utils",
        "torch.distributed.checkpoint",
        "torch.distributed.fsdp",
        "torch.distributed.tensor.parallel",
        "hp_compile.trainer",
        "graph_zoo",
    ]
)


def run_world(fn: Callable[..., Any], world_size: int, *args: Any, timeout: float = 120) -> list[Any]:
    """`fn(rank, world_size, *args)` on every rank; results by rank."""
    # The system picks a port while binding, so nobody can take it in between; it is held until the ranks have ended.
    store = TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
    folder = Path(tempfile.mkdtemp(prefix="world-"))
    pipes, processes = [], []
    for rank in range(world_size):
        receiver, sender = _context.Pipe(duplex=False)
        process = _context.Process(
            target=_rank_main,
            args=(fn, rank, world_size, store.port, str(folder / f"{rank}"), sender, args),
            daemon=True,
        )
        process.start()
        sender.close()
        pipes.append(receiver)
        processes.append(process)
    results: list[Any] = [None] * world_size
    faults: dict[int, str] = {}
    deadline = time.monotonic() + timeout
    grace = None
    waiting = set(range(world_size))
    while waiting:
        for rank in sorted(waiting):
            if not pipes[rank].poll(0.005):
                continue
            waiting.discard(rank)
            try:
                good, value = pipes[rank].recv()
            except EOFError:
                processes[rank].join(5)
                good, value = (
                    False,
                    f"died with exit code {processes[rank].exitcode}\n{_stack(processes[rank], folder / str(rank))}",
                )
            if good:
                results[rank] = value
            else:
                faults[rank] = value + _written(folder / f"{rank}.out")
                grace = grace or time.monotonic() + 15
        if waiting and (time.monotonic() > deadline or (grace and time.monotonic() > grace)):
            for rank in waiting:
                stack = _stack(processes[rank], folder / f"{rank}")
                faults[rank] = f"did not finish; its stack:\n{stack}{_written(folder / f'{rank}.out')}"
            break
    for process in processes:
        if faults:
            process.kill()
        process.join(10)
    if faults:
        # In the order in which they were noticed: what the others say is often only that a peer is gone.
        raise AssertionError("\n".join(f"--- rank {rank}: {text}" for rank, text in faults.items()))
    return results


def _stack(process: Any, file: Path) -> str:
    if process.is_alive():
        os.kill(process.pid, signal.SIGUSR1)
        # The handler writes at once, but the process has to be scheduled.
        end = time.monotonic() + 5
        while time.monotonic() < end and not (file.exists() and file.read_text()):
            time.sleep(0.1)
        time.sleep(0.2)
    return file.read_text() if file.exists() else "(no stack)"


def _written(file: Path) -> str:
    text = file.read_text(errors="replace") if file.exists() else ""
    return f"\nits output:\n{text}" if text else ""


def _rank_main(fn: Any, rank: int, world_size: int, port: int, file: str, sender: Any, args: tuple[Any, ...]) -> None:
    import torch
    import torch.distributed as dist

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(world_size))
    # The store lives in the parent: every rank is its client, as under torchrun's agent.
    os.environ.update(LOCAL_RANK=str(rank), TORCHELASTIC_USE_AGENT_STORE="True", TORCHELASTIC_RESTART_COUNT="0")
    output = os.open(f"{file}.out", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream, number in ((sys.stdout, 1), (sys.stderr, 2)):
        stream.flush()
        os.dup2(output, number)
    # The fork server's own streams may be captured ones.
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    stacks = open(file, "w")  # noqa: SIM115
    faulthandler.register(signal.SIGUSR1, file=stacks)
    faulthandler.enable(file=stacks)
    torch.set_num_threads(1)
    try:
        dist.init_process_group("gloo", rank=rank, world_size=world_size)
        value = fn(rank, world_size, *args)
        dist.barrier()
        dist.destroy_process_group()
        sender.send((True, value))
    except BaseException:
        sender.send((False, traceback.format_exc()))
    finally:
        sender.close()
