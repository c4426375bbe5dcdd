"""Layers that several model families share: MoE, Mamba-2, gated delta rule."""
