# SPDX-License-Identifier: Apache-2.0
"""Rows of different lengths in one tensor: all of them end at the right, like a batch that is padded on the left."""

import torch


# Devices to which a copy of pageable memory may return before it is done, with its source free to go.
COPIES_WITHOUT_SYNC = {"cuda"}


def on_device(values, device: torch.device, dtype: torch.dtype | None = None) -> torch.Tensor:
    """
    Numbers of the host as a tensor on a device. A plain `torch.tensor(..., device="cuda")` waits until the device has
    done all that was started before; this does not.

    Args:
        values (number, or nested lists of numbers)
        device (`torch.device`): Where they go.
        dtype (`torch.dtype`, *optional*): Defaults to what `torch.tensor` infers.
    """
    tensor = torch.tensor(values, dtype=dtype, device="cpu")
    return tensor.to(device, non_blocking=device.type in COPIES_WITHOUT_SYNC)


def additive_mask(allowed: torch.BoolTensor, dtype: torch.dtype) -> torch.FloatTensor:
    """
    Zeros where attention is allowed, and the lowest number elsewhere. Rows begin at multiples of 8 entries: fused
    kernels copy other masks first.

    Args:
        allowed (`torch.BoolTensor` of shape `(..., K)`)
        dtype (`torch.dtype`): Of the mask.
    """
    length = allowed.shape[-1]
    shape = *allowed.shape[:-1], length + -length % 8
    mask = torch.full(shape, torch.finfo(dtype).min, dtype=dtype, device=allowed.device)[..., :length]
    return mask.masked_fill_(allowed, 0)


def right_index(lengths: torch.LongTensor, width: int) -> torch.LongTensor:
    """
    Which entry of each row stands in which column.

    Args:
        lengths (`torch.LongTensor` of shape `(B,)`): Of the rows.
        width (`int`): Columns.

    Returns:
        `torch.LongTensor` of shape `(B, width)`: Indices into the rows; negative ones are padding.
    """
    return torch.arange(width, device=lengths.device) - width + lengths[:, None]


def align_right(entries: torch.Tensor, lengths: torch.LongTensor, width: int) -> torch.Tensor:
    """
    Moves rows that begin at the left to where they end at the right.

    Args:
        entries (`torch.Tensor` of shape `(..., B, L)`): Row `b` has `lengths[b]` entries at the left.
        lengths (`torch.LongTensor` of shape `(B,)`): At most `L` each, on the same device.
        width (`int`): Columns of the result. Longer rows lose their beginning.

    Returns:
        `torch.Tensor` of shape `(..., B, width)`: With zeros in front of shorter rows.
    """
    source = right_index(lengths, width)
    shape = (*entries.shape[:-2], *source.shape)
    moved = entries.expand(*shape[:-1], -1).gather(-1, source.clamp(min=0).expand(shape))
    return moved.masked_fill(source < 0, 0)


def stack_right(rows: list[list[int]], device: torch.device) -> torch.LongTensor:
    """Lists of numbers as a tensor `(B, length of the longest)`, with zeros in front of shorter ones."""
    width = max(map(len, rows))
    return on_device([[0] * (width - len(row)) + row for row in rows], device, dtype=torch.long)


def flat_indices(indices: torch.LongTensor, shape) -> torch.LongTensor:
    """
    Where the entries `(B, K)` of states of a `shape` `(B, H, S, ...)` are when these dimensions are flattened,
    `(B * H * K,)`. With them `index_select` copies whole vectors, which `gather` does number by number.
    """
    batch_size, num_heads, num_entries = shape[:3]
    first = torch.arange(batch_size * num_heads, device=indices.device).view(batch_size, num_heads, 1) * num_entries
    return (first + indices[:, None]).flatten()


def take_rows(states: torch.Tensor, indices: torch.LongTensor) -> torch.Tensor:
    """Vectors `(B, K, D)` of `states` `(B, S, D)` at `indices` `(B, K)`."""
    flat = flat_indices(indices, states[:, None].shape)
    return states.flatten(0, 1).index_select(0, flat).view(*indices.shape, -1)
