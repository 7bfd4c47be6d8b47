"""Gated DeltaNet beside the torch fallback of transformers: time and memory of forward and backward, paired.

In: sizes of a published model, below as options. Out: the medians of CPU seconds and the peaks of memory as torch's
MemTracker counts them, with their ratios. Rounds alternate, so that a machine whose speed drifts treats both alike.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import nn
from torch.distributed._tools.mem_tracker import MemTracker
from transformers import Qwen3_5TextConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet, torch_chunk_gated_delta_rule

from hp_models.common.delta_rule import gated_delta_rule
from hp_models.qwen3_5_v2 import Qwen3_5StateDictAdapter, get_model_spec

Step = Callable[[], torch.Tensor]


def layers(flavor: str) -> tuple[nn.Module, nn.Module]:
    """Our layer and theirs, with equal weights."""
    config = get_model_spec(flavor).model
    assert config is not None
    theirs = Qwen3_5GatedDeltaNet(Qwen3_5TextConfig(**config.to_hf_config()), 0)
    linear = config.layers[0].linear_attn
    assert linear is not None
    ours = linear.build()
    prefix = "model.layers.0.linear_attn."
    state = Qwen3_5StateDictAdapter(config).from_hf({prefix + name: v for name, v in theirs.state_dict().items()})
    ours.load_state_dict({name.removeprefix("layers.0.linear_attn."): value for name, value in state.items()})
    return ours, theirs


def layer_steps(flavor: str, length: int, dtype: torch.dtype) -> tuple[Step, Step]:
    ours, theirs = (layer.to(dtype) for layer in layers(flavor))
    x = torch.randn(1, length, ours.out_proj.out_features, dtype=dtype)
    return lambda: ours(x.detach().requires_grad_()), lambda: theirs(x.detach().requires_grad_())


def rule_steps(flavor: str, length: int, dtype: torch.dtype) -> tuple[Step, Step]:
    config = get_model_spec(flavor).model
    assert config is not None
    linear = config.layers[0].linear_attn
    assert linear is not None
    keys, heads = (1, length, linear.num_key_heads, linear.key_head_dim), (1, length, linear.num_value_heads)
    inputs = [torch.randn(keys, dtype=dtype), torch.randn(keys, dtype=dtype)]
    inputs += [torch.randn(*heads, linear.value_head_dim, dtype=dtype), -torch.rand(heads), torch.rand(heads)]
    leaves = [value.requires_grad_() for value in inputs]
    return (
        lambda: gated_delta_rule(*leaves)[0],
        lambda: torch_chunk_gated_delta_rule(*leaves, use_qk_l2norm_in_kernel=True)[0],
    )


def seconds(step: Step) -> float:
    began = time.process_time()
    step().float().square().sum().backward()
    return time.process_time() - began


def peak_bytes(step: Step) -> int:
    tracker = MemTracker()
    with tracker:
        step().float().square().sum().backward()
    return sum(snapshot["Total"] for snapshot in tracker.get_tracker_snapshot("peak").values())


def compare(name: str, ours: Step, theirs: Step, rounds: int) -> None:
    for step in (ours, theirs):
        seconds(step)
    times = [(seconds(ours), seconds(theirs)) for _ in range(rounds)]
    mine, other = (statistics.median(column) for column in zip(*times, strict=True))
    memory, other_memory = peak_bytes(ours), peak_bytes(theirs)
    print(f"{name}: {mine:.2f} s, transformers {other:.2f} s: {other / mine:.2f} times as fast")
    print(f"{name}: {memory / 2**20:.0f} MiB, transformers {other_memory / 2**20:.0f} MiB: {memory / other_memory:.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--flavor", default="0.8B", choices=get_model_spec.flavors)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    torch.manual_seed(0)
    dtype = getattr(torch, options.dtype)
    print(f"{options.flavor}, {options.length} tokens, {options.dtype}, {torch.get_num_threads()} threads")
    compare("layer", *layer_steps(options.flavor, options.length, dtype), options.rounds)
    compare("rule ", *rule_steps(options.flavor, options.length, dtype), options.rounds)


if __name__ == "__main__":
    main()
