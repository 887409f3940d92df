"""What peers have published of whole layers at the bench's sizes, in TFLOP/s, beside which a model's figures stand.

Operations are counted as everywhere: 6, 12 and 18 times T·K·H·I for forward, backward and both. They are other people's
measurements, on other machines than whoever runs this has.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple


class Published(NamedTuple):
    """TFLOP/s of both directions; ``of``: whose, on what, and where it stands."""

    forward: float
    backward: float
    of: str


SONIC = "SonicMoE on an H100 (arXiv 2512.14080, figure 14)"
LIGER = "Liger-Kernel's Triton experts on an H100 (its benchmark data)"
LIGER_CUTE = "Liger-Kernel's CUTLASS experts on an H200, 8,192 tokens (its README)"

# The fastest of each size; none of OLMoE and DeepSeek-V3 is known.
BEST: Mapping[str, Published] = MappingProxyType(
    {
        "qwen3-30b": Published(337, 242, LIGER),
        "mixtral": Published(613, 406, LIGER_CUTE),
        "fine": Published(338, 366, SONIC),
        "30b": Published(502, 511, SONIC),
    }
)
