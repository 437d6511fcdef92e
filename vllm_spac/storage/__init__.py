"""Where experts are stored: disk, host memory, or the slots themselves."""
