"""Peak memory and time of a step with whole logits and with ChunkedCELoss, for a large vocabulary.

In: rows, length, width, vocabulary, numbers of chunks. Out: one line per loss: peak of the process above what it held
before the step (on an accelerator: the device's peak), and seconds per step. Each loss runs in a process of its own.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import time

import torch
from torch import nn

from hp_components import BaseLoss, ChunkedCELoss, CrossEntropyLoss

MIB = 2**20


class Model(nn.Module):
    """What a loss sees of a language model: hidden states with a gradient, and a projection."""

    def __init__(self, width: int, vocab_size: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(1024, width)
        self.lm_head = nn.Linear(width, vocab_size, bias=False)

    def forward(self, ids_BS: torch.Tensor, output_fn=None) -> torch.Tensor:  # type: ignore[no-untyped-def]
        hidden_BSD = self.embed(ids_BS)
        return self.lm_head(hidden_BSD) if output_fn is None else output_fn(self.lm_head, hidden_BSD)


def measure(given: argparse.Namespace, chunks: int) -> None:
    """One loss in this process; 0 chunks: whole logits."""
    torch.manual_seed(0)
    device = torch.device(given.device)
    model = Model(given.width, given.vocab_size).to(device, getattr(torch, given.dtype))
    ids_BS = torch.randint(1024, (given.rows, given.length), device=device)
    labels_BS = torch.randint(given.vocab_size, (given.rows, given.length), device=device)
    config = ChunkedCELoss.Config(num_chunks=chunks) if chunks else CrossEntropyLoss.Config()
    loss_fn: BaseLoss = config.build()
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    # A tiny step first: libraries take their own memory at the first product.
    loss_fn.run_model(model, labels_BS[:, :8], ids_BS[:, :8]).backward()
    before, seconds = peak_bytes(device), []
    for _ in range(given.steps):
        started = time.perf_counter()
        loss = loss_fn.run_model(model, labels_BS, ids_BS) / labels_BS.numel()
        loss.backward()
        value = loss.item()
        seconds.append(time.perf_counter() - started)
    name = f"{chunks} chunks" if chunks else "whole logits"
    used = (peak_bytes(device) - before) / MIB
    print(
        f"{name:>13}: peak {used:8.0f} MiB above the model, {min(seconds):6.3f} s per step, loss {value:.6f}",
        flush=True,
    )


def peak_bytes(device: torch.device) -> int:
    if device.type == "cpu":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return int(torch.get_device_module(device).max_memory_allocated(device))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=2)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--vocab-size", type=int, default=65536)
    parser.add_argument("--chunks", type=int, nargs="+", default=[0, 1, 4, 8, 16], help="0: whole logits")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--alone", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.alone is not None:
        measure(given, given.alone)
        return
    whole = given.rows * given.length * given.vocab_size * torch.empty(0, dtype=getattr(torch, given.dtype)).itemsize
    print(f"whole logits of {given.rows} x {given.length} x {given.vocab_size}: {whole / MIB:.0f} MiB in {given.dtype}")
    for chunks in given.chunks:
        subprocess.run([sys.executable, __file__, *sys.argv[1:], "--alone", str(chunks)], check=True)


if __name__ == "__main__":
    main()
