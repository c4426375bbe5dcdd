"""Training what a cache learns: the model is frozen, the arrays of a score are what is trained."""
