"""Constants of the packed-expert format, shared by the store and the tools that list it; imports no torch."""

from __future__ import annotations

FORMAT = "spac-expert-1"  # of a file's header; changes with the header's content
PAGE = 4096  # alignment that O_DIRECT requires on every common file system
HEADER = PAGE  # bytes before an expert's data
MARK = "damaged"  # a file in the folder: a read failed since all files were checked
MODEL = "model"  # a file in the folder: the name of the model whose experts these are, as it was served first
