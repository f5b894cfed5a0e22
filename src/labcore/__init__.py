"""Training and serving large language models: the tested package behind the course."""

from labcore import device as _device

__all__ = ["__version__"]
__version__ = "0.2.0"

# Triton reads its interpreter flag on its first import, so this must run before any topic loads.
_device.prepare_interpreter()
