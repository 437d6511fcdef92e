"""How many drafts a step gets."""
