"""Image corruptions in five severities, after Hendrycks and Dietterich, ICLR 2019, arXiv:1903.12261 (their CIFAR-10-C).

Each takes float images in [0, 1] of shape (rows, height, width, channels), a severity index from 0 and a generator,
and returns images that may leave [0, 1]. Differs from the paper: brightness is added to the channels and not to the
HSV value; blur is the Gaussian one; JPEG quantises every channel as luminance, without chroma subsampling.
"""

from collections.abc import Callable

import numpy as np

__all__ = ["CORRUPTIONS"]

Corruption = Callable[[np.ndarray, int, np.random.Generator], np.ndarray]

# The luminance table of the JPEG standard (ITU-T T.81, table K.1), for pixels of 0 to 255.
LUMINANCE = np.array(
    [
        [16, 11, 10, 16, 24, 40, 51, 61],
        [12, 12, 14, 19, 26, 58, 60, 55],
        [14, 13, 16, 24, 40, 57, 69, 56],
        [14, 17, 22, 29, 51, 87, 80, 62],
        [18, 22, 37, 56, 68, 109, 103, 77],
        [24, 35, 55, 64, 81, 104, 113, 92],
        [49, 64, 78, 87, 103, 121, 120, 101],
        [72, 92, 95, 98, 112, 100, 103, 99],
    ],
    np.float32,
)


def _none(x: np.ndarray, severity: int, rng: np.random.Generator) -> np.ndarray:
    del severity, rng
    return x


def _noise(x: np.ndarray, severity: int, rng: np.random.Generator) -> np.ndarray:
    return x + (0.04, 0.06, 0.08, 0.09, 0.10)[severity] * rng.standard_normal(x.shape, np.float32)


def _blur(x: np.ndarray, severity: int, rng: np.random.Generator) -> np.ndarray:
    from scipy.ndimage import gaussian_filter

    del rng
    width = (0.4, 0.6, 0.7, 0.8, 1.0)[severity]
    return gaussian_filter(x, sigma=(0.0, width, width, 0.0), mode="nearest")


def _contrast(x: np.ndarray, severity: int, rng: np.random.Generator) -> np.ndarray:
    del rng
    mean = x.mean(axis=(1, 2), keepdims=True)
    return (x - mean) * (0.75, 0.5, 0.4, 0.3, 0.15)[severity] + mean


def _brightness(x: np.ndarray, severity: int, rng: np.random.Generator) -> np.ndarray:
    del rng
    return x + (0.05, 0.1, 0.15, 0.2, 0.3)[severity]


def _pixelate(x: np.ndarray, severity: int, rng: np.random.Generator) -> np.ndarray:
    del rng
    ratio = (0.95, 0.9, 0.85, 0.75, 0.65)[severity]
    rows, columns = (_shrink_and_stretch(size, max(1, int(size * ratio))) for size in x.shape[1:3])
    return np.einsum("ih,nhwc,jw->nijc", rows, x, columns, optimize=True)


def _jpeg(x: np.ndarray, severity: int, rng: np.random.Generator) -> np.ndarray:
    from scipy.fft import dctn, idctn

    del rng
    quality = (80, 65, 58, 50, 40)[severity]
    percent = 5000 / quality if quality < 50 else 200 - 2 * quality
    table = np.clip(np.floor((LUMINANCE * percent + 50) / 100), 1, 255)[:, None, :, None]
    number, height, width, channels = x.shape
    padded = np.pad(255 * x - 128, ((0, 0), (0, -height % 8), (0, -width % 8), (0, 0)), mode="edge")
    blocks = padded.reshape(number, padded.shape[1] // 8, 8, padded.shape[2] // 8, 8, channels)
    coefficients = np.round(dctn(blocks, axes=(2, 4), norm="ortho") / table) * table
    restored = idctn(coefficients, axes=(2, 4), norm="ortho").reshape(padded.shape)
    return ((restored + 128) / 255)[:, :height, :width]


def _shrink_and_stretch(size: int, small: int) -> np.ndarray:
    """Return the (size, size) matrix that averages pixels into `small` boxes and repeats each box to the old size."""
    edges = np.arange(small + 1) * size / small
    pixel = np.arange(size)
    overlap = np.minimum(edges[1:, None], pixel + 1) - np.maximum(edges[:-1, None], pixel)
    box = np.clip(overlap, 0, None)
    box /= box.sum(axis=1, keepdims=True)
    nearest = ((pixel + 0.5) * small / size).astype(int)
    return box[nearest].astype(np.float32)


CORRUPTIONS: dict[str, Corruption] = {
    "none": _none,
    "noise": _noise,
    "blur": _blur,
    "contrast": _contrast,
    "brightness": _brightness,
    "pixelate": _pixelate,
    "jpeg": _jpeg,
}
