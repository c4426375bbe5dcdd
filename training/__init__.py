"""Training of the weights that cache methods need: the model is frozen, only a score's arrays are trained."""
