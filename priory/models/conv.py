"""Convolution and pooling as slices and matrix products, for XLA's CPU backend.

Inside a loop (`lax.scan`, `lax.map`) that backend runs `lax.conv_general_dilated` on a naive path, some thirty times
slower than outside. Two arrangements avoid it, and the narrower one is taken:

whole patches   every tap's slice side by side, then one product (im2col); the patches are taps x channels wide.
half patches    slices for the taps of all axes but the first, one product with the kernels of all rows at once, and
                the row sums of shifted slices of the result. A 5x5 kernel copies its input 5 times and not 25 times.

Both are plain differentiable code: their gradients are again slices and products, in forward and reverse mode.
"""

import itertools
import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

__all__ = ["SlowConvolutionWarning", "convolve", "halve", "stand_in", "warn_slow"]


class SlowConvolutionWarning(UserWarning):
    """A convolution stays with XLA, which is slow inside a loop on a CPU."""


def convolve(
    x: Array,
    kernel: Array,
    strides: Sequence[int],
    padding: str | Sequence[tuple[int, int]],
    dilation: Sequence[int],
    groups: int = 1,
) -> Array:
    """Return the convolution of `x` (batch, *space, channels) with `kernel` (*window, channels/groups, features).

    The arguments are those of `lax.conv_general_dilated`, channels last: `padding` is "SAME", "VALID" or a pair for
    each axis, and `dilation` is that of the kernel.
    """
    window = kernel.shape[:-2]
    reach = [(size - 1) * step + 1 for size, step in zip(window, dilation, strict=True)]
    pads = lax.padtype_to_pads(x.shape[1:-1], reach, strides, padding) if isinstance(padding, str) else padding
    axes = tuple(
        _Axis(size, stride, step, low, (extent + low + high - span) // stride + 1)
        for size, stride, step, (low, high), extent, span in zip(
            window, strides, dilation, pads, x.shape[1:-1], reach, strict=True
        )
    )
    if min(axis.length for axis in axes) < 1:
        return jnp.zeros((x.shape[0], *(max(axis.length, 0) for axis in axes), kernel.shape[-1]), x.dtype)
    if groups > 1:
        return _grouped(x, kernel, axes, groups)
    return _by_half_patches(x, kernel, axes) if _half_is_narrower(x, kernel, axes) else _by_patches(x, kernel, axes)


@jax.custom_jvp
def halve(x: Array) -> Array:
    """Return the maximum of each 2x2 window of `(batch, height, width, channels)`, without an odd last row or column.

    Inside a loop `reduce_window` and its gradient are slow on a CPU. Where entries of a window tie, the gradient is
    shared evenly among them.
    """
    return _windows(x).max((2, 4))


@halve.defjvp
def _halve_jvp(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    # Entries are compared with each other and never with the maximum: XLA may compute an entry once for the maximum and
    # again for the comparison, round differently, and find no entry that equals it.
    windows = _windows(primals[0])
    beside = windows[:, :, :, :, ::-1]
    row, in_row = jnp.maximum(windows, beside), 1.0 + (windows == beside)
    other, in_other = row[:, :, ::-1], in_row[:, :, ::-1]
    share = _share(windows, beside, 0.5) * _share(row, other, in_row / (in_row + in_other))
    return windows.max((2, 4)), (_windows(tangents[0]) * share.astype(windows.dtype)).sum((2, 4))


def _share(one: Array, other: Array, tied: Array | float) -> Array:
    """Return 1 where it is the larger, 0 where it is the smaller, `tied` where neither is."""
    return jnp.where(one > other, 1.0, jnp.where(one < other, 0.0, tied))


def stand_in(name: str) -> Callable[..., Array]:
    """Return a function to use in place of `lax.conv_general_dilated` inside the Flax layer `name`, channels last.

    What `convolve` does not cover stays with XLA, with a warning when the layer is traced.
    """

    def conv_general_dilated(
        lhs: Array,
        rhs: Array,
        window_strides: Sequence[int],
        padding: Any,
        lhs_dilation: Sequence[int] | None = None,
        rhs_dilation: Sequence[int] | None = None,
        dimension_numbers: lax.ConvDimensionNumbers | None = None,
        feature_group_count: int = 1,
        precision: Any = None,  # products on a CPU know one precision
        **others: Any,
    ) -> Array:
        unknown = {option: value for option, value in others.items() if value is not None}
        if lhs_dilation is not None and any(step != 1 for step in lhs_dilation):
            unknown["input_dilation"] = tuple(lhs_dilation)
        if unknown:
            options = ", ".join(f"{option}={value}" for option, value in unknown.items())
            warn_slow(name, f"{options} has no fast form")
            return lax.conv_general_dilated(
                lhs,
                rhs,
                window_strides,
                padding,
                lhs_dilation=lhs_dilation,
                rhs_dilation=rhs_dilation,
                dimension_numbers=dimension_numbers,
                feature_group_count=feature_group_count,
                precision=precision,
                **others,
            )
        dilation = rhs_dilation or (1,) * len(window_strides)
        return convolve(lhs, rhs, window_strides, padding, dilation, feature_group_count)

    return conv_general_dilated


def warn_slow(name: str, reason: str) -> None:
    """Warn that the layer `name` stays with XLA, and why."""
    warnings.warn(
        f"{name} stays a convolution of XLA, which is slow inside a loop on a CPU: {reason}; use Flax's plain Conv, or "
        "run on an accelerator.",
        SlowConvolutionWarning,
        stacklevel=3,
    )


class _Axis(NamedTuple):
    """One spatial axis: `length` outputs, each of `size` taps; the very first tap lies `low` before the input."""

    size: int
    stride: int
    step: int
    low: int
    length: int

    def window(self, x: Array, axis: int, tap: int) -> Array:
        """Return what the tap sees at each output, zero outside the input."""
        start, span = tap * self.step - self.low, (self.length - 1) * self.stride + 1
        edges = [(0, 0, 0)] * x.ndim
        edges[axis] = (-start, start + span - x.shape[axis], 0)  # negative edges cut
        x = lax.pad(x, jnp.zeros((), x.dtype), edges)
        return x if self.stride == 1 else lax.slice_in_dim(x, 0, span, self.stride, axis)


def _half_is_narrower(x: Array, kernel: Array, axes: tuple[_Axis, ...]) -> bool:
    rows, features = axes[0], kernel.shape[-1]
    width = math.prod(kernel.shape[1:-1])  # of the half patches; all rows' results are rows.size * features wide
    narrower = width + rows.size * features < rows.size * width
    # Products are taken at every input row, so few output rows would mean many in vain.
    return narrower and rows.stride == 1 and 5 * rows.length >= 4 * x.shape[1]


def _by_half_patches(x: Array, kernel: Array, axes: tuple[_Axis, ...]) -> Array:
    rows, features = axes[0], kernel.shape[-1]
    beside = jnp.moveaxis(kernel, 0, -2).reshape(-1, rows.size * features)  # (taps x channels, rows x features)
    products = _product(_patches(x, axes[1:], first=2), beside)
    parts = lax.split(products, [features] * rows.size, axis=products.ndim - 1)
    return sum((rows.window(part, 1, tap) for tap, part in enumerate(parts[1:], start=1)), rows.window(parts[0], 1, 0))


def _by_patches(x: Array, kernel: Array, axes: tuple[_Axis, ...]) -> Array:
    return _product(_patches(x, axes, first=1), kernel.reshape(-1, kernel.shape[-1]))


def _grouped(x: Array, kernel: Array, axes: tuple[_Axis, ...], groups: int) -> Array:
    channels, features = kernel.shape[-2:]
    patches = _patches(x, axes, first=1)
    taps = patches.reshape(*patches.shape[:-1], -1, groups, channels)
    kernels = kernel.reshape(-1, channels, groups, features // groups)
    return jnp.einsum("...tgc,tcgf->...gf", taps, kernels).reshape(*patches.shape[:-1], features)


def _patches(x: Array, axes: tuple[_Axis, ...], first: int) -> Array:
    """Return what all taps see for each output of the axes, counted from `first`: `(..., taps x channels)`."""
    seen = []
    for taps in itertools.product(*(range(axis.size) for axis in axes)):
        slices = x
        for number, (axis, tap) in enumerate(zip(axes, taps, strict=True), start=first):
            slices = axis.window(slices, number, tap)
        seen.append(slices)
    return jnp.concatenate(seen, axis=-1)


def _product(patches: Array, kernel: Array) -> Array:
    """Return `patches @ kernel`, with the kernel as the left operand.

    Differentiated from this side, the kernel's gradient reads the patches as they lie; from the other, XLA first copies
    the transpose of its largest operand.
    """
    flat = patches.reshape(-1, patches.shape[-1])
    out = lax.dot_general(kernel, flat, (((0,), (1,)), ((), ())))
    return out.T.reshape(*patches.shape[:-1], kernel.shape[-1])


def _windows(x: Array) -> Array:
    batch, height, width, channels = x.shape
    x = x[:, : height // 2 * 2, : width // 2 * 2]
    return x.reshape(batch, height // 2, 2, width // 2, 2, channels)
