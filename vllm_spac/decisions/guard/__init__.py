"""Which drafts a step gets, and which requests; whether these pay."""
