"""What torch's tracers, ``torch.save`` and ``torch.load`` are given of ours."""
