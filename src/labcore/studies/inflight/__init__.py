"""The in-flight chapter's simulated servers, and what its figures draw of a run."""
