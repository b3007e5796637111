"""Objects of ``torch.save`` in two files: a pickle, and a file of storages."""
