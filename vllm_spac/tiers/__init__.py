"""Where the experts live that are not in fast memory."""
