"""A machine whose seconds are all multiplied by one factor."""
