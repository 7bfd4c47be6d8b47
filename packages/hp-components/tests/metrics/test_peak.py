"""The peak of a device is found by its name, or not at all."""

import pytest

from hp_components.metrics.peak import peak_tflops


@pytest.mark.parametrize(
    ("device", "tflops"),
    [
        ("NVIDIA H100 80GB HBM3", 989.0),
        ("NVIDIA H100 PCIe", 756.0),
        ("NVIDIA H100 NVL", 835.0),
        ("NVIDIA H200", 989.0),
        ("NVIDIA H20", 148.0),
        ("NVIDIA GH200 480GB", 989.0),
        ("NVIDIA B200", 2250.0),
        ("NVIDIA GB200", 2500.0),
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA A10", 125.0),
        ("NVIDIA L4", 121.0),
        ("NVIDIA L40S", 362.0),
        ("NVIDIA RTX A6000", 154.8),
        ("AMD Instinct MI300X", 1307.4),
        ("Ascend910B3", 313.0),
        ("Ascend910B4-1", 280.0),
    ],
)
def test_the_peak_of_a_device_is_found_by_its_name(device, tflops):
    assert peak_tflops(device) == peak_tflops(device, "float16") == tflops


@pytest.mark.parametrize("device", ["x86_64", "aarch64", "NVIDIA A10G", "NVIDIA A100-SXM4-40GB MIG 1g.5gb", "", "910B"])
def test_it_is_never_guessed(device):
    assert peak_tflops(device) is None


def test_a_device_without_the_type_has_no_peak_for_it():
    assert peak_tflops("Tesla V100-SXM2-16GB") is None
    assert peak_tflops("Tesla V100-SXM2-16GB", "float16") == 125.0
    assert peak_tflops("NVIDIA H100 80GB HBM3", "float32") is None
