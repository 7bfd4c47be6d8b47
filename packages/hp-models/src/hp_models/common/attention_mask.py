"""What each token may attend to, built once per forward, outside the layers.

In: padding mask [B, S] and boundaries of packed documents (host-side ints). Out: a boolean mask [B, 1, S, S],
or None where plain causal attention is meant, which kernels do without a mask; and positions [B, S].
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING

from hp_protocols.platform import F, ops

if TYPE_CHECKING:
    import torch
    from torch import Tensor

__all__ = [
    "check_cu_seqlens",
    "document_starts",
    "make_attention_mask",
    "make_causal_mask",
    "make_position_ids",
    "split_positions",
    "starts_of_positions",
]


def check_cu_seqlens(cu_seqlens: Sequence[int] | Tensor, batch: int, seq_len: int) -> tuple[int, ...]:
    """The boundaries as Python ints: 0 first, B·S last, rising, and a boundary wherever a row ends.

    Raises:
        ValueError: they are not that, or they lie on a device, where reading them would stall it.
    """
    if isinstance(cu_seqlens, ops.Tensor):
        if cu_seqlens.device.type != "cpu":
            raise ValueError(
                f"cu_seqlens lies on {cu_seqlens.device}: document boundaries are read on the host; "
                "pass a list of ints or a CPU tensor"
            )
        cu_seqlens = cu_seqlens.tolist()
    bounds = tuple(int(bound) for bound in cu_seqlens)
    total = batch * seq_len
    rises = all(left < right for left, right in itertools.pairwise(bounds))
    if len(bounds) < 2 or bounds[0] != 0 or bounds[-1] != total or not rises:
        raise ValueError(
            f"cu_seqlens {_short(bounds)} are no document boundaries of {batch} x {seq_len} tokens: "
            f"they start at 0, rise, and end at {total}"
        )
    crossed = sorted(set(range(seq_len, total, seq_len)).difference(bounds))
    if crossed:
        raise ValueError(
            f"cu_seqlens {_short(bounds)}: a document crosses the row end at token {crossed[0]}; rows are "
            f"{seq_len} tokens long and attention stays within a row, so every multiple of {seq_len} is a boundary"
        )
    return bounds


def document_starts(bounds: Sequence[int], batch: int, seq_len: int, device: torch.device) -> Tensor:
    """For each token, the place in its row [B, S] at which its document starts."""
    bounds_N = ops.tensor(list(bounds), dtype=ops.int64, device=device)
    token_T = ops.arange(batch * seq_len, device=device)
    start_T = bounds_N[ops.bucketize(token_T, bounds_N, right=True) - 1]
    return start_T.view(batch, seq_len) % seq_len


def split_positions(position_ids: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """Text positions [B, S], which tell documents apart, and the positions that turn queries and keys.

    Of [B, S] both are the same; of [4, B, S] text is the first row; [3, B, S] says nothing of documents.
    """
    if position_ids is None or position_ids.dim() == 2:
        return position_ids, position_ids
    if position_ids.shape[0] == 4:
        return position_ids[0], position_ids[1:]
    return None, position_ids


def starts_of_positions(position_BS: Tensor) -> Tensor:
    """As `document_starts`, for documents that start wherever a position is not the previous one plus one."""
    place_S = ops.arange(position_BS.shape[1], device=position_BS.device)
    goes_on_BS = F.pad(position_BS[:, 1:] == position_BS[:, :-1] + 1, (1, 0))
    return place_S.masked_fill(goes_on_BS, 0).cummax(dim=1).values


def make_position_ids(starts_BS: Tensor | None, batch: int, seq_len: int, device: torch.device) -> Tensor:
    """Positions [B, S] that count from 0 in every row, or in every document where its starts are given."""
    position_1S = ops.arange(seq_len, device=device).unsqueeze(0)
    return position_1S.expand(batch, seq_len) if starts_BS is None else position_1S - starts_BS


def make_attention_mask(padding_BS: Tensor | None, starts_BS: Tensor | None) -> Tensor | None:
    """The boolean mask [B, 1, S, S] (query, key), or None for plain causal attention.

    A query sees the keys up to itself that are not padding and belong to its document. A padding token sees at
    least itself: a row without any key would be NaN, and its gradient too.
    """
    given = padding_BS if padding_BS is not None else starts_BS
    if given is None:
        return None
    seq_len = given.shape[1]
    position_S = ops.arange(seq_len, device=given.device)
    query_S1, key_1S = position_S.unsqueeze(1), position_S.unsqueeze(0)
    mask_BSS = make_causal_mask(seq_len, given.device).squeeze(1)
    if padding_BS is not None:
        mask_BSS = mask_BSS & (padding_BS.bool().unsqueeze(1) | (key_1S == query_S1))
    if starts_BS is not None:
        # Keys before the query's document start belong to earlier documents.
        mask_BSS = mask_BSS & (key_1S >= starts_BS.unsqueeze(2))
    return mask_BSS.unsqueeze(1)


def make_causal_mask(seq_len: int, device: torch.device) -> Tensor:
    """The boolean mask [1, 1, S, S] by which each query sees the keys up to itself."""
    position_S = ops.arange(seq_len, device=device)
    return (position_S.unsqueeze(0) <= position_S.unsqueeze(1)).unsqueeze(0).unsqueeze(0)


def _short(bounds: Sequence[int]) -> str:
    return str(list(bounds)) if len(bounds) <= 8 else f"[{', '.join(map(str, bounds[:8]))}, … {len(bounds)} in all]"
