"""Peak arithmetic of known devices, for MFU.

In: a device's product name. Out: its dense peak for bfloat16 and float16 matrix products, from the vendors' data
sheets (without sparsity); None for a device that is not listed, which makes MFU "n/a" instead of wrong.
"""

from __future__ import annotations

import re

__all__ = ["peak_tflops"]

# Words that the name must hold → TFLOP/s. The entry with the most words that fit wins.
_DENSE_TFLOPS: dict[tuple[str, ...], float] = {
    ("GB300",): 2500.0,
    ("GB200",): 2500.0,
    ("B300",): 2250.0,
    ("B200",): 2250.0,
    ("GH200",): 989.0,
    ("H200",): 989.0,
    ("H200", "NVL"): 835.0,
    ("H100",): 989.0,
    ("H100", "PCIe"): 756.0,
    ("H100", "NVL"): 835.0,
    ("H800",): 989.0,
    ("H800", "PCIe"): 756.0,
    ("H20",): 148.0,
    ("A100",): 312.0,
    ("A800",): 312.0,
    ("A40",): 149.7,
    ("A30",): 165.0,
    ("A10",): 125.0,
    ("L40S",): 362.0,
    ("L40",): 181.0,
    ("L20",): 119.5,
    ("L4",): 121.0,
    ("RTX", "A6000"): 154.8,
    ("MI300X",): 1307.4,
    ("MI325X",): 1307.4,
    # Ascend has sold the 910B in several grades; these are the figures of the servers that hold them.
    ("Ascend910B2",): 376.0,
    ("Ascend910B3",): 313.0,
    ("Ascend910B4",): 280.0,
}
# No bfloat16 in hardware.
_FLOAT16_ONLY_TFLOPS: dict[tuple[str, ...], float] = {("V100",): 125.0, ("V100", "PCIE"): 112.0, ("T4",): 65.0}


def peak_tflops(device_name: str, dtype: str = "bfloat16") -> float | None:
    """TFLOP/s of one device, or None if it is not known.

    Args:
        device_name: as the driver tells it, such as `NVIDIA H100 80GB HBM3` or `Ascend910B3`.
        dtype: what the model computes in: bfloat16 or float16; other types are not listed.
    """
    if dtype not in ("bfloat16", "float16"):
        return None
    known = _DENSE_TFLOPS | _FLOAT16_ONLY_TFLOPS if dtype == "float16" else _DENSE_TFLOPS
    # Whole words: an A100 is no A10, an H200 no H20.
    words = set(re.split(r"[^A-Za-z0-9]+", device_name))
    # A MIG slice calls itself by the name of the whole device.
    fitting = [] if "MIG" in words else [names for names in known if words.issuperset(names)]
    return known[max(fitting, key=len)] if fitting else None
