"""A model behind HTTP on this machine: OpenAI's completions, a page, and a client."""

from labcore.serving.http.client import Answer, ask, running
from labcore.serving.http.server import Server

__all__ = ["Answer", "Server", "ask", "running"]
