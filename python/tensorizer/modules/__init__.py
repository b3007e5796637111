"""The tensors of ``torch.nn.Module``."""
