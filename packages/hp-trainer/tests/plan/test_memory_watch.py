"""What is held and when, on tensors that can be counted by hand."""

from __future__ import annotations

import torch

from hp_trainer.plan.held import Held, Use
from hp_trainer.plan.memory_watch import MemoryWatch


def test_storages_count_once_from_their_making_to_their_end() -> None:
    watch = MemoryWatch()
    with watch.watching():
        watch.mark("making")
        whole = torch.zeros(100)
        view, kept = whole[10:], whole.bfloat16()
        assert watch.held == Held(activations=400 + 200)
        watch.hold(kept, Use.PARAMETERS)
        (whole + 1).sum()  # 400 for a moment, 4 for another
        watch.mark("letting go")
        del whole
        assert watch.held == Held(parameters=200, activations=400)
        del view
        kept.untyped_storage().resize_(20)
        watch.mark("end")
    first, second = watch.intervals[1:]
    assert (first.phase, first.start, first.peak.total, first.end) == (
        "making", Held(), 1004, Held(parameters=200, activations=400),
    )  # fmt: skip
    # What is resized is what FSDP gathers.
    assert second.end == Held(gathered=20)


def test_what_backward_keeps_is_gone_after_it() -> None:
    watch = MemoryWatch()
    weight = torch.ones(10, 10, requires_grad=True)
    with watch.watching():
        output = (torch.zeros(5, 10) @ weight).exp().sum()
        # exp keeps its result, the product its left side.
        assert watch.held.total == 4 * (50 + 50 + 1)
        output.backward()
        del output
        assert watch.held.total == weight.grad.untyped_storage().nbytes()


def test_nothing_of_the_watch_is_left_behind() -> None:
    before = torch.UntypedStorage.resize_
    watch = MemoryWatch()
    with watch.watching():
        assert torch.UntypedStorage.resize_ is not before
    assert torch.UntypedStorage.resize_ is before
    kept = torch.zeros(10)
    assert watch.held == Held()
    assert kept.sum() == 0
