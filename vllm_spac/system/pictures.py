"""Begins and saves matplotlib pictures; matplotlib is imported only when one is drawn."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_spac.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def begin_picture(*shape: int, **options: Any) -> tuple[Figure, Any]:
    """Returns a figure and its axes, for a file; arguments as of ``pyplot.subplots``."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot.subplots(*shape, layout="constrained", **options)


def save_picture(figure: Figure, path: Path) -> None:
    """Writes a matplotlib ``figure`` to ``path`` and closes it.

    Raises:
        ConfigError: the file cannot be written, or its suffix names no picture format.
    """
    from matplotlib import pyplot

    try:
        figure.savefig(path, dpi=120)
    except (OSError, ValueError) as error:
        raise ConfigError(f"the picture {path} cannot be written: {error}; name e.g. picture.png") from error
    finally:
        pyplot.close(figure)
