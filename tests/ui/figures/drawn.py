"""What the tests of figures ask of a drawn figure."""

from __future__ import annotations

import plotly.graph_objects as go

from labcore.ui import twin
from labcore.ui.compact import dumps


def packed(figure: go.Figure) -> int:
    """Bytes that the figure takes on the static page."""
    return len(dumps(twin.still(figure.to_plotly_json(), alt="x")))
