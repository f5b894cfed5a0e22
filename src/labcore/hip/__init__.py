"""FlashAttention's forward in HIP, in steps, and the machine on which it runs without a GPU.

`source/` holds the kernels; `emulate` runs them on the CPU and counts what a GPU would do.
"""

from labcore.hip.emulate import Counters, Emulated, EmulationError, Program, forward, load

__all__ = ["Counters", "Emulated", "EmulationError", "Program", "forward", "load"]
