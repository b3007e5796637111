"""Objects of ``torch.save`` in two halves: a pickle, and a file of storages."""
