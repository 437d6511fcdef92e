"""Which drafts a step gets, and whether these pay."""
