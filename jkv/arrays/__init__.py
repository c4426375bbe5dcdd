"""What every room computes with: pytrees, gathers, the parts of a softmax, packed bits."""
