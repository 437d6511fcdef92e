"""What computes the experts that are not brought into fast memory, from where they lie."""
