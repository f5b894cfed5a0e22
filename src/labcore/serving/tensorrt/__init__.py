"""Model repositories for TensorRT-LLM behind the Triton Inference Server, written and checked."""
