"""Hooks into torch's tracers, ``torch.save`` and ``torch.load``."""
