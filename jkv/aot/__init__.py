"""Memory and cost estimates by cross-compilation for accelerators that this machine does not have."""
