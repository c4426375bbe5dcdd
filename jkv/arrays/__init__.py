"""Array utilities: pytree dataclasses, gathers, online softmax, bit packing, small matmuls."""
