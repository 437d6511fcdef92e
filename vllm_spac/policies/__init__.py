"""Which resident expert makes room for a missing one."""
