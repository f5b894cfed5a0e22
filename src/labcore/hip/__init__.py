"""FlashAttention's forward pass in HIP, built up in steps, and an emulator to run it without a GPU.

The kernels are in `source/`. `emulate` runs them on the CPU and counts what a GPU would do.
"""

from labcore.hip.emulate import Emulated, EmulationError, LaunchCounters, Program, forward, load

__all__ = ["Emulated", "EmulationError", "LaunchCounters", "Program", "forward", "load"]
