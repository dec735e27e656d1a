"""The C++ path for CPUs: paged attention, packed GEMMs and a Llama-like decoder, compiled on the machine they run on.

`library()` returns the loaded library, or None where it cannot be built. Every caller has a fallback without it.
"""

from minivllm.core.native.build import library, why_not

__all__ = ["library", "why_not"]
