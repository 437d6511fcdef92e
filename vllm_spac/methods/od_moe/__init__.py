"""OD-MoE: expert workers, and a shadow of the model that predicts."""
