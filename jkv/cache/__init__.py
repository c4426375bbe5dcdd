"""Cache data structures: layers and tiers, per-layer config, codec mapping, offloaded pages."""
