"""Peak arithmetic of known devices, for MFU.

In: a device's product name. Out: its dense peak for bfloat16 and float16 matrix products, from the vendors' data
sheets (without sparsity); None for a device that is not listed, which makes MFU "n/a" instead of wrong.
"""

from __future__ import annotations

__all__ = ["peak_tflops"]

# First match wins: longer names stand before the names they contain.
_BF16_DENSE_TFLOPS = (
    ("B200", 2250.0),
    ("H200", 989.0),
    ("H20", 148.0),
    ("H100 NVL", 835.0),
    ("H100 PCIe", 756.0),
    ("H100", 989.0),
    ("A100", 312.0),
    ("L40S", 362.0),
)


def peak_tflops(device_name: str) -> float | None:
    """TFLOP/s of one device, or None if it is not known."""
    return next((peak for name, peak in _BF16_DENSE_TFLOPS if name in device_name), None)
