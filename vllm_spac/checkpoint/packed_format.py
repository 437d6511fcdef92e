"""How packed experts are written: shared by the store that writes them and the tools that list them, without torch."""

from __future__ import annotations

FORMAT = "spac-expert-1"  # of a file's header; it changes with what the header holds
PAGE = 4096  # alignment that O_DIRECT asks for on every common file system
HEADER = PAGE  # bytes before an expert's data
MARK = "damaged"  # a file in the folder: a read failed since all files were checked
