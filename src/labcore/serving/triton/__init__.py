"""NVIDIA's Triton Inference Server in front of the engine."""
