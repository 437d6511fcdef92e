"""What a budget costs in quality, and what predictors know; training."""
