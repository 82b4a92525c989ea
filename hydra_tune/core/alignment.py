"""Alignment of tensors within a block."""

ALIGNED = 64
"""Bytes. Tensors in a block start at multiples of this, which suits vector instructions and every dtype."""


def aligned(size: int) -> int:
    """Round `size` bytes up to the start of the next tensor in a block."""
    return -(-size // ALIGNED) * ALIGNED
