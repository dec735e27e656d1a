"""The parts of a step written in C++ for CPUs, built with the compiler of the machine they run on.

`library()` gives the loaded library, or None where it cannot be built; whoever asks has a way without it.
"""

from minivllm.core.native.build import library, why_not

__all__ = ["library", "why_not"]
