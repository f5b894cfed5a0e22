"""The engine: requests, the scheduler, a step's forwards, tokens out as they come."""
