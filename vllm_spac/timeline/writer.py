"""Saves the timeline of a running engine to a file."""

from __future__ import annotations

from pathlib import Path

from vllm_spac.errors import ConfigError
from vllm_spac.system.atomic_write import check_replaceable
from vllm_spac.system.untrusted import read_header
from vllm_spac.timeline.recorder import Timeline, capacity_of
from vllm_spac.timeline.recording import FORMAT, Facts, Recording


class TimelineWriter:
    """A timeline of the last steps, and the file that it is saved in.

    Args:
        path: the file; an existing one is replaced at ``save``.
        facts: the model.
        steps: number of steps to keep; fewer are kept where steps have many waves or loads.

    Attributes:
        timeline: records the events.
    """

    def __init__(self, path: Path, facts: Facts, steps: int) -> None:
        self.path, self._facts, self._steps = path, facts, steps
        self.timeline = Timeline(capacity_of(steps, len(facts.layers)))

    def save(self) -> Path:
        """Writes the last steps, atomically; recording continues. An existing file stays until there is a step.

        Raises:
            ConfigError: the file cannot be written.
        """
        recording = Recording.of(self.timeline, self._facts, self._steps)
        if len(recording.start) or not self.path.exists():
            recording.save(self.path)
        return self.path


def check_target(path: Path) -> None:
    """Checks, before a run, that a timeline can be written to ``path``.

    Raises:
        ConfigError: it cannot be written, or it would replace a file that is no timeline.
    """
    try:
        check_replaceable(path)
        if not path.exists() or (path.is_file() and path.stat().st_size == 0):
            return
        if path.is_file() and read_header(path)[0].get("format") == FORMAT:
            return
    except OSError as error:
        raise ConfigError(f"the timeline {path} cannot be written: {error.strerror}; name another file") from error
    except ValueError:  # no timeline
        pass
    raise ConfigError(f"the timeline {path} would replace a file that is no timeline; name another file")
