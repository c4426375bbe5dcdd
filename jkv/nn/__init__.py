"""Networks that methods train, as flax modules. Imported only where weights are made or read."""
