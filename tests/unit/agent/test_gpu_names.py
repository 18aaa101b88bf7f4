"""Canonical type names of GPUs, from product names and memory sizes (MiB) as NVML reports them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outerproduct_agent.gpu_names import canonical_type, mig_profile, mig_type


@pytest.mark.parametrize(
    ("product_name", "memory_mib", "expected"),
    [
        # Ampere data centre
        ("NVIDIA A100-SXM4-40GB", 40960, "A100-40GB"),
        ("NVIDIA A100-SXM4-80GB", 81920, "A100-80GB"),
        ("NVIDIA A100 80GB PCIe", 81920, "A100-80GB"),
        ("NVIDIA A100-PCIE-40GB", 40960, "A100-40GB"),
        ("A100-SXM4-40GB", 40536, "A100-40GB"),
        ("NVIDIA A100-SXM-64GB", 65536, "A100-64GB"),
        ("NVIDIA A800-SXM4-80GB", 81920, "A800-80GB"),
        ("NVIDIA A800 40GB Active", 40960, "A800-40GB"),
        ("NVIDIA A10", 23028, "A10"),
        ("NVIDIA A10G", 23028, "A10G"),
        ("NVIDIA A16", 15356, "A16"),
        ("NVIDIA A2", 15356, "A2"),
        ("NVIDIA A30", 24576, "A30"),
        ("NVIDIA A40", 46068, "A40"),
        # Ada
        ("NVIDIA L4", 23034, "L4"),
        ("NVIDIA L40", 46068, "L40"),
        ("NVIDIA L40S", 46068, "L40S"),
        ("NVIDIA L20", 46068, "L20"),
        # Hopper
        ("NVIDIA H100 80GB HBM3", 81559, "H100"),
        ("NVIDIA H100 PCIe", 81559, "H100"),
        ("NVIDIA H100 NVL", 95830, "H100-94GB"),
        ("NVIDIA H800", 81559, "H800"),
        ("NVIDIA H20", 97871, "H20"),
        ("NVIDIA H200", 143771, "H200"),
        ("NVIDIA H200 NVL", 143771, "H200"),
        ("NVIDIA GH200 480GB", 97871, "GH200"),
        ("NVIDIA GH200 144G HBM3e", 147456, "GH200-144GB"),
        # Blackwell
        ("NVIDIA B200", 183359, "B200"),
        ("NVIDIA GB200", 189471, "GB200"),
        ("NVIDIA B300 SXM6 AC", 275040, "B300"),
        ("NVIDIA GB10", 0, "GB10"),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", 97887, "RTX-PRO-6000"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", 97887, "RTX-PRO-6000"),
        ("NVIDIA GeForce RTX 5090", 32607, "RTX-5090"),
        # Turing, Volta, Pascal, Kepler
        ("Tesla T4", 15360, "T4"),
        ("Tesla V100-SXM2-16GB", 16160, "V100-16GB"),
        ("Tesla V100-SXM2-32GB", 32510, "V100-32GB"),
        ("Tesla V100-PCIE-16GB", 16160, "V100-16GB"),
        ("Tesla V100-DGXS-32GB", 32508, "V100-32GB"),
        ("Tesla V100S-PCIE-32GB", 32510, "V100S"),
        ("Tesla P100-PCIE-16GB", 16280, "P100-16GB"),
        ("Tesla P100-PCIE-12GB", 12198, "P100-12GB"),
        ("Tesla P40", 22919, "P40"),
        ("Tesla P4", 7611, "P4"),
        ("Tesla K80", 11441, "K80"),
        ("Tesla M60", 7680, "M60"),
        # Workstation
        ("NVIDIA RTX 6000 Ada Generation", 49140, "RTX-6000-Ada"),
        ("NVIDIA RTX 4000 SFF Ada Generation", 20475, "RTX-4000-SFF-Ada"),
        ("NVIDIA RTX A6000", 49140, "RTX-A6000"),
        ("NVIDIA RTX A5000", 24564, "RTX-A5000"),
        ("NVIDIA RTX A4000", 16376, "RTX-A4000"),
        ("NVIDIA RTX A2000 12GB", 12282, "RTX-A2000-12GB"),
        ("Quadro RTX 6000", 24576, "Quadro-RTX-6000"),
        ("Quadro RTX 8000", 49152, "Quadro-RTX-8000"),
        ("Quadro P5000", 16384, "Quadro-P5000"),
        # Consumer
        ("NVIDIA GeForce RTX 4090", 24564, "RTX-4090"),
        ("GeForce RTX 4090", 24564, "RTX-4090"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", 16376, "RTX-4090-Laptop"),
        ("NVIDIA GeForce RTX 4080 SUPER", 16376, "RTX-4080-SUPER"),
        ("NVIDIA GeForce RTX 4060 Ti", 8188, "RTX-4060-Ti"),
        ("NVIDIA GeForce RTX 4060 Ti", 16380, "RTX-4060-Ti-16GB"),
        ("NVIDIA GeForce RTX 3090", 24576, "RTX-3090"),
        ("NVIDIA GeForce RTX 3080", 10240, "RTX-3080"),
        ("NVIDIA GeForce RTX 3080", 12288, "RTX-3080-12GB"),
        ("NVIDIA GeForce RTX 3060", 12288, "RTX-3060"),
        ("GeForce RTX 2080 Ti", 11019, "RTX-2080-Ti"),
        ("GeForce RTX 2080 with Max-Q Design", 7982, "RTX-2080-Max-Q"),
        ("NVIDIA GeForce GTX 1060 3GB", 3072, "GTX-1060-3GB"),
        ("GeForce GTX 1080 Ti", 11178, "GTX-1080-Ti"),
        ("NVIDIA TITAN RTX", 24576, "TITAN-RTX"),
        ("TITAN V", 12066, "TITAN-V"),
        # Names that no table knows
        ("NVIDIA Z900 48GB PCIe", 49140, "Z900-48GB"),
        ("NVIDIA Graphics Device", 8192, "Graphics-Device"),
        ("Orin (nvgpu)", 0, "Orin-nvgpu"),
        ("GRID T4-16Q", 16384, "GRID-T4-16Q"),
        ("", 0, "GPU"),
    ],
)
def test_product_names_of_real_gpus(product_name: str, memory_mib: int, expected: str) -> None:
    assert canonical_type(product_name, memory_mib << 20) == expected


def test_the_memory_decides_not_the_name() -> None:
    assert canonical_type("NVIDIA A100-SXM4", 40960 << 20) == "A100-40GB"
    assert canonical_type("NVIDIA A100-SXM4", 81920 << 20) == "A100-80GB"


def test_the_name_decides_where_the_memory_is_unknown() -> None:
    assert canonical_type("NVIDIA A100-SXM4-80GB", 0) == "A100-80GB"


def test_a_size_that_was_never_sold_is_told_as_it_is() -> None:
    assert canonical_type("NVIDIA A100-SXM4", 20 << 30) == "A100-20GB"


def test_mig_devices_are_named_for_their_parent_and_profile() -> None:
    name = "NVIDIA A100-SXM4-40GB MIG 3g.20gb"
    assert canonical_type(name, 40960 << 20) == "A100-40GB"
    assert mig_profile(name) == "3g.20gb"
    assert mig_profile("NVIDIA A100-SXM4-40GB") == ""
    assert mig_type("A100-40GB", "3g.20gb") == "A100-40GB:3g.20gb"


@given(st.text(), st.integers(0, 1 << 40))
def test_any_name_gives_a_word_that_can_be_asked_for(product_name: str, memory_bytes: int) -> None:
    name = canonical_type(product_name, memory_bytes)
    assert name
    assert name.isascii()
    assert not any(character.isspace() or character in ":," for character in name)
