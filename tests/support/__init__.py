"""What tests share: tiny models, runs of the catalogue's compositions, and results computed by other means."""
