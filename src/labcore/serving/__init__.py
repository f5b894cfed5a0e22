"""In-flight batching: requests, a scheduler, a paged cache, an engine, servers in front of it.

What has a name of its own is here. Modules whose names say little alone are here whole:
`scenarios`, small simulated servers for pictures; `triton_client`, clients of the Triton Inference
Server; `tensorrt_llm`, model repositories for TensorRT-LLM; `tensorrt_lint`, what people get wrong
in them; `pbtxt`, the format of config.pbtxt.
Programs stay in their modules: `labcore.serving.remote.process`, an engine behind a Unix socket,
and `labcore.serving.triton.server`, with `TritonServer`, NVIDIA's server in front of it.
"""

from labcore.serving.cache.blocks import (
    BlockPool,
    NoBlocks,
    blocks_for,
    chain_hashes,
)
from labcore.serving.cache.paged import (
    PagedCache,
)
from labcore.serving.cache.slots import (
    SlotCache,
)
from labcore.serving.engine.clock import (
    Clock,
    ManualClock,
    MonotonicClock,
)
from labcore.serving.engine.engine import (
    Engine,
)
from labcore.serving.engine.metrics import (
    Counters,
    Histogram,
    Observed,
    RequestMetrics,
    Snapshot,
    StepRecord,
    exposition,
    summary,
)
from labcore.serving.engine.outputs import (
    Output,
)
from labcore.serving.engine.plans import (
    Chunk,
    Decode,
    StepPlan,
    StepResult,
)
from labcore.serving.engine.policies import (
    POLICIES,
    VICTIMS,
    Policy,
    choose_victim,
)
from labcore.serving.engine.requests import (
    FINISHES,
    Request,
    State,
)
from labcore.serving.engine.scheduler import (
    QueueFull,
    Scheduler,
)
from labcore.serving.engine.service import (
    Service,
    Stream,
)
from labcore.serving.remote.client import (
    EngineClient,
    EngineError,
    Replies,
    Reply,
)
from labcore.serving.remote.ipc import (
    Backend,
    Listener,
    Overloaded,
    Running,
)
from labcore.serving.remote.supervisor import (
    Part,
    Supervisor,
    SupervisorError,
)
from labcore.serving.simulation import scenarios
from labcore.serving.simulation.agreement import (
    Agreement,
    agreement,
)
from labcore.serving.simulation.costs import (
    CostModel,
    Fit,
    Work,
    fit,
    work,
)
from labcore.serving.simulation.gantt import (
    KINDS,
    Gantt,
    Span,
)
from labcore.serving.simulation.replay import (
    Replay,
    replay,
)
from labcore.serving.simulation.router import (
    ROUTERS,
    LeastLoaded,
    PrefixAware,
    RoundRobin,
    Routed,
    Router,
    route,
)
from labcore.serving.simulation.simulate import (
    CACHED,
    FREE,
    QUEUE_FULL,
    SHARED,
    Run,
    Simulator,
    bootstrap,
    simulate,
)
from labcore.serving.simulation.workload import (
    Workload,
    bursts,
    fixed,
    lognormal,
    long_tail,
    poisson,
    recorded,
)
from labcore.serving.tensorrt import lint as tensorrt_lint
from labcore.serving.tensorrt import llm as tensorrt_llm
from labcore.serving.triton import client as triton_client
from labcore.serving.triton import pbtxt

__all__ = [
    "CACHED",
    "FINISHES",
    "FREE",
    "KINDS",
    "POLICIES",
    "QUEUE_FULL",
    "ROUTERS",
    "SHARED",
    "VICTIMS",
    "Agreement",
    "Backend",
    "BlockPool",
    "Chunk",
    "Clock",
    "CostModel",
    "Counters",
    "Decode",
    "Engine",
    "EngineClient",
    "EngineError",
    "Fit",
    "Gantt",
    "Histogram",
    "LeastLoaded",
    "Listener",
    "ManualClock",
    "MonotonicClock",
    "NoBlocks",
    "Observed",
    "Output",
    "Overloaded",
    "PagedCache",
    "Part",
    "Policy",
    "PrefixAware",
    "QueueFull",
    "Replay",
    "Replies",
    "Reply",
    "Request",
    "RequestMetrics",
    "RoundRobin",
    "Routed",
    "Router",
    "Run",
    "Running",
    "Scheduler",
    "Service",
    "Simulator",
    "SlotCache",
    "Snapshot",
    "Span",
    "State",
    "StepPlan",
    "StepRecord",
    "StepResult",
    "Stream",
    "Supervisor",
    "SupervisorError",
    "Work",
    "Workload",
    "agreement",
    "blocks_for",
    "bootstrap",
    "bursts",
    "chain_hashes",
    "choose_victim",
    "exposition",
    "fit",
    "fixed",
    "lognormal",
    "long_tail",
    "pbtxt",
    "poisson",
    "recorded",
    "replay",
    "route",
    "scenarios",
    "simulate",
    "summary",
    "tensorrt_lint",
    "tensorrt_llm",
    "triton_client",
    "work",
]
