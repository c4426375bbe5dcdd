"""Common to all rooms: pytrees, gathers, the Partial of a softmax, packed bits."""
