"""Which drafts a step gets, and whether they pay."""
