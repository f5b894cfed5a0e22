"""A server without a model: workloads, what a step costs, many machines, pictures of a run."""
