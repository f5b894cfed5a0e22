"""Train, measure, export and serve a language model of your own: `python -m labcore.capstone`."""

from __future__ import annotations

import argparse
import asyncio
import io
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from labcore.capstone.draft import PLAIN, Speed, prompts_of
from labcore.capstone.plan import Choices, held, predicted
from labcore.capstone.project import Project
from labcore.capstone.scaling import scaling_law
from labcore.capstone.training import Moment, Run
from labcore.checks import positive
from labcore.decoding import Proposer
from labcore.decoding.eagle import Eagle, EagleHead
from labcore.device import default_device
from labcore.serving import Engine
from labcore.serving.http import Server

TOLD_EVERY = 5.0  # seconds
DRAFTS = (PLAIN, "n-grams", "EAGLE")
MIB = 1 << 20


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program; return 0, 2 for what can't be done, and 130 if it was interrupted."""
    told = _parser().parse_args(arguments)
    if isinstance(sys.stdout, io.TextIOWrapper):  # names of files may have any characters
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        if not 0 <= told.port < 2**16:
            raise ValueError(f"port must be from 0 to 65535, got {told.port}")
        if told.serve:
            socket.create_server(("127.0.0.1", told.port)).close()  # or it would fail much later
        if not (told.folder / "plan.json").is_file():
            say(f"Planning ({told.minutes:g} min): reads the text, times some training steps")
        project = Project.open(
            told.folder,
            minutes=told.minutes,
            text=told.text,
            choices=Choices(
                optimizer=told.optimizer,
                eps=told.eps,
                clip=told.clip or None,
                shuffle=told.shuffle,
                spike=told.spike,
                seed=told.seed,
            ),
            memory=told.memory and int(positive("memory", told.memory) * MIB),
        )
        run, head, found = _made(project)
        if told.serve:
            _serve(project, run, head, found, told)
    except (OSError, ValueError) as problem:
        sys.stderr.write(f"{problem}\n")
        return 2
    except KeyboardInterrupt:
        say("Stopped. Run the same command again to resume.")
        return 130
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m labcore.capstone", description=__doc__)
    add = parser.add_argument
    add("folder", type=Path, help="folder for the model; an interrupted run there is resumed")
    add("--minutes", type=float, default=10.0, help="time for all but serving; the default is 10")
    add("--text", default="python", help="python, an installed package, or a folder of text files")
    add("--optimizer", default="AdamW", choices=["AdamW", "Lion"], help="the default is AdamW")
    add("--eps", type=float, default=1e-8, help="AdamW's epsilon")
    add("--clip", type=float, default=1.0, help="largest gradient norm; 0: no limit")
    add("--no-shuffle", dest="shuffle", action="store_false", help="read the text in order")
    add("--spike", action="store_true", help="plant noise in the data, to be found")
    add("--seed", type=int, default=0, help="for the weights and the choice of rows")
    add("--memory", type=float, metavar="MIB", help="memory limit of a training step")
    add("--serve", action="store_true", help="serve the model on this machine once it is ready")
    add(
        "--draft",
        choices=DRAFTS,
        help="draft to serve with; by default the fastest, on a GPU none",
    )
    add("--no-graphs", action="store_true", help="on a GPU, serve without CUDA graphs")
    add("--attention", default="auto", choices=["auto", "torch"], help="torch: no Triton kernels")
    add("--port", type=int, default=0, help="port to serve on; by default a free one")
    return parser


def say(text: str) -> None:
    """Write a line at once."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def _made(project: Project) -> tuple[Run, EagleHead, dict[str, Speed]]:
    """Make the model, telling of each decision and what was measured."""
    plan, text = project.plan, project.text
    if project.ends is None:
        say(f"Resuming in {project.folder}")
    say(f"Text: {text.name}, {len(text.train):,} tokens in {len(text.files):,} files")
    say(
        f"Plan: a model of {plan.weights:,} weights ({plan.config.num_hidden_layers} layers of "
        f"width {plan.config.hidden_size}) will read {plan.tokens:,} tokens in {plan.steps:,} "
        f"steps; that's the text {plan.tokens / len(text.train):.1f} times over"
    )
    expected = scaling_law()(plan.weights, plan.tokens)
    say(f"Expected of Python's library: {expected:.2f} bits per byte of held-out text")
    planned, taken = (one(plan, project.choices).total / MIB for one in (predicted, held))
    say(f"Memory of a step: {planned:.0f} MiB predicted, {taken:.0f} MiB measured")
    run = project.train(_Progress(plan.steps))
    for spike in run.spikes:
        (file, rows), *_ = spike.provenance.items()
        jump = f"loss {spike.loss:.2f}, median before {spike.baseline:.2f}"
        whence = f"{rows} of {sum(spike.provenance.values())} rows came from {file}"
        say(f"Spike at step {spike.step + 1}: {jump}; {whence}")
    bits = project.bits_per_byte(run.model)
    off = f"{bits / expected - 1:+.0%} from the expected value"
    say(f"Held-out text: {bits:.2f} bits per byte, {off}")
    say(f"Training a draft, planned for {plan.draft_seconds:.0f} s, and measuring decoding")
    head = project.draft(run.model)
    found = project.speeds(run.model, head)
    for name, one in found.items():
        say(
            f"Decoding on the CPU, {name}: {one.tokens_per_second:.0f} tokens per second, "
            f"{one.over_plain:.2f} times as fast as plain, {one.per_step:.2f} tokens per pass, "
            f"same text for {one.same:.0%} of the prompts"
        )
    measured = {
        "bits per byte of held-out text, expected": round(expected, 3),
        "bits per byte of held-out text": round(bits, 3),
        "memory of a step, predicted, MiB": round(planned, 1),
        "memory of a step, measured, MiB": round(taken, 1),
    }
    say(f"Exported to {project.export(run, found, measured)}")
    return run, head, found


class _Progress:
    """Tells of a step now and then."""

    def __init__(self, steps: int) -> None:
        self.steps, self.told = steps, 0.0

    def __call__(self, moment: Moment) -> None:
        now = time.monotonic()
        if now - self.told > TOLD_EVERY or moment.step + 1 == self.steps:
            self.told = now
            say(
                f"Step {moment.step + 1:,} of {self.steps:,}: loss {moment.loss:.3f}, "
                f"norm {moment.norm:.2f}, {moment.seconds:.2f} s"
            )


def _serve(
    project: Project, run: Run, head: EagleHead, found: dict[str, Speed], told: argparse.Namespace
) -> None:
    text, device = project.text, default_device()
    # On a GPU the speeds, which are a CPU's, say nothing, and graphs need plain steps.
    fastest = max(DRAFTS, key=lambda name: found[name].over_plain)
    draft = told.draft or (fastest if device.type == "cpu" else PLAIN)
    proposers: dict[str, str | Proposer | None] = {"n-grams": "ngram", "EAGLE": Eagle(head)}
    engine = Engine(
        run.model.to(device),
        text.tokenizer,
        proposer=proposers.get(draft),
        graphs=False if told.no_graphs else None,
        attention=told.attention,
    )
    (start,) = prompts_of(text, count=1)
    name, prompt = project.folder.resolve().name, text.tokenizer.decode(start).split("\n", 1)[-1]
    server = Server(engine=engine, name=name, port=told.port, prompt=prompt)
    draft = "without a draft" if draft == PLAIN else f"with {draft} as draft"
    lines = f"Serving {draft}; Ctrl-C stops it: {server.address}\n\n{server.example}"
    try:
        asyncio.run(server.run(lambda: say(lines)))
    except KeyboardInterrupt:
        say("Stopped serving. To serve again, run the same command.")


if __name__ == "__main__":
    sys.exit(main())
