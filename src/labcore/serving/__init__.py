"""In-flight batching: requests, a scheduler, a paged cache, an engine, servers in front of it.

The folders: `engine` holds the scheduler, the cache and the engine, `simulation` simulated servers
and their load, `http` a server of OpenAI's completions and of a page, and `triton` an engine in a
process of its own behind NVIDIA's Triton Inference Server.
"""

from labcore.serving.engine.blocks import BlockPool
from labcore.serving.engine.cache import PagedCache
from labcore.serving.engine.engine import Engine
from labcore.serving.engine.outputs import Output
from labcore.serving.engine.plan import StepPlan, StepResult
from labcore.serving.engine.request import Request
from labcore.serving.engine.scheduler import POLICIES, QueueFull, Scheduler
from labcore.serving.engine.service import Service, Stream
from labcore.serving.metrics import RequestMetrics, Snapshot
from labcore.serving.simulation.costs import CostModel
from labcore.serving.simulation.replay import replay
from labcore.serving.simulation.router import ROUTERS, route_requests
from labcore.serving.simulation.simulate import simulate
from labcore.serving.simulation.workload import Workload, lognormal, poisson

__all__ = [
    "POLICIES",
    "ROUTERS",
    "BlockPool",
    "CostModel",
    "Engine",
    "Output",
    "PagedCache",
    "QueueFull",
    "Request",
    "RequestMetrics",
    "Scheduler",
    "Service",
    "Snapshot",
    "StepPlan",
    "StepResult",
    "Stream",
    "Workload",
    "lognormal",
    "poisson",
    "replay",
    "route_requests",
    "simulate",
]
